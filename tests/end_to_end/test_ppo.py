"""A real PPO run with SkyRL's command and two overrides: a policy, a critic, a reference model and an engine."""

import math

import pytest
import torch
from recipes import read_lines, settings, start, write_inputs
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_policy_and_critic_train_beside_each_other(tmp_path):
    write_inputs(tmp_path)
    changes = {
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.algorithm.lambd": 0.95,
        "trainer.algorithm.use_kl_in_reward": True,
        "trainer.algorithm.kl_loss_coef": 0.05,
        "trainer.critic.model.path": f"{tmp_path}/model",
        "trainer.critic.optimizer_config.lr": 2e-3,
        "trainer.critic.optimizer_config.num_warmup_steps": 2,
        "trainer.critic_mini_batch_size": 2,
        "trainer.ckpt_interval": 2,
        "trainer.hf_save_interval": 2,
        "trainer.arctic_rl.cpu_threads": 1,
        "trainer.arctic_rl.max_cpu_workers": 4,
    }
    process = start(tmp_path, settings(tmp_path, changes))
    try:
        process.wait(timeout=600)
    finally:
        process.kill()
    output = (tmp_path / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]

    logs = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "critic/critic_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2]
    for line in logs:
        assert all(math.isfinite(line[f"critic/{name}"]) for name in ("critic_loss", "values_mean", "grad_norm"))
        assert 0 <= line["critic/values_clipfrac"] <= 1
        assert line["policy/policy_lr"] == 1e-3
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4
    rates = [line["lr"] for line in read_lines(tmp_path / "logs" / "critic_optimizer_steps.jsonl")]
    assert rates == pytest.approx([0, 1e-3, *[2e-3] * 6])
    assert len(read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")) == 4

    saved = tmp_path / "checkpoints" / "global_step_2"
    assert (saved / "critic" / "rank-00000.json").is_file() and (saved / "policy" / "rank-00000.json").is_file()
    exported = load_file(tmp_path / "exports" / "global_step_2" / "critic" / "model.safetensors")
    base = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == (base.keys() - {"lm_head.weight"}) | {"value_head.weight"}
    assert not torch.equal(exported["model.norm.weight"], base["model.norm.weight"])
    assert (tmp_path / "logs" / "workers" / "critic-0.log").is_file()
