"""The fault matrix' own judgement, and that a blow falls when it is meant to."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import fault_injection
from benchmarks.faults import HOW, PHASES, STEPS, VICTIMS, Cell, _problems, _wait_until_gone, cells, ends_the_run
from integrations.arctic_rl.backends.builtin import BuiltinBackend


def test_the_matrix_is_whole():
    every = cells(list(VICTIMS), list(PHASES), list(HOW))
    assert len(every) == len(VICTIMS) * len(PHASES) + 5 * (len(PHASES) - 1)
    assert {cell.victim for cell in every if not ends_the_run(cell.victim, cell.phase)} == {"engine", "core"}
    assert fault_injection.METHODS.keys() == set(PHASES)
    assert all(hasattr(BuiltinBackend, method) for method in fault_injection.METHODS.values())


@pytest.fixture
def victim():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("how", HOW)
def test_a_blow_falls_once_at_its_phase_behind_a_checkpoint(tmp_path, monkeypatch, victim, how):
    class Backend:
        async def step(self):
            return "stepped"

    async def process_id(backend, name):
        assert name == "policy"
        return victim.pid

    monkeypatch.setattr("integrations.arctic_rl.backends.builtin.BuiltinBackend", Backend)
    monkeypatch.setattr(fault_injection, "FOLDER", tmp_path)
    monkeypatch.setattr(fault_injection, "DELAY_S", 0.05)
    monkeypatch.setattr(fault_injection, "_process_id", process_id)
    plan = {"victim": "policy", "phase": "step", "how": how, "checkpoints": str(tmp_path)}
    fault_injection.install(plan)
    assert asyncio.run(Backend().step()) == "stepped"
    assert not (tmp_path / "hurt.json").exists()
    (tmp_path / "latest_ckpt_global_step.txt").write_text("1")
    assert asyncio.run(Backend().step()) == "stepped"
    assert json.loads((tmp_path / "hurt.json").read_text())["process_id"] == victim.pid
    if how == "killed":
        assert victim.wait(timeout=20) == -signal.SIGKILL
        return
    assert os.WIFSTOPPED(os.waitpid(victim.pid, os.WUNTRACED)[1])
    victim.send_signal(signal.SIGCONT)
    assert os.WIFCONTINUED(os.waitpid(victim.pid, os.WCONTINUED)[1])
    assert asyncio.run(Backend().step()) == "stepped"
    time.sleep(0.2)
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED, "one blow only"


def test_what_is_left_running_is_told_and_ended(victim):
    (left,) = _wait_until_gone(victim, {victim.pid: psutil.Process(victim.pid)}, 0.2)
    assert left.startswith(f"{victim.pid} ")
    victim.wait(timeout=20)


def test_a_run_that_should_have_gone_on_is_judged(tmp_path):
    def write(*lines):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def line(**more):
        return {"policy/final_loss": 0.1, "policy/rollout_train_logprobs_abs_diff_mean": 1e-7, **more}

    def problems(cell, output, status):
        return [found for found in _problems(cell, Path(tmp_path), output, status) if "checkpoint" not in found]

    engine = Cell("engine", "step", "killed")
    write(*[line()] * (STEPS - 1), line(**{"generate/engine_restarts": 1.0}))
    assert problems(engine, "worker sampling-0 died", 0) == []
    assert problems(engine, "something", 1) == ["the message does not name the victim", "the run did not go on"]
    write(line(), line(**{"policy/rollout_train_logprobs_abs_diff_mean": 0.1}))
    assert len(problems(engine, "sampling-0", 0)) == 3
    rank = Cell("policy", "step", "stopped")
    assert "the run ended as if nothing had been" in problems(rank, "policy-1", 0)
    assert "no cause was given" in problems(rank, "policy-1", 1)
