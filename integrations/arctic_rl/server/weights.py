"""Weights handed from a trainer to samplers: a packed file that processes of one node map, and a manifest of it.

``<directory>/weights.bin`` holds the tensors one after the other. It stays and is overwritten by the next version, so
that both sides keep it mapped: fresh pages would cost several times the copy itself. ``manifest.json`` says what is
where; it is removed before the first byte changes and written last, so that a reader sees a whole version or none.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArcticError

if TYPE_CHECKING:
    import torch

MANIFEST_NAME, DATA_NAME = "manifest.json", "weights.bin"
_FORMAT = 2
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model, by its name in the Hugging Face model."""

    name: str
    """Name in the model's ``state_dict``."""
    shape: tuple[int, ...]
    """Full shape, not a partition's."""
    dtype: str
    """Name of the torch dtype, such as ``float32``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        import torch

        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """What one written version of the weights, or a part of it, holds."""

    version: int
    """The policy's weight version."""
    dtype: str
    """Torch dtype that floating-point tensors were cast to."""
    tensors: tuple[TensorSpec, ...]
    """In the order of writing."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and the end of the last one, in bytes."""
        offsets = [0]
        for spec in self.tensors:
            offsets.append(-(-(offsets[-1] + spec.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return self.offsets[-1]


class Segment:
    """A file that is mapped once and used again: best one in shared memory, which other processes map too."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> None:
        """Make the file at least ``size`` bytes long, and give it memory for all of them.

        Raises:
            OSError: the file system is full.
        """
        if self._map is not None and len(self._map) >= size:
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)

    def read(self, size: int) -> None:
        """Map an existing file of at least ``size`` bytes."""
        if self._map is not None and len(self._map) >= size:
            return
        with open(self.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def tensor(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        """A view of the mapped bytes."""
        import torch

        count = math.prod(spec.shape)
        return torch.frombuffer(self._map, dtype=getattr(torch, spec.dtype), count=count, offset=offset).view(
            spec.shape
        )


def weights_root(needed_bytes: int = 0) -> Path:
    """``/dev/shm`` where it is writable and has ``needed_bytes`` free, else the folder for temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= needed_bytes:
        return shared
    return Path(tempfile.gettempdir())


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def declare(named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: str) -> list[TensorSpec]:
    """What sending whole tensors will send, floating-point ones cast to ``dtype``.

    Raises:
        ArcticError: for a name given twice, or an empty tensor.
    """
    specs = [
        TensorSpec(name, tuple(value.shape), dtype if value.is_floating_point() else dtype_name(value.dtype))
        for name, value in named_tensors
    ]
    check_declared(specs)
    return specs


def check_declared(specs: Sequence[TensorSpec]) -> None:
    """Refuse names given twice, and empty tensors: partitioned parameters outside of their gather context."""
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ArcticError(f"weights to send: tensor {spec.name!r} was given twice")
        names.add(spec.name)
        if not math.prod(spec.shape):
            raise ArcticError(
                f"weights to send: tensor {spec.name!r} has shape {spec.shape}; a ZeRO-3 parameter must be declared "
                "with its full shape"
            )


def checked(
    specs: Sequence[TensorSpec], named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """The tensors with what was declared of each.

    Raises:
        ArcticError: for a tensor of another name or shape than declared (a ZeRO-3 parameter outside its gather
            context is empty), one too many or one too few.
    """
    declared = iter(specs)
    for name, tensor in named_tensors:
        spec = next(declared, None)
        if spec is None:
            raise ArcticError(f"weights to send: tensor {name!r} was not declared")
        if (name, tuple(tensor.shape)) != (spec.name, spec.shape):
            raise ArcticError(
                f"weights to send: tensor {name!r} of shape {tuple(tensor.shape)} came where {spec.name!r} of shape "
                f"{spec.shape} was declared; a ZeRO-3 parameter must be gathered while it is sent"
            )
        yield spec, tensor
        del tensor  # else it is held while the next one is gathered
    left = next(declared, None)
    if left is not None:
        raise ArcticError(f"weights to send: tensor {left.name!r} was declared and did not come")


def write_weights(
    specs: Sequence[TensorSpec],
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    directory: str | os.PathLike,
    version: int,
    dtype: str,
    *,
    segment: Segment | None = None,
) -> Path:
    """Write one version of the weights, or a part of it, and return the path of its manifest.

    Args:
        specs: what will come, in that order (``declare``).
        named_tensors: (name, full tensor) pairs. Each tensor is copied before the next pair is asked for, so a
            generator may gather a ZeRO-3 parameter, yield it, and free it again.
        directory: an existing folder, best one in shared memory; what was written there before is replaced.
        version: the policy's weight version.
        dtype: name of the torch dtype that floating-point tensors are cast to, such as ``bfloat16``.
        segment: ``segment_at(directory)`` of an earlier call, whose mapping is used again.

    Raises:
        ArcticError: for a tensor that is not as declared, or a full file system.
    """
    check_declared(specs)
    manifest = Manifest(version, dtype, tuple(specs))
    segment = segment_at(directory) if segment is None else segment
    path = Path(directory) / MANIFEST_NAME
    path.unlink(missing_ok=True)
    try:
        segment.reserve(manifest.nbytes)
        offsets = iter(manifest.offsets)
        for spec, tensor in checked(specs, named_tensors):
            segment.tensor(spec, next(offsets)).copy_(tensor.detach())
            del tensor  # else it is held while the next one is gathered
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"format": _FORMAT, **asdict(manifest)}))
        partial.rename(path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ArcticError(
            f"no room for the weights of version {version}, {manifest.nbytes / 2**20:.0f} MiB, in {str(directory)!r} "
            f"({error}); enlarge it (a container's /dev/shm is 64 MiB by default: docker run --shm-size), or write "
            "trainer.arctic_rl.weight_sync=low_memory"
        ) from error
    return path


def segment_at(directory: str | os.PathLike) -> Segment:
    """The file of tensors in a folder of ``write_weights``."""
    return Segment(Path(directory) / DATA_NAME)


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Read a manifest by its own path or its folder's.

    Raises:
        ArcticError: where there is none, or it has another format.
    """
    path = Path(path)
    path = path / MANIFEST_NAME if path.is_dir() else path
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArcticError(f"no weights at {str(path)!r}: the manifest is missing") from error
    if raw.pop("format", None) != _FORMAT:
        raise ArcticError(f"the manifest {str(path)!r} does not have format {_FORMAT}")
    tensors = tuple(TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"]) for spec in raw["tensors"])
    return Manifest(raw["version"], raw["dtype"], tensors)


def iter_weights(path: str | os.PathLike, *, segment: Segment | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the order of writing; the tensors are views of the mapped file, not to be written to,
    and change with the next version.

    Args:
        path: of the manifest or its folder.
        segment: ``segment_at`` the folder, of an earlier call, whose mapping is used again.
    """
    path = Path(path)
    manifest = read_manifest(path)
    segment = segment_at(path if path.is_dir() else path.parent) if segment is None else segment
    segment.read(manifest.nbytes)
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=False):
        yield spec.name, segment.tensor(spec, offset)


def compare_manifest(manifest: Manifest, expected: Iterable[TensorSpec], dtype: str) -> list[str]:
    """``compare_tensors`` for what a manifest lists."""
    return compare_tensors(manifest.tensors, manifest.dtype, expected, dtype)


def compare_tensors(
    sent: Iterable[TensorSpec], sent_dtype: str, expected: Iterable[TensorSpec], dtype: str
) -> list[str]:
    """Problems that forbid loading tensors into a model that has ``expected`` ones; empty if they fit.

    Args:
        sent: what a trainer declares, each name once.
        sent_dtype: the dtype that its floating-point tensors are cast to.
        expected: each tensor of the model once; dtypes are not compared tensor by tensor.
        dtype: the sampler's dtype, which ``sent_dtype`` must be.
    """
    wanted = {spec.name: spec.shape for spec in expected}
    given = {spec.name: spec.shape for spec in sent}
    problems = [f"unknown tensor {name!r}" for name in given if name not in wanted]
    problems += [f"missing tensor {name!r}" for name in wanted if name not in given]
    problems += [
        f"tensor {name!r} has shape {given[name]}, the model's is {shape}"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    if sent_dtype != dtype:
        problems.append(f"the weights were cast to {sent_dtype}, the sampler holds {dtype}")
    return problems


def model_tensors(
    model_path: str, *, trust_remote_code: bool = False, model_config: Mapping[str, Any] | None = None
) -> tuple[list[TensorSpec], dict[str, str]]:
    """The tensors of a Hugging Face model, from its config alone (built on the meta device, no weights read).

    Args:
        model_config: values in place of those of the model's ``config.json``, by name.

    Returns:
        Each parameter and persistent buffer once, and tied names -> the name they share storage with (for example
        ``lm_head.weight`` -> ``model.embed_tokens.weight`` where the config ties them); tied names are in the
        second result only.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .model_config import load_model_config

    config = load_model_config(model_path, model_config, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    specs = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first_name:
            tied[name] = first_name[id(tensor)]
            continue
        first_name[id(tensor)] = name
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)))
    return specs, tied


def checkpoint_names(model_path: str | os.PathLike) -> set[str] | None:
    """Names in the safetensors headers of a local model folder; None where there is no such file."""
    from safetensors import safe_open

    files = sorted(Path(model_path).glob("*.safetensors"))
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return names if files else None
