"""Calls on workers, and the news of their deaths, which ends a wait for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

from ...errors import ArcticError, RequestError, WorkerDiedError
from ..alarm import Alarm
from ..engine_supervisor import DEATH_GRACE_S, EngineSupervisor, first_line
from ..futures import awaited, failed
from .workers import Workers


class Calls:
    """Calls methods of workers by name; engines through their supervisor, once there is one."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.supervisor: EngineSupervisor | None = None
        self._watches: dict[str, asyncio.Future] = {}
        self._deaths = Alarm()

    def require_workers(self, method: str) -> None:
        """Refuse a call before anybody is there to answer it."""
        if not self._workers.actors:
            raise ArcticError(
                f"no workers are up that could do {method!r}: they start when the trainer is built (build_models), "
                "which an experiment that evaluates or samples alone has to do too"
            )

    async def call(self, name: str, method: str, *args: Any) -> Any:
        """One worker's answer; see ``gather`` for what it raises."""
        return (await self.call_all([name], method, *args))[0]

    async def call_all(self, names: list[str], method: str, *args: Any) -> list[Any]:
        """The answers of several workers to the same call."""
        self.require_workers(method)
        answers = self.gather({name: self.send(name, method, *args) for name in names})
        return await (self._while_engines_live(answers) if method == "transfer_weights" else answers)

    def send(self, name: str, method: str, *args: Any) -> Awaitable[Any]:
        """Begin a call; an engine that dies is asked again when it is up, except by what brings it up."""
        if self.supervisor is not None and name.startswith("sampling") and not self.supervisor.restarts_here(name):
            return self.supervisor.call(name, method, *args)
        return getattr(self._workers.actors[name], method).remote(*args)

    async def gather(self, calls: dict[str, Any]) -> list[Any]:
        """Results of one call a worker; the first failure of a call, or the death of any worker but an engine that is
        restarted, ends the wait.

        Raises:
            RequestError: a worker refused what it was asked.
            WorkerDiedError: one is dead.
            ArcticError: one failed.
        """
        if not calls:
            return []
        if not self._watches:
            actors = self._workers.actors
            self.watch({name: asyncio.ensure_future(awaited(self._workers.watch(name))) for name in actors})
        futures = {name: asyncio.ensure_future(awaited(ref)) for name, ref in calls.items()}
        pending: set[Awaitable] = set(futures.values())
        death = self._deaths.waiter()
        try:
            while pending:
                done, _ = await asyncio.wait({*pending, death}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                if death in done or any(failed(future) for future in done):
                    raise await self._explain({**futures}) from None
            return [future.result() for future in futures.values()]
        finally:
            self._deaths.forget(death)
            for future in futures.values():
                if not future.done():
                    future.cancel()
                elif not future.cancelled():
                    future.exception()

    def watch(self, watches: dict[str, asyncio.Future]) -> None:
        """Take news of deaths from futures, by worker, that fail with one."""
        self._watches, self._deaths = watches, Alarm()
        for watch in watches.values():
            self._deaths.follow(watch)

    def stop_watching(self) -> None:
        """Watch nobody any more, and restart no engine."""
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        if self.supervisor is not None:
            self.supervisor.close()

    def dead(self) -> set[str]:
        """Workers that died, and engines that are not up again."""
        engines = [] if self.supervisor is None else self.supervisor.dead()
        return {*engines, *(name for name, watch in self._watches.items() if failed(watch))}

    def engine_restarts(self) -> int:
        return 0 if self.supervisor is None else self.supervisor.restarts

    async def _while_engines_live(self, answers: Awaitable[list[Any]]) -> list[Any]:
        """What ranks that meet the engines answer: they would wait for one that is gone without an end.

        Raises:
            WorkerDiedError: an engine died meanwhile, and the ranks stand in different places since.
        """
        if self.supervisor is None:
            return await answers
        transfer, death = asyncio.ensure_future(answers), self.supervisor.next_death()
        await asyncio.wait({transfer, death}, return_when=asyncio.FIRST_COMPLETED)
        if not transfer.done():
            await asyncio.wait({transfer}, timeout=DEATH_GRACE_S)
        if not death.done() or (transfer.done() and not failed(transfer)):
            return await transfer
        transfer.add_done_callback(failed)
        transfer.cancel()
        raise WorkerDiedError(
            "an engine died while ranks of the policy met it by "
            f"trainer.arctic_rl.weight_sync={self._workers.sync_plan.strategy}, and they cannot be called back; where "
            "a run has to survive that, write low_memory"
        )

    async def _explain(self, futures: dict[str, asyncio.Future]) -> Exception:
        """The error to raise: a refused call's, else a dead worker's if one is found within a short grace time, else
        the first failure."""
        tail = self._workers.tail
        for name, future in futures.items():
            error = future.exception() if failed(future) else None
            cause = getattr(error, "cause", None) or error
            if isinstance(error, WorkerDiedError) and cause is error:
                return error
            if isinstance(cause, ValueError):
                return RequestError(f"worker {name} refused the call: {cause}")
            if isinstance(cause, ArcticError) and not isinstance(cause, WorkerDiedError):
                return ArcticError(f"worker {name} failed: {cause}\n{tail(name)}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_GRACE_S):
                while not any(failed(watch) for watch in self._watches.values()):
                    await asyncio.wait(self._watches.values(), return_when=asyncio.FIRST_COMPLETED)
        dead = [name for name, watch in self._watches.items() if failed(watch)]
        if dead:
            tails = "\n".join(tail(name) for name in dead)
            causes = "; ".join(f"{name}: {first_line(self._watches[name].exception())}" for name in dead)
            return WorkerDiedError(f"worker {', '.join(dead)} died ({causes})\n{tails}")
        name, error = next((n, f.exception()) for n, f in futures.items() if failed(f))
        cause = getattr(error, "cause", None) or error
        return ArcticError(f"worker {name} failed: {type(cause).__name__}: {cause}\n{tail(name)}")
