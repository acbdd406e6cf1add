"""Rows of a batch to data-parallel ranks and back."""

from __future__ import annotations

from typing import Any

import torch


def split_rows(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Cut every tensor of a batch into ``parts`` contiguous runs of rows, equal in number.

    Args:
        batch: tensors of shape [B, ...].
        parts: number of data-parallel ranks.

    Raises:
        ValueError: when B is not a multiple of ``parts``, or the tensors differ in B.
    """
    rows = {value.shape[0] for value in batch.values()}
    if len(rows) != 1:
        raise ValueError(f"the tensors of a batch differ in their number of rows: {sorted(rows)}")
    total = rows.pop()
    if total % parts:
        raise ValueError(f"{total} rows cannot be shared equally by {parts} data-parallel ranks")
    size = total // parts
    return [
        {key: value[rank * size : (rank + 1) * size].contiguous() for key, value in batch.items()}
        for rank in range(parts)
    ]


def join_rows(shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put what the ranks returned back together, in the order of the rows."""
    return {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
