"""Turns in which the ranks of a node load: as many at a time as its memory takes, and never none."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from integrations.arctic_rl.server import engine, loading_turns
from integrations.arctic_rl.server.loading_turns import host_bytes, loading_turn
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.specs import training_spec

HUGE = 1 << 60
"""More than any machine's memory."""


@pytest.fixture(autouse=True)
def run(monkeypatch):
    name = f"turns-{os.getpid()}-{random.getrandbits(64):x}" + 200 * "x"
    monkeypatch.setenv("ARCTIC_RL_RUN_ID", name)
    monkeypatch.setattr(loading_turns, "LOOK_AGAIN_S", 0.002)
    return name


class Node:
    """The memory of a node, and the ranks that load there."""

    def __init__(self, total, nbytes, kept):
        self.free, self.nbytes, self.kept = total, nbytes, kept
        self.least, self.loaded = total, 0
        self._lock = threading.Lock()

    def load(self, draw):
        with loading_turn(self.nbytes):
            for _ in range(self.nbytes):
                time.sleep(draw.uniform(0, 1e-3))
                self._take(1)
            self._take(self.kept - self.nbytes)
            with self._lock:
                self.loaded += 1

    def _take(self, nbytes):
        with self._lock:
            self.free -= nbytes
            self.least = min(self.least, self.free)


def loaded_by(ranks, node):
    threads = [threading.Thread(target=node.load, args=(random.Random(rank),)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert node.loaded == ranks


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_takes_them_one_by_one_never_runs_out_of_memory(seed, monkeypatch):
    draw = random.Random(seed)
    ranks, nbytes = draw.randint(2, 8), draw.randint(2, 20)
    kept = draw.randint(0, nbytes)
    enough = nbytes + (ranks - 1) * kept
    node = Node(enough + draw.randint(0, nbytes), nbytes, kept)
    monkeypatch.setattr(loading_turns, "free_host_memory", lambda: node.free)
    loaded_by(ranks, node)
    assert node.least >= 0


@pytest.mark.parametrize(("total", "at_once"), [(0, 1), (19, 1), (20, 2), (35, 3), (60, 6), (10_000, 64)])
def test_as_many_load_at_once_as_there_is_memory_for(total, at_once, monkeypatch):
    monkeypatch.setattr(loading_turns, "free_host_memory", lambda: total)
    turns = []
    while (turn := loading_turns._take_turn(10)) is not None:
        turns.append(turn)
    assert len(turns) == at_once
    turns.pop().close()
    turns.append(loading_turns._take_turn(10))
    assert None not in turns, "a turn that has ended is had by another"
    for turn in turns:
        turn.close()


def test_the_turn_of_a_killed_process_ends_with_it(run):
    code = (
        "import sys, time\nfrom integrations.arctic_rl.server.loading_turns import loading_turn\n"
        "with loading_turn(1 << 60):\n    print('has it', flush=True)\n    time.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "has it\n"
        assert loading_turns._take_turn(HUGE) is None
        other.send_signal(signal.SIGSTOP)
        assert loading_turns._take_turn(HUGE) is None, "it still has its memory"
    finally:
        other.kill()
        other.wait()
    with loading_turn(HUGE):
        pass


def test_a_rank_loads_in_its_turn_and_builds_outside_of_it(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    spec = training_spec(role="ref", model_path=str(tmp_path))
    assert host_bytes(spec) == sum(4 * parameter.numel() for parameter in model.parameters())

    def in_turn():
        turn = loading_turns._take_turn(HUGE)
        if turn is not None:
            turn.close()
        return turn is None

    seen = {}

    def watched(name, real):
        def call(*args):
            seen.setdefault(name, in_turn())
            return real(*args)

        monkeypatch.setattr(engine, name, call)

    watched("load_on_host", engine.load_on_host)
    watched("cast_parameters", engine.cast_parameters)
    watched("ready_model", engine.ready_model)
    engine.build_engine(spec)
    assert seen == {"load_on_host": True, "cast_parameters": True, "ready_model": False}
