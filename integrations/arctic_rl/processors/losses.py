"""The built-in losses. They see rows [b, S] that hold the same values whatever the batch was packed with.

All of them are sums over this micro-batch's tokens over denominators of the whole mini-batch (see ``aggregation``).
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from ..errors import UnsupportedError
from .aggregation import LOSS_AGG_MODES, aggregate, masked_sum
from .kl import KL_TYPES, kl_estimate
from .metrics import LossShare, Maximum
from .registry import nearest_name, register_loss_fn

__all__ = ["GrpoConfig", "SftConfig", "grpo_loss", "sft_loss"]

_MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before exp: exp(20) is finite in float32 with room for a gradient (SkyRL's safe_exp_delta)."""


@dataclass(frozen=True)
class GrpoConfig:
    """Settings of the ``grpo`` loss, under verl's names; from ``config`` and ``meta["actor_config"]``."""

    clip_ratio: float = 0.2
    """Half-width of the clip range around 1."""
    clip_ratio_low: float | None = None
    """Width below 1; None = clip_ratio."""
    clip_ratio_high: float | None = None
    """Width above 1; None = clip_ratio."""
    clip_ratio_c: float | None = 3.0
    """Dual clip, > 1: tokens of negative advantage cost at most c * |advantage| (arXiv 1912.09729); None = off."""
    loss_agg_mode: str = "token-mean"
    """How token terms become one number, one of LOSS_AGG_MODES."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; None = the batch's response width."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, subtracted from the loss; 0 = none, and no gradient through the entropy."""
    entropy_agg_mode: str | None = None
    """How the entropies of tokens become one number; None = loss_agg_mode."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference policy; needs ref_log_prob in the batch."""
    kl_loss_coef: float = 0.001
    """Weight of the KL term."""
    kl_loss_type: str = "low_var_kl"
    """Estimator, one of KL_TYPES."""
    kl_loss_agg_mode: str | None = None
    """How the KL estimates of tokens become one number; None = loss_agg_mode."""

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UnsupportedError(f"{name}={value} must be at least 0")
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1:
            raise UnsupportedError(f"clip_ratio_c={self.clip_ratio_c} must be above 1, or None for no dual clip")
        if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
            raise UnsupportedError(f"loss_scale_factor={self.loss_scale_factor} must be above 0")
        for name in ("loss_agg_mode", "entropy_agg_mode", "kl_loss_agg_mode"):
            _check_choice(name, getattr(self, name), LOSS_AGG_MODES, optional=name != "loss_agg_mode")
        _check_choice("kl_loss_type", self.kl_loss_type, KL_TYPES)


