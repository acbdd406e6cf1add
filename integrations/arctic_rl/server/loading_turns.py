"""Lets the ranks of a node load their models as the node's memory allows: together, or one after the other."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ..random_state import random_state, set_random_state
from .host_memory import free_host_memory
from .process import RUN_ID_VARIABLE
from .specs import TrainingSpec

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.2
GATE_S = 0.005


def host_bytes(spec: TrainingSpec) -> int:
    """Bytes of a model in float32, read from its config alone; draws no random numbers.

    Raises:
        UnsupportedError: as ``load_model_config``; for a critic as ``value_model_class``.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import meta_device_safe_creation_ops

    from .critic import value_model_class
    from .model_config import load_model_config

    config = load_model_config(spec.model_path, spec.model_config)
    # The attention that the config names may not be installed: models are loaded with another.
    options = {"attn_implementation": "eager"}
    before = random_state()
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            if spec.role == "critic":
                model = value_model_class(type(config), spec.value_head)._from_config(config, **options)
            else:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, **options)
    finally:
        set_random_state(before)
    return 4 * sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def loading_turn(nbytes: int) -> Iterator[None]:
    """Held by a rank while it has a model on the host that it will not keep there.

    A rank has its turn where the node's free memory takes its model and those of all ranks of the run that have
    their turn then: how much of its own such a rank has taken already is not known. A rank whose node has none in its
    turn always has it, so that a model too large for the node fails as it would alone. The turn of a process ends
    with it.

    Args:
        nbytes: of the model.
    """
    begun, told = time.monotonic(), False
    while (turn := _take_turn(nbytes)) is None:
        if not told:
            told = True
            logger.info("waiting until the host has %.1f GiB for this rank to load its model in", nbytes / 2**30)
        time.sleep(LOOK_AGAIN_S)
    if told:
        logger.info("this rank waited %.0f s to load its model", time.monotonic() - begun)
    with closing(turn):
        yield


def _take_turn(nbytes: int) -> socket.socket | None:
    """A turn, until it is closed; None = not now."""
    prefix = _prefix()
    while (gate := _bound(f"{prefix}gate")) is None:
        time.sleep(GATE_S)
    with closing(gate):
        held = _held(f"{prefix}turn-")
        if held and free_host_memory() < nbytes + sum(held):
            return None
        return _bound(f"{prefix}turn-{os.urandom(8).hex()}-{nbytes}")


def _held(prefix: str) -> list[int]:
    """Bytes of the model of each turn on this node, which its name ends with."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as names:
        turns = [line.split()[-1] for line in names if f"@{prefix}" in line]
    return [int(turn.rpartition("-")[2]) for turn in turns]


def _prefix() -> str:
    """What names of the run begin with: a digest, since such a name has at most 107 bytes."""
    run = os.environ.get(RUN_ID_VARIABLE, f"process-{os.getpid()}")
    return f"arctic-rl-{hashlib.sha256(run.encode()).hexdigest()[:32]}-loads-"


def _bound(name: str) -> socket.socket | None:
    """A socket that has taken a name on this node; None where another has it.

    Names of this kind are no files, and are free again when their process ends, however it does.
    """
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taken.bind(f"\0{name}")
    except OSError as error:
        taken.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return taken
