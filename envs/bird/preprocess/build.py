"""Making a SQLite database from statements that nobody has vetted: in memory, without reach to any file.

As in `envs.bird.execute`, a single long built-in call is not bounded here; the caller runs this in a process that can
be killed and has a memory limit.
"""

import sqlite3
import time

from ..execute import FORBIDDEN_FUNCTIONS
from ..sqltext import tokens
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
_RANDOM_FUNCTIONS = frozenset({"random", "randomblob"})
_CLOCK_FUNCTIONS = frozenset({"current_date", "current_time", "current_timestamp"})
_DATE_FUNCTIONS = frozenset({"date", "time", "datetime", "julianday", "strftime", "unixepoch", "timediff"})
_CLOCK_WORDS = frozenset({"now", "localtime", "utc"})


class ContextFailed(ValueError):
    """Statements that make no database; the message says why."""


def build_database(script: str) -> bytes:
    """Runs the statements of `script` on an empty database; returns the SQLite file. Equal scripts, equal bytes.

    Refused: ATTACH, DETACH, PRAGMA, VACUUM, ANALYZE, temporary objects, virtual tables, functions that touch files or
    load code, and what depends on chance or on the time of day. Bounded: `TIMEOUT_S`, `MAX_DATABASE_BYTES`,
    `MAX_VALUE_BYTES`, and SQLite's heap.

    Raises ContextFailed if a statement fails or is refused, or no table is made.
    """
    guard = _Guard(script)
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    try:
        _confine(connection, guard)
        try:
            connection.executescript(script)
            if connection.in_transaction:
                connection.execute("COMMIT")
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            raise ContextFailed(guard.reason or str(error) or type(error).__name__) from error
        connection.set_progress_handler(None, 0)
        if connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone() == (0,):
            raise ContextFailed("its statements make no table")
        return connection.serialize()
    finally:
        connection.close()


class _Guard:
    """What the callbacks that watch a script have seen."""

    def __init__(self, script: str) -> None:
        self.reason = ""
        self._deadline = time.monotonic() + TIMEOUT_S
        self._reads_clock = _reads_clock(script)

    def interrupt(self) -> bool:
        if time.monotonic() > self._deadline:
            self.reason = self.reason or f"its statements take more than {TIMEOUT_S:g} s"
            return True
        return False

    def authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        refusal = self._refusal(action, (second or "").lower())
        if not refusal:
            return sqlite3.SQLITE_OK
        self.reason = self.reason or refusal
        return sqlite3.SQLITE_DENY

    def _refusal(self, action: int, function: str) -> str:
        if action != sqlite3.SQLITE_FUNCTION:
            name = _ACTION_NAMES.get(action, f"action {action}")
            return "" if action in _ALLOWED_ACTIONS else f"{name} is not allowed"
        if function in FORBIDDEN_FUNCTIONS:
            return f"the function {function} is not allowed"
        if function in _RANDOM_FUNCTIONS:
            return f"it depends on chance ({function})"
        if function in _CLOCK_FUNCTIONS or (function in _DATE_FUNCTIONS and self._reads_clock):
            return f"it depends on the time of day ({function})"
        return ""


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


def _reads_clock(script: str) -> bool:
    """Says whether a date function of `script`, if it has one, may be asked for the present."""
    recent: list[str] = []
    for kind, text, _ in tokens(script):
        if kind == "space":
            continue
        if kind == "quoted" and text[1:-1].strip().lower() in _CLOCK_WORDS:
            return True
        recent = [*recent[-2:], text.lower()]
        if len(recent) == 3 and recent[0] in _DATE_FUNCTIONS and recent[1:] == ["(", ")"]:
            return True
    return False
