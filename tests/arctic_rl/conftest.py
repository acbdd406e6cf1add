import pytest
import torch

from integrations.arctic_rl import devices
from integrations.arctic_rl.backends.loop_thread import LoopThread


@pytest.fixture(autouse=True)
def no_cluster_beside(monkeypatch):
    """What a recipe is told here does not depend on a Ray that something else has started on this machine."""
    monkeypatch.setattr(devices, "gpus_of_running_cluster", lambda address: 0)


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Models of tests are too small for more threads, and those that wait for a busy core cost seconds a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loop():
    """The event loop on which a dispatch calls its backend."""
    thread = LoopThread("dispatch")
    yield thread
    thread.close()
