"""Real DeepSpeed engines on two ranks that share prompts, a group cut between them, checkpointing on and off: the
update equals that of plain PyTorch on all rows without sharing."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.helpers import FakeEngine
from tests.arctic_rl.processors.test_prompt_sharing import training_batch
from tests.arctic_rl.zorro.families import family_model

pytestmark = pytest.mark.slow

STAGES = (0, 2, 3)
META = {"temperature": 0.8, "calculate_entropy": True}
PROCESSING = {"loss_fn": "grpo", "config": {"entropy_coeff": 0.01, "use_kl_loss": True}}
UPDATES = 2


def whole_batch() -> dict[str, torch.Tensor]:
    return training_batch([4, 3, 4], 5)


ROWS = ([0, 5], [1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
"""The second rank has more micro-batches; groups have rows on both."""


def run(engine, batch: dict, *, share: bool) -> float:
    meta = META | {"zorro_train_enable": share}
    return run_pipeline(engine, (), batch, meta, PROCESSING, "cpu", max_tokens_per_mb=40)["avg_loss"]


def worker(rank: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    results = {}
    for stage in STAGES:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "managed_gradient_accumulation": False,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        model = family_model("qwen3")
        if stage != 2:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": stage == 3})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(UPDATES):
            loss = run(engine, {name: value[ROWS[rank]] for name, value in whole_batch().items()}, share=True)
            engine.step()
        weights = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
        results[stage] = (loss, weights)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("deepspeed_sharing")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (str(folder), port), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("stage", STAGES)
def test_updates_equal_plain_pytorch_without_sharing(ranks: list[dict], stage: int):
    assert len(whole_batch()["input_ids"]) == 12
    start = {name: parameter.detach().clone() for name, parameter in family_model("qwen3").named_parameters()}
    model = family_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        loss = run(FakeEngine(model), whole_batch(), share=False)
        optimizer.step()
    for rank in ranks:
        result, weights = rank[stage]
        assert result == pytest.approx(loss, rel=1e-5)
        for name, parameter in model.named_parameters():
            change = parameter.detach() - start[name]
            assert (weights[name] - parameter).norm() <= 1e-4 * change.norm(), name
