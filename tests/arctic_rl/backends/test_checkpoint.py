import asyncio
import json

from integrations.arctic_rl.backends.builtin.checkpoints import set_engines


def test_random_states_of_other_engines_are_left_out(tmp_path):
    (tmp_path / "engines.json").write_text(json.dumps([["state of the only one"]]))
    assert asyncio.run(set_engines(None, ["sampling-0", "sampling-1"], tmp_path / "engines.json")) is False
