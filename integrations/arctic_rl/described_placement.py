"""Where the processes of a recipe would run on the cluster that the recipe itself describes, without any cluster.

The GPUs of ``trainer.placement`` are counted up over its nodes. A rank of the policy or of the reference model takes
one, an engine as many as its parallel sizes say. Colocated, every job starts at the first GPU; else the reference
model follows the policy (or shares its GPUs), then the critic, and the engines come last.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from .errors import PlacementError
from .placement import ClusterDescription, Node, PlacementPlan, placement_request, plan_placement
from .reference_model import reference_is_base
from .server_config import server_config

ROW = ("job", "processes", "GPUs each", "nodes", "GPUs")


@dataclass(frozen=True)
class JobPlan:
    """The processes of one job on consecutive GPUs of the described cluster."""

    job: str
    processes: int
    gpus_each: int
    first_gpu: int
    """Counted over all nodes."""

    @property
    def end_gpu(self) -> int:
        return self.first_gpu + self.processes * self.gpus_each


@dataclass(frozen=True)
class DescribedPlan:
    """All jobs of a recipe, and the nodes that they take."""

    jobs: tuple[JobPlan, ...]
    gpus_per_node: int
    colocated: bool

    @property
    def nodes(self) -> int:
        return -(-max(job.end_gpu for job in self.jobs) // self.gpus_per_node)

    def table(self) -> str:
        """The plan as text, a line a job."""
        rows = [ROW, *(self._row(job) for job in self.jobs)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(ROW))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _row(self, job: JobPlan) -> tuple[str, ...]:
        last = job.end_gpu - 1
        nodes = _range(job.first_gpu // self.gpus_per_node, last // self.gpus_per_node)
        one_node = job.first_gpu // self.gpus_per_node == last // self.gpus_per_node
        gpus = _range(job.first_gpu % self.gpus_per_node, last % self.gpus_per_node) if one_node else "all"
        if not one_node and (job.first_gpu % self.gpus_per_node or job.end_gpu % self.gpus_per_node):
            gpus = f"from {job.first_gpu % self.gpus_per_node} to {last % self.gpus_per_node}"
        return (job.job, str(job.processes), str(job.gpus_each), nodes, gpus)


def described_plan(cfg: Any) -> DescribedPlan:
    """Place a recipe on the cluster that its own settings describe.

    Args:
        cfg: a ``SkyRLTrainConfig`` whose node, GPU and engine counts are at least 1.
    """
    placement, engine = cfg.trainer.placement, cfg.generator.inference_engine
    algorithm = cfg.trainer.algorithm
    policy = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    ref = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    engine_gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    jobs = [JobPlan("policy", policy, 1, 0)]
    if (algorithm.use_kl_loss or algorithm.use_kl_in_reward) and not reference_is_base(cfg.trainer):
        shares = placement.colocate_all or placement.colocate_policy_ref
        jobs.append(JobPlan("ref", ref, 1, 0 if shares else policy))
    if cfg.trainer.critic.model.path:
        critic = placement.critic_num_nodes * placement.critic_num_gpus_per_node
        jobs.append(JobPlan("critic", critic, 1, 0 if placement.colocate_all else max(job.end_gpu for job in jobs)))
    first = 0 if placement.colocate_all else max(job.end_gpu for job in jobs)
    jobs.append(JobPlan("sampling", engine.num_engines, engine_gpus, first))
    return DescribedPlan(tuple(jobs), placement.policy_num_gpus_per_node, placement.colocate_all)


def planned_cluster(cfg: Any) -> ClusterDescription:
    """The cluster of ``trainer.arctic_rl.cluster_gpus``; where it is not given, the fewest nodes that a plan is found
    for, each with the most GPUs that a job or an engine with GPUs of its own asks for on one."""
    given = cfg.trainer.arctic_rl.cluster_gpus
    if given is not None:
        return _cluster(given)
    request = placement_request(server_config(cfg, run_id="", env_vars={}, device="cuda"))
    jobs = ((request.policy_ranks, request.policy_nodes), (request.critic_ranks, request.critic_nodes))
    size = max(ranks // nodes for ranks, nodes in (*jobs, (request.ref_ranks, request.ref_nodes)))
    size = size if request.colocate_all else max(size, request.engine_gpus)
    most = sum(ranks for ranks, _ in jobs) + request.ref_ranks + request.engines
    for count in range(request.policy_nodes, most + 1):
        with contextlib.suppress(PlacementError):
            plan_placement(request, _cluster([size] * count))
            return _cluster([size] * count)
    return _cluster([size] * most)


def _cluster(gpus: list[int]) -> ClusterDescription:
    return ClusterDescription(tuple(Node(f"node {number}", 0, count) for number, count in enumerate(gpus)))


def gpu_plan(cfg: Any) -> PlacementPlan:
    """The plan of a recipe on ``planned_cluster``.

    Raises:
        PlacementError: there is none, with the settings to change.
        UnsupportedError: the recipe asks for something that GPUs are not given for.
    """
    config = server_config(cfg, run_id="", env_vars={}, device="cuda")
    return plan_placement(placement_request(config), planned_cluster(cfg))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
