"""A gradient that is not finite, in real DeepSpeed engines: the update after it is the one without it, bit for bit."""

import dataclasses
import itertools
import math

import pytest
import torch

from integrations.arctic_rl.server.specs import OptimizerSpec
from tests.arctic_rl.processors.helpers import ragged_batch, tiny_model
from tests.arctic_rl.server import update_runs
from tests.arctic_rl.specs import training_spec

pytestmark = pytest.mark.slow

META = {"temperature": 0.8, "max_token_len_per_gpu": 40, "logits_optimization": "memory"}
PROCESSING = {"loss_fn": "grpo", "config": {}}
FALLING = OptimizerSpec(1e-3, (0.9, 0.95), 0.01, 0.5, "linear", 0)
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
SETTINGS = {
    "clipped": {"optimizer": FALLING},
    "not clipped": {"optimizer": dataclasses.replace(FALLING, max_grad_norm=0.0)},
    "offloaded": {"optimizer": FALLING, "deepspeed": OFFLOADED},
}
CASES_OF = {
    1: [(0, "float32", "clipped"), (2, "float32", "not clipped"), (1, "bfloat16", "offloaded")],
    2: [
        (0, "float32", "not clipped"),
        (0, "bfloat16", "clipped"),
        (1, "float32", "clipped"),
        (1, "bfloat16", "not clipped"),
        (2, "float32", "clipped"),
        (2, "bfloat16", "not clipped"),
        (3, "float32", "clipped"),
        (3, "bfloat16", "not clipped"),
        (2, "bfloat16", "offloaded"),
    ],
}
"""Per number of ranks: ZeRO stage, dtype, settings."""
CASES = [(world, *case) for world, cases in CASES_OF.items() for case in cases]


def payload(seed, poison=None):
    """Eight rows; ``poison`` is an advantage of the last one, which the last rank has."""
    batch = ragged_batch(8, seed)
    if poison is not None:
        batch["advantages"][-1] = poison
        batch["loss_mask"][-1, 0] = 1.0
    return update_runs.Payload(batch, META, PROCESSING)


SEQUENCES = {
    "clean": (payload(1), payload(2)),
    "poisoned": (payload(1), payload(3, math.nan), payload(4, math.inf), payload(2)),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipped")
    tiny_model().save_pretrained(folder / "model")

    def spec(stage, dtype, settings):
        changes = {"dtype": dtype, "zero_stage": stage, "zorro_self_check": False, **SETTINGS[settings]}
        return training_spec(folder / "model", **changes)

    def start(world):
        runs = [
            update_runs.Run((*case, name), spec(*case), steps)
            for case in CASES_OF[world]
            for name, steps in SEQUENCES.items()
        ]
        return update_runs.start(runs, world, folder / f"world-{world}")

    contexts = {world: start(world) for world in CASES_OF}
    try:
        return {
            (world, *name): steps
            for world, context in contexts.items()
            for name, steps in update_runs.results(context, folder / f"world-{world}").items()
        }
    finally:
        for process in itertools.chain.from_iterable(context.processes for context in contexts.values()):
            process.kill()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_thrown_away_and_nothing_else_is_changed(outcome, case):
    clean, poisoned = outcome[(*case, "clean")], outcome[(*case, "poisoned")]
    assert [step["skipped"] for step in poisoned] == [False, True, True, False]
    assert [math.isfinite(step["grad_norm"]) for step in poisoned] == [True, False, False, True]
    for step in poisoned[1:3]:
        assert not any(change.any() for change in step["change"].values())
        assert step["lr"] == clean[1]["lr"]
    for ours, theirs in zip((poisoned[0], poisoned[3]), clean, strict=True):
        assert (ours["lr"], ours["grad_norm"], ours["steps"]) == (theirs["lr"], theirs["grad_norm"], theirs["steps"])
        assert ours["scheduler_steps"] == theirs["scheduler_steps"] == ours["steps"]
        for name, change in theirs["change"].items():
            assert change.any(), name
            assert torch.equal(ours["change"][name], change), name
        for name in theirs["moment"]:
            assert torch.equal(ours["moment"][name], theirs["moment"][name]), name
