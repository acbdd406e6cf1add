"""The clipped value loss of PPO, and what the pipeline knows of a value model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from .aggregation import aggregate, masked_sum
from .loss_settings import mask_of, required, settings_of
from .registry import register_loss_fn

__all__ = ["HEAD_ATTRIBUTE", "ValueLossConfig", "is_value_model", "value_loss"]

HEAD_ATTRIBUTE = "value_head_prefix"
"""Attribute of a value model that holds the name of its value head."""


def is_value_model(module: Any) -> bool:
    """Whether a module returns one value a position, [b, T, 1], as its ``logits``."""
    return isinstance(getattr(module, HEAD_ATTRIBUTE, None), str)


@dataclass(frozen=True)
class ValueLossConfig:
    """Settings of the ``value`` loss."""

    value_clip: float | None = None
    """How far a value counts as moved from the old one; None = as far as it moved."""

    def __post_init__(self) -> None:
        if self.value_clip is not None and not self.value_clip >= 0:
            raise UnsupportedError(f"value_clip={self.value_clip} must be at least 0, or None for no clipping")


@register_loss_fn("value")
def value_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Half the squared error of values to returns, clipped around the old values (arXiv 2005.12729).

    The larger of the errors with and without clipping counts, a row is the mean over its tokens of the effective mask,
    and the loss a mean over rows, as in SkyRL's ``ppo_critic_loss``.

    Args:
        model_outputs: ``values`` [b, S] of a value model.
        batch: [b, S] each: ``loss_mask`` (the effective mask), ``returns``; ``values``, the old ones, with value_clip.
            ``row_weights`` [b], where given, weighs the rows in place of 1 / global_batch_size.
        meta: denominators of the mini-batch.
        config: :class:`ValueLossConfig`'s fields.

    Returns:
        The loss, and the metrics values_mean and, with value_clip, values_clipfrac: means over tokens.

    Raises:
        ValueError: a needed tensor is missing; UnsupportedError: a setting is unknown or out of range.
    """
    settings = settings_of(ValueLossConfig, "value", config, meta)
    mask = mask_of(batch, "value")
    kept = mask != 0
    values = torch.where(kept, model_outputs["values"], 0)
    returns = torch.where(kept, required(batch, "returns", "value"), 0)
    errors = (values - returns).square()
    metrics = {"values_mean": (masked_sum(values, mask), mask.sum())}
    if settings.value_clip is not None:
        old_values = torch.where(kept, required(batch, "values", "value"), 0)
        moved = (values - old_values).clamp(-settings.value_clip, settings.value_clip)
        clipped = (old_values + moved - returns).square()
        metrics["values_clipfrac"] = (masked_sum((clipped > errors).to(mask.dtype), mask), mask.sum())
        errors = torch.maximum(errors, clipped)
    if batch.get("row_weights") is None:
        return 0.5 * aggregate(errors, mask, "seq-mean-token-mean", meta), metrics
    means = masked_sum(errors, mask, dim=1) / mask.sum(dim=1).clamp(min=1)
    return 0.5 * (batch["row_weights"] * means).sum() * meta["dp_size"], metrics
