"""One small group computed both ways when a model first shares prompts: they have to agree."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArcticError
from ..processors.packing import PackedRows, pack_rows
from .groups import RowGroup
from .layout import SharedRows, share_rows
from .support import SWITCH_OFF

__all__ = ["check_once"]

_CHECKED: weakref.WeakSet = weakref.WeakSet()

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probs, in nats, by the model's dtype. Attention to a wrong token costs a trained model far
more; in 16 bits either way of computing is off by about 0.01 nat."""

_PREFIX = 12
_SUFFIXES = (1, 4, 7)
_OTHER = ((5, (3, 2)), (9, (0,)))


def check_once(
    module: Any, logprobs: Callable[[SharedRows | PackedRows], torch.Tensor], vocab_size: int, device: torch.device
) -> float | None:
    """Compare log-probs of shared and unshared prompts the first time that a model is seen in this process.

    The tokens are random, and the same on every rank, so that ranks stay in step in their collective calls.

    Args:
        module: the model.
        logprobs: from laid-out rows to log-probs [b, S], by the model, without gradient.
        vocab_size: ids are drawn below it.

    Returns:
        The mean difference, in nats; None if this model has been checked.

    Raises:
        ArcticError: the two differ by more than rounding.
    """
    if module in _CHECKED:
        return None
    ids, mask, groups = _rows(vocab_size, device)
    shared = share_rows(ids, mask, groups)
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    one, other = logprobs(shared), logprobs(pack_rows(ids, mask))
    differences = (one - other).abs()[shared.scored_mask].double()
    mean, largest = differences.mean().item(), differences.max().item()
    if not mean <= _TOLERANCE[dtype]:
        raise ArcticError(
            f"{type(module).__name__} gives other log-probs where prompts are shared than where they are not, in "
            f"{dtype}: by {mean:.3g} nats on average (allowed: {_TOLERANCE[dtype]}), {largest:.3g} at most. "
            f"To compute every rollout's prompt separately, {SWITCH_OFF}"
        )
    _CHECKED.add(module)
    return mean


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
