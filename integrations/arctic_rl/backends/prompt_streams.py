"""Thousands of prompts on a few connections: those asked for at about the same time share one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ArcticError

MOST_PROMPTS = 1024
"""Prompts of one request, unless a single call holds more."""
PAUSE_PER_STREAM_S, MANY_STREAMS = 0.001, 128
"""The more requests are under way, the longer a prompt waits for others to share the next one with; above so many the
pause grows with the third power, so that neither side runs out of open files."""

Deliver = Callable[[int, dict[str, Any] | ArcticError], None]
Send = Callable[[list[dict[str, Any]], Deliver], Awaitable[None]]
Retried = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True)
class _Call:
    prompts: list[dict[str, Any]]
    outcomes: list[asyncio.Future]


class PromptStreams:
    """Prompts of one event loop.

    Args:
        send: sends requests of ``generate`` once, and delivers each one's result or error, with its place, as it
            comes.
        retried: runs something again while connections fail.
    """

    def __init__(self, send: Send, retried: Retried) -> None:
        self._send = send
        self._retried = retried
        self._waiting: deque[_Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._streams: set[asyncio.Task] = set()

    async def ask(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results in the order of the prompts; the first error ends the wait.

        Raises:
            ArcticError: the server refuses, fails, or cannot be reached.
        """
        loop = asyncio.get_running_loop()
        call = _Call(prompts, [loop.create_future() for _ in prompts])
        self._waiting.append(call)
        if self._timer is None:
            self._timer = loop.call_later(_pause_s(len(self._streams)), self._open)
        try:
            return list(await asyncio.gather(*call.outcomes))
        finally:
            for outcome in call.outcomes:
                outcome.cancel()

    def close(self) -> None:
        """Give up everything that is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.cancel()
        for call in self._waiting:
            for outcome in call.outcomes:
                outcome.cancel()

    def _open(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            calls = [waiting.popleft()]
            number = len(calls[0].prompts)
            while waiting and number + len(waiting[0].prompts) <= MOST_PROMPTS:
                calls.append(waiting.popleft())
                number += len(calls[-1].prompts)
            stream = asyncio.ensure_future(self._answer(calls))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)
            _end_with(calls, stream)

    async def _answer(self, calls: list[_Call]) -> None:
        try:
            await self._retried(lambda: self._once(calls))
        except asyncio.CancelledError:
            for call in calls:
                _settle(call, None)
            raise
        except Exception as error:
            if len(calls) > 1 and isinstance(error, ArcticError) and isinstance(error, ValueError):
                # one call's prompts are refused: the others' are not to suffer for it
                await asyncio.gather(*(self._answer([call]) for call in calls))
                return
            for call in calls:
                _settle(call, error)

    async def _once(self, calls: list[_Call]) -> None:
        left = [pair for call in calls for pair in zip(call.prompts, call.outcomes, strict=True) if not pair[1].done()]
        if not left:
            return

        def deliver(place: int, outcome: dict[str, Any] | ArcticError) -> None:
            future = left[place][1]
            if future.done():
                return
            if isinstance(outcome, ArcticError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        await self._send([prompt for prompt, _ in left], deliver)
        missing = sum(not future.done() for _, future in left)
        if missing:
            raise ArcticError(f"the server ended its answer {missing} responses too early")


def _pause_s(streams: int) -> float:
    """Where prompts come all the time and each takes T seconds, some sqrt(2000 T) streams are under way up to 128, and
    445 at T = 600; the pause is below 3% of T."""
    return PAUSE_PER_STREAM_S * streams * max(1.0, streams / MANY_STREAMS) ** 2


def _settle(call: _Call, error: Exception | None) -> None:
    for outcome in call.outcomes:
        if outcome.done():
            continue
        if error is None:
            outcome.cancel()
        else:
            outcome.set_exception(error)


def _end_with(calls: list[_Call], stream: asyncio.Task) -> None:
    """Give the request up when nobody waits for any of its prompts any more."""
    outcomes = [outcome for call in calls for outcome in call.outcomes]
    left = len(outcomes)

    def ended(outcome: asyncio.Future) -> None:
        nonlocal left
        left -= 1
        if left == 0 and outcome.cancelled():
            stream.cancel()

    for outcome in outcomes:
        outcome.add_done_callback(ended)
