"""Running jobs in processes that may be killed: each job is bounded in time and memory, and costs only itself."""

import contextlib
import multiprocessing
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

MEMORY_LIMIT_BYTES = 512 * 2**20
"""Private memory (RLIMIT_DATA) that a worker may take on top of what it holds once its modules are loaded."""

_JOBS_AHEAD = 4
_POLL_S = 1.0
_MAX_BROKEN_POOLS = 5


class WorkersLostError(RuntimeError):
    """Worker processes cannot be kept alive."""


@dataclass(frozen=True)
class JobFailure:
    """A job that gave no result."""

    timed_out: bool
    reason: str


class Workers:
    """Processes that run jobs, started when first needed and kept for the next jobs; a context manager.

    They end with it, and with this process, however that ends.
    """

    def __init__(self, count: int) -> None:
        """`count`: processes at most; no more are started than there are jobs."""
        self._count = count
        self._pool: ProcessPool | None = None
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run[Key: Hashable](
        self, function: Callable[..., Any], jobs: Sequence[tuple[Key, tuple[Any, ...]]], *, timeout_s: float
    ) -> Iterator[tuple[Key, Any]]:
        """Yields (key, what `function(*arguments)` returns or a JobFailure) as the jobs end, in any order.

        A worker that runs past the time limit is killed and replaced, as is one that dies.

        Args:
            function: Must be importable, its arguments and result picklable; runs with `MEMORY_LIMIT_BYTES`.
            jobs: (key, arguments).
            timeout_s: Seconds that one job may run.

        Raises WorkersLostError if the pool breaks several times in a row before any job has ended.
        """
        waiting = deque(jobs)
        running: dict[Future[Any], tuple[Key, tuple[Any, ...]]] = {}
        broken = 0
        self._fit(len(jobs))
        try:
            while waiting or running:
                pool = self._live_pool()
                if not pool.active:
                    broken += 1
                    if broken > _MAX_BROKEN_POOLS:
                        raise WorkersLostError(f"{broken} pools of worker processes broke one after another")
                    self._stop()
                    # what a broken pool had taken on is lost
                    waiting.extend(running.values())
                    running.clear()
                    continue
                while waiting and pool.active and len(running) < _JOBS_AHEAD * self._size:
                    job = waiting.popleft()
                    running[pool.schedule(_call, args=(function, job[1]), timeout=timeout_s)] = job
                done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    key, _ = running.pop(future)
                    broken = 0
                    yield key, _outcome(future, timeout_s)
        finally:
            if running:
                self._stop()

    def _fit(self, jobs: int) -> None:
        """Settles for how many workers so many jobs are worth; a pool that is too small for them is replaced."""
        wanted = min(self._count, jobs)
        if self._pool is None or (self._size < wanted and jobs > self._size * _JOBS_AHEAD):
            self._stop()
            self._size = wanted

    def _live_pool(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._size,
                initializer=_initialize,
                initargs=(os.getpid(),),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _outcome(future: Future[Any], timeout_s: float) -> Any:
    try:
        return future.result()
    except TimeoutError:
        return JobFailure(True, f"it took more than {timeout_s:g} s and its process was killed")
    except ProcessExpired as error:
        return JobFailure(False, f"its process died (exit code {error.exitcode})")
    except Exception as error:
        return JobFailure(False, f"{type(error).__name__}: {error}")


def _initialize(parent: int) -> None:
    limit = _private_memory_bytes() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _private_memory_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def _end_with(parent: int) -> None:
    # a worker waits on a pipe whose other end its siblings hold open, so it would outlive a killed parent
    while os.getppid() == parent:
        time.sleep(_POLL_S / 2)
    os._exit(1)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except MemoryError:
        with contextlib.suppress(MemoryError):
            return JobFailure(False, f"it needs more than {MEMORY_LIMIT_BYTES // 2**20} MiB")
        raise
