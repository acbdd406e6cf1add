"""The processes of the scoring pool: how a worker is spawned, watched, killed and replaced."""

import asyncio
import contextlib
import os
import signal
import threading
import time
import types
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble import ProcessExpired, ProcessPool

from .config import ScoringConfig
from .errors import ScoringClosed, ScoringStartUpError
from .worker import Reply, do_nothing, initialize_worker, run_call

_TICK_S = 0.1
_BACKSTOP_S = 10.0


def _preparation_data_without_main(name: str) -> dict[str, Any]:
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main_from")}


class _Popen(popen_spawn_posix.Popen):
    """The spawn launcher, its child not told to import the parent's ``__main__``."""

    # CPython offers no switch for this, so its own launch code is bound to preparation data that names no main module.
    _launch = types.FunctionType(
        popen_spawn_posix.Popen._launch.__code__,
        {
            **vars(popen_spawn_posix),
            "spawn": types.SimpleNamespace(
                get_preparation_data=_preparation_data_without_main,
                get_command_line=spawn.get_command_line,
                get_executable=spawn.get_executable,
            ),
        },
        "_launch",
    )


def _kill_group(process_id: int) -> None:
    try:
        os.killpg(process_id, signal.SIGKILL)
    except ProcessLookupError:
        return


class _WorkerProcess(SpawnProcess):
    """A spawned worker that leads a process group, so that what an environment started dies with it."""

    @staticmethod
    def _Popen(process_obj: SpawnProcess) -> _Popen:
        return _Popen(process_obj)

    def terminate(self) -> None:
        # A reaped worker's id may belong to somebody else by now.
        if self.is_alive():
            _kill_group(self.pid)
            self.kill()


class _Lock:
    """A spawn lock that can be dropped. Left to the garbage collector, its semaphore may be freed in the middle of a
    call to multiprocessing's resource tracker, which then warns of a leak."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return self._lock.acquire(block, timeout)

    def release(self) -> None:
        self._lock.release()

    def drop(self) -> None:
        self._lock = None

    def __reduce__(self) -> Any:
        return _Lock, (self._lock,)


class _WorkerContext(SpawnContext):
    """A spawn context that remembers its locks and the last process it made."""

    def __init__(self) -> None:
        self.latest: _WorkerProcess | None = None
        self._locks: list[_Lock] = []

    def RLock(self) -> _Lock:
        self._locks.append(_Lock(super().RLock()))
        return self._locks[-1]

    def drop_locks(self) -> None:
        """Free the semaphores; no pool of this context may run any more."""
        for lock in self._locks:
            lock.drop()
        self._locks.clear()

    def Process(self, *args: Any, **kwargs: Any) -> _WorkerProcess:
        self.latest = _WorkerProcess(*args, **kwargs)
        return self.latest

    def worker(self) -> _WorkerProcess | None:
        """The worker alive now."""
        process = self.latest
        return process if process is not None and process.pid is not None and process.is_alive() else None


class WorkerLost(Exception):
    """The worker died before it answered; ``seconds`` is how long the call had been running."""

    def __init__(self, exit_code: int | None, seconds: float) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code
        self.seconds = seconds


class WorkerSlot:
    """One worker: a pebble pool of size 1, made anew when its worker died of anything but the time limit."""

    def __init__(self, config: ScoringConfig, env_modules: list[str]) -> None:
        self._config = config
        self._env_modules = env_modules
        self._pool: ProcessPool | None = None
        self._context = _WorkerContext()
        self._lock = threading.Lock()
        self._stopped = False

    def process_id(self) -> int | None:
        worker = self._context.worker()
        return None if worker is None else worker.pid

    def start(self) -> None:
        """Start the worker, if it is not there yet, without waiting until it is ready. Blocks for milliseconds."""
        # Refused by a slot that was stopped, and by a pool that broke just now: the next call finds out.
        with contextlib.suppress(ScoringClosed, ScoringStartUpError, RuntimeError):
            self._live_pool().schedule(do_nothing)

    def renew(self) -> None:
        """Kill the worker and start another."""
        self.discard()
        self.start()

    def _live_pool(self) -> ProcessPool:
        with self._lock:
            if self._stopped:
                raise ScoringClosed("the scoring pool is closed")
            if self._pool is not None and not self._pool.active:
                self._discard()
            if self._pool is None:
                self._context = _WorkerContext()
                self._pool = ProcessPool(
                    max_workers=1,
                    initializer=initialize_worker,
                    initargs=(self._config.modules, self._env_modules, self._config.memory_limit_mb),
                    context=self._context,
                )
                if not self._pool.active:
                    raise ScoringStartUpError("a scoring worker process could not be created")
            return self._pool

    def _discard(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
            self._context.drop_locks()

    def discard(self) -> None:
        """Kill the worker; the next call gets a fresh one."""
        with self._lock:
            self._discard()

    def request_stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._pool is not None:
                self._pool.stop()

    async def run(self, payload: bytes, limit_s: float) -> Reply:
        """Run a packed call; raises TimeoutError, ScoringStartUpError, ScoringClosed or WorkerLost."""
        pool = self._pool
        if pool is None or not pool.active:
            pool = await asyncio.to_thread(self._live_pool)
        context = self._context
        worker = context.worker()
        try:
            future = pool.schedule(run_call, args=(payload, limit_s + _BACKSTOP_S), timeout=limit_s)
        except RuntimeError as error:
            # The pool broke or was stopped between the look at it and this line.
            raise self._lost(context.latest, 0.0) from error
        scheduled = time.monotonic()
        running_since: float | None = None
        ticks_without_worker = 0
        answer = asyncio.wrap_future(future)
        try:
            while True:
                await asyncio.wait({answer}, timeout=_TICK_S)
                if answer.done():
                    return answer.result()
                now = time.monotonic()
                if running_since is None and future.running():
                    running_since = now
                seconds = 0.0 if running_since is None else now - running_since
                # pebble says nothing of a worker that exits with status 0 or dies while it replaces another.
                if worker is None:
                    worker = context.worker()
                elif not worker.is_alive():
                    ticks_without_worker += 1
                if not pool.active or ticks_without_worker > 2:
                    raise self._lost(worker, seconds)
                if running_since is None and now - scheduled > self._config.start_up_limit_s:
                    await asyncio.to_thread(self.discard)
                    raise ScoringStartUpError(
                        f"a scoring worker did not start within start_up_limit_s={self._config.start_up_limit_s}; its "
                        f"modules are {list(self._config.modules)}: raise the limit or import less"
                    )
        except ProcessExpired as error:
            _kill_group(error.pid)
            seconds = 0.0 if running_since is None else time.monotonic() - running_since
            raise WorkerLost(error.exitcode, seconds) from error
        finally:
            # pebble kills the worker of a cancelled call.
            future.cancel()

    def _lost(self, worker: _WorkerProcess | None, seconds: float) -> Exception:
        if self._stopped:
            return ScoringClosed("the scoring pool was closed during the call")
        return WorkerLost(None if worker is None else worker.exitcode, seconds)
