"""Ranks of a process group over gloo, in processes of their own."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_two_ranks(work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Wait for ``work(rank, folder, *arguments)`` of both ranks, one thread each, within DeepSpeed's process group."""
    torch.multiprocessing.spawn(_rank, (free_port(), work, str(folder), *arguments), nprocs=2)


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, port: int, work: Callable[..., None], *arguments: Any) -> None:
    from integrations.arctic_rl.server.training_worker import _init_distributed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    _init_distributed("cpu")
    work(rank, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
