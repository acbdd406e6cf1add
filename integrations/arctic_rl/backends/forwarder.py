"""A plain class for a framework's own worker group: it attaches to a server and forwards calls."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from ..server.specs import ServerConfig
from .base import RemoteBackend
from .handle import BackendHandle
from .loop_thread import LoopThread
from .registry import RemoteBackendRegistry

_NOT_FORWARDED = ("from_config", "reconnect_handle", "initialize", "destroy", "shutdown")


class BackendForwarder:
    """Attaches to the server of a handle and runs its calls, each to its end.

    Args:
        config: what the run asks for.
        handle: of a server that is up.
        world_size: members of the worker group.

    Raises:
        UnsupportedError: the group has several members and the backend wants one forwarder.
    """

    def __init__(self, config: ServerConfig, handle: BackendHandle, *, world_size: int = 1) -> None:
        self._backend = RemoteBackendRegistry.attach(handle, config)
        if world_size != 1 and self._backend.requires_single_forwarder():
            raise UnsupportedError(
                f"a worker group of {world_size} forwards to the backend {handle.backend!r}, which shares the rows "
                "of a call among its ranks itself: give the group one member"
            )
        self._loop = LoopThread("arctic-forwarder")

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a call of ``RemoteBackend`` by its name.

        Raises:
            UnsupportedError: it is not a call that a forwarder makes.
        """
        if name.startswith("_") or name not in dir(RemoteBackend) or name in _NOT_FORWARDED:
            raise UnsupportedError(f"{name!r} is not a call that is forwarded: see RemoteBackend")
        method = getattr(self._backend, name)
        if name in ("dp_size", "requires_single_forwarder"):
            return method(*args, **kwargs)
        return self._loop.run(method(*args, **kwargs))

    def close(self) -> None:
        """Let go of the server, which goes on."""
        self._loop.run(self._backend.destroy())
        self._loop.close()
