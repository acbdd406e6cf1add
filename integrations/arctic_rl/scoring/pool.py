"""The pool: whole environment calls, and steps given out in parts, in worker processes."""

import asyncio
import functools
import io
import logging
import math
import pickle
import signal
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .config import ScoringConfig
from .errors import (
    ScoringClosed,
    ScoringEnvError,
    ScoringMemoryExceeded,
    ScoringStartUpError,
    ScoringTimeout,
    ScoringWorkerCrashed,
    ScoringWorkerDied,
    WorkerTraceback,
)
from .pickling import EnvPickler
from .process import WorkerLost, WorkerSlot
from .shared_results import SharedResults
from .worker import Reply

logger = logging.getLogger(__name__)

STEP_GRACE_S = 5.0
"""Seconds that a ``step`` may run past its environment's own ``max_step_s`` before its worker is killed: a limit that
the environment keeps by itself comes first, and the worker's caches outlive it."""

PART_GRACE_S = 0.5
"""Seconds that a part of a step may run past its own ``time_limit_s`` before its worker is killed."""

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_STACK = frozenset({"datasets", "deepspeed", "ray", "skyrl", "torch", "transformers", "vllm"})


class Part(Protocol):
    """A piece of an environment's step that may run anywhere and serve several steps.

    An environment gives its ``step`` out in parts where the function ``step`` has an attribute ``in_parts``: the name
    of a generator method that takes the same arguments, yields lists of parts, is sent the lists of their results (or
    thrown the first exception among them) and returns what ``step`` would. The method itself runs in the caller's
    process and event loop, so that only light work belongs there; a subclass that overrides ``step`` is called whole
    again. Parts are found by these names, not by inheritance, and must be picklable.
    """

    @property
    def key(self) -> Any:
        """Hashable; parts of one class with equal keys have equal results. None = the result is nobody else's."""

    @property
    def time_limit_s(self) -> float:
        """Seconds that ``run`` takes at most if it keeps to its own limit; ``PART_GRACE_S`` past it, its worker is
        killed."""

    def run(self) -> Any:
        """Does the work, in a worker. An exception goes to every step that waits for it, and is not kept."""

    def failed(self, cause: Literal["timed_out", "out_of_memory", "crashed"], error: str) -> Any:
        """What stands in for the result where the worker was killed for it, or crashed twice; called in the parent."""

    def keep_s(self, result: Any, runs: int) -> float:
        """Seconds for which the result of the ``runs``-th run may serve parts with the same key."""


