"""Two gloo processes with real DeepSpeed engines that take plain SGD steps, and the weights they end with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.arctic_rl.gloo_ranks import run_two_ranks

STAGES = (0, 2, 3)
UPDATES = 2

Results = dict[int, tuple[float, dict[str, torch.Tensor]]]
"""Last loss and final weights by ZeRO stage."""


def on_two_ranks(folder: Path, model_of: Callable[[int], torch.nn.Module], step: Callable[[Any, int], float]) -> list:
    """:data:`Results` of both ranks.

    Args:
        folder: for the ranks' files.
        model_of: picklable; a stage's model, the same on both ranks.
        step: picklable; gets the engine and the rank, runs backward and returns the loss.
    """
    run_two_ranks(_rank, folder, model_of, step)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_plain_updates(
    ranks: list[Results], stage: int, model: torch.nn.Module, step: Callable[[torch.nn.Module], float]
) -> None:
    """The ranks' losses and weights are those of plain PyTorch on all rows in one process.

    Args:
        model: as the engines' were at the start.
        step: runs backward on all rows and returns the loss.
    """
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        loss = step(model)
        optimizer.step()
    for rank in ranks:
        result, weights = rank[stage]
        assert abs(result - loss) <= 1e-5 * abs(loss)
        for name, parameter in model.named_parameters():
            change = parameter.detach() - start[name]
            assert (weights[name] - parameter).norm() <= 1e-4 * change.norm(), name


def _rank(rank: int, folder: str, model_of: Callable, step: Callable) -> None:
    import deepspeed

    results: Results = {}
    for stage in STAGES:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "managed_gradient_accumulation": False,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        model = model_of(stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(UPDATES):
            loss = step(engine, rank)
            engine.step()
        weights = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
        results[stage] = (loss, weights)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
