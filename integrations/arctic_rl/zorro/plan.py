"""Which groups go together into a micro-batch, and which to a rank. A shared prefix counts once for each."""

from collections.abc import Sequence

import numpy as np

from ..processors.packing import plan_micro_batches
from .cost import CostModel, prefix_cost, suffix_cost
from .groups import RowGroup
from .layout import num_shared_tokens

__all__ = ["balance_ranks", "local_groups", "plan_shared_micro_batches"]

_MOST_MOVES = 1000
"""Improvements of a balance that are made at most."""

_CLOSE_ENOUGH = 1.01
"""Highest load over the mean at which a balance is left as it is."""


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
    """Share rows among ranks so that their estimated costs are close: longest processing time first, then moves.

    Groups stay whole unless taking some rows of one to another rank, with a second copy of its prefix, brings the
    slowest rank down.

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
    balance = _Balance(groups, lengths, scored, cost)
    ranks = balance.longest_first(num_ranks)
    for _ in range(_MOST_MOVES):
        if not balance.improve(ranks):
            break
    return [sorted(row for rows in rank.values() for row in rows) for rank in ranks]


Rank = dict[int, list[int]]
"""Rows on a rank by the number of their group."""


class _Balance:
    """Costs of the rows of a call, and moves between ranks that lower the highest."""

    def __init__(self, groups: Sequence[RowGroup], lengths: Sequence[int], scored: Sequence[int], cost: CostModel):
        self._groups = groups
        self._prefix = [prefix_cost(cost, group.shared) for group in groups]
        self._suffix = {
            row: suffix_cost(cost, group.shared, int(lengths[row]), int(scored[row]))
            for group in groups
            for row in group.rows
        }

    def longest_first(self, num_ranks: int) -> list[Rank]:
        """Parts of falling cost, each to the rank that has least; groups are cut only where ranks would stay empty."""
        parts = [(number, list(group.rows)) for number, group in enumerate(self._groups)]
        while len(parts) < num_ranks:
            widest = max(range(len(parts)), key=lambda place: len(parts[place][1]))
            number, rows = parts[widest]
            half = len(rows) // 2
            parts[widest : widest + 1] = [(number, rows[:half]), (number, rows[half:])]
        parts.sort(key=lambda part: -self._cost(*part))
        ranks: list[Rank] = [{} for _ in range(num_ranks)]
        loads = np.zeros(num_ranks)
        for place, (number, rows) in enumerate(parts):
            empty = num_ranks - place - 1 < int((loads == 0).sum())
            target = int(np.where(loads == 0, loads, np.inf if empty else loads).argmin())
            _add(ranks[target], number, rows)
            loads[target] = self._load(ranks[target])
        return ranks

    def improve(self, ranks: list[Rank]) -> bool:
        """Make the best move off the rank with the highest load; False if none is left, or none is worth it."""
        loads = np.array([self._load(rank) for rank in ranks])
        slowest = int(loads.argmax())
        if loads[slowest] <= loads.mean() * _CLOSE_ENOUGH:
            return False
        best, best_load = None, loads[slowest] * (1 - 1e-9)
        for target in np.argsort(loads, kind="stable")[: min(4, len(ranks) - 1)].tolist():
            slow, fast, gap = ranks[slowest], ranks[target], loads[slowest] - loads[target]
            for given, taken, lost, gained in (self._exchange(slow, fast, gap), *self._cuts(slow, fast, gap)):
                load = max(loads[slowest] - lost, loads[target] + gained)
                if load < best_load:
                    best, best_load = (target, given, taken), load
        if best is None:
            return False
        target, given, taken = best
        _move(ranks[slowest], ranks[target], *given)
        if taken is not None:
            _move(ranks[target], ranks[slowest], *taken)
        return True

    def _exchange(self, slow: Rank, fast: Rank, gap: float) -> tuple:
        """One whole part given, for another or for nothing, so that the two ranks come closest."""
        costs = np.array([self._cost(*part) for part in slow.items()])
        back = np.array([*(self._cost(*part) for part in fast.items()), 0.0])
        if len(slow) == 1:
            back[-1] = np.inf
        out, into = np.unravel_index(np.abs(costs[:, None] - back - gap / 2).argmin(), (len(costs), len(back)))
        change = costs[out] - back[into]
        given, taken = list(slow.items())[out], [*fast.items(), None][into]
        return given, taken, change, change

    def _cuts(self, slow: Rank, fast: Rank, gap: float) -> list[tuple]:
        """Some rows of a part given, about half the difference; one proposal a part that has several rows."""
        moves = []
        for number, rows in slow.items():
            copy = 0.0 if number in fast else self._prefix[number]
            given, moved = [], 0.0
            for row in sorted(rows, key=self._suffix.__getitem__, reverse=True) if copy < gap else ():
                if 2 * (moved + self._suffix[row]) + copy <= gap and len(given) < len(rows) - 1:
                    given.append(row)
                    moved += self._suffix[row]
            if given:
                moves.append(((number, given), None, moved, moved + copy))
        return moves

    def _cost(self, number: int, rows: Sequence[int]) -> float:
        return self._prefix[number] + sum(self._suffix[row] for row in rows)

    def _load(self, rank: Rank) -> float:
        return sum(self._cost(*part) for part in rank.items())


def _parts(group: RowGroup, lengths: np.ndarray, max_tokens: int) -> list[RowGroup]:
    if len(group.rows) == 1 or num_shared_tokens(group, lengths) <= max_tokens:
        return [group]
    suffixes = lengths[list(group.rows)] - group.shared
    pieces = plan_micro_batches(suffixes, max(1, max_tokens - group.shared))
    return [RowGroup(tuple(group.rows[number] for number in numbers), group.shared) for numbers in pieces]


def _add(rank: Rank, number: int, rows: list[int]) -> None:
    rank[number] = [*rank.get(number, []), *rows]


def _move(source: Rank, target: Rank, number: int, rows: list[int]) -> None:
    left = [row for row in source.pop(number) if row not in rows]
    if left:
        source[number] = left
    _add(target, number, rows)
