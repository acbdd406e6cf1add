"""Where every worker runs: a pure function of what a recipe asks for and what the cluster has."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlacementError


@dataclass(frozen=True)
class Node:
    """One machine of the cluster."""

    node_id: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class ClusterDescription:
    """The machines a run may use, in a stable order."""

    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True)
class PlacementRequest:
    """What a recipe asks for, in processes."""

    policy_ranks: int
    """Training processes of the policy."""
    ref_ranks: int
    """Processes of the reference model; 0 = no reference model."""
    engines: int
    """Sampling engines, each one process."""
    max_cpu_workers: int
    """The most processes that a cluster without GPUs may be given."""
    critic_ranks: int = 0
    """Training processes of the critic; 0 = no critic."""


@dataclass(frozen=True)
class WorkerPlacement:
    """One process: ``device`` is ``"cpu"`` (no reservation is made) or ``"cuda"`` (one GPU is reserved)."""

    job: str
    rank: int
    node_id: str
    device: str


@dataclass(frozen=True)
class PlacementPlan:
    """All processes of a run."""

    workers: tuple[WorkerPlacement, ...]

    def of(self, job: str) -> tuple[WorkerPlacement, ...]:
        return tuple(worker for worker in self.workers if worker.job == job)

    def table(self) -> str:
        """The plan as text, a line a process."""
        rows = [("job", "rank", "node", "device")]
        rows += [(w.job, str(w.rank), w.node_id, w.device) for w in self.workers]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def plan_placement(request: PlacementRequest, cluster: ClusterDescription) -> PlacementPlan:
    """Place every process of a run on a cluster.

    Without GPUs each "GPU" of a recipe is one process with no reservation, all on the first node.

    Raises:
        PlacementError: when the processes do not fit, naming the settings to change.
    """
    if cluster.gpus:
        raise PlacementError(
            f"the cluster has {cluster.gpus} GPUs, and placement on GPUs is not there yet: "
            "hide them with CUDA_VISIBLE_DEVICES='' (ray start --num-gpus=0 on a cluster) to run on CPUs"
        )
    wanted = request.policy_ranks + request.critic_ranks + request.ref_ranks + request.engines
    if wanted > request.max_cpu_workers:
        critic = f"{request.critic_ranks} ranks of the critic, " if request.critic_ranks else ""
        parts = (
            f"{request.policy_ranks} training ranks, {critic}{request.ref_ranks} reference ranks, "
            f"{request.engines} engines"
        )
        raise PlacementError(
            f"the recipe asks for {wanted} worker processes ({parts}) on a cluster without GPUs, more than "
            f"trainer.arctic_rl.max_cpu_workers={request.max_cpu_workers}: lower "
            f"trainer.placement.policy_num_gpus_per_node (and {'critic_num_gpus_per_node, ' if critic else ''}"
            "ref_num_gpus_per_node) and "
            "generator.inference_engine.num_engines, or raise trainer.arctic_rl.max_cpu_workers"
        )
    node = cluster.nodes[0].node_id
    jobs = (
        ("policy", request.policy_ranks),
        ("critic", request.critic_ranks),
        ("ref", request.ref_ranks),
        ("sampling", request.engines),
    )
    return PlacementPlan(
        tuple(WorkerPlacement(job, rank, node, "cpu") for job, count in jobs for rank in range(count))
    )
