"""Where every worker runs: a pure function of what a recipe asks for and what the cluster has.

Training ranks take a GPU each, ``<job>_num_gpus_per_node`` of them on each of ``<job>_num_nodes`` different nodes; an
engine takes as many as its parallel sizes say, all on one node. Colocated, jobs share the GPUs of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import PlacementError

if TYPE_CHECKING:
    from .server.specs import ServerConfig

_PLACEMENT = "trainer.placement"
_ENGINE = "generator.inference_engine"


@dataclass(frozen=True)
class Node:
    """One machine of the cluster."""

    node_id: str
    cpus: int
    gpus: int
    address: str = ""

    @property
    def name(self) -> str:
        """How people know it."""
        return self.address or self.node_id


@dataclass(frozen=True)
class ClusterDescription:
    """The machines a run may use, in a stable order."""

    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True)
class PlacementRequest:
    """What a recipe asks for, in processes and GPUs."""

    policy_ranks: int
    """Training processes of the policy, over all nodes."""
    ref_ranks: int
    """Processes of the reference model; 0 = no reference model."""
    engines: int
    """Sampling engines, each one Ray actor."""
    max_cpu_workers: int
    """The most processes that a run on CPUs may be given."""
    critic_ranks: int = 0
    """Training processes of the critic; 0 = no critic."""
    policy_nodes: int = 1
    """Different nodes of the policy's ranks, as many ranks on each."""
    ref_nodes: int = 1
    """The same of the reference model."""
    critic_nodes: int = 1
    """The same of the critic."""
    engine_gpus: int = 1
    """GPUs of one engine: tensor-parallel size x pipeline-parallel size."""
    colocate_all: bool = False
    """Whether all jobs share the policy's GPUs."""
    colocate_policy_ref: bool = False
    """Whether the reference model shares the policy's GPUs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """``cpu`` = processes without a reservation, whatever GPUs there are."""


def placement_request(config: ServerConfig) -> PlacementRequest:
    """The processes that a server config asks for."""
    return PlacementRequest(
        policy_ranks=config.policy_ranks,
        critic_ranks=config.critic_ranks,
        ref_ranks=config.ref_ranks,
        engines=config.engines,
        max_cpu_workers=config.max_cpu_workers,
        policy_nodes=config.policy_nodes,
        critic_nodes=config.critic_nodes,
        ref_nodes=config.ref_nodes,
        engine_gpus=config.sampling.gpus,
        colocate_all=config.colocate_all,
        colocate_policy_ref=config.colocate_policy_ref,
        device=config.policy.device,
    )


@dataclass(frozen=True)
class WorkerPlacement:
    """One worker: ``device`` is ``"cpu"`` (no reservation is made) or ``"cuda"``.

    ``gpus`` counts the GPUs that are taken on the node from 0: workers with equal numbers share a GPU. Which device
    that is, Ray says when the GPUs are reserved.
    """

    job: str
    rank: int
    node_id: str
    device: str
    gpus: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """(node, number of the GPU there) of each GPU."""
        return tuple((self.node_id, gpu) for gpu in self.gpus)


@dataclass(frozen=True)
class PlacementPlan:
    """All processes of a run."""

    workers: tuple[WorkerPlacement, ...]

    def of(self, job: str) -> tuple[WorkerPlacement, ...]:
        return tuple(worker for worker in self.workers if worker.job == job)

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """(node, number there) of each GPU that is taken, once."""
        return tuple(dict.fromkeys(place for worker in self.workers for place in worker.places))

    def tenants(self, place: tuple[str, int]) -> tuple[WorkerPlacement, ...]:
        """The workers on a GPU."""
        return tuple(worker for worker in self.workers if place in worker.places)

    def policy_ranks_of_engines(self) -> dict[int, tuple[int, ...]]:
        """Which ranks of the policy share the GPUs of each engine.

        Returns:
            By the engine's rank, the policy's rank on each of its GPUs, in the order of its own processes; empty for
            an engine that shares none, and on CPUs.
        """
        ranks = {worker.places[0]: worker.rank for worker in self.of("policy") if worker.gpus}
        return {
            engine.rank: tuple(ranks[place] for place in engine.places if place in ranks)
            for engine in self.of("sampling")
        }

    def table(
        self, devices: Mapping[tuple[str, int], str] | None = None, nodes: Mapping[str, str] | None = None
    ) -> str:
        """The plan as text, a line a worker.

        Args:
            devices: names of GPUs by their places; None = their numbers in the plan.
            nodes: names of nodes by their ids; None = the ids.
        """
        rows = [("job", "rank", "node", "devices")]
        for worker in self.workers:
            numbers = [str(gpu) if devices is None else devices[worker.node_id, gpu] for gpu in worker.gpus]
            node = worker.node_id if nodes is None else nodes[worker.node_id]
            rows.append(
                (worker.job, str(worker.rank), node, " ".join([worker.device, *filter(None, [",".join(numbers)])]))
            )
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def plan_placement(request: PlacementRequest, cluster: ClusterDescription) -> PlacementPlan:
    """Place every process of a run on a cluster.

    On CPUs each "GPU" of a recipe is one process with no reservation, all on the first node. On GPUs a plan is found
    wherever there is one; jobs that share nothing are packed onto as few GPUs of a node as can be.

    Raises:
        PlacementError: when the processes do not fit, naming the settings to change, in one line.
    """
    if request.device == "cpu":
        return _plan_on_cpus(request, cluster)
    _check_sharing(request)
    _check_total(request, cluster)
    sites = _find_sites(request, cluster)
    workers = [
        WorkerPlacement(job, rank, cluster.nodes[node].node_id, "cuda", gpus)
        for job in ("policy", "critic", "ref", "sampling")
        for rank, (node, gpus) in enumerate(sites.get(job, []))
    ]
    return PlacementPlan(tuple(workers))


def _plan_on_cpus(request: PlacementRequest, cluster: ClusterDescription) -> PlacementPlan:
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
            f"{_PLACEMENT}.policy_num_gpus_per_node (and {'critic_num_gpus_per_node, ' if critic else ''}"
            "ref_num_gpus_per_node) and "
            f"{_ENGINE}.num_engines, or raise trainer.arctic_rl.max_cpu_workers"
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


@dataclass(frozen=True)
class _Ranks:
    """Training ranks of a job with GPUs of its own."""

    job: str
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


_Site = tuple[int, tuple[int, ...]]
"""Number of a node, and of GPUs on it."""


def _jobs(request: PlacementRequest) -> tuple[_Ranks, ...]:
    """All training jobs, whether they share GPUs or not."""
    counts = (
        ("policy", request.policy_nodes, request.policy_ranks),
        ("critic", request.critic_nodes, request.critic_ranks),
        ("ref", request.ref_nodes, request.ref_ranks),
    )
    return tuple(_Ranks(job, nodes, ranks // nodes) for job, nodes, ranks in counts if ranks)


def _guests(request: PlacementRequest) -> tuple[str, ...]:
    """Training jobs on the policy's GPUs."""
    if request.colocate_all:
        return ("critic", "ref")
    return ("ref",) if request.colocate_policy_ref else ()


