"""A SkyRL recipe as the server's own plain config."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any, Literal

from .errors import UnsupportedError
from .loss_config import packed_policy_loss
from .reference_model import reference_is_base
from .server.sampling_spec import SamplingSpec
from .server.schedule import has_end
from .server.specs import INIT_METHODS, LoraSpec, OptimizerSpec, ServerConfig, TrainingSpec

_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16"}


CPU_BLOCK_SIZE = 32
"""Tokens of a KV block on CPUs: vLLM's own default there, 128, costs about a quarter more time on short rows."""

ENGINE_THREADS = 1
"""Compute threads of an engine on CPUs where the recipe names none: a second one gained nothing when measured."""


def server_config(
    cfg: Any, *, run_id: str, env_vars: dict[str, str], device: Literal["cpu", "cuda"] = "cpu"
) -> ServerConfig:
    """Translate a recipe.

    Args:
        cfg: the SkyRL config; what ``support.refusals`` names is not translated.
        run_id: marks the processes of this run.
        env_vars: environment variables for every worker.
        device: where models run (``devices``).

    Raises:
        UnsupportedError: for an engine setting that this backend sets itself, or a dtype that is not one.
    """
    trainer, engine, arctic = cfg.trainer, cfg.generator.inference_engine, cfg.trainer.arctic_rl
    sampling = _sampling_spec(cfg) if device == "cpu" else _gpu_sampling_spec(cfg)
    placement = trainer.placement
    uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
    second_model = uses_reference and not reference_is_base(trainer)
    cores = os.cpu_count() or 1
    # On GPUs the ranks of a node, which wait for the same calls, share its cores.
    beside = placement.policy_num_gpus_per_node if device == "cuda" else 1
    threads = arctic.cpu_threads or max(cores // beside, 1)
    return ServerConfig(
        policy=_training_spec(cfg, "policy", threads, device),
        reference=_training_spec(cfg, "ref", threads, device) if second_model else None,
        critic=_training_spec(cfg, "critic", threads, device) if trainer.critic.model.path else None,
        sampling=dataclasses.replace(sampling, speculative_config=engine.speculative_config),
        policy_ranks=placement.policy_num_nodes * placement.policy_num_gpus_per_node,
        ref_ranks=placement.ref_num_nodes * placement.ref_num_gpus_per_node if second_model else 0,
        critic_ranks=(
            placement.critic_num_nodes * placement.critic_num_gpus_per_node if trainer.critic.model.path else 0
        ),
        engines=engine.num_engines,
        max_cpu_workers=arctic.max_cpu_workers,
        sync_dtype=_dtype("generator.inference_engine.model_dtype", engine.model_dtype),
        log_dir=os.path.join(os.path.abspath(trainer.log_path), "workers"),
        run_id=run_id,
        max_engine_restarts=arctic.max_engine_restarts,
        worker_timeout_s=arctic.worker_timeout_s,
        startup_timeout_s=arctic.startup_timeout_s,
        shutdown_timeout_s=arctic.shutdown_timeout_s,
        env_vars=env_vars,
        server_url=arctic.server_url,
        policy_nodes=placement.policy_num_nodes,
        ref_nodes=placement.ref_num_nodes if second_model else 1,
        critic_nodes=placement.critic_num_nodes if trainer.critic.model.path else 1,
        colocate_all=placement.colocate_all,
        colocate_policy_ref=placement.colocate_policy_ref,
        optimizers_that_stay=_optimizers_that_stay(trainer, second_model=second_model),
        gpu_timeout_s=arctic.gpu_timeout_s,
        mini_batch_rows=trainer.policy_mini_batch_size * cfg.generator.n_samples_per_prompt,
        micro_batch_rows=trainer.micro_train_batch_size_per_gpu,
        weight_sync=arctic.weight_sync,
        weight_sync_bucket_mb=arctic.weight_sync_bucket_mb,
    )


def _optimizers_that_stay(trainer: Any, *, second_model: bool) -> tuple[str, ...]:
    """Trained jobs that share GPUs, and whose ``offload_after_step`` is off."""
    placement = trainer.placement
    sharing = {
        "policy": placement.colocate_all or (placement.colocate_policy_ref and second_model),
        "critic": placement.colocate_all and bool(trainer.critic.model.path),
    }
    models = vars(trainer)
    return tuple(job for job in sharing if sharing[job] and not models[job].optimizer_config.offload_after_step)


def optimizer_spec(cfg: Any, model: str = "policy") -> OptimizerSpec:
    """Optimizer and schedule of the policy, or of the critic.

    ``lr_warmup_ratio`` is the policy's. ``min_lr_ratio`` is handed to whichever schedule has such an end, and to the
    policy's where neither has, which is then told.
    """
    trainer, arctic = cfg.trainer, cfg.trainer.arctic_rl
    optimizer = vars(trainer)[model].optimizer_config
    critics = bool(trainer.critic.model.path) and has_end(trainer.critic.optimizer_config.scheduler)
    ends = has_end(optimizer.scheduler) or (model == "policy" and not critics)
    return OptimizerSpec(
        lr=float(optimizer.lr),
        betas=(float(optimizer.adam_betas[0]), float(optimizer.adam_betas[1])),
        weight_decay=float(optimizer.weight_decay),
        max_grad_norm=float(optimizer.max_grad_norm),
        scheduler=optimizer.scheduler,
        num_warmup_steps=int(optimizer.num_warmup_steps),
        lr_warmup_ratio=arctic.lr_warmup_ratio if model == "policy" else None,
        min_lr_ratio=arctic.min_lr_ratio if ends else None,
        section=f"trainer.{model}.optimizer_config",
    )


def _training_spec(cfg: Any, role: str, threads: int, device: Literal["cpu", "cuda"]) -> TrainingSpec:
    trainer = cfg.trainer
    is_policy, is_critic = role == "policy", role == "critic"
    path = vars(trainer)[role].model.path
    return TrainingSpec(
        role=role,
        model_path=path,
        dtype="bfloat16" if trainer.bf16 else "float32",
        zero_stage=trainer.arctic_rl.zero_stage,
        optimizer=optimizer_spec(cfg, "critic" if is_critic else "policy"),
        gradient_checkpointing=trainer.gradient_checkpointing,
        gradient_checkpointing_use_reentrant=trainer.gradient_checkpointing_use_reentrant,
        seed=trainer.seed,
        device=device,
        threads=threads,
        processor_modules=tuple(trainer.arctic_rl.processor_modules),
        loss_fn=trainer.arctic_rl.loss_fn if is_policy else None,
        use_zorro=trainer.arctic_rl.use_zorro,
        zorro_self_check=trainer.arctic_rl.zorro_self_check,
        model_config=_model_config(cfg, role),
        policy_loss=packed_policy_loss(cfg) if is_policy else None,
        value_head=trainer.algorithm.value_head_prefix if is_critic else None,
        fresh_value_head=is_critic and path == trainer.policy.model.path,
        lora=adapters(cfg, role) if role != "ref" and vars(trainer)[role].model.lora.rank > 0 else None,
        deepspeed={} if role == "ref" else copy.deepcopy(dict(trainer.arctic_rl.deepspeed)),
        attention=trainer.arctic_rl.attention,
        flash_attention=device == "cpu" or trainer.flash_attn,
        use_liger=trainer.arctic_rl.use_liger,
        expandable_segments=device == "cuda" and trainer.use_expandable_segments,
        memory_snapshots=_memory_snapshots(trainer) if is_policy and device == "cuda" else None,
    )


def _memory_snapshots(trainer: Any) -> str | None:
    """Where SkyRL's workers put them."""
    if not trainer.policy.record_memory:
        return None
    return os.path.join(os.path.abspath(os.path.expanduser(trainer.ckpt_path)), "memory_snapshots")


def _model_config(cfg: Any, role: str) -> dict[str, Any]:
    """What SkyRL's FSDP workers read; its Megatron workers read ``megatron_config``."""
    return {} if cfg.trainer.strategy == "megatron" else dict(vars(cfg.trainer)[role].model_config_kwargs)


def adapters(cfg: Any, role: str) -> LoraSpec:
    """The adapters of the policy, or of the critic, which SkyRL initialises in one way alone."""
    lora = vars(cfg.trainer)[role].model.lora
    is_policy = role == "policy"
    return LoraSpec(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=float(lora.dropout),
        target_modules=_names(lora.target_modules),
        exclude_modules=_names(lora.exclude_modules),
        init_method=lora.init_method if is_policy else INIT_METHODS[0],
        setting=f"trainer.{role}.model.lora",
        causal_lm=is_policy,
    )


def _names(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sampling_spec(cfg: Any) -> SamplingSpec:
    engine = cfg.generator.inference_engine
    kwargs = {
        "block_size": CPU_BLOCK_SIZE,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        **engine.engine_init_kwargs,
    }
    return SamplingSpec(
        model_path=cfg.trainer.policy.model.path,
        dtype=_dtype("generator.inference_engine.model_dtype", engine.model_dtype),
        tensor_parallel_size=1,
        max_model_len=kwargs.pop("max_model_len", None),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enable_prefix_caching=engine.enable_prefix_caching,
        enforce_eager=True,
        device="cpu",
        cpu_kv_cache_gib=cfg.trainer.arctic_rl.cpu_kv_cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        seed=cfg.trainer.seed,
        engine_kwargs=kwargs,
        threads=cfg.trainer.arctic_rl.cpu_threads or ENGINE_THREADS,
    )


def _gpu_sampling_spec(cfg: Any) -> SamplingSpec:
    """What of an engine is another on GPUs."""
    engine, on_cpus = cfg.generator.inference_engine, _sampling_spec(cfg)
    own_block_size = "block_size" in engine.engine_init_kwargs
    kwargs = {name: value for name, value in on_cpus.engine_kwargs.items() if name != "block_size" or own_block_size}
    if engine.data_parallel_size > 1:
        raise UnsupportedError(
            f"generator.inference_engine.data_parallel_size={engine.data_parallel_size}: an engine is not split into "
            "data-parallel ones; write 1, and as many times num_engines"
        )
    return dataclasses.replace(
        on_cpus,
        device="cuda",
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        enforce_eager=engine.enforce_eager,
        expandable_segments=engine.use_expandable_segments,
        enable_sleep_mode=cfg.trainer.placement.colocate_all,
        engine_kwargs=kwargs,
    )


def _dtype(setting: str, value: str) -> str:
    if value not in _DTYPES:
        raise UnsupportedError(f"{setting}={value!r} is not a dtype: write one of {', '.join(_DTYPES)}")
    return _DTYPES[value]
