"""SkyRL's off-policy correction of a mini-batch as one weight a token, whatever the micro-batches are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import UnsupportedError

__all__ = ["correction_weights"]


def correction_weights(batch: Mapping[str, Any], correction: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """SkyRL's ``compute_off_policy_correction`` on a whole mini-batch.

    It depends on the old and the sampler's log-probs alone. A token that it masks, by itself or with its sequence, is
    given the weight 0, which is the same for a policy term that is a sum over tokens; the KL and entropy terms keep
    such tokens, as in SkyRL.

    Args:
        batch: ``action_log_probs``, ``rollout_logprobs`` and ``loss_mask``, each [B, R], of every row of the
            mini-batch.
        correction: the recipe's ``trainer.algorithm.off_policy_correction``.

    Returns:
        Weights [B, R], float32, and SkyRL's metrics of the mini-batch.

    Raises:
        UnsupportedError: the sampler's log-probs are missing.
    """
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import compute_off_policy_correction

    if batch.get("rollout_logprobs") is None:
        raise UnsupportedError(
            "trainer.algorithm.off_policy_correction needs the sampler's log-probs, and the rollouts have none: write "
            "generator.sampling_params.logprobs=1, and use a generator that returns rollout_logprobs"
        )
    mask = batch["loss_mask"]
    kept = mask != 0
    old, rollout = (torch.where(kept, batch[name], 0) for name in ("action_log_probs", "rollout_logprobs"))
    ratio, metrics, corrected_mask = compute_off_policy_correction(old, rollout, mask, correction)
    weights = (corrected_mask != 0).float()
    return weights if ratio is None else weights * ratio, metrics
