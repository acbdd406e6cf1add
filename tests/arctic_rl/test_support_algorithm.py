"""What of a recipe's settings is said to have no effect: where another setting switches it off, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.loss_config import loss_request
from integrations.arctic_rl.processors.skyrl_losses import load_policy_loss
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.support import TABLE, refusals, without_effect
from integrations.arctic_rl.support.leaves import skyrl_leaves

ALGORITHM = "trainer.algorithm"
BASE = ["trainer.logger=console"]
OWN = "own_of_test_support_algorithm"


def parsed(overrides):
    return parse_config([*BASE, *overrides.split()])


def idle(overrides):
    """Settings that are said to have no effect."""
    settings = ", ".join(line.rpartition(": ")[0] for line in without_effect(parsed(overrides)))
    return {item.split("=")[0] for item in settings.split(", ") if item}


@pytest.fixture
def own_estimator():
    received = {}

    def estimator(token_level_rewards, response_mask, **kwargs):
        received.update(kwargs)
        return token_level_rewards, token_level_rewards

    AdvantageEstimatorRegistry.register(OWN, estimator)
    yield received
    AdvantageEstimatorRegistry.unregister(OWN)


@pytest.fixture
def own_loss():
    def loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        return log_probs.sum(), {}

    PolicyLossRegistry.register(OWN, loss)
    yield
    PolicyLossRegistry.unregister(OWN)


IDLE = {
    "generator.use_conversation_multi_turn=false": "generator.batched=true",
    "generator.append_eos_token_after_stop_str_in_multi_turn=false": "generator.batched=true",
    "trainer.algorithm.kl_ctrl.kl_target=0.5": f"{ALGORITHM}.use_kl_in_reward=true {ALGORITHM}.use_kl_loss=false",
    "trainer.algorithm.kl_ctrl.horizon=5": f"{ALGORITHM}.use_kl_in_reward=true {ALGORITHM}.use_kl_loss=false",
    "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.5": f"{ALGORITHM}.dynamic_sampling.type=filter",
    "trainer.micro_train_batch_size_per_gpu=3": "trainer.max_tokens_per_microbatch=77",
    "trainer.micro_forward_batch_size_per_gpu=3": "trainer.max_tokens_per_microbatch=77",
    "trainer.gradient_checkpointing_use_reentrant=true": "trainer.gradient_checkpointing=false",
    "trainer.algorithm.loss_reduction=sequence_mean": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.advantage_estimator=rloo": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.advantage_batch_normalize=true": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.grpo_norm_by_std=false": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.use_kl_in_reward=true": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.kl_loss_coef=0.5": f"{ALGORITHM}.policy_loss_type=cross_entropy {ALGORITHM}.use_kl_loss=false",
    "trainer.algorithm.entropy_loss_coef=0.5": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.use_entropy_loss=true": f"{ALGORITHM}.policy_loss_type=cross_entropy",
    "trainer.algorithm.value_clip=0.5": "",
    "trainer.algorithm.lambd=0.5": "",
}
READ = {
    "generator.use_conversation_multi_turn=false": "generator.batched=false",
    "generator.append_eos_token_after_stop_str_in_multi_turn=false": "generator.batched=false",
    "trainer.algorithm.kl_ctrl.kl_target=0.5": (
        f"{ALGORITHM}.use_kl_in_reward=true {ALGORITHM}.use_kl_loss=false {ALGORITHM}.kl_ctrl.type=adaptive"
    ),
    "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.5": f"{ALGORITHM}.dynamic_sampling.type=replace",
    "trainer.gradient_checkpointing_use_reentrant=true": "trainer.gradient_checkpointing=true",
    "trainer.algorithm.advantage_batch_normalize=true": f"{ALGORITHM}.policy_loss_type=importance_sampling",
}


@pytest.mark.parametrize("override", IDLE)
def test_a_setting_that_another_one_switches_off_is_said_to_have_no_effect(override):
    setting = override.split("=")[0]
    assert setting in idle(f"{IDLE[override]} {override}")
    assert refusals(parsed(f"{IDLE[override]} {override}")) == []


@pytest.mark.parametrize("override", READ)
def test_a_setting_that_is_read_is_not(override):
    assert override.split("=")[0] not in idle(f"{READ[override]} {override}")


def test_one_text_has_no_end_tokens_between_turns():
    setting = "generator.append_eos_token_after_stop_str_in_multi_turn"
    assert setting in idle(f"{setting}=false generator.use_conversation_multi_turn=false")


def odd_numbers():
    """A changed value of each number below ``trainer.algorithm``, in the order of the config."""
    kept = ("temperature", "tis_imp_ratio_cap")
    for name, leaf in skyrl_leaves().items():
        is_number = isinstance(leaf.default, int | float) and not isinstance(leaf.default, bool)
        if name.startswith(ALGORITHM) and is_number and not name.endswith(kept):
            yield f"{name}={leaf.default + 1}"


@pytest.mark.parametrize("kind", ["policy_loss_type", "advantage_estimator", "loss_fn"])
def test_nothing_of_the_section_is_said_to_be_idle_with_a_function_of_the_users(kind, own_estimator, own_loss):
    overrides = " ".join(odd_numbers())
    others = f"{ALGORITHM}.grpo_norm_by_std=false {ALGORITHM}.max_seq_len=9"
    assert len(idle(f"{overrides} {others} {ALGORITHM}.advantage_estimator=rloo")) > 15
    own = "trainer.arctic_rl.loss_fn=a.loss" if kind == "loss_fn" else f"{ALGORITHM}.{kind}={OWN}"
    assert idle(f"{overrides} {others} {own}") == set()
    assert refusals(parsed(f"{overrides} {others} {own}")) == []


def test_an_estimator_is_handed_the_recipes_values(own_estimator):
    given = {"gamma": 0.9, "lambd": 0.7, "grpo_norm_by_std": False, "value_clip": 0.3}
    cfg = parsed(" ".join(f"{ALGORITHM}.{name}={value}" for name, value in given.items()))
    cfg.trainer.algorithm.advantage_estimator = OWN
    data = TrainingInputBatch(
        {name: torch.ones(2, 3) for name in ("rewards", "response_mask", "loss_mask")} | {"values": None}
    )
    data.metadata = {"uids": ["a", "b"], "avg_response_length": 3.0}
    RayPPOTrainer.compute_advantages_and_returns(SimpleNamespace(cfg=cfg, all_metrics={}), data)
    config = own_estimator.pop("config")
    assert {name: own_estimator[name] for name in ("gamma", "lambd", "grpo_norm_by_std")} == {
        name: given[name] for name in ("gamma", "lambd", "grpo_norm_by_std")
    }
    assert config.value_clip == 0.3


def test_a_policy_loss_is_handed_the_whole_section(own_loss):
    given = {"value_clip": 0.3, "lambd": 0.7, "max_seq_len": 77, "value_head_prefix": "head", "gamma": 0.5}
    cfg = parsed(" ".join(f"{ALGORITHM}.{name}={value}" for name, value in given.items()))
    cfg.trainer.algorithm.policy_loss_type = OWN
    _, algorithm = load_policy_loss(loss_request(cfg).processing["config"]["policy_loss_config"]["packed"])
    assert {name: vars(algorithm)[name] for name in given} == given


def test_each_case_is_a_setting_of_the_table():
    assert {override.split("=")[0] for override in [*IDLE, *READ]} <= set(TABLE)
