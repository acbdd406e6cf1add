"""Settings of a recipe that ``arctic-platform``'s server or client would ignore, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import ArcticRLConfig
from ...errors import ConfigError
from ...support.leaves import value_of
from .jobs import FLASH_ATTENTION, server_address
from .payload import CLIP_RANGE, DUAL_CLIP

__all__ = ["setting_refusals"]

_ALGORITHM = "trainer.algorithm"
_ARCTIC = "trainer.arctic_rl"
_NOT_TOLD = (
    "cpu_kv_cache_gib",
    "cpu_threads",
    "gpu_timeout_s",
    "max_cpu_workers",
    "max_engine_restarts",
    "max_skipped_steps",
    "shutdown_timeout_s",
    "weight_sync_bucket_mb",
    "worker_timeout_s",
)
"""Settings of how our own server runs."""


def setting_refusals(cfg: Any) -> Iterator[str]:
    """What a recipe asks for that the package would ignore or do otherwise.

    SkyRL reduces and weights the advantages itself, so that every ``loss_reduction`` is a plain sum on the server,
    which has that; its own sequence-level reductions, wrong in packed rows, are never asked for.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl``, whose backend is ``arctic-platform``.
    """
    for check in (_server, _rollouts, _loss, _processing, _micro_batches, _models, _optimizer, _calls):
        yield from check(cfg)


_ITS_OWN_MEMORY = {
    "trainer.policy.record_memory": False,
    "trainer.use_expandable_segments": True,
    "trainer.policy.optimizer_config.offload_after_step": True,
    "generator.inference_engine.use_expandable_segments": False,
}
"""Settings that this server is not told, by what they are by default."""


def _server(cfg: Any) -> Iterator[str]:
    arctic, engine = cfg.trainer.arctic_rl, cfg.generator.inference_engine
    if arctic.device == "cpu":
        yield f"{_ARCTIC}.device='cpu': this server has GPUs only: leave it out"
    for name in _NOT_TOLD:
        value = vars(arctic)[name]
        if value != vars(ArcticRLConfig())[name]:
            yield f"{_ARCTIC}.{name}={value!r}: this server looks after its workers itself: leave it out"
    if arctic.attention not in (None, *FLASH_ATTENTION):
        yield (
            f"{_ARCTIC}.attention={arctic.attention!r}: rows of a micro-batch see each other on this server without "
            f"flash attention: write {' or '.join(FLASH_ATTENTION)}"
        )
    if not cfg.trainer.flash_attn:
        yield (
            "trainer.flash_attn=False: rows of a micro-batch see each other on this server without flash attention: "
            "write true"
        )
    for setting, usual in _ITS_OWN_MEMORY.items():
        value = value_of(cfg, setting)
        if value is not usual:
            yield f"{setting}={value!r}: this server looks after its memory itself: leave it out"
    if engine.pipeline_parallel_size > 1:
        yield (
            f"generator.inference_engine.pipeline_parallel_size={engine.pipeline_parallel_size}: this server counts "
            "the GPUs of an engine by tensor_parallel_size alone: write 1"
        )
    if engine.speculative_config is not None:
        yield (
            f"generator.inference_engine.speculative_config={engine.speculative_config}: this server is not told of "
            "it: write null"
        )
    if arctic.weight_sync is not None:
        yield f"{_ARCTIC}.weight_sync={arctic.weight_sync!r}: this server has one way of its own: leave it out"
    if arctic.comm_protocol != "http":
        yield (
            f"{_ARCTIC}.comm_protocol={arctic.comm_protocol!r}: this server is one that is up already: write http, "
            f"and its address as {_ARCTIC}.server_url"
        )
        return
    try:
        server_address(arctic.server_url)
    except ConfigError as error:
        yield str(error)


def _rollouts(cfg: Any) -> Iterator[str]:
    generator = cfg.generator
    if generator.max_turns > 1:
        yield (
            f"generator.max_turns={generator.max_turns}: this server takes prompts as text, and that of a later turn, "
            "which holds sampled tokens, may have other tokens than those: write 1"
        )
    for section in ("sampling_params", "eval_sampling_params"):
        additional = vars(generator)[section].additional_kwargs
        if additional is not None and additional.get("logit_bias") is not None:
            yield (
                f"generator.{section}.additional_kwargs.logit_bias: the package's wire turns its token ids into text, "
                "which vLLM does not take: leave it out"
            )


def _loss(cfg: Any) -> Iterator[str]:
    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type != "dual_clip":
        yield (
            f"{_ALGORITHM}.policy_loss_type={algorithm.policy_loss_type!r}: this server has the clipped surrogate "
            "with a dual clip only: write dual_clip"
        )
    for name, value in (("eps_clip_low", CLIP_RANGE), ("eps_clip_high", CLIP_RANGE), ("clip_ratio_c", DUAL_CLIP)):
        if vars(algorithm)[name] != value:
            yield (
                f"{_ALGORITHM}.{name}={vars(algorithm)[name]!r}: this server takes {value} whatever it is told: write "
                f"{value}"
            )
    if algorithm.use_kl_loss:
        yield (
            f"{_ALGORITHM}.use_kl_loss=True: this server sums the KL term over tokens as it does the policy's, where "
            "SkyRL takes the mean over rows: write false; use_kl_in_reward needs no such term"
        )
    if algorithm.use_entropy_loss:
        yield (
            f"{_ALGORITHM}.use_entropy_loss=True: this server's entropies are one token off their mask: write false"
        )


def _processing(cfg: Any) -> Iterator[str]:
    arctic = cfg.trainer.arctic_rl
    if arctic.loss_fn is not None:
        yield f"{_ARCTIC}.loss_fn={arctic.loss_fn!r}: this server does not know our losses: leave it out"
    if arctic.processor_modules:
        yield f"{_ARCTIC}.processor_modules={arctic.processor_modules!r}: this server imports none: leave it out"
    if arctic.use_zorro:
        yield (
            f"{_ARCTIC}.use_zorro=True: this server reuses the mask of its first micro-batch for others of its size: "
            "write false"
        )
    if arctic.logits_optimization == "memory":
        yield (
            f"{_ARCTIC}.logits_optimization='memory': this server has it with shared prompts only: write compute or "
            "none"
        )
    if arctic.logits_compute_from_fp32_inputs:
        yield (
            f"{_ARCTIC}.logits_compute_from_fp32_inputs=True: this server has it with shared prompts only: write false"
        )


def _micro_batches(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.max_tokens_per_microbatch > 0:
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch}: this server cuts every call into "
            "the number of micro-batches that it was started with: write -1"
        )
    rows = trainer.micro_train_batch_size_per_gpu
    if trainer.micro_forward_batch_size_per_gpu != rows:
        yield (
            f"trainer.micro_forward_batch_size_per_gpu={trainer.micro_forward_batch_size_per_gpu}: this server cuts "
            "log-prob passes of the policy as it does updates: write trainer.micro_train_batch_size_per_gpu's, "
            f"{rows}"
        )
    if trainer.gradient_checkpointing and trainer.gradient_checkpointing_use_reentrant:
        yield (
            "trainer.gradient_checkpointing_use_reentrant=True: this server leaves the choice to transformers: write "
            "false"
        )


def _models(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.critic.model.path:
        yield f"trainer.critic.model.path={trainer.critic.model.path!r}: this server has no critic: leave it out"
    if trainer.policy.model.lora.rank > 0:
        yield (
            f"trainer.policy.model.lora.rank={trainer.policy.model.lora.rank}: this server trains all weights: write 0"
        )
    if trainer.policy.model_config_kwargs:
        yield (
            f"trainer.policy.model_config_kwargs={dict(trainer.policy.model_config_kwargs)!r}: this server loads the "
            "model as it is saved: leave it out"
        )
    uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
    if uses_reference and trainer.ref.model.path != trainer.policy.model.path:
        yield (
            f"trainer.ref.model.path={trainer.ref.model.path!r}: all jobs of this server have one model: write "
            "trainer.policy.model.path's"
        )
    if not trainer.bf16:
        yield "trainer.bf16=False: this server trains in bfloat16: write true"
    if trainer.arctic_rl.zero_stage < 2:
        yield (
            f"{_ARCTIC}.zero_stage={trainer.arctic_rl.zero_stage}: this server leaves out steps whose gradient is 0 "
            "with DeepSpeed's optimizer for that stage: write 2 or 3"
        )


def _optimizer(cfg: Any) -> Iterator[str]:
    optimizer, arctic = cfg.trainer.policy.optimizer_config, cfg.trainer.arctic_rl
    section = "trainer.policy.optimizer_config"
    if optimizer.scheduler not in ("constant", "constant_with_warmup"):
        yield (
            f"{section}.scheduler={optimizer.scheduler!r}: this server's schedules are DeepSpeed's, not those of "
            "transformers: write constant"
        )
    if optimizer.num_warmup_steps:
        yield f"{section}.num_warmup_steps={optimizer.num_warmup_steps}: this server's warm-up is DeepSpeed's: write 0"
    for name in ("lr_warmup_ratio", "min_lr_ratio"):
        if vars(arctic)[name] is not None:
            yield f"{_ARCTIC}.{name}={vars(arctic)[name]!r}: this server's schedules are DeepSpeed's: leave it out"


def _calls(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.update_ref_every_epoch:
        yield "trainer.update_ref_every_epoch=True: this server's reference model stays as it was loaded: write false"
    if trainer.fully_async.enabled:
        yield "trainer.fully_async.enabled=True: the package's client cannot pause requests under way: write false"
    if trainer.policy.torch_profiler_config.enable:
        yield "trainer.policy.torch_profiler_config.enable=True: the package's client has no profiler: write false"
