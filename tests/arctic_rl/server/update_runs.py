"""Training workers in spawned processes: a list of runs, one engine each, and what every step of it did."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from integrations.arctic_rl.server.specs import TrainingSpec
from tests.arctic_rl.gloo_ranks import free_port

HORIZON = 100
"""Optimizer steps of every schedule."""


@dataclass(frozen=True)
class Payload:
    """One call of a backend's ``fwd_bwd``."""

    batch: dict[str, torch.Tensor]
    """All rows."""
    meta: dict[str, Any]
    processing: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One engine and the updates that it takes."""

    name: Any
    spec: TrainingSpec
    steps: tuple[Payload, ...]


def start(runs: list[Run], world_size: int, folder: Path) -> torch.multiprocessing.ProcessContext:
    """Spawn ``world_size`` ranks that work through the runs; ``results`` waits for them."""
    folder.mkdir()
    torch.save(runs, folder / "runs.pt")
    arguments = (world_size, free_port(), str(folder))
    return torch.multiprocessing.spawn(_rank_main, args=arguments, nprocs=world_size, join=False)


def results(context: torch.multiprocessing.ProcessContext, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Per run, per step: ``loss``, ``metrics``, ``lr``, ``grad_norm``, ``skipped``, ``gradient``, ``moment``, AdamW's
    first one, ``change``, ``micro_batches``, ``steps`` and ``scheduler_steps`` so far; ``frozen``, whether what is not
    trained is what it was, bit for bit."""
    while not context.join():
        pass
    return torch.load(folder / "results.pt", weights_only=False)


def _rank_main(rank: int, world_size: int, port: int, folder: str) -> None:
    runs = torch.load(f"{folder}/runs.pt", weights_only=False)
    outcome = {run.name: _take(run, rank, world_size, port, folder) for run in runs}
    torch.distributed.barrier()
    if rank == 0:
        torch.save(outcome, f"{folder}/results.pt")
    torch.distributed.destroy_process_group()


def _take(run: Run, rank: int, world_size: int, port: int, folder: str) -> list[dict[str, Any]]:
    from integrations.arctic_rl.server.training_worker import TrainingWorker
    from tests.arctic_rl.in_process_backend import shards_of

    worker = TrainingWorker(run.spec, rank, world_size, f"{folder}/rank-{rank}.log")
    worker.setup("127.0.0.1", port, HORIZON)
    engine = worker._engine
    count = _count_backward_calls(engine)
    taken = []
    before, momentum, frozen = _weights(worker), None, _frozen(worker)
    for payload in run.steps:
        meta = dict(payload.meta)
        max_tokens = meta.pop("max_token_len_per_gpu")
        shard = shards_of(payload.batch, world_size)[rank]
        count.clear()
        result = worker.run(shard, meta, payload.processing, backward=True, max_tokens_per_mb=max_tokens)
        step = {"loss": result["avg_loss"], "metrics": result["metrics"], "micro_batches": len(count), **worker.step()}
        after, momentum_after = _weights(worker), _state(worker, "exp_avg")
        step["change"] = {name: after[name] - before[name] for name in after}
        step["moment"] = momentum_after
        step["gradient"] = _gradient(momentum, momentum_after, run.spec.optimizer.betas[0])
        step |= {"steps": engine.global_steps, "scheduler_steps": worker._scheduler.last_epoch}
        now = _frozen(worker)
        step["frozen"] = now.keys() == frozen.keys() and all(torch.equal(now[name], frozen[name]) for name in now)
        before, momentum = after, momentum_after
        taken.append(step)
    return taken


def _count_backward_calls(engine: Any) -> list[None]:
    calls: list[None] = []
    backward = engine.backward

    @functools.wraps(backward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return backward(*args, **kwargs)

    engine.backward = counted
    return calls


def _gradient(
    before: dict[str, torch.Tensor] | None, after: dict[str, torch.Tensor], beta: float
) -> dict[str, torch.Tensor]:
    """The gradient that AdamW was given, out of its first moment: m' = beta m + (1 - beta) g."""
    return {
        name: (value if before is None else value - beta * before[name]) / (1 - beta) for name, value in after.items()
    }


def _weights(worker: Any) -> dict[str, torch.Tensor]:
    """The optimizer's float32 weights, whole, by name."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = worker._engine
    if engine.zero_optimization_stage() == 0:
        return _of_replicated(worker, lambda parameter: parameter)
    return {name: safe_get_full_fp32_param(p).clone() for name, p in _trained(worker)}


def _state(worker: Any, key: str) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = worker._engine
    if engine.zero_optimization_stage() == 0:
        return _of_replicated(worker, lambda parameter: worker._optimizer.state[parameter][key])
    return {name: safe_get_full_optimizer_state(p, key).clone() for name, p in _trained(worker)}


def _trained(worker: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in worker._engine.module.named_parameters() if p.requires_grad]


def _frozen(worker: Any) -> dict[str, torch.Tensor]:
    """Whole values of the parameters that are not trained, by name."""
    import deepspeed

    parameters = {name: p for name, p in worker._engine.module.named_parameters() if not p.requires_grad}
    partitioned = worker._engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=partitioned):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _of_replicated(worker: Any, read: Any) -> dict[str, torch.Tensor]:
    """Of ZeRO stage 0: the optimizer holds the parameters in the module's order, or float32 copies of them."""
    names = [name for name, _ in _trained(worker)]
    held = worker._optimizer.param_groups[0]["params"]
    return {name: read(parameter).detach().clone() for name, parameter in zip(names, held, strict=True)}
