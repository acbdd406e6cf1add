"""The folder of a run in shared memory, by which weights and other large things go from process to process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "arctic-rl-"


def run_directory(run_id: str) -> str:
    """A fresh folder in shared memory, or in the temporary folder where there is none.

    Its name holds this process's id; folders whose process is gone, left by a run that was killed, are removed.
    """
    import psutil

    for folder, owner, _ in run_directories():
        if not psutil.pid_exists(owner):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{run_id}-", dir=_base())


def remove_run_directories(run_id: str) -> None:
    """Remove what processes of a run that are gone have left."""
    for folder, _, of_run in run_directories():
        if of_run == run_id:
            shutil.rmtree(folder, ignore_errors=True)


def _base() -> Path:
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def run_directories() -> Iterator[tuple[Path, int, str]]:
    """Each folder, the id of the process that made it, and of the run."""
    for folder in _base().glob(f"{PREFIX}*"):
        owner, _, rest = folder.name.removeprefix(PREFIX).partition("-")
        if owner.isdigit():
            yield folder, int(owner), rest.rpartition("-")[0]
