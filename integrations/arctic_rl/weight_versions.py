"""Which weights sampled a trajectory, noted by the inference client and carried in a generator's output."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable
from typing import Any

KEY = "weight_versions"
"""Key of a generator output: (first, last) a trajectory in the order of its input, None where none was noted."""

type _Key = tuple[Any, Any]

# The versions under which the requests of the current task began and ended.
_of_task: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("weight_versions_of_task", default=None)
# (first, last) by (instance_id, repetition_id) of the current ``generate``.
_of_call: contextvars.ContextVar[dict[_Key, tuple[int, int]] | None] = contextvars.ContextVar(
    "weight_versions_of_call", default=None
)


def note_weight_versions(results: Iterable[dict[str, Any]]) -> None:
    """Note the versions of a backend's results for the trajectory that the current task runs, if it asks for them."""
    noted = _of_task.get()
    if noted is not None:
        for result in results:
            noted += (result["weight_version"], result["last_weight_version"])


class WeightVersionsMixin:
    """Put before a SkyRL gym generator: a training batch's output has ``KEY``.

    A version is the number of weight syncs before it. Evaluations are left as they are.
    """

    async def agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's agent loop, which makes all its requests in the task it runs in."""
        of_call, trajectory_id = _of_call.get(), kwargs.get("trajectory_id")
        if of_call is None or trajectory_id is None:
            return await super().agent_loop(*args, **kwargs)
        noted: list[int] = []
        token = _of_task.set(noted)
        try:
            output = await super().agent_loop(*args, **kwargs)
        finally:
            _of_task.reset(token)
        if noted:
            of_call[_key(trajectory_id)] = min(noted), max(noted)
        return output

    async def generate(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's ``generate``."""
        metadata, ids = input_batch.get("batch_metadata"), input_batch.get("trajectory_ids")
        if metadata is None or metadata.training_phase != "train" or ids is None:
            return await super().generate(input_batch, *args, **kwargs)
        of_call: dict[_Key, tuple[int, int]] = {}
        token = _of_call.set(of_call)
        try:
            output = await super().generate(input_batch, *args, **kwargs)
        finally:
            _of_call.reset(token)
        output[KEY] = [of_call.get(_key(trajectory_id)) for trajectory_id in ids]
        return output


def _key(trajectory_id: Any) -> _Key:
    return trajectory_id.instance_id, trajectory_id.repetition_id
