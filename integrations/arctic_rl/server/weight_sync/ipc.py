"""vLLM's CUDA IPC transfer: engines read the memory of the training rank that shares their GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..weights import TensorSpec
from .run import SyncRun
from .transfer import send_by_vllm


async def send(run: SyncRun) -> None:
    """Let the policy's ranks hand their memory to the engines."""
    await send_by_vllm(run, "ipc")


def init_info(*, rank: int, tensors: Sequence[TensorSpec], lasting: bool, bucket_bytes: int) -> dict[str, Any]:
    """Fields of vLLM's ``IPCTrainerInitInfo``.

    Args:
        rank: of the policy.
        tensors: what is sent.
        lasting: whether the model's own parameters are sent as they are, which takes no copy; else values are copied
            into one buffer that all buckets use.
        bucket_bytes: of that buffer, which holds at least the largest tensor.
    """
    largest = max(spec.nbytes for spec in tensors)
    return {"rank": rank, "packed": not lasting, "packed_buffer_size_bytes": max(bucket_bytes, largest)}
