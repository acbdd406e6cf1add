"""Phase timers, profiles and memory marks of the pipeline, switched on from the environment.

ENABLE_TIMERS=1                seconds a phase, in the metrics as timer/<phase>
PROFILER_TYPE=none|torch|c     one profile a run_pipeline call (torch.profiler, or cProfile), written to
PROFILER_DIR=<folder>          required with a PROFILER_TYPE other than none
"""

import cProfile
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from ..errors import UnsupportedError

__all__ = ["PHASES", "PhaseTimers", "profiled", "see_memory_usage"]

PHASES = ("forward", "post_forward", "loss", "backward")
_logger = logging.getLogger(__name__)
_calls = itertools.count()
_PROFILERS = ("none", "torch", "c")


class PhaseTimers:
    """Seconds spent in each phase of one call; does nothing unless ENABLE_TIMERS is set."""

    def __init__(self, device: torch.device):
        setting = os.environ.get("ENABLE_TIMERS", "")
        if setting.lower() not in ("", "0", "1", "true", "false"):
            raise UnsupportedError(f"ENABLE_TIMERS={setting!r} must be 1 or 0")
        self._seconds = dict.fromkeys(PHASES, 0.0) if setting.lower() in ("1", "true") else None
        self._device = device

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time spent inside to a phase; accelerators are waited for."""
        return nullcontext() if self._seconds is None else self._timed(name)

    def metrics(self) -> dict[str, float]:
        """Seconds by ``timer/<phase>``; empty when off."""
        return {} if self._seconds is None else {f"timer/{name}": value for name, value in self._seconds.items()}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._seconds[name] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def see_memory_usage(mark: str, device: torch.device) -> None:
    """Log allocated and peak memory at debug level, in GiB: of the GPU, or this process's resident memory on CPUs."""
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        now, peak = _resident_bytes()
    _logger.debug("memory %s: %.3f GiB, peak %.3f GiB", mark, now / 2**30, peak / 2**30)


@contextmanager
def profiled() -> Iterator[None]:
    """Profile what runs inside as PROFILER_TYPE says."""
    kind = os.environ.get("PROFILER_TYPE", "none")
    if kind not in _PROFILERS:
        raise UnsupportedError(f"PROFILER_TYPE={kind!r} is unknown; known: {', '.join(_PROFILERS)}")
    if kind == "none":
        yield
        return
    folder = os.environ.get("PROFILER_DIR")
    if not folder:
        raise UnsupportedError(f"PROFILER_TYPE={kind} needs PROFILER_DIR, the folder that profiles are written to")
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = Path(folder) / f"run_pipeline-{os.getpid()}-{next(_calls)}"
    if kind == "c":
        profiler = cProfile.Profile()
        profiler.enable()
        try:
            yield
        finally:
            profiler.disable()
            profiler.dump_stats(f"{name}.prof")
        return
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(f"{name}.json")


def _resident_bytes() -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
