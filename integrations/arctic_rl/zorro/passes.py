"""The two passes of attention over a layout, and a loop over their parts for back ends that take one at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["AttentionPass", "Block", "blocks", "packed_pass", "self_pass"]

_WINDOWED_BLOCK = 256
"""Queries of one block where a sliding window needs a mask."""


@dataclass(frozen=True)
class AttentionPass:
    """Independent attention problems over one packed [Tq] of queries and one packed [Tk] of keys."""

    problems: tuple[tuple[int, int, int, int, int], ...]
    """(first query, end, first key, end, position of the first query minus that of the first key) of each."""
    joined: tuple[tuple[int, int, int, int], ...]
    """(first query, end, first key, end) of runs of problems over the same keys: one problem where positions do not
    matter."""
    causal: bool
    """Keys after a query's position are hidden; False = every key comes before every query."""
    cu_q: torch.Tensor
    """Borders of ``joined`` in the queries, int32."""
    cu_k: torch.Tensor
    """Borders of ``joined`` in the keys, int32."""
    max_q: int
    """Most queries of one of ``joined``."""
    max_k: int
    """Most keys of one of ``joined``."""
    num_queries: int
    """Tq."""
    num_keys: int
    """Tk."""


@dataclass(frozen=True)
class Block:
    """Queries and keys that a back end can take at once."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0 to i of the block."""
    visible: torch.Tensor | None
    """[queries, keys] bool instead of ``causal``; None = every key."""


def packed_pass(cu_seqlens: torch.Tensor, max_length: int, num_tokens: int, *, looping: bool) -> AttentionPass:
    """Every segment over itself, from borders alone.

    Args:
        cu_seqlens: [segments + 1], int32.
        max_length: longest segment, in tokens.
        num_tokens: T.
        looping: whether the back end takes one problem at a time, which brings the borders to the host.
    """
    borders = cu_seqlens.tolist() if looping else []
    return self_pass(list(pairwise(borders)), cu_seqlens, max_length, num_tokens)


def self_pass(
    spans: Sequence[tuple[int, int]], cu_seqlens: torch.Tensor, max_length: int, num_tokens: int
) -> AttentionPass:
    """Segments [start, stop) of T tokens over themselves, causal."""
    return AttentionPass(
        problems=tuple((start, stop, start, stop, 0) for start, stop in spans),
        joined=tuple((start, stop, start, stop) for start, stop in spans),
        causal=True,
        cu_q=cu_seqlens,
        cu_k=cu_seqlens,
        max_q=max_length,
        max_k=max_length,
        num_queries=num_tokens,
        num_keys=num_tokens,
    )


def blocks(of_pass: AttentionPass, window: int | None, device: torch.device) -> Iterator[Block]:
    """The blocks of a pass; a query whose window holds none of its problem's keys is in no block.

    Args:
        window: a query sees the keys less than this many positions before it; None = all.
    """
    if window is None or all(ahead + q1 - q0 <= window for q0, q1, _, _, ahead in of_pass.problems):
        for q0, q1, k0, k1 in of_pass.joined:
            yield Block(slice(q0, q1), slice(k0, k1), of_pass.causal, None)
        return
    for q0, q1, k0, k1, ahead in of_pass.problems:
        num_keys = k1 - k0
        if ahead + q1 - q0 <= window:
            yield Block(slice(q0, q1), slice(k0, k1), of_pass.causal, None)
            continue
        end = min(q1 - q0, num_keys - 1 + window - ahead)
        for start in range(0, end, _WINDOWED_BLOCK):
            stop = min(end, start + _WINDOWED_BLOCK)
            low = max(0, ahead + start - window + 1)
            high = min(num_keys, ahead + stop)
            distance = torch.arange(ahead + start, ahead + stop, device=device)[:, None] - torch.arange(
                low, high, device=device
            )
            visible = (distance >= 0) & (distance < window)
            yield Block(slice(q0 + start, q0 + stop), slice(k0 + low, k0 + high), False, visible)
