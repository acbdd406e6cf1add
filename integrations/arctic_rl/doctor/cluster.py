"""Where a run's workers would be, whether they can reach each other, and whether they see the same folders."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import ArcticError
from .machine import Machine

if TYPE_CHECKING:
    from ..placement import ClusterDescription

_CONNECT_S = 2.0
_OF_ONE_MACHINE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs", "zfs")
"""File systems that no other machine sees."""
_FOLDERS = ("trainer.ckpt_path", "trainer.export_path", "trainer.log_path")

Section = tuple[list[str], list[str]]
"""Lines about what was found, and about what stands against a run."""


def cluster_of(cfg: Any, machine: Machine) -> ClusterDescription:
    """``trainer.arctic_rl.cluster_gpus``, or this machine where that is not given."""
    from ..described_placement import planned_cluster
    from ..placement import ClusterDescription, Node

    if cfg.trainer.arctic_rl.cluster_gpus is not None:
        return planned_cluster(cfg)
    return ClusterDescription((Node("this machine", machine.cores, len(machine.gpus)),))


def placement_lines(cfg: Any, machine: Machine) -> Section:
    """The plan of a recipe on ``cluster_of``."""
    from ..devices import device_of
    from ..placement import placement_request, plan_placement
    from ..server_config import server_config

    try:
        cluster = cluster_of(cfg, machine)
        config = server_config(cfg, run_id="", env_vars={}, device=device_of(cfg, cluster.gpus))
        return plan_placement(placement_request(config), cluster).table().splitlines(), []
    except ArcticError as error:
        return ["there is no plan"], str(error).splitlines()
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        # The recipe's problems say so already.
        return [f"cannot be told: {' '.join(str(error).split())}"], []


def port_lines(server_url: str | None = None) -> Section:
    """Whether workers can meet at a port of this machine, and whether what runs elsewhere can be reached.

    Args:
        server_url: of a server over HTTP that the recipe names.
    """
    found, problems = [], []
    address = own_address()
    try:
        _meet(address)
        found.append(f"workers meet at {address}: a port can be opened and reached")
    except OSError as error:
        problems.append(
            f"no port of this machine can be reached at its own address {address} ({error}), where workers meet: give "
            "the host name another address (/etc/hosts), or let a firewall pass"
        )
    for name, place in (("RAY_ADDRESS", os.environ.get("RAY_ADDRESS")), ("trainer.arctic_rl.server_url", server_url)):
        target = _target(place)
        if target is None:
            continue
        try:
            socket.create_connection(target, _CONNECT_S).close()
            found.append(f"{name}={place} can be reached")
        except OSError as error:
            problems.append(f"{name}={place} cannot be reached ({error}): start it, or write another address")
    return found, problems


def own_address() -> str:
    """The address at which other machines, if there are any, reach this one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _meet(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(_CONNECT_S)
        socket.create_connection(server.getsockname(), _CONNECT_S).close()


def _target(place: str | None) -> tuple[str, int] | None:
    """Host and port of ``host:port`` or a URL; None where nothing is named that can be connected to."""
    if place is None or place in ("auto", "local"):
        return None
    parts = urlsplit(place if "//" in place else f"//{place}")
    if parts.hostname is None:
        return None
    return parts.hostname, parts.port or {"https": 443, "http": 80, "ray": 10001}.get(parts.scheme, 6379)


def folder_lines(cfg: Any) -> Section:
    """On which file system what a run writes is, and what of it other nodes would not see."""
    from ..described_placement import planned_cluster
    from ..support.leaves import value_of

    found, problems = [], []
    nodes = 1 if cfg.trainer.arctic_rl.cluster_gpus is None else len(planned_cluster(cfg).nodes)
    for setting in _FOLDERS:
        path = value_of(cfg, setting)
        if "://" in path:
            continue
        kind = file_system(path)
        found.append(f"{setting}={path}: {kind}")
        if nodes > 1 and kind in _OF_ONE_MACHINE:
            problems.append(
                f"{setting}={path}: a folder on {kind} is of this machine alone, and the cluster has {nodes} nodes: "
                "write one that all of them see"
            )
    return found, problems


def file_system(path: str) -> str:
    """The kind of file system that a folder is on, which need not be there yet."""
    import psutil

    at = Path(path).expanduser().absolute()
    mounts = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    return next((mounts[str(folder)] for folder in _upwards(at) if str(folder) in mounts), "unknown")


def _upwards(path: Path) -> Iterator[Path]:
    yield path
    yield from path.parents
