"""Folders that are whole or not there: written aside, verified, renamed.

A checkpoint is ``<ckpt_path>/global_step_<n>``. Everything in it is written below a folder whose name begins with
``.saving-``; then ``manifest.json`` lists each file with its size and SHA-256 (files of a rank's share are listed by
the share), the folder is renamed, and last ``latest_ckpt_global_step.txt`` is, by a rename too. A process that is
killed at any moment leaves the checkpoints before as they were, and at most a folder to be swept away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ArcticError, CheckpointError
from .server.checkpoint import file_digest, read_shares, share_name, size_problems, sync_file, write_file

LATEST_NAME = "latest_ckpt_global_step.txt"
MANIFEST_NAME = "manifest.json"
STEP_PREFIX = "global_step_"
FORMAT = 1
_ASIDE = ".saving-"
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    """Batches that were trained on."""
    saved_at: float
    """Seconds since 1970."""
    parts: tuple[str, ...]
    """Subfolders that hold the shares of training ranks, such as ``policy``."""
    files: dict[str, dict[str, Any]]
    """Size and SHA-256 of every other file, by its path in the folder."""


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` in which to make a folder of that name; renamed to it at the end.

    What was at ``target`` before stays until the new one is whole. Whatever else was made there goes beside it.

    Raises:
        CheckpointError: the system refused something, with its reason.
    """
    aside = target.parent / f"{_ASIDE}{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        aside.mkdir(parents=True)
        yield aside
        sync_folders(aside)
        _replace(aside / target.name, target)
        for other in list(aside.iterdir()):
            _replace(other, target.parent / other.name)
        sync_file(target.parent)
    except ArcticError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{target} could not be written: {error}. What was saved before is untouched; make room there, or write "
            "to another folder (trainer.ckpt_path, trainer.export_path)"
        ) from error
    finally:
        _remove(aside)


