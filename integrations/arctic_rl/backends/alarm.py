"""One event that ends any number of waits."""

from __future__ import annotations

import asyncio


class Alarm:
    """Gives out futures, all of which are done once a watched future is.

    Waiting for the watched future itself costs a search among all that wait for it, each time one of them stops.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future] = set()
        self._rung = False

    def follow(self, watched: asyncio.Future) -> None:
        """Ring when ``watched`` is done, unless it was cancelled."""
        watched.add_done_callback(self._ring)

    def waiter(self) -> asyncio.Future:
        """A future of one wait; ``forget`` it afterwards."""
        waiter = asyncio.get_running_loop().create_future()
        if self._rung:
            waiter.set_result(None)
        else:
            self._waiters.add(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future) -> None:
        self._waiters.discard(waiter)

    def _ring(self, watched: asyncio.Future) -> None:
        if watched.cancelled():
            return
        self._rung = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
