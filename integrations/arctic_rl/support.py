"""What of a SkyRL recipe this backend cannot do yet, as a list of refusals: one line each, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Rule = Callable[[Any], Iterator[str]]

SUPPORTED_POLICY_LOSSES = ("regular", "dual_clip")
SUPPORTED_RESUME_MODES = (None, "none", "latest")
SKYRL_MAX_ENV_WORKERS = 32


def _refusal(setting: str, value: object, why: str, instead: str) -> str:
    return f"{setting}={value}: {why}; {instead}"


def _algorithm(cfg: Any) -> Iterator[str]:
    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type not in SUPPORTED_POLICY_LOSSES:
        yield _refusal(
            "trainer.algorithm.policy_loss_type",
            algorithm.policy_loss_type,
            "this policy loss is not there yet",
            f"write one of {', '.join(SUPPORTED_POLICY_LOSSES)}",
        )
    correction = algorithm.off_policy_correction
    for name in (
        "tis_ratio_type",
        "sequence_mask_metric",
        "outlier_token_is_threshold_low",
        "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low",
        "token_mask_is_threshold_high",
    ):
        value = vars(correction)[name]
        if value is not None:
            yield _refusal(
                f"trainer.algorithm.off_policy_correction.{name}",
                value,
                "off-policy correction is not there yet",
                "leave it at null",
            )
    if algorithm.enable_sample_support_replay:
        yield _refusal(
            "trainer.algorithm.enable_sample_support_replay", True, "sampler support is not replayed", "write false"
        )
    if algorithm.advantage_estimator == "gae" or cfg.trainer.critic.model.path:
        yield _refusal(
            "trainer.critic.model.path",
            cfg.trainer.critic.model.path,
            "a critic is not there yet",
            "leave it unset and use trainer.algorithm.advantage_estimator=grpo",
        )
    if cfg.trainer.update_ref_every_epoch:
        yield _refusal(
            "trainer.update_ref_every_epoch", True, "refreshing the reference model is not there yet", "write false"
        )


STRATEGIES = ("fsdp", "fsdp2", "megatron")


def _strategy(cfg: Any) -> Iterator[str]:
    if cfg.trainer.strategy not in STRATEGIES:
        yield _refusal(
            "trainer.strategy", cfg.trainer.strategy, "SkyRL has no such strategy", f"write {STRATEGIES[0]}"
        )
    for role in ("policy", "ref"):
        precision = vars(cfg.trainer)[role].fsdp_config.mixed_precision
        if precision is not None:
            yield _refusal(
                f"trainer.{role}.fsdp_config.mixed_precision",
                precision,
                "it would change what is computed",
                "leave it at null and choose with trainer.bf16",
            )
        if cfg.trainer.strategy != "megatron":
            continue
        megatron = vars(cfg.trainer)[role].megatron_config
        for name in ("freeze_moe_router", "freeze_dsa_indexer", "fp8", "fp8_param", "model_config_kwargs"):
            value = vars(megatron)[name]
            if value:
                yield _refusal(
                    f"trainer.{role}.megatron_config.{name}", value, "it would change what is trained", "leave it out"
                )
    if cfg.generator.inference_engine.backend != "vllm":
        yield _refusal(
            "generator.inference_engine.backend",
            cfg.generator.inference_engine.backend,
            "engines are vLLM's",
            "write vllm",
        )


def _model(cfg: Any) -> Iterator[str]:
    for role in ("policy", "ref"):
        model = vars(cfg.trainer)[role]
        if model.model_config_kwargs:
            yield _refusal(
                f"trainer.{role}.model_config_kwargs",
                model.model_config_kwargs,
                "overriding the model's own config is not there yet",
                "put the values into the model folder's config.json",
            )
        if model.language_model_only:
            yield _refusal(
                f"trainer.{role}.language_model_only", True, "multimodal models are not there yet", "write false"
            )
        if model.sequence_parallel_size > 1:
            yield _refusal(
                f"trainer.{role}.sequence_parallel_size",
                model.sequence_parallel_size,
                "Ulysses sequence parallelism is not there yet",
                "write 1",
            )
    policy = cfg.trainer.policy
    if policy.model.lora.rank > 0:
        yield _refusal("trainer.policy.model.lora.rank", policy.model.lora.rank, "LoRA is not there yet", "write 0")
    if policy.model.fake_int4_qat.enabled:
        yield _refusal("trainer.policy.model.fake_int4_qat.enabled", True, "changes what is trained", "write false")
    if policy.inference_only_init:
        yield _refusal("trainer.policy.inference_only_init", True, "this backend trains", "write false")
    if policy.megatron_config.moe_enable_routing_replay:
        yield _refusal(
            "trainer.policy.megatron_config.moe_enable_routing_replay",
            True,
            "router replay is not there",
            "write false",
        )
    if cfg.trainer.mtp.enabled:
        yield _refusal("trainer.mtp.enabled", True, "multi-token-prediction heads are not trained", "write false")
    if policy.torch_profiler_config.enable:
        yield _refusal(
            "trainer.policy.torch_profiler_config.enable", True, "profiling workers is not there yet", "write false"
        )


def _rollouts(cfg: Any) -> Iterator[str]:
    generator = cfg.generator
    engine = generator.inference_engine
    if generator.max_turns > 1:
        yield _refusal("generator.max_turns", generator.max_turns, "multi-turn rollouts are not there yet", "write 1")
    if generator.step_wise_trajectories:
        yield _refusal("generator.step_wise_trajectories", True, "step-wise rows are not there yet", "write false")
    if generator.vision_language_generator:
        yield _refusal("generator.vision_language_generator", True, "vision is not there", "write false")
    for name in ("sampling_params", "eval_sampling_params"):
        penalty = vars(generator)[name].repetition_penalty
        if penalty != 1.0:
            yield _refusal(
                f"generator.{name}.repetition_penalty",
                penalty,
                "SkyRL does not forward it to the engine",
                f"write generator.{name}.additional_kwargs.repetition_penalty={penalty}",
            )
    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size")
    for name in parallel:
        if vars(engine)[name] > 1:
            yield _refusal(
                f"generator.inference_engine.{name}",
                vars(engine)[name],
                "engines of several processes are not there yet",
                "write 1 and use generator.inference_engine.num_engines",
            )
    for name in (
        "enable_pd",
        "enable_return_routed_experts",
        "enable_return_sample_support_set",
        "language_model_only",
        "offload_kv_for_weight_sync",
    ):
        if vars(engine)[name]:
            yield _refusal(f"generator.inference_engine.{name}", True, "this backend cannot do it", "write false")
    for name in ("fp8_weight_sync_mode", "speculative_config", "external_proxy_url", "external_server_urls"):
        value = vars(engine)[name]
        if value is not None:
            yield _refusal(f"generator.inference_engine.{name}", value, "this backend cannot do it", "write null")
    if not engine.run_engines_locally:
        yield _refusal(
            "generator.inference_engine.run_engines_locally", False, "external servers are not there", "write true"
        )
    for key in ("quantization", "kv_cache_dtype"):
        if key in engine.engine_init_kwargs:
            yield _refusal(
                f"generator.inference_engine.engine_init_kwargs.{key}",
                engine.engine_init_kwargs[key],
                "rollouts in another precision than training change the result",
                "leave it out",
            )


def _run_control(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.fully_async.enabled:
        yield _refusal(
            "trainer.fully_async.enabled", True, "fully asynchronous training is not there yet", "write false"
        )
    if trainer.hf_save_interval > 0:
        yield _refusal(
            "trainer.hf_save_interval", trainer.hf_save_interval, "Hugging Face export is not there yet", "write -1"
        )
    if trainer.resume_mode not in SUPPORTED_RESUME_MODES:
        yield _refusal(
            "trainer.resume_mode", trainer.resume_mode, "resuming is not there yet", "write null to start afresh"
        )
    for name in ("ckpt_path", "export_path"):
        if "://" in vars(trainer)[name]:
            yield _refusal(
                f"trainer.{name}", vars(trainer)[name], "cloud storage is not there yet", "write a local folder"
            )


RULES: tuple[Rule, ...] = (_algorithm, _strategy, _model, _rollouts, _run_control)


def refusals(cfg: Any) -> list[str]:
    """Every setting of a SkyRL config that this backend refuses, a line each.

    Args:
        cfg: a ``SkyRLTrainConfig``; SkyRL's own ``validate_cfg`` rewrites some settings, so ask before and after it.
    """
    return [line for rule in RULES for line in rule(cfg)]


WITHOUT_EFFECT: tuple[tuple[str, object, str], ...] = (
    ("trainer.use_expandable_segments", True, "CUDA only"),
    ("trainer.logprobs_chunk_size", 1024, "log-probs are taken in chunks of the server's own size"),
    ("trainer.vocab_entropy_chunk_size", 0, "Megatron only"),
    ("trainer.vocab_entropy_chunk_memory_mb", 512, "Megatron only"),
    ("trainer.policy.use_torch_compile", False, "nothing is compiled"),
    ("trainer.policy.record_memory", False, "CUDA only"),
    ("trainer.policy.fsdp_config.reshard_after_forward", True, "FSDP only"),
    ("trainer.policy.fsdp_config.fsdp_size", -1, "FSDP only"),
    ("trainer.policy.fsdp_config.cpu_offload", False, "FSDP only"),
    ("trainer.ref.fsdp_config.cpu_offload", False, "FSDP only"),
    ("trainer.policy.optimizer_config.offload_after_step", True, "nothing is offloaded on CPUs"),
    ("trainer.placement.colocate_policy_ref", True, "processes on CPUs share what they run on"),
    ("generator.inference_engine.gpu_memory_utilization", 0.8, "GPUs only"),
    ("generator.inference_engine.distributed_executor_backend", "ray", "an engine is one process"),
    ("generator.inference_engine.vllm_v1_disable_multiproc", True, "SkyRL itself does not read it"),
    ("generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB", 1.0, "GPUs only"),
    ("generator.inference_engine.use_expandable_segments", False, "CUDA only"),
    ("generator.inference_engine.router_init_kwargs", {}, "there is no router"),
)
"""Settings that change nothing here, with SkyRL's defaults and the reason."""


