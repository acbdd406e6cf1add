"""Opening SQLite files read-only, under exactly the path given and without leaving side files."""

import os
import re
import sqlite3
from pathlib import Path
from urllib.parse import quote

type PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_PLAIN_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_KEYWORDS = """
ABORT ACTION ADD AFTER ALL ALTER ALWAYS ANALYZE AND AS ASC ATTACH AUTOINCREMENT BEFORE BEGIN BETWEEN BY CASCADE
CASE CAST CHECK COLLATE COLUMN COMMIT CONFLICT CONSTRAINT CREATE CROSS CURRENT CURRENT_DATE CURRENT_TIME
CURRENT_TIMESTAMP DATABASE DEFAULT DEFERRABLE DEFERRED DELETE DESC DETACH DISTINCT DO DROP EACH ELSE END ESCAPE
EXCEPT EXCLUDE EXCLUSIVE EXISTS EXPLAIN FAIL FILTER FIRST FOLLOWING FOR FOREIGN FROM FULL GENERATED GLOB GROUP
GROUPS HAVING IF IGNORE IMMEDIATE IN INDEX INDEXED INITIALLY INNER INSERT INSTEAD INTERSECT INTO IS ISNULL JOIN
KEY LAST LEFT LIKE LIMIT MATCH MATERIALIZED NATURAL NO NOT NOTHING NOTNULL NULL NULLS OF OFFSET ON OR ORDER OTHERS
OUTER OVER PARTITION PLAN PRAGMA PRECEDING PRIMARY QUERY RAISE RANGE RECURSIVE REFERENCES REGEXP REINDEX RELEASE
RENAME REPLACE RESTRICT RETURNING RIGHT ROLLBACK ROW ROWS SAVEPOINT SELECT SET TABLE TEMP TEMPORARY THEN TIES TO
TRANSACTION TRIGGER UNBOUNDED UNION UNIQUE UPDATE USING VACUUM VALUES VIEW VIRTUAL WHEN WHERE WINDOW WITH WITHOUT
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""SQLite's keywords (https://www.sqlite.org/lang_keywords.html); a fixed list, so that prompts do not depend on the
SQLite version that writes them."""


class PendingChangesError(ValueError):
    """A non-empty write-ahead log or rollback journal lies beside the database: its content is not final."""


def quote_identifier(name: str) -> str:
    """Returns `name` as it must be written in SQL: bare if that is safe, else in backticks.

    Backticks, because SQLite silently reads a misspelt name in double quotes as a string.
    """
    if _PLAIN_IDENTIFIER.match(name) and name.upper() not in KEYWORDS:
        return name
    return "`" + name.replace("`", "``") + "`"


def read_only_uri(db_path: PathLike) -> str:
    """Returns the SQLite URI that opens exactly the file `db_path`, whatever characters its name holds.

    `immutable=1` keeps SQLite from creating `-wal` and `-shm` files beside a database that was left in WAL mode; it
    also skips recovery, so `open_read_only` refuses files that would need one.

    Raises ValueError for a path that holds a NUL character.
    """
    raw = os.path.abspath(os.fsencode(db_path))
    if b"\0" in raw:
        raise ValueError(f"the database path {db_path!r} holds a NUL character")
    return f"file://{quote(raw, safe='/')}?mode=ro&immutable=1"


def pending_changes(db_path: PathLike) -> Path | None:
    """Returns the non-empty write-ahead log or rollback journal of `db_path`, or None if there is none.

    Of a link, they lie beside the file that it leads to.
    """
    for suffix in (b"-wal", b"-journal"):
        side_file = os.path.realpath(os.fsencode(db_path)) + suffix
        try:
            if os.stat(side_file).st_size > 0:
                return Path(os.fsdecode(side_file))
        except FileNotFoundError:
            continue
    return None


def checkpoint_command(db_path: PathLike) -> str:
    """Returns the shell command that folds pending changes of `db_path` into the file itself."""
    script = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA wal_checkpoint(TRUNCATE)')"
    argument = os.fsdecode(os.path.abspath(os.fsencode(db_path))).replace("'", "'\\''")
    return f"python -c \"{script}\" '{argument}'"


def refuse_pending_changes(db_path: PathLike) -> None:
    """Raises PendingChangesError if `pending_changes` finds any."""
    pending = pending_changes(db_path)
    if pending is not None:
        raise PendingChangesError(
            f"database {os.fsdecode(db_path)!r} has changes waiting in {pending.name!r}; "
            f"write them into the file first: {checkpoint_command(db_path)}"
        )


def open_read_only(db_path: PathLike) -> sqlite3.Connection:
    """Opens `db_path` read-only in autocommit mode; text that is not UTF-8 is kept exactly (surrogateescape).

    The connection may move between threads, which must not use it at the same time.

    Raises:
        FileNotFoundError: there is no such file (SQLite itself would report only "unable to open").
        PendingChangesError: a non-empty write-ahead log or rollback journal lies beside it.
        sqlite3.OperationalError: the file cannot be opened.
    """
    if not os.path.isfile(db_path):
        raise FileNotFoundError(f"database file {os.fsdecode(db_path)!r} does not exist")
    refuse_pending_changes(db_path)
    connection = sqlite3.connect(
        read_only_uri(db_path), uri=True, isolation_level=None, cached_statements=0, check_same_thread=False
    )
    connection.text_factory = decode_text
    return connection


def decode_text(raw: bytes) -> str:
    """Decodes a TEXT cell so that different bytes always give different strings."""
    return raw.decode("utf-8", "surrogateescape")
