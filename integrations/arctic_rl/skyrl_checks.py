"""SkyRL's own ``validate_cfg``, and which settings stand behind the check that fails."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import FrameType, TracebackType
from typing import Any

from .support.entries import shown
from .support.leaves import skyrl_leaves, value_of


def skyrl_problems(cfg: Any) -> list[str]:
    """The first of SkyRL's own checks that fails, as a line; ``validate_cfg`` also rewrites some settings.

    It is not shown ``speculative_config``, of which it knows multi-token-prediction heads only; the support table
    judges that.
    """
    from skyrl.train.utils import validate_cfg

    engine = cfg.generator.inference_engine
    speculative, engine.speculative_config = engine.speculative_config, None
    try:
        with _key_for_checks():
            validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError, ArithmeticError, TypeError, AttributeError) as error:
        where = _last(error.__traceback__)
        message = " ".join(str(error).split()).rstrip(".")
        checks = _checks_at(where)
        if not message and checks:
            message = f"{ast.unparse(checks[0])} does not hold"
        values = [f"{name}={shown(value_of(cfg, name))}" for name in _settings_behind(checks, where, cfg)]
        advice = f"; change {' or '.join(values)}" if values else ""
        return [f"SkyRL's own check: {message}{advice} ({type(error).__name__} in {where.tb_frame.f_code.co_name})"]
    finally:
        engine.speculative_config = speculative
    return []


@contextlib.contextmanager
def _key_for_checks() -> Iterator[None]:
    """SkyRL's checks end at a missing key for wandb, which is told apart."""
    if os.environ.get("WANDB_API_KEY"):
        yield
        return
    os.environ["WANDB_API_KEY"] = "none"
    try:
        yield
    finally:
        del os.environ["WANDB_API_KEY"]


def _last(where: TracebackType) -> TracebackType:
    while where.tb_next is not None:
        where = where.tb_next
    return where


def _function(where: TracebackType) -> ast.AST | None:
    """The source of the function that failed, with the line numbers of its file."""
    code = where.tb_frame.f_code
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except OSError:
        return None
    return ast.increment_lineno(ast.parse(source), code.co_firstlineno - 1)


def _checks_at(where: TracebackType) -> list[ast.AST]:
    """What was tested at the line that failed, or else its statement, and the conditions under which it was reached.

    From the innermost to the outermost.
    """
    function = _function(where)
    if function is None:
        return []
    around = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and node.lineno <= where.tb_lineno <= node.end_lineno
    ]
    around.sort(key=lambda node: (-node.lineno, node.end_lineno))
    statement, *outer = around
    conditions = [node.test for node in outer if isinstance(node, ast.If)]
    if isinstance(statement, ast.Assert | ast.If):
        return [statement.test, *conditions]
    return conditions if isinstance(statement, ast.Raise) and conditions else [statement, *conditions]


def _settings_behind(checks: list[ast.AST], where: TracebackType, cfg: Any) -> list[str]:
    """Settings that checks read, themselves or in what their variables were computed from, in their order."""
    if not checks:
        return []
    assigned: dict[str, ast.AST] = {}
    for node in ast.walk(_function(where)):
        if isinstance(node, ast.Assign) and node.lineno < where.tb_lineno:
            assigned |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    sections = dict(_sections(cfg, ""))
    found, left, seen = [], list(checks), set()
    while left:
        for node in ast.walk(left.pop(0)):
            if isinstance(node, ast.Attribute):
                found.append(_setting(node, where.tb_frame, sections))
            elif isinstance(node, ast.Name) and node.id in assigned and node.id not in seen:
                seen.add(node.id)
                left.append(assigned[node.id])
    return [name for name in dict.fromkeys(found) if name in skyrl_leaves()]


def _sections(section: Any, name: str) -> Iterator[tuple[int, str]]:
    """``id`` and dotted name of a config and of every section in it."""
    yield id(section), name
    for key, value in vars(section).items():
        if is_dataclass(value):
            yield from _sections(value, f"{name}.{key}".lstrip("."))


def _setting(node: ast.Attribute, frame: FrameType, sections: dict[int, str]) -> str | None:
    """The dotted name of a setting that an expression such as ``cfg.trainer.epochs`` reads in a frame."""
    names: list[str] = []
    inner: ast.AST = node.value
    while isinstance(inner, ast.Attribute):
        names.insert(0, inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id not in frame.f_locals:
        return None
    value = frame.f_locals[inner.id]
    for name in names:
        if not is_dataclass(value) or name not in vars(value):
            return None
        value = vars(value)[name]
    section = sections.get(id(value))
    return None if section is None else f"{section}.{node.attr}"