def _check_sharing(request: PlacementRequest) -> None:
    """Refuse jobs that are to share GPUs and differ in their number, as SkyRL does."""
    policy, *others = _jobs(request)
    setting = "colocate_all" if request.colocate_all else "colocate_policy_ref"
    for job in others:
        if job.job in _guests(request) and (job.nodes, job.gpus_per_node) != (policy.nodes, policy.gpus_per_node):
            raise PlacementError(
                f"{_PLACEMENT}.{job.job}_num_nodes x {job.job}_num_gpus_per_node is {job.nodes} x "
                f"{job.gpus_per_node}, and the policy whose GPUs it shares has {policy.nodes} x "
                f"{policy.gpus_per_node}: write the same, or {_PLACEMENT}.{setting}=false"
            )
    wanted = request.engines * request.engine_gpus
    if request.colocate_all and wanted != policy.gpus:
        raise PlacementError(
            f"{_ENGINE}.num_engines={request.engines} of {request.engine_gpus} GPUs each take {wanted}, and the "
            f"policy whose GPUs they share has {policy.gpus}: write as many, or {_PLACEMENT}.colocate_all=false"
        )
    if request.colocate_all and policy.gpus_per_node % request.engine_gpus:
        raise PlacementError(
            f"an engine of {request.engine_gpus} GPUs ({_ENGINE}.tensor_parallel_size x pipeline_parallel_size) "
            f"cannot stay within a node: it shares the policy's GPUs, {policy.gpus_per_node} on each node "
            f"({_PLACEMENT}.policy_num_gpus_per_node); write a tensor_parallel_size that divides them, or "
            f"{_PLACEMENT}.colocate_all=false"
        )


def _check_total(request: PlacementRequest, cluster: ClusterDescription) -> None:
    policy, *others = _jobs(request)
    alone = [policy, *(job for job in others if job.job not in _guests(request))]
    parts = [f"{job.nodes} x {job.gpus_per_node} for the {_NAMES[job.job]}" for job in alone]
    wanted = sum(job.gpus for job in alone)
    if not request.colocate_all:
        wanted += request.engines * request.engine_gpus
        parts.append(f"{request.engines} x {request.engine_gpus} for engines")
    if wanted <= cluster.gpus:
        return
    names = [f"{job.job}_num_gpus_per_node" for job in alone]
    advice = f"lower {_PLACEMENT}.{', '.join(names)}" + ("" if request.colocate_all else f" or {_ENGINE}.num_engines")
    share = "" if request.colocate_all else f", or let jobs share GPUs with {_PLACEMENT}.colocate_all=true"
    raise PlacementError(
        f"the recipe asks for {wanted} GPUs ({', '.join(parts)}) and the cluster has {_gpus(cluster)}: {advice}{share}"
    )


