"""Making a SQLite database from statements that nobody has vetted: in memory, without reach to any file.

As in `envs.bird.execute`, a single long built-in call is not bounded here; the caller runs this in a process that can
be killed and has a memory limit.
"""

import sqlite3
import time
from functools import partial

from ..compare import Value
from ..execute import FORBIDDEN_FUNCTIONS
from .describe import HEAP_BYTES

TIMEOUT_S = 10.0
"""Seconds that the statements of one database may take."""
MAX_DATABASE_BYTES = 64 * 2**20
MAX_VALUE_BYTES = 16 * 2**20
"""Longest text or BLOB that may come up."""

_PAGE_BYTES = 4096
_OPCODES_PER_CHECK = 1000
_ALLOWED_ACTIONS = frozenset(
    {
        sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_TABLE,
        sqlite3.SQLITE_CREATE_TRIGGER, sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_DROP_INDEX,
        sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_TRIGGER, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_REINDEX, sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_UPDATE,
    }
)  # fmt: skip
_ACTION_NAMES = {
    sqlite3.SQLITE_ANALYZE: "ANALYZE",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_CREATE_TEMP_INDEX: "a temporary index",
    sqlite3.SQLITE_CREATE_TEMP_TABLE: "a temporary table",
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER: "a temporary trigger",
    sqlite3.SQLITE_CREATE_TEMP_VIEW: "a temporary view",
    sqlite3.SQLITE_CREATE_VTABLE: "a virtual table",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
}
_CHANCE_FUNCTIONS = frozenset({"random", "randomblob"})
_CLOCK_FUNCTIONS = frozenset({"current_date", "current_time", "current_timestamp"})
_DATE_FUNCTIONS = frozenset({"date", "time", "datetime", "julianday", "strftime", "unixepoch"})
_CLOCK_ARGUMENTS = frozenset({"now", "localtime", "utc"})


class ContextFailed(ValueError):
    """Statements that make no database; the message says why."""


def build_database(script: str) -> bytes:
    """Runs the statements of `script` on an empty database; returns the SQLite file. Equal scripts, equal bytes.

    Refused: ATTACH, DETACH, PRAGMA, VACUUM, ANALYZE, temporary objects, virtual tables, functions that touch files or
    load code, and what depends on chance or on the time of day. Bounded: `TIMEOUT_S`, `MAX_DATABASE_BYTES`,
    `MAX_VALUE_BYTES`, and SQLite's heap.

    Raises ContextFailed if a statement fails or is refused, or no table is made.
    """
    guard = _Guard()
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    # the date functions of one connection, asked by those that stand in for them in the other
    calendar = sqlite3.connect(":memory:")
    try:
        _confine(connection, guard)
        _refuse_chance_and_clock(connection, guard, calendar)
        try:
            connection.executescript(script)
            if connection.in_transaction:
                connection.execute("COMMIT")
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            raise ContextFailed(guard.reason or str(error) or type(error).__name__) from error
        connection.set_authorizer(None)
        connection.set_progress_handler(None, 0)
        if connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone() == (0,):
            raise ContextFailed("its statements make no table")
        return connection.serialize()
    finally:
        connection.close()
        calendar.close()


class _Guard:
    """What the callbacks that watch a script have seen."""

    def __init__(self) -> None:
        self.reason = ""
        self._deadline = time.monotonic() + TIMEOUT_S

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def interrupt(self) -> bool:
        if time.monotonic() > self._deadline:
            self.refuse(f"its statements take more than {TIMEOUT_S:g} s")
            return True
        return False

    def authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            allowed, name = (second or "").lower() not in FORBIDDEN_FUNCTIONS, f"the function {second}"
        else:
            allowed, name = action in _ALLOWED_ACTIONS, _ACTION_NAMES.get(action, f"action {action} on {first}")
        if allowed:
            return sqlite3.SQLITE_OK
        self.refuse(f"{name} is not allowed")
        return sqlite3.SQLITE_DENY


def _refuse_chance_and_clock(connection: sqlite3.Connection, guard: _Guard, calendar: sqlite3.Connection) -> None:
    """Replaces the functions whose result is another at the next call.

    The authorizer would not do: it is not asked about the functions of a DEFAULT clause.
    """
    for name in _CHANCE_FUNCTIONS | _CLOCK_FUNCTIONS:
        reason = f"it depends on {'chance' if name in _CHANCE_FUNCTIONS else 'the time of day'} ({name})"
        connection.create_function(name, -1, partial(_refused, guard, reason), deterministic=True)
    for name in _DATE_FUNCTIONS:
        connection.create_function(name, -1, partial(_date_function, guard, calendar, name), deterministic=True)


def _refused(guard: _Guard, reason: str, *_: Value) -> None:
    guard.refuse(reason)
    raise ContextFailed(reason)


def _date_function(guard: _Guard, calendar: sqlite3.Connection, name: str, *arguments: Value) -> Value:
    moment = arguments[1:] if name == "strftime" else arguments
    if not moment or any(isinstance(word, str) and word.strip().lower() in _CLOCK_ARGUMENTS for word in moment):
        _refused(guard, f"it depends on the time of day ({name})")
    return calendar.execute(f"SELECT {name}({', '.join('?' * len(arguments))})", arguments).fetchone()[0]


def _confine(connection: sqlite3.Connection, guard: _Guard) -> None:
    connection.execute(f"PRAGMA hard_heap_limit={HEAP_BYTES}").fetchone()
    connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
    connection.execute(f"PRAGMA max_page_count={MAX_DATABASE_BYTES // _PAGE_BYTES}").fetchone()
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(guard.authorize)
    connection.set_progress_handler(guard.interrupt, _OPCODES_PER_CHECK)
