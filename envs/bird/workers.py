"""Worker processes for callers that have no pool of their own, such as verl's reward managers.

What a model writes may run for ever inside one call of SQLite's, or take all memory. So parts run in processes that
can be killed here too: those of a pool that each process which scores starts when it first needs one, and that ends
with it.
"""

import asyncio
import multiprocessing
import os
import threading
import warnings
from collections.abc import Generator
from multiprocessing.util import Finalize
from typing import Any

from .cache import RESULTS
from .config import WORKER_BASE_MB
from .no_new_files import runs_one_call_at_a_time
from .parts import Part, run_here

MEMORY_LIMIT_MB = 512
"""Private memory in MiB of a worker; more where `sqlite_heap_mb` needs it."""


class WorkersFailedError(RuntimeError):
    """A worker was lost twice for no reason of the query's, or a result could not travel."""


def run_in_workers[Result](parts: Generator[list[Part], list[Any], Result], sqlite_heap_mb: int) -> Result:
    """Runs the parts of a generator in worker processes, and returns what it returns. From any number of threads.

    A part past its time or memory limit is killed with its worker, which is then replaced. In a scoring worker, which
    somebody else may kill, parts run in place; so they do in another daemonic process, which may have no processes of
    its own, after a warning: then nothing stops a single long built-in call.

    Args:
        parts: As `run_here` takes them.
        sqlite_heap_mb: SQLite's heap limit in the parts; each has workers of its own, which can only lower theirs.

    Raises:
        WorkersFailedError: see there.
        ScoringStartUpError: worker processes cannot be started.
    """
    if runs_one_call_at_a_time():
        return run_here(parts, RESULTS)
    if multiprocessing.current_process().daemon:
        warnings.warn(
            "a response is scored in a daemonic process, which cannot start others: a query that stays inside one "
            "long built-in call will not be stopped",
            RuntimeWarning,
            stacklevel=3,
        )
        return run_here(parts, RESULTS)
    from skyrl_arctic_rl.scoring import ScoringClosed, ScoringError, ScoringStartUpError

    try:
        return _own_pool(sqlite_heap_mb).run(parts)
    except (ScoringClosed, ScoringStartUpError):
        raise
    except ScoringError as failure:
        raise WorkersFailedError(f"{type(failure).__name__}: {failure}") from failure


class _OwnPool:
    """A pool, and a thread with the event loop that it lives in."""

    def __init__(self, sqlite_heap_mb: int) -> None:
        from skyrl_arctic_rl.scoring import EnvPool, ScoringConfig

        memory_limit_mb = max(MEMORY_LIMIT_MB, sqlite_heap_mb + WORKER_BASE_MB)
        self.pool = EnvPool(ScoringConfig(memory_limit_mb=memory_limit_mb))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bird-workers", daemon=True)
        self._thread.start()

    def run(self, parts: Generator[list[Part], list[Any], Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(self.pool.run_in_parts(parts), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self.pool.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# by SQLite's heap limit, which a worker can only lower
_own_pools: dict[int, _OwnPool] = {}
_abandoned: list[_OwnPool] = []
_lock = threading.Lock()


def _own_pool(sqlite_heap_mb: int) -> _OwnPool:
    with _lock:
        if not _own_pools:
            # unlike atexit, also where this process is one of multiprocessing's own
            Finalize(None, stop_workers, exitpriority=0)
        if sqlite_heap_mb not in _own_pools:
            _own_pools[sqlite_heap_mb] = _OwnPool(sqlite_heap_mb)
        return _own_pools[sqlite_heap_mb]


def stop_workers() -> None:
    """Ends the worker processes of `run_in_workers`, as the end of this process does; the next call starts others."""
    with _lock:
        pools = list(_own_pools.values())
        _own_pools.clear()
    for pool in pools:
        pool.close()


def _forget_parents_workers() -> None:
    # a forked child has the objects and neither the thread nor the processes; finalising them would disturb the parent
    global _lock
    _lock = threading.Lock()
    _abandoned.extend(_own_pools.values())
    _own_pools.clear()


os.register_at_fork(after_in_child=_forget_parents_workers)
