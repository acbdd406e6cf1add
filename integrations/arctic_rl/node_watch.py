"""The processes of a Ray node that this process has started: a run cannot go on without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ArcticError

if TYPE_CHECKING:
    import psutil

NAMES = ("gcs_server", "raylet")


def node_processes() -> list[tuple[str, psutil.Process]]:
    """This process's children among them, with their names; none where it joined a Ray that was up already, which
    looks after itself."""
    import psutil

    children = psutil.Process().children(recursive=True)
    return [(name, child) for child in children if (name := child.name()) in NAMES]


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
