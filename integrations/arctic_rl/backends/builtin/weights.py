"""The policy's weights on their way to the engines: at a sync, and to an engine that was started anew."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator

from ...errors import ArcticError, WorkerDiedError
from ...server.offload import WEIGHTS
from ...server.specs import ServerConfig
from ...server.weight_sync import SENDERS, low_memory
from ...server.weight_sync.run import SyncRun
from ...server.weight_sync.shared_memory import kept_version, send_again
from ..turns import CACHE, KEEPING_LEVEL, Turns
from .calls import Calls
from .sampling import Engines
from .workers import Workers

logger = logging.getLogger(__name__)


class Weights:
    """Which weights the engines hold, and what the policy has become since."""

    def __init__(self, config: ServerConfig, workers: Workers, calls: Calls, turns: Turns, engines: Engines) -> None:
        self._config = config
        self._workers = workers
        self._calls = calls
        self._turns = turns
        self._engines = engines
        self._unsynced_step = False
        self._synced_version = 0
        self._syncing = False
        self._kept = asyncio.Lock()
        self._writing = asyncio.Lock()

    @property
    def _strategy(self) -> str:
        return self._workers.sync_plan.strategy

    @contextlib.asynccontextmanager
    async def may_change(self, job: str) -> AsyncIterator[None]:
        """Inside, no restarted engine is being sent the policy's weights, of which none may be newer than others."""
        if job != "policy":
            yield
            return
        async with self._kept:
            self._unsynced_step = True
            yield

    async def sync(self, *, keep_cache: bool) -> int:
        """See ``RemoteBackend.sync_weights``."""
        version = 1 + await self._current_version()
        self._syncing = True
        try:
            await self._send(version, keep_cache=keep_cache)
        finally:
            self._syncing = False
        self._synced_version, self._unsynced_step = version, False
        self._engines.choice.clear()
        return version

    async def load_current(self, name: str) -> int:
        """Bring one freshly started engine, which holds the checkpoint's own weights, to those of the last sync.

        Weights that were not kept are sent to it once more; a sync that is under way begins anew by itself. Where the
        policy has stepped since, there are none: the engine refuses to generate until the next sync.

        Args:
            name: of the engine, such as ``sampling-0``.

        Returns:
            The version that it now holds; 0 where it has none of a sync.
        """
        self._engines.choice.forget(name)
        if self._strategy == "shared_memory":
            async with self._writing:
                run = self._run("sampling", kept_version(self._workers.weights_folder()), names=(name,))
                if run.version:
                    await send_again(run)
            return run.version
        if self._syncing:
            return 0
        async with self._kept:
            while True:
                restarts = self._calls.engine_restarts()
                try:
                    return await self._send_to_restarted(name)
                except WorkerDiedError:
                    raise
                except ArcticError:
                    if self._calls.engine_restarts() == restarts:
                        raise

    async def update_reference(self) -> None:
        """See ``RemoteBackend.update_reference``."""
        directory = tempfile.mkdtemp(prefix="reference-", dir=self._workers.run_dir)
        try:
            run = dataclasses.replace(self._run("ref", 0), folder=directory, dtype=self._config.reference.dtype)
            async with self._turns.weights_of("policy", "ref"):
                await low_memory.send(run)
        finally:
            shutil.rmtree(directory)

    async def _send(self, version: int, *, keep_cache: bool) -> None:
        """Send the policy's weights to all engines, from the beginning if one was restarted on the way."""
        while True:
            restarts = self._calls.engine_restarts()
            try:
                await SENDERS[self._strategy](self._run("sampling", version, keep_cache=keep_cache))
                if self._strategy == "shared_memory" or self._calls.engine_restarts() == restarts:
                    return
            except WorkerDiedError:
                raise
            except ArcticError:
                if self._calls.engine_restarts() == restarts:
                    raise
            logger.warning("weights of version %d are sent again: an engine was restarted", version)

    async def _current_version(self) -> int:
        return max(self._synced_version, *await self._calls.call_all(self._engines.names(), "weight_version"))

    async def _send_to_restarted(self, name: str) -> int:
        """Send the weights of the last sync to an engine; others that are being restarted come to this by themselves,
        and must not be waited for."""
        supervisor = self._calls.supervisor
        away = set() if supervisor is None else supervisor.restarting() - {name}
        names = [engine for engine in self._engines.names() if engine not in away]
        version = max(self._synced_version, *await self._calls.call_all(names, "weight_version"))
        if not version:
            return 0
        if self._unsynced_step:
            reason = (
                f"it was restarted, and cannot get the weights of version {version} any more: the policy has taken a "
                f"step since, and trainer.arctic_rl.weight_sync={self._strategy} keeps no copy; where engines sample "
                "while the policy trains, write shared_memory if all are on one node"
            )
            await self._calls.call(name, "refuse", reason)
            return 0
        async with self._beside_policy(name, names):
            await SENDERS[self._strategy](self._run("sampling", version, names=(name,)))
        return version

    @contextlib.asynccontextmanager
    async def _beside_policy(self, name: str, names: list[str]) -> AsyncIterator[None]:
        """Inside, which serves an engine, the policy's weights are awake. Where it shares the engines' GPUs these have
        no caches meanwhile: requests under way end first, new ones wait."""
        if not self._turns.of_engines or CACHE in self._turns.asleep("sampling"):
            async with self._turns.beside("policy", [WEIGHTS]):
                yield
            return
        async with self._engines.held():
            try:
                await self._calls.call_all(names, "sleep", KEEPING_LEVEL)
                await self._calls.call_all(names, "wake_up", [WEIGHTS])
                async with self._turns.beside("policy", [WEIGHTS]):
                    yield
            except WorkerDiedError:
                raise
            except ArcticError:
                # Those that live go on, once they are asleep: some may still have waited for their requests.
                gone = {name} if self._calls.supervisor is None else {name} | self._calls.supervisor.restarting()
                others = [other for other in names if other not in gone]
                with contextlib.suppress(ArcticError):
                    await self._calls.call_all(others, "sleep", KEEPING_LEVEL)
                    await self._calls.call_all(others, "wake_up", None)
                raise
            await self._calls.call_all(names, "wake_up", [CACHE])

    def _run(
        self, job: str, version: int, *, keep_cache: bool = False, names: tuple[str, ...] | None = None
    ) -> SyncRun:
        """A sync of the policy's weights to all workers of a job, or to some of them."""
        workers = self._workers
        receivers = tuple(workers.names(job)) if names is None else names
        return SyncRun(
            call=self._calls.call_all,
            senders=tuple(workers.names("policy")),
            receivers=receivers,
            handles=tuple(workers.actors[name] for name in receivers),
            processes=self._config.sampling.gpus,
            folder=workers.weights_folder(),
            version=version,
            dtype=self._config.sync_dtype,
            bucket_bytes=self._config.weight_sync_bucket_mb * 2**20,
            one_node=workers.sync_plan.one_node,
            keep_cache=keep_cache,
            writing=self._writing,
        )
