"""Weights handed from a trainer to samplers on one node: safetensors files in shared memory and a manifest.

``<directory>/v<version>/`` holds ``weights-00000.safetensors`` ... and ``manifest.json``, which is written last. The
folder is filled under another name and renamed, so that a reader sees a whole version or none.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArcticError

if TYPE_CHECKING:
    import torch

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model, by its name in the Hugging Face model."""

    name: str
    """Name in the model's ``state_dict``."""
    shape: tuple[int, ...]
    """Full shape, not a partition's."""
    dtype: str
    """Name of the torch dtype, such as ``float32``."""


@dataclass(frozen=True)
class Manifest:
    """What one written version of the weights holds."""

    version: int
    """The policy's weight version."""
    dtype: str
    """Torch dtype that floating-point tensors were cast to."""
    tensors: tuple[TensorSpec, ...]
    """In the order of writing."""
    files: tuple[str, ...]
    """Safetensors files, relative to the manifest's folder."""
    file_of: dict[str, str]
    """Name of a tensor -> its file."""


def weights_root(needed_bytes: int = 0) -> Path:
    """``/dev/shm`` where it is writable and has ``needed_bytes`` free, else the folder for temporary files."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= needed_bytes:
        return shared
    return Path(tempfile.gettempdir())


def dtype_name(dtype: "torch.dtype") -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _owned(tensor: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """A contiguous CPU copy that stays valid when the giver frees or overwrites its storage."""
    import torch

    target = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=target, device="cpu").copy_(tensor.detach())


def write_weights(
    named_tensors: Iterable[tuple[str, "torch.Tensor"]],
    directory: str | os.PathLike,
    version: int,
    dtype: str,
    *,
    file_bytes: int = 256 * 2**20,
) -> Path:
    """Write one version of the weights and return the path of its manifest.

    Args:
        named_tensors: (name, full tensor) pairs. Each tensor is copied before the next pair is asked for, so a
            generator may gather a ZeRO-3 parameter, yield it, and free it again.
        directory: an existing folder, best one in shared memory; a version written before under the same number
            is replaced.
        version: the policy's weight version.
        dtype: name of the torch dtype that floating-point tensors are cast to, such as ``bfloat16``.
        file_bytes: tensors are collected in memory up to this many bytes and then written to one file.

    Raises:
        ArcticError: for a name given twice, an empty tensor (a partitioned parameter outside its gather context),
            or a full file system.
    """
    target = Path(directory) / f"v{version}"
    partial = Path(tempfile.mkdtemp(prefix=f".v{version}-", dir=directory))
    try:
        manifest = _write_files(named_tensors, partial, version, dtype, file_bytes)
        (partial / MANIFEST_NAME).write_text(json.dumps({"format": _FORMAT, **asdict(manifest)}))
        if target.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".v{version}-", dir=directory))
            target.rename(replaced / "old")
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors reports a full file system as an error of its own, with the system's text in it
        if os.strerror(errno.ENOSPC) in str(error):
            raise ArcticError(
                f"no room for the weights of version {version} in {str(directory)!r} ({error}); enlarge it (a "
                "container's /dev/shm is 64 MiB by default: docker run --shm-size) or choose another folder"
            ) from error
        raise
    return target / MANIFEST_NAME


def _write_files(
    named_tensors: Iterable[tuple[str, "torch.Tensor"]],
    folder: Path,
    version: int,
    float_dtype: str,
    file_bytes: int,
) -> Manifest:
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, float_dtype)
    specs: dict[str, TensorSpec] = {}
    file_of: dict[str, str] = {}
    files: list[str] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes = 0

    def flush() -> None:
        nonlocal held_bytes
        if held:
            files.append(f"weights-{len(files):05d}.safetensors")
            save_file(held, folder / files[-1])
            file_of.update(dict.fromkeys(held, files[-1]))
            held.clear()
            held_bytes = 0

    for name, tensor in named_tensors:
        if name in specs:
            raise ArcticError(f"weights of version {version}: tensor {name!r} was given twice")
        if tensor.numel() == 0:
            raise ArcticError(
                f"weights of version {version}: tensor {name!r} has shape {tuple(tensor.shape)}; a ZeRO-3 parameter "
                "must be gathered while it is written"
            )
        nbytes = tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())
        if held_bytes + nbytes > file_bytes:
            flush()
        held[name] = _owned(tensor, dtype)
        held_bytes += nbytes
        specs[name] = TensorSpec(name, tuple(tensor.shape), dtype_name(held[name].dtype))
    flush()
    return Manifest(version, float_dtype, tuple(specs.values()), tuple(files), file_of)


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
    return Manifest(raw["version"], raw["dtype"], tensors, tuple(raw["files"]), raw["file_of"])


def iter_weights(path: str | os.PathLike) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield (name, tensor) in the order of writing; the tensors are read-only views of the mapped files."""
    from safetensors import safe_open

    path = Path(path)
    folder = path if path.is_dir() else path.parent
    manifest = read_manifest(path)
    for file in manifest.files:
        with safe_open(folder / file, framework="pt") as opened:
            for spec in manifest.tensors:
                if manifest.file_of[spec.name] == file:
                    yield spec.name, opened.get_tensor(spec.name)


def remove_weights(directory: str | os.PathLike, *, keep: int | None = None) -> None:
    """Remove every written version under ``directory`` but ``keep``; a process that maps a file keeps its view."""
    for folder in Path(directory).glob("v*"):
        if folder.name != f"v{keep}":
            shutil.rmtree(folder)


def compare_manifest(manifest: Manifest, expected: Iterable[TensorSpec], dtype: str) -> list[str]:
    """Problems that forbid loading ``manifest`` into a model that has ``expected`` tensors; empty if it fits.

    Args:
        expected: each tensor of the model once; dtypes are not compared tensor by tensor.
        dtype: the sampler's dtype, which the weights must have been cast to.
    """
    wanted = {spec.name: spec.shape for spec in expected}
    given = {spec.name: spec.shape for spec in manifest.tensors}
    problems = [f"unknown tensor {name!r}" for name in given if name not in wanted]
    problems += [f"missing tensor {name!r}" for name in wanted if name not in given]
    problems += [
        f"tensor {name!r} has shape {given[name]}, the model's is {shape}"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    if manifest.dtype != dtype:
        problems.append(f"the weights were cast to {manifest.dtype}, the sampler holds {dtype}")
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
