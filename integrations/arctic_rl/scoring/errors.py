"""What an environment call can fail with, beside what the environment itself raises."""

from typing import ClassVar

from ..errors import ArcticError


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


class ScoringWorkerCrashed(ScoringWorkerDied):
    """The worker crashed (a signal such as SIGSEGV) during the call, and again during its retry: the call's doing."""

    cause = "crashed"


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
