"""Showing a database in a prompt: CREATE statements with examples and descriptions, and sample rows.

The text is a function of the database file, the CSV files and the limits; nothing in it depends on the time it took.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..check_dataset import database_problem
from ..compare import Value
from ..database import open_read_only, quote_identifier
from ..schema import Table, column_definitions, create_head, read_tables, table_constraints
from .descriptions import Descriptions, fold, read_descriptions
from .settings import DescribeLimits

HEAP_BYTES = 320 * 2**20
"""SQLite's heap limit in processes that read databases."""

_STEPS_PER_CALL = 10_000
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})


class UnreadableDatabase(ValueError):
    """A database that cannot be shown; the message says why."""


@dataclass
class Description:
    """A database as a prompt shows it."""

    text: str
    skipped_files: list[tuple[str, str]] = field(default_factory=list)
    """(file, reason) of each CSV file that could not be used, or not wholly."""
    incomplete: list[tuple[str, str]] = field(default_factory=list)
    """(table or column, reason) of what the text lacks."""


@dataclass
class _Contents:
    """What was read of a table."""

    samples: list[tuple[Value, ...]]
    examples: list[list[str]]
    """By column, as they are shown."""


def describe_database(db_path: str, descriptions: str | None, limits: DescribeLimits) -> Description:
    """Returns the text that shows a database, the tables in the order in which they were created.

    Bounded by `limits` in rows, bytes and steps; sets SQLite's heap limit for this process. A single long step is not
    bounded: call it in a process that can be killed.

    Raises UnreadableDatabase if the file is missing, corrupt, being changed, or holds no table.
    """
    problem = database_problem(db_path)
    if problem:
        raise UnreadableDatabase(problem.removeprefix("extra_info.db_path: "))
    described = read_descriptions(None if descriptions is None else Path(descriptions))
    result = Description("", skipped_files=described.problems)
    try:
        connection = open_read_only(db_path)
        try:
            _bound(connection, limits)
            tables = read_tables(
                connection, on_unreadable=lambda name, error: result.incomplete.append((name, str(error)))
            )
            blocks = [_show_table(connection, table, described, limits, result) for table in tables.values()]
        finally:
            connection.close()
    except (sqlite3.DatabaseError, OSError) as error:
        raise UnreadableDatabase(f"database {db_path!r} cannot be read: {error}") from error
    if not blocks:
        raise UnreadableDatabase(f"database {db_path!r} holds no table that can be read")
    result.skipped_files += _unmatched(described, tables)
    result.text = "\n\n".join(blocks).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return result


