"""Tensors in their order, cut into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from ..weights import TensorSpec


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors of at most ``bucket_bytes`` together; a larger one is a bucket of its own.

    Sizes are those of full tensors in the dtype that is sent.
    """
    buckets: list[list[TensorSpec]] = []
    free = 0
    for spec in specs:
        if not buckets or spec.nbytes > free:
            buckets.append([])
            free = bucket_bytes
        buckets[-1].append(spec)
        free -= spec.nbytes
    return buckets
