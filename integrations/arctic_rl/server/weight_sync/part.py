"""A bucket of weights as bytes, for receivers that cannot map the sender's file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..weights import Manifest, Segment, TensorSpec, checked, segment_at, write_weights

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class PackedPart:
    """Tensors one after the other, as their manifest says; Ray shares the bytes among the workers of a node."""

    manifest: Manifest
    data: np.ndarray
    """uint8."""


@dataclass(frozen=True)
class StoredPart:
    """A ``PackedPart`` in Ray's object store: all receivers are handed one copy of it a node."""

    ref: Any
    """Ray's reference; the store drops the bytes with the last one."""


type Part = str | PackedPart | StoredPart
"""A bucket: the path of its manifest on this node, or its bytes."""


def store(part: str | PackedPart | None) -> Part | None:
    """Put bytes into Ray's object store once, whose copy travels; a path stays as it is."""
    import ray

    return StoredPart(ray.put(part)) if isinstance(part, PackedPart) else part


def pack(
    specs: Sequence[TensorSpec], named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, dtype: str
) -> PackedPart:
    """Copy tensors, as ``write_weights`` does, into bytes."""
    import torch

    manifest = Manifest(version, dtype, tuple(specs))
    data = torch.empty(manifest.nbytes, dtype=torch.uint8)
    offsets = iter(manifest.offsets)
    for spec, tensor in checked(specs, named_tensors):
        offset = next(offsets)
        place = data[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        place.copy_(tensor.detach())
        del tensor  # else it is held while the next one is gathered
    return PackedPart(manifest, data.numpy())


def fetch(part: Part) -> str | PackedPart:
    """The part itself, from Ray's object store if it is there."""
    if not isinstance(part, StoredPart):
        return part
    import ray

    return ray.get(part.ref)


def unpack(part: PackedPart) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs that share the part's memory, not to be written to."""
    import torch

    for spec, offset in zip(part.manifest.tensors, part.manifest.offsets, strict=False):
        place = part.data[offset : offset + spec.nbytes]
        yield spec.name, torch.from_numpy(place).view(getattr(torch, spec.dtype)).view(spec.shape)


def as_file(part: Part, directory: str, segment: Segment | None = None) -> str:
    """The path of a part's manifest on this node; bytes are written to ``directory``."""
    part = fetch(part)
    if isinstance(part, str):
        return part
    manifest = part.manifest
    segment = segment_at(directory) if segment is None else segment
    return str(
        write_weights(manifest.tensors, unpack(part), directory, manifest.version, manifest.dtype, segment=segment)
    )
