"""Jobs that share GPUs take turns on them: who is awake, and in which order others go to sleep and come back.

The order is SkyRL's (``WorkerDispatch`` and ``RayPPOTrainer`` with ``trainer.placement.colocate_all``): whoever
computes is alone, log-probs need no optimizer, and in a weight sync the policy's weights stand beside the engines'
alone, before the policy leaves and the engines take memory for their caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from ..errors import WorkerDiedError
from ..server.offload import OPTIMIZER, PARTS, WEIGHTS

SAMPLING = "sampling"
CACHE = "kv_cache"
SLEEP_LEVEL = 2
"""vLLM's level that drops the weights: the next sync brings them, merged ones of adapters too."""
KEEPING_LEVEL = 1
"""vLLM's level that keeps the weights on the host."""

_PARTS = {SAMPLING: (WEIGHTS, CACHE), "ref": (WEIGHTS,)}
"""What a job can have asleep or awake; the policy and the critic have ``offload.PARTS``."""

Move = Callable[[str, list[str]], Awaitable[None]]
"""``(job, parts)``: put these parts to sleep, or wake them."""


def sharing_jobs(*, jobs: Iterable[str], colocate_all: bool, colocate_policy_ref: bool) -> frozenset[str]:
    """Which of the jobs of a run take turns; none where nothing is shared."""
    shared = set(jobs) if colocate_all else {"policy", "ref"} & set(jobs) if colocate_policy_ref else set()
    return frozenset(shared) if len(shared) > 1 else frozenset()


class Turns:
    """Puts the jobs that share GPUs to sleep and wakes them.

    Args:
        shared: names of the jobs that take turns; every other job is left alone.
        sleep: puts parts of a training job to sleep; the engines always sleep as a whole.
        wake: wakes parts of a job.
        awake: whether all of them are awake now, or none.
        alone: whether nobody else moves these jobs, so that what is known of them need not be asked for again.
        keep_optimizer: jobs whose optimizer stays awake whoever's turn it is.
    """

    def __init__(
        self,
        shared: frozenset[str],
        sleep: Move,
        wake: Move,
        *,
        awake: bool,
        alone: bool = True,
        keep_optimizer: frozenset[str] = frozenset(),
    ) -> None:
        self._shared, self._sole = shared, alone
        self._sleep, self._wake = sleep, wake
        self._kept = {(job, OPTIMIZER) for job in keep_optimizer & shared}
        parts = {job: _PARTS.get(job, PARTS) for job in sorted(shared)}
        self._awake = {job: {part for part in of if awake or (job, part) in self._kept} for job, of in parts.items()}
        self._lock, self._clearing = asyncio.Lock(), asyncio.Lock()

    @property
    def of_engines(self) -> bool:
        """Whether the engines take turns too."""
        return SAMPLING in self._shared

    def parts_to_sleep(self, job: str) -> list[str]:
        """What of a job sleeps while others compute."""
        return [part for part in _PARTS.get(job, PARTS) if (job, part) not in self._kept]

    def asleep(self, job: str) -> set[str]:
        """What of a job that takes turns is asleep."""
        return set(_PARTS.get(job, PARTS)) - self._awake[job] if job in self._shared else set()

    def note(self, job: str, *, asleep: Iterable[str] = (), awake: Iterable[str] = ()) -> None:
        """Take down what happened to a job at somebody else's wish."""
        if job in self._shared:
            self._awake[job] = (self._awake[job] - set(asleep)) | set(awake)

    @asynccontextmanager
    async def turn(self, job: str, parts: Iterable[str] = PARTS) -> AsyncIterator[None]:
        """Inside, ``job`` has at least these parts awake, and no other job has any."""
        if job not in self._shared:
            yield
            return
        async with self._lock:
            await self._alone(job)
            await self.wake(job, [part for part in _PARTS.get(job, PARTS) if part in parts])
            yield

    @asynccontextmanager
    async def weights_of(self, *jobs: str) -> AsyncIterator[None]:
        """Inside, the weights of training jobs are awake together, and nothing else of what takes turns."""
        async with self._lock:
            for other in self._awake:
                await self.sleep(other, _PARTS.get(other, PARTS) if other not in jobs else [OPTIMIZER])
            for job in jobs:
                if job in self._shared:
                    await self.wake(job, [WEIGHTS])
            yield

    @asynccontextmanager
    async def transfer(self) -> AsyncIterator[None]:
        """Inside, the policy's weights and those of the engines are awake; behind it the engines alone, as a whole."""
        if not self.of_engines:
            async with self.turn("policy", [WEIGHTS]):
                yield
            return
        async with self._lock:
            for other in self._awake:
                await self.sleep(other, [OPTIMIZER] if other == "policy" else _PARTS.get(other, PARTS))
            await self.wake("policy", [WEIGHTS])
            await self.wake(SAMPLING, [WEIGHTS])
            yield
            await self.sleep("policy", PARTS)
            await self.wake(SAMPLING, [CACHE])

    @asynccontextmanager
    async def beside(self, job: str, parts: Iterable[str]) -> AsyncIterator[None]:
        """Inside, these parts of a job are awake whatever else is: for a call in the middle of another job's turn."""
        asleep = [part for part in parts if job in self._shared and part not in self._awake[job]]
        if asleep:
            await self.wake(job, asleep)
        try:
            yield
        except WorkerDiedError:
            asleep = []  # the run ends, and ranks may stand in a call that nobody answers
            raise
        finally:
            if asleep:
                await self.sleep(job, asleep)

    @asynccontextmanager
    async def cleared_for(self, job: str) -> AsyncIterator[None]:
        """Inside, nothing of other jobs is awake, in the middle of whose turn this may be, and behind it what was.

        For a worker of ``job`` that is started anew: it measures how much memory is left.
        """
        if job not in self._shared:
            yield
            return
        async with self._clearing:
            before = {other: sorted(parts) for other, parts in self._awake.items() if other != job}
            try:
                for other, parts in before.items():
                    await self._rest(other, parts)
                yield
            finally:
                for other, parts in before.items():
                    await self.wake(other, parts)

    async def sleep(self, job: str, parts: Iterable[str]) -> None:
        """Put those of the parts to sleep that are awake and do not stay so."""
        await self._rest(job, [part for part in parts if (job, part) not in self._kept])

    async def _rest(self, job: str, parts: Iterable[str]) -> None:
        chosen = [part for part in parts if part in self._awake[job] or not self._sole]
        if chosen:
            await self._sleep(job, chosen)
            self._awake[job] -= set(chosen)

    async def wake(self, job: str, parts: Iterable[str]) -> None:
        """Wake those of the parts that sleep."""
        chosen = [part for part in parts if part not in self._awake[job] or not self._sole]
        if chosen:
            await self._wake(job, chosen)
            self._awake[job] |= set(chosen)

    async def make_room(self) -> None:
        """Put all training to sleep, for engines that are woken from outside."""
        if self.of_engines:
            async with self._lock:
                await self._alone(SAMPLING)

    async def _alone(self, job: str) -> None:
        for other in self._awake:
            if other != job:
                await self.sleep(other, _PARTS.get(other, PARTS))
