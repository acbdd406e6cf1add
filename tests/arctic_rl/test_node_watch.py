import subprocess
import sys

import psutil
import pytest
import ray

from integrations.arctic_rl import node_watch
from integrations.arctic_rl.entrypoint import await_task
from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.node_watch import check_node, end_node, node_processes, started_node


@pytest.fixture
def raylet():
    """A child of this process with the name of one of Ray's, and with a child of its own."""
    script = """
import ctypes, subprocess, time
ctypes.CDLL(None).prctl(15, b"raylet")
agent = subprocess.Popen(["sleep", "60"])
print("up", agent.pid, sep="\\n", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    agents = psutil.Process(process.pid).children()
    yield process
    for each in (process, *agents):
        each.kill()
    process.wait()
    process.stdout.close()


def test_a_run_ends_with_a_process_of_the_node_that_it_started(raylet):
    processes = node_processes()
    assert raylet.pid in [process.pid for name, process in processes if name == "raylet"]
    check_node(processes)
    raylet.kill()
    while psutil.Process(raylet.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    with pytest.raises(ArcticError, match=rf"raylet \({raylet.pid}\), was killed"):
        check_node(processes)
    raylet.wait()
    with pytest.raises(ArcticError, match="cannot go on without it"):
        check_node(processes)
    check_node([])


@pytest.mark.parametrize("error", [ray.exceptions.NodeDiedError("gone"), ray.exceptions.RaySystemError("gone")])
def test_what_died_with_a_process_of_the_node_is_not_blamed(raylet, monkeypatch, error):
    def ended(task):
        raylet.kill()
        raylet.wait()
        raise error

    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: (tasks, []))
    monkeypatch.setattr(ray, "get", ended)
    with pytest.raises(ArcticError, match=rf"raylet \({raylet.pid}\), was killed"):
        await_task(object())


def test_a_task_that_died_alone_is_named(monkeypatch):
    def ended(task):
        raise ray.exceptions.WorkerCrashedError

    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: (tasks, []))
    monkeypatch.setattr(ray, "get", ended)
    with pytest.raises(ArcticError, match="the run's own process failed"):
        await_task(object())


def test_agents_that_outlive_their_node_are_ended(raylet, monkeypatch):
    monkeypatch.setattr(node_watch, "NODE_GRACE_S", 0.3)
    agent = int(raylet.stdout.readline())
    node = started_node()
    assert {raylet.pid, agent} <= {process.pid for process in node}
    raylet.kill()
    raylet.wait()
    assert psutil.pid_exists(agent)
    end_node([process for process in node if process.pid in (raylet.pid, agent)])
    assert not psutil.pid_exists(agent) or psutil.Process(agent).status() == psutil.STATUS_ZOMBIE
    end_node([])
