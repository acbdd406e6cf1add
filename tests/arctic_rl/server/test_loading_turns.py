"""Turns in which the ranks of a node load: as many at a time as its memory takes, and never none."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from transformers import dynamic_module_utils

from integrations.arctic_rl.random_state import random_state
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

    def __init__(self, total):
        self.free, self.least, self.loaded = total, total, 0
        self._lock = threading.Lock()

    def load(self, nbytes, kept, draw):
        with loading_turn(nbytes):
            for _ in range(nbytes):
                time.sleep(draw.uniform(0, 1e-3))
                self._take(1)
            self._take(kept - nbytes)
            with self._lock:
                self.loaded += 1

    def _take(self, nbytes):
        with self._lock:
            self.free -= nbytes
            self.least = min(self.least, self.free)


def loaded_by(models, node):
    """Models are of (bytes, bytes that stay on the host) each."""
    threads = [
        threading.Thread(target=node.load, args=(*model, random.Random(rank))) for rank, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert node.loaded == len(models)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_takes_them_one_by_one_never_runs_out_of_memory(seed, monkeypatch):
    """Ranks of one model, and of several of different sizes."""
    draw = random.Random(seed)
    sizes = [(nbytes := draw.randint(2, 20), draw.randint(0, nbytes)) for _ in range(1 + seed % 3)]
    models = [draw.choice(sizes) for _ in range(draw.randint(2, 8))]
    enough = sum(kept for _, kept in models) + max(nbytes - kept for nbytes, kept in models)
    node = Node(enough + draw.randint(0, 5))
    monkeypatch.setattr(loading_turns, "free_host_memory", lambda: node.free)
    loaded_by(models, node)
    assert node.least >= 0


@pytest.mark.parametrize(("free", "small_beside"), [(0, False), (139, False), (140, True)])
def test_a_small_model_waits_for_the_memory_of_a_large_one(free, small_beside, monkeypatch):
    monkeypatch.setattr(loading_turns, "free_host_memory", lambda: free)
    large = loading_turns._take_turn(100)
    small = loading_turns._take_turn(40)
    assert (small is not None) == small_beside
    for turn in filter(None, (large, small)):
        turn.close()


@pytest.mark.parametrize(("total", "at_once"), [(0, 1), (19, 1), (20, 2), (35, 3), (60, 6), (640, 64)])
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


OWN_CODE = """
import random
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.rates = torch.linspace(0, 1, 3).tolist()
        self.drawn = [torch.rand(1, device="cpu"), random.random()]
"""


def test_a_models_size_is_read_as_it_will_be_loaded_and_draws_nothing(tmp_path, monkeypatch):
    """Code of its own, and an attention that is not installed, named in its config."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = tiny_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(OWN_CODE)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": own, "_attn_implementation": "flash_attention_3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = random_state()
    assert host_bytes(training_spec(role="ref", model_path=tmp_path)) == 4 * parameters(model)
    assert random_state() == before


def test_the_size_of_a_critic_is_that_of_its_value_model(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    backbone = parameters(model) - model.lm_head.weight.numel() * (not model.config.tie_word_embeddings)
    size = host_bytes(training_spec(role="critic", model_path=tmp_path, value_head="value_head"))
    assert size == 4 * (backbone + model.config.hidden_size)


def test_a_rank_loads_in_its_turn_and_builds_outside_of_it(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    spec = training_spec(role="ref", model_path=str(tmp_path))
    assert host_bytes(spec) == 4 * parameters(model)

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
