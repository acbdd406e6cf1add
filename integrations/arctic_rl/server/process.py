"""What every worker process does for itself: its log file, its threads, its children, its address."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from .run_directory import remove_run_directories

if TYPE_CHECKING:
    import psutil

RUN_ID_VARIABLE = "ARCTIC_RL_RUN_ID"
TRACKER_GRACE_S = 3.0
ORPHAN_CHECK_S = 1.0
RAYLET_SOCKET = "--raylet_socket_name="


def redirect_output(log_file: str) -> None:
    """Send this process's stdout and stderr, children's included, to the end of ``log_file``."""
    os.makedirs(os.path.dirname(log_file), exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def end_with_parent() -> None:
    """In a process of a run, end within a second or so of the end of the process that started it, a node's raylet.

    With it end its descendants, workers of that raylet that only start, and the run's folder in shared memory. Ray's
    own workers take a minute to notice that their raylet and the control process are gone, and those that only start
    half a minute. Ray's agents, which try for a minute to report it, are ended too where the driver of the run had
    started that raylet.
    """
    if RUN_ID_VARIABLE in os.environ:
        arguments = (os.getppid(), _socket(os.getppid()), os.environ[RUN_ID_VARIABLE])
        threading.Thread(target=_end_with, args=arguments, name="arctic-orphan-check", daemon=True).start()


def _end_with(parent: int, socket: str | None, run_id: str) -> None:
    import psutil

    agents = _agents(parent)
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    for agent in agents:
        with contextlib.suppress(psutil.Error):
            agent.kill()
    remove_run_directories(run_id)
    kill_processes([*_starting(socket), *own_process_ids()[1:]])
    os._exit(1)


def _starting(socket: str | None) -> list[int]:
    """Workers of a raylet that is gone, by its socket, in which nothing of ours runs yet that would end them."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            orphan = process.pid != os.getpid() and process.ppid() == os.getppid()
            if orphan and socket is not None and f"--raylet-name={socket}" in process.cmdline()[2:]:
                found += [process.pid, *(child.pid for child in process.children(recursive=True))]
    return found


def _socket(raylet: int) -> str | None:
    """The socket of a raylet, by which its workers are told of it."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for argument in psutil.Process(raylet).cmdline():
            if argument.startswith(RAYLET_SOCKET):
                return argument.removeprefix(RAYLET_SOCKET)
    return None


def _agents(raylet: int) -> list[psutil.Process]:
    """Ray's agents of a raylet that a driver started; none of one that outlives its drivers (``ray start``)."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(raylet)
        for child in process.children() if process.ppid() != 1 else []:
            with contextlib.suppress(psutil.Error):
                if re.match(r"ray::\w+Agent", " ".join(child.cmdline())):
                    found.append(child)
    return found


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch in this process."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def own_process_ids() -> list[int]:
    """This process and all its descendants."""
    import psutil

    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]


def free_address() -> tuple[str, int]:
    """This node's address and a port that was free a moment ago."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def log_tail(log_file: str, lines: int = 15) -> str:
    """The last lines of a worker's log file, or a note that there is none."""
    try:
        with open(log_file, encoding="utf-8", errors="replace") as file:
            text = [line.rstrip() for line in file.readlines() if line.strip()]
    except OSError as error:
        return f"(no log file: {error})"
    return "\n".join(text[-lines:]) or "(the log file is empty)"


def kill_run(run_id: str, *, spare: set[int] | None = None) -> list[int]:
    """Kill every process on this node that carries the run's id in its environment.

    Python's resource trackers come last: each gets a moment to end by itself once its owner is gone, since it removes
    the semaphores that the owner left behind.

    Args:
        run_id: value of ``ARCTIC_RL_RUN_ID`` of the run's workers.
        spare: process ids to leave alone, next to this process.

    Returns:
        The process ids that were killed.
    """
    import psutil

    spare = {os.getpid(), *(spare or ())}
    workers, trackers = [], []
    for process in psutil.process_iter():
        try:
            if process.pid not in spare and process.environ().get(RUN_ID_VARIABLE) == run_id:
                tracker = any("resource_tracker" in part for part in process.cmdline())
                (trackers if tracker else workers).append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    _kill(workers)
    _, stuck = psutil.wait_procs(trackers, timeout=TRACKER_GRACE_S)
    _kill(stuck)
    return [process.pid for process in [*workers, *stuck]]


def kill_processes(process_ids: list[int]) -> None:
    """Kill processes of this node, stopped ones too, and leave Python's resource trackers to end by themselves."""
    import psutil

    processes = []
    for process_id in process_ids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(process_id)
            if not any("resource_tracker" in part for part in process.cmdline()):
                processes.append(process)
    _kill(processes)


def _kill(processes: list[psutil.Process]) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
