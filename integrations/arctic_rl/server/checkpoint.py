"""A training rank's share of a checkpoint: float32 weights, optimizer state and the rank's random state.

``rank-00000.json`` lists what ``rank-00000-00000.safetensors`` ... hold, with the size and SHA-256 of each file, and
is written last. A share is made of pieces: a run of entries of one flattened parameter, with the optimizer's moments
of them. With ZeRO stages 2 and 3 the pieces are what the rank owns anyway, so that nothing is gathered; with stage 0,
where every rank holds everything, the parameters are dealt out. Since pieces have names and places, another number of
ranks, another ZeRO stage or another dtype of training can take a checkpoint up.

DeepSpeed's own ``save_checkpoint`` is not used: it writes pickles, the weights twice, and its ranks wait for each
other, so that one which cannot write leaves the others waiting.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT = 1
FILE_BYTES = 2**30
"""Pieces are collected in memory up to this many bytes, then written to one file."""
MOST_PROBLEMS = 40
"""Lines about tensors that do not fit a model, of which a large one has thousands."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every weight."""
_WEIGHT = "weight"


@dataclass
class Piece:
    """A run of entries of one flattened parameter, as an engine holds it."""

    name: str
    """The parameter's name in the Hugging Face model."""
    shape: tuple[int, ...]
    """The whole parameter's."""
    start: int
    """First entry, in the flattened parameter."""
    values: dict[str, torch.Tensor]
    """``weight`` and, once a step was taken, the moments: float32 [n] views of the engine's own memory."""
    step: torch.Tensor | None
    """AdamW's count of steps, its own tensor; None before the first."""


def share_name(rank: int) -> str:
    """The file that lists a rank's share."""
    return f"rank-{rank:05d}.json"


def engine_pieces(engine: Any, optimizer: torch.optim.Optimizer, zero_stage: int, *, allocate: bool) -> list[Piece]:
    """What this rank's engine holds of the parameters that are trained, without the padding behind them.

    Args:
        engine: a DeepSpeed engine.
        optimizer: the AdamW that it steps.
        zero_stage: 0 to 3.
        allocate: make moments that are not there yet, all zero.
    """
    if allocate:
        for master in _masters(engine, optimizer, zero_stage):
            _allocate(optimizer, master)
    if zero_stage == 0:
        return _replicated_pieces(engine, optimizer)
    return list(_flat_pieces(engine, optimizer) if zero_stage in (1, 2) else _partitioned_pieces(engine, optimizer))


def _trained(engine: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, value) for name, value in engine.module.named_parameters() if value.requires_grad]


def _masters(engine: Any, optimizer: torch.optim.Optimizer, zero_stage: int) -> list[torch.Tensor]:
    """The float32 tensors that the optimizer steps."""
    if zero_stage == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [master for group in optimizer.param_groups for master in group["params"]]


def _allocate(optimizer: torch.optim.Optimizer, master: torch.Tensor) -> None:
    import torch

    state = optimizer.state[master]
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        state.update({key: torch.zeros_like(master) for key in MOMENTS})


def _replicated_pieces(engine: Any, optimizer: torch.optim.Optimizer) -> list[Piece]:
    masters = _masters(engine, optimizer, 0)
    pieces = []
    for (name, parameter), master in zip(_trained(engine), masters, strict=True):
        state = optimizer.state.get(master, {})
        values = {_WEIGHT: master, **{key: state[key] for key in MOMENTS if key in state}}
        views = {key: value.detach().view(-1) for key, value in values.items()}
        pieces.append(Piece(name, tuple(parameter.shape), 0, views, state.get("step")))
    return pieces