@dataclass(frozen=True)
class SftConfig:
    """Settings of the ``sft`` loss."""

    loss_agg_mode: str = "token-mean"
    """How token terms become one number, one of LOSS_AGG_MODES."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; None = the batch's response width."""

    def __post_init__(self) -> None:
        _check_choice("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)


@register_loss_fn("grpo", "verl_grpo")
def grpo_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Clipped surrogate of PPO (arXiv 1707.06347) with given advantages, dual clip, KL term and entropy bonus.

    Args:
        model_outputs: ``logprobs`` [b, S]; ``entropy`` [b, S] if entropy_coeff is not 0 or the metric is wanted.
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, ``old_log_probs``; ``ref_log_prob``
            with use_kl_loss; ``rollout_is_weights`` multiplies a token's surrogate if present.
        meta: denominators of the mini-batch; ``actor_config`` with :class:`GrpoConfig`'s fields;
            ``policy_loss_config`` may say ``loss_mode="vanilla"``.
        config: :class:`GrpoConfig`'s fields; may not contradict ``actor_config``.

    Returns:
        The loss, and the metrics pg_loss, ppo_kl, pg_clipfrac, pg_clipfrac_lower, ratio_max_deviation, kl_loss with
        use_kl_loss and entropy where it was computed.

    Raises:
        ValueError: a needed tensor is missing; UnsupportedError: a setting is unknown or out of range.
    """
    settings = _settings(GrpoConfig, "grpo", config, meta)
    _check_policy_loss_config(meta)
    mask = _mask(batch, "grpo")
    kept = mask != 0

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(kept, values, 0)

    logprobs = masked(model_outputs["logprobs"])
    old_logprobs = masked(_required(batch, "old_log_probs", "grpo"))
    advantages = masked(_required(batch, "advantages", "grpo"))
    low = settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low
    high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high

    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(unclipped, clipped)
    at_lower_clip = torch.zeros_like(kept)
    if settings.clip_ratio_c is not None:
        ceiling = -advantages * settings.clip_ratio_c
        at_lower_clip = (advantages < 0) & (surrogate > ceiling)
        surrogate = torch.where(advantages < 0, torch.minimum(surrogate, ceiling), surrogate)
    if batch.get("rollout_is_weights") is not None:
        surrogate = surrogate * masked(batch["rollout_is_weights"])

    def reduced(values: torch.Tensor, mode: str | None) -> torch.Tensor:
        mode = settings.loss_agg_mode if mode is None else mode
        return aggregate(values, mask, mode, meta, loss_scale_factor=settings.loss_scale_factor)

    num_tokens = mask.sum()
    loss = pg_loss = reduced(surrogate, None)
    metrics = {
        "pg_loss": LossShare(pg_loss),
        "ppo_kl": (masked_sum(-log_ratio, mask), num_tokens),
        "pg_clipfrac": (masked_sum((clipped > unclipped).to(mask.dtype), mask), num_tokens),
        "pg_clipfrac_lower": (masked_sum(at_lower_clip.to(mask.dtype), mask), num_tokens),
        "ratio_max_deviation": Maximum(masked((ratio - 1).abs()).max()),
    }
    if settings.entropy_coeff != 0 or meta.get("calculate_entropy"):
        entropy = masked(model_outputs["entropy"])
        metrics["entropy"] = (masked_sum(entropy, mask), num_tokens)
        if settings.entropy_coeff != 0:
            loss = loss - settings.entropy_coeff * reduced(entropy, settings.entropy_agg_mode)
    if settings.use_kl_loss:
        ref_logprobs = masked(_required(batch, "ref_log_prob", "grpo with use_kl_loss"))
        kl_loss = reduced(kl_estimate(logprobs, ref_logprobs, settings.kl_loss_type), settings.kl_loss_agg_mode)
        metrics["kl_loss"] = LossShare(kl_loss)
        loss = loss + settings.kl_loss_coef * kl_loss
    return loss, metrics


@register_loss_fn("sft")
def sft_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Cross-entropy of the tokens under the effective mask.

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: ``loss_mask`` [b, S], the effective mask.
        config: :class:`SftConfig`'s fields.

    Returns:
        The loss, and the metric nll: mean over tokens, in nats.
    """
    settings = _settings(SftConfig, "sft", config, meta)
    mask = _mask(batch, "sft")
    nll = -model_outputs["logprobs"]
    loss = aggregate(nll, mask, settings.loss_agg_mode, meta, loss_scale_factor=settings.loss_scale_factor)
    return loss, {"nll": (masked_sum(nll, mask), mask.sum())}


def _settings[T](cls: type[T], loss: str, config: Mapping[str, Any], meta: Mapping[str, Any]) -> T:
    """Both sources of settings as one checked config; a setting given twice must be the same."""
    known = {field.name: field for field in fields(cls)}
    given: dict[str, Any] = {}
    for source, values in (("config", config), ("actor_config", meta.get("actor_config") or {})):
        for name, value in values.items():
            if name not in known:
                raise UnsupportedError(
                    f"{source}.{name}={value!r}: the {loss} loss has no such setting{nearest_name(name, known)}; "
                    f"known: {', '.join(known)}"
                )
            if name in given and given[name] != value:
                raise UnsupportedError(f"{name} is {given[name]!r} in config and {value!r} in actor_config; give one")
            _check_type(f"{source}.{name}", value, known[name].type, known[name].default)
            given[name] = value
    return cls(**given)


def _check_type(name: str, value: Any, annotation: Any, default: Any) -> None:
    if value is None:
        if "None" in str(annotation):
            return
        raise UnsupportedError(f"{name}=None: give a value{'' if default is MISSING else f', such as {default!r}'}")
    wanted = str(annotation)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not math.isfinite(value):
        raise UnsupportedError(f"{name}={value!r} must be finite")
    right = isinstance(value, bool) if "bool" in wanted else is_number if "float" in wanted else isinstance(value, str)
    if not right:
        raise UnsupportedError(f"{name}={value!r} must be of type {getattr(annotation, '__name__', annotation)}")


def _check_choice(name: str, value: str | None, choices: tuple[str, ...], *, optional: bool = False) -> None:
    if value not in choices and not (optional and value is None):
        raise UnsupportedError(
            f"{name}={value!r} is unknown{nearest_name(str(value), choices)}; known: {', '.join(choices)}"
        )


def _check_policy_loss_config(meta: Mapping[str, Any]) -> None:
    for name, value in (meta.get("policy_loss_config") or {}).items():
        if name != "loss_mode":
            raise UnsupportedError(
                f"policy_loss_config.{name}={value!r}: the grpo loss has no such setting; leave it out"
            )
        if value != "vanilla":
            raise UnsupportedError(f"policy_loss_config.loss_mode={value!r}: the grpo loss does 'vanilla' only")


def _mask(batch: Mapping[str, Any], user: str) -> torch.Tensor:
    if batch.get("loss_mask") is None:
        raise ValueError(f"the {user} loss needs 'loss_mask' or 'response_mask' in the batch")
    return batch["loss_mask"]


def _required(batch: Mapping[str, Any], key: str, user: str) -> torch.Tensor:
    value = batch.get(key)
    if value is None:
        raise ValueError(f"the {user} loss needs {key!r} in the batch{nearest_name(key, batch)}")
    return value
