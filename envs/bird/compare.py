"""Exact comparison of query results of any size, by digests that see every row.

BIRD's evaluator compares `set(predicted rows) == set(gold rows)` (`evaluation.py` of bird-bench/mini_dev): duplicates
and order of rows do not matter, the order of columns does, and values are equal as Python's are (1 = 1.0, but not '1';
NULL = NULL; text never equals a BLOB). The digests reproduce that for results that need not be kept.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

type Value = int | float | str | bytes | None
type ComparisonMode = Literal["set", "multiset", "ordered"]

_MODULUS = 1 << 128
_MAX_EXACT_INT = 2.0**63
_LONG_CELL = 1 << 16


@dataclass(frozen=True)
class Fingerprint:
    """What is left of a result once all its rows have been seen. Equal fingerprints mean equal results (128 bits)."""

    row_count: int
    """Rows, duplicates included."""
    distinct_row_count: int
    """Different rows."""
    as_set: int
    """Sum of the digests of the different rows, modulo 2**128."""
    as_multiset: int
    """Sum of the digests of all rows, modulo 2**128."""
    in_order: bytes
    """Digest of the sequence of row digests."""


class RowDigester:
    """Folds rows into a `Fingerprint`, one at a time.

    Memory grows with the number of different rows (about 100 bytes each), not with their size.
    """

    def __init__(self) -> None:
        self.row_count = 0
        self._seen: set[int] = set()
        self._as_set = 0
        self._as_multiset = 0
        self._in_order = blake2b(digest_size=16)

    def add(self, row: tuple[Value, ...]) -> None:
        digest = row_digest(row)
        number = int.from_bytes(digest, "little")
        self.row_count += 1
        self._as_multiset += number
        self._in_order.update(digest)
        if number not in self._seen:
            self._seen.add(number)
            self._as_set += number

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            row_count=self.row_count,
            distinct_row_count=len(self._seen),
            as_set=self._as_set % _MODULUS,
            as_multiset=self._as_multiset % _MODULUS,
            in_order=self._in_order.digest(),
        )


def row_digest(row: tuple[Value, ...]) -> bytes:
    """Returns 16 bytes that two rows share exactly if they are equal as Python tuples."""
    # the literal of a value is one-to-one for int, str, bytes and None, lone surrogates included
    cells = [value if value.__class__ in _PLAIN else _canonical(value) for value in row]
    for index, cell in enumerate(cells):
        if (cell.__class__ is str or cell.__class__ is bytes) and len(cell) > _LONG_CELL:
            cells[index] = _long_cell(cell)
    return blake2b(repr(cells).encode(), digest_size=16).digest()


_PLAIN = frozenset({int, str, bytes, type(None)})


def _canonical(value: Value) -> Value:
    if value.__class__ is not float:
        raise TypeError(f"a result cell is {value!r} of type {type(value).__name__}; SQLite has no such value")
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INT else value


def _long_cell(cell: str | bytes) -> tuple[str, int, bytes]:
    """Stands for a long cell without quoting it; a tuple, which no cell is."""
    raw = cell.encode("utf-8", "surrogateescape") if isinstance(cell, str) else cell
    return (type(cell).__name__, len(raw), blake2b(raw, digest_size=32).digest())


def equal_results(
    predicted: Fingerprint, gold: Fingerprint, mode: ComparisonMode = "set", *, gold_orders_rows: bool = False
) -> bool:
    """Says whether two results are equal.

    Args:
        mode: "set" = BIRD's rule; "multiset" = duplicates count; "ordered" = duplicates count, and so does the order
            if `gold_orders_rows`.
        gold_orders_rows: The gold query has an outermost ORDER BY.
    """
    if mode == "set":
        return (predicted.as_set, predicted.distinct_row_count) == (gold.as_set, gold.distinct_row_count)
    if mode == "multiset" or not gold_orders_rows:
        return (predicted.as_multiset, predicted.row_count) == (gold.as_multiset, gold.row_count)
    return (predicted.in_order, predicted.row_count) == (gold.in_order, gold.row_count)
