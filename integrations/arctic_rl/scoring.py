"""A process pool for environment calls: hard time and memory limits, and a dead worker costs one call.

``EnvPool.call(env, "step", action)`` sends the picklable environment to a spawned worker, runs the method there and
brings the result and the environment's new state back. An environment may name the time limit of its ``step`` itself,
in an attribute ``max_step_s``. Every worker is a pebble pool of its own: the workers of one
pebble pool share a pipe behind one lock, and one killed while idle marks that whole pool broken, so that a dead worker
would become a dead run.

Workers import pebble, this module, ``ScoringConfig.modules`` and the modules that environments and their state come
from, and never the parent's ``__main__``.
"""

import asyncio
import contextlib
import faulthandler
import functools
import importlib
import io
import logging
import math
import os
import pickle
import resource
import signal
import threading
import time
import traceback
import types
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, ClassVar

from pebble import ProcessExpired, ProcessPool

from .errors import ArcticError

logger = logging.getLogger(__name__)

STEP_GRACE_S = 5.0
"""Seconds that a ``step`` may run past its environment's own ``max_step_s`` before its worker is killed: a limit that
the environment keeps by itself comes first, and the worker's caches outlive it."""

_MB = 1 << 20
_TICK_S = 0.1
_BACKSTOP_S = 10.0
_MAX_DEFAULT_WORKERS = 32
_STACK = frozenset({"datasets", "deepspeed", "ray", "skyrl", "torch", "transformers", "vllm"})
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ScoringError(ArcticError):
    """An environment call that gave no result. Picklable: the message is its only argument."""

    cause: ClassVar[str] = "failed"
    """Name of the failure in counters and metrics."""


class ScoringTimeout(ScoringError, TimeoutError):
    """The call ran past its time limit; its worker was killed."""

    cause = "timed_out"


class ScoringMemoryExceeded(ScoringError, MemoryError):
    """The call needed more than ``memory_limit_mb``."""

    cause = "out_of_memory"


class ScoringWorkerDied(ScoringError):
    """The worker ended during the call, and again during its one retry."""

    cause = "worker_died"


class ScoringStartUpError(ScoringError):
    """A worker could not start: one of its modules failed to import, took too long, or filled the memory limit."""

    cause = "start_up"


class ScoringEnvError(ScoringError):
    """The environment raised something that cannot travel back as itself; the message holds its type and traceback."""

    cause = "raised"


class ScoringClosed(ScoringError):
    """The pool was closed before or during the call."""

    cause = "closed"


