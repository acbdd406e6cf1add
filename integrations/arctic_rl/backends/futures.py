"""Two small things about futures that asyncio does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def awaited(answer: Awaitable[Any]) -> Any:
    """A coroutine of whatever can be awaited, which ``asyncio.ensure_future`` takes: a reference of Ray's too."""
    return await answer


def failed(future: asyncio.Future) -> bool:
    """Whether a future ended with an exception; one that was cancelled did not."""
    return future.done() and not future.cancelled() and future.exception() is not None
