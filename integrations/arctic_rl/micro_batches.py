"""SkyRL's own micro-batches of a mini-batch, for losses whose value depends on which rows stand together."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["micro_batch_counts", "skyrl_micro_batch_ids"]


def skyrl_micro_batch_ids(attention_mask: torch.Tensor, *, ranks: int, trainer: Any) -> torch.Tensor:
    """The number of each row's micro-batch within its data-parallel rank, as SkyRL's policy worker cuts them.

    Runs of ``micro_train_batch_size_per_gpu`` rows, or with ``max_tokens_per_microbatch`` above 0 the balanced packing
    of SkyRL's ``TokenBasedBatchIterator``, whose limit a single longer row may exceed.

    Args:
        attention_mask: [B, S]; B is a multiple of ``ranks``, each of which takes a run of rows.
        ranks: data-parallel ranks.
        trainer: the recipe's ``trainer`` section.

    Returns:
        [B], int64, counting from 0 within each rank.
    """
    rows = len(attention_mask) // ranks
    budget = trainer.max_tokens_per_microbatch
    if budget <= 0:
        return (torch.arange(rows) // trainer.micro_train_batch_size_per_gpu).repeat(ranks)

    from skyrl.train.dataset.bin_packing import make_seq_packer

    ids = torch.empty(ranks, rows, dtype=torch.int64)
    for rank, lengths in enumerate(attention_mask.sum(dim=1).view(ranks, rows).tolist()):
        for number, members in enumerate(make_seq_packer("balanced", bin_capacity=budget).pack(lengths)):
            ids[rank, members] = number
    return ids.view(-1)


def micro_batch_counts(per_rank: list[int]) -> dict[str, float]:
    """SkyRL's metrics of token-based micro-batches: how many each rank runs, and how many of them are fillers."""
    most = max(per_rank)
    return {
        "num_microbatches": float(most),
        "num_padding_microbatches": sum(most - number for number in per_rank) / len(per_rank),
    }
