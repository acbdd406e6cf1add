"""Imported by every process of a run of ``benchmarks.faults``, from that run's folder: hurts processes of the run,
each at the beginning of a phase, once a checkpoint is there.

``plan.json`` beside this file names ``checkpoints`` and ``blows``, each with ``victim``, ``phase`` and ``how``. Every
blow adds a line to ``blows.jsonl``; the engine's recovery from it adds one to ``recoveries.jsonl``, and only then does
the next one fall, behind a newer checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
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
REPLACED = ("engine", "core")
FOLDER = Path(__file__).parent
DELAY_S = 0.5
"""From the beginning of the phase to the kill; the process stands still meanwhile, so that the phase cannot end."""
OWN_DELAY_S = 0.01
"""The same for the process that this runs in, which cannot stand still and still be killed by itself."""
POLL_S = 0.05


class Blows:
    """The blows of a plan, in their order, of which one process of the run deals all."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._blows = list(plan["blows"])
        self._latest = Path(plan["checkpoints"]) / "latest_ckpt_global_step.txt"
        self._step = 0
        self._recovering: asyncio.Future | None = None

    async def fall(self, backend: Any, phase: str) -> None:
        """Deal the next blow if it is due when ``phase`` begins."""
        if not self._blows or self._blows[0]["phase"] != phase:
            return
        if self._recovering is not None and not self._recovering.done():
            return
        if phase != "initialize":
            step = int(self._latest.read_text()) if self._latest.exists() else 0
            if step <= self._step:
                return
            self._step = step
        blow = self._blows.pop(0)  # before anything is awaited: many requests begin at once
        if phase == "initialize" and blow["victim"] == "core":
            self._recovering = asyncio.ensure_future(hurt(backend, blow))  # it begins during the phase
            return
        await hurt(backend, blow)
        if phase != "initialize" and blow["victim"] in REPLACED:
            self._recovering = asyncio.ensure_future(_note_recovery(backend, backend._calls.supervisor.restarts))


async def hurt(backend: Any, blow: dict[str, str]) -> None:
    """Stop a process of this run, and kill it a moment later unless it is only to be stopped."""
    process_id = await _process_id(backend, blow["victim"])
    _add_line("blows.jsonl", blow | {"process_id": process_id, "at": time.time()})
    own = process_id == os.getpid()
    if not own:
        os.kill(process_id, signal.SIGSTOP)
    if blow["how"] == "killed":
        timer = threading.Timer(OWN_DELAY_S if own else DELAY_S, os.kill, (process_id, signal.SIGKILL))
        timer.daemon = True
        timer.start()


async def _note_recovery(backend: Any, restarts: int) -> None:
    while backend._calls.supervisor.restarts == restarts or backend._calls.supervisor.restarting():
        await asyncio.sleep(POLL_S)
    _add_line("recoveries.jsonl", {"at": time.time()})


def _add_line(name: str, line: dict[str, Any]) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


async def _process_id(backend: Any, victim: str) -> int:
    import psutil

    if victim in WORKERS:
        own = (await backend._workers.actors[WORKERS[victim]].process_ids.remote())[0]
        return own if victim != "core" else await _engine_core(psutil.Process(own))
    if victim == "trainer":
        return os.getpid()
    raylet = psutil.Process().parent()
    driver = raylet.parent()
    if victim == "gcs":
        return next(child.pid for child in driver.children() if child.name() == "gcs_server")
    return {"raylet": raylet.pid, "driver": driver.pid}[victim]


async def _engine_core(worker: Any) -> int:
    """vLLM's process under a worker, as soon as it is there and has its name."""
    import psutil

    while True:
        for child in worker.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "EngineCore" in " ".join(child.cmdline()):
                    return child.pid
        await asyncio.sleep(POLL_S)


def install(plan: dict[str, Any]) -> None:
    """Let the built-in backend deal the plan's blows when their phases begin."""
    from integrations.arctic_rl.backends.builtin import BuiltinBackend

    blows = Blows(plan)
    for phase in {blow["phase"] for blow in plan["blows"]}:
        setattr(BuiltinBackend, METHODS[phase], _hurting(getattr(BuiltinBackend, METHODS[phase]), blows, phase))


def _hurting(begin: Any, blows: Blows, phase: str) -> Any:
    @functools.wraps(begin)
    async def hurting(self: Any, *args: Any, **keywords: Any) -> Any:
        await blows.fall(self, phase)
        return await begin(self, *args, **keywords)

    return hurting


# Not in processes that score: what the backend imports is more than they may hold.
if (FOLDER / "plan.json").exists() and "ray" in sys.modules:
    install(json.loads((FOLDER / "plan.json").read_text()))
