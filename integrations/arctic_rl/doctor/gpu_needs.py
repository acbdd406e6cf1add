"""Memory of a run on GPUs: the GPU with the most to hold, and the host memory behind it."""

from __future__ import annotations

from collections import Counter

from ..backends.turns import SAMPLING, sharing_jobs
from ..placement import PlacementPlan, WorkerPlacement
from ..server.specs import ServerConfig, TrainingSpec
from .machine import Machine
from .memory import (
    GIB,
    TRAINER_PROCESSES,
    TRAINING_PROCESS,
    WIDTH,
    engine_memory,
    kv_bytes_per_token,
    loading_memory,
)
from .model_size import ModelSize
from .phases import held, leaves_of, phases, stays_of

GPU_PROCESS = GIB
"""What a CUDA context, NCCL and libraries' work spaces take in each process on a GPU; not measured."""
_OFFLOADED = {"offload_optimizer": ("float32 weights", "optimizer", "gradients"), "offload_param": ("weights",)}
"""Parts of a rank's memory that DeepSpeed moves to the host."""

Parts = dict[str, int]


def gpu_needs(
    config: ServerConfig,
    plan: PlacementPlan,
    machine: Machine,
    sizes: dict[str, ModelSize],
    parts: dict[str, Parts],
    *,
    advice: str,
    reference_follows: bool,
) -> tuple[list[str], list[str]]:
    """Lines about the fullest GPU and the fullest node, and what does not fit.

    Jobs that share a GPU take turns on it, and leave for the host between them: a GPU has to hold its largest phase,
    and the host all that has left. GPUs are taken to be as large as this machine's first; without any, nothing is
    compared.

    Args:
        config: the server's config, for GPUs.
        plan: where its workers are.
        machine: this machine.
        sizes: of the policy, critic and reference, by job.
        parts: bytes of a rank of these jobs, by what they are for.
        advice: what to write where training does not fit.
        reference_follows: ``trainer.update_ref_every_epoch``.
    """
    total = machine.gpus[0][1] if machine.gpus else None
    specs = {"policy": config.policy, "critic": config.critic, "ref": config.reference}
    on_gpu = {job: _on_gpu(specs[job], parts[job]) for job in parts}
    lines = [f"{job}, {_millions(sizes[job])}, a rank on its GPU {_told(of)}" for job, of in on_gpu.items()]
    problems: list[str] = []
    shared = sharing_jobs(
        jobs=[*on_gpu, SAMPLING], colocate_all=config.colocate_all, colocate_policy_ref=config.colocate_policy_ref
    )
    sampling = config.sampling
    weights = engine_memory(sizes["policy"], dtype=sampling.dtype, kv_cache=0, tensor_parallel_size=sampling.gpus)[
        "weights"
    ]

    def largest(place: tuple[str, int]) -> tuple[int, str]:
        tenants = plan.tenants(place)
        phase = max(
            phases(
                [worker.job for worker in tenants],
                shared,
                on_gpu,
                engine_weights=weights,
                optimizers_that_stay=config.optimizers_that_stay,
                reference_follows=reference_follows,
            ),
            key=lambda phase: phase.held,
        )
        who = ", ".join(f"{worker.job}-{worker.rank}" for worker in tenants)
        return GPU_PROCESS * len(tenants) + phase.held, f"{phase.name}; {who}"

    training, names = max(map(largest, plan.gpus), key=lambda item: item[0])
    lines.append(f"the fullest GPU in training ({names}): {_gib(training)}{_of(total)}")
    if total is not None and training > total:
        problems.append(f"training takes about {_gib(training)} of a GPU of {_gib(total)} ({names}): {advice}")
    stays = {
        job: GPU_PROCESS + stays_of(job, of_job, shared, config.optimizers_that_stay) for job, of_job in on_gpu.items()
    }
    engine_lines, engine_problems = _engine(config, plan, sizes["policy"], total, stays)
    lines, problems = lines + engine_lines, problems + engine_problems
    nodes = {worker.node_id for worker in plan.workers}
    host, when = max(_host(plan, node, specs, sizes, parts, config, shared) for node in nodes)
    lines.append(
        f"the fullest node's host memory {_gib(host)} {when}, and this machine has {_gib(machine.memory)} free"
    )
    if machine.gpus and host > machine.memory:
        problems.append(
            f"ranks of one node take about {_gib(host)} of host memory {when} and {_gib(machine.memory)} are free: "
            "place fewer ranks on a node, leave out offloading, or write trainer.placement.colocate_all=false"
        )
    return lines, problems


def _on_gpu(spec: TrainingSpec | None, parts: Parts) -> Parts:
    moved = _moved(spec)
    return {name: value for name, value in parts.items() if name not in moved}


def _moved(spec: TrainingSpec | None) -> set[str]:
    block = {} if spec is None else spec.deepspeed.get("zero_optimization", {})
    names = [name for name in _OFFLOADED if block.get(name, {}).get("device") == "cpu"]
    return {part for name in names for part in _OFFLOADED[name]}