def literal(value: Value, max_chars: int) -> str:
    """Returns how a cell is shown: as a SQL literal on one line, a long one cut and ended by an ellipsis."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        cut = value[: max_chars // 2]
        return f"x'{cut.hex().upper()}{'…' if len(cut) < len(value) else ''}'"
    if isinstance(value, str):
        line = " ".join(value[: 4 * max_chars].split())
        if len(line) > max_chars or len(value) > 4 * max_chars:
            line = line[:max_chars].rstrip() + "…"
        return "'" + line.replace("'", "''") + "'"
    return {float("inf"): "9e999", float("-inf"): "-9e999"}.get(value, repr(value))


def _bound(connection: sqlite3.Connection, limits: DescribeLimits) -> None:
    connection.execute(f"PRAGMA hard_heap_limit={HEAP_BYTES}").fetchone()
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.max_value_bytes)


def _show_table(
    connection: sqlite3.Connection,
    table: Table,
    descriptions: Descriptions,
    limits: DescribeLimits,
    result: Description,
) -> str:
    contents = _read_contents(connection, table, limits, result)
    lines = []
    for column, definition, examples in zip(table.columns, column_definitions(table), contents.examples, strict=True):
        told = []
        about = descriptions.of(table.name, column.name)
        if about:
            told.append(_cut(about, limits.max_description_chars))
        if examples:
            told.append(f"{'examples' if len(examples) > 1 else 'example'}: {', '.join(examples)}")
        lines.append((definition, "; ".join(told)))
    lines += [(constraint, "") for constraint in table_constraints(table)]
    body = "\n".join(
        f"    {definition}{',' if index < len(lines) - 1 else ''}{f' -- {comment}' if comment else ''}"
        for index, (definition, comment) in enumerate(lines)
    )
    text = f"{create_head(table)} (\n{body}\n);"
    if contents.samples:
        count = len(contents.samples)
        text += f"\n-- {'first row' if count == 1 else f'first {count} rows'}:"
        text += "".join(f"\n-- {_show_row(row, limits)}" for row in contents.samples)
    return text


def _show_row(row: Sequence[Value], limits: DescribeLimits) -> str:
    shown, left = [], limits.max_row_chars
    for value in row:
        cell = literal(value, limits.max_cell_chars)
        left -= len(cell) + 2
        if left < 0:
            shown.append("…")
            break
        shown.append(cell)
    return f"({', '.join(shown)})"


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars].rstrip() + "…"


def _read_contents(
    connection: sqlite3.Connection, table: Table, limits: DescribeLimits, result: Description
) -> _Contents:
    """Reads the table once; where that fails at the first row, column by column."""
    columns = [column.name for column in table.columns]
    scan = _Scan(connection, table.name, columns, limits)
    error = scan.run()
    if error is None or scan.rows_read:
        if error is not None:
            result.incomplete.append((table.name, f"read as far as row {scan.rows_read}: {error}"))
        return _Contents(scan.samples, scan.examples)
    result.incomplete.append((table.name, str(error)))
    examples = []
    for name in columns:
        single = _Scan(connection, table.name, [name], limits)
        error = single.run() if len(columns) > 1 and not scan.out_of_steps else None
        if error is not None:
            result.incomplete.append((f"{table.name}.{name}", str(error)))
        examples += single.examples
    return _Contents([], examples)


class _Scan:
    """One bounded pass over the first rows of a table."""

    def __init__(self, connection: sqlite3.Connection, table: str, columns: list[str], limits: DescribeLimits) -> None:
        self.rows_read = 0
        self.out_of_steps = False
        self.samples: list[tuple[Value, ...]] = []
        self.examples: list[list[str]] = [[] for _ in columns]
        self._connection = connection
        self._sql = (
            f"SELECT {', '.join(map(quote_identifier, columns))} FROM {quote_identifier(table)} "
            f"LIMIT {limits.max_scan_rows}"
        )
        self._limits = limits
        self._calls_left = limits.max_scan_steps // _STEPS_PER_CALL

    def run(self) -> Exception | None:
        """Reads; returns what ended it early, if anything did.

        Raises sqlite3.DatabaseError if the file is corrupt.
        """
        if not self._limits.examples and not self._limits.sample_rows:
            return None
        bytes_left = self._limits.max_scan_bytes
        self._connection.set_progress_handler(self._spend, _STEPS_PER_CALL)
        try:
            cursor = self._connection.execute(self._sql)
            for row in cursor:
                self.rows_read += 1
                self._take(row)
                bytes_left -= sum(len(value) for value in row if isinstance(value, str | bytes))
                if bytes_left < 0 or self._has_enough():
                    break
            cursor.close()
        except (sqlite3.Error, UnicodeEncodeError, MemoryError) as error:
            if hasattr(error, "sqlite_errorcode") and error.sqlite_errorcode & 0xFF in _CORRUPT:
                raise
            if self.out_of_steps:
                return TimeoutError(f"it takes more than {self._limits.max_scan_steps} steps to read")
            return error
        finally:
            self._connection.set_progress_handler(None, 0)
        return None

    def _spend(self) -> bool:
        self._calls_left -= 1
        self.out_of_steps = self._calls_left < 0
        return self.out_of_steps

    def _take(self, row: tuple[Value, ...]) -> None:
        limits = self._limits
        if len(self.samples) < limits.sample_rows:
            self.samples.append(tuple(_shortened(value, limits.max_cell_chars) for value in row))
        for value, examples in zip(row, self.examples, strict=True):
            if value is not None and len(examples) < limits.examples and not isinstance(value, bytes):
                shown = literal(value, limits.max_cell_chars)
                if shown not in examples:
                    examples.append(shown)

    def _has_enough(self) -> bool:
        limits = self._limits
        return len(self.samples) >= limits.sample_rows and all(
            len(examples) >= limits.examples for examples in self.examples
        )


def _shortened(value: Value, max_chars: int) -> Value:
    """Returns what `literal` shows of a cell, without holding on to the rest of a long one."""
    return value[: 4 * max_chars + 1] if isinstance(value, str | bytes) else value


def _unmatched(descriptions: Descriptions, tables: dict[str, Table]) -> list[tuple[str, str]]:
    """Returns (file, reason) for what the CSV files say about tables and columns that are not there."""
    present = {fold(table.name): {fold(column.name) for column in table.columns} for table in tables.values()}
    problems = []
    for table, columns in descriptions.tables.items():
        if not columns:
            continue
        if table not in present:
            problems.append((descriptions.files[table], "the database has no such table"))
            continue
        unknown = [name for name in columns if name not in present[table]]
        if unknown:
            problems.append((descriptions.files[table], f"the table has no column {', '.join(map(repr, unknown))}"))
    return problems
