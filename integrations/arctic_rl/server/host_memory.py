"""Memory of a node that processes may still take."""

from __future__ import annotations


def free_host_memory() -> int:
    """Bytes that are free for new processes: the machine's, or fewer where a container has a limit of its own."""
    import psutil
    from ray._private.utils import estimate_available_memory

    return min(psutil.virtual_memory().available, estimate_available_memory())
