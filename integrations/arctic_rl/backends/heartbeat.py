"""Signs of life: a worker that is gone, or stands still, is noticed without a limit on how long a call takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import WorkerDiedError
from .futures import awaited

SETTING = "trainer.arctic_rl.worker_timeout_s"
MOST_PAUSE_S = 5.0


async def watched(death: Awaitable[Any], ping: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
    """Never returns while a worker lives and answers.

    Args:
        death: fails when the worker's process is gone.
        ping: asks for a sign of life, which a worker gives beside whatever else it does.
        timeout_s: seconds that an answer may take.

    Raises:
        WorkerDiedError: no answer came.
        Exception: of ``death``, or of an answer that says that the worker is dead.
    """
    gone = asyncio.ensure_future(awaited(death))
    answer: asyncio.Future | None = None
    try:
        while True:
            answer = asyncio.ensure_future(awaited(ping()))
            # In two halves: where this loop itself stood still, what came meanwhile is seen in the second one.
            for _ in range(2):
                if not gone.done() and not answer.done():
                    await asyncio.wait({gone, answer}, timeout=timeout_s / 2, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and not answer.done():
                raise WorkerDiedError(f"no sign of life for {SETTING}={timeout_s}")
            if not gone.done() and answer.exception() is None:
                await asyncio.wait({gone}, timeout=min(MOST_PAUSE_S, timeout_s / 4))
            elif not gone.done():
                # The process may be on its way out; if it is not, the next question says more.
                await asyncio.wait({gone}, timeout=min(MOST_PAUSE_S, timeout_s / 4))
                if not gone.done():
                    raise answer.exception()
            if gone.done():
                gone.result()
                raise WorkerDiedError("its watch ended")
    finally:
        for future in (gone, answer):
            if future is not None and not future.done():
                future.cancel()
            elif future is not None and not future.cancelled():
                future.exception()
