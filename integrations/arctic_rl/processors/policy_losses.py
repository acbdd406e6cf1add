"""SkyRL's policy losses besides the clipped surrogate: sums over tokens, whatever rows were batched together.

SkyRL weights the advantages of a mini-batch by its ``loss_reduction``, so that a policy loss is the plain sum of its
token terms over all micro-batches and ranks. ``rollout_is_weights``, where the batch has them, multiply the terms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from .aggregation import aggregate, masked_sum
from .loss_settings import check_choice, mask_of, required, settings_of
from .metrics import Maximum, Minimum
from .registry import register_loss_fn

__all__ = [
    "MAX_LOG_RATIO",
    "CispoConfig",
    "ClipRangeConfig",
    "DppoConfig",
    "NoConfig",
    "SapoConfig",
    "cispo_loss",
    "cross_entropy_loss",
    "dppo_loss",
    "gspo_loss",
    "importance_sampling_loss",
    "rollout_is_loss",
    "sapo_loss",
]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before exp: exp(20) is finite in float32 with room for a gradient (SkyRL's safe_exp_delta)."""
_MAX_LOG_SEQUENCE_RATIO = 10.0
"""The same of GSPO's weights, which are bounded above only (verl and SkyRL)."""
_EPSILON = 1e-8
"""Keeps the logarithm of a probability's complement finite in DPPO's binary KL."""


@dataclass(frozen=True)
class NoConfig:
    """A loss without settings."""


@dataclass(frozen=True)
class ClipRangeConfig:
    """Settings of ``gspo`` and ``rollout_is``."""

    eps_clip_low: float = 0.2
    """Width of the range below a ratio of 1."""
    eps_clip_high: float = 0.2
    """Width above 1."""

    def __post_init__(self) -> None:
        _check_at_least_0(self, "eps_clip_low", "eps_clip_high")


@dataclass(frozen=True)
class SapoConfig:
    """Settings of ``sapo``."""

    tau_pos: float = 1.0
    """Steepness of the gate for tokens of positive advantage."""
    tau_neg: float = 1.05
    """Steepness for the others."""

    def __post_init__(self) -> None:
        for name in ("tau_pos", "tau_neg"):
            value = vars(self)[name]
            if not value > 0:
                raise UnsupportedError(f"{name}={value} must be above 0")


@dataclass(frozen=True)
class CispoConfig:
    """Settings of ``cispo``."""

    cispo_eps_clip_low: float = 1.0
    """Width of the range below a ratio of 1."""
    cispo_eps_clip_high: float = 4.0
    """Width above 1."""
    cispo_anchor: str = "old"
    """Whose log-probs the ratio is taken to: ``old`` = the policy's at the batch's start, ``rollout`` = the
    sampler's."""

    def __post_init__(self) -> None:
        _check_at_least_0(self, "cispo_eps_clip_low", "cispo_eps_clip_high")
        check_choice("cispo_anchor", self.cispo_anchor, ("old", "rollout"))


@dataclass(frozen=True)
class DppoConfig:
    """Settings of ``dppo``."""

    dppo_type: str = "binary_tv"
    """Divergence of the two-point distributions {this token, any other}: ``binary_tv`` or ``binary_kl``."""
    delta_low: float = 0.2
    """Largest divergence at which tokens of negative advantage are trained on."""
    delta_high: float = 0.2
    """The same for positive advantages."""

    def __post_init__(self) -> None:
        _check_at_least_0(self, "delta_low", "delta_high")
        check_choice("dppo_type", self.dppo_type, ("binary_tv", "binary_kl"))


