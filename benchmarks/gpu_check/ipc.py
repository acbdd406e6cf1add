"""A tensor handed to another process by its handle: on GPUs CUDA IPC, on CPUs shared memory."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.report import print_line

NEEDS = ()
_TIMEOUT_SECONDS = 30


def measure(device: str, *, small: bool) -> list[bool]:
    """The other process sees every element, and what it writes is seen here; then it lets go of the memory."""
    count = 1000 if small else 256 * 2**20
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_other, args=(there,))
    process.start()
    try:
        _wait(here)
        tensor = torch.arange(count, device=device, dtype=torch.float32).remainder_(1013)
        start = time.perf_counter()
        here.send(tensor)
        wrong = _wait(here)
        seconds = time.perf_counter() - start
        _synchronize(device)
        unseen = int((tensor != -1).sum())
        here.send(None)
        process.join(_TIMEOUT_SECONDS)
        ended = process.exitcode == 0
    finally:
        process.kill()
    start = time.perf_counter()
    copied = tensor.clone()
    _synchronize(device)
    times = {"handle_seconds": round(seconds, 4), "copy_seconds": round(time.perf_counter() - start, 4)}
    return [
        print_line("gpu_check/ipc_wrong_elements", wrong + unseen, 0.0, "max", bytes=copied.nbytes, **times),
        print_line("gpu_check/ipc_ended", float(ended), 1.0, "min"),
    ]


def _other(connection: Any) -> None:
    connection.send("up")
    tensor = connection.recv()
    right = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32).remainder_(1013)
    wrong = int((tensor != right).sum())
    tensor.fill_(-1)
    _synchronize(tensor.device.type)
    connection.send(wrong)
    del tensor
    connection.recv()


def _wait(connection: Any) -> Any:
    if not connection.poll(_TIMEOUT_SECONDS):
        raise TimeoutError(f"the other process said nothing for {_TIMEOUT_SECONDS} s")
    return connection.recv()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
