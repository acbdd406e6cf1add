"""Optimizer steps that were skipped because the gradient was not finite: counted, and no endless row of them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .errors import ArcticError

logger = logging.getLogger(__name__)

SETTING = "trainer.arctic_rl.max_skipped_steps"


def is_skipped(result: Mapping[str, Any]) -> bool:
    """Whether an optimizer step changed nothing; a backend that reports no norm is taken to have stepped."""
    return result["grad_norm"] is not None and not math.isfinite(result["grad_norm"])


class SkippedSteps:
    """Counts skipped steps by model.

    Args:
        most: skipped steps in a row, of one model, that a run survives.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row: Counter[str] = Counter()
        self._of_batch: Counter[str] = Counter()

    def note(self, model: str, result: Mapping[str, Any]) -> None:
        """Take note of one optimizer step of ``model`` that returned ``result``.

        Raises:
            ArcticError: one more step in a row was skipped than the run survives.
        """
        if not is_skipped(result):
            self._in_a_row[model] = 0
            return
        self._in_a_row[model] += 1
        self._of_batch[model] += 1
        number = self._in_a_row[model]
        logger.warning(
            "an optimizer step of %s was skipped, %d in a row: its gradient's norm is %s",
            model,
            number,
            result["grad_norm"],
        )
        if number > self._most:
            raise ArcticError(
                f"{number} optimizer steps of {model} in a row were skipped, since the norm of the gradient was "
                f"{result['grad_norm']}: the weights are those before them, and {SETTING}={self._most} allows no "
                "more; lower the learning rate, look at the batch's advantages and log-probs, or raise the setting"
            )

    def take_metrics(self) -> dict[str, float]:
        """``{model}/skipped_steps`` since the last call, for models that skipped one."""
        metrics = {f"{model}/skipped_steps": float(count) for model, count in self._of_batch.items()}
        self._of_batch.clear()
        return metrics
