"""Running one untrusted query: read-only, confined to one file, bounded in time, memory and rows.

What SQLite itself can enforce is enforced here. Two things it cannot: stopping a single built-in call that runs for
long (the deadline is checked between virtual-machine steps), and bounding memory that Python allocates. Whoever needs
these runs the query in a process that can be killed and has a memory limit.
"""

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from .compare import Fingerprint, RowDigester, Value
from .database import PathLike
from .handles import HANDLES, FileIdentity, Handle, file_identity
from .no_new_files import no_new_files, runs_one_call_at_a_time
from .outcome import Outcome
from .sqltext import first_word, split_statements

FORBIDDEN_STARTS = frozenset(
    {
        "ALTER", "ANALYZE", "ATTACH", "BEGIN", "COMMIT", "CREATE", "DELETE", "DETACH", "DROP", "END", "INSERT",
        "REINDEX", "RELEASE", "REPLACE", "ROLLBACK", "SAVEPOINT", "UPDATE", "VACUUM",
    }
)  # fmt: skip
"""First words of statements that never read."""

_EXPLAIN = frozenset({"EXPLAIN", "QUERY", "PLAN"})

FORBIDDEN_FUNCTIONS = frozenset(
    {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "lsmode", "sqlar_uncompress", "zipfile"}
)
"""SQL functions that load code or touch files, in builds of SQLite that have them."""

FORBIDDEN_TABLES = frozenset({"fsdir", "zipfile", "vfsstat", "sqlite_dbpage"})
"""Virtual tables that read files and need no CREATE, in builds of SQLite that have them; a table of the database's own
that has such a name may be read."""

