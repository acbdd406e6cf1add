"""Rows of a padded batch packed to one row without padding, and the plan of which rows go together.

B rows, S width of the padded batch, b rows of one micro-batch, T tokens of one packed micro-batch::

    input_ids_BS, attention_mask_BS          packed
    | .  1  2  3  . |                        input_ids_1T     |  1  2  3 | 4  5 |
    | 4  5  .  .  . |                        position_ids_1T  |  0  1  2 | 0  1 |
                                             cu_seqlens       |  0         3    5 |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch

__all__ = ["PackedRows", "pack_rows", "plan_micro_batches", "row_lengths", "rows_of_packed"]

_FILLER_TOKENS = 2
"""Tokens given to the model for rows that have none: enough for one of them to be predicted."""


@dataclass(frozen=True)
class PackedRows:
    """b rows laid end to end. Rows without tokens have no segment."""

    input_ids: torch.Tensor
    """[1, T], int64."""
    position_ids: torch.Tensor
    """[1, T], int64, restarting at 0 with every segment."""
    cu_seqlens: torch.Tensor
    """[segments + 1], int32: where each segment starts, and T."""
    max_length: int
    """Longest segment, in tokens."""
    flat_index: torch.Tensor
    """[T], int64: the place of every packed token in the flattened [b, S] rows, ascending; shorter than T where the
    last tokens are there only because a model needs some, and belong to no row."""
    shape: tuple[int, int]
    """(b, S)."""
    scored: torch.Tensor | None = None
    """[T], bool: the tokens that get a log-prob; None = all but each segment's first."""

    def to(self, device: torch.device | str) -> "PackedRows":
        """The same rows on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)

    def unpack(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [b, S, ...], exactly 0 outside the rows; differentiable."""
        kept = values_T[: len(self.flat_index)]
        flat = kept.new_zeros((self.shape[0] * self.shape[1], *kept.shape[1:]))
        return flat.index_copy(0, self.flat_index, kept).view(*self.shape, *kept.shape[1:])

    def pack(self, values_BS: torch.Tensor) -> torch.Tensor:
        """[b, S, ...] to [T, ...]."""
        return values_BS.reshape(-1, *values_BS.shape[2:]).index_select(0, self.flat_index)


def row_lengths(attention_mask: torch.Tensor) -> torch.Tensor:
    """Token counts [B] of the rows of a mask [B, S] whose ones are contiguous in every row, wherever they start.

    Raises:
        ValueError: the mask is not [B, S], or a row has a hole.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be [B, S], got {list(attention_mask.shape)}")
    kept = attention_mask.bool()
    lengths_B = kept.sum(dim=1)
    starts = kept.clone()
    starts[:, 1:] &= ~kept[:, :-1]
    holes = starts.sum(dim=1) > 1
    if holes.any():
        raise ValueError(
            f"attention_mask: row {int(holes.int().argmax())} has a hole; padding may stand left and right of a row's "
            "tokens, not between them"
        )
    return lengths_B


def plan_micro_batches(lengths: Sequence[int] | np.ndarray | torch.Tensor, max_tokens: int) -> list[list[int]]:
    """Group rows so that no group holds more than ``max_tokens`` tokens: first-fit decreasing.

    Args:
        lengths: tokens of every row.
        max_tokens: budget of a group, in tokens.

    Returns:
        Row numbers of every group, ascending within a group; every row is in one group. No rows give no groups.

    Raises:
        ValueError: a row is longer than the budget, or the budget is not a positive whole number.
    """
    lengths_B = np.asarray(lengths, dtype=np.int64)
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or max_tokens < 1:
        raise ValueError(f"max_tokens_per_mb={max_tokens!r} must be a whole number, 1 at least")
    if lengths_B.size and lengths_B.max() > max_tokens:
        row = int(lengths_B.argmax())
        raise ValueError(
            f"row {row} has {lengths_B[row]} tokens, more than max_tokens_per_mb={max_tokens}; set it to at least "
            f"{lengths_B[row]}"
        )
    order = np.argsort(-lengths_B, kind="stable")
    free = np.empty(len(lengths_B), dtype=np.int64)
    groups: list[list[int]] = []
    for row in order.tolist():
        length = int(lengths_B[row])
        fits = free[: len(groups)] >= length
        slot = int(fits.argmax()) if len(groups) else 0
        if not len(groups) or not fits[slot]:
            slot = len(groups)
            free[slot] = max_tokens
            groups.append([])
        free[slot] -= length
        groups[slot].append(row)
    return [sorted(group) for group in groups]


def pack_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> PackedRows:
    """Pack the rows of [b, S] ids whose masks have no holes (:func:`row_lengths` checks that).

    No tokens at all give filler tokens that belong to no row.
    """
    kept = attention_mask.bool()
    flat_index = kept.reshape(-1).nonzero().squeeze(1)
    lengths = kept.sum(dim=1)
    if not len(flat_index):
        filler = input_ids.new_zeros(_FILLER_TOKENS)
        return _packed(filler, lengths.new_full((1,), _FILLER_TOKENS), flat_index, tuple(input_ids.shape))
    return _packed(input_ids.reshape(-1).index_select(0, flat_index), lengths, flat_index, tuple(input_ids.shape))


def rows_of_packed(input_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> PackedRows:
    """The packed rows behind ids [1, T] (or [T]) and borders; a row is as wide as the longest segment, left-aligned.

    Raises:
        ValueError: the borders do not start at 0, do not grow, or do not end at T.
    """
    ids_T = input_ids.reshape(-1)
    if input_ids.numel() != input_ids.shape[-1]:
        raise ValueError(f"packed input_ids must be [1, T], got {list(input_ids.shape)}")
    borders = torch.as_tensor(cu_seqlens, device=ids_T.device).long()
    lengths = borders.diff()
    if borders.ndim != 1 or len(borders) < 2 or borders[0] != 0 or borders[-1] != len(ids_T) or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must grow from 0 to the {len(ids_T)} packed tokens, got {borders.tolist()}")
    width = int(lengths.max())
    row = torch.repeat_interleave(torch.arange(len(lengths), device=ids_T.device), lengths)
    flat_index = row * width + torch.arange(len(ids_T), device=ids_T.device) - borders[:-1][row]
    return _packed(ids_T, lengths, flat_index, (len(lengths), width))


def _packed(ids_T: torch.Tensor, lengths: torch.Tensor, flat_index: torch.Tensor, shape: tuple) -> PackedRows:
    lengths = lengths[lengths > 0]
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=ids_T.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    position_ids = torch.arange(len(ids_T), device=ids_T.device) - torch.repeat_interleave(
        cu_seqlens[:-1].long(), lengths
    )
    return PackedRows(
        input_ids=ids_T[None],
        position_ids=position_ids[None],
        cu_seqlens=cu_seqlens,
        max_length=int(lengths.max()) if len(lengths) else 0,
        flat_index=flat_index,
        shape=shape,
    )
