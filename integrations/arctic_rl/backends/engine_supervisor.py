"""Dead sampling engines are started anew with the current weights, and what they were asked is asked again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from ..errors import ArcticError, WorkerDiedError
from .alarm import Alarm
from .futures import awaited

logger = logging.getLogger(__name__)

SETTING = "trainer.arctic_rl.max_engine_restarts"
DEATH_GRACE_S = 5.0
"""Seconds in which a failure that a death caused is followed by the news of that death."""


_RESTARTED: ContextVar[str | None] = ContextVar("restarted", default=None)
"""The engine that the running task, or the one that started it, brings up again."""


class EngineSupervisor:
    """Calls engines, and restarts those that die.

    All coroutines run on one event loop. A restart that fails for another reason than a death, and one more death than
    allowed, fails every call on that engine from then on.

    Args:
        actors: the engines' handles, by name, of which a restart replaces one.
        watch: a future, for an engine's name, that fails when the engine dies.
        replace: ends what is left of an engine, starts another under its name and gives it the state that calls
            expect: the current weights, frozen or asleep as the others are.
        last_words: the end of an engine's log, for messages.
        most: restarts that the run survives.
        may_restart_now: whether an engine that nobody has called may be restarted at once, or only when it is called.
    """

    def __init__(
        self,
        actors: MutableMapping[str, Any],
        *,
        watch: Callable[[str], asyncio.Future],
        replace: Callable[[str], Awaitable[None]],
        last_words: Callable[[str], str],
        most: int,
        may_restart_now: Callable[[], bool] = lambda: True,
    ) -> None:
        self._actors = actors
        self._watch = watch
        self._replace = replace
        self._last_words = last_words
        self._most = most
        self._may_restart_now = may_restart_now
        self._watches: dict[str, asyncio.Future] = {}
        self._alarms: dict[str, Alarm] = {}
        self._restarts: dict[str, asyncio.Task] = {}
        self._next_death: asyncio.Future | None = None
        self._count = 0
        self._news: Counter[str] = Counter()

    def watch(self, names: list[str]) -> None:
        """Begin to watch engines that are up."""
        for name in names:
            self._begin(name)

    @property
    def restarts(self) -> int:
        """Engines that were started anew, or are being."""
        return self._count

    def take_metrics(self) -> dict[str, float]:
        """``generate/engine_restarts`` and ``generate/requests_run_again`` since the last call, where there were
        some."""
        metrics = {f"generate/{name}": float(count) for name, count in self._news.items()}
        self._news.clear()
        return metrics

    async def call(self, name: str, method: str, *args: Any) -> Any:
        """The result of a method of an engine, called again on its successor when the engine dies.

        Raises:
            WorkerDiedError: one more engine died than the run survives.
            ArcticError: the engine died while another one, whose restart this call is of, waits for the answer.
            Exception: what the call itself raised.
        """
        while True:
            if name in self._restarts and _RESTARTED.get() is not None:
                raise ArcticError(f"worker {name} died while {_RESTARTED.get()} was brought up again")
            await self._up(name)
            actor, watch, alarm = self._actors[name], self._watches[name], self._alarms[name]
            try:
                return await _answer(getattr(actor, method).remote(*args), alarm)
            except _GoneError:
                self._restart(name, watch)
                if method == "generate":
                    self._news["requests_run_again"] += 1

    def restarts_here(self, name: str) -> bool:
        """Whether this is part of an engine's restart, whose calls must not wait for its end."""
        return _RESTARTED.get() == name

    def restarting(self) -> set[str]:
        """Engines that are being restarted, or could not be."""
        return set(self._restarts)

    def next_death(self) -> asyncio.Future:
        """Done when the next engine dies."""
        if self._next_death is None or self._next_death.done():
            self._next_death = asyncio.get_running_loop().create_future()
        return self._next_death

    def dead(self) -> list[str]:
        """Engines that died and are not up again."""
        return [name for name, watch in self._watches.items() if watch.done() and not watch.cancelled()]

    def close(self) -> None:
        """Watch and restart nothing any more."""
        for future in (*self._watches.values(), *self._restarts.values()):
            future.cancel()
        self._watches.clear()

    async def _up(self, name: str) -> None:
        while name in self._restarts:
            await asyncio.shield(self._restarts[name])

    def _begin(self, name: str) -> None:
        watch = self._watches[name] = self._watch(name)
        self._alarms[name] = Alarm()
        self._alarms[name].follow(watch)
        watch.add_done_callback(lambda _: self._died(name, watch))

    def _died(self, name: str, watch: asyncio.Future) -> None:
        if not watch.cancelled():
            watch.exception()
            self.next_death().set_result(None)
            if self._may_restart_now():
                self._restart(name, watch)

    def _restart(self, name: str, watch: asyncio.Future) -> None:
        """Restart the engine that ``watch`` watched, unless that has been begun."""
        if self._watches.get(name) is watch and name not in self._restarts:
            self._restarts[name] = asyncio.ensure_future(self._until_up(name, watch))
            self._restarts[name].add_done_callback(lambda task: self._restarted(name, task))

    def _restarted(self, name: str, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is None:
            del self._restarts[name]

    async def _until_up(self, name: str, watch: asyncio.Future) -> None:
        while True:
            cause = first_line(watch.exception())
            if self._count >= self._most:
                raise WorkerDiedError(
                    f"worker {name} died ({cause}), and {SETTING}={self._most} restarts were made\n"
                    f"{self._last_words(name)}"
                )
            _RESTARTED.set(name)
            self._count += 1
            self._news["engine_restarts"] += 1
            logger.warning(
                "worker %s died (%s) and is restarted, %s=%d of %d\n%s",
                name,
                cause,
                SETTING,
                self._count,
                self._most,
                self._last_words(name),
            )
            try:
                await self._replace(name)
            except WorkerDiedError as error:
                watch = asyncio.get_running_loop().create_future()
                watch.set_exception(error)
                continue
            self._begin(name)
            logger.warning("worker %s is up again", name)
            return


class _GoneError(Exception):
    """The engine that was asked is dead."""


async def _answer(ref: Any, death: Alarm) -> Any:
    """What a call returns or raises.

    Raises:
        _GoneError: the engine died first, or soon after the call had failed.
    """
    answer, gone = asyncio.ensure_future(awaited(ref)), death.waiter()
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _GoneError
        error = answer.exception()
        if error is None:
            return answer.result()
        if not _may_be_a_death(error):
            raise error
        await asyncio.wait({gone}, timeout=DEATH_GRACE_S)
        if gone.done():
            raise _GoneError
        raise error
    finally:
        death.forget(gone)
        if not answer.done():
            answer.cancel()
        elif not answer.cancelled():
            answer.exception()


def _may_be_a_death(error: BaseException) -> bool:
    cause = getattr(error, "cause", None) or error
    return isinstance(cause, WorkerDiedError) or not isinstance(cause, ValueError | ArcticError)


def first_line(error: BaseException | None) -> str:
    """An error's first line, or its type where it says nothing."""
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0]
    return type(error).__name__
