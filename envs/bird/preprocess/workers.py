"""Running jobs in processes that may be killed: each job is bounded in time and memory, and costs only itself."""

import contextlib
import multiprocessing
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def run_jobs[Key: Hashable](
    function: Callable[..., Any], jobs: Iterable[tuple[Key, tuple[Any, ...]]], *, workers: int, timeout_s: float
) -> Iterator[tuple[Key, Any]]:
    """Yields (key, what `function(*arguments)` returns or a JobFailure) as the jobs end, in any order.

    A worker that runs past the time limit is killed and replaced, as is one that dies. `function` must be importable
    and its arguments and result picklable. Workers end with the generator, and with this process, however that ends.

    Args:
        function: Runs in a spawned process with `MEMORY_LIMIT_BYTES`.
        jobs: (key, arguments), read as workers become free.
        workers: Number of processes.
        timeout_s: Seconds that one job may run.

    Raises WorkersLostError if the pool breaks several times in a row before any job has ended.
    """
    source = iter(jobs)
    waiting = deque[tuple[Key, tuple[Any, ...]]]()
    running: dict[Future[Any], tuple[Key, tuple[Any, ...]]] = {}
    pool: ProcessPool | None = None
    broken = 0
    try:
        while True:
            if pool is not None and not pool.active:
                _stop(pool)
                pool, broken = None, broken + 1
                if broken > _MAX_BROKEN_POOLS:
                    raise WorkersLostError(f"{broken} pools of {workers} worker processes broke one after another")
                # what a broken pool had taken on is lost
                waiting.extend(running.values())
                running.clear()
            while len(running) < _JOBS_AHEAD * workers:
                job = waiting.popleft() if waiting else next(source, None)
                if job is None:
                    break
                pool = _start(workers) if pool is None else pool
                running[pool.schedule(_call, args=(function, job[1]), timeout=timeout_s)] = job
            if not running:
                return
            done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                key, _ = running.pop(future)
                broken = 0
                yield key, _outcome(future, timeout_s)
    finally:
        _stop(pool)


def _start(workers: int) -> ProcessPool:
    return ProcessPool(
        max_workers=workers,
        initializer=_initialize,
        initargs=(os.getpid(),),
        context=multiprocessing.get_context("spawn"),
    )


def _stop(pool: ProcessPool | None) -> None:
    if pool is not None:
        pool.stop()
        pool.join()


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
