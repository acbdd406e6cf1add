"""Checkpoints of ``arctic-platform``'s server, which DeepSpeed writes and which tell nothing of the run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...server.checkpoint import write_file
from ...server.specs import OptimizerSpec

__all__ = ["load_outcome", "move_export", "read_facts", "write_facts"]

FACTS_NAME = "arctic_platform.json"
_RESTORED = ("lr", "betas", "weight_decay")
"""Settings that DeepSpeed takes from a checkpoint whatever the run says."""


def _settings(optimizer: OptimizerSpec) -> dict[str, Any]:
    settings = dataclasses.asdict(optimizer)
    del settings["section"]
    return settings | {"betas": list(optimizer.betas)}


def write_facts(directory: str, answer: Mapping[str, Any], optimizer: OptimizerSpec) -> None:
    """Note beside a checkpoint what a run that goes on from it must know.

    Args:
        directory: of the checkpoint.
        answer: the server's, with ``global_step``.
        optimizer: settings of the run.

    Raises:
        CheckpointError: what the server wrote cannot be seen here.
    """
    if not (Path(directory) / "latest").is_file():
        raise CheckpointError(
            f"the checkpoint that arctic-platform's server wrote to {directory} cannot be seen here: "
            "trainer.ckpt_path must be a folder that the server shares"
        )
    facts = {"optimizer_steps": int(answer["global_step"]), "settings": _settings(optimizer)}
    write_file(Path(directory) / FACTS_NAME, json.dumps(facts))


def read_facts(directory: str, optimizer: OptimizerSpec) -> dict[str, Any]:
    """What ``write_facts`` noted.

    Raises:
        CheckpointError: nothing is there, or the run's optimizer has other settings, which the server would not take.
    """
    try:
        facts = json.loads((Path(directory) / FACTS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is no checkpoint of arctic-platform's server: {error}") from error
    now = _settings(optimizer)
    differing = [name for name in _RESTORED if facts["settings"][name] != now[name]]
    if differing:
        raise CheckpointError(
            "\n".join(
                f"{optimizer.section}: {name}={now[name]}, and the checkpoint's {facts['settings'][name]} would be "
                f"taken by arctic-platform's server: write that, or start afresh with trainer.resume_mode=null"
                for name in differing
            )
        )
    return facts


def load_outcome(
    directory: str, facts: Mapping[str, Any], answer: Mapping[str, Any], optimizer: OptimizerSpec
) -> dict[str, Any]:
    """``RemoteBackend.load_checkpoint``'s result: DeepSpeed keeps no random states.

    Raises:
        CheckpointError: the server loaded nothing, which it does not call an error, or another step.
    """
    if int(answer["global_step"]) != facts["optimizer_steps"]:
        raise CheckpointError(
            f"arctic-platform's server loaded step {answer['global_step']} of {directory}, which holds optimizer step "
            f"{facts['optimizer_steps']}: does it share that folder?"
        )
    return {
        "same_ranks": False,
        "same_engines": False,
        "optimizer_steps": facts["optimizer_steps"],
        "saved": facts["settings"],
        "now": _settings(optimizer),
    }


def move_export(written: str | None, directory: str, scratch: str) -> None:
    """Bring the model folder that the server wrote below ``scratch`` to ``directory``, and remove the rest.

    Raises:
        CheckpointError: it cannot be seen here.
    """
    try:
        if written is None or not (Path(written) / "config.json").is_file():
            raise CheckpointError(
                f"the model that arctic-platform's server wrote to {written} cannot be seen here: "
                "trainer.export_path must be a folder that the server shares"
            )
        shutil.move(written, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
