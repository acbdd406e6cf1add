"""What a machine has: memory, shared memory, disk space and GPUs."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..server.host_memory import free_host_memory


@dataclass(frozen=True)
class Machine:
    """Amounts in bytes."""

    cores: int
    """Cores that this process may use."""
    memory: int
    """Memory that is free for new processes."""
    shared: int
    """Free space where weights are handed to engines."""
    shared_folder: str
    """Where that is."""
    gpus: tuple[tuple[str, int], ...]
    """Name and memory of each GPU that PyTorch sees."""
    driver: bool = False
    """Whether NVIDIA's driver is loaded."""


def describe_machine() -> Machine:
    """This machine; importing PyTorch for its GPUs takes some seconds."""
    import torch

    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory=free_host_memory(),
        shared=shutil.disk_usage(folder).free,
        shared_folder=folder,
        gpus=tuple((item.name, item.total_memory) for item in properties),
        driver=Path("/proc/driver/nvidia/version").exists(),
    )


def free_space(path: str) -> int:
    """Free bytes of the disk that a folder is on, which need not be there yet."""
    at = Path(path).expanduser().absolute()
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free
