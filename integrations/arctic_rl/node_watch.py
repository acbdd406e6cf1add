"""The processes of a Ray node that this process has started: a run cannot go on without them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .errors import ArcticError

if TYPE_CHECKING:
    import psutil

NAMES = ("gcs_server", "raylet")
NODE_GRACE_S = 1.0
"""Seconds in which what belongs to a node may end by itself."""


def node_processes() -> list[tuple[str, psutil.Process]]:
    """This process's children among them, with their names; none where it joined a Ray that was up already, which
    looks after itself."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := child.name()) in NAMES:
                found.append((name, child))
    return found


def check_node(processes: list[tuple[str, psutil.Process]]) -> None:
    """Raise once one of the processes is gone.

    Ray itself takes a minute to notice that its control process is gone, and leaves a driver waiting for ever.

    Raises:
        ArcticError: it names the process.
    """
    import psutil

    for name, process in processes:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise ArcticError(
                f"a process of Ray's own, {name} ({process.pid}), was killed or crashed, and the run cannot go on "
                "without it; Ray's logs are in the folder session_latest/logs of its temporary folder"
            )


def started_node() -> list[psutil.Process]:
    """The processes of a Ray node that this process has started, its agents and workers with them."""
    import psutil

    found = []
    for _, process in node_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process, *process.children(recursive=True)]
    return found


def end_node(processes: list[psutil.Process]) -> None:
    """Kill what is left of a node behind ``ray.shutdown``: its agents try for a while to report that it is gone."""
    import psutil

    _, left = psutil.wait_procs(processes, timeout=NODE_GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=NODE_GRACE_S)
