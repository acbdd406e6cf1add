"""Two recipes of examples/ with SMOKE=1, on a smaller model and data than the quickstart's: three real steps each.

The PPO one with a critic whose mini-batches and schedule are not the policy's, and with its checkpoint and export.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes import left_over, read_lines, run_processes, wait_for_steps
from safetensors.torch import load_file

from envs.bird.synthetic.dataset import SplitSizes, write_dataset
from examples.make_model import WarmStart, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = SplitSizes(train=8, validation=3, heldout_db=2, demonstrations=1)
WARM = WarmStart(vocab_size=700, min_token_count=2, hidden_size=64, intermediate_size=96, heads=2, examples_per_row=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What the quickstart would make."""
    folder = tmp_path_factory.mktemp("cache")
    for name, env_class in (("data-0", "bird"), ("data-0-bird_multi_turn", "bird_multi_turn")):
        write_dataset(folder / name, seed=0, sizes=SIZES, env_class=env_class)
    make_model(folder / "data-0", folder / "model-0", seed=0, warm=WARM)
    for made in folder.iterdir():
        (made / ".complete").touch()
    return folder


PPO = {
    "trainer.algorithm.lambd": 0.95,
    "trainer.critic.optimizer_config.lr": 2e-3,
    "trainer.critic.optimizer_config.num_warmup_steps": 2,
    "trainer.critic_mini_batch_size": 2,
    "trainer.micro_train_batch_size_per_gpu": 8,
    "trainer.ckpt_interval": 3,
    "trainer.hf_save_interval": 3,
    "trainer.arctic_rl.cpu_threads": 1,
    "trainer.arctic_rl.max_cpu_workers": 4,
}


def run_smoke(folder, cache, name, changes):
    """Run a recipe's smaller twin to its end; returns its logged steps."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MODEL", "DATA")}
    environment |= {"SMOKE": "1", "PYTHON": sys.executable, "RUNS": str(folder), "ARCTIC_RL_CACHE": str(cache)}
    paths = {"log_path": "logs", "ckpt_path": "checkpoints", "export_path": "exports"}
    values = {f"trainer.{setting}": folder / made for setting, made in paths.items()} | changes
    command = ["bash", str(EXAMPLES / f"{name}.sh"), *(f"{setting}={value}" for setting, value in values.items())]
    with open(folder / "output.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_steps(folder, process, 1)
        processes = run_processes(process)
        process.wait(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, (folder / "output.log").read_text()[-4000:]
    assert left_over(processes) == []
    logs = [line for line in read_lines(folder / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2, 3]
    assert all(line["generate/scoring_failed"] == 0 for line in logs)
    assert "eval/all/avg_score" in logs[-1]
    return logs


def test_three_steps_of_bird_multi_turn(tmp_path, cache):
    for line in run_smoke(tmp_path, cache, "bird_multi_turn", {}):
        # The sampler renormalises what top_p keeps, at least 0.95 of the probability.
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < -math.log(0.95) + 1e-4
        assert line["environment/turns"] > 1
        assert "policy/policy_kl" not in line
        assert not any(metric.startswith("critic/") for metric in line)


def test_three_steps_of_gsm8k_ppo(tmp_path, cache):
    """A policy, a critic with mini-batches and a schedule of its own, a reference model and an engine."""
    for line in run_smoke(tmp_path, cache, "gsm8k_ppo", PPO):
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert line.get("environment/turns", 1.0) == 1.0
        assert "policy/policy_kl" in line
        assert all(math.isfinite(line[f"critic/{name}"]) for name in ("critic_loss", "values_mean", "grad_norm"))
        assert 0 <= line["critic/values_clipfrac"] <= 1
        assert line["policy/policy_lr"] == 1e-6
    rates = [line["lr"] for line in read_lines(tmp_path / "logs" / "critic_optimizer_steps.jsonl")]
    assert rates == pytest.approx([0, 1e-3, *[2e-3] * 10])
    assert len(read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")) == 3

    saved = tmp_path / "checkpoints" / "global_step_3"
    assert (saved / "critic" / "rank-00000.json").is_file() and (saved / "policy" / "rank-00000.json").is_file()
    exported = load_file(tmp_path / "exports" / "global_step_3" / "critic" / "model.safetensors")
    base = load_file(cache / "model-0" / "model.safetensors")
    assert exported.keys() == (base.keys() - {"lm_head.weight"}) | {"value_head.weight"}
    assert not torch.equal(exported["model.norm.weight"], base["model.norm.weight"])
    assert (tmp_path / "logs" / "workers" / "critic-0.log").is_file()
