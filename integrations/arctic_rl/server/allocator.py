"""PyTorch's ``expandable_segments``, switched as SkyRL's workers and engines do (``use_expandable_segments``).

Blocks of GPU memory then grow in place, and less is lost between blocks when states leave and come back. CUDA IPC
cannot share such memory, so a training rank takes its weights, and what a sync gathers, from the usual one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user writes settings of the allocator; PyTorch 2.13 reads the first of them that is there."""
_KEY = "expandable_segments"


def environment_with_segments() -> dict[str, str]:
    """The variables of a process that switches segments on at its start, unless the user has said how."""
    written = _written()
    value = written if written and _KEY in written else ",".join(filter(None, [written, f"{_KEY}:True"]))
    # vLLM looks into the second one, to switch them off around the memory that sleeps.
    return {name: value for name in ENVIRONMENT if name == ENVIRONMENT[1] or name in os.environ}


class Segments:
    """Switches ``expandable_segments``; does nothing where they are not asked for, or where the user has said how.

    Args:
        asked_for: whether they are, on a GPU.
    """

    def __init__(self, *, asked_for: bool) -> None:
        self._written = _written()
        self._asked_for = asked_for and _KEY not in (self._written or "")

    def switch_on(self) -> None:
        """From now on memory is taken in segments that grow."""
        self._set(True)

    @contextmanager
    def usual_memory(self) -> Iterator[None]:
        """Inside, memory is taken that CUDA IPC can share."""
        self._set(False)
        try:
            yield
        finally:
            self._set(True)

    def _set(self, on: bool) -> None:
        if self._asked_for:
            import torch

            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [self._written, f"{_KEY}:{on}"])))


def _written() -> str | None:
    return next((os.environ[name] for name in ENVIRONMENT if name in os.environ), None)
