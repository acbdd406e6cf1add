"""The few collective calls of the pipeline; without torch.distributed, or on one rank, they are the identity."""

from typing import Any

import torch.distributed as dist

from ..errors import ArcticError

__all__ = ["gather", "rank", "world_size"]


def world_size() -> int:
    """Ranks of the default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(value: Any, place: tuple[str, int]) -> list[Any]:
    """Every rank's value, in rank order, on every rank; small picklable objects only.

    Args:
        place: where the caller stands, a phase and the number of its call: equal on all ranks.

    Raises:
        ArcticError: a rank stands elsewhere, because it failed since the last gathering.
    """
    size = world_size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, (place, value))
    for other, (standing, _) in enumerate(values):
        if standing != place:
            raise ArcticError(
                f"rank {other} is at {standing[0]} of call {standing[1]} while rank {rank()} is at {place[0]} of call "
                f"{place[1]}: one of them failed since they last met; its own error says why"
            )
    return [value for _, value in values]


def rank() -> int:
    """This process's rank in the default process group; 0 if there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
