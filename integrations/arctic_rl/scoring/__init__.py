"""A process pool for environment calls: hard time and memory limits, and a dead worker costs one call.

``EnvPool.call(env, "step", action)`` sends the picklable environment to a spawned worker, runs the method there and
brings the result and the environment's new state back. An environment may name the time limit of its ``step`` itself,
in an attribute ``max_step_s``, or give the work of its ``step`` out in parts (see ``pool.Part``). Every worker is a
pebble pool of its own: the workers of one pebble pool share a pipe behind one lock, and one killed while idle marks
that whole pool broken, so that a dead worker would become a dead run.

Workers import pebble, this package, ``ScoringConfig.modules`` and the modules that environments and their state come
from, and never the parent's ``__main__``.
"""

from .config import ScoringConfig
from .errors import (
    ScoringClosed,
    ScoringEnvError,
    ScoringError,
    ScoringMemoryExceeded,
    ScoringStartUpError,
    ScoringTimeout,
    ScoringWorkerCrashed,
    ScoringWorkerDied,
    WorkerTraceback,
)
from .pool import EnvPool, Part

__all__ = [
    "EnvPool",
    "Part",
    "ScoringClosed",
    "ScoringConfig",
    "ScoringEnvError",
    "ScoringError",
    "ScoringMemoryExceeded",
    "ScoringStartUpError",
    "ScoringTimeout",
    "ScoringWorkerCrashed",
    "ScoringWorkerDied",
    "WorkerTraceback",
]
