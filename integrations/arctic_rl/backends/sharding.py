"""Rows of a batch to data-parallel ranks and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..zorro.cost import CostModel
from ..zorro.groups import find_groups, own_groups
from ..zorro.plan import balance_ranks


@dataclass(frozen=True)
class RankPlan:
    """Which rows each data-parallel rank takes."""

    rows: list[list[int]]
    """Row numbers of every rank, ascending; every row is in one. A rank has none where there are too few
    micro-batches."""

    def split(self, batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The rows of tensors [B, ...] of every rank."""
        return [{key: value[rows] for key, value in batch.items()} for rows in self.rows]

    def join(self, shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What the ranks returned for their rows, in the order of the batch."""
        place = torch.tensor([row for rows in self.rows for row in rows]).argsort()
        return {key: value[place] for key, value in join_rows(shards).items()}


def plan_ranks(batch: Mapping[str, torch.Tensor], parts: int, cost: CostModel, *, shared: bool) -> RankPlan:
    """Share rows among ranks so that each has about as much to compute.

    Of a batch whose rows have been put into micro-batches already (``micro_batch_ids``), each micro-batch goes to one
    rank whole: runs of them, as equal in number as can be.

    Args:
        batch: ``input_ids`` and ``attention_mask`` [B, S], ``prompts`` [B, P]; every tensor has B rows.
        parts: number of data-parallel ranks.
        cost: of the model that the rows go through.
        shared: whether rows with equal prompts share them on a rank.

    Raises:
        ValueError: the tensors differ in B, or there are fewer rows than ranks that need some.
    """
    total = _num_rows(batch)
    if parts == 1:
        return RankPlan([list(range(total))])
    if "micro_batch_ids" in batch:
        numbers, place = batch["micro_batch_ids"].unique(return_inverse=True)
        runs = torch.arange(len(numbers)).tensor_split(parts)
        return RankPlan([torch.isin(place, run).nonzero().flatten().tolist() for run in runs])
    mask, width = batch["attention_mask"], batch["prompts"].shape[1]
    lengths = mask.sum(dim=1).tolist()
    groups = own_groups(lengths)
    if shared:
        groups = find_groups(batch["input_ids"], mask, mask[:, :width].sum(dim=1))
    return RankPlan(balance_ranks(groups, lengths, mask[:, width:].sum(dim=1).tolist(), cost, parts))


def split_rows(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Cut every tensor of a batch into ``parts`` contiguous runs of rows, equal in number.

    Args:
        batch: tensors of shape [B, ...].
        parts: number of data-parallel ranks.

    Raises:
        ValueError: when B is not a multiple of ``parts``, or the tensors differ in B.
    """
    total = _num_rows(batch)
    if total % parts:
        raise ValueError(f"{total} rows cannot be shared equally by {parts} data-parallel ranks")
    size = total // parts
    return [
        {key: value[rank * size : (rank + 1) * size].contiguous() for key, value in batch.items()}
        for rank in range(parts)
    ]


def _num_rows(batch: Mapping[str, torch.Tensor]) -> int:
    rows = {value.shape[0] for value in batch.values()}
    if len(rows) != 1:
        raise ValueError(f"the tensors of a batch differ in their number of rows: {sorted(rows)}")
    return rows.pop()


def join_rows(shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put what the ranks returned back together, in the order of the rows."""
    return {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
