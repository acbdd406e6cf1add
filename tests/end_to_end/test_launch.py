"""Recipes with an entry module of their own, whole: Ray, DeepSpeed, vLLM and the scoring pool, all of them real."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from recipes import left_over, read_lines, run_processes, settings, wait_for_steps, worker, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODULES = Path(__file__).parent / "modules"
BY_HAND = "import sys; sys.path.insert(0, {folder!r}); from skyrl_arctic_rl.launch import main; main()"


def run(folder, command):
    """Run a command in ``folder`` to its end; returns its output, its logged steps and its trainer's process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    with open(folder / "output.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_for_steps(folder, process, 1)
        processes = run_processes(process)
        trainer = worker(processes, "run_entry").pid
        process.wait(timeout=400)
    finally:
        process.kill()
    output = (folder / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]
    assert left_over(processes) == []
    logs = [line for line in read_lines(folder / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2]
    for line in logs:
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
        assert line["policy/grad_norm"] > 0
    return output, logs, trainer


def test_an_environment_and_a_policy_loss_registered_in_the_task(tmp_path):
    """The modules lie in a folder that only the driver's ``sys.path`` knows."""
    write_inputs(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(MODULES, elsewhere)
    table = pyarrow.parquet.read_table(tmp_path / "prompts.parquet").drop_columns(["env_class"])
    pyarrow.parquet.write_table(table, tmp_path / "prompts.parquet")
    changes = {
        "trainer.algorithm.policy_loss_type": "vowels",
        "trainer.arctic_rl.env_modules": "[]",
        "environment.env_class": "overwritten_by_main",
    }
    by_hand = ["-c", BY_HAND.format(folder=str(elsewhere))]
    command = [*by_hand, "--entry", "train", "in_task", "--letters", "aeiou", *settings(tmp_path, changes)]
    output, logs, trainer = run(tmp_path, command)
    assert "the task returned aeiou" in output
    for line in logs:
        assert line["environment/process_id"] not in (0, trainer)
        assert line["environment/counted"] == pytest.approx(line["reward/avg_raw_reward"])
        assert 1 < line["policy/loss_metrics/tokens_max"] <= 4 * 16, "the loss of the recipe's own ran"
        assert "policy/loss_metrics/clip_ratio" not in line
