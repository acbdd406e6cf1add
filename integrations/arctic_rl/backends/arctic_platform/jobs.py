"""What ``arctic-platform``'s client is told when a run starts, and which settings its server would ignore."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError, UnsupportedError
from ...server.deepspeed_config import deepspeed_config
from ...server.sampling_spec import SamplingSpec
from ...server.specs import ServerConfig

__all__ = [
    "FLASH_ATTENTION",
    "allocation_problems",
    "check_config",
    "check_package",
    "client_config",
    "engine_arguments",
    "micro_batches_of_a_step",
    "server_address",
    "training_config",
]

RELEASE = "0.1.4"
"""Of the package, whose code these payloads and refusals were compared with."""
FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3")
"""Attention that keeps the rows of a micro-batch apart; the first is what a recipe gets that names none."""
_CONSTANT = ("constant", "constant_with_warmup")
_GPUS = {
    "training_gpus": ("trainer.placement.policy_num_gpus_per_node", "--training-gpus"),
    "sampling_gpus": ("generator.inference_engine.num_engines", "--sampling-gpus"),
    "log_prob_gpus": ("trainer.placement.ref_num_gpus_per_node", "--log-prob-gpus"),
}
"""Numbers that the server was started with: the setting of a recipe that must agree, and the server's argument."""


def server_address(url: str | None) -> tuple[str, int]:
    """Host and port of the server.

    Raises:
        ConfigError: the URL is not ``http://host:port``, all that the package's client can be told.
    """
    try:
        parts = urlsplit(url or "")
        plain = parts.scheme == "http" and parts.path in ("", "/") and not (parts.query or parts.fragment)
        if plain and parts.hostname and parts.port and parts.username is None:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ConfigError(
        f"trainer.arctic_rl.server_url={url!r}: arctic-platform's client takes a host and a port alone, without TLS: "
        "write http://HOST:PORT"
    )


def check_package() -> None:
    """Refuse to go on without the package, or with another release, whose server may read other settings.

    Raises:
        ConfigError: with what to install.
    """
    try:
        found = version("arctic-platform")
    except PackageNotFoundError:
        found = "not installed"
    if found != RELEASE:
        raise ConfigError(
            f"trainer.arctic_rl.backend='arctic-platform': the package arctic-platform is {found} here: install "
            f"arctic-platform[sft]=={RELEASE} (uv sync --extra arctic-platform)"
        )


def check_config(config: ServerConfig) -> None:
    """Refuse what no recipe's check has seen: a script's settings.

    Raises:
        UnsupportedError: a line for each setting that the server would ignore.
    """
    problems = list(_problems(config))
    if problems:
        raise UnsupportedError("\n".join(problems))


def _problems(config: ServerConfig) -> Iterator[str]:
    policy, optimizer = config.policy, config.policy.optimizer
    if policy.dtype != "bfloat16":
        yield f"dtype={policy.dtype!r}: this server trains in bfloat16: write bfloat16"
    if policy.zero_stage < 2:
        yield f"zero_stage={policy.zero_stage}: this server then leaves out steps whose gradient is 0: write 2 or 3"
    if optimizer.scheduler not in _CONSTANT:
        yield f"scheduler={optimizer.scheduler!r}: this server's schedules are DeepSpeed's: write constant"
    if optimizer.num_warmup_steps or optimizer.lr_warmup_ratio:
        yield f"num_warmup_steps={optimizer.num_warmup_steps}: this server's warm-up is one step late: write 0"
    if policy.attention not in (None, *FLASH_ATTENTION):
        yield f"attention={policy.attention!r}: rows see each other on this server then: write {FLASH_ATTENTION[0]}"
    if policy.use_zorro:
        yield "use_zorro=True: this server reuses the mask of its first micro-batch: write None or False"
    if policy.processor_modules:
        yield f"processor_modules={policy.processor_modules!r}: this server imports none: leave it out"
    if config.critic is not None:
        yield "critic: this server has none: leave it out"
    if policy.lora is not None:
        yield "lora: this server trains all weights: leave it out"
    if config.reference is not None and config.reference.model_path != policy.model_path:
        yield f"reference_path={config.reference.model_path!r}: all jobs of this server have one model: write its path"


