"""Per-token terms to one number whose sum over all micro-batches and ranks does not depend on how rows were split.

Every denominator counts the whole mini-batch over all ranks, never a micro-batch.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UnsupportedError
from .registry import nearest_name

__all__ = ["LOSS_AGG_MODES", "aggregate", "masked_sum"]

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum")
"""verl's names for the reductions, and "sum" for terms that carry their weight already (SkyRL's advantages do)."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of values times mask; a value under a 0 of the mask has no effect, whatever it is."""
    weighted = torch.where(mask != 0, values * mask, 0.0)
    return weighted.sum() if dim is None else weighted.sum(dim=dim)


def aggregate(
    values_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    mode: str,
    meta: Mapping[str, Any],
    *,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """This micro-batch's share of the mini-batch's loss, times ``dp_size``.

    The factor undoes the averaging of gradients over data-parallel ranks: summed over micro-batches and averaged over
    ranks, the result is

        token-mean               sum of all tokens / batch_num_tokens
        seq-mean-token-sum       sum over rows of their sums / global_batch_size
        seq-mean-token-mean      sum over rows of their means / global_batch_size
        seq-mean-token-sum-norm  seq-mean-token-sum / loss_scale_factor (None = response width R of the batch)
        sum                      sum of all tokens

    Args:
        values_BS: [b, S] terms of the tokens.
        mask_BS: [b, S], the effective mask; fractional weights are allowed.
        meta: ``dp_size`` and, as the mode needs them, ``batch_num_tokens`` (sum of the effective mask),
            ``global_batch_size`` (rows) and ``response_len``, all of the whole mini-batch; run_pipeline fills them.

    Raises:
        UnsupportedError: ``mode`` is none of :data:`LOSS_AGG_MODES`.
    """
    if mode not in LOSS_AGG_MODES:
        raise UnsupportedError(
            f"loss_agg_mode={mode!r} is unknown{nearest_name(mode, LOSS_AGG_MODES)}; known: "
            f"{', '.join(LOSS_AGG_MODES)}"
        )
    dp_size = _count(meta, "dp_size", mode)
    if mode == "sum":
        return masked_sum(values_BS, mask_BS) * dp_size
    if mode == "token-mean":
        return masked_sum(values_BS, mask_BS) / _count(meta, "batch_num_tokens", mode) * dp_size
    sums_B = masked_sum(values_BS, mask_BS, dim=1)
    if mode == "seq-mean-token-mean":
        tokens_B = mask_BS.sum(dim=1)
        sums_B = sums_B / torch.where(tokens_B != 0, tokens_B, 1)
    loss = sums_B.sum() / _count(meta, "global_batch_size", mode) * dp_size
    if mode == "seq-mean-token-sum-norm":
        loss = loss / (_count(meta, "response_len", mode) if loss_scale_factor is None else loss_scale_factor)
    return loss


def _count(meta: Mapping[str, Any], name: str, mode: str) -> float:
    if meta.get(name) is None:
        raise ValueError(f"loss_agg_mode={mode!r} needs meta[{name!r}] of the whole mini-batch over all ranks")
    return meta[name] or 1  # 0 only where the whole mini-batch has no token, and so no terms
