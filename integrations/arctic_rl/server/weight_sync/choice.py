"""Which strategy carries the weights: a pure function of the placement and of the setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import UnsupportedError
from ...placement import PlacementPlan

Strategy = Literal["shared_memory", "low_memory", "nccl", "ipc"]
STRATEGIES: tuple[Strategy, ...] = ("shared_memory", "low_memory", "nccl", "ipc")
SETTING = "trainer.arctic_rl.weight_sync"


@dataclass(frozen=True)
class SyncPlan:
    """How the weights of a run travel."""

    strategy: Strategy
    one_node: bool
    """Whether all workers are on the node of the server's own process, so that they can map each other's files."""

    @property
    def vllm_backend(self) -> str | None:
        """The transfer engine that vLLM must be built with, by its name there; None = it needs none."""
        return self.strategy if self.strategy in ("nccl", "ipc") else None


def plan_sync(plan: PlacementPlan, wanted: Strategy | None, *, here: str) -> SyncPlan:
    """Choose a strategy, or check the one that is asked for.

    On CPUs shared memory on one node, else buckets. On GPUs CUDA IPC where every GPU of every engine is a policy
    rank's too; NCCL where the sending rank's GPU is no engine's (NCCL takes a GPU once); else buckets.

    Args:
        plan: where the workers run.
        wanted: ``trainer.arctic_rl.weight_sync``; None = choose.
        here: the node of the server's own process, whose folder in shared memory is used.

    Raises:
        UnsupportedError: for a strategy that this placement does not allow, with those that it does.
    """
    possible = {name: _obstacle(plan, name, here) for name in STRATEGIES}
    if wanted is None:
        order: tuple[Strategy, ...] = ("ipc", "nccl", "low_memory") if _on_gpus(plan) else STRATEGIES
        wanted = next(name for name in order if possible[name] is None)
    elif possible[wanted] is not None:
        allowed = [name for name, obstacle in possible.items() if obstacle is None]
        raise UnsupportedError(
            f"{SETTING}={wanted!r}: {possible[wanted]}; write {' or '.join(allowed)}, or leave it out"
        )
    return SyncPlan(wanted, all(worker.node_id == here for worker in plan.workers))


def _on_gpus(plan: PlacementPlan) -> bool:
    return all(worker.gpus for job in ("policy", "sampling") for worker in plan.of(job))


def _obstacle(plan: PlacementPlan, strategy: Strategy, here: str) -> str | None:
    """Why a placement does not allow a strategy."""
    if strategy == "low_memory":
        return None
    if strategy == "shared_memory":
        workers = [plan.of("policy")[0], *plan.of("sampling")]
        away = [f"{worker.job}-{worker.rank}" for worker in workers if worker.node_id != here]
        return f"{', '.join(away)} would not be on the node of the server's own process" if away else None
    if not _on_gpus(plan):
        return "the policy and the engines must be on GPUs"
    sender, *_ = plan.of("policy")
    of_policy = {place for rank in plan.of("policy") for place in rank.places}
    of_engines = {place for engine in plan.of("sampling") for place in engine.places}
    if strategy == "ipc" and not of_engines <= of_policy:
        alone = len(of_engines - of_policy)
        return f"{alone} of the engines' {len(of_engines)} GPUs have no training rank (trainer.placement.colocate_all)"
    if strategy == "nccl" and of_engines & set(sender.places):
        return "an engine shares the GPU of the policy's first rank, and NCCL takes a GPU once"
    return None