class WorkerTraceback(Exception):
    """Traceback text of an exception raised in a worker, attached to it as ``__cause__``."""


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Settings of the environment process pool."""

    workers: int | None = None
    """Worker processes, at least 1. None = one for each CPU this process may use, at most 32."""

    time_limit_s: float = 30.0
    """Seconds one environment call may run; past it the worker is killed with SIGKILL. A ``step`` of an environment
    whose attribute ``max_step_s`` is there and not None may run ``max_step_s + STEP_GRACE_S`` instead."""

    memory_limit_mb: int = 512
    """MiB of private writable memory (RLIMIT_DATA: heap, anonymous maps, stacks of threads) a worker may hold, its
    interpreter and modules included. RLIMIT_AS is not used: it also counts mapped libraries and reserved arenas."""

    modules: tuple[str, ...] = ()
    """Modules that every worker imports when it starts, before the limits apply, e.g. ``skyrl_arctic_rl.envs``. The
    modules of an environment's class and state are imported in the same way without being listed, once a call has
    shown them. An environment whose state refers to the training stack (torch, skyrl, ray, ...) goes to workers only
    if that package is listed here."""

    start_up_limit_s: float = 120.0
    """Seconds a worker may take to start and import ``modules``."""

    max_failures: int = 0
    """Infrastructure failures (dead workers, exceptions in an environment's code) that a run survives; the next one
    ends it. 0 = the first one does."""

    def __post_init__(self) -> None:
        if isinstance(self.modules, str):
            raise TypeError(
                f"scoring modules={self.modules!r} must be a list of module names, or each letter would be imported; "
                f"write [{self.modules!r}]"
            )
        object.__setattr__(self, "modules", tuple(self.modules))
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"scoring workers={self.workers} leaves nobody to score; set at least 1, or None")
        for name in ("time_limit_s", "start_up_limit_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"scoring {name}={value} must be a positive, finite number of seconds")
        if self.memory_limit_mb < 64:
            raise ValueError(
                f"scoring memory_limit_mb={self.memory_limit_mb} is less than an interpreter with SQLite needs; "
                "set at least 64"
            )
        if self.max_failures < 0:
            raise ValueError(f"scoring max_failures={self.max_failures} must be 0 or more")

    @property
    def worker_count(self) -> int:
        """Number of worker processes, ``workers=None`` resolved."""
        if self.workers is not None:
            return self.workers
        return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_WORKERS)


# ---------------------------------------------------------------------------------------------------------------------
# Worker side
# ---------------------------------------------------------------------------------------------------------------------

_start_up_error: str | None = None


def _private_memory_mb() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmData"))
    return int(line.split()[1]) // 1024


def _initialize_worker(modules: tuple[str, ...], env_modules: list[str], memory_limit_mb: int) -> None:
    # An exception here would end the worker silently, so it is kept and answered to the first call.
    global _start_up_error
    try:
        os.setpgid(0, 0)
        for name in _THREAD_VARIABLES:
            os.environ[name] = "1"
        for module in modules:
            importlib.import_module(module)
        for module in env_modules:
            # One that cannot be imported here is reported when an environment of it is unpickled.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        used_mb = _private_memory_mb()
        if used_mb > 0.75 * memory_limit_mb:
            raise MemoryError(
                f"a worker holds {used_mb} MiB once its modules are imported, more than three quarters of scoring "
                f"memory_limit_mb={memory_limit_mb}; set at least {2 * used_mb}, or import less"
            )
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_mb * _MB, memory_limit_mb * _MB))
    except Exception:
        _start_up_error = traceback.format_exc()


def _run_call(payload: bytes, backstop_s: float) -> tuple[str, Any, float]:
    """Run one packed call; returns (kind, body, seconds), never raises."""
    if _start_up_error is not None:
        return "start_up", _start_up_error, 0.0
    # Ends this process without the GIL when the parent, and so the pool's own time limit, is gone.
    faulthandler.dump_traceback_later(backstop_s, exit=True, file=2)
    began = time.perf_counter()
    try:
        kind, body = _execute(payload)
    except MemoryError:
        kind, body = "out_of_memory", None
    finally:
        faulthandler.cancel_dump_traceback_later()
    return kind, body, time.perf_counter() - began


def _execute(payload: bytes) -> tuple[str, Any]:
    try:
        env, method, args, kwargs = pickle.loads(payload)
    except Exception as error:
        return "cannot_travel", f"a worker cannot unpickle it: {error!r}"
    try:
        result = getattr(env, method)(*args, **kwargs)
    except MemoryError:
        raise
    except BaseException as error:
        return "raised", _pack_exception(error)
    try:
        return "ok", pickle.dumps((result, env), protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        return "cannot_travel", f"its result or state after {method}() cannot be pickled: {error!r}"


def _pack_exception(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps((error, text))
        returned, _ = pickle.loads(packed)
        if isinstance(error, Exception) and type(returned) is type(error):
            return packed
    except Exception as pickling_error:
        text += f"\n(the exception itself cannot be pickled: {pickling_error!r})"
    return pickle.dumps((ScoringEnvError(f"the environment raised {type(error).__qualname__}: {error}\n{text}"), text))


# ---------------------------------------------------------------------------------------------------------------------
# Parent side: processes
# ---------------------------------------------------------------------------------------------------------------------


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


class _WorkerLost(Exception):
    """The worker died before it answered; ``seconds`` is how long the call had been running."""

    def __init__(self, exit_code: int | None, seconds: float) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code
        self.seconds = seconds


class _Slot:
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
                    initializer=_initialize_worker,
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

    async def run(self, payload: bytes, limit_s: float) -> tuple[str, Any, float]:
        """Run a packed call; raises TimeoutError, ScoringStartUpError, ScoringClosed or _WorkerLost."""
        pool = self._pool
        if pool is None or not pool.active:
            pool = await asyncio.to_thread(self._live_pool)
        context = self._context
        worker = context.worker()
        try:
            future = pool.schedule(_run_call, args=(payload, limit_s + _BACKSTOP_S), timeout=limit_s)
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
            raise _WorkerLost(error.exitcode, seconds) from error
        finally:
            # pebble kills the worker of a cancelled call.
            future.cancel()

    def _lost(self, worker: _WorkerProcess | None, seconds: float) -> Exception:
        if self._stopped:
            return ScoringClosed("the scoring pool was closed during the call")
        return _WorkerLost(None if worker is None else worker.exitcode, seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Parent side: the pool
# ---------------------------------------------------------------------------------------------------------------------


class _CallPickler(pickle.Pickler):
    """A pickler that notes the modules which the receiver will import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        owner = obj if isinstance(obj, (type, types.FunctionType)) else type(obj)
        self.modules.add(owner.__module__)
        return NotImplemented


def _pack_call(
    env: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], modules: tuple[str, ...]
) -> tuple[bytes, set[str]]:
    """The call, pickled, and the modules that the receiver will import."""
    cls = type(env)
    slotted = [base.__name__ for base in cls.__mro__ if "__slots__" in vars(base) and vars(base)["__slots__"]]
    if slotted:
        raise pickle.PicklingError(f"its state lies in __slots__ of {slotted}, not in __dict__")
    file = io.BytesIO()
    pickler = _CallPickler(file)
    pickler.dump((env, method, args, kwargs))
    if "__main__" in pickler.modules:
        raise pickle.PicklingError("it uses a class of __main__, which no worker imports; move that class to a module")
    allowed = {module.partition(".")[0] for module in modules}
    refused = sorted(module for module in pickler.modules if module.partition(".")[0] in _STACK - allowed)
    if refused:
        raise pickle.PicklingError(f"its state refers to {refused}, too large for a worker to import")
    return file.getvalue(), pickler.modules


