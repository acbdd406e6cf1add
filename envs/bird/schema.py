"""Reading which tables, columns and keys a SQLite database has, and writing them as CREATE statements."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .database import quote_identifier


@dataclass(frozen=True)
class Column:
    """One column that `SELECT *` shows."""

    name: str
    type: str
    """The declared type; empty if there is none."""


@dataclass(frozen=True)
class Reference:
    """One foreign key, declared beside its column or for the table."""

    columns: tuple[str, ...]
    table: str
    """The parent table, which need not exist."""
    targets: tuple[str, ...]
    """The parent's columns; empty if neither the key nor the parent names any."""


@dataclass(frozen=True)
class Table:
    """One table or view that a query may use."""

    name: str
    kind: Literal["table", "view"]
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """Columns of the primary key, in its order; empty if there is none."""
    references: tuple[Reference, ...]
    """Foreign keys, in the order in which they were declared."""


def read_tables(
    connection: sqlite3.Connection, *, on_unreadable: Callable[[str, Exception], object] | None = None
) -> dict[str, Table]:
    """Returns the tables by name, in the order in which they were created, then the views.

    Left out: SQLite's own tables, those in which modules such as FTS keep their data, and what cannot be read (a view
    on something that is no longer there, a virtual table of a module that this SQLite lacks, a name not in UTF-8).

    Args:
        connection: As `open_read_only` gives it.
        on_unreadable: Called with the name of each table or view that cannot be read, and why.

    Raises sqlite3.DatabaseError if the schema itself cannot be read.
    """
    # table_list: schema, name, type, ...
    shadows = {row[1] for row in connection.execute("PRAGMA table_list") if row[2] == "shadow"}
    listed = connection.execute(
        "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') "
        "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type, rowid"
    ).fetchall()
    tables = {}
    for name, kind in listed:
        if name in shadows:
            continue
        try:
            tables[name] = _read_table(connection, name, kind)
        except (sqlite3.OperationalError, UnicodeEncodeError) as error:
            if on_unreadable is not None:
                on_unreadable(name, error)
    return tables


def create_statement(table: Table) -> str:
    """Returns the statement on one line: columns, declared types, primary and foreign keys."""
    return f"{create_head(table)} ({', '.join([*column_definitions(table), *table_constraints(table)])});"


def create_head(table: Table) -> str:
    """Returns the statement up to its opening parenthesis."""
    return f"CREATE {table.kind.upper()} {quote_identifier(table.name)}"


def column_definitions(table: Table) -> list[str]:
    """Returns what stands for each column, keys over that column alone beside it."""
    inline = {reference.columns[0]: reference for reference in table.references if len(reference.columns) == 1}
    definitions = []
    for column in table.columns:
        definition = quote_identifier(column.name)
        if column.type:
            definition += f" {column.type}"
        if table.key == (column.name,):
            definition += " PRIMARY KEY"
        if column.name in inline:
            definition += f" {_references(inline[column.name])}"
        definitions.append(definition)
    return definitions


def table_constraints(table: Table) -> list[str]:
    """Returns the keys over several columns."""
    constraints = []
    if len(table.key) > 1:
        constraints.append(f"PRIMARY KEY ({_names(table.key)})")
    for reference in table.references:
        if len(reference.columns) > 1:
            constraints.append(f"FOREIGN KEY ({_names(reference.columns)}) {_references(reference)}")
    return constraints


def _references(reference: Reference) -> str:
    targets = f"({_names(reference.targets)})" if reference.targets else ""
    return f"REFERENCES {quote_identifier(reference.table)}{targets}"


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(map(quote_identifier, columns))


def _read_table(connection: sqlite3.Connection, name: str, kind: Literal["table", "view"]) -> Table:
    # table_xinfo: cid, name, type, notnull, default, pk position, hidden (1 = not part of SELECT *)
    rows = [row for row in _pragma(connection, "table_xinfo", name) if row[6] != 1]
    return Table(
        name=name,
        kind=kind,
        columns=tuple(Column(row[1], row[2] or "") for row in rows),
        key=_key_columns(rows),
        references=_read_references(connection, name),
    )


def _key_columns(rows: list[tuple]) -> tuple[str, ...]:
    return tuple(row[1] for row in sorted(rows, key=lambda row: row[5]) if row[5] > 0)


def _read_references(connection: sqlite3.Connection, table: str) -> tuple[Reference, ...]:
    # foreign_key_list: id, seq, parent table, from column, to column (None = the parent's primary key), ...
    grouped: dict[int, list[tuple]] = {}
    for row in _pragma(connection, "foreign_key_list", table):
        grouped.setdefault(row[0], []).append(row)
    references = []
    # ids count from the last declared key down
    for _, rows in sorted(grouped.items(), reverse=True):
        rows.sort(key=lambda row: row[1])
        parent = rows[0][2]
        targets = tuple(row[4] for row in rows)
        if None in targets:
            targets = _parent_key(connection, parent)
        references.append(Reference(tuple(row[3] for row in rows), parent, targets))
    return tuple(references)


def _parent_key(connection: sqlite3.Connection, parent: str) -> tuple[str, ...]:
    try:
        return _key_columns(_pragma(connection, "table_xinfo", parent))
    except sqlite3.OperationalError:
        return ()


def _pragma(connection: sqlite3.Connection, pragma: str, table: str) -> list[tuple]:
    return connection.execute(f'PRAGMA {pragma}("{table.replace(chr(34), chr(34) * 2)}")').fetchall()
