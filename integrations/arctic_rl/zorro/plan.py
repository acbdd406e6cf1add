"""Which groups go together into a micro-batch, and which to a rank. A shared prefix counts once for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from ..processors.packing import plan_micro_batches
from .cost import CostModel, prefix_cost, suffix_cost
from .groups import RowGroup
from .layout import num_shared_tokens

__all__ = ["balance_ranks", "local_groups", "plan_shared_micro_batches"]

_STEP = 0.002
"""How closely the lowest load that ranks can be filled to is looked for, as a share of the mean load."""


def plan_shared_micro_batches(
    groups: Sequence[RowGroup], lengths: Sequence[int], max_tokens: int
) -> list[list[RowGroup]]:
    """Pack groups into micro-batches of at most ``max_tokens`` laid-out tokens, first-fit decreasing.

    A group that fits stays whole; one that does not is cut into parts, each with a copy of the prefix.

    Args:
        groups: of :func:`find_groups`.
        lengths: tokens of every row, prefix included.
        max_tokens: budget, in tokens.

    Returns:
        The groups, or parts of groups, of every micro-batch.

    Raises:
        ValueError: a row alone is longer than the budget, or the budget is not positive.
    """
    lengths_B = np.asarray(lengths, dtype=np.int64)
    plan_micro_batches(lengths_B.max(initial=0, keepdims=True), max_tokens)
    parts = [part for group in groups for part in _parts(group, lengths_B, max_tokens)]
    sizes = [num_shared_tokens(part, lengths_B) for part in parts]
    return [[parts[number] for number in numbers] for numbers in plan_micro_batches(sizes, max_tokens)]


def local_groups(groups: Sequence[RowGroup]) -> tuple[list[int], list[RowGroup]]:
    """The rows of some groups, ascending, and the same groups with rows counted among those."""
    rows = sorted(row for group in groups for row in group.rows)
    number = {row: place for place, row in enumerate(rows)}
    return rows, [RowGroup(tuple(number[row] for row in group.rows), group.shared) for group in groups]


def balance_ranks(
    groups: Sequence[RowGroup], lengths: Sequence[int], scored: Sequence[int], cost: CostModel, num_ranks: int
) -> list[list[int]]:
    """Share rows among ranks so that the highest of their estimated costs is low.

    Ranks are filled up to a limit, and the lowest limit at which all rows find a place is looked for by bisection, as
    in Hochbaum and Shmoys, "Using dual approximation algorithms for scheduling problems" (1987). Groups come by
    falling cost, each to the fullest rank that has room for it; one that no rank has room for is cut, with a copy of
    its prefix on every rank that gets a part.

    Args:
        groups: of :func:`find_groups`.
        lengths: tokens of every row.
        scored: tokens of every row that get a log-prob.
        num_ranks: at most the number of rows.

    Returns:
        Row numbers of every rank, ascending, none empty; every row is in one.
    """
    if num_ranks > (num_rows := sum(len(group.rows) for group in groups)):
        raise ValueError(f"{num_rows} rows cannot be shared by {num_ranks} ranks")
    whole = [_part(group, lengths, scored, cost) for group in groups]
    whole.sort(key=lambda part: -part.cost)
    mean = sum(part.cost for part in whole) / num_ranks
    low, width = max([mean, *(part.prefix + part.suffixes[0] for part in whole)]), _STEP * mean
    while (ranks := _fill(whole, low + width, num_ranks)) is None:
        low, width = low + width, 2 * width
    while width > _STEP * mean:
        width /= 2
        closer = _fill(whole, low + width, num_ranks)
        low, ranks = (low + width, ranks) if closer is None else (low, closer)
    _leave_none_empty(ranks)
    return [sorted(row for part in rank for row in part.rows) for rank in ranks]


@dataclass(frozen=True)
class _Part:
    """Rows of a group on one rank, by falling cost of what follows the prefix."""

    prefix: float
    """Cost of the prefix."""
    rows: tuple[int, ...]
    suffixes: tuple[float, ...]
    """Cost of each row's tokens after the prefix."""

    @cached_property
    def cost(self) -> float:
        return self.prefix + sum(self.suffixes)

    def take(self, kept: Sequence[bool]) -> "_Part":
        return _Part(self.prefix, tuple(compress(self.rows, kept)), tuple(compress(self.suffixes, kept)))


def _part(group: RowGroup, lengths: Sequence[int], scored: Sequence[int], cost: CostModel) -> _Part:
    suffixes = {row: suffix_cost(cost, group.shared, int(lengths[row]), int(scored[row])) for row in group.rows}
    rows = tuple(sorted(group.rows, key=lambda row: -suffixes[row]))
    return _Part(prefix_cost(cost, group.shared), rows, tuple(suffixes[row] for row in rows))


def _fill(parts: Sequence[_Part], limit: float, num_ranks: int) -> list[list[_Part]] | None:
    """Ranks filled to at most ``limit``; None if some row finds no place."""
    free = np.full(num_ranks, limit)
    ranks: list[list[_Part]] = [[] for _ in range(num_ranks)]
    for part in parts:
        left: _Part | None = part
        has_none = np.ones(num_ranks, dtype=bool)
        while left is not None:
            fits = has_none & (free >= left.cost)
            if fits.any():
                target, given, left = int(np.where(fits, free, np.inf).argmin()), left, None
            else:
                target = int(np.where(has_none, free, -np.inf).argmax())
                kept, room = [], free[target] - left.prefix
                for suffix in left.suffixes:
                    kept.append(bool(has_none[target]) and suffix <= room)
                    room -= suffix if kept[-1] else 0.0
                if not any(kept):
                    return None
                given, left = left.take(kept), left.take([not taken for taken in kept])
            has_none[target] = False
            free[target] -= given.cost
            ranks[target].append(given)
    return ranks


def _leave_none_empty(ranks: list[list[_Part]]) -> None:
    """Give every rank without rows some of the most loaded rank that has several."""
    for rank in ranks:
        if rank:
            continue
        several = [other for other in ranks if sum(len(part.rows) for part in other) > 1]
        giver = max(several, key=lambda other: sum(part.cost for part in other))
        part = giver.pop()
        if giver:
            rank.append(part)
            continue
        first = [place % 2 == 0 for place in range(len(part.rows))]
        giver.append(part.take(first))
        rank.append(part.take([not taken for taken in first]))


def _parts(group: RowGroup, lengths: np.ndarray, max_tokens: int) -> list[RowGroup]:
    if len(group.rows) == 1 or num_shared_tokens(group, lengths) <= max_tokens:
        return [group]
    suffixes = lengths[list(group.rows)] - group.shared
    pieces = plan_micro_batches(suffixes, max(1, max_tokens - group.shared))
    return [RowGroup(tuple(group.rows[number] for number in numbers), group.shared) for numbers in pieces]
