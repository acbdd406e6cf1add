"""SkyRL's trackers under our trainer: what they keep is what metrics.jsonl has, and names our settings too."""

import json
import math

import pytest
from skyrl.train.utils.tracking import Tracking

from integrations.arctic_rl.preflight import tracker_problems
from integrations.arctic_rl.runtime_env import runtime_env_vars
from tests.arctic_rl.in_process_backend import InProcessBackend
from tests.arctic_rl.resume_runs import STEPS, Rollouts, config, run


def train(folder, loop, logger):
    """Train with SkyRL's tracker of that name; what our own file has of each step."""
    cfg = config(folder, f"trainer.logger={logger}", "trainer.ckpt_interval=-1", "trainer.arctic_rl.zero_stage=3")
    tracker = Tracking("kept", "once", logger, cfg, ["tag"])
    run(cfg, InProcessBackend(), loop, Rollouts({}), tracker=tracker)
    tracker.finish()
    lines = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {line["global_step"]: {k: v for k, v in line.items() if k != "global_step"} for line in lines}


def check(kept, expected, rel):
    """``kept`` holds every number of ``expected`` by name and step."""
    assert len(expected) == STEPS and all("policy/final_loss" in line for line in expected.values())
    for step, line in expected.items():
        assert set(line) <= set(kept[step])
        for name, value in line.items():
            assert kept[step][name] == pytest.approx(value, rel=rel, nan_ok=True), name


def test_tensorboard(tmp_path, loop, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    expected = train(tmp_path, loop, "tensorboard")
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    kept = {step: {} for step in expected}
    for name in board.Tags()["scalars"]:
        for event in board.Scalars(name):
            kept[event.step][name] = event.value
    check(kept, expected, rel=1e-6)


def test_mlflow_in_a_local_folder(tmp_path, loop, monkeypatch):
    mlflow_folder = tmp_path / "mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_folder.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    expected = train(tmp_path, loop, "mlflow")
    (metrics,) = mlflow_folder.glob("*/*/metrics")
    kept = {step: {} for step in expected}
    for path in (path for path in metrics.rglob("*") if path.is_file()):
        for _, value, step in (line.split() for line in path.read_text().splitlines()):
            kept[int(step)][str(path.relative_to(metrics))] = float(value)
    check(kept, expected, rel=1e-12)
    assert (metrics.parent / "params" / "trainer" / "arctic_rl" / "zero_stage").read_text() == "3"
    assert (metrics.parent / "tags" / "mlflow.runName").read_text() == "once"


def test_console(tmp_path, loop, monkeypatch):
    said = []
    monkeypatch.setattr("skyrl.train.utils.tracking.logger.info", said.append)
    expected = train(tmp_path, loop, "console")
    printed = [line for line in map(str, said) if line.startswith("Step ")]
    assert len(printed) == STEPS
    for (step, line), text in zip(sorted(expected.items()), printed, strict=True):
        assert text.startswith(f"Step {step}:")
        assert f"'policy/final_loss': '{line['policy/final_loss']:.4f}'" in text
        assert not math.isnan(line["policy/final_loss"])


def test_a_tracker_that_is_not_installed_is_told_before_the_run(tmp_path):
    assert [*tracker_problems(config(tmp_path, "trainer.logger=swanlab"))] == [
        "trainer.logger=swanlab: its package is not installed; install it, or write trainer.logger=console"
    ]
    for name in ("console", "tensorboard", "mlflow", "wandb"):
        assert not [*tracker_problems(config(tmp_path, f"trainer.logger={name}"))]


def test_what_trackers_are_told_by_the_environment_reaches_the_trainer(tmp_path, monkeypatch):
    names = ("TENSORBOARD_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "WANDB_MODE", "SWANLAB_MODE")
    for name in names:
        monkeypatch.setenv(name, f"value of {name}")
    forwarded = runtime_env_vars(config(tmp_path), "run")
    assert {name: forwarded[name] for name in names} == {name: f"value of {name}" for name in names}
