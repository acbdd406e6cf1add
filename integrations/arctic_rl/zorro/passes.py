"""The two passes of attention over a layout, and a loop over their parts for back ends that take one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .layout import SharedSegments

__all__ = ["AttentionPass", "Block", "blocks", "cross_pass", "own_pass"]

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


@dataclass(frozen=True)
class Block:
    """Queries and keys that a back end can take at once."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0 to i of the block."""
    visible: torch.Tensor | None
    """[queries, keys] bool instead of ``causal``; None = every key."""


def own_pass(segments: SharedSegments) -> AttentionPass:
    """Every segment over itself, causal: queries and keys are all T tokens."""
    spans = list(zip(segments.borders[:-1], segments.borders[1:], strict=True))
    return AttentionPass(
        problems=tuple((start, stop, start, stop, 0) for start, stop in spans),
        joined=tuple((start, stop, start, stop) for start, stop in spans),
        causal=True,
        cu_q=segments.cu_segments,
        cu_k=segments.cu_segments,
        max_q=segments.longest_segment,
        max_k=segments.longest_segment,
    )


def cross_pass(segments: SharedSegments) -> AttentionPass | None:
    """Every suffix over the whole of its prefix: queries from ``suffix_start`` on, keys up to the last such prefix.

    None where no row has a suffix.
    """
    if not segments.suffix_prefix:
        return None
    first, prefix = segments.suffix_start, segments.prefix_borders
    suffix_spans = zip(
        segments.borders[-len(segments.suffix_prefix) - 1 : -1],
        segments.borders[1:][-len(segments.suffix_prefix) :],
        strict=True,
    )
    problems = tuple(
        (start - first, stop - first, prefix[number], prefix[number + 1], prefix[number + 1] - prefix[number])
        for number, (start, stop) in zip(segments.suffix_prefix, suffix_spans, strict=True)
    )
    suffixes = [border - first for border in segments.suffix_borders]
    return AttentionPass(
        problems=problems,
        joined=tuple(zip(suffixes[:-1], suffixes[1:], prefix[:-1], prefix[1:], strict=True)),
        causal=False,
        cu_q=segments.cu_suffixes,
        cu_k=segments.cu_prefixes,
        max_q=segments.most_suffix_tokens,
        max_k=segments.longest_prefix,
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