PRAGMAS_ABOUT_A_NAME = frozenset(
    {"table_info", "table_xinfo", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
)
TABLE_FUNCTIONS = frozenset(
    {"json_each", "json_tree", "pragma_table_list", *(f"pragma_{name}" for name in PRAGMAS_ABOUT_A_NAME)}
)
"""Built-in table-valued functions that may be used."""

PRAGMAS_WITHOUT_ARGUMENT = frozenset({"table_list", "data_version", "encoding", "page_size"})

_SPECIAL_TABLES = f"""
SELECT name, type = 'table' AND sql LIKE 'CREATE VIRTUAL%' AS is_virtual FROM sqlite_master
WHERE is_virtual OR (type IN ('table', 'view') AND lower(name) IN ({", ".join("?" * len(FORBIDDEN_TABLES))}))
"""
_OPCODES_PER_CHECK = 1000
_CACHE_KIB = 2000
_READ_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
_ACTION_NAMES = {
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_INSERT: "INSERT",
    sqlite3.SQLITE_UPDATE: "UPDATE",
    sqlite3.SQLITE_DELETE: "DELETE",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_SAVEPOINT: "a savepoint",
}
_UNREADABLE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_MAX_ERROR_CHARACTERS = 500
_ABSENT = re.compile(r"no such (?P<kind>function|table): (?P<name>\w+)\Z")


class ScorerError(RuntimeError):
    """The database could not be read; says nothing about the query."""


class DatabaseChangedError(ScorerError):
    """The database file was replaced or written to while it was read, so that no result is its content's."""


@dataclass(frozen=True)
class ExecutionLimits:
    """Bounds on one query."""

    timeout_s: float = 30.0
    """Wall-clock seconds after which the query is interrupted, between two virtual-machine steps."""
    heap_bytes: int = 320 * 2**20
    """SQLite's heap, of this whole process. SQLite can only lower it: the smallest value used so far holds."""
    max_value_bytes: int = 100_000_000
    """Longest string or BLOB that may come up anywhere in the query."""
    max_compared_rows: int = 1_000_000
    """Rows after which a result is not compared any more."""
    max_kept_rows: int = 5000
    """Rows that are returned. All rows are compared, whatever this is."""
    max_kept_bytes: int = 1_000_000
    """Bytes of text and BLOBs in the rows that are returned; the first row beyond it is left out, and all after it."""


@dataclass(frozen=True)
class QueryResult:
    """How a query ended, and what it gave."""

    outcome: Outcome
    """OK, TOO_LARGE, SQL_ERROR, TIMED_OUT, OUT_OF_MEMORY or FORBIDDEN."""
    error: str = ""
    """Why it did not end well; empty if it did."""
    columns: tuple[str, ...] = ()
    """Column names, if the query ran to its end or gave too many rows."""
    fingerprint: Fingerprint | None = None
    """Stands for all rows, if the query ran to its end."""
    rows: tuple[tuple[Value, ...], ...] = ()
    """The first rows, as many as are kept, if there are columns."""
    rows_cut: bool = False
    """There are more rows than are kept."""
    packed_rows: bytes = b""
    """All rows as `marshal` writes them, in place of `rows`, if there are any and none was cut."""
    seconds: float = 0.0
    """Wall-clock seconds, opening the file included."""


def run_query(
    db_path: PathLike,
    sql: str,
    limits: ExecutionLimits,
    *,
    expected: FileIdentity | None = None,
    reverse_unordered: bool = False,
) -> QueryResult:
    """Runs `sql`, exactly as written but for what stands behind its semicolon, against the file `db_path`.

    Args:
        expected: The file that must be found there; None = whichever is.
        reverse_unordered: Scan backwards where the query leaves the order open, to see whether its result depends on
            that (SQLite's pragma reverse_unordered_selects).

    Raises:
        DatabaseChangedError: the file is another than `expected`, or was replaced or written to meanwhile.
        ScorerError: the file is unreadable or corrupt.
        FileNotFoundError, PendingChangesError, sqlite3.OperationalError: see `open_read_only`.
    """
    start = time.monotonic()
    statements = split_statements(sql)
    if len(statements) != 1:
        outcome, error = (
            (Outcome.FORBIDDEN, f"{len(statements)} statements where one is allowed")
            if statements
            else (Outcome.SQL_ERROR, "the query is empty")
        )
        return QueryResult(outcome, error)
    word = first_word(statements[0], skip=_EXPLAIN)
    if word in FORBIDDEN_STARTS:
        return QueryResult(Outcome.FORBIDDEN, f"{word} is not a read")
    return _run_statement(db_path, statements[0], limits, start, expected, reverse_unordered)


def _run_statement(
    db_path: PathLike,
    statement: str,
    limits: ExecutionLimits,
    start: float,
    expected: FileIdentity | None = None,
    reverse_unordered: bool = False,
) -> QueryResult:
    with HANDLES.borrow(db_path) as handle:
        if expected is not None and handle.identity != expected:
            raise DatabaseChangedError(f"database {db_path!r} was replaced or written to")
        if reverse_unordered:
            handle.connection.execute("PRAGMA reverse_unordered_selects=ON")
        result = _run_confined(handle, db_path, statement, limits, start)
        if reverse_unordered:
            handle.reusable = False
        if file_identity(db_path) != handle.identity:
            handle.reusable = False
            raise DatabaseChangedError(f"database {db_path!r} was replaced or written to during a query")
        return result


def _run_confined(
    handle: Handle, db_path: PathLike, statement: str, limits: ExecutionLimits, start: float
) -> QueryResult:
    """Runs a statement without a temporary file, in the faster of two ways where that is possible.

    SQLite sorts in one block of memory if it may, once that is full, use temporary files; told to keep everything in
    memory, it allocates each record, which takes twice as long. So where this process may be kept from opening files,
    the first way is tried; a query that needs a file then, or more memory, is begun again in the second way, in what
    is left of its time.
    """
    if runs_one_call_at_a_time():
        with no_new_files():
            result = _run_watched(handle, db_path, statement, limits, start, spills=True)
        if result is not None:
            return result
        _release(handle.connection)
        # what the schemas of idle connections take is missing from the heap
        HANDLES.clear()
    result = _run_watched(handle, db_path, statement, limits, start, spills=False)
    assert result is not None
    return result


def _run_watched(
    handle: Handle, db_path: PathLike, statement: str, limits: ExecutionLimits, start: float, *, spills: bool
) -> QueryResult | None:
    """Runs a statement to its end or its limits; None if it `spills`, and needs a temporary file or more memory."""
    guard = _Guard(deadline=start + limits.timeout_s)
    digester = RowDigester()
    kept = _KeptRows(limits)
    outcome, error, columns = Outcome.OK, "", ()
    connection = handle.connection
    try:
        if handle.own_tables is None:
            handle.own_tables = _connect_virtual_tables(connection)
        guard.own_tables = handle.own_tables
        _connect_table_functions(connection, statement)
        _confine(connection, limits, guard, spills=spills)
        cursor = connection.execute(statement)
        for row in cursor:
            if digester.row_count >= limits.max_compared_rows:
                outcome, error = Outcome.TOO_LARGE, f"more than {limits.max_compared_rows} rows"
                break
            digester.add(row)
            kept.add(row)
            # a few large rows take long in here, between two of SQLite's own looks at the clock
            if guard.interrupt():
                outcome, error = Outcome.TIMED_OUT, "interrupted"
                break
        columns = tuple(column[0] for column in cursor.description or ())
        cursor.close()
        if outcome is Outcome.OK:
            _release(connection)
            handle.reusable = True
    except MemoryError:
        if spills:
            return None
        outcome, error = Outcome.OUT_OF_MEMORY, "out of memory"
    except (sqlite3.Error, UnicodeError) as failure:
        if spills and not (guard.refused or guard.expired) and _lacks_room(failure):
            return None
        # Python encodes the query, and decodes names and SQLite's error messages, strictly
        outcome, error = _classify(failure, guard, db_path)
    shown = outcome in (Outcome.OK, Outcome.TOO_LARGE)
    return QueryResult(
        outcome=outcome,
        error=error[:_MAX_ERROR_CHARACTERS],
        columns=columns if shown else (),
        fingerprint=digester.fingerprint() if outcome is Outcome.OK else None,
        rows=tuple(kept.rows) if shown else (),
        rows_cut=outcome is Outcome.TOO_LARGE or (shown and kept.cut),
        seconds=time.monotonic() - start,
    )


class _KeptRows:
    """The first rows of a result, within the limits on rows and bytes."""

    def __init__(self, limits: ExecutionLimits) -> None:
        self.rows: list[tuple[Value, ...]] = []
        self.cut = False
        self._max_rows = limits.max_kept_rows
        self._bytes_left = limits.max_kept_bytes

    def add(self, row: tuple[Value, ...]) -> None:
        if self.cut:
            return
        self._bytes_left -= sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(self.rows) >= self._max_rows or self._bytes_left < 0:
            self.cut = True
        else:
            self.rows.append(row)


class _Guard:
    """What the callbacks that watch a query have seen."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.expired = False
        self.refused = ""
        self.own_tables: frozenset[str] = frozenset()

    def interrupt(self) -> bool:
        self.expired = time.monotonic() > self.deadline
        return self.expired

    def authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        refusal = _refusal(action, first, second, self.own_tables)
        if not refusal:
            return sqlite3.SQLITE_OK
        self.refused = self.refused or refusal
        return sqlite3.SQLITE_DENY


def _refusal(action: int, first: str | None, second: str | None, own_tables: frozenset[str]) -> str:
    """Returns why SQLite's authorizer must refuse an action, or "" if it is a confined read."""
    if action in _READ_ACTIONS:
        return ""
    if action == sqlite3.SQLITE_READ:
        return f"reading {first}" if (first or "").lower() in FORBIDDEN_TABLES - own_tables else ""
    if action == sqlite3.SQLITE_FUNCTION:
        return f"function {second}" if (second or "").lower() in FORBIDDEN_FUNCTIONS else ""
    if action == sqlite3.SQLITE_PRAGMA:
        name = (first or "").lower()
        allowed = name in PRAGMAS_ABOUT_A_NAME or (name in PRAGMAS_WITHOUT_ARGUMENT and second is None)
        return "" if allowed else f"PRAGMA {name}"
    return _ACTION_NAMES.get(action, f"action {action} on {first}")


def _confine(connection: sqlite3.Connection, limits: ExecutionLimits, guard: _Guard, *, spills: bool) -> None:
    """Bounds the connection; from here on it can only read its own file.

    If it `spills`, a sorter is given an eighth of the heap, and then a file, which the caller must prevent; else
    sorters and materialised sub-queries take what they need of the heap, and leave no file behind.
    """
    _lower_heap_limit(connection, limits.heap_bytes)
    connection.execute(f"PRAGMA temp_store={'FILE' if spills else 'MEMORY'}")
    connection.execute(f"PRAGMA cache_size=-{limits.heap_bytes // 8192 if spills else _CACHE_KIB}")
    connection.execute("PRAGMA query_only=ON")
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.max_value_bytes)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    connection.set_authorizer(guard.authorize)
    interrupt: Callable[[], bool] = guard.interrupt
    connection.set_progress_handler(interrupt, _OPCODES_PER_CHECK)


