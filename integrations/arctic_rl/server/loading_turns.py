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

from .host_memory import free_host_memory
from .process import RUN_ID_VARIABLE
from .specs import TrainingSpec

logger = logging.getLogger(__name__)

MOST = 64
"""Turns of a node at a time."""
LOOK_AGAIN_S = 0.2
GATE_S = 0.005


def host_bytes(spec: TrainingSpec) -> int:
    """Bytes of a model in float32, read from its config alone.

    Raises:
        UnsupportedError: as ``load_model_config``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .model_config import load_model_config

    config = load_model_config(spec.model_path, spec.model_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    return 4 * sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def loading_turn(nbytes: int) -> Iterator[None]:
    """Held by a rank while it has a model on the host that it will not keep there.

    A rank has its turn where the node's free memory takes such a model once for it and once for each rank of the run
    that has its turn then: how much of its own that one has taken already is not known. A rank whose node has none
    in its turn always has it, so that a model too large for the node fails as it would alone. The turn of a process
    ends with it.

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
    while (gate := _bound("gate")) is None:
        time.sleep(GATE_S)
    with closing(gate):
        free = [place for number in range(MOST) if (place := _bound(str(number))) is not None]
        held = MOST - len(free)
        turn = free.pop() if free and (held == 0 or free_host_memory() >= nbytes * (held + 1)) else None
        for place in free:
            place.close()
        return turn


def _bound(name: str) -> socket.socket | None:
    """A socket that has taken a name of the run on this node; None where another process has it.

    Names of this kind are no files, and are free again when their process ends, however it does.
    """
    run = os.environ.get(RUN_ID_VARIABLE, f"process-{os.getpid()}")
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A digest, since such a name has at most 107 bytes.
        taken.bind(f"\0arctic-rl-{hashlib.sha256(run.encode()).hexdigest()[:32]}-loads-{name}")
    except OSError as error:
        taken.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return taken
