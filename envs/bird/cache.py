"""Results of work already done by this process: one gold serves all rollouts of its group."""

import pickle
import threading
import time
from collections import OrderedDict
from typing import Any

from .parts import Part


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.packed = b""
        self.runs = 0
        self.expires = 0.0


class ResultCache:
    """A bounded, least-recently-used cache of parts' results, safe to share between threads.

    Two threads with the same key do not both run it: the second waits for the first. Results are kept pickled, so that
    nobody can change another's. Exceptions are not kept.
    """

    def __init__(self, max_entries: int = 4096, max_bytes: int = 64 * 2**20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def run(self, part: Part) -> Any:
        """Returns the part's result, from an earlier run of the same key where there is one that still counts."""
        key = part.key
        if key is None:
            return part.run()
        entry = self._entry(key)
        with entry.lock:
            if entry.runs > 0 and time.monotonic() < entry.expires:
                return pickle.loads(entry.packed)
            result = part.run()
            self._keep(key, entry, pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL))
            entry.runs += 1
            entry.expires = time.monotonic() + part.keep_s(result, entry.runs)
            return result

    def _entry(self, key: Any) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._drop_oldest()
            return entry

    def _keep(self, key: Any, entry: _Entry, packed: bytes) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                self._bytes += len(packed) - len(entry.packed)
            entry.packed = packed
            while self._bytes > self._max_bytes and self._entries:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._entries.popitem(last=False)
        self._bytes -= len(dropped.packed)


RESULTS = ResultCache()
"""The cache of this process."""
