"""Metrics of an update that the server does not reckon, from the log-probs and entropies that it returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...processors.policy_losses import MAX_LOG_RATIO
from ...processors.regularizers import DRIFT

__all__ = ["returned_metrics"]


def returned_metrics(
    logprobs: torch.Tensor, entropies: torch.Tensor, batch: Mapping[str, torch.Tensor], mask: torch.Tensor
) -> dict[str, float]:
    """What ``run_pipeline`` reports beside the loss.

    Args:
        logprobs: [B, R], of the responses under the policy that was updated.
        entropies: [B, R], likewise.
        batch: ``old_log_probs`` and, where they are there, ``rollout_logprobs``, [B, R].
        mask: [B, R], of zeros and ones.

    Returns:
        entropy, ratio_max_deviation, and the moments and extremes of ``regularizers.DRIFT``.
    """
    kept, tokens = mask.bool(), max(int(mask.sum()), 1)

    def mean(values: torch.Tensor) -> float:
        return float(torch.where(kept, values, 0).sum(dtype=torch.float64)) / tokens

    ratio = (logprobs - batch["old_log_probs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    metrics = {
        "entropy": mean(entropies),
        "ratio_max_deviation": float(torch.where(kept, (ratio - 1).abs(), 0).max()),
    }
    if batch.get("rollout_logprobs") is not None:
        difference = torch.where(kept, (logprobs - batch["rollout_logprobs"]).abs(), 0)
        metrics |= {
            f"{DRIFT}_mean": mean(difference),
            f"{DRIFT}_sq_mean": mean(difference.square()),
            f"{DRIFT}_max": float(difference.max()),
            f"{DRIFT}_min": float(difference.min()),
        }
    return metrics
