"""The hidden folder beside the output in which finished work is kept until all of it is done."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

FOLDER = ".preprocess"


class WorkspaceBusyError(RuntimeError):
    """Another run writes to the same output folder."""


class Journal:
    """Results of finished jobs by key, one JSON line each; what a kill left half-written is dropped at the next start.

    A key stands for everything that its result depends on, so that a stale one is never asked for.
    """

    def __init__(self, path: Path) -> None:
        self._results: dict[str, Any] = {}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            entry = _entry(line)
            if entry is not None:
                self._results[entry[0]] = entry[1]
        os.ftruncate(self._descriptor, whole)

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def __getitem__(self, key: str) -> Any:
        return self._results[key]

    def put(self, key: str, result: Any) -> None:
        """Keeps a result; it survives the end of this process from here on."""
        self._results[key] = result
        left = memoryview(json.dumps([key, result]).encode() + b"\n")
        while left:
            left = left[os.write(self._descriptor, left) :]

    def close(self) -> None:
        os.close(self._descriptor)


class Workspace:
    """A run's folder, locked against a second run; a context manager."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / FOLDER
        self._journals: list[Journal] = []
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """
        Raises WorkspaceBusyError if another run holds the folder.
        """
        while self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._try_lock()
        return self

    def __exit__(self, *_: object) -> None:
        for journal in self._journals:
            journal.close()
        self._journals.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def journal(self, name: str) -> Journal:
        """Opens the journal of a kind of job."""
        self._journals.append(Journal(self.path / f"{name}.jsonl"))
        return self._journals[-1]

    def write(self, target: Path, write: Callable[[Path], None]) -> None:
        """Has `write` fill a file of this folder, and moves it to `target` once it is complete and on disk."""
        partial = self.path / f"{target.name}.partial"
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)

    def clear(self) -> None:
        """Removes the folder: all is done."""
        shutil.rmtree(self.path)

    def _try_lock(self) -> int | None:
        """Returns the lock's descriptor; None if a run that was just ending has removed its file meanwhile."""
        path = self.path / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise WorkspaceBusyError(
                f"another run is writing to {self.path.parent}; wait for it, or give another --output_dir"
            ) from error
        os.close(descriptor)
        return None


def job_key(*parts: Any) -> str:
    """Returns the key of a job whose result depends on `parts` (JSON values) alone."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def file_state(path: str) -> list[Any]:
    """Returns what changes when a file is replaced or written to: path, size, modification time; None if not there."""
    try:
        status = os.stat(path)
    except OSError:
        return [path, None, None]
    return [path, status.st_size, status.st_mtime_ns]


def code_state() -> str:
    """Returns a digest of the code that makes the results, so that those of another version are not taken over."""
    digest = blake2b(digest_size=16)
    here = Path(__file__).resolve().parent
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _entry(line: bytes) -> tuple[str, Any] | None:
    try:
        key, result = json.loads(line)
    except ValueError:
        return None
    return (key, result) if isinstance(key, str) else None
