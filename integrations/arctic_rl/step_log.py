"""One JSON line an optimizer step: SkyRL's tracker averages these over the mini-batches of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .skipped_steps import is_skipped

STEP_LOG_NAME = "optimizer_steps.jsonl"
CRITIC_STEP_LOG_NAME = "critic_optimizer_steps.jsonl"


class StepLog:
    """Appends ``{"optimizer_step", "lr", "grad_norm", "loss", "num_tokens", "num_rows", **metrics}`` to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._mini_batch: dict[str, Any] = {}

    def go_on_behind(self, optimizer_steps: int) -> None:
        """Count on from the steps of the run that this one continues."""
        self._count = optimizer_steps

    def mini_batch(self, result: dict[str, Any], *, num_tokens: int, num_rows: int) -> None:
        """Note the loss and metrics of the mini-batch whose gradient the next step applies."""
        self._mini_batch = {
            "loss": result["avg_loss"],
            "num_tokens": num_tokens,
            "num_rows": num_rows,
            **result["metrics"],
        }

    def optimizer_step(self, result: dict[str, Any]) -> None:
        """Write the line of a step that used ``result["lr"]``; a skipped one has the number of the one before it."""
        if not is_skipped(result):
            self._count += 1
        line = {"optimizer_step": self._count, **result, **self._mini_batch}
        self._mini_batch = {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
