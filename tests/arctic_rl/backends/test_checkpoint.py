import asyncio
import json

from integrations.arctic_rl.backends.builtin import BuiltinBackend


def test_random_states_of_other_engines_are_left_out(tmp_path, monkeypatch):
    backend = object.__new__(BuiltinBackend)
    monkeypatch.setattr(backend, "_names", lambda job: [f"{job}-0", f"{job}-1"])
    (tmp_path / "engines.json").write_text(json.dumps([["state of the only one"]]))
    assert asyncio.run(backend._set_engines(tmp_path / "engines.json")) is False
