"""The built-in losses. They see rows [b, S] that hold the same values whatever the batch was packed with.

All of them are sums over this micro-batch's tokens over denominators of the whole mini-batch (see ``aggregation``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from .aggregation import LOSS_AGG_MODES, aggregate, masked_sum
from .loss_settings import check_choice, mask_of, required, settings_of
from .metrics import LossShare, Maximum
from .policy_losses import MAX_LOG_RATIO
from .registry import register_loss_fn
from .regularizers import RegularizerConfig, regularizers

__all__ = ["GrpoConfig", "SftConfig", "grpo_loss", "sft_loss"]


@dataclass(frozen=True)
class GrpoConfig(RegularizerConfig):
    """Settings of the ``grpo`` loss, under verl's names; from ``config`` and ``meta["actor_config"]``."""

    clip_ratio: float = 0.2
    """Half-width of the clip range around 1."""
    clip_ratio_low: float | None = None
    """Width below 1; None = clip_ratio."""
    clip_ratio_high: float | None = None
    """Width above 1; None = clip_ratio."""
    clip_ratio_c: float | None = 3.0
    """Dual clip, > 1: tokens of negative advantage cost at most c * |advantage| (arXiv 1912.09729); None = off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UnsupportedError(f"{name}={value} must be at least 0")
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1:
            raise UnsupportedError(f"clip_ratio_c={self.clip_ratio_c} must be above 1, or None for no dual clip")


@dataclass(frozen=True)
class SftConfig:
    """Settings of the ``sft`` loss."""

    loss_agg_mode: str = "token-mean"
    """How token terms become one number, one of LOSS_AGG_MODES."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; None = the batch's response width."""

    def __post_init__(self) -> None:
        check_choice("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)


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
    settings = settings_of(GrpoConfig, "grpo", config, meta)
    _check_policy_loss_config(meta)
    mask = mask_of(batch, "grpo")
    kept = mask != 0

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(kept, values, 0)

    logprobs = masked(model_outputs["logprobs"])
    old_logprobs = masked(required(batch, "old_log_probs", "grpo"))
    advantages = masked(required(batch, "advantages", "grpo"))
    low = settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low
    high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high

    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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

    num_tokens = mask.sum()
    pg_loss = aggregate(surrogate, mask, settings.loss_agg_mode, meta, loss_scale_factor=settings.loss_scale_factor)
    metrics = {
        "pg_loss": LossShare(pg_loss),
        "ppo_kl": (masked_sum(-log_ratio, mask), num_tokens),
        "pg_clipfrac": (masked_sum((clipped > unclipped).to(mask.dtype), mask), num_tokens),
        "pg_clipfrac_lower": (masked_sum(at_lower_clip.to(mask.dtype), mask), num_tokens),
        "ratio_max_deviation": Maximum(masked((ratio - 1).abs()).max()),
    }
    term, of_term = regularizers(settings, model_outputs, batch, meta)
    return pg_loss if term is None else pg_loss + term, metrics | of_term


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
    settings = settings_of(SftConfig, "sft", config, meta)
    mask = mask_of(batch, "sft")
    nll = -model_outputs["logprobs"]
    loss = aggregate(nll, mask, settings.loss_agg_mode, meta, loss_scale_factor=settings.loss_scale_factor)
    return loss, {"nll": (masked_sum(nll, mask), mask.sum())}


def _check_policy_loss_config(meta: Mapping[str, Any]) -> None:
    for name, value in (meta.get("policy_loss_config") or {}).items():
        if name != "loss_mode":
            raise UnsupportedError(
                f"policy_loss_config.{name}={value!r}: the grpo loss has no such setting; leave it out"
            )
        if value != "vanilla":
            raise UnsupportedError(f"policy_loss_config.loss_mode={value!r}: the grpo loss does 'vanilla' only")
