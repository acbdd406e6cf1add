"""Results of queries already run by this process: one gold serves all rollouts of its group."""

import os
import re
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

from .database import PathLike
from .execute import ExecutionLimits, QueryResult, run_query
from .outcome import Outcome

_VOLATILE = re.compile(
    r"\b(?:now|random|randomblob|localtime|current_date|current_time|current_timestamp)\b"
    r"|\b(?:date|time|datetime|julianday|unixepoch)\s*\(\s*\)",
    re.IGNORECASE,
)
_RETRIED = frozenset({Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY})


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.result: QueryResult | None = None
        self.retry_at: float | None = None


class ResultCache:
    """A bounded, least-recently-used cache of `run_query`, safe to share between threads.

    Keyed by the file's identity (device, inode, size, modification time), the query and the limits, so that a database
    that was replaced is read again. Rows are not kept, only fingerprints. Queries whose result depends on the time of
    day or on chance are not cached. A query that ran out of time or memory is tried a second time, once, when
    `RETRY_AFTER_TIMEOUTS` time limits have passed; until then, and for ever after, its failure is remembered.
    """

    RETRY_AFTER_TIMEOUTS = 10.0

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def run(self, db_path: PathLike, sql: str, limits: ExecutionLimits) -> QueryResult:
        """Returns what `run_query` gives without its rows; raises what `run_query` raises (which is not cached)."""
        limits = replace(limits, max_kept_rows=0)
        if _VOLATILE.search(sql):
            return run_query(db_path, sql, limits)
        entry = self._entry((_file_identity(db_path), _text_key(sql), limits))
        with entry.lock:
            if entry.result is None:
                entry.result = run_query(db_path, sql, limits)
                if entry.result.outcome in _RETRIED:
                    entry.retry_at = time.monotonic() + self.RETRY_AFTER_TIMEOUTS * limits.timeout_s
            elif entry.retry_at is not None and time.monotonic() >= entry.retry_at:
                entry.retry_at = None
                entry.result = run_query(db_path, sql, limits)
            return entry.result

    def _entry(self, key: tuple) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            return entry


def _file_identity(db_path: PathLike) -> tuple[int, int, int, int]:
    status = os.stat(db_path)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _text_key(sql: str) -> bytes:
    return blake2b(sql.encode("utf-8", "surrogatepass"), digest_size=32).digest()


RESULTS = ResultCache()
"""The cache of this process."""
