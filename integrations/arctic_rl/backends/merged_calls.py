"""Any number of requests over a bounded number of calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArcticError

Call = Callable[[Sequence[Any], Callable[[int, Any], None]], Awaitable[None]]
"""Sends requests in one call, and hands each result over, with its place, as it comes."""


@dataclass
class _Asker:
    requests: Sequence[Any]
    answered: asyncio.Future
    results: dict[int, Any] = field(default_factory=dict)

    def arrived(self, index: int, result: Any) -> None:
        self.results[index] = result
        if len(self.results) == len(self.requests) and not self.answered.done():
            self.answered.set_result([self.results[place] for place in range(len(self.requests))])


class MergedCalls:
    """Calls at once up to a limit; whoever asks while all are taken waits, and shares the next one.

    Args:
        call: one call; it raises what all of its requests raise.
        most: calls at once.
        largest: requests of a shared call; one asker's are never parted.
    """

    def __init__(self, call: Call, *, most: int, largest: int) -> None:
        self._call = call
        self._most = most
        self._largest = largest
        self._running = 0
        self._waiting: deque[_Asker] = deque()
        self._tasks: set[asyncio.Task] = set()

    async def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The results of requests, in their order; where this is cancelled, a call of its own is."""
        if not requests:
            return []
        asker = _Asker(requests, asyncio.get_running_loop().create_future())
        if self._running < self._most:
            await self._send([asker])
        else:
            self._waiting.append(asker)
        return await asker.answered

    async def _send(self, askers: list[_Asker]) -> None:
        places = [(asker, index) for asker in askers for index in range(len(asker.requests))]
        self._running += 1
        try:
            await self._call(
                [request for asker in askers for request in asker.requests],
                lambda index, result: places[index][0].arrived(places[index][1], result),
            )
            error: Exception = ArcticError("a call ended before all of its requests were answered")
        except Exception as failure:
            error = failure
        finally:
            self._running -= 1
            self._share()
        for asker in askers:
            if not asker.answered.done():
                asker.answered.set_exception(error)

    def _share(self) -> None:
        while self._waiting and self._running < self._most:
            askers, size = [], 0
            while self._waiting and (not askers or size + len(self._waiting[0].requests) <= self._largest):
                asker = self._waiting.popleft()
                if not asker.answered.cancelled():
                    askers.append(asker)
                    size += len(asker.requests)
            if askers:
                task = asyncio.ensure_future(self._send(askers))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
