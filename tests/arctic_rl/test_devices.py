"""Whether a recipe is for GPUs, before it starts or joins a cluster."""

import pytest

from integrations.arctic_rl import devices
from integrations.arctic_rl.devices import gpus_of_running_cluster
from integrations.arctic_rl.skyrl_config import parse_config


@pytest.fixture
def cfg():
    return parse_config(["trainer.logger=console"])


@pytest.mark.parametrize(("gpus", "device"), [([8, 8], "cuda"), ([0, 1], "cuda"), ([0], "cpu"), (None, "cpu")])
def test_the_described_cluster_goes_before_this_machine(cfg, gpus, device):
    cfg.trainer.arctic_rl.cluster_gpus = gpus
    assert devices.device_here(cfg) == device


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_setting_goes_before_all(cfg, device, monkeypatch):
    cfg.trainer.arctic_rl.device = device
    cfg.trainer.arctic_rl.cluster_gpus = [8]
    assert devices.device_here(cfg) == device


def test_the_cluster_that_would_be_joined(cfg, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(devices, "gpus_of_running_cluster", {"head:6379": 16.0}.__getitem__)
    assert devices.device_here(cfg) == "cuda"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no address", "local"])
def test_a_cluster_that_cannot_be_reached_has_none(address, monkeypatch):
    """Ray itself would try for minutes."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert gpus_of_running_cluster(address) == 0
