"""A few small groups computed both ways when a model first shares prompts: they have to agree.

A model that is to be trained runs them twice in train mode as well: what it draws at random there, each row would have
to draw for itself.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ArcticError
from ..processors.packing import PackedRows, pack_rows
from .groups import RowGroup
from .layout import SharedRows, share_rows
from .support import SWITCH_OFF

__all__ = ["check_draws", "check_once", "check_rows"]

_CHECKED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Names of the checks that a model has passed."""

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probs, in nats, by the model's dtype; in 16 bits of their standard deviation where that is
above 1 nat. A trained model gives random tokens log-probs of some -15 nats with a deviation of 3, and rounding in its
thirty layers moves them by 0.1 to 0.15 (SmolLM2-135M), so that two right ways of computing may differ by as much;
without their prefix they move by 0.6. What attention itself gets wrong is seen closer by (:mod:`.kernel_check`)."""

_PREFIX = 12
_SUFFIXES = (1, 4, 7)
_OTHER = ((5, (3, 2)), (9, (0,)))


LogProbs = Callable[[SharedRows | PackedRows], torch.Tensor]
"""From laid-out rows to log-probs [b, S], by the model, without gradient."""


def check_once(
    module: Any, logprobs: LogProbs, vocab_size: int, device: torch.device, *, training: bool = False
) -> float | None:
    """:func:`check_rows` the first time that a model is seen in this process, :func:`check_draws` the first time that
    it is about to be trained.

    Returns:
        The mean difference of shared from unshared log-probs, in nats; None if this model has been compared.
    """
    done = _CHECKED.setdefault(module, set())
    difference = None
    if "rows" not in done:
        difference = check_rows(module, logprobs, vocab_size, device)
        done.add("rows")
    if training and "draws" not in done:
        check_draws(module, logprobs, vocab_size, device)
        done.add("draws")
    return difference


def check_rows(module: Any, logprobs: LogProbs, vocab_size: int, device: torch.device) -> float:
    """Compare log-probs of shared and unshared prompts.

    The tokens are random, and the same on every rank, so that ranks stay in step in their collective calls. Train and
    eval mode stay as they were.

    Args:
        module: the model.
        vocab_size: ids are drawn below it.

    Returns:
        The mean difference, in nats.

    Raises:
        ArcticError: the two differ by more than rounding.
    """
    ids, mask, groups = _rows(vocab_size, device)
    shared = share_rows(ids, mask, groups)
    with _mode(module, False):
        once, unshared = logprobs(shared), logprobs(pack_rows(ids, mask))
    mean, largest = _differences(once, unshared, shared)
    tolerance = _tolerance(module, unshared[shared.scored_mask])
    if not mean <= tolerance:
        raise ArcticError(
            f"{type(module).__name__} gives other log-probs where prompts are shared than where they are not, in "
            f"{_dtype(module)}: by {mean:.3g} nats on average (allowed: {tolerance}), {largest:.3g} at most. "
            f"To compute every rollout's prompt separately, {SWITCH_OFF}"
        )
    return mean


def check_draws(module: Any, logprobs: LogProbs, vocab_size: int, device: torch.device) -> None:
    """Look for what is drawn at random in train mode; arguments as of :func:`check_rows`.

    Train and eval mode and random states stay as they were.

    Raises:
        ArcticError: two runs over the same rows differ by more than rounding.
    """
    shared = share_rows(*_rows(vocab_size, device))
    random_states = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with _mode(module, True), random_states, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        mean, _ = _differences(logprobs(shared), logprobs(shared), shared)
    if not mean <= _TOLERANCE[_dtype(module)]:
        raise ArcticError(
            f"{type(module).__name__} draws at random in training, so prompts cannot be shared between rollouts, "
            f"which would each draw for themselves: two runs over the same tokens differ by {mean:.3g} nats on "
            f"average. To compute every rollout's prompt separately, {SWITCH_OFF}"
        )


def _dtype(module: Any) -> torch.dtype:
    return next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())


def _tolerance(module: Any, logprobs: torch.Tensor) -> float:
    """Of the mean difference, for a model that gives these log-probs."""
    tolerance = _TOLERANCE[_dtype(module)]
    return tolerance * max(1.0, logprobs.double().std().item()) if _dtype(module).itemsize == 2 else tolerance


def _differences(one: torch.Tensor, other: torch.Tensor, rows: SharedRows) -> tuple[float, float]:
    """(mean, largest) over the scored tokens, in nats."""
    differences = (one - other).abs()[rows.scored_mask].double()
    return differences.mean().item(), differences.max().item()


@contextmanager
def _mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode of every part, as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, before in modes:
            part.training = before


def _rows(vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[RowGroup]]:
    """A group of three, one of two, and a row alone; ids [6, 19], mask, groups."""
    generator = torch.Generator().manual_seed(0)
    width = _PREFIX + max(_SUFFIXES)
    rows, groups = [], []
    for prefix_length, suffix_lengths in ((_PREFIX, _SUFFIXES), *_OTHER):
        prefix = torch.randint(0, vocab_size, (prefix_length,), generator=generator)
        suffixes = [torch.randint(0, vocab_size, (length,), generator=generator) for length in suffix_lengths]
        groups.append(RowGroup(tuple(range(len(rows), len(rows) + len(suffixes))), prefix_length))
        rows += [torch.cat([prefix, suffix]) for suffix in suffixes]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask] = torch.cat(rows)
    return ids.to(device), mask.to(device), groups
