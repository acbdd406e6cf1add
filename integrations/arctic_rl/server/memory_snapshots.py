"""What is in a GPU's memory after each backward pass and step, and who took it: ``trainer.policy.record_memory``.

The files are those that SkyRL's workers write (``Worker.save_memory_snapshot``), for
https://docs.pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path


class MemorySnapshots:
    """Records from now on; CUDA must know its device by then.

    Args:
        folder: of the files, made with the first one.
        rank: in their names.
    """

    def __init__(self, folder: str, rank: int) -> None:
        import torch

        self._folder, self._rank, self._count = Path(folder), rank, 0
        torch.cuda.memory._record_memory_history()

    def write(self, what: str) -> None:
        """Write ``rank_<rank>_policy_<what>_<number>.pickle``."""
        import torch

        self._count += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank_{self._rank}_policy_{what}_{self._count}.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