def _release(connection: sqlite3.Connection) -> None:
    """Takes a finished query's watchers and memory off the connection, so that the next one finds it as if new."""
    connection.set_progress_handler(None, 0)
    connection.set_authorizer(None)
    connection.execute("PRAGMA shrink_memory")


def _connect_table_functions(connection: sqlite3.Connection, statement: str) -> None:
    """Sets up the table-valued functions that the statement may read; see `_connect_virtual_tables`."""
    lowered = statement.lower()
    for function in sorted(TABLE_FUNCTIONS):
        if function in lowered:
            connection.execute(f"SELECT 1 FROM {function} LIMIT 0")


def _connect_virtual_tables(connection: sqlite3.Connection) -> frozenset[str]:
    """Sets up the database's virtual tables; returns which of `FORBIDDEN_TABLES` are tables or views of its own.

    A module declares its columns with statements that look like writes to the schema, and some prepare writes of their
    own; once it is connected, only reads remain, and the authorizer can tell them apart.
    """
    own_tables = set()
    for table, is_virtual in connection.execute(_SPECIAL_TABLES, sorted(FORBIDDEN_TABLES)).fetchall():
        if not is_virtual:
            own_tables.add(table.lower())
            continue
        # one that cannot be connected fails in the statement too, should that read it
        with contextlib.suppress(sqlite3.Error, UnicodeError):
            connection.execute("SELECT 1 FROM {} LIMIT 0".format('"' + table.replace('"', '""') + '"'))
    return frozenset(own_tables)


