"""Memory of a run on GPUs: the GPU with the most to hold, and the host memory behind it."""

from __future__ import annotations

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
) -> tuple[list[str], list[str]]:
    """Lines about the fullest GPU and the fullest node, and what does not fit.

    Jobs that share a GPU take turns: training and reference hold their states while engines sleep, and the other way
    round. GPUs are taken to be as large as this machine's first; without any, nothing is compared.

    Args:
        config: the server's config, for GPUs.
        plan: where its workers are.
        machine: this machine.
        sizes: of the policy, critic and reference, by job.
        parts: bytes of a rank of these jobs, by what they are for.
        advice: what to write where training does not fit.
    """
    total = machine.gpus[0][1] if machine.gpus else None
    specs = {"policy": config.policy, "critic": config.critic, "ref": config.reference}
    on_gpu = {job: _on_gpu(specs[job], parts[job]) for job in parts}
    lines = [f"{job}, {_millions(sizes[job])}, a rank on its GPU {_told(held)}" for job, held in on_gpu.items()]
    problems: list[str] = []
    training, names = max((_training(plan, place, on_gpu) for place in plan.gpus), key=lambda item: item[0])
    lines.append(f"the fullest GPU in training ({names}): {_gib(training)}{_of(total)}")
    if total is not None and training > total:
        problems.append(f"training takes about {_gib(training)} of a GPU of {_gib(total)} ({names}): {advice}")
    loading = {job: GPU_PROCESS + loading_memory(sizes[job]) for job in on_gpu}
    job = max(loading, key=loading.__getitem__)
    lines.append(f"the largest rank while it loads ({job}, whole and in float32): {_gib(loading[job])}{_of(total)}")
    if total is not None and loading[job] > total:
        problems.append(
            f"each rank of the {job} loads its model whole and in float32, {_gib(loading[job])} of a GPU of "
            f"{_gib(total)}, before anything is sharded or offloaded: write a smaller model"
        )
    engine_lines, engine_problems = _engine(config, plan, sizes["policy"], total)
    lines, problems = lines + engine_lines, problems + engine_problems
    host = max(_host(plan, node, specs, sizes, parts, config) for node in {worker.node_id for worker in plan.workers})
    lines.append(f"the fullest node's host memory {_gib(host)}, and this machine has {_gib(machine.memory)} free")
    if machine.gpus and host > machine.memory:
        problems.append(
            f"ranks of one node take about {_gib(host)} of host memory and {_gib(machine.memory)} are free: place "
            "fewer ranks on a node, or leave out offloading"
        )
    return lines, problems


def _on_gpu(spec: TrainingSpec | None, parts: Parts) -> Parts:
    moved = _moved(spec)
    return {name: value for name, value in parts.items() if name not in moved}


def _moved(spec: TrainingSpec | None) -> set[str]:
    block = {} if spec is None else spec.deepspeed.get("zero_optimization", {})
    names = [name for name in _OFFLOADED if block.get(name, {}).get("device") == "cpu"]
    return {part for name in names for part in _OFFLOADED[name]}


def _training(plan: PlacementPlan, place: tuple[str, int], on_gpu: dict[str, Parts]) -> tuple[int, str]:
    tenants = plan.tenants(place)
    held = sum(GPU_PROCESS + sum(on_gpu.get(worker.job, {}).values()) for worker in tenants)
    return held, ", ".join(f"{worker.job}-{worker.rank}" for worker in tenants)


def _engine(
    config: ServerConfig, plan: PlacementPlan, size: ModelSize, total: int | None
) -> tuple[list[str], list[str]]:
    sampling = config.sampling
    weights = engine_memory(size, dtype=sampling.dtype, kv_cache=0, tensor_parallel_size=sampling.gpus)["weights"]
    if total is None:
        return [f"an engine's weights on each of its {sampling.gpus} GPUs {_gib(weights)}; there is no GPU here"], []
    setting = f"generator.inference_engine.gpu_memory_utilization={sampling.gpu_memory_utilization}"
    taken = int(sampling.gpu_memory_utilization * total)
    beside = max(
        (_others(plan.tenants(place)) for worker in plan.of("sampling") for place in worker.places), default=0
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


def _others(tenants: tuple[WorkerPlacement, ...]) -> int:
    """Bytes of what is asleep beside an engine."""
    return GPU_PROCESS * sum(worker.job != "sampling" for worker in tenants)


def _host(
    plan: PlacementPlan,
    node: str,
    specs: dict[str, TrainingSpec | None],
    sizes: dict[str, ModelSize],
    parts: dict[str, Parts],
    config: ServerConfig,
) -> int:
    """Bytes of a node's host memory: every rank loads the model in float32, and keeps what is offloaded or asleep."""
    states = ("weights", "float32 weights", "optimizer", "gradients")
    total = TRAINER_PROCESSES
    for worker in plan.workers:
        if worker.node_id != node:
            continue
        total += TRAINING_PROCESS
        if worker.job in parts:
            asleep = set(states) if config.colocate_all else _moved(specs[worker.job])
            kept = sum(value for name, value in parts[worker.job].items() if name in asleep)
            total += max(loading_memory(sizes[worker.job]), kept)
        elif config.colocate_all:
            total += WIDTH[config.sampling.dtype] * sizes["policy"].parameters
    return total


def _millions(size: ModelSize) -> str:
    return f"{size.parameters / 1e6:.2f} million parameters"


def _told(parts: Parts) -> str:
    named = ", ".join(f"{name} {_gib(value)}" for name, value in parts.items())
    return f"{_gib(sum(parts.values()))}: {named}"


def _of(total: int | None) -> str:
    return "" if total is None else f" of {_gib(total)}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