def _flat_pieces(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    for name, parameter in _trained(engine):
        mapping = parameter._hp_mapping
        if mapping is None:
            continue
        master = optimizer.param_groups[mapping.param_group_index]["params"][0]
        state = optimizer.state.get(master, {})
        values = {_WEIGHT: master, **{key: state[key] for key in MOMENTS if key in state}}
        place = mapping.hp_fragment_address
        views = {key: value.detach().narrow(0, place.start, place.numel) for key, value in values.items()}
        yield Piece(name, tuple(parameter.shape), mapping.lp_fragment_address.start, views, state.get("step"))


def _partitioned_pieces(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    import torch.distributed
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    states = [optimizer.state[master] for master in _masters(engine, optimizer, 3) if master in optimizer.state]
    step = next((state["step"] for state in states if "step" in state), None)
    rank = torch.distributed.get_rank()
    for name, parameter in _trained(engine):
        size = parameter.ds_tensor.numel()
        kept = min(size, parameter.ds_numel - rank * size)
        if kept <= 0:
            continue
        values = {_WEIGHT: safe_get_local_fp32_param(parameter)}
        if step is not None:
            values |= {key: safe_get_local_optimizer_state(parameter, key) for key in MOMENTS}
        views = {key: value.detach()[:kept] for key, value in values.items()}
        yield Piece(name, tuple(parameter.ds_shape), rank * size, views, step)


def reference_pieces(module: torch.nn.Module) -> list[Piece]:
    """All parameters of a model that is not trained, in its dtype."""
    return [
        Piece(name, tuple(value.shape), 0, {_WEIGHT: value.detach().view(-1)}, None)
        for name, value in module.named_parameters()
    ]


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are part of a model's ``state_dict``."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, child in module.named_modules()
        for name, value in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }


def refresh_model(engine: Any, optimizer: torch.optim.Optimizer, zero_stage: int) -> None:
    """Bring the weights that the model computes with to the float32 ones; every rank must call it."""
    import torch
    from deepspeed.utils import safe_get_local_fp32_param

    if zero_stage in (1, 2):
        engine.optimizer.update_lp_params()
        return
    with torch.no_grad():
        if zero_stage == 0:
            for (_, parameter), master in zip(_trained(engine), _masters(engine, optimizer, 0), strict=True):
                if parameter is not master:
                    parameter.copy_(master)
            return
        engine.optimizer.checkpoint_event_prologue()
        for _, parameter in _trained(engine):
            parameter.ds_tensor.copy_(safe_get_local_fp32_param(parameter))
        engine.optimizer.checkpoint_event_epilogue()


def resume_schedule(scheduler: Any, steps: int) -> None:
    """Put a schedule that depends on the count of steps alone behind ``steps`` of them."""
    scheduler.last_epoch = steps
    scheduler._step_count = steps + 1
    rates = scheduler.get_lr()
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def write_share(
    directory: str | os.PathLike,
    pieces: list[Piece],
    *,
    rank: int,
    world_size: int,
    replicated: bool,
    buffers: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a rank's share below ``directory``, which is made.

    Args:
        pieces: what the engine holds.
        replicated: whether every rank holds all pieces, of which this one then writes each ``world_size``-th.
        buffers: persistent buffers of the model; rank 0 writes them.
        facts: more values for the list, such as the random state.
        file_bytes: see ``FILE_BYTES``.

    Raises:
        CheckpointError: the share could not be written, with the system's reason.
    """
    from safetensors import SafetensorError

    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = _Writer(folder, f"rank-{rank:05d}", file_bytes)
        entries = [writer.add(piece) for piece in (pieces[rank::world_size] if replicated else pieces)]
        writer.flush()
        written = buffers if rank == 0 else {}
        buffer_file = writer.write(f"rank-{rank:05d}-buffers.safetensors", dict(written)) if written else None
        listing = {
            "format": FORMAT,
            "rank": rank,
            "world_size": world_size,
            **facts,
            "buffers": buffer_file,
            "buffer_names": list(written),
            "pieces": entries,
            "files": writer.files,
        }
        write_file(folder / share_name(rank), json.dumps(listing))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"rank {rank} could not write its share of the checkpoint below {folder}: {error}; make room there, or "
            "give the run another trainer.ckpt_path"
        ) from error


class _Writer:
    def __init__(self, folder: Path, prefix: str, file_bytes: int) -> None:
        self._folder = folder
        self._prefix = prefix
        self._file_bytes = file_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._count = 0
        self.files: dict[str, dict[str, Any]] = {}

    def add(self, piece: Piece) -> dict[str, Any]:
        """Take a piece; returns its line of the list."""
        nbytes = sum(value.numel() * value.element_size() for value in piece.values.values())
        if self._held and self._held_bytes + nbytes > self._file_bytes:
            self.flush()
        for key, value in piece.values.items():
            self._held[f"{key}/{piece.name}"] = value.cpu()
        self._held_bytes += nbytes
        return {
            "name": piece.name,
            "shape": list(piece.shape),
            "start": piece.start,
            "count": piece.values[_WEIGHT].numel(),
            "values": list(piece.values),
            "step": None if piece.step is None else float(piece.step),
            "file": self._next_file(),
        }

    def flush(self) -> None:
        if self._held:
            self.write(self._next_file(), self._held)
            self._held = {}
            self._held_bytes = 0
            self._count += 1

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> str:
        from safetensors.torch import save_file

        path = self._folder / name
        save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, path)
        sync_file(path)
        self.files[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        return name

    def _next_file(self) -> str:
        return f"{self._prefix}-{self._count:05d}.safetensors"


def write_file(path: Path, text: str) -> None:
    """Write a text file and bring it to the disk."""
    path.write_text(text, encoding="utf-8")
    sync_file(path)


def sync_file(path: str | os.PathLike) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_shares(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """The lists of all ranks' shares, in the order of ranks.

    Raises:
        CheckpointError: one is missing or cannot be read.
    """
    folder = Path(directory)
    shares: list[dict[str, Any]] = []
    count = 1
    while len(shares) < count:
        path = folder / share_name(len(shares))
        try:
            share = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"the checkpoint lacks {path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"the checkpoint's {path} is damaged: {error}") from error
        if share["format"] != FORMAT:
            raise CheckpointError(f"the checkpoint's {path} has format {share['format']}, this code reads {FORMAT}")
        count = share["world_size"]
        shares.append(share)
    return shares


def size_problems(directory: str | os.PathLike) -> list[str]:
    """Files of the shares that are missing or have another size than was written, a line each."""
    folder = Path(directory)
    problems = []
    for share in read_shares(folder):
        for name, facts in share["files"].items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                problems.append(f"{folder / name}: {error.strerror}")
                continue
            if size != facts["bytes"]:
                problems.append(f"{folder / name}: {size} bytes, {facts['bytes']} were written")
    return problems


def digest_problems(directory: str | os.PathLike, *, rank: int, world_size: int) -> list[str]:
    """Files among each ``world_size``-th whose content is not what was written, a line each.

    All ranks together read every byte once, at about 1.8 GiB/s of SHA-256 a core.
    """
    folder = Path(directory)
    files = [(folder / name, facts) for share in read_shares(folder) for name, facts in share["files"].items()]
    return [
        f"{path}: its content is not what was written (SHA-256)"
        for path, facts in files[rank::world_size]
        if file_digest(path) != facts["sha256"]
    ]


def check_shares(problems: list[list[str]]) -> None:
    """Refuse shares in which the ranks have found damage.

    Raises:
        CheckpointError: with every damaged file, a line each.
    """
    lines = [line for of_rank in problems for line in of_rank]
    if lines:
        raise CheckpointError("the checkpoint is damaged, and nothing was loaded:\n- " + "\n- ".join(lines))


def check_fit(
    directory: str | os.PathLike, *, shapes: Mapping[str, tuple[int, ...]], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Hold the shares of all ranks against a model.

    Args:
        directory: where the shares are.
        shapes: every trained parameter of the model, by name.
        buffers: the model's persistent buffers.

    Raises:
        CheckpointError: the checkpoint is of another model, or has gaps; with what differs, a line each.
    """
    shares = read_shares(directory)
    problems = _fit_problems(_saved_pieces(shares), shapes)
    saved_buffers = set(shares[0]["buffer_names"])
    if saved_buffers != set(buffers):
        problems.append(f"its buffers are {sorted(saved_buffers)}, the model's {sorted(buffers)}")
    if problems:
        shown, more = problems[:MOST_PROBLEMS], len(problems) - MOST_PROBLEMS
        lines = shown + ([f"and {more} more"] if more > 0 else [])
        raise CheckpointError(f"the checkpoint {directory} does not fit the model:\n- " + "\n- ".join(lines))


def load_pieces(directory: str | os.PathLike, pieces: list[Piece], buffers: Mapping[str, torch.Tensor]) -> None:
    """Fill an engine's pieces, whose moments are allocated, from the shares of all ranks.

    Args:
        directory: where the shares are; ``digest_problems`` and ``check_fit`` found nothing.
        pieces: what this rank's engine holds, written in place.
        buffers: the model's persistent buffers, written in place.

    Raises:
        CheckpointError: parameters that share memory here have taken different counts of optimizer steps.
    """
    from contextlib import ExitStack

    shares = read_shares(directory)
    saved = _saved_pieces(shares)
    steps = _steps(pieces, saved)
    with ExitStack() as stack:
        files = _Files(Path(directory), stack)
        for name, buffer in buffers.items():
            buffer.copy_(files.slice(shares[0]["buffers"], name)[...])
        for piece in pieces:
            if piece.step is not None:
                piece.step.fill_(steps[id(piece.step)])
            for entry in saved[piece.name]:
                _copy_overlap(files, entry, piece)


def _saved_pieces(shares: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    saved: dict[str, list[dict[str, Any]]] = {}
    for share in shares:
        for entry in share["pieces"]:
            saved.setdefault(entry["name"], []).append(entry)
    return saved


def _fit_problems(saved: Mapping[str, list[dict[str, Any]]], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = [f"it has no {name}" for name in shapes if name not in saved]
    for name, entries in saved.items():
        if name not in shapes:
            problems.append(f"the model has no {name}")
        elif list(shapes[name]) != entries[0]["shape"]:
            problems.append(f"{name} has shape {entries[0]['shape']}, the model's is {list(shapes[name])}")
        elif not _covers(entries, math.prod(shapes[name])):
            problems.append(f"{name} is not whole")
    return problems


def _covers(entries: list[dict[str, Any]], count: int) -> bool:
    end = 0
    for entry in sorted(entries, key=lambda entry: entry["start"]):
        if entry["start"] != end:
            return False
        end += entry["count"]
    return end == count


def _steps(pieces: list[Piece], saved: Mapping[str, list[dict[str, Any]]]) -> dict[int, float]:
    """AdamW's count of steps by the identity of the tensor that takes it; many pieces can share one."""
    steps: dict[int, float] = {}
    for piece in pieces:
        for entry in saved[piece.name] if piece.step is not None else ():
            step = entry["step"] or 0.0
            if steps.setdefault(id(piece.step), step) != step:
                raise CheckpointError(
                    f"{piece.name} has taken {step:.0f} optimizer steps, weights beside it in memory "
                    f"{steps[id(piece.step)]:.0f}: only trainer.arctic_rl.zero_stage=0 can go on from there"
                )
    return steps


class _Files:
    """Safetensors files, each mapped once."""

    def __init__(self, folder: Path, stack: Any) -> None:
        self._folder = folder
        self._stack = stack
        self._open: dict[str, Any] = {}

    def slice(self, file: str, key: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file].get_slice(key)


def _copy_overlap(files: _Files, entry: dict[str, Any], piece: Piece) -> None:
    start = max(entry["start"], piece.start)
    end = min(entry["start"] + entry["count"], piece.start + piece.values[_WEIGHT].numel())
    if start >= end:
        return
    for key in entry["values"]:
        values = files.slice(entry["file"], f"{key}/{piece.name}")[start - entry["start"] : end - entry["start"]]
        piece.values[key][start - piece.start : end - piece.start].copy_(values)
