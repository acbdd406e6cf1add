"""Memory and space of a whole run against a machine's, and what to change where they do not fit."""

from __future__ import annotations

from typing import Any

from ..placement import PlacementPlan
from ..server.specs import ServerConfig, TrainingSpec
from .gpu_needs import gpu_needs
from .machine import Machine, free_space
from .memory import (
    BUCKET,
    ENGINE_PROCESSES,
    GIB,
    LIVE,
    TRAINER_PROCESSES,
    TRAINING_PROCESS,
    WIDTH,
    checkpoint_bytes,
    engine_memory,
    kv_bytes_per_token,
    loading_memory,
    training_memory,
)
from .model_size import ModelSize, model_size

_LOGITS_GIB = {"cpu": 0.01, "cuda": 1.0}
"""Of ``trainer.arctic_rl.logits_optimization_peak_mem_size_in_gib``, by device."""


def needs(
    cfg: Any, config: ServerConfig, machine: Machine, plan: PlacementPlan | None = None
) -> tuple[list[str], list[str]]:
    """Lines about the processes of a run, and what does not fit.

    Args:
        cfg: the recipe.
        config: the server's config of it.
        machine: where it would run.
        plan: where its workers would be on GPUs; None = all are on this machine's CPUs.

    Raises:
        OSError: a model is not there.
        ValueError: a model cannot be built.
    """
    if plan is not None:
        return _on_gpus(cfg, config, machine, plan)
    lines: list[str] = []
    total = TRAINER_PROCESSES
    sizes = {"policy": _size(config.policy)}
    for name, spec, ranks in (
        ("policy", config.policy, config.policy_ranks),
        ("critic", config.critic, config.critic_ranks),
        ("reference", config.reference, config.ref_ranks),
    ):
        if spec is None:
            continue
        sizes[name] = sizes.get(name) or _size(spec)
        parts = _training(cfg, spec, sizes[name], ranks)
        peak = max(sum(parts.values()), loading_memory(sizes[name])) + TRAINING_PROCESS
        count = f"{sizes[name].parameters / 1e6:.2f} million parameters"
        lines.append(f"{name}, {count}, {ranks} x {_gib(peak)}: libraries {_gib(TRAINING_PROCESS)}, {_parts(parts)}")
        total += ranks * peak
    engine_lines, problems, engines = _engines(cfg, config, sizes["policy"])
    lines += engine_lines
    total += engines
    lines.append(f"together {_gib(total)} with SkyRL's trainer, and this machine has {_gib(machine.memory)} free")
    if total > machine.memory:
        caches = 0 if problems else config.engines * int(config.sampling.cpu_kv_cache_gib * GIB)
        advice = _advice(cfg, config, large_cache=caches > total // 10)
        problems.append(f"the run takes about {_gib(total)} of memory and {_gib(machine.memory)} are free: {advice}")
    return lines, [*problems, *_shared_space(config, sizes["policy"], machine), *_disk_space(cfg, sizes)]


def _on_gpus(cfg: Any, config: ServerConfig, machine: Machine, plan: PlacementPlan) -> tuple[list[str], list[str]]:
    specs = {"policy": config.policy, "critic": config.critic, "ref": config.reference}
    ranks = {"policy": config.policy_ranks, "critic": config.critic_ranks, "ref": config.ref_ranks}
    sizes = {job: _size(spec) for job, spec in specs.items() if spec is not None}
    parts = {job: _training(cfg, specs[job], size, ranks[job]) for job, size in sizes.items()}
    lines, problems = gpu_needs(
        config,
        plan,
        machine,
        sizes,
        parts,
        advice=_advice(cfg, config),
        reference_follows=cfg.trainer.update_ref_every_epoch,
    )
    return lines, [*problems, *_disk_space(cfg, sizes)]


def _size(spec: TrainingSpec) -> ModelSize:
    return model_size(spec.model_path, spec.model_config, lora=spec.lora, value_model=spec.role == "critic")


def _training(cfg: Any, spec: TrainingSpec, size: ModelSize, ranks: int) -> dict[str, int]:
    if spec.role == "ref":
        return {"weights": WIDTH[spec.dtype] * size.parameters}
    asked = cfg.trainer.arctic_rl.logits_optimization_peak_mem_size_in_gib
    zero = spec.deepspeed.get("zero_optimization", {})
    return training_memory(
        size,
        dtype=spec.dtype,
        zero_stage=spec.zero_stage,
        ranks=ranks,
        tokens=micro_batch_tokens(cfg),
        gradient_checkpointing=spec.gradient_checkpointing,
        logits=int((_LOGITS_GIB[spec.device] if asked is None else asked) * GIB) if spec.role == "policy" else 0,
        bucket=int(zero.get("reduce_bucket_size", BUCKET)),
        live=int(zero.get("stage3_max_live_parameters", LIVE)),
        whole_bucket=spec.device == "cuda",
    )


def micro_batch_tokens(cfg: Any) -> int:
    """The most tokens of one micro-batch: the budget, or rows of full length."""
    trainer = cfg.trainer
    if trainer.max_tokens_per_microbatch > 0:
        return trainer.max_tokens_per_microbatch
    return trainer.micro_train_batch_size_per_gpu * row_tokens(cfg)


def row_tokens(cfg: Any) -> int:
    """Tokens of a row of full length."""
    return cfg.generator.max_input_length + cfg.generator.sampling_params.max_generate_length


def _engines(cfg: Any, config: ServerConfig, size: ModelSize) -> tuple[list[str], list[str], int]:
    sampling = config.sampling
    cache = int(sampling.cpu_kv_cache_gib * GIB)
    parts = {"libraries": ENGINE_PROCESSES, **engine_memory(size, dtype=sampling.dtype, kv_cache=cache)}
    tokens = cache // kv_bytes_per_token(size, sampling.dtype)
    longest = size.positions if sampling.max_model_len is None else sampling.max_model_len
    lines = [
        f"engine, {config.engines} x {_gib(sum(parts.values()))}: {_parts(parts)}",
        f"an engine's KV cache holds {tokens} tokens: {tokens / row_tokens(cfg):.1f} rollouts of full length",
    ]
    problems = []
    if tokens < longest:
        enough = -(-longest * kv_bytes_per_token(size, sampling.dtype) * 100 // GIB) / 100
        problems.append(
            f"trainer.arctic_rl.cpu_kv_cache_gib={sampling.cpu_kv_cache_gib}: the cache holds {tokens} tokens and one "
            f"sequence may have {longest}: write at least {enough}, or a smaller "
            "generator.inference_engine.engine_init_kwargs.max_model_len"
        )
    return lines, problems, config.engines * sum(parts.values())


def _shared_space(config: ServerConfig, size: ModelSize, machine: Machine) -> list[str]:
    copied = WIDTH[config.sync_dtype] * size.parameters
    if copied <= machine.shared:
        return []
    return [
        f"{machine.shared_folder} has {_gib(machine.shared)} free and the weights on their way to the engines take "
        f"{_gib(copied)}: make it larger (docker run --shm-size)"
    ]


def _disk_space(cfg: Any, sizes: dict[str, ModelSize]) -> list[str]:
    path = cfg.trainer.ckpt_path
    if cfg.trainer.ckpt_interval <= 0 or "://" in path:
        return []
    written = sum(checkpoint_bytes(sizes[name]) for name in ("policy", "critic") if name in sizes)
    free = free_space(path)
    if written <= free:
        return []
    return [
        f"trainer.ckpt_path={path}: one checkpoint takes {_gib(written)} and {_gib(free)} are free: write a folder "
        "with more space, or trainer.ckpt_interval=-1"
    ]


def _advice(cfg: Any, config: ServerConfig, *, large_cache: bool = False) -> str:
    policy, advice = config.policy, []
    if large_cache:
        advice.append("a smaller trainer.arctic_rl.cpu_kv_cache_gib")
    if config.policy_ranks > 1 and policy.zero_stage < 3:
        advice.append(f"trainer.arctic_rl.zero_stage={3 if policy.zero_stage == 2 else 2}")
    if not policy.gradient_checkpointing:
        advice.append("trainer.gradient_checkpointing=true")
    if "reduce_bucket_size" not in policy.deepspeed.get("zero_optimization", {}) and policy.zero_stage:
        advice.append("a smaller trainer.arctic_rl.deepspeed.zero_optimization.reduce_bucket_size")
    if policy.device == "cuda" and policy.zero_stage:
        advice.append("trainer.arctic_rl.deepspeed.zero_optimization.offload_optimizer.device=cpu")
    if config.engines > 1 and policy.device == "cpu":
        advice.append("a smaller generator.inference_engine.num_engines")
    if policy.lora is None:
        advice.append("adapters (trainer.policy.model.lora.rank)")
    advice += [f"a micro-batch of fewer than {micro_batch_tokens(cfg)} tokens", "a smaller model"]
    return "write " + ", or ".join(advice)


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gib(value)}" for name, value in parts.items())


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
