"""vLLM's NCCL transfer: packed buckets, broadcast from the policy's first rank to every process of every engine."""

from __future__ import annotations

from typing import Any

from .run import SyncRun
from .transfer import send_by_vllm


async def send(run: SyncRun) -> None:
    """Let the policy's ranks broadcast to the engines."""
    await send_by_vllm(run, "nccl")


def init_info(*, rank: int, address: tuple[str, int] | None, processes: int, bucket_bytes: int) -> dict[str, Any]:
    """Fields of vLLM's ``NCCLTrainerInitInfo``.

    Args:
        rank: of the policy; the first one sends.
        address: a free host and port where the sender is met; None for the other ranks, which do not join.
        processes: of all engines together.
        bucket_bytes: of one packed buffer; vLLM has two of them under way.
    """
    host, port = ("", 0) if address is None else address
    return {
        "rank": rank,
        "master_address": host,
        "master_port": port,
        "world_size": 1 + processes,
        "packed": True,
        "packed_buffer_size_bytes": bucket_bytes,
    }


def of_engine(info: dict[str, Any], engine: int, processes: int) -> dict[str, Any]:
    """What one engine is told of the group: its processes come after those of the engines before it.

    vLLM's trainer engine makes one payload for all, which suits one engine alone.

    Args:
        info: that payload; vLLM's CUDA IPC has no ranks in it.
        engine: number of the engine.
        processes: of each engine.
    """
    return {**info, "rank_offset": info["rank_offset"] + engine * processes} if "rank_offset" in info else info
