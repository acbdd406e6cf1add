"""A real run: a policy loss and an estimator of a recipe's own module, schedules, and a reference that moves."""

import math

import pytest
from recipes import read_lines, settings, start, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = '''
"""A recipe's entry module with a loss and an estimator of its own."""

import sys

from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator, register_policy_loss


@register_policy_loss("whitened")
def whitened(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    ratio = (log_probs - old_log_probs).exp()
    kept = advantages[loss_mask > 0]
    scaled = (advantages - kept.mean()) / (kept.std() + 1e-6) / loss_mask.shape[0]
    loss = -(ratio.clamp(max=1 + config.eps_clip_high) * scaled * loss_mask).sum()
    known = [name for name in sys.modules if name == "my_recipe"]
    return loss, {"rows": float(len(log_probs)), "modules": float(len(known)), "ratio_max": ratio.max().item()}


@register_advantage_estimator("plain_rewards")
def plain_rewards(token_level_rewards, response_mask, **_):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


def main():
    from integrations.arctic_rl.entrypoint import main as run

    run()
'''

EPOCHS, STEPS_PER_BATCH = 2, 4


def test_a_loss_and_an_estimator_of_the_recipes_own_module(tmp_path):
    """2 ranks, 2 epochs of 2 batches, each 2 mini-batches twice: 16 optimizer steps, 4 of them warm-up."""
    write_inputs(tmp_path)
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    changes = {
        "trainer.algorithm.policy_loss_type": "whitened",
        "trainer.algorithm.advantage_estimator": "plain_rewards",
        "trainer.algorithm.use_kl_loss": True,
        "trainer.algorithm.kl_loss_coef": 0.05,
        "trainer.update_ref_every_epoch": True,
        "trainer.epochs": EPOCHS,
        "trainer.update_epochs_per_batch": 2,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.policy.optimizer_config.scheduler": "cosine_with_min_lr",
        "trainer.arctic_rl.min_lr_ratio": 0.1,
        "trainer.arctic_rl.lr_warmup_ratio": 0.25,
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.ref_num_gpus_per_node": 2,
        "trainer.arctic_rl.max_cpu_workers": 5,
        "trainer.arctic_rl.cpu_threads": 1,
    }
    process = start(tmp_path, settings(tmp_path, changes), "my_recipe")
    try:
        process.wait(timeout=600)
    finally:
        process.kill()
    output = (tmp_path / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]

    logs = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2, 3, 4]
    for line in logs:
        assert line["policy/loss_metrics/rows"] == 4.0, "SkyRL's micro-batches"
        assert line["policy/loss_metrics/modules"] == 0.0, "the workers do not have the recipe's module"
        assert line["policy/minibatch_rollout_logprobs_abs_diff_mean"] < 1.0
        assert "policy/minibatch_rollout_logprobs_abs_diff_std" in line
    kl = [line["policy/policy_kl"] for line in logs]
    assert kl[0] < kl[1], "the policy leaves its reference"
    assert kl[2] < kl[1], "which follows it at the epoch's end"

    steps = read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")
    horizon = EPOCHS * 2 * STEPS_PER_BATCH
    assert [step["optimizer_step"] for step in steps] == list(range(1, horizon + 1))
    for number, step in enumerate(steps):
        share = (1 + math.cos(math.pi * (number - 4) / (horizon - 4))) / 2
        rate = number / 4 if number < 4 else 0.1 + 0.9 * share
        assert step["lr"] == pytest.approx(1e-3 * rate, rel=1e-9)
    assert not list((tmp_path / "exports").glob("global_step*")), "no model was exported on the way"
