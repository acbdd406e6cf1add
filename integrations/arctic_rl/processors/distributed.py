"""The few collective calls of the pipeline; without torch.distributed, or on one rank, they are the identity."""

from typing import Any

import torch.distributed as dist

__all__ = ["gather", "rank", "world_size"]


def world_size() -> int:
    """Ranks of the default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; small picklable objects only."""
    size = world_size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def rank() -> int:
    """This process's rank in the default process group; 0 if there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
