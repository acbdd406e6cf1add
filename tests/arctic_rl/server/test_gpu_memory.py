"""What training ranks and engines tell CUDA's allocator, seen in PyTorch's calls: no GPU is needed."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.server.allocator import ENVIRONMENT, Segments
from integrations.arctic_rl.server.memory_snapshots import MemorySnapshots
from integrations.arctic_rl.server.sampling_spec import engine_environment
from integrations.arctic_rl.server.training_worker import TrainingWorker
from tests.arctic_rl.specs import sampling_spec, training_spec

NAMES = ("forward_backward_1", "optim_step_2")
ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture
def events(monkeypatch):
    """What is told to the allocator, with what is done in between; PyTorch's own parser reads it too."""
    told, parse = [], torch._C._accelerator_setAllocatorSettings

    def told_to(settings):
        parse(settings)
        told.append(settings)

    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told_to)
    yield told
    parse(OFF)


def worker(tmp_path, monkeypatch, events, **changes):
    result = object.__new__(TrainingWorker)
    spec = training_spec(device="cuda", **changes)
    monkeypatch.setattr("integrations.arctic_rl.server.training_worker.open_worker_log", lambda _: None)
    monkeypatch.setattr("integrations.arctic_rl.server.training_worker.end_with_parent", lambda: None)
    result.__init__(spec, 1, 2, str(tmp_path / "log"))
    result._states = SimpleNamespace(
        restore=lambda parts: events.append(f"back: {' '.join(parts)}"), release=lambda parts: None
    )
    result._sender = SimpleNamespace(transfer=lambda *_: events.append("sent"))
    return result


def test_weights_are_taken_from_memory_that_can_be_shared(tmp_path, monkeypatch, events):
    rank = worker(tmp_path, monkeypatch, events, expandable_segments=True)
    rank._segments.switch_on()
    rank.sleep()
    rank.wake(["weights"])
    rank.transfer_weights()
    assert events == [ON, OFF, "back: weights", ON, OFF, "sent", ON]
    with contextlib.suppress(RuntimeError), rank._segments.usual_memory():
        raise RuntimeError
    assert events[-1] == ON


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_what_the_user_told_the_allocator_stays(monkeypatch, events, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    Segments(asked_for=True).switch_on()
    assert events == [f"max_split_size_mb:512,{ON}"]
    monkeypatch.setenv(name, OFF)
    Segments(asked_for=True).switch_on()
    monkeypatch.delenv(name)
    Segments(asked_for=False).switch_on()
    assert len(events) == 1


def test_an_engine_is_told_at_its_start(monkeypatch, events):
    asked = sampling_spec(device="cuda", expandable_segments=True)
    new, old = ENVIRONMENT
    assert not set(ENVIRONMENT) & engine_environment(dataclasses.replace(asked, expandable_segments=False)).keys()
    plain = engine_environment(asked)
    assert plain[old] == ON and new not in plain, "where vLLM looks"
    monkeypatch.setenv(new, "max_split_size_mb:512")
    merged = engine_environment(asked)
    assert merged[new] == merged[old] == f"max_split_size_mb:512,{ON}"
    monkeypatch.setenv(new, OFF)
    assert engine_environment(asked)[old] == OFF


def test_snapshots_are_written_where_skyrls_workers_write_them(tmp_path, monkeypatch, events):
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda: events.append("records"))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda filename: events.append(filename))
    rank = worker(tmp_path, monkeypatch, events, memory_snapshots=str(tmp_path / "memory_snapshots"))
    rank._snapshots = MemorySnapshots(rank._spec.memory_snapshots, rank._rank)
    result = {"avg_loss": 0.0}, 1
    monkeypatch.setattr("integrations.arctic_rl.processors.pipeline.run_counted", lambda *_, **__: result)
    rank._engine = SimpleNamespace(module=None, step=lambda: None, get_global_grad_norm=lambda: 1.0)
    rank._optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    rank._scheduler = SimpleNamespace(step=lambda: None)
    for backward in (False, True):
        rank.run({}, {}, {}, backward=backward, max_tokens_per_mb=1)
    rank.step()
    files = [tmp_path / "memory_snapshots" / f"rank_1_policy_{name}.pickle" for name in NAMES]
    assert events == ["records", *map(str, files)]
