"""Groups of rows that begin with the same tokens, found from the tokens alone.

Rows are sorted by their tokens, so that equal beginnings lie next to each other, and the sorted rows are cut into runs
so that as few tokens as possible are left after each run's common prefix is counted once. The order in which rows
come, and names of prompts, have no part in it::

    rows                 prompts     groups
    7 8 9 | 1            7 8 9       rows 0, 2 share 7 8 9
    4 5   | 1 2          4 5         row 1 alone
    7 8 9 | 1 3          7 8 9
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["MIN_PARTIAL_PREFIX", "RowGroup", "find_groups", "own_groups"]

MIN_PARTIAL_PREFIX = 64
"""Tokens that rows must have in common to share them where neither row's whole prompt is common: fewer cost more in
separate attention than they save."""


@dataclass(frozen=True)
class RowGroup:
    """Rows whose first ``shared`` tokens are equal; a row alone shares all of its tokens with itself."""

    rows: tuple[int, ...]
    """Row numbers, ascending."""
    shared: int
    """Length of the common prefix, in tokens; at most the shortest row's length."""


def find_groups(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompt_lengths: torch.Tensor | Sequence[int] | None = None,
    *,
    min_partial: int = MIN_PARTIAL_PREFIX,
) -> list[RowGroup]:
    """Cut rows into groups that share their beginning.

    Two rows may share their common prefix if it holds the whole prompt of one of them (equal prompts; a later step of
    the same trajectory), or at least ``min_partial`` tokens. A group shares what all of its rows have in common. Of
    all groupings of the sorted rows, the one that saves most tokens is taken.

    Args:
        input_ids: [B, S], ids at least 0.
        attention_mask: [B, S], no holes in a row (not checked here).
        prompt_lengths: [B], leading tokens of each row that are its prompt; None = the prompts are not known, and
            only ``min_partial`` decides.
        min_partial: tokens, at least 1.

    Returns:
        Groups ordered by their first row; every row is in one of them.
    """
    tokens, lengths = _left_aligned(input_ids, attention_mask)
    num_rows = len(lengths)
    if num_rows == 0:
        return []
    order = _sorted_rows(tokens)
    common = _common_with_next(tokens[order], lengths[order])
    if prompt_lengths is None:
        enough = common >= min_partial
    else:
        prompts = np.minimum(_as_numpy(prompt_lengths), lengths)[order]
        enough = (common >= min_partial) | (common >= np.minimum(prompts[:-1], prompts[1:]))
    common = np.where(enough, common, 0)
    groups = []
    for start, stop in _runs(common):
        members = order[start:stop]
        shared = int(common[start : stop - 1].min()) if stop - start > 1 else int(lengths[members[0]])
        groups.append(RowGroup(tuple(sorted(members.tolist())), shared))
    return sorted(groups, key=lambda group: group.rows[0])


def own_groups(lengths: Sequence[int]) -> list[RowGroup]:
    """Every row in a group of its own: nothing is shared."""
    return [RowGroup((row,), int(length)) for row, length in enumerate(lengths)]


def _left_aligned(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ids plus one of every row from column 0, 0 after its end: [B, longest] big-endian, and lengths [B]."""
    ids, kept = _as_numpy(input_ids), _as_numpy(attention_mask).astype(bool)
    lengths = kept.sum(axis=1)
    tokens = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=">u4")
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = ids[kept] + 1
    return tokens, lengths


def _sorted_rows(tokens: np.ndarray) -> np.ndarray:
    """Row numbers in lexicographic order of their tokens; equal rows keep their order."""
    keys = [row.tobytes() for row in tokens]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__))


def _common_with_next(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B - 1]: leading tokens that each row has in common with the row after it."""
    if not tokens.shape[1]:
        return np.zeros(len(lengths) - 1, dtype=np.int64)
    differs = tokens[:-1] != tokens[1:]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.shape[1])
    return np.minimum(first, np.minimum(lengths[:-1], lengths[1:]))


def _runs(common: np.ndarray) -> list[tuple[int, int]]:
    """Cut sorted rows into runs [start, stop) with the largest sum of (rows - 1) x common prefix.

    ``common[i]`` belongs to rows i and i + 1; a run never goes across a 0. Of equally good cuts the one with the
    longest runs is taken.
    """
    num_rows = len(common) + 1
    saved = np.zeros(num_rows + 1, dtype=np.int64)
    best_start = np.zeros(num_rows + 1, dtype=np.int64)
    least = np.zeros(0, dtype=np.int64)
    first = 0
    for stop in range(1, num_rows + 1):
        if stop > 1 and common[stop - 2] == 0:
            first, least = stop - 1, least[:0]
        elif stop > 1:
            least = np.minimum(np.append(least, common[stop - 2]), common[stop - 2])
        starts = np.arange(first, stop)
        gains = saved[first:stop] + (stop - starts - 1) * np.append(least, 0)
        best = int(gains.argmax())
        saved[stop], best_start[stop] = gains[best], first + best
    runs = []
    stop = num_rows
    while stop:
        runs.append((int(best_start[stop]), stop))
        stop = runs[-1][0]
    return runs[::-1]


def _as_numpy(values: torch.Tensor | Sequence[int]) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
