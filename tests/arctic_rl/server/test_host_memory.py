"""Free memory of a node, with and without a container's limit."""

import psutil
import pytest
import ray._private.utils as limits

from integrations.arctic_rl.server.host_memory import free_host_memory


def test_a_containers_limit_counts_where_it_is_lower(monkeypatch):
    free = psutil.virtual_memory().available
    assert free_host_memory() == pytest.approx(free, rel=0.5)
    monkeypatch.setattr(limits, "get_cgroup_mem_stats", lambda: (3 * 2**20, 0))
    monkeypatch.setattr(limits, "get_system_memory", lambda: 8 * 2**20)
    assert free_host_memory() == 5 * 2**20
    monkeypatch.setattr(limits, "get_system_memory", lambda: 2**60)
    assert free_host_memory() == pytest.approx(free, rel=0.5)
