"""Post-processors and losses by name, or by the dotted path of a function that is imported on first use."""

import difflib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError

__all__ = [
    "get_loss_fn",
    "get_post_processor",
    "import_processor_modules",
    "known_loss_fns",
    "known_post_processors",
    "nearest_name",
    "register_loss_fn",
    "register_post_processor",
]

PostProcessor = Callable[[Mapping[str, Any], dict, dict, Any], Mapping[str, Any]]
"""``f(model_outputs, batch, meta, device)`` -> only the new keys, each with one entry a row."""
LossFn = Callable[[Mapping[str, Any], dict, dict, Mapping[str, Any], Any], tuple[Any, Mapping[str, Any]]]
"""``f(model_outputs, batch, meta, config, device)`` -> (scalar loss, metrics)."""

_BUILTIN_MODULES = ("post", "losses", "policy_losses", "regularizers", "skyrl_losses", "value_loss")


def _process_wide(kind: str) -> dict[str, Callable]:
    """One table a process: this file is imported twice where the alias package is used too."""
    holder = sys.modules.setdefault("_arctic_rl_processor_tables", types.ModuleType("_arctic_rl_processor_tables"))
    return holder.__dict__.setdefault(kind, {})


_POST_PROCESSORS = _process_wide("post-processor")
_LOSS_FNS = _process_wide("loss function")
_IMPORTED = _process_wide("dotted path")


def register_post_processor(*names: str) -> Callable[[PostProcessor], PostProcessor]:
    """Register ``f(model_outputs, batch, meta, device) -> dict`` of new keys under every one of ``names``.

    Raises:
        UnsupportedError: a name is taken by a different function.
    """
    return _registering(_POST_PROCESSORS, "post-processor", names)


def register_loss_fn(*names: str) -> Callable[[LossFn], LossFn]:
    """Register ``f(model_outputs, batch, meta, config, device) -> (loss, metrics)`` under every one of ``names``.

    Raises:
        UnsupportedError: a name is taken by a different function.
    """
    return _registering(_LOSS_FNS, "loss function", names)


def get_post_processor(name: str) -> PostProcessor:
    """The post-processor of that name or dotted path; :class:`UnsupportedError` names the nearest if there is none."""
    return _get(_POST_PROCESSORS, "post-processor", name)


def get_loss_fn(name: str) -> LossFn:
    """The loss function of that name or dotted path; :class:`UnsupportedError` names the nearest if there is none."""
    return _get(_LOSS_FNS, "loss function", name)


def known_post_processors() -> list[str]:
    """Registered names, sorted."""
    _load_builtin()
    return sorted(_POST_PROCESSORS)


def known_loss_fns() -> list[str]:
    """Registered names, sorted."""
    _load_builtin()
    return sorted(_LOSS_FNS)


def import_processor_modules(modules: Iterable[str]) -> None:
    """Import modules for the registrations they make, in order; every worker calls this before its first batch.

    Raises:
        UnsupportedError: a module does not import; the message says which and why.
    """
    if isinstance(modules, str):
        raise UnsupportedError(f"processor modules must be a list of module names, got the string {modules!r}")
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UnsupportedError(
                f"processor module {name!r} does not import ({type(error).__name__}: {error}); it must be installed, "
                "or lie on the Python path, in every worker"
            ) from error


def nearest_name(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _registering(table: dict[str, Callable], kind: str, names: tuple[str, ...]) -> Callable[[Callable], Callable]:
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UnsupportedError(f"a {kind} is registered under one or more names, got {names!r}")

    def register(function: Callable) -> Callable:
        if not _is_builtin(function):
            _load_builtin()
        for name in names:
            taken = table.get(name)
            if taken is not None and not _same_function(taken, function):
                raise UnsupportedError(
                    f"{kind} {name!r} is registered already, by {_where(taken)}; give {_where(function)} another name"
                )
        for name in names:
            # A module imported under a second name adds nothing; one that was reloaded brings its new function.
            if name not in table or table[name].__module__ == function.__module__:
                table[name] = function
        return function

    return register


def _same_function(one: Callable, other: Callable) -> bool:
    """Whether two functions are one at the top of a file: a module imported under two names, or reloaded."""
    if one is other:
        return True
    names = getattr(one, "__qualname__", ""), getattr(other, "__qualname__", "")
    if any("<" in name for name in names):
        return False
    codes = [getattr(function, "__code__", None) for function in (one, other)]
    if None in codes or not Path(codes[0].co_filename).is_file():
        return False
    first, second = ((code.co_filename, code.co_firstlineno, code.co_qualname) for code in codes)
    return first == second


def _is_builtin(function: Callable) -> bool:
    """Whether a module of this folder defines it, under whichever package name."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent == Path(__file__).parent


def _where(function: Callable) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _get(table: dict[str, Callable], kind: str, name: str) -> Callable:
    if not isinstance(name, str) or not name:
        raise UnsupportedError(f"a {kind} is given by its name, got {name!r}")
    if name not in table:
        _load_builtin()
    if name in table:
        return table[name]
    if "." in name:
        if name not in _IMPORTED:
            _IMPORTED[name] = _import_dotted(kind, name)
        return _IMPORTED[name]
    raise UnsupportedError(
        f"unknown {kind} {name!r}{nearest_name(name, table)}; known: {', '.join(sorted(table))}; "
        "or give the dotted path of a function"
    )


def _import_dotted(kind: str, path: str) -> Callable:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UnsupportedError(f"{kind} {path!r}: there is no module {missing!r}") from error
        raise UnsupportedError(f"{kind} {path!r}: module {module_name!r} fails to import: {error}") from error
    except Exception as error:
        raise UnsupportedError(
            f"{kind} {path!r}: module {module_name!r} fails to import: {type(error).__name__}: {error}"
        ) from error
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise UnsupportedError(
            f"{kind} {path!r}: module {module_name!r} has no {attribute!r}{nearest_name(attribute, vars(module))}"
        ) from error
    if not callable(function):
        raise UnsupportedError(f"{kind} {path!r} is a {type(function).__name__}, not a function")
    return function


def _load_builtin() -> None:
    for name in _BUILTIN_MODULES:
        importlib.import_module(f".{name}", __package__)
