"""What each update and each request of a rollout will be told, in text, for the dry run."""

from __future__ import annotations

from typing import Any

from .critic_updates import critic_processing
from .errors import UnsupportedError
from .loss_config import logits_meta, loss_request, sharing_meta
from .sampling_params import NEUTRAL, to_vllm_kwargs
from .support.entries import shown

_ALWAYS_TOLD = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "logprobs", "stop")


def update_lines(cfg: Any) -> list[str]:
    """The loss on the server with its settings, and what SkyRL's trainer makes of the rewards before it.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl`` whose values are of their types.
    """
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    try:
        request = loss_request(cfg)
    except UnsupportedError as error:
        return [f"cannot be resolved: {error}"]
    config = dict(request.processing["config"])
    own = config.pop("policy_loss_config", {})
    budget = trainer.max_tokens_per_microbatch
    rows = {
        "rows_per_micro_batch": trainer.micro_train_batch_size_per_gpu,
        "rows_per_micro_batch_of_log_probs": trainer.micro_forward_batch_size_per_gpu,
    }
    if request.own_micro_batches and algorithm.policy_loss_type in vars(algorithm):
        own = vars(vars(algorithm)[algorithm.policy_loss_type])
    settings = {
        "policy_loss_type": algorithm.policy_loss_type,
        "loss_fn": request.processing["loss_fn"],
        **config,
        **{f"policy_loss_config.{name}": value for name, value in own.items() if name != "packed"},
        "temperature": algorithm.temperature,
        "samples_per_prompt": cfg.generator.n_samples_per_prompt,
        **({"tokens_per_micro_batch": budget} if budget > 0 else rows),
        **logits_meta(cfg),
        **sharing_meta(cfg),
    }
    advantages = {
        name: vars(algorithm)[name]
        for name in (
            "advantage_estimator",
            "grpo_norm_by_std",
            "advantage_batch_normalize",
            "loss_reduction",
            "use_kl_in_reward",
            "zero_variance_filter",
        )
    }
    lines = [f"{name}: {shown(value)}" for name, value in settings.items()]
    if request.corrected:
        asked = {name: value for name, value in vars(algorithm.off_policy_correction).items() if value is not None}
        lines.append(f"off_policy_correction: {_pairs(asked)}")
    if trainer.critic.model.path:
        advantages |= {name: vars(algorithm)[name] for name in ("gamma", "lambd")}
        lines.append(f"critic: {_pairs({'loss_fn': 'value', **critic_processing(cfg)['config']})}")
    return [*lines, f"advantages: {_pairs(advantages)}"]


def rollout_lines(cfg: Any) -> list[str]:
    """Parameters of the requests to engines in training and evaluation; what is not named is off."""
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params

    generator = cfg.generator
    phases = {"training": (generator.sampling_params, generator.n_samples_per_prompt)}
    if cfg.trainer.eval_interval > 0:
        phases["evaluation"] = (generator.eval_sampling_params, generator.eval_n_samples_per_prompt)
    lines = [f"batched: {shown(generator.batched)}", f"max_turns: {generator.max_turns}"]
    for phase, (section, samples) in phases.items():
        try:
            kwargs = to_vllm_kwargs(get_vllm_sampling_params(section))
        except UnsupportedError as error:
            lines += [f"{phase} cannot be resolved: {line}" for line in str(error).splitlines()]
            continue
        told = {
            name: value for name, value in kwargs.items() if name in _ALWAYS_TOLD or value != NEUTRAL.get(name, False)
        }
        lines.append(f"{phase}: samples={samples}, {_pairs(told)}")
    return lines


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())
