"""What a recipe's own code does with SkyRL's callbacks, which its fully asynchronous loop never calls."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UnsupportedError

_SETTING = "trainer.fully_async.enabled"
_TRAINER_MODULE = "skyrl.train.fully_async_trainer"
_BUILDERS = ("__init__", "_setup_trainer", "get_trainer")


def callback_problems(cfg: Any, file: str | None) -> Iterator[str]:
    """Callbacks that a recipe's module gives an asynchronous trainer, a line for the module.

    The module is read, not run: ``add_callback`` anywhere in it, and ``callbacks`` as an argument or a key where a
    trainer is built. One that looks at ``fully_async`` itself is left to ``refused_callbacks``.

    Args:
        cfg: the recipe's config.
        file: the module that defines its experiment; None = it is SkyRL's own.
    """
    if file is None or not file.endswith(".py") or not cfg.trainer.fully_async.enabled:
        return
    tree = ast.parse(Path(file).read_bytes())
    lines = sorted(set(_uses(tree)))
    if lines and not _decides_itself(tree):
        yield _refusal(f"{Path(file).name} adds some (line {', '.join(map(str, lines))})")


def source_file(cls: type | None) -> str | None:
    """The file that defines a class; None without one."""
    return None if cls is None else vars(sys.modules[cls.__module__]).get("__file__")


def refused_callbacks(error: NotImplementedError, builder: str) -> UnsupportedError | None:
    """The error to raise in place of one of SkyRL's asynchronous trainer about callbacks; None for any other.

    Args:
        error: what building a trainer has raised.
        builder: what has built it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_globals["__name__"] != _TRAINER_MODULE or "allback" not in str(error):
        return None
    return UnsupportedError(_refusal(f"{builder} adds some"))


def _refusal(where: str) -> str:
    return (
        f"{_SETTING}=true: SkyRL's asynchronous loop calls no callbacks, and {where}; leave them out, or write "
        f"{_SETTING}=false"
    )


def _uses(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_callback":
            yield node.lineno
        elif isinstance(node, ast.FunctionDef) and node.name in _BUILDERS:
            yield from (line for inner in ast.walk(node) for line in _given(inner))


def _given(node: ast.AST) -> Iterator[int]:
    """Lines at which a node gives something the argument ``callbacks``."""
    if isinstance(node, ast.Call):
        yield from (given.value.lineno for given in node.keywords if given.arg == "callbacks" and _some(given.value))
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from (value.lineno for key, value in pairs if _is_name(key) and _some(value))
    elif isinstance(node, ast.Assign) and _some(node.value):
        targets = (target for target in node.targets if isinstance(target, ast.Subscript))
        yield from (target.lineno for target in targets if _is_name(target.slice))


def _is_name(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "callbacks"


def _some(value: ast.AST) -> bool:
    """Whether a value may be more than None or an empty list."""
    empty = isinstance(value, ast.List | ast.Tuple) and not value.elts
    return not (empty or (isinstance(value, ast.Constant) and value.value is None))


def _decides_itself(tree: ast.AST) -> bool:
    tests = (node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp))
    return any(
        isinstance(inner, ast.Attribute) and inner.attr == "fully_async" for test in tests for inner in ast.walk(test)
    )
