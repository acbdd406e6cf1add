"""A recipe's own entry module: where it is, which of its functions trains, and what others need to import it."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import nearest
from .errors import ConfigError, UnsupportedError

ENTRY_SHAPE = """\
    @ray.remote(num_cpus=1)
    def skyrl_entrypoint(cfg):
        MyExp(cfg).run()

    def main():
        cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
        validate_cfg(cfg)
        initialize_ray(cfg)
        ray.get(skyrl_entrypoint.remote(cfg))"""
"""What the entry modules of SkyRL's recipes look like."""


def load_module(reference: str) -> ModuleType:
    """Import an entry module.

    Args:
        reference: a dotted name, found from the working folder as by ``python -m``; or the path of a file, whose
            folder is put first on ``sys.path`` as by ``python FILE``.

    Raises:
        ConfigError: when there is no such module, or it or something it imports cannot be imported.
    """
    name, file = _locate(reference)
    try:
        module = import_module(name)
    except Exception as error:
        hint = ""
        if file is not None and isinstance(error, ImportError) and "relative import" in str(error):
            hint = ": give it as a dotted name, from the folder that holds its package"
        cause = f"{type(error).__name__}: {error}{_place(error)}"
        raise ConfigError(f"{reference} cannot be imported: {cause}{hint}") from error
    require_file(module, file)
    return module


def _place(error: Exception) -> str:
    """Where an error was raised, for a message; a syntax error and a failed import say it themselves."""
    if isinstance(error, SyntaxError | ImportError):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}, line {frame.lineno})"


def _locate(reference: str) -> tuple[str, str | None]:
    """The name to import, and the file that it must come from where a file was named."""
    if reference.endswith(".py") or os.sep in reference:
        file = Path(reference).expanduser().resolve()
        if not file.is_file() or file.suffix != ".py":
            raise ConfigError(f"{reference} is not a Python file")
        _put_first(str(file.parent))
        return file.stem, str(file)
    if os.getcwd() not in sys.path:
        _put_first(os.getcwd())
    try:
        found = find_spec(reference) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise ConfigError(
            f"there is no module {reference!r}: start the run in the folder that holds it, or give its file's path"
        )
    return reference, None


def _put_first(folder: str) -> None:
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def require_file(module: ModuleType, file: str | None) -> None:
    """Refuse a module that is not the one meant.

    Args:
        module: what was imported.
        file: where it must come from; None = anywhere.

    Raises:
        ConfigError: naming both files.
    """
    if module.__file__ is None:
        raise ConfigError(f"{module.__name__} is a folder, not a module: name the module in it that has main()")
    if file is not None and Path(module.__file__).resolve() != Path(file).resolve():
        raise ConfigError(
            f"importing {module.__name__!r} gave {module.__file__} instead of {file}: rename the file, or give the "
            "module as a dotted name"
        )


def all_remote_functions(module: ModuleType) -> dict[str, Any]:
    """The Ray remote functions among a module's globals by name."""
    from ray.remote_function import RemoteFunction

    return {name: value for name, value in vars(module).items() if isinstance(value, RemoteFunction)}


def remote_functions(module: ModuleType) -> dict[str, Any]:
    """Those of them that a module defines, or else those it imports."""
    found = all_remote_functions(module)
    own = {name: value for name, value in found.items() if value._function.__module__ == module.__name__}
    return own or found


def choose_entry(module: ModuleType, name: str | None = None) -> str:
    """The name of the remote function that trains.

    Args:
        module: an entry module.
        name: the one to take; None = the only one.

    Raises:
        UnsupportedError: when there is none, or several and none was named, with what to write.
        ConfigError: when there is none of that name.
    """
    known = remote_functions(module)
    if not known:
        raise UnsupportedError(
            f"{module.__name__} has no Ray remote function that could train: a SkyRL entry module looks like\n"
            f"{ENTRY_SHAPE}"
        )
    if name is not None:
        if name not in known:
            raise ConfigError(f"--entry {name}: {module.__name__} has no such remote function: {nearest(name, known)}")
        return name
    if len(known) > 1:
        raise UnsupportedError(
            f"{module.__name__} has several remote functions ({', '.join(known)}): choose the one that trains with "
            "--entry NAME, before the module's name"
        )
    return next(iter(known))


def require_main(module: ModuleType) -> None:
    """Refuse a module without a ``main`` function.

    Raises:
        UnsupportedError: with what to write.
    """
    if not callable(vars(module).get("main")):
        raise UnsupportedError(
            f"{module.__name__} has no function main(), which would parse, check and call its remote function: a "
            f"SkyRL entry module looks like\n{ENTRY_SHAPE}"
        )


def search_path(module: ModuleType) -> str:
    """A ``PYTHONPATH`` that lets other processes import the module, and what its folders hold, as this one does.

    It holds what comes before the standard library on ``sys.path`` (the working folder, a file's folder, PYTHONPATH,
    what the module itself put there) and the folder that the module was found in; site-packages are not repeated.
    """
    entries = [os.path.abspath(entry) for entry in sys.path]
    library = os.path.abspath(sysconfig.get_path("stdlib"))
    front = entries[: entries.index(library)] if library in entries else entries
    root = Path(module.__file__).resolve().parents[module.__name__.count(".")]
    installed = tuple(os.path.abspath(folder) for folder in site.getsitepackages())
    folders = [entry for entry in [*front, str(root)] if os.path.isdir(entry) and not entry.startswith(installed)]
    return os.pathsep.join(dict.fromkeys(folders))
