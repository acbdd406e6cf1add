"""Idle connections to database files, so that a query need not open and parse its database again."""

import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .database import PathLike, open_read_only, refuse_pending_changes

type FileIdentity = tuple[int, ...]


def file_identity(db_path: PathLike) -> FileIdentity:
    """Returns what changes whenever a file is replaced or written: device, inode, size, mtime and ctime in ns."""
    status = os.stat(db_path)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass
class Handle:
    """A connection on loan to one query at a time."""

    connection: sqlite3.Connection
    identity: FileIdentity
    """The file that was opened."""
    own_tables: frozenset[str] | None = None
    """Tables of the database's own whose names are forbidden otherwise; None until virtual tables are connected."""
    reusable: bool = False
    """Whether the connection may serve another query; the borrower says so once nothing of its query is left."""


class HandleCache:
    """Open connections that no query is using, least recently used first. Safe to share between threads.

    A connection serves one query at a time, and only the very file that it was opened on: a file that was replaced or
    written to is opened anew.
    """

    def __init__(self, max_idle: int = 16) -> None:
        """`max_idle`: connections kept open at most; each costs a file descriptor and the parsed schema."""
        self._max_idle = max_idle
        self._idle: OrderedDict[int, tuple[bytes, Handle]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._idle)

    @contextmanager
    def borrow(self, db_path: PathLike) -> Iterator[Handle]:
        """Lends a connection to `db_path`; it is closed afterwards unless the borrower sets `reusable`.

        Raises what `open_read_only` raises.
        """
        name = os.path.abspath(os.fsencode(db_path))
        identity = file_identity(db_path)
        refuse_pending_changes(db_path)
        handle = self._take(name, identity)
        if handle is None:
            handle = Handle(open_read_only(db_path), identity)
        try:
            yield handle
        finally:
            if handle.reusable:
                self._put(name, handle)
            else:
                handle.connection.close()

    def clear(self) -> None:
        """Closes every idle connection."""
        with self._lock:
            handles = [handle for _, handle in self._idle.values()]
            self._idle.clear()
        for handle in handles:
            handle.connection.close()

    def _take(self, name: bytes, identity: FileIdentity) -> Handle | None:
        taken, stale = None, []
        with self._lock:
            for key, (path, handle) in list(self._idle.items()):
                if path != name:
                    continue
                if handle.identity != identity:
                    stale.append(self._idle.pop(key)[1])
                elif taken is None:
                    taken = self._idle.pop(key)[1]
        for handle in stale:
            handle.connection.close()
        if taken is not None:
            taken.reusable = False
        return taken

    def _put(self, name: bytes, handle: Handle) -> None:
        dropped = []
        with self._lock:
            self._idle[id(handle)] = (name, handle)
            while len(self._idle) > self._max_idle:
                dropped.append(self._idle.popitem(last=False)[1][1])
        for old in dropped:
            old.connection.close()


HANDLES = HandleCache()
"""The idle connections of this process."""