def _lower_heap_limit(connection: sqlite3.Connection, heap_bytes: int) -> None:
    row = connection.execute(f"PRAGMA hard_heap_limit={heap_bytes}").fetchone()
    if row is None or not 0 < row[0] <= heap_bytes:
        raise ScorerError(f"SQLite {sqlite3.sqlite_version} cannot limit its memory; use SQLite 3.31 or newer")


def _lacks_room(failure: sqlite3.Error | UnicodeError) -> bool:
    """Says whether SQLite needed more memory than there is, or a file that it could not open."""
    code = failure.sqlite_errorcode & 0xFF if hasattr(failure, "sqlite_errorcode") else sqlite3.SQLITE_OK
    room = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM)
    return code in room


def _classify(failure: sqlite3.Error | UnicodeError, guard: _Guard, db_path: PathLike) -> tuple[Outcome, str]:
    if guard.refused:
        return Outcome.FORBIDDEN, f"{guard.refused} is not allowed"
    if guard.expired:
        return Outcome.TIMED_OUT, str(failure)
    # only errors that SQLite itself reports carry a code; the others are about the text of the query
    extended = failure.sqlite_errorcode if hasattr(failure, "sqlite_errorcode") else sqlite3.SQLITE_ERROR
    code = extended & 0xFF
    # interrupted before its time: the callback that looks at the clock had no memory to run
    exhausted = (sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT)
    if code in exhausted or extended == sqlite3.SQLITE_IOERR_NOMEM:
        return Outcome.OUT_OF_MEMORY, str(failure)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH) or _names_forbidden(str(failure)):
        return Outcome.FORBIDDEN, str(failure)
    if code in _UNREADABLE and extended != sqlite3.SQLITE_CORRUPT_VTAB:
        raise ScorerError(f"database {db_path!r} cannot be read: {failure}") from failure
    return Outcome.SQL_ERROR, str(failure)


def _names_forbidden(message: str) -> bool:
    """Says whether a query asks for a function or table that is forbidden, and that this build of SQLite lacks."""
    absent = _ABSENT.match(message)
    if absent is None:
        return False
    return absent["name"].lower() in (FORBIDDEN_FUNCTIONS if absent["kind"] == "function" else FORBIDDEN_TABLES)
