"""Exceptions of the integration. Each survives pickling, so that it can cross a process."""


class ArcticError(RuntimeError):
    """Base class of every error that this integration raises on purpose."""


class UnsupportedError(ArcticError, ValueError):
    """A setting or a call that cannot be served; the message names it and what to write instead."""


class PackingError(UnsupportedError):
    """A model that cannot run packed rows; its message is ``reason``, and what a caller of the pipeline can do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason, advice)
        self.reason = reason

    def __str__(self) -> str:
        return "; ".join(self.args)


class RequestError(ArcticError, ValueError):
    """A call whose batch or arguments contradict themselves, or ask for what is not there; nothing was computed."""


class WorkerDiedError(ArcticError):
    """A training or sampling process ended, or stopped answering, while its result was awaited."""


class CheckpointError(ArcticError):
    """A checkpoint or an export that could not be written, is not whole, or does not fit the run that loads it."""


class ConfigError(ArcticError, ValueError):
    """A setting of ours that is unknown, of the wrong type or out of range; one line a problem."""


class PlacementError(ArcticError, ValueError):
    """The workers that a recipe asks for do not fit the cluster; the message names the settings to change."""
