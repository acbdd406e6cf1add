"""The critic's update as the server is asked for it, and its metrics as SkyRL's critic worker reports them."""

from __future__ import annotations

import math
from typing import Any

import torch

from .micro_batches import skyrl_dp_size, skyrl_micro_batch_ids

__all__ = ["critic_metrics", "critic_processing", "row_weights"]


def critic_processing(cfg: Any) -> dict[str, Any]:
    """The ``processing`` of an update of the critic."""
    value_clip = cfg.trainer.algorithm.value_clip
    return {"loss_fn": "value", "config": {"value_clip": None if value_clip is None else float(value_clip)}}


def row_weights(attention_mask: torch.Tensor, trainer: Any) -> torch.Tensor:
    """What each row's mean error counts in a mini-batch's value loss, as SkyRL's workers weigh it.

    SkyRL takes the mean over a worker's rows; of micro-batches with a fixed number of rows the mean of their means,
    which differs where the last one is smaller. The gradient is a mean over workers.

    Args:
        attention_mask: [B, S]; B is a multiple of the critic's ``skyrl_dp_size``.
        trainer: the recipe's validated ``trainer`` section.

    Returns:
        [B], float32, summing to 1.
    """
    workers = skyrl_dp_size(trainer, "critic")
    rows = len(attention_mask) // workers
    if trainer.max_tokens_per_microbatch > 0:
        return torch.full((len(attention_mask),), 1 / len(attention_mask))
    ids = skyrl_micro_batch_ids(attention_mask, trainer=trainer, model="critic")
    micro_batches = workers * math.ceil(rows / trainer.micro_train_batch_size_per_gpu)
    return 1 / (micro_batches * ids.bincount()[ids].float())


def critic_metrics(result: dict[str, Any]) -> dict[str, float]:
    """SkyRL's names for a mini-batch's metrics: its loss, and means over its tokens.

    Args:
        result: ``run_pipeline``'s result with ``lr``, the learning rate that the next optimizer step uses.
    """
    return {"critic_loss": result["avg_loss"], **result["metrics"], "critic_lr": result["lr"]}
