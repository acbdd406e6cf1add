"""Whether a checkpoint is of a run of the same kind as the one that would go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .checkpoint import Manifest

ASYNCHRONOUS_STATE = "fully_async_state.pt"
"""What SkyRL's fully asynchronous trainer adds to a checkpoint, and cannot do without."""


def kind_problems(folder: Path, manifest: Manifest, cfg: Any) -> Iterator[str]:
    """What a run would lack of a checkpoint, or lose from it, a line each.

    Args:
        folder: the checkpoint's, for the messages.
        manifest: what ``read_manifest`` gives of it.
        cfg: the config of the run that would go on from it.
    """
    afresh = "or start afresh with trainer.resume_mode=null"
    critic, was_asynchronous = cfg.trainer.critic.model.path, ASYNCHRONOUS_STATE in manifest.files
    if _holds(manifest, "critic") and not critic:
        yield (
            f"the checkpoint {folder} holds a critic, and this run has none: write trainer.critic.model.path, {afresh}"
        )
    if critic and not _holds(manifest, "critic"):
        yield (
            f"the checkpoint {folder} holds no critic, and this run trains one: leave trainer.critic.model.path out, "
            f"{afresh}"
        )
    if was_asynchronous != cfg.trainer.fully_async.enabled:
        was, now = ("an asynchronous", "synchronous") if was_asynchronous else ("a synchronous", "asynchronous")
        yield (
            f"the checkpoint {folder} is of {was} run, and this one is {now}, which goes through the prompts in "
            f"another order: write trainer.fully_async.enabled={str(was_asynchronous).lower()}, {afresh}"
        )


def _holds(manifest: Manifest, part: str) -> bool:
    return part in manifest.parts or any(name.startswith(f"{part}/") for name in manifest.files)
