"""Comparison of two kept results in which real numbers may differ a little.

Not by rounding, where 0.49999 and 0.50001 fall apart however near they are, but pair by pair: two numbers of which one
is real are equal if `|a - b| <= max(rtol * max(|a|, |b|), atol)`, as `math.isclose` has it. That relation is not
transitive, so there is no digest for it, and the rows themselves are needed.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .compare import ComparisonMode, Value

type Row = tuple[Value, ...]


class ComparisonTimeout(Exception):
    """Two results were not compared in time."""


@dataclass(frozen=True)
class Tolerance:
    """How far apart two equal real numbers may be; both 0 = not at all."""

    rtol: float = 0.0
    """Relative to the greater of the two absolute values; from 0 to below 1."""
    atol: float = 0.0
    """In absolute terms."""

    def __bool__(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def equal(self, left: Value, right: Value) -> bool:
        """Says whether two cells are equal. Integers, text, BLOBs and NULL are compared exactly."""
        if left == right:
            return True
        if self and (left.__class__ is float or right.__class__ is float):
            both = isinstance(left, int | float) and isinstance(right, int | float)
            return both and math.isclose(left, right, rel_tol=self.rtol, abs_tol=self.atol)
        return False

    def bounds(self, value: float) -> tuple[float, float]:
        """Returns an interval that holds every number within the tolerance of `value`, if not only those."""
        if math.isinf(value):
            return value, value
        # |a - b| <= r |b| gives |b| <= |a| / (1 - r); widened by what these lines and conversions to float round
        reach = max(abs(value) * self.rtol / (1 - self.rtol), self.atol) * (1 + 1e-9)
        return math.nextafter(value - reach, -math.inf), math.nextafter(value + reach, math.inf)


def equal_within(
    predicted: Sequence[Row],
    gold: Sequence[Row],
    tolerance: Tolerance,
    mode: ComparisonMode = "set",
    *,
    gold_orders_rows: bool = False,
    timeout_s: float = math.inf,
) -> bool:
    """Says whether two results are equal within a tolerance; the modes are those of `compare.equal_results`.

    As sets, each row of either must have an equal one in the other; as multisets, the rows must pair up one to one (a
    perfect matching); in order, the n-th rows must be equal. Takes about n log n steps for n rows, and n**2 (as sets)
    or n**3 where many rows lie within the tolerance of each other.

    Raises ComparisonTimeout after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    if mode == "ordered" and gold_orders_rows:
        return len(predicted) == len(gold) and all(
            _rows_equal(left, right, tolerance) for left, right in zip(predicted, gold, strict=True)
        )
    if mode == "set":
        predicted, gold = list(dict.fromkeys(predicted)), list(dict.fromkeys(gold))
    elif len(predicted) != len(gold):
        return False
    left, right = _by_exact_part(predicted), _by_exact_part(gold)
    if left.keys() != right.keys():
        return False
    agree = _cover_each_other if mode == "set" else _pair_up
    return all(agree(left[part], right[part], tolerance, deadline) for part in left)


def _rows_equal(left: Row, right: Row, tolerance: Tolerance) -> bool:
    return len(left) == len(right) and all(map(tolerance.equal, left, right))


def _by_exact_part(rows: Sequence[Row]) -> dict[Row, list[Row]]:
    """Groups rows by what no tolerance applies to: their text, BLOBs and NULLs, and where those stand."""
    groups: dict[Row, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(... if isinstance(value, int | float) else value for value in row)].append(row)
    return groups


class _Index:
    """Rows of one group, sorted by their most telling number, to find the ones equal to a given row."""

    def __init__(self, rows: Sequence[Row], tolerance: Tolerance) -> None:
        numbers = [column for column, value in enumerate(rows[0]) if isinstance(value, int | float)]
        self._tolerance = tolerance
        self._column = max(numbers, key=lambda column: len({row[column] for row in rows}), default=None)
        self._rows = list(enumerate(rows))
        if self._column is not None:
            self._rows.sort(key=lambda item: item[1][self._column])
            self._keys = [row[self._column] for _, row in self._rows]

    def equal_to(self, row: Row) -> Iterator[int]:
        """Yields the positions, in the rows given, of those equal to `row`."""
        first, last = 0, len(self._rows)
        if self._column is not None:
            low, high = self._tolerance.bounds(row[self._column])
            first, last = bisect_left(self._keys, low), bisect_right(self._keys, high)
        for position, other in self._rows[first:last]:
            if _rows_equal(row, other, self._tolerance):
                yield position


def _cover_each_other(left: list[Row], right: list[Row], tolerance: Tolerance, deadline: float) -> bool:
    for rows, index in ((left, _Index(right, tolerance)), (right, _Index(left, tolerance))):
        for row in rows:
            _check(deadline)
            if next(index.equal_to(row), None) is None:
                return False
    return True


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ComparisonTimeout("the results were not compared in time")


def _pair_up(left: list[Row], right: list[Row], tolerance: Tolerance, deadline: float) -> bool:
    """Says whether a perfect matching exists, by augmenting paths, each found breadth first."""
    if len(left) != len(right):
        return False
    index = _Index(right, tolerance)
    partners = []
    for row in left:
        _check(deadline)
        partners.append(list(index.equal_to(row)))
    partner_of: dict[int, int] = {}
    taken_by: dict[int, int] = {}
    for start in range(len(left)):
        _check(deadline)
        reached_from: dict[int, int] = {}
        end = _free_partner(start, partners, taken_by, reached_from)
        if end is None:
            return False
        row = -1
        while row != start:
            row = reached_from[end]
            freed = partner_of.get(row, -1)
            partner_of[row], taken_by[end] = end, row
            end = freed
    return True


def _free_partner(
    start: int, partners: list[list[int]], taken_by: dict[int, int], reached_from: dict[int, int]
) -> int | None:
    """Searches breadth first, over partners taken by others, for one that is free; notes whence each was reached."""
    queue = [start]
    for row in queue:
        for partner in partners[row]:
            if partner in reached_from:
                continue
            reached_from[partner] = row
            if partner not in taken_by:
                return partner
            queue.append(taken_by[partner])
    return None
