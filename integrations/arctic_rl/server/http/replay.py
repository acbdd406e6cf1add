"""Repeated requests: one that changes something is carried out once, however often it arrives."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from .errors import HttpError

KEPT = 512
"""Requests whose outcome is remembered; a client repeats one within seconds."""


class Replays:
    """Outcomes of requests by their id, those under way included."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._tasks: OrderedDict[str, tuple[str, asyncio.Task]] = OrderedDict()

    async def once(self, request_id: str, fingerprint: str, start: Callable[[], Awaitable[Any]]) -> Any:
        """The outcome of ``start``, or of the earlier request of that id, which goes on when its client is gone.

        Args:
            request_id: the client's name of the request.
            fingerprint: digest of what it asks.
            start: carries it out.

        Raises:
            HttpError: another request has the id.
        """
        if request_id in self._tasks:
            earlier, task = self._tasks[request_id]
            if earlier != fingerprint:
                raise HttpError(f"request id {request_id!r} was used for another request: give each its own", 409)
        else:
            task = asyncio.ensure_future(start())
            self._tasks[request_id] = (fingerprint, task)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._forget()
        return await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for everything under way."""
        await asyncio.gather(*(task for _, task in self._tasks.values()), return_exceptions=True)

    def _forget(self) -> None:
        for request_id in [name for name, (_, task) in self._tasks.items() if task.done()]:
            if len(self._tasks) <= self._kept:
                return
            del self._tasks[request_id]
