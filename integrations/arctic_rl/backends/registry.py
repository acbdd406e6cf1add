"""Names of remote backends and their lazy loaders: choosing one imports nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..config import nearest
from ..errors import ConfigError
from .base import RemoteBackend

Loader = Callable[[], type[RemoteBackend]]

_LOADERS: dict[str, Loader] = {}


def register(name: str) -> Callable[[Loader], Loader]:
    """Register a zero-argument loader of a ``RemoteBackend`` class under a name.

    Raises:
        ConfigError: when another loader holds the name.
    """

    def add(loader: Loader) -> Loader:
        if _LOADERS.get(name, loader) is not loader:
            raise ConfigError(f"a remote backend named {name!r} is registered already: choose another name")
        _LOADERS[name] = loader
        return loader

    return add


def check_name(name: str) -> None:
    """Refuse an unknown backend without loading a known one.

    Raises:
        ConfigError: for an unknown name, with the known ones.
    """
    if name not in _LOADERS:
        raise ConfigError(
            f"trainer.arctic_rl.backend={name!r} is not registered: {nearest(name, _LOADERS)} "
            "(register your own with integrations.arctic_rl.backends.registry.register)"
        )


def get(name: str) -> type[RemoteBackend]:
    """The backend class of a name, loaded once.

    Raises:
        ConfigError: see ``check_name``.
    """
    check_name(name)
    return _load(name)


@cache
def _load(name: str) -> type[RemoteBackend]:
    return _LOADERS[name]()


@register("builtin")
def _builtin() -> type[RemoteBackend]:
    from .builtin import BuiltinBackend

    return BuiltinBackend
