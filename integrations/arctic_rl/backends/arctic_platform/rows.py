"""Rows of a call cut as the server's fixed number of micro-batches needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ...errors import RequestError

__all__ = ["check_rows", "pad_rows", "row_chunks"]

_MASKS = ("response_mask", "loss_mask")


def check_rows(batch: Mapping[str, torch.Tensor]) -> None:
    """Refuse a batch that lacks what every call needs, or whose tensors differ in their number of rows.

    Raises:
        RequestError: with the names.
    """
    missing = [name for name in ("input_ids", "attention_mask", "prompts") if batch.get(name) is None]
    if missing:
        raise RequestError(f"the batch has no {', '.join(missing)}")
    heights = {name: len(values) for name, values in batch.items() if isinstance(values, torch.Tensor)}
    if len(set(heights.values())) != 1 or not heights["input_ids"]:
        raise RequestError(f"the tensors of a batch must have one number of rows, above 0: {heights}")


def pad_rows(batch: Mapping[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """A batch of tensors [B, ...] with copies of its last row behind it, which carry no loss, until ``multiple``
    divides their number."""
    rows = len(batch["input_ids"])
    places = torch.arange(rows + (-rows) % multiple)
    padded = {name: values[places.clamp(max=rows - 1)] for name, values in batch.items()}
    for name in _MASKS:
        if name in padded:
            padded[name][places >= rows] = 0
    return padded


def row_chunks(batch: Mapping[str, torch.Tensor], rows: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Runs of at most ``rows`` rows of a batch; None = all of them in one."""
    total = len(batch["input_ids"])
    size = total if rows is None else rows
    for start in range(0, total, size):
        yield {name: values[start : start + size] for name, values in batch.items()}
