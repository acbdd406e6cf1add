"""A run that was started by ``uv run``: Ray starts its workers with that command too, through a shell."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator


def uv_run_problems(commands: Iterable[list[str]] | None = None) -> Iterator[str]:
    """A line for each argument of ``uv run`` that the shell would not read as it was written.

    Ray's hook for ``uv run`` joins the arguments with spaces and gives them to ``bash -c``, so that ``transformers<5``
    reads from a file ``5`` and ``foo>=1`` writes one.

    Args:
        commands: command lines of this process's ancestors, its parent's first; None = those that it has.
    """
    command = next(filter(_is_uv_run, _ancestors() if commands is None else commands), None)
    if command is None:
        return
    from ray._private import ray_constants
    from ray._private.runtime_env.uv_runtime_env_hook import _create_uv_run_parser, _parse_args

    if not ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV:
        return
    _, rest = _parse_args(_create_uv_run_parser(), command[2:])
    for argument in command[2 : len(command) - len(rest)]:
        if shlex.quote(argument) != argument:
            yield (
                f"uv run {argument!r}: Ray starts workers with it through a shell, which would read it otherwise; "
                "start the environment's own python instead (uv sync, then .venv/bin/python -m ...), or write the "
                "requirement into pyproject.toml"
            )


def _is_uv_run(command: list[str]) -> bool:
    return len(command) > 1 and os.path.basename(command[0]) == "uv" and command[1] == "run"


def _ancestors() -> Iterator[list[str]]:
    import psutil

    for parent in psutil.Process().parents():
        try:
            yield parent.cmdline()
        except psutil.Error:
            continue
