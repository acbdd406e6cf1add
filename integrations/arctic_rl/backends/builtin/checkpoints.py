"""Checkpoints of a job, written and read by its ranks; the random states of the engines go with the policy's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...server.checkpoint import check_shares, write_file
from ..turns import Turns
from .calls import Calls
from .weights import Weights
from .workers import Workers

ENGINES_NAME = "engines.json"
"""File of a checkpoint with the random state of each engine."""


async def save(workers: Workers, calls: Calls, turns: Turns, job: str, directory: str) -> None:
    """See ``RemoteBackend.save_checkpoint``."""
    async with turns.turn(job):
        await calls.call_all(workers.names(job), "save_checkpoint", directory)
    if job == "policy":
        states = await calls.call_all(workers.names("sampling"), "random_state")
        write_file(Path(directory) / ENGINES_NAME, json.dumps(states))


async def load(
    workers: Workers, calls: Calls, turns: Turns, weights: Weights, job: str, directory: str
) -> dict[str, Any]:
    """See ``RemoteBackend.load_checkpoint``."""
    names = workers.names(job)
    problems = await calls.call_all(names, "checkpoint_problems", directory)
    check_shares(problems)
    async with weights.may_change(job), turns.turn(job):
        outcome = (await calls.call_all(names, "load_checkpoint", directory))[0]
    if job == "policy":
        outcome["same_engines"] = await set_engines(calls, workers.names("sampling"), Path(directory) / ENGINES_NAME)
    return outcome


async def set_engines(calls: Calls, names: list[str], file: Path) -> bool:
    """Give the engines the random states of as many others; False where there were more or fewer."""
    states = json.loads(file.read_text(encoding="utf-8"))
    if len(states) != len(names):
        return False
    await calls.gather(
        {name: calls.send(name, "set_random_state", of_engine) for name, of_engine in zip(names, states, strict=True)}
    )
    return True
