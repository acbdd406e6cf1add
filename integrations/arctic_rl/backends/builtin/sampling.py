"""Requests to the engines, and what holds them back: pauses, frozen requests, sleep."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection

from ...server.offload import WEIGHTS
from ..base import InFlight
from ..engine_choice import EngineChoice
from ..turns import CACHE, SLEEP_LEVEL
from .calls import Calls
from .workers import MOST_IN_FLIGHT, Workers


class Engines:
    """All sampling workers together."""

    def __init__(self, workers: Workers, calls: Calls) -> None:
        self._workers = workers
        self._calls = calls
        self.choice = EngineChoice(self.names())
        self.asleep_at: int | None = None
        """The level that they sleep at."""
        self._frozen = False
        self._holds: set[str] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._lease = asyncio.Condition()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._client_id = uuid.uuid4().hex[:8]
        self._request_count = 0

    def names(self) -> list[str]:
        return self._workers.names("sampling")

    def started(self) -> None:
        """Spread requests over the engines that are there now."""
        self.choice = EngineChoice(self.names())

    async def generate(self, request: dict) -> dict:
        """One response, of the engine that suits the request."""
        await self._running.wait()
        self._calls.require_workers("generate")
        assignment = self.choice.assign(
            request["prompt_token_ids"], request["params"]["max_tokens"], request.get("session_id")
        )
        name = assignment.engine
        self._request_count += 1
        request_id = f"{name}-{self._client_id}-{self._request_count}"
        try:
            async with self._slots.setdefault(name, asyncio.Semaphore(MOST_IN_FLIGHT)):
                return await self._calls.call(
                    name,
                    "generate",
                    request["prompt_token_ids"],
                    request["params"],
                    request_id,
                    request.get("cache_salt"),
                )
        finally:
            self.choice.finish(assignment)
            async with self._lease:
                self._lease.notify_all()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside, new requests wait."""
        self._hold("a restart")
        try:
            yield
        finally:
            self._release("a restart")

    async def pause(self, in_flight: InFlight) -> None:
        """See ``RemoteBackend.pause_generation``."""
        self._hold("a pause")
        if in_flight == "keep":
            self._frozen = True
            await self._calls.call_all(self.names(), "freeze")
            return
        async with self._lease:
            await self._lease.wait_for(lambda: self.choice.idle)

    async def resume(self) -> None:
        """See ``RemoteBackend.resume_generation``."""
        if self._frozen:
            await self._calls.call_all(self.names(), "thaw")
            self._frozen = False
        self._release("a pause")

    def _hold(self, reason: str) -> None:
        self._holds.add(reason)
        self._running.clear()

    def _release(self, reason: str) -> None:
        self._holds.discard(reason)
        if not self._holds:
            self._running.set()

    async def sleep(self, level: int) -> None:
        self.asleep_at = level
        await self._calls.call_all(self.names(), "sleep", level)

    async def wake(self, tags: list[str] | None) -> None:
        await self._calls.call_all(self.names(), "wake_up", tags)
        self.asleep_at = None

    async def rest(self, name: str, asleep: Collection[str]) -> bool:
        """Let an engine that was started anew sleep as far as those do that take turns with it.

        Returns:
            Whether it has no weights then, which the next sync brings.
        """
        if CACHE not in asleep or self.asleep_at not in (None, SLEEP_LEVEL):
            return False
        actor = self._workers.actors[name]
        await actor.sleep.remote(SLEEP_LEVEL)
        if WEIGHTS not in asleep:
            await actor.wake_up.remote([WEIGHTS])
        return WEIGHTS in asleep

    async def bring_into_line(self, name: str) -> None:
        """Give an engine that was started anew the state that the others are in."""
        actor = self._workers.actors[name]
        if self._frozen:
            await actor.freeze.remote()
        if self.asleep_at is not None:
            await actor.sleep.remote(self.asleep_at)
