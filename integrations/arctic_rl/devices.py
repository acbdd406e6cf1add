"""Where models run: on GPUs, or on CPUs."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
_CONNECT_S = 5.0


def device_here(cfg: Any) -> Device:
    """``trainer.arctic_rl.device``; where it is not given, ``cuda`` if a GPU is known of.

    For what is said of a recipe before it starts or joins a cluster: the GPUs are those of
    ``trainer.arctic_rl.cluster_gpus``, else this machine's, else those of the Ray cluster that the run would join,
    whose head has often none itself. Importing PyTorch takes some seconds.
    """
    return device_of(cfg, _gpus_here(cfg.trainer.arctic_rl.cluster_gpus))


def device_of_cluster(cfg: Any) -> Device:
    """``trainer.arctic_rl.device``; where it is not given, ``cuda`` if the Ray cluster has a GPU."""
    import ray

    return device_of(cfg, ray.cluster_resources().get("GPU", 0))


def device_of(cfg: Any, gpus: float) -> Device:
    """``trainer.arctic_rl.device``; where it is not given, ``cuda`` if there is a GPU, or the server needs some."""
    asked = cfg.trainer.arctic_rl.device
    if asked is not None:
        return asked
    if cfg.trainer.arctic_rl.backend == "arctic-platform":
        return "cuda"
    return "cuda" if gpus else "cpu"


def _gpus_here(described: list[int] | None) -> float:
    if described is not None:
        return sum(described)
    import ray
    import torch

    if torch.cuda.device_count():
        return torch.cuda.device_count()
    if ray.is_initialized():
        return ray.cluster_resources().get("GPU", 0)
    return gpus_of_running_cluster(os.environ.get("RAY_ADDRESS"))


@functools.cache
def gpus_of_running_cluster(address: str | None) -> float:
    """GPUs of the Ray cluster that ``ray.init()`` would join; 0 where it would start one, or cannot reach it.

    Args:
        address: the environment's ``RAY_ADDRESS``; None = the cluster that was started on this machine, if any.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    if address is not None and "://" in address:
        return 0
    try:
        found = canonicalize_bootstrap_address(address)
        if found is None:
            return 0
        host, port = found.rsplit(":", 1)
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()  # Ray itself tries for minutes
        ray.init(address=found, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError):
        return 0  # the run itself says why
    try:
        return ray.cluster_resources().get("GPU", 0)
    finally:
        ray.shutdown()
