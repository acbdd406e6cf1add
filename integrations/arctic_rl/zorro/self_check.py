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

__all__ = ["check_once", "check_rows"]

_CHECKED: weakref.WeakKeyDictionary[Any, set[bool]] = weakref.WeakKeyDictionary()
"""Whether it was for training, for every model that has been checked."""

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probs, in nats, by the model's dtype. Attention to a wrong token costs a trained model far
more; in 16 bits either way of computing is off by about 0.01 nat."""

_PREFIX = 12
_SUFFIXES = (1, 4, 7)
_OTHER = ((5, (3, 2)), (9, (0,)))


def check_once(
    module: Any,
    logprobs: Callable[[SharedRows | PackedRows], torch.Tensor],
    vocab_size: int,
    device: torch.device,
    *,
    training: bool = False,
) -> float | None:
    """:func:`check_rows` the first time that a model is seen in this process, and the first time to be trained."""
    done = _CHECKED.setdefault(module, set())
    if training in done:
        return None
    difference = check_rows(module, logprobs, vocab_size, device, training=training)
    done |= {training, False}
    return difference


def check_rows(
    module: Any,
    logprobs: Callable[[SharedRows | PackedRows], torch.Tensor],
    vocab_size: int,
    device: torch.device,
    *,
    training: bool = False,
) -> float:
    """Compare log-probs of shared and unshared prompts.

    The tokens are random, and the same on every rank, so that ranks stay in step in their collective calls. Train and
    eval mode and random states stay as they were.

    Args:
        module: the model.
        logprobs: from laid-out rows to log-probs [b, S], by the model, without gradient.
        vocab_size: ids are drawn below it.
        training: also look for what is drawn at random in train mode.

    Returns:
        The mean difference, in nats.

    Raises:
        ArcticError: the two differ by more than rounding, or two runs in train mode do.
    """
    ids, mask, groups = _rows(vocab_size, device)
    shared = share_rows(ids, mask, groups)
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    name = type(module).__name__
    with _mode(module, False):
        mean, largest = _differences(logprobs(shared), logprobs(pack_rows(ids, mask)), shared)
    if not mean <= _TOLERANCE[dtype]:
        raise ArcticError(
            f"{name} gives other log-probs where prompts are shared than where they are not, in "
            f"{dtype}: by {mean:.3g} nats on average (allowed: {_TOLERANCE[dtype]}), {largest:.3g} at most. "
            f"To compute every rollout's prompt separately, {SWITCH_OFF}"
        )
    if training:
        random_states = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with _mode(module, True), random_states, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            drawn, largest = _differences(logprobs(shared), logprobs(shared), shared)
        if not drawn <= _TOLERANCE[dtype]:
            raise ArcticError(
                f"{name} draws at random in training, so prompts cannot be shared between rollouts, which would each "
                f"draw for themselves: two runs over the same tokens differ by {drawn:.3g} nats on average. To "
                f"compute every rollout's prompt separately, {SWITCH_OFF}"
            )
    return mean


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
