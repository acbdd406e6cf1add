"""Imported by every process of a run of ``benchmarks.faults``, from that run's folder: hurts one process of the run at
the beginning of a phase, once a checkpoint is there.

``plan.json`` beside this file names ``victim``, ``phase``, ``how`` and ``checkpoints``; ``hurt.json`` says when it
was.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

METHODS = {
    "initialize": "_setups",
    "generate": "generate",
    "forward": "fwd_no_grad",
    "backward": "fwd_bwd",
    "step": "step",
    "sync": "sync_weights",
    "save": "save_checkpoint",
}
"""The built-in backend's method with which a phase begins."""
WORKERS = {"policy": "policy-1", "critic": "critic-0", "ref": "ref-0", "engine": "sampling-0", "core": "sampling-0"}
FOLDER = Path(__file__).parent
DELAY_S = 0.5
"""From the beginning of the phase to the kill; the process stands still meanwhile, so that the phase cannot end."""


async def hurt(backend: Any, victim: str, how: str) -> None:
    """Stop a process of this run, and kill it a moment later unless it is only to be stopped."""
    process_id = await _process_id(backend, victim)
    (FOLDER / "hurt.json").write_text(json.dumps({"process_id": process_id, "at": time.time()}))
    if process_id != os.getpid():
        os.kill(process_id, signal.SIGSTOP)
    if how == "killed":
        timer = threading.Timer(DELAY_S, os.kill, (process_id, signal.SIGKILL))
        timer.daemon = True
        timer.start()


async def _process_id(backend: Any, victim: str) -> int:
    import psutil

    if victim in WORKERS:
        own, *children = await backend._workers.actors[WORKERS[victim]].process_ids.remote()
        if victim != "core":
            return own
        return next(child for child in children if "EngineCore" in " ".join(psutil.Process(child).cmdline()))
    if victim == "trainer":
        return os.getpid()
    raylet = psutil.Process().parent()
    driver = raylet.parent()
    if victim == "gcs":
        return next(child.pid for child in driver.children() if child.name() == "gcs_server")
    return {"raylet": raylet.pid, "driver": driver.pid}[victim]


def install(plan: dict[str, str]) -> None:
    """Let the built-in backend hurt the plan's victim when the plan's phase begins."""
    from integrations.arctic_rl.backends.builtin import BuiltinBackend

    name = METHODS[plan["phase"]]
    begin = getattr(BuiltinBackend, name)
    under_way = False  # many requests may begin before the first of them has hurt anybody

    @functools.wraps(begin)
    async def hurting(self: Any, *args: Any, **keywords: Any) -> Any:
        nonlocal under_way
        early = (
            plan["phase"] != "initialize" and not (Path(plan["checkpoints"]) / "latest_ckpt_global_step.txt").exists()
        )
        if not early and not under_way and not (FOLDER / "hurt.json").exists():
            under_way = True
            work = asyncio.ensure_future(hurt(self, plan["victim"], plan["how"]))
            await work
        return await begin(self, *args, **keywords)

    setattr(BuiltinBackend, name, hurting)


# Not in processes that score: what the backend imports is more than they may hold.
if (FOLDER / "plan.json").exists() and "ray" in sys.modules:
    install(json.loads((FOLDER / "plan.json").read_text()))
