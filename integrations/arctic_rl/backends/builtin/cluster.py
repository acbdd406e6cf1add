"""The Ray cluster that workers are placed on."""

from __future__ import annotations

from ...placement import ClusterDescription, Node


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
