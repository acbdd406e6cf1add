"""Where models run: on GPUs, or on CPUs."""

from __future__ import annotations

from typing import Any, Literal

Device = Literal["cpu", "cuda"]


def device_here(cfg: Any) -> Device:
    """``trainer.arctic_rl.device``; where it is not given, ``cuda`` if this machine has a GPU.

    For what is said of a recipe before there is a cluster. Importing PyTorch takes some seconds.
    """
    import torch

    return device_of(cfg, torch.cuda.device_count())


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
