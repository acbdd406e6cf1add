"""The prompt and answer format shared by BIRD and the quickstart."""

import sqlite3
from collections.abc import Iterable

from .database import PathLike, open_read_only, quote_identifier

SYSTEM_PROMPT = (
    "Write one SQLite query that answers the question. Reason inside <think></think>, then give the query in a "
    "```sql block."
)


def build_messages(schema: str, question: str, evidence: str | None = None) -> list[dict[str, str]]:
    """Returns the chat messages that ask `question` about a database with the given `schema` text.

    `evidence` is BIRD's hint for the question; None or blank leaves the line out.
    """
    lines = [schema.strip(), "", f"Question: {question.strip()}"]
    if evidence is not None and evidence.strip():
        lines.append(f"Hint: {evidence.strip()}")
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "\n".join(lines)},
    ]


def build_response(reasoning: str, sql: str) -> str:
    """Returns an assistant message in the format that `SYSTEM_PROMPT` asks for."""
    return f"<think>{reasoning.strip()}</think>\n```sql\n{sql.strip()}\n```"


def schema_text(db_path: PathLike, *, tables: Iterable[str] | None = None) -> str:
    """Returns one compact CREATE statement a line: columns, declared types, primary and foreign keys.

    Tables come in the order in which they were created, then views with their columns. Foreign keys over one column
    stand beside it, longer ones at the end of the statement. Left out: SQLite's own tables, those in which modules
    such as FTS keep their data, and views that refer to something that is no longer there.

    Args:
        db_path: The SQLite file, opened read-only.
        tables: Names of the tables and views to describe, in that order; None = all.

    Raises ValueError for a name in `tables` that the database lacks, and what `open_read_only` raises.
    """
    connection = open_read_only(db_path)
    try:
        kinds = _tables_and_views(connection)
        wanted = list(kinds) if tables is None else list(tables)
        missing = [name for name in wanted if name not in kinds]
        if missing:
            raise ValueError(f"database {db_path!r} has no table {missing[0]!r}; it has {sorted(kinds)}")
        return "\n".join(_create_statement(connection, name, kinds[name]) for name in wanted)
    finally:
        connection.close()


def _tables_and_views(connection: sqlite3.Connection) -> dict[str, str]:
    """Returns name -> "table" or "view" of what a query may use."""
    # table_list: schema, name, type, ...
    shadows = {row[1] for row in connection.execute("PRAGMA table_list") if row[2] == "shadow"}
    listed = connection.execute(
        "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') "
        "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type, rowid"
    ).fetchall()
    return {
        name: kind
        for name, kind in listed
        if name not in shadows and (kind == "table" or _is_readable(connection, name))
    }


def _is_readable(connection: sqlite3.Connection, view: str) -> bool:
    try:
        _pragma(connection, "table_xinfo", view)
    except sqlite3.OperationalError:
        return False
    return True


def _create_statement(connection: sqlite3.Connection, table: str, kind: str) -> str:
    # table_xinfo: cid, name, type, notnull, default, pk position, hidden (1 = not part of SELECT *)
    columns = [row for row in _pragma(connection, "table_xinfo", table) if row[6] != 1]
    key = [row[1] for row in sorted(columns, key=lambda row: row[5]) if row[5] > 0]
    references = _foreign_keys(connection, table)
    inline = {names[0]: target for names, target in references if len(names) == 1}
    parts = []
    for column in columns:
        part = quote_identifier(column[1])
        if column[2]:
            part += f" {column[2]}"
        if key == [column[1]]:
            part += " PRIMARY KEY"
        if column[1] in inline:
            part += f" REFERENCES {inline[column[1]]}"
        parts.append(part)
    if len(key) > 1:
        parts.append(f"PRIMARY KEY ({', '.join(map(quote_identifier, key))})")
    for names, target in references:
        if len(names) > 1:
            parts.append(f"FOREIGN KEY ({', '.join(map(quote_identifier, names))}) REFERENCES {target}")
    return f"CREATE {kind.upper()} {quote_identifier(table)} ({', '.join(parts)});"


def _foreign_keys(connection: sqlite3.Connection, table: str) -> list[tuple[list[str], str]]:
    # foreign_key_list: id, seq, parent table, from column, to column (None = the parent's primary key), ...
    grouped: dict[int, list[tuple]] = {}
    for row in _pragma(connection, "foreign_key_list", table):
        grouped.setdefault(row[0], []).append(row)
    references = []
    # ids count from the last declared key down
    for _, rows in sorted(grouped.items(), reverse=True):
        rows.sort(key=lambda row: row[1])
        parent = rows[0][2]
        targets = [row[4] for row in rows]
        if None in targets:
            parent_columns = sorted(_pragma(connection, "table_xinfo", parent), key=lambda row: row[5])
            targets = [row[1] for row in parent_columns if row[5] > 0]
        listed = f"({', '.join(map(quote_identifier, targets))})" if targets else ""
        references.append(([row[3] for row in rows], f"{quote_identifier(parent)}{listed}"))
    return references


def _pragma(connection: sqlite3.Connection, pragma: str, table: str) -> list[tuple]:
    return connection.execute(f'PRAGMA {pragma}("{table.replace(chr(34), chr(34) * 2)}")').fetchall()
