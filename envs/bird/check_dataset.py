"""Checking all rows of a dataset before training, so that a bad one is not found at step 40."""

import os
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from .config import BirdEnvConfig
from .database import PendingChangesError, open_read_only
from .sections import SECTIONS
from .task import read_task

ENV_IDS = frozenset(SECTIONS)

_HEADER = b"SQLite format 3\0"


def check_rows(
    rows: Iterable[Mapping[str, Any]], config: BirdEnvConfig | None = None, *, max_problems: int | None = 10
) -> list[str]:
    """Returns what is wrong with the rows of a dataset; [] if nothing is.

    Checks that each row names a gold query and a database, and that the database is there, can be read, and has no
    changes waiting in a write-ahead log. Rows of another `env_class` are passed over. All rows are read; a problem
    that several rows share is reported once, with the first row's index (counted from 0) and the number of rows.

    Args:
        rows: The dataset, as SkyRL or verl reads it.
        config: The environment's settings; None = the defaults.
        max_problems: Report at most so many, the first ones; None = all.
    """
    config = BirdEnvConfig.parse(config)
    databases: dict[str, str] = {}
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.get("env_class") is not None and row["env_class"] not in ENV_IDS:
            continue
        problem = _row_problem(row, config, databases)
        if problem:
            found.setdefault(problem, []).append(index)
    return [
        f"row {indices[0]}{f' and {len(indices) - 1} more' if len(indices) > 1 else ''}: {problem}"
        for problem, indices in list(found.items())[:max_problems]
    ]


def require_valid_rows(rows: Iterable[Mapping[str, Any]], config: BirdEnvConfig | None = None) -> None:
    """Raises ValueError with the first ten problems that `check_rows` finds, if there are any."""
    problems = check_rows(rows, config, max_problems=None)
    if problems:
        told = problems[:10]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        heading = f"the dataset has {count}{'; the first:' if len(problems) > len(told) else ':'}"
        raise ValueError("\n".join([heading, *told]))


def _row_problem(row: Mapping[str, Any], config: BirdEnvConfig, databases: dict[str, str]) -> str:
    try:
        path = config.resolve(read_task(row).db_path)
    except ValueError as problem:
        return str(problem)
    if path not in databases:
        databases[path] = database_problem(path)
    return databases[path]


def database_problem(db_path: str) -> str:
    """Returns why a database cannot be used, or "" if it can."""
    if not os.path.exists(db_path):
        return f"extra_info.db_path: database file {db_path!r} does not exist"
    if not os.path.isfile(db_path):
        return f"extra_info.db_path: {db_path!r} is not a file"
    try:
        with open(db_path, "rb") as file:
            header = file.read(len(_HEADER))
        if header != _HEADER:
            return f"extra_info.db_path: {db_path!r} is {'empty' if not header else 'not a SQLite database'}"
        connection = open_read_only(db_path)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        finally:
            connection.close()
    except PendingChangesError as problem:
        return f"extra_info.db_path: {problem}"
    except (OSError, sqlite3.Error) as problem:
        return f"extra_info.db_path: database {db_path!r} cannot be read: {problem}"
    return ""
