"""A backend as seen from the trainer's own event loop: the same coroutines, run on the backend's loop."""

from __future__ import annotations

from typing import Any

from .backends.base import InFlight, RemoteBackend
from .backends.loop_thread import LoopThread


class SamplingClient:
    """The sampling half of a backend, awaitable from any event loop: what ``ArcticInferenceClient`` talks to."""

    def __init__(self, backend: RemoteBackend, loop: LoopThread) -> None:
        self._backend = backend
        self._loop = loop

    async def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await self._loop.wait(self._backend.generate(requests))

    async def reset_prefix_cache(self) -> None:
        await self._loop.wait(self._backend.reset_prefix_cache())

    async def sleep_sampling(self, level: int) -> None:
        await self._loop.wait(self._backend.sleep_sampling(level))

    async def wake_sampling(self, tags: list[str] | None) -> None:
        await self._loop.wait(self._backend.wake_sampling(tags))

    async def pause_generation(self, *, in_flight: InFlight) -> None:
        await self._loop.wait(self._backend.pause_generation(in_flight=in_flight))

    async def resume_generation(self) -> None:
        await self._loop.wait(self._backend.resume_generation())