_NAMES = {"policy": "policy", "critic": "critic", "ref": "reference model"}


def _gpus(cluster: ClusterDescription) -> str:
    counts = [node.gpus for node in cluster.nodes if node.gpus]
    where = f", {' + '.join(map(str, counts))} on {len(counts)} nodes" if len(counts) > 1 else ""
    return f"{cluster.gpus}{where}"


def _find_sites(request: PlacementRequest, cluster: ClusterDescription) -> dict[str, list[_Site]]:
    """The node and the GPUs of every worker of each job."""
    free = [node.gpus for node in cluster.nodes]
    alone = [job for job in _jobs(request) if job.job not in _guests(request)]
    engines = 0 if request.colocate_all else request.engines
    chosen = _search(free, alone, engines, request.engine_gpus, set())
    if chosen is None:
        raise PlacementError(_does_not_fit(request, cluster, alone))
    taken = [0] * len(free)

    def take(node: int, count: int) -> _Site:
        taken[node] += count
        return node, tuple(range(taken[node] - count, taken[node]))

    sites = {
        job.job: [take(node, 1) for node in sorted(nodes) for _ in range(job.gpus_per_node)]
        for job, nodes in zip(alone, chosen, strict=True)
    }
    sites |= {job.job: sites["policy"] for job in _jobs(request) if job.job in _guests(request)}
    if request.colocate_all:
        runs = (
            sites["policy"][i : i + request.engine_gpus] for i in range(0, request.policy_ranks, request.engine_gpus)
        )
        sites["sampling"] = [(run[0][0], tuple(gpu for _, gpus in run for gpu in gpus)) for run in runs]
        return sites
    rooms = (node for node, gpus in enumerate(free) for _ in range((gpus - taken[node]) // request.engine_gpus))
    sites["sampling"] = [take(node, request.engine_gpus) for node, _ in zip([*rooms], range(engines), strict=False)]
    return sites


def _search(
    free: Sequence[int], jobs: Sequence[_Ranks], engines: int, engine_gpus: int, hopeless: set[tuple]
) -> list[tuple[int, ...]] | None:
    """Nodes for each job such that the engines fit behind them, tight nodes first; None where there are none."""
    if not jobs:
        return [] if sum(gpus // engine_gpus for gpus in free) >= engines else None
    state = (len(jobs), tuple(sorted(free)))
    if state in hopeless:
        return None
    job, *others = jobs
    for nodes in _choices(free, job):
        left = [gpus - job.gpus_per_node * (node in nodes) for node, gpus in enumerate(free)]
        found = _search(left, others, engines, engine_gpus, hopeless)
        if found is not None:
            return [nodes, *found]
    hopeless.add(state)
    return None


def _choices(free: Sequence[int], job: _Ranks) -> Iterator[tuple[int, ...]]:
    """Ways to choose the job's nodes; nodes with equally many free GPUs count as one kind."""
    sizes = sorted({gpus for gpus in free if gpus >= job.gpus_per_node})
    kinds = [[node for node, gpus in enumerate(free) if gpus == size] for size in sizes]

    def choose(kinds: list[list[int]], missing: int) -> Iterator[tuple[int, ...]]:
        if not missing:
            yield ()
        elif kinds and sum(map(len, kinds)) >= missing:
            first, *others = kinds
            for count in range(min(len(first), missing), -1, -1):
                for more in choose(others, missing - count):
                    yield (*first[:count], *more)

    return choose(kinds, job.nodes)


def _does_not_fit(request: PlacementRequest, cluster: ClusterDescription, alone: Sequence[_Ranks]) -> str:
    """Why a cluster with enough GPUs has no room; the first job that does not fit beside those before it."""
    free, engines = [node.gpus for node in cluster.nodes], request.engines
    has = f"the cluster has {_gpus(cluster)}"
    for count, job in enumerate(alone, start=1):
        if _search(free, alone[:count], 0, 1, set()) is None:
            beside = "" if count == 1 else f" beside {' and '.join(_NAMES[other.job] for other in alone[: count - 1])}"
            return (
                f"the {_NAMES[job.job]} asks for {job.nodes} nodes with {job.gpus_per_node} GPUs each{beside}, and "
                f"{has}: change {_PLACEMENT}.{job.job}_num_nodes and {job.job}_num_gpus_per_node"
            )
    largest = max(free)
    if request.engine_gpus > largest:
        return (
            f"an engine of {request.engine_gpus} GPUs ({_ENGINE}.tensor_parallel_size x pipeline_parallel_size) "
            f"cannot stay within a node, the largest of which has {largest}: write a smaller tensor_parallel_size"
        )
    return (
        f"{engines} engines of {request.engine_gpus} GPUs each ({_ENGINE}.tensor_parallel_size x "
        f"pipeline_parallel_size), each within a node, do not fit beside the training ranks, and {has}: lower "
        f"{_ENGINE}.tensor_parallel_size or num_engines, or change {_PLACEMENT}.policy_num_nodes and "
        "policy_num_gpus_per_node"
    )
