"""The fault matrix' own judgement, and that a blow falls when it is meant to."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import fault_injection
from benchmarks.faults import (
    HOW,
    MOST_BLOWS,
    PHASES,
    VICTIMS,
    Cell,
    _problems,
    _wait_until_gone,
    cells,
    ends_the_run,
    runs,
    steps,
)
from integrations.arctic_rl.backends.builtin import BuiltinBackend


def test_the_matrix_is_whole():
    every = cells(list(VICTIMS), list(PHASES), list(HOW))
    assert len(every) == len(VICTIMS) * len(PHASES) + 5 * (len(PHASES) - 1)
    assert {cell.victim for cell in every if not ends_the_run(cell.victim, cell.phase)} == {"engine", "core"}
    assert fault_injection.METHODS.keys() == set(PHASES)
    assert all(hasattr(BuiltinBackend, method) for method in fault_injection.METHODS.values())


def test_only_what_a_run_survives_shares_one():
    every = cells(list(VICTIMS), list(PHASES), list(HOW))
    shared = runs(every)
    assert [cell for together in shared for cell in together] == every
    for together in shared:
        assert len({(cell.victim, cell.how) for cell in together}) == 1 and len(together) <= MOST_BLOWS
        assert len(together) == 1 or not any(ends_the_run(cell.victim, cell.phase) for cell in together)
    assert sorted(map(len, shared))[-4:] == [6] * 4


@pytest.fixture
def victim():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


class Backend:
    """One engine, which is up again when ``recover`` is called."""

    def __init__(self):
        self._calls = SimpleNamespace(supervisor=self)
        self.restarts, self.away = 0, set()

    def restarting(self):
        return self.away

    def recover(self):
        self.restarts += 1

    async def step(self):
        return "stepped"

    async def sync_weights(self):
        return "synced"


@pytest.fixture
def install(tmp_path, monkeypatch, victim):
    """Takes blows; each is to fall on ``victim``."""

    async def process_id(backend, name):
        return victim.pid

    def with_blows(*blows):
        kind = type("Backend", (Backend,), {})
        monkeypatch.setattr("integrations.arctic_rl.backends.builtin.BuiltinBackend", kind)
        plan = [dict(zip(("victim", "phase", "how"), blow, strict=True)) for blow in blows]
        fault_injection.install({"blows": plan, "checkpoints": str(tmp_path)})
        return kind()

    monkeypatch.setattr(fault_injection, "FOLDER", tmp_path)
    monkeypatch.setattr(fault_injection, "DELAY_S", 0.05)
    monkeypatch.setattr(fault_injection, "POLL_S", 0.01)
    monkeypatch.setattr(fault_injection, "_process_id", process_id)
    return with_blows


@pytest.mark.parametrize("how", HOW)
def test_a_blow_falls_once_at_its_phase_behind_a_checkpoint(tmp_path, install, victim, how):
    backend = install(("policy", "step", how))
    assert asyncio.run(backend.step()) == "stepped"
    (tmp_path / "latest_ckpt_global_step.txt").write_text("1")
    assert asyncio.run(backend.sync_weights()) == "synced"
    assert not (tmp_path / "blows.jsonl").exists()
    assert asyncio.run(backend.step()) == "stepped"
    assert json.loads((tmp_path / "blows.jsonl").read_text())["process_id"] == victim.pid
    if how == "killed":
        assert victim.wait(timeout=20) == -signal.SIGKILL
        return
    assert os.WIFSTOPPED(os.waitpid(victim.pid, os.WUNTRACED)[1])
    victim.send_signal(signal.SIGCONT)
    assert os.WIFCONTINUED(os.waitpid(victim.pid, os.WCONTINUED)[1])
    assert asyncio.run(backend.step()) == "stepped"
    time.sleep(0.2)
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED, "one blow only"


def test_the_next_blow_waits_for_the_engine_and_for_another_checkpoint(tmp_path, install, victim):
    async def run():
        backend = install(("engine", "step", "stopped"), ("engine", "sync", "stopped"))
        latest.write_text("1")
        await asyncio.gather(*(backend.step() for _ in range(3)))
        assert count("blows") == 1, "one blow, however many calls begin at once"
        latest.write_text("2")
        await backend.sync_weights()
        assert count("blows") == 1, "the engine is not up again"
        latest.write_text("1")
        backend.recover()
        await asyncio.sleep(0.2)
        assert count("recoveries") == 1
        await backend.sync_weights()
        assert count("blows") == 1, "there is no newer checkpoint"
        latest.write_text("2")
        await backend.sync_weights()
        assert count("blows") == 2
        backend.recover()
        await asyncio.sleep(0.2)
        assert count("recoveries") == 2

    def count(name):
        return (
            len((tmp_path / f"{name}.jsonl").read_text().splitlines()) if (tmp_path / f"{name}.jsonl").exists() else 0
        )

    latest = tmp_path / "latest_ckpt_global_step.txt"
    asyncio.run(run())


def test_what_is_left_running_is_told_and_ended(victim):
    (left,), (last,) = _wait_until_gone(victim, {victim.pid: psutil.Process(victim.pid)}, 0.2)
    assert left == f"left running: {last}" and last.startswith(f"{victim.pid} {sys.executable}")
    victim.wait(timeout=20)
    assert _wait_until_gone(victim, {}, 0.2) == ([], [])


def test_a_run_that_should_have_gone_on_is_judged(tmp_path):
    def write(*lines):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def line(**more):
        return {"policy/final_loss": 0.1, "policy/rollout_train_logprobs_abs_diff_mean": 1e-7, **more}

    def problems(cell, output, status, blows=1):
        found = _problems([cell] * blows, tmp_path, output, status)
        return [problem for problem in found if "checkpoint" not in problem]

    engine, restarted = Cell("engine", "step", "killed"), {"generate/engine_restarts": 1.0}
    write(*[line()] * (steps(1) - 1), line(**restarted))
    said = "worker sampling-0 died and is restarted\n"
    assert problems(engine, said, 0) == []
    assert problems(engine, "something", 1) == ["the run did not go on", "the message does not name the victim"]
    write(line(), line(**{"policy/rollout_train_logprobs_abs_diff_mean": 0.1}))
    assert len(problems(engine, said, 0)) == 3
    write(*[line()] * (steps(2) - 2), *[line(**restarted)] * 2)
    assert problems(engine, said * 2, 0, blows=2) == []
    assert problems(engine, said, 0, blows=2) == ["the message does not name the victim"]
    write(*[line()] * (steps(2) - 1), line(**restarted))
    assert problems(engine, said * 2, 0, blows=2) == ["1.0 restarts were counted"]
    rank = Cell("policy", "step", "stopped")
    assert problems(rank, "error: worker policy-1 died", 1) == []
    assert problems(rank, "error: something\nabout policy-1", 1) == ["the message does not name the victim"]
    assert problems(rank, "error: worker policy-1 died", 0) == ["the run ended as if nothing had been"]
    assert problems(rank, "policy-1", 1) == ["no cause was given"]
    assert problems(Cell("driver", "step", "killed"), "", -9) == []
