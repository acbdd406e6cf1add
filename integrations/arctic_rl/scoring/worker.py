"""What runs in a scoring worker: its start-up and one call after another."""

import contextlib
import faulthandler
import importlib
import os
import pickle
import resource
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ScoringEnvError
from .pickling import dumps

ONE_CALL_VARIABLE = "ARCTIC_RL_ONE_CALL_AT_A_TIME"
"""An environment variable that tells what a worker calls that this process, whose id it holds, runs one call at a time
and does nothing else, so that limits of the whole process may be lowered during a call."""

_MB = 1 << 20
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_start_up_error: str | None = None
_worn_above_mb: float | None = None


@dataclass(frozen=True)
class Reply:
    """How a call ended."""

    kind: Literal["ok", "raised", "cannot_travel", "out_of_memory", "start_up"]
    body: Any = None
    """What it gave, pickled; its exception and traceback, pickled; or a text."""
    seconds: float = 0.0
    """How long it ran."""
    worn: bool = False
    """The worker still holds so much memory that the next call would have less than half of what the first one had."""


def private_memory_mb() -> int:
    """MiB of private writable memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmData"))
    return int(line.split()[1]) // 1024


def initialize_worker(modules: tuple[str, ...], env_modules: list[str], memory_limit_mb: int) -> None:
    """Import what calls will need, then take on the memory limit."""
    # An exception here would end the worker silently, so it is kept and answered to the first call.
    global _start_up_error, _worn_above_mb
    try:
        os.setpgid(0, 0)
        os.environ[ONE_CALL_VARIABLE] = str(os.getpid())
        for name in _THREAD_VARIABLES:
            os.environ[name] = "1"
        for module in modules:
            importlib.import_module(module)
        for module in env_modules:
            # One that cannot be imported here is reported when an environment of it is unpickled.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        used_mb = private_memory_mb()
        if used_mb > 0.75 * memory_limit_mb:
            raise MemoryError(
                f"a worker holds {used_mb} MiB once its modules are imported, more than three quarters of scoring "
                f"memory_limit_mb={memory_limit_mb}; set at least {2 * used_mb}, or import less"
            )
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_mb * _MB, memory_limit_mb * _MB))
        _worn_above_mb = (used_mb + memory_limit_mb) / 2
    except Exception:
        _start_up_error = traceback.format_exc()


def do_nothing() -> None:
    """A call that only needs the worker to be there."""


def run_call(payload: bytes, backstop_s: float) -> Reply:
    """Run one packed call; never raises.

    Args:
        payload: pickled (target, method, args, kwargs, returns_state).
        backstop_s: seconds after which this process ends itself, without the GIL: the parent, and so the pool's own
            time limit, is gone by then.
    """
    if _start_up_error is not None:
        return Reply("start_up", _start_up_error)
    faulthandler.dump_traceback_later(backstop_s, exit=True, file=2)
    began = time.perf_counter()
    try:
        kind, body = _execute(payload)
    except MemoryError:
        kind, body = "out_of_memory", None
    finally:
        faulthandler.cancel_dump_traceback_later()
    worn = _worn_above_mb is not None and private_memory_mb() > _worn_above_mb
    return Reply(kind, body, time.perf_counter() - began, worn)


def _execute(payload: bytes) -> tuple[str, Any]:
    try:
        target, method, args, kwargs, returns_state = pickle.loads(payload)
    except MemoryError:
        raise
    except Exception as error:
        return "cannot_travel", f"a worker cannot unpickle it: {error!r}"
    try:
        result = getattr(target, method)(*args, **kwargs)
    except MemoryError:
        raise
    except BaseException as error:
        return "raised", _pack_exception(error)
    try:
        answer = (result, target) if returns_state else result
        return "ok", dumps(answer)
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
