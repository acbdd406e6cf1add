"""Real DeepSpeed engines on two ranks with unequal rows: the update equals that of plain PyTorch on all rows."""

import pytest
import torch

from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.deepspeed_ranks import STAGES, assert_plain_updates, on_two_ranks
from tests.arctic_rl.processors.helpers import FakeEngine, ragged_batch, tiny_model

pytestmark = pytest.mark.slow

META = {"temperature": 0.8, "logits_optimization": "memory", "calculate_entropy": True}
PROCESSING = {"loss_fn": "grpo", "config": {"entropy_coeff": 0.01, "use_kl_loss": True}}
ROWS = ([0], [1, 2, 3, 4, 5, 6, 7])


def whole_batch() -> dict[str, torch.Tensor]:
    batch = ragged_batch(8, 5)
    batch["loss_mask"][0] = 0
    return batch


def run(engine, batch: dict) -> float:
    return run_pipeline(engine, (), batch, META, PROCESSING, "cpu", max_tokens_per_mb=25)["avg_loss"]


def model_of(stage: int) -> torch.nn.Module:
    return tiny_model()


def step(engine, rank: int) -> float:
    return run(engine, {name: value[ROWS[rank]] for name, value in whole_batch().items()})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return on_two_ranks(tmp_path_factory.mktemp("deepspeed"), model_of, step)


@pytest.mark.parametrize("stage", STAGES)
def test_updates_equal_plain_pytorch(ranks: list[dict], stage: int):
    assert_plain_updates(ranks, stage, tiny_model(), lambda model: run(FakeEngine(model), whole_batch()))
