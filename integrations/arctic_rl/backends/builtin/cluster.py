"""The Ray cluster that workers are placed on, and this node's folder for what they share."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ...placement import ClusterDescription, Node

RUN_DIRECTORY_PREFIX = "arctic-rl-"


def describe_cluster() -> ClusterDescription:
    """The live nodes of the Ray cluster, this one first."""
    import ray

    here = own_node()
    nodes = [
        Node(
            node["NodeID"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
            node["NodeManagerAddress"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return ClusterDescription(tuple(sorted(nodes, key=lambda node: (node.node_id != here, node.node_id))))


def own_node() -> str:
    """Ray's id of the node of this process."""
    import ray

    return ray.get_runtime_context().get_node_id()


def run_directory(run_id: str) -> str:
    """A fresh folder in shared memory, or in the temporary folder where there is none.

    Its name holds this process's id; folders whose process is gone, left by a run that was killed, are removed.
    """
    import psutil

    base = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    for folder in base.glob(f"{RUN_DIRECTORY_PREFIX}*"):
        owner = folder.name.removeprefix(RUN_DIRECTORY_PREFIX).split("-", 1)[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{RUN_DIRECTORY_PREFIX}{os.getpid()}-{run_id}-", dir=base)