def _engine(
    config: ServerConfig, plan: PlacementPlan, size: ModelSize, total: int | None, stays: dict[str, int]
) -> tuple[list[str], list[str]]:
    sampling = config.sampling
    weights = engine_memory(size, dtype=sampling.dtype, kv_cache=0, tensor_parallel_size=sampling.gpus)["weights"]
    if total is None:
        return [f"an engine's weights on each of its {sampling.gpus} GPUs {_gib(weights)}; there is no GPU here"], []
    setting = f"generator.inference_engine.gpu_memory_utilization={sampling.gpu_memory_utilization}"
    taken = int(sampling.gpu_memory_utilization * total)
    beside = max(
        (_others(plan.tenants(place), stays) for worker in plan.of("sampling") for place in worker.places), default=0
    )
    token = kv_bytes_per_token(size, sampling.dtype)
    tokens = max(taken - weights - GPU_PROCESS, 0) * sampling.gpus // token
    longest = size.positions if sampling.max_model_len is None else sampling.max_model_len
    lines = [
        f"an engine takes {_gib(taken)} of each of its {sampling.gpus} GPUs: weights {_gib(weights)}, and a KV cache "
        f"of about {tokens} tokens"
    ]
    problems = []
    if taken + beside > total:
        problems.append(
            f"{setting}: {_gib(taken)} and {_gib(beside)} of sleeping ranks are more than a GPU of {_gib(total)}: "
            f"write at most {int(100 * (total - beside) / total) / 100}"
        )
    if tokens < longest:
        problems.append(
            f"{setting}: the KV cache holds about {tokens} tokens and one sequence may have {longest}: write more, a "
            "larger generator.inference_engine.tensor_parallel_size, or a smaller "
            "generator.inference_engine.engine_init_kwargs.max_model_len"
        )
    return lines, problems


def _others(tenants: tuple[WorkerPlacement, ...], stays: dict[str, int]) -> int:
    """Bytes of what is beside an engine while it samples."""
    return sum(stays[worker.job] for worker in tenants if worker.job in stays)


def _host(
    plan: PlacementPlan,
    node: str,
    specs: dict[str, TrainingSpec | None],
    sizes: dict[str, ModelSize],
    parts: dict[str, Parts],
    config: ServerConfig,
    shared: frozenset[str],
) -> tuple[int, str]:
    """The most bytes of a node's host memory, and when.

    A rank loads its model in float32 on the host, where memory is scarce one rank at a time
    (``server.loading_turns``), job after job where all share GPUs, and keeps it there in its own dtype where ZeRO
    stage 3 is to shard it; what is offloaded or asleep is on the host then or later. Engines that sleep have dropped
    their weights.
    """
    ranks = Counter(worker.job for worker in plan.workers if worker.node_id == node)
    fixed = TRAINER_PROCESSES + TRAINING_PROCESS * ranks.total()
    if config.weight_sync == "shared_memory":
        fixed += WIDTH[config.sync_dtype] * sizes["policy"].parameters
    away = {}
    for job in parts:
        leaves, moved = leaves_of(job, shared, config.optimizers_that_stay), _moved(specs[job])
        asleep = sum(pinned(value) for name, value in parts[job].items() if name in leaves and name not in moved)
        away[job] = ranks[job] * (asleep + held(parts[job], moved))
    moments = [(sum(away.values()), "while all that is offloaded or asleep is there")]
    if config.colocate_all:
        before = 0
        for job in parts:
            when = f"while {job} is loaded by {ranks[job]} ranks, in float32 by one at a time"
            moments.append((before + _loading(ranks, sizes, specs, [job]), when))
            before += away[job]
    else:
        when = f"while models are loaded by {ranks.total()} workers, in float32 by one at a time"
        moments.append((_loading(ranks, sizes, specs, list(parts)), when))
    most, when = max(moments)
    return fixed + most, when


def _loading(
    ranks: Counter[str], sizes: dict[str, ModelSize], specs: dict[str, TrainingSpec | None], jobs: list[str]
) -> int:
    """Bytes of the ranks of jobs where one of them has its model in float32 and the others are through with it."""
    kept = {}
    for job in jobs:
        sharded = specs[job] is not None and job != "ref" and specs[job].zero_stage == 3
        kept[job] = WIDTH[specs[job].dtype] * sizes[job].parameters if sharded else 0
    last = max((loading_memory(sizes[job]) - kept[job] for job in jobs if ranks[job]), default=0)
    return sum(ranks[job] * kept[job] for job in jobs) + last


def pinned(nbytes: int) -> int:
    """Bytes that PyTorch takes for one block of page-locked memory: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _millions(size: ModelSize) -> str:
    return f"{size.parameters / 1e6:.2f} million parameters"


def _told(parts: Parts) -> str:
    named = ", ".join(f"{name} {_gib(value)}" for name, value in parts.items())
    return f"{_gib(sum(parts.values()))}: {named}"


def _of(total: int | None) -> str:
    return "" if total is None else f" of {_gib(total)}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