class _CallPickler(EnvPickler):
    """A pickler that notes the modules which the receiver will import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        owner = obj if isinstance(obj, (type, types.FunctionType)) else type(obj)
        self.modules.add(owner.__module__)
        return super().reducer_override(obj)


@dataclass(frozen=True)
class _Call:
    """What ``run_call`` unpickles."""

    target: Any
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    returns_state: bool = False

    @property
    def label(self) -> str:
        return f"{type(self.target).__qualname__}.{self.method}()"


def _pack_call(call: _Call, config: ScoringConfig) -> tuple[bytes, set[str]]:
    """The call, pickled, and the modules that the receiver will import."""
    cls = type(call.target)
    slotted = [base.__name__ for base in cls.__mro__ if "__slots__" in vars(base) and vars(base)["__slots__"]]
    if slotted and call.returns_state:
        raise pickle.PicklingError(f"its state lies in __slots__ of {slotted}, not in __dict__")
    file = io.BytesIO()
    pickler = _CallPickler(file)
    pickler.dump((call.target, call.method, call.args, call.kwargs or {}, call.returns_state))
    mains = sorted(pickler.modules.intersection(config.main_modules).difference(config.modules))
    if mains:
        raise pickle.PicklingError(f"it uses a class of {mains[0]}, which no worker imports; move that to a module")
    allowed = {module.partition(".")[0] for module in config.modules}
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
    own = _seconds(env.max_step_s, f"{type(env).__qualname__}.max_step_s", ", or None for the pool's time_limit_s")
    return _TimeLimit(own + STEP_GRACE_S, f"its max_step_s={own} by {STEP_GRACE_S} s")


def _part_time_limit(part: Part) -> _TimeLimit:
    own = _seconds(part.time_limit_s, f"{type(part).__qualname__}.time_limit_s", "")
    return _TimeLimit(own + PART_GRACE_S, f"its time_limit_s={own} by {PART_GRACE_S} s")


def _seconds(value: Any, name: str, otherwise: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ScoringEnvError(f"{name}={value!r} must be a positive, finite number of seconds{otherwise}")
    return value


class EnvPool:
    """Runs methods of environments in worker processes.

    May be used from one event loop after another; within a call nothing blocks the loop. A worker starts with
    ``start``, or when a call first needs it, and then stays. Results travel with their own call's future, so order and
    pairing cannot be lost. Parts with equal keys run once, and their result serves all (see ``Part``).

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
        self._slots: list[WorkerSlot] = [WorkerSlot(config, self._env_modules) for _ in range(config.worker_count)]
        self._free: list[WorkerSlot] = list(reversed(self._slots))
        self._waiting: deque[Future[WorkerSlot]] = deque()
        self._shared = SharedResults(config.shared_results_mb << 20)
        self._starter: threading.Thread | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=config.worker_count, thread_name_prefix="scoring-env")
        self._warned: set[type] = set()
        self._thread_only: set[type] = set()
        self._closed = False

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start: calls, in_thread, parts (that were run), shared (parts answered by the run of an
        equal one), timed_out, out_of_memory, worker_died (each death), retried, start_up, raised."""
        names = ("timed_out", "out_of_memory", "worker_died", "retried", "start_up", "raised")
        counts = {name: self._counters[name] for name in ("calls", "in_thread", "parts")}
        return {**counts, "shared": self._shared.shared, **{name: self._counters[name] for name in names}}

    def start(self) -> None:
        """Start all workers in the background; returns at once. A call made meanwhile waits for what is missing."""
        if self._starter is None and not self._closed:
            self._starter = threading.Thread(target=self._start_all, name="scoring-start", daemon=True)
            self._starter.start()

    def _start_all(self) -> None:
        for slot in self._slots:
            slot.start()

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
            ScoringWorkerDied: the worker ended for another reason, twice; ScoringWorkerCrashed if by crashing.
            ScoringStartUpError, ScoringClosed: no worker to run it.
            Exception: what the environment raised, with the worker's traceback text as ``__cause__``.
        """
        if self._closed:
            raise ScoringClosed("the scoring pool is closed")
        self._counters["calls"] += 1
        function = getattr(type(env), method)
        if hasattr(function, "in_parts"):
            return await self.run_in_parts(getattr(env, function.in_parts)(*args, **kwargs))
        call = _Call(env, method, args, kwargs, returns_state=True)
        limit = _time_limit(env, method, self.config)
        if type(env) in self._thread_only:
            return await self._call_in_thread(call)
        body = await self._call_in_worker(call, limit)
        if body is None:
            return await self._call_in_thread(call)
        result, returned = pickle.loads(body)
        env.__dict__.clear()
        env.__dict__.update(returned.__dict__)
        return result

    async def run_in_parts(self, parts: Generator[list[Part], list[Any], Any]) -> Any:
        """Run what a generator yields (see ``Part``) in workers, and return what it returns.

        Raises what ``call`` raises of a part, unless the generator catches it.
        """
        try:
            wanted = next(parts)
            while True:
                try:
                    results = await self._run_parts(wanted)
                except Exception as error:
                    wanted = parts.throw(error)
                else:
                    wanted = parts.send(results)
        except StopIteration as end:
            return end.value
        finally:
            parts.close()

    async def _run_parts(self, parts: list[Part]) -> list[Any]:
        if len(parts) == 1:
            return [await self._run_part(parts[0])]
        results = await asyncio.gather(*map(self._run_part, parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _run_part(self, part: Part) -> Any:
        key = part.key
        if key is None:
            packed, _ = await self._compute_part(part, 1)
        else:
            packed = await self._shared.get((type(part), key), functools.partial(self._compute_part, part))
        return pickle.loads(packed)

    async def _compute_part(self, part: Part, runs: int) -> tuple[bytes, float]:
        """The part's result, pickled, and for how many seconds it may serve others."""
        self._counters["parts"] += 1
        call = _Call(part, "run")
        try:
            packed = await self._call_in_worker(call, _part_time_limit(part))
            result = await self._call_in_thread(call) if packed is None else pickle.loads(packed)
        except (ScoringTimeout, ScoringMemoryExceeded, ScoringWorkerCrashed) as error:
            packed, result = None, part.failed(error.cause, str(error))
        if packed is None:
            packed = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        return packed, part.keep_s(result, runs)

    async def _call_in_worker(self, call: _Call, limit: _TimeLimit) -> bytes | None:
        """The pickled result; None where it cannot be had of a worker, which is then known for the class."""
        try:
            payload, modules = _pack_call(call, self.config)
        except Exception as error:
            self._warn_once(type(call.target), f"it cannot be sent to a worker: {error}")
            return None
        self._env_modules.extend(sorted(modules.difference(self._env_modules)))
        reply = await self._send(payload, call.label, limit)
        if reply.kind == "cannot_travel":
            self._thread_only.add(type(call.target))
            self._warn_once(type(call.target), reply.body)
            return None
        if reply.kind == "raised":
            self._counters["raised"] += 1
            error, text = pickle.loads(reply.body)
            raise error from WorkerTraceback(text)
        return reply.body

    async def _send(self, payload: bytes, label: str, limit: _TimeLimit) -> Reply:
        exit_codes: list[int | None] = []
        for attempt in range(2):
            slot = await self._acquire()
            try:
                reply = await slot.run(payload, limit.seconds)
                self.busy_seconds += reply.seconds
                if reply.worn or reply.kind == "out_of_memory":
                    await asyncio.to_thread(slot.renew)
            except TimeoutError as error:
                self.busy_seconds += limit.seconds
                self._counters["timed_out"] += 1
                raise ScoringTimeout(f"{label} ran past {limit.source} and its worker was killed") from error
            except WorkerLost as lost:
                self.busy_seconds += lost.seconds
                self._counters["worker_died"] += 1
                self._counters["retried"] += attempt == 0
                exit_codes.append(lost.exit_code)
                await asyncio.to_thread(slot.renew)
                continue
            finally:
                self._release(slot)
            if reply.kind == "out_of_memory":
                self._counters["out_of_memory"] += 1
                raise ScoringMemoryExceeded(f"{label} needed more than memory_limit_mb={self.config.memory_limit_mb}")
            if reply.kind == "start_up":
                self._counters["start_up"] += 1
                raise ScoringStartUpError(f"a scoring worker failed to start for {label}:\n{reply.body}")
            return reply
        crashed = all(code is not None and -code in _CRASHES for code in exit_codes)
        kind = ScoringWorkerCrashed if crashed else ScoringWorkerDied
        raise kind(f"the worker running {label} died twice (exit codes {exit_codes}; -n is signal n)")

    async def _call_in_thread(self, call: _Call) -> Any:
        self._counters["in_thread"] += 1
        function = getattr(call.target, call.method)
        bound: Callable[[], Any] = functools.partial(function, *call.args, **(call.kwargs or {}))
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
            "%s.%s runs in a thread of this process, without time or memory limits: %s",
            cls.__module__,
            cls.__qualname__,
            reason,
        )

    async def _acquire(self) -> WorkerSlot:
        with self._lock:
            if self._free:
                return self._free.pop()
            waiter: Future[WorkerSlot] = Future()
            self._waiting.append(waiter)
        try:
            return await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release(waiter.result())
            raise

    def _release(self, slot: WorkerSlot) -> None:
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
        if self._starter is not None:
            self._starter.join()
        for slot in self._slots:
            slot.discard()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        await asyncio.to_thread(self.close)