@dataclass(frozen=True)
class _TimeLimit:
    seconds: float
    source: str


def _time_limit(env: object, method: str, config: ScoringConfig) -> _TimeLimit:
    if method != "step" or not hasattr(env, "max_step_s") or env.max_step_s is None:
        return _TimeLimit(config.time_limit_s, f"time_limit_s={config.time_limit_s}")
    own = env.max_step_s
    if isinstance(own, bool) or not isinstance(own, int | float) or not (math.isfinite(own) and own > 0):
        raise ScoringEnvError(
            f"{type(env).__qualname__}.max_step_s={own!r} must be a positive, finite number of seconds, or None for "
            "the pool's time_limit_s"
        )
    return _TimeLimit(own + STEP_GRACE_S, f"its max_step_s={own} by {STEP_GRACE_S} s")


class EnvPool:
    """Runs methods of environments in worker processes.

    May be used from one event loop after another; within a call nothing blocks the loop. A worker starts when a call
    first needs it and then stays. Results travel with their own call's future, so order and pairing cannot be lost.

    Class-level and module-level state that a method changes stays in the worker; only ``env.__dict__`` comes back.
    When a method raises, ``env`` keeps the state it had before the call.
    """

    def __init__(self, config: ScoringConfig) -> None:
        self.config = config
        self.busy_seconds = 0.0
        """Seconds spent running calls, summed over workers and threads; a killed call counts until it was killed."""
        self._counters: Counter[str] = Counter()
        # Shared with the slots and pickled whenever a worker starts, so that it knows every class seen until then.
        self._env_modules: list[str] = []
        self._slots: list[_Slot] = [_Slot(config, self._env_modules) for _ in range(config.worker_count)]
        self._free: list[_Slot] = list(reversed(self._slots))
        self._waiting: deque[Future[_Slot]] = deque()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=config.worker_count, thread_name_prefix="scoring-env")
        self._warned: set[type] = set()
        self._thread_only: set[type] = set()
        self._closed = False

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start: calls, in_thread, timed_out, out_of_memory, worker_died (each death), retried,
        start_up, raised."""
        names = ("calls", "in_thread", "timed_out", "out_of_memory", "worker_died", "retried", "start_up", "raised")
        return {name: self._counters[name] for name in names}

    def process_ids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [pid for slot in self._slots if (pid := slot.process_id()) is not None]

    async def call(self, env: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``env.method(*args, **kwargs)`` in a worker and return its result; ``env`` takes over the new state.

        An environment that cannot be sent (not picklable, defined in ``__main__``, or tied to the training stack) runs
        in a thread of this process, without limits, after one warning for its class.

        Raises:
            ScoringTimeout, ScoringMemoryExceeded: the call itself broke a limit.
            ScoringEnvError: ``max_step_s`` is no number of seconds, or what the environment raised cannot travel.
            ScoringWorkerDied: the worker ended for another reason, twice.
            ScoringStartUpError, ScoringClosed: no worker to run it.
            Exception: what the environment raised, with the worker's traceback text as ``__cause__``.
        """
        if self._closed:
            raise ScoringClosed("the scoring pool is closed")
        self._counters["calls"] += 1
        label = f"{type(env).__qualname__}.{method}()"
        limit = _time_limit(env, method, self.config)
        if type(env) in self._thread_only:
            return await self._call_in_thread(env, method, args, kwargs)
        try:
            payload, modules = _pack_call(env, method, args, kwargs, self.config.modules)
        except Exception as error:
            self._warn_once(type(env), f"it cannot be sent to a worker: {error}")
            return await self._call_in_thread(env, method, args, kwargs)
        self._env_modules.extend(sorted(modules.difference(self._env_modules)))
        kind, body = await self._call_in_worker(payload, label, limit)
        if kind == "cannot_travel":
            self._thread_only.add(type(env))
            self._warn_once(type(env), body)
            return await self._call_in_thread(env, method, args, kwargs)
        if kind == "raised":
            self._counters["raised"] += 1
            error, text = pickle.loads(body)
            raise error from WorkerTraceback(text)
        result, returned = pickle.loads(body)
        env.__dict__.clear()
        env.__dict__.update(returned.__dict__)
        return result

    async def _call_in_worker(self, payload: bytes, label: str, limit: _TimeLimit) -> tuple[str, Any]:
        exit_codes: list[int | None] = []
        for attempt in range(2):
            slot = await self._acquire()
            try:
                kind, body, seconds = await slot.run(payload, limit.seconds)
                self.busy_seconds += seconds
                if kind == "out_of_memory":
                    await asyncio.to_thread(slot.discard)
            except TimeoutError as error:
                self.busy_seconds += limit.seconds
                self._counters["timed_out"] += 1
                raise ScoringTimeout(f"{label} ran past {limit.source} and its worker was killed") from error
            except _WorkerLost as lost:
                self.busy_seconds += lost.seconds
                self._counters["worker_died"] += 1
                self._counters["retried"] += attempt == 0
                exit_codes.append(lost.exit_code)
                await asyncio.to_thread(slot.discard)
                continue
            finally:
                self._release(slot)
            if kind == "out_of_memory":
                self._counters["out_of_memory"] += 1
                raise ScoringMemoryExceeded(f"{label} needed more than memory_limit_mb={self.config.memory_limit_mb}")
            if kind == "start_up":
                self._counters["start_up"] += 1
                raise ScoringStartUpError(f"a scoring worker failed to start for {label}:\n{body}")
            return kind, body
        raise ScoringWorkerDied(f"the worker running {label} died twice (exit codes {exit_codes}; -n is signal n)")

    async def _call_in_thread(self, env: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._counters["in_thread"] += 1
        bound: Callable[[], Any] = functools.partial(getattr(env, method), *args, **kwargs)
        began = time.perf_counter()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, bound)
        except Exception:
            self._counters["raised"] += 1
            raise
        finally:
            self.busy_seconds += time.perf_counter() - began

    def _warn_once(self, cls: type, reason: str) -> None:
        if cls in self._warned:
            return
        self._warned.add(cls)
        logger.warning(
            "environment %s.%s runs in a thread of this process, without time or memory limits: %s",
            cls.__module__,
            cls.__qualname__,
            reason,
        )

    async def _acquire(self) -> _Slot:
        with self._lock:
            if self._free:
                return self._free.pop()
            waiter: Future[_Slot] = Future()
            self._waiting.append(waiter)
        try:
            return await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release(waiter.result())
            raise

    def _release(self, slot: _Slot) -> None:
        with self._lock:
            while self._waiting:
                waiter = self._waiting.popleft()
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(slot)
                    return
            self._free.append(slot)

    def close(self) -> None:
        """Kill every worker and wait until it is gone; calls still out raise ScoringClosed. May be called twice."""
        self._closed = True
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(ScoringClosed("the scoring pool was closed before the call ran"))
        for slot in self._slots:
            slot.request_stop()
        for slot in self._slots:
            slot.discard()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        await asyncio.to_thread(self.close)
