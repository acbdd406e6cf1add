"""The KL and entropy terms around a policy loss, and a loss that adds them to any other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from .aggregation import LOSS_AGG_MODES, aggregate, masked_sum
from .kl import KL_TYPES, kl_estimate
from .loss_settings import check_choice, mask_of, required, settings_of
from .metrics import LossShare, Maximum, Minimum
from .registry import get_loss_fn, register_loss_fn

__all__ = ["DRIFT", "RegularizedConfig", "RegularizerConfig", "regularized_loss", "regularizers"]

DRIFT = "minibatch_rollout_logprobs_abs_diff"
"""Prefix of the metrics of how far the sampler's log-probs are from those trained on, SkyRL's name."""


@dataclass(frozen=True)
class RegularizerConfig:
    """Settings of the terms around a policy loss, under verl's names."""

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
        if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
            raise UnsupportedError(f"loss_scale_factor={self.loss_scale_factor} must be above 0")
        for name in ("loss_agg_mode", "entropy_agg_mode", "kl_loss_agg_mode"):
            check_choice(name, getattr(self, name), LOSS_AGG_MODES, optional=name != "loss_agg_mode")
        check_choice("kl_loss_type", self.kl_loss_type, KL_TYPES)
        modes = (self.loss_agg_mode, self.entropy_agg_mode, self.kl_loss_agg_mode)
        if self.loss_scale_factor is not None and "seq-mean-token-sum-norm" not in modes:
            raise UnsupportedError(
                f"loss_scale_factor={self.loss_scale_factor} has an effect with seq-mean-token-sum-norm only, not "
                f"with loss_agg_mode={self.loss_agg_mode!r}: leave it out"
            )


@dataclass(frozen=True)
class RegularizedConfig(RegularizerConfig):
    """Settings of the ``regularized`` loss."""

    policy_loss: str = ""
    """Name or dotted path of the loss that the terms are added to; required."""
    policy_loss_config: dict[str, Any] | None = None
    """Handed to that loss as its ``config``; None = empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policy_loss:
            raise UnsupportedError("policy_loss is empty: give the name of the loss that the terms are added to")


def regularizers(
    settings: RegularizerConfig, model_outputs: Mapping[str, Any], batch: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """``kl_loss_coef * KL - entropy_coeff * entropy`` of a micro-batch, scaled as ``aggregate`` scales.

    Args:
        model_outputs: ``logprobs`` [b, S]; ``entropy`` [b, S] if entropy_coeff is not 0 or the metric is wanted.
        batch: ``loss_mask`` [b, S]; ``ref_log_prob`` [b, S] with use_kl_loss; ``rollout_logprobs`` [b, S] for the
            metrics of :data:`DRIFT`.
        meta: denominators of the mini-batch and ``response_len``; ``calculate_entropy`` asks for the metric.

    Returns:
        The sum of the terms, None if there is none, and the metrics entropy, kl_loss and :data:`DRIFT`'s, where they
        could be computed.
    """
    mask = mask_of(batch, "regularized")
    kept = mask != 0
    term: torch.Tensor | None = None
    metrics: dict[str, Any] = {}

    def reduced(values: torch.Tensor, mode: str | None) -> torch.Tensor:
        mode = settings.loss_agg_mode if mode is None else mode
        return aggregate(values, mask, mode, meta, loss_scale_factor=settings.loss_scale_factor)

    if settings.entropy_coeff != 0 or meta.get("calculate_entropy"):
        entropy = torch.where(kept, model_outputs["entropy"], 0)
        metrics["entropy"] = (masked_sum(entropy, mask), mask.sum())
        if settings.entropy_coeff != 0:
            term = -settings.entropy_coeff * reduced(entropy, settings.entropy_agg_mode)
    if settings.use_kl_loss:
        logprobs = torch.where(kept, model_outputs["logprobs"], 0)
        ref_logprobs = torch.where(kept, required(batch, "ref_log_prob", "use_kl_loss"), 0)
        kl_loss = reduced(kl_estimate(logprobs, ref_logprobs, settings.kl_loss_type), settings.kl_loss_agg_mode)
        metrics["kl_loss"] = LossShare(kl_loss)
        weighted = settings.kl_loss_coef * kl_loss
        term = weighted if term is None else term + weighted
    if batch.get("rollout_logprobs") is not None:
        metrics |= _drift(model_outputs["logprobs"].detach(), batch["rollout_logprobs"], mask, meta["response_len"])
    return term, metrics


def _drift(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, response_len: int
) -> dict[str, Any]:
    """Moments and extremes of the tokens' absolute differences; as in SkyRL, a response position without loss is 0 in
    the extremes."""
    difference = torch.where(mask != 0, (logprobs - rollout_logprobs).abs(), 0)
    num_tokens = mask.sum()
    positions = (difference * mask)[:, mask.shape[1] - response_len :]
    return {
        f"{DRIFT}_mean": (masked_sum(difference, mask), num_tokens),
        f"{DRIFT}_sq_mean": (masked_sum(difference.square(), mask), num_tokens),
        f"{DRIFT}_max": Maximum(positions.max()),
        f"{DRIFT}_min": Minimum(positions.min()),
    }


@register_loss_fn("regularized")
def regularized_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Any registered loss, with the KL and entropy terms of :class:`RegularizedConfig` added.

    Returns:
        The loss, and the metrics pg_loss, those of the inner loss, and those of :func:`regularizers`.

    Raises:
        UnsupportedError: a setting or the inner loss is unknown, settings came in ``actor_config``, or a metric has a
            name of the terms' own.
    """
    if meta.get("actor_config"):
        raise UnsupportedError(
            f"actor_config={dict(meta['actor_config'])!r}: the regularized loss takes its settings from config only"
        )
    settings = settings_of(RegularizedConfig, "regularized", config, {})
    inner = get_loss_fn(settings.policy_loss)
    policy_loss, inner_metrics = inner(model_outputs, batch, meta, dict(settings.policy_loss_config or {}), device)
    term, metrics = regularizers(settings, model_outputs, batch, meta)
    metrics["pg_loss"] = LossShare(policy_loss)
    taken = metrics.keys() & inner_metrics.keys()
    if taken:
        raise UnsupportedError(
            f"loss {settings.policy_loss!r} returns the metric {', '.join(sorted(taken))}, which is reported of the "
            "whole loss; give it another name"
        )
    return policy_loss if term is None else policy_loss + term, dict(inner_metrics) | metrics