def allocation_problems(config: ServerConfig, status: Mapping[str, Any]) -> Iterator[str]:
    """Where the recipe and a running server disagree, a line each: the server does not listen to a client's numbers.

    Args:
        config: what the run asks for.
        status: the server's ``/status``.
    """
    wanted = {
        "training_gpus": config.policy_ranks,
        "sampling_gpus": config.engines * config.sampling.tensor_parallel_size,
        "log_prob_gpus": config.ref_ranks,
    }
    for name, number in wanted.items():
        setting, argument = _GPUS[name]
        if (number or name != "log_prob_gpus") and status[name] != number:
            yield (
                f"{setting}: the recipe asks for {number} in all, the server was started with {argument} "
                f"{status[name]}: write that number, or start it with {argument} {number}"
            )
    jobs = [f"{info['job_type']} ({job_id})" for job_id, info in status["jobs"].items()]
    if jobs:
        yield f"the server has jobs of another run: {', '.join(jobs)}: end that run, or start the server anew"


def micro_batches_of_a_step(config: ServerConfig) -> int:
    """Micro-batches of each rank in an optimizer step, which the server fixes when it starts."""
    if config.mini_batch_rows is None or config.micro_batch_rows is None:
        return 1
    return math.ceil(config.mini_batch_rows / (config.policy_ranks * config.micro_batch_rows))


def training_config(config: ServerConfig) -> dict[str, Any]:
    """DeepSpeed's config of the policy: the built-in server's, with what the server builds itself named in it."""
    optimizer = config.policy.optimizer
    settings = deepspeed_config(config.policy)
    # The server steps after each micro-batch, and leaves it to DeepSpeed to count them.
    del settings["managed_gradient_accumulation"]
    return settings | {
        "gradient_accumulation_steps": micro_batches_of_a_step(config),
        "torch_autocast": {"enabled": False},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": list(optimizer.betas),
                "eps": 1e-8,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,
            },
        },
    }


def engine_arguments(spec: SamplingSpec) -> dict[str, Any]:
    """vLLM's arguments: log-probs of the sampled distribution, and no defaults of the model's own."""
    arguments = {
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "trust_remote_code": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        **spec.engine_kwargs,
    }
    if spec.enable_sleep_mode:
        arguments["enable_sleep_mode"] = True
    return arguments if spec.max_model_len is None else arguments | {"max_model_len": spec.max_model_len}


def client_config(config: ServerConfig, *, request_timeout_s: float, context_length: int) -> Any:
    """An ``ArcticClientConfig``.

    Args:
        config: what the run asks for.
        request_timeout_s: of each call.
        context_length: tokens that the model can take, for engines that are told no other number.
    """
    from arctic_platform.client import ArcticClientConfig, OnPremConfig, SamplingConfig, TrainingConfig

    host, port = server_address(config.server_url)
    longest, attention = config.sampling.max_model_len, config.policy.attention
    reference = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    return ArcticClientConfig(
        model_name=config.policy.model_path,
        seed=config.policy.seed,
        max_seq_len=context_length if longest is None else longest,
        training_gpus=config.policy_ranks,
        sampling_gpus=config.engines,
        log_prob_gpus=config.ref_ranks,
        job_ready_timeout=config.startup_timeout_s,
        request_timeout=request_timeout_s,
        training=TrainingConfig(
            ds_config=training_config(config),
            ds_worker_config={
                "attn_implementation": FLASH_ATTENTION[0] if attention is None else attention,
                "enable_gradient_checkpointing": config.policy.gradient_checkpointing,
                "use_liger": config.policy.use_liger,
                "zorro_train_enable": False,
            },
            checkpoint_path=os.path.join(os.path.dirname(config.log_dir), "arctic_platform"),
        ),
        sampling=SamplingConfig(
            vllm=engine_arguments(config.sampling),
            log_prob_engine="deepspeed",
            log_prob_ds_config=reference,
        ),
        backend=OnPremConfig(protocol="http", host=host, port=port),
    )
