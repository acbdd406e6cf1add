"""Remote backends: the contract, the registry of names, and one file a backend."""

from .handle import BackendHandle
from .registry import RemoteBackendRegistry

__all__ = ["BackendHandle", "RemoteBackend", "RemoteBackendRegistry"]


def __getattr__(name: str) -> type:
    if name == "RemoteBackend":
        from .base import RemoteBackend

        return RemoteBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
