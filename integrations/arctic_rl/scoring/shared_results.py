"""Results that several calls need: each computed once, also where the calls are under way at the same time."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

_ENTRY_BYTES = 1024
"""What an entry takes beside its pickled result: the key, and its place in the table."""

type Compute = Callable[[int], Awaitable[tuple[bytes, float]]]


@dataclass(frozen=True)
class _Kept:
    packed: bytes
    runs: int
    expires: float


@dataclass
class _Flight:
    task: asyncio.Task[bytes] | None = None
    waiting: int = 0


class SharedResults:
    """Pickled results by key, the least recently used ones dropped first.

    A result stays bytes, so that its size is known, and that each user unpickles one of its own. For one event loop
    after another; two loops at the same time share what is kept, and not what is under way.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Any, _Kept] = OrderedDict()
        self._bytes = 0
        self._flights: WeakKeyDictionary[Any, dict[Any, _Flight]] = WeakKeyDictionary()
        self.shared = 0
        """Results given out that were computed for somebody else."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the results kept, the entries' own included."""
        return self._bytes

    async def get(self, key: Any, compute: Compute) -> bytes:
        """The result for ``key``, computed by ``compute`` where there is none.

        Args:
            key: hashable.
            compute: called with 1 for the first run of the key, 2 for the next; returns the pickled result and the
                seconds for which it may be given out. What it raises goes to everybody who waits, and is not kept.
        """
        kept = self._kept.get(key)
        if kept is not None and time.monotonic() < kept.expires:
            self._kept.move_to_end(key)
            self.shared += 1
            return kept.packed
        flights = self._flights.setdefault(asyncio.get_running_loop(), {})
        flight = flights.get(key)
        if flight is None:
            flight = flights[key] = _Flight()
            runs = 1 if kept is None else kept.runs + 1
            flight.task = asyncio.ensure_future(self._compute(key, compute, runs, flights, flight))
        else:
            self.shared += 1
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                flight.task.cancel()
                _land(flights, key, flight)

    async def _compute(
        self, key: Any, compute: Compute, runs: int, flights: dict[Any, _Flight], flight: _Flight
    ) -> bytes:
        try:
            packed, keep_s = await compute(runs)
        finally:
            _land(flights, key, flight)
        if keep_s > 0:
            self._keep(key, _Kept(packed, runs, math.inf if keep_s == math.inf else time.monotonic() + keep_s))
        return packed

    def _keep(self, key: Any, kept: _Kept) -> None:
        old = self._kept.pop(key, None)
        self._bytes += _size(kept) - (0 if old is None else _size(old))
        self._kept[key] = kept
        while self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(kept: _Kept) -> int:
    return len(kept.packed) + _ENTRY_BYTES


def _land(flights: dict[Any, _Flight], key: Any, flight: _Flight) -> None:
    if flights.get(key) is flight:
        del flights[key]
