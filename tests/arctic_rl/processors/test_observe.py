"""Timers, profiles and memory marks, each off unless the environment asks."""

import logging
import pstats

import pytest

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.observe import PHASES
from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.helpers import FakeEngine, ragged_batch, tiny_model


def run(**kwargs) -> dict:
    engine = FakeEngine(tiny_model())
    return run_pipeline(engine, (), ragged_batch(4, 1), {"temperature": 1.0}, {"loss_fn": "grpo"}, "cpu", **kwargs)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("ENABLE_TIMERS", "PROFILER_TYPE", "PROFILER_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_timers(monkeypatch):
    names = {f"timer/{phase}" for phase in PHASES}
    assert not names & run()["metrics"].keys()
    monkeypatch.setenv("ENABLE_TIMERS", "1")
    metrics = run()["metrics"]
    assert names <= metrics.keys()
    assert all(metrics[name] > 0 for name in ("timer/forward", "timer/loss", "timer/backward"))
    monkeypatch.setenv("ENABLE_TIMERS", "0")
    assert not names & run()["metrics"].keys()
    monkeypatch.setenv("ENABLE_TIMERS", "perhaps")
    with pytest.raises(UnsupportedError, match="ENABLE_TIMERS='perhaps'"):
        run()


def test_c_profile(monkeypatch, tmp_path):
    monkeypatch.setenv("PROFILER_TYPE", "c")
    with pytest.raises(UnsupportedError, match="needs PROFILER_DIR"):
        run()
    folder = tmp_path / "profiles"
    monkeypatch.setenv("PROFILER_DIR", str(folder))
    run()
    run()
    files = list(folder.iterdir())
    assert len(files) == 2
    assert any("grpo_loss" in str(key) for key in pstats.Stats(str(files[0])).stats)


def test_torch_profile(monkeypatch, tmp_path):
    monkeypatch.setenv("PROFILER_TYPE", "torch")
    monkeypatch.setenv("PROFILER_DIR", str(tmp_path))
    run()
    (trace,) = tmp_path.glob("*.json")
    assert "aten::linear" in trace.read_text()


def test_unknown_profiler(monkeypatch):
    monkeypatch.setenv("PROFILER_TYPE", "cprofile")
    with pytest.raises(UnsupportedError, match="PROFILER_TYPE='cprofile' is unknown; known: none, torch, c"):
        run()


def test_memory_marks(caplog):
    with caplog.at_level(logging.INFO):
        run()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="integrations.arctic_rl.processors.observe"):
        run(max_tokens_per_mb=1000)
    marks = [record.getMessage() for record in caplog.records]
    expected = [
        f"{when} {phase}" for phase in ("forward", "post-processing", "backward") for when in ("before", "after")
    ]
    assert [mark.split(": ")[0] for mark in marks] == [f"memory {mark}" for mark in expected]
