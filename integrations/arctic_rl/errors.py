"""Exceptions of the integration. Each takes one message and survives pickling, so that it can cross a process."""


class ArcticError(RuntimeError):
    """Base class of every error that this integration raises on purpose."""


class UnsupportedError(ArcticError, ValueError):
    """A setting or a call that cannot be served; the message names it and what to write instead."""


class WorkerDiedError(ArcticError):
    """A training or sampling process ended, or stopped answering, while its result was awaited."""