def _value(cfg: Any, setting: str) -> Any:
    for name in setting.split("."):
        cfg = vars(cfg)[name]
    return cfg


def without_effect(cfg: Any) -> list[str]:
    """Settings away from SkyRL's defaults that change nothing here, a line each."""
    trainer, engine = cfg.trainer, cfg.generator.inference_engine
    lines = []
    if trainer.strategy == "megatron":
        lines.append("trainer.strategy=megatron and its parallel sizes: DeepSpeed ZeRO shards the model instead")
    if not trainer.flash_attn:
        lines.append("trainer.flash_attn=false: on CPUs attention always runs segment by segment")
    if not trainer.remove_microbatch_padding:
        lines.append("trainer.remove_microbatch_padding=false: rows are always packed; results do not depend on it")
    if engine.weight_sync_backend != "nccl":
        lines.append(
            f"generator.inference_engine.weight_sync_backend={engine.weight_sync_backend}: shared memory is used"
        )
    lines += [f"{setting}: {why}" for setting, default, why in WITHOUT_EFFECT if _value(cfg, setting) != default]
    threads = cfg.environment.skyrl_gym.max_env_workers
    if threads != SKYRL_MAX_ENV_WORKERS:
        lines.append(
            f"environment.skyrl_gym.max_env_workers={threads}: environment calls run in processes; "
            "write trainer.arctic_rl.scoring_workers"
        )
    return lines