def _replace(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    replaced = target.parent / f"{_REPLACED}{target.name}-{uuid.uuid4().hex[:8]}"
    target.rename(replaced)
    try:
        new.rename(target)
    except OSError:
        replaced.rename(target)
        raise
    _remove(replaced)


def sweep(folder: Path) -> None:
    """Remove what killed processes left in ``folder``, and bring back what one of them was about to replace.

    Raises:
        CheckpointError: the system refused that, with its reason.
    """
    if not folder.is_dir():
        return
    try:
        for replaced in folder.glob(f"{_REPLACED}*"):
            target = folder / replaced.name.removeprefix(_REPLACED).rpartition("-")[0]
            if target.exists():
                _remove(replaced)
            else:
                replaced.rename(target)
        for aside in folder.glob(f"{_ASIDE}*"):
            _remove(aside)
    except OSError as error:
        raise CheckpointError(f"what a killed run left in {folder} could not be cleared away: {error}") from error


def as_swept(folder: Path) -> Path:
    """Where a checkpoint's folder is before ``sweep`` brings it back, without touching anything."""
    if folder.is_dir():
        return folder
    return next(folder.parent.glob(f"{_REPLACED}{folder.name}-*"), folder)


def _remove(path: Path) -> None:
    """Remove a folder or file; a folder in which an orphan of a killed run still writes is left to the next sweep."""
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folders(folder: Path) -> None:
    """Bring a folder's names, and those of all folders in it, to the disk."""
    for inner, _, _ in os.walk(folder, topdown=False):
        sync_file(inner)


def write_manifest(folder: Path, step: int) -> Manifest:
    """Verify that a folder holds every file that the shares in it list, note all others, and write its manifest.

    Raises:
        CheckpointError: files of a share are missing or have another size: what one rank wrote cannot be seen here.
    """
    parts = tuple(sorted(path.parent.name for path in folder.glob(f"*/{share_name(0)}")))
    listed = set()
    for part in parts:
        problems = size_problems(folder / part)
        if problems:
            raise CheckpointError(
                "the shares of the training ranks are not whole here:\n- "
                + "\n- ".join(problems)
                + "\ntrainer.ckpt_path must be a folder that every node shares."
            )
        listed |= {folder / part / name for share in read_shares(folder / part) for name in share["files"]}
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in listed:
            sync_file(path)
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    manifest = Manifest(step=step, saved_at=time.time(), parts=parts, files=files)
    body = {"format": FORMAT, **vars(manifest)}
    write_file(folder / MANIFEST_NAME, json.dumps({"sha256": _digest(body), "body": body}, indent=1))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: the folder has none, or it is damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        written = json.loads(path.read_bytes())
        body = written["body"]
        intact = written["sha256"] == _digest(body)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this backend, or was not finished: it has no {MANIFEST_NAME}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"the checkpoint's {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's {path} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"the checkpoint's {path} is damaged: its content is not what was written")
    if body["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint's {path} has format {body['format']}, this code reads {FORMAT}")
    return Manifest(body["step"], body["saved_at"], tuple(body["parts"]), body["files"])


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def verify(folder: Path) -> Manifest:
    """Hold a checkpoint against its manifest; the content of the shares is left to the ranks that load them.

    Raises:
        CheckpointError: with every file that is missing or not what was written, a line each.
    """
    manifest = read_manifest(folder)
    problems = []
    for name, facts in manifest.files.items():
        path = folder / name
        try:
            same = path.stat().st_size == facts["bytes"] and file_digest(path) == facts["sha256"]
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if not same:
            problems.append(f"{path}: its content is not what was written")
    if not problems:
        problems = [problem for part in manifest.parts for problem in size_problems(folder / part)]
    if problems:
        others = [path.name for path, _ in checkpoints(folder.parent) if path != folder]
        raise CheckpointError(
            f"the checkpoint {folder} is damaged, and nothing was loaded:\n- "
            + "\n- ".join(problems)
            + f"\nOther checkpoints there: {', '.join(others) or 'none'}; trainer.resume_mode=from_path with "
            "trainer.resume_path takes one of them, trainer.resume_mode=null starts afresh."
        )
    return manifest


def checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints of this backend below ``root``, in the order in which they were saved.

    Folders without a manifest that can be read are somebody else's, or damaged, and are left out.
    """
    found = []
    for folder in root.glob(f"{STEP_PREFIX}*"):
        with contextlib.suppress(CheckpointError):
            found.append((folder, read_manifest(folder)))
    return sorted(found, key=lambda item: item[1].saved_at)


def set_latest(root: Path, step: int) -> None:
    """Write ``latest_ckpt_global_step.txt``; whoever reads it finds the old number or the new one."""
    aside = root / f"{_ASIDE}{LATEST_NAME}-{uuid.uuid4().hex[:8]}"
    try:
        write_file(aside, str(step))
        aside.rename(root / LATEST_NAME)
        sync_file(root)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise CheckpointError(
            f"{root / LATEST_NAME} could not be written: {error}. All checkpoints are whole, and it is as it was: "
            "make room there, or give the run another trainer.ckpt_path"
        ) from error


def latest(root: Path) -> Path | None:
    """The checkpoint to go on from: the one that ``latest_ckpt_global_step.txt`` names.

    Without that file, which a process killed at its first checkpoint leaves, the last one that is whole, else None.

    Raises:
        CheckpointError: the file holds no number, or names a checkpoint that is not there.
    """
    marker = root / LATEST_NAME
    if not marker.is_file():
        whole = checkpoints(root)
        return whole[-1][0] if whole else None
    text = marker.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise CheckpointError(f"{marker} holds {text!r}, not a step: write the step to go on from, or remove the file")
    folder = root / f"{STEP_PREFIX}{int(text)}"
    if not as_swept(folder).is_dir():
        others = ", ".join(path.name for path, _ in checkpoints(root)) or "none"
        raise CheckpointError(
            f"{marker} names {folder.name}, which is not there (there are: {others}): write another step into it, or "
            "remove it"
        )
    return folder


def remove_old(root: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` checkpoints that were saved last, and never the one that is the latest.

    Args:
        root: folder of the checkpoints; only those of this backend count and are removed.
        keep: how many; negative = all.

    Returns:
        The folders that were removed.

    Raises:
        CheckpointError: the system refused that, with its reason.
    """
    if keep < 0:
        return []
    current = latest(root)
    found = [path for path, _ in checkpoints(root)]
    old = [path for path in (found[:-keep] if keep else found) if path != current]
    for path in old:
        doomed = root / f"{_ASIDE}{path.name}-{uuid.uuid4().hex[:8]}"
        try:
            path.rename(doomed)
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be removed: {error}. All checkpoints are whole; let the run write to {root}, or "
                "write trainer.max_ckpts_to_keep=-1"
            ) from error
        _remove(doomed)
    return old
