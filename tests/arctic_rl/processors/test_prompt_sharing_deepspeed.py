"""Real DeepSpeed engines on two ranks that share prompts, a group cut between them, checkpointing on and off: the
update equals that of plain PyTorch on all rows without sharing."""

import pytest
import torch

from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.deepspeed_ranks import STAGES, assert_plain_updates, on_two_ranks
from tests.arctic_rl.processors.helpers import FakeEngine
from tests.arctic_rl.processors.test_prompt_sharing import training_batch
from tests.arctic_rl.zorro.families import family_model

pytestmark = pytest.mark.slow

META = {"temperature": 0.8, "calculate_entropy": True}
PROCESSING = {"loss_fn": "grpo", "config": {"entropy_coeff": 0.01, "use_kl_loss": True}}
ROWS = ([0, 5], [1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
"""The second rank has more micro-batches; groups have rows on both."""


def whole_batch() -> dict[str, torch.Tensor]:
    return training_batch([4, 3, 4], 5)


def run(engine, batch: dict, *, share: bool) -> float:
    meta = META | {"zorro_train_enable": share}
    return run_pipeline(engine, (), batch, meta, PROCESSING, "cpu", max_tokens_per_mb=40)["avg_loss"]


def model_of(stage: int) -> torch.nn.Module:
    model = family_model("qwen3")
    if stage != 2:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": stage == 3})
    return model


def step(engine, rank: int) -> float:
    return run(engine, {name: value[ROWS[rank]] for name, value in whole_batch().items()}, share=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return on_two_ranks(tmp_path_factory.mktemp("deepspeed_sharing"), model_of, step)


@pytest.mark.parametrize("stage", STAGES)
def test_updates_equal_plain_pytorch_without_sharing(ranks: list[dict], stage: int):
    assert sorted(ROWS[0] + ROWS[1]) == list(range(len(whole_batch()["input_ids"])))
    model = family_model("qwen3")
    assert_plain_updates(ranks, stage, model, lambda model: run(FakeEngine(model), whole_batch(), share=False))
