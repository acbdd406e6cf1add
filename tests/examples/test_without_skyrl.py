import asyncio

import pytest

from examples.without_skyrl import GRPO_STEPS, advantages, main
from tests.arctic_rl.server.http.serving import serving
from tests.end_to_end.recipes import write_inputs


def test_warm_up_and_grpo_steps_over_http(tmp_path, capsys):
    write_inputs(tmp_path)
    with serving(storage_root=str(tmp_path)) as url:
        curve = asyncio.run(main(str(tmp_path / "model"), url))
    losses = [float(line.rsplit(" ", 1)[-1]) for line in capsys.readouterr().out.splitlines() if "supervised" in line]
    assert losses[-1] < losses[0] - 0.5
    assert len(curve) == GRPO_STEPS
    assert all(0 <= reward <= 1 for reward in curve)


def test_advantages_are_standard_scores_of_each_group():
    rewards = [0.0] * 4 + [1.0] * 4 + [0.5] * 8
    assert advantages(rewards) == pytest.approx([-1.0] * 4 + [1.0] * 4 + [0.0] * 8)