@register_loss_fn("gspo")
def gspo_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Clipped surrogate with one ratio a row, the geometric mean of its tokens' (arXiv 2507.18071, GSPO-token).

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, ``old_log_probs``.
        config: :class:`ClipRangeConfig`'s fields.

    Returns:
        The loss, and the metric clip_ratio.
    """
    settings = settings_of(ClipRangeConfig, "gspo", config, meta)
    tokens = _Tokens("gspo", model_outputs, batch)
    mask, logprobs = tokens.mask, tokens.logprobs
    num_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    of_row = masked_sum(logprobs - tokens.of("old_log_probs"), mask, dim=1)[:, None] / num_tokens
    log_ratio = logprobs - logprobs.detach() + of_row.detach()
    ratio = log_ratio.clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1 - settings.eps_clip_low, 1 + settings.eps_clip_high)
    return tokens.summed(torch.maximum(unclipped, clipped), meta), {"clip_ratio": tokens.share(clipped > unclipped)}


@register_loss_fn("sapo")
def sapo_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Surrogate with a sigmoid gate in place of the clip range (arXiv 2511.20347).

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, ``old_log_probs``.
        config: :class:`SapoConfig`'s fields.

    Returns:
        The loss, and the metric clip_ratio, which is 0.
    """
    settings = settings_of(SapoConfig, "sapo", config, meta)
    tokens = _Tokens("sapo", model_outputs, batch)
    ratio = _ratio(tokens.logprobs, tokens.of("old_log_probs"))
    tau = torch.where(tokens.advantages > 0, ratio.new_tensor(settings.tau_pos), ratio.new_tensor(settings.tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return tokens.summed(-gate * tokens.advantages, meta), {"clip_ratio": 0.0}


@register_loss_fn("cispo")
def cispo_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """REINFORCE weighted by a clipped ratio without gradient (arXiv 2506.13585).

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, and ``old_log_probs`` or
            ``rollout_logprobs`` as ``cispo_anchor`` says.
        config: :class:`CispoConfig`'s fields.

    Returns:
        The loss, and the metrics clip_ratio and cispo/ratio_mean, _clamped_mean, _max, _min.
    """
    settings = settings_of(CispoConfig, "cispo", config, meta)
    tokens = _Tokens("cispo", model_outputs, batch)
    anchor = "rollout_logprobs" if settings.cispo_anchor == "rollout" else "old_log_probs"
    ratio = _ratio(tokens.logprobs, tokens.of(anchor)).detach()
    low, high = 1 - settings.cispo_eps_clip_low, 1 + settings.cispo_eps_clip_high
    clamped = ratio.clamp(low, high)
    metrics = {
        "clip_ratio": tokens.share((ratio < low) | (ratio > high)),
        "cispo/ratio_mean": tokens.mean(ratio),
        "cispo/ratio_clamped_mean": tokens.mean(clamped),
        "cispo/ratio_max": Maximum(torch.where(tokens.kept, ratio, 0).max()),
        "cispo/ratio_min": Minimum(torch.where(tokens.kept, ratio, torch.inf).min()),
    }
    return tokens.summed(-tokens.advantages * clamped * tokens.logprobs, meta), metrics


@register_loss_fn("rollout_is")
def rollout_is_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """REINFORCE weighted by the ratio to the sampler's probability, without tokens outside the range (GLM-5,
    arXiv 2602.15763, section 4.1.2).

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, ``rollout_logprobs``.
        config: :class:`ClipRangeConfig`'s fields.

    Returns:
        The loss, and the metric clip_ratio.
    """
    settings = settings_of(ClipRangeConfig, "rollout_is", config, meta)
    tokens = _Tokens("rollout_is", model_outputs, batch)
    ratio = _ratio(tokens.logprobs, tokens.of("rollout_logprobs")).detach()
    inside = (ratio > 1 - settings.eps_clip_low) & (ratio < 1 + settings.eps_clip_high)
    terms = -torch.where(inside, ratio, 0) * tokens.advantages * tokens.logprobs
    return tokens.summed(terms, meta), {"clip_ratio": tokens.share(~inside)}


@register_loss_fn("dppo")
def dppo_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Surrogate without the tokens whose probability has already moved too far in the advantage's direction
    (arXiv 2602.04879, equations 13 and 14).

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, and ``rollout_logprobs``, without which
            ``old_log_probs`` take their place.
        config: :class:`DppoConfig`'s fields.

    Returns:
        The loss, and the metric clip_ratio.
    """
    settings = settings_of(DppoConfig, "dppo", config, meta)
    tokens = _Tokens("dppo", model_outputs, batch)
    behaviour = tokens.of("old_log_probs" if batch.get("rollout_logprobs") is None else "rollout_logprobs")
    with torch.no_grad():
        probs, behaviour_probs = tokens.logprobs.exp(), behaviour.exp()
        moved = probs - behaviour_probs
        if settings.dppo_type == "binary_tv":
            divergence = moved.abs()
        else:
            others = ((1 - behaviour_probs + _EPSILON) / (1 - probs + _EPSILON)).log()
            divergence = behaviour_probs * (behaviour - tokens.logprobs) + (1 - behaviour_probs) * others
        too_far = (tokens.advantages > 0) & (moved > 0) & (divergence > settings.delta_high)
        too_far |= (tokens.advantages < 0) & (moved < 0) & (divergence > settings.delta_low)
    terms = torch.where(too_far, 0, -_ratio(tokens.logprobs, behaviour) * tokens.advantages)
    return tokens.summed(terms, meta), {"clip_ratio": tokens.share(too_far)}


@register_loss_fn("importance_sampling")
def importance_sampling_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Surrogate without any clipping.

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``advantages``, ``old_log_probs``.
        config: empty.

    Returns:
        The loss, and the metric importance_ratio.
    """
    settings_of(NoConfig, "importance_sampling", config, meta)
    tokens = _Tokens("importance_sampling", model_outputs, batch)
    ratio = (tokens.logprobs - tokens.of("old_log_probs")).exp()
    return tokens.summed(-ratio * tokens.advantages, meta), {"importance_ratio": tokens.mean(ratio)}


@register_loss_fn("cross_entropy")
def cross_entropy_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Negative log-probs of the tokens, summed and not divided by anything.

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: ``loss_mask`` [b, S], the effective mask.
        config: empty.

    Returns:
        The loss, and the metric clip_ratio, which is 0.
    """
    settings_of(NoConfig, "cross_entropy", config, meta)
    mask = mask_of(batch, "cross_entropy")
    return aggregate(-model_outputs["logprobs"], mask, "sum", meta), {"clip_ratio": 0.0}


class _Tokens:
    """A micro-batch's tokens [b, S] under the effective mask, 0 elsewhere."""

    def __init__(self, loss: str, model_outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        self._loss = loss
        self._batch = batch
        self.mask = mask_of(batch, loss)
        self.kept = self.mask != 0
        self.logprobs = torch.where(self.kept, model_outputs["logprobs"], 0)
        self.advantages = self.of("advantages")

    def of(self, name: str) -> torch.Tensor:
        """A tensor of the batch that the loss cannot do without."""
        return torch.where(self.kept, required(self._batch, name, self._loss), 0)

    def summed(self, terms: torch.Tensor, meta: Mapping[str, Any]) -> torch.Tensor:
        """The micro-batch's share of the sum of all terms."""
        if self._batch.get("rollout_is_weights") is not None:
            terms = terms * self.of("rollout_is_weights")
        return aggregate(terms, self.mask, "sum", meta)

    def mean(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A metric: mean over the mini-batch's tokens."""
        return masked_sum(values.detach(), self.mask), self.mask.sum()

    def share(self, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A metric: the share of tokens that are so."""
        return self.mean(which.to(self.mask.dtype))


def _ratio(logprobs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_at_least_0(settings: Any, *names: str) -> None:
    for name in names:
        value = vars(settings)[name]
        if not value >= 0:
            raise UnsupportedError(f"{name}={value} must be at least 0")
