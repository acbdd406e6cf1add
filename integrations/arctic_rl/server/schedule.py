"""The learning-rate schedules of ``transformers`` that an optimizer step alone can drive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from .specs import OptimizerSpec

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEDULES", "build_scheduler", "has_end", "schedule_problems", "two_warmups", "warmup_steps"]

_WITH_MINIMUM = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
_WITH_END = (*_WITH_MINIMUM, "polynomial")
_WITHOUT_WARMUP = ("constant",)
_POLYNOMIAL_END = 1e-7
"""Where ``transformers`` lets a polynomial schedule end unless told otherwise."""

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
)
"""Names of schedules that are served. Of the others, ``reduce_lr_on_plateau`` and ``greedy`` need a metric with each
step and ``warmup_stable_decay`` a number of decay steps, which a recipe cannot give."""


def has_end(scheduler: str) -> bool:
    """Whether a schedule ends at a rate that ``min_lr_ratio`` sets."""
    return scheduler in _WITH_END


def schedule_problems(spec: OptimizerSpec) -> Iterator[str]:
    """What cannot be done of a schedule, as far as that is known without its horizon, a line each."""
    name, section = spec.scheduler, spec.section
    if name not in SCHEDULES:
        yield (
            f"{section}.scheduler={name!r}: the optimizer's steps alone do not drive this schedule, or there is no "
            f"such one; write one of {', '.join(SCHEDULES)}"
        )
        return
    if name in _WITH_MINIMUM and spec.min_lr_ratio is None:
        yield f"{section}.scheduler={name}: it needs the rate at its end; write trainer.arctic_rl.min_lr_ratio=0.1"
    if name not in _WITH_END and spec.min_lr_ratio is not None:
        yield (
            f"trainer.arctic_rl.min_lr_ratio={spec.min_lr_ratio}: {section}.scheduler={name} has no such end; "
            f"write one of {', '.join(_WITH_END)}"
        )
    if name in _WITHOUT_WARMUP and spec.lr_warmup_ratio:
        yield (
            f"trainer.arctic_rl.lr_warmup_ratio={spec.lr_warmup_ratio}: {section}.scheduler={name} has no warm-up; "
            "write constant_with_warmup"
        )
    if spec.lr_warmup_ratio == 0 and spec.num_warmup_steps:
        yield two_warmups(spec, "no warm-up")
    if name == "polynomial" and not _end_rate(spec) < spec.lr:
        yield (
            f"{section}.lr={spec.lr}: a polynomial schedule ends at {_end_rate(spec)}, which must be less; write a "
            "larger rate, or trainer.arctic_rl.min_lr_ratio below 1"
        )


def warmup_steps(spec: OptimizerSpec, num_training_steps: int) -> int:
    """Optimizer steps of warm-up, out of ``num_training_steps``.

    Raises:
        UnsupportedError: both a ratio and a number are given, and differ.
    """
    if spec.lr_warmup_ratio is None:
        return spec.num_warmup_steps
    # Half a step up, after rounding off what the product of two decimal numbers is off by.
    steps = math.floor(round(spec.lr_warmup_ratio * num_training_steps, 6) + 0.5)
    if spec.num_warmup_steps not in (0, steps):
        raise UnsupportedError(two_warmups(spec, f"{steps} of the run's {num_training_steps} optimizer steps"))
    return steps


def build_scheduler(optimizer: torch.optim.Optimizer, spec: OptimizerSpec, num_training_steps: int) -> Any:
    """The ``transformers`` schedule of that name over ``num_training_steps`` optimizer steps.

    Raises:
        UnsupportedError: for a schedule, or a setting of it, that is not served.
    """
    from transformers import get_scheduler

    problems = list(schedule_problems(spec))
    if problems:
        raise UnsupportedError("\n".join(problems))
    extra = {}
    if spec.scheduler in _WITH_MINIMUM:
        extra = {"min_lr_rate": spec.min_lr_ratio}
    elif spec.scheduler == "polynomial":
        extra = {"lr_end": _end_rate(spec)}
    return get_scheduler(
        spec.scheduler,
        optimizer,
        num_warmup_steps=warmup_steps(spec, num_training_steps),
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=extra,
    )


def _end_rate(spec: OptimizerSpec) -> float:
    return _POLYNOMIAL_END if spec.min_lr_ratio is None else spec.min_lr_ratio * spec.lr


def two_warmups(spec: OptimizerSpec, meaning: str) -> str:
    """The line that refuses a share and a number of warm-up steps where they differ."""
    return (
        f"trainer.arctic_rl.lr_warmup_ratio={spec.lr_warmup_ratio} means {meaning}, and "
        f"{spec.section}.num_warmup_steps={spec.num_warmup_steps}: leave one of them out"
    )
