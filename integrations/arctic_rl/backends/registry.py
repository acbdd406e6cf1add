"""Names of remote backends and their lazy loaders: choosing one imports nothing of the others."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import nearest
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..server.specs import ServerConfig
    from .base import RemoteBackend
    from .handle import BackendHandle

Loader = Callable[[], type]
Registered = TypeVar("Registered", bound=Callable)

_OWN_SERVERS = ("arctic-platform",)
HOW_TO_REGISTER = (
    "register your own with RemoteBackendRegistry.register(name), or write the dotted path of its class or loader"
)


def _process_wide(name: str) -> dict[str, Any]:
    """One table a process: this file is imported twice where the alias package is used too."""
    holder = sys.modules.setdefault("_arctic_rl_backend_tables", types.ModuleType("_arctic_rl_backend_tables"))
    return holder.__dict__.setdefault(name, {})


class RemoteBackendRegistry:
    """Backends, and the classes that forward calls to them, by name.

    A loader takes no argument and returns a class. It runs once, when the class is first asked for. A name with a dot
    in it that nobody registered is the path of a class or of a loader.
    """

    _loaders: dict[str, Loader] = _process_wide("backends")
    _workers: dict[str, Loader] = _process_wide("workers")
    _loaded: dict[tuple[str, str], type] = _process_wide("loaded")

    @classmethod
    def register(cls, name: str) -> Callable[[Registered], Registered]:
        """Register a ``RemoteBackend`` class, or a loader of one, under a name; a decorator.

        Raises:
            ConfigError: something else holds the name.
        """

        def add(backend: Registered) -> Registered:
            _add(cls._loaders, "remote backend", name, backend)
            return backend

        return add

    @classmethod
    def register_worker(cls, name: str, loader: Loader) -> None:
        """Register the loader of the class that a framework runs in its own worker group to forward calls.

        It is built as ``BackendForwarder`` is, which a backend without a class of its own gets.

        Raises:
            ConfigError: something else holds the name.
        """
        _add(cls._workers, "forwarding worker", name, loader)

    @classmethod
    def names(cls) -> list[str]:
        """Registered backends, sorted."""
        return sorted(cls._loaders)

    @classmethod
    def check_name(cls, name: str) -> None:
        """Refuse an unknown backend without loading a known one; a dotted path is imported.

        Raises:
            ConfigError: for an unknown name, with the known ones, and for a path that leads nowhere.
        """
        if name in cls._loaders:
            return
        if "." in name:
            cls.get(name)
            return
        known, hint = f"known names: {', '.join(cls.names())}", nearest(name, cls._loaders)
        raise ConfigError(
            f"trainer.arctic_rl.backend={name!r} is not registered: {hint if hint == known else f'{hint} {known}'} "
            f"({HOW_TO_REGISTER})"
        )

    @classmethod
    def get(cls, name: str) -> type[RemoteBackend]:
        """The backend class of a name or a dotted path, loaded once.

        Raises:
            ConfigError: see ``check_name``; the loader fails, or what it returns is no ``RemoteBackend``.
        """
        if name not in cls._loaders and "." not in name:
            cls.check_name(name)
        return cls._once("backend", name, cls._loaders.get(name) or (lambda: _from_path(name)))

    @classmethod
    def get_worker(cls, name: str) -> type:
        """The class that forwards calls to a backend from a framework's worker group, loaded once.

        Raises:
            ConfigError: the backend is unknown, the loader fails, or what it returns is no class.
        """
        if name not in cls._workers:
            cls.check_name(name)
        return cls._once("worker", name, cls._workers.get(name, _forwarder))

    @classmethod
    def attach(cls, handle: BackendHandle, config: ServerConfig) -> RemoteBackend:
        """A backend on the server that ``reconnect_handle`` described, in any process.

        Raises:
            ConfigError: the handle's backend is not known here.
        """
        return cls.get(handle.backend).from_config(config, handle)

    @classmethod
    def _once(cls, kind: str, name: str, loader: Loader) -> type:
        key = (kind, name)
        if key not in cls._loaded:
            loaded = _run(loader, f"the loader of the {kind} {name!r}")
            if not isinstance(loaded, type):
                raise ConfigError(f"the loader of the {kind} {name!r} returned {loaded!r}, which is not a class")
            if kind == "backend" and not _is_backend(loaded):
                raise ConfigError(f"the loader of the backend {name!r} returned {loaded!r}, not a RemoteBackend class")
            cls._loaded[key] = loaded
        return cls._loaded[key]


def backend_name(cfg: Any) -> str:
    """The registered name of the backend that a recipe runs on."""
    arctic = cfg.trainer.arctic_rl
    return over_http(arctic.backend) if arctic.comm_protocol == "http" else arctic.backend


def backend_class(cfg: Any) -> type[RemoteBackend]:
    """The class of that backend; where its name is not known in this process yet, as in the recipe's Ray task, the
    modules of ``trainer.arctic_rl.processor_modules`` are imported first.

    Raises:
        ConfigError: see ``RemoteBackendRegistry.get``.
    """
    name = backend_name(cfg)
    if name not in RemoteBackendRegistry.names() and "." not in name:
        for module in cfg.trainer.arctic_rl.processor_modules:
            importlib.import_module(module)
    return RemoteBackendRegistry.get(name)


def over_http(name: str) -> str:
    """The backend that reaches, over HTTP, the server on which ``name`` runs: itself, where it has a server of its
    own, else ``http``, whose server chooses the backend."""
    return name if name in _OWN_SERVERS else "http"


def _add(table: dict[str, Loader], kind: str, name: str, entry: Any) -> None:
    if not callable(entry):
        raise ConfigError(f"the {kind} {name!r} is {entry!r}: register a class or a function that returns one")
    loader = entry
    if isinstance(entry, type):
        loader = table[name] if getattr(table.get(name), "loads", None) is entry else _ready(entry)
    if table.get(name, loader) is not loader:
        raise ConfigError(f"a {kind} named {name!r} is registered already: choose another name")
    table[name] = loader


def _ready(entry: type) -> Loader:
    def load() -> type:
        return entry

    load.loads = entry
    return load


def _from_path(path: str) -> type:
    """The class at a dotted path, or the one that a loader there returns.

    Raises:
        ConfigError: nothing is there, with the reason.
    """
    setting = f"trainer.arctic_rl.backend={path!r}"
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{setting}: the module {module_name!r} does not import: {type(error).__name__}: {error}"
        ) from error
    if attribute not in vars(module):
        raise ConfigError(f"{setting}: {module_name!r} has no {attribute!r}: {nearest(attribute, vars(module))}")
    entry = vars(module)[attribute]
    if inspect.isfunction(entry):
        entry = _run(entry, f"{setting}: the loader")
    if not _is_backend(entry):
        raise ConfigError(f"{setting} is {entry!r}: write the path of a RemoteBackend class, or of its loader")
    return entry


def _run(loader: Callable[[], Any], what: str) -> Any:
    """What a loader returns.

    Raises:
        ConfigError: it fails, with the reason.
    """
    try:
        return loader()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed: {type(error).__name__}: {error}") from error


def _is_backend(entry: Any) -> bool:
    """Whether it is a ``RemoteBackend``; a base class of the alias package counts, which is another object."""
    return isinstance(entry, type) and "from_config" in dir(entry)


def _forwarder() -> type:
    from .forwarder import BackendForwarder

    return BackendForwarder


@RemoteBackendRegistry.register("builtin")
def _builtin() -> type[RemoteBackend]:
    from .builtin import BuiltinBackend

    return BuiltinBackend


@RemoteBackendRegistry.register("http")
def _http() -> type[RemoteBackend]:
    from .http import HttpBackend

    return HttpBackend


@RemoteBackendRegistry.register("arctic-platform")
def _arctic_platform() -> type[RemoteBackend]:
    from .arctic_platform.backend import ArcticPlatformBackend

    return ArcticPlatformBackend
