"""Settings of the environment process pool."""

import math
import os
from dataclasses import dataclass

_MAX_DEFAULT_WORKERS = 32


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

    main_modules: tuple[str, ...] = ("__main__",)
    """Modules that no worker imports: an environment whose class or state refers to one runs in a thread. A recipe's
    own entry module is one, which imports the training stack; listed in ``modules`` too, it is imported after all."""

    start_up_limit_s: float = 120.0
    """Seconds a worker may take to start and import ``modules``."""

    shared_results_mb: int = 64
    """MiB of pickled results of parts that are kept, in this process, for later parts with the same key."""

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
        if self.shared_results_mb < 0:
            raise ValueError(f"scoring shared_results_mb={self.shared_results_mb} must be 0 or more")
        if self.max_failures < 0:
            raise ValueError(f"scoring max_failures={self.max_failures} must be 0 or more")

    @property
    def worker_count(self) -> int:
        """Number of worker processes, ``workers=None`` resolved."""
        if self.workers is not None:
            return self.workers
        return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_WORKERS)
