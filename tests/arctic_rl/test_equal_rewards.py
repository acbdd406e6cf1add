"""Groups of equal rewards: advantages and the zero-variance filter, in SkyRL's own trainer."""

import pytest
import torch

from integrations.arctic_rl.equal_rewards import rows_of_equal_groups
from integrations.arctic_rl.trainer import ArcticTrainerMixin

REWARDS = (0.1, 0.7, 1.0)
SIZES = range(2, 17)


def make_trainer(*overrides, mixin=True):
    from skyrl.train.config.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer

    kind = type("Composed", (ArcticTrainerMixin, RayPPOTrainer), {}) if mixin else RayPPOTrainer
    trainer = object.__new__(kind)
    trainer.cfg = SkyRLTrainConfig.from_cli_overrides(list(overrides))
    trainer.all_metrics = {}
    trainer.dynamic_sampling_state = None
    return trainer


def advantages(trainer, totals, uids):
    """SkyRL's, of responses of three tokens whose last one holds the reward."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    rewards = torch.zeros(len(totals), 3)
    rewards[:, -1] = torch.tensor(totals)
    data = TrainingInputBatch({"rewards": rewards, "response_mask": torch.ones(len(totals), 3), "values": None})
    data.metadata = {"uids": uids, "avg_response_length": 3.0}
    return trainer.compute_advantages_and_returns(data)["advantages"]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_equal_rewards_have_no_advantage(estimator):
    """SkyRL alone: up to 0.0074 for eight rewards of 0.1 and 0.056 for eight of 0.7, where it should be 0."""
    setting = f"trainer.algorithm.advantage_estimator={estimator}"
    trainer, skyrls = make_trainer(setting), make_trainer(setting, mixin=False)
    largest = {}
    for reward in REWARDS:
        for size in SIZES:
            uids = ["a"] * size
            assert not advantages(trainer, [reward] * size, uids).any()
            largest[reward, size] = float(advantages(skyrls, [reward] * size, uids).abs().max())
    if estimator == "grpo":
        assert largest[0.1, 8] == pytest.approx(0.0074, abs=1e-4)
        assert largest[0.7, 8] == pytest.approx(0.056, abs=1e-3)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl", "reinforce++"])
def test_everything_else_is_skyrls(estimator):
    setting = f"trainer.algorithm.advantage_estimator={estimator}"
    totals, uids = [1.0, 0.0, 0.0, 0.0, 0.5, 0.7, 0.2], list("aaaabbc")
    ours, theirs = (advantages(make_trainer(setting, mixin=mixin), totals, uids) for mixin in (True, False))
    assert torch.equal(ours, theirs)
    if estimator == "grpo":
        assert ours[:4, 0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_a_group_of_one_and_the_rows_before_a_trajectorys_last_follow_their_group():
    rewards = torch.tensor([[0.0, 0.3], [0.2, 0.1], [9.0, 9.0], [0.0, 0.1], [0.0, 0.5], [0.0, 0.5]])
    uids = ["a", "a", "b", "b", "c", "d"]
    equal = rows_of_equal_groups(rewards, uids, [True, True, False, True, True, True])
    assert equal.tolist() == [True, True, False, False, False, False]
    equal = rows_of_equal_groups(rewards[[2, 3, 2, 3]], ["b"] * 4, [False, True, False, True])
    assert equal.tolist() == [True] * 4


def output(rewards, lengths, masks=None, last=None):
    result = {
        "prompt_token_ids": [[1]] * len(lengths),
        "response_ids": [[5] * length for length in lengths],
        "rewards": rewards,
        "loss_masks": masks or [[1] * length for length in lengths],
        "stop_reasons": ["stop"] * len(lengths),
        "rollout_logprobs": None,
    }
    return result if last is None else result | {"is_last_step": last}


def per_token(totals, lengths):
    return [[0.0] * (length - 1) + [total] for total, length in zip(totals, lengths, strict=True)]


FILTER = "trainer.algorithm.zero_variance_filter=true"
TOTALS = [0.1, 0.1, 0.1, 0.5, 0.1, 0.1]
UIDS = list("aaabbb")
LENGTHS = [2, 3, 1, 2, 2, 3]


def filtered(rewards, *settings, masks=None, uids=UIDS, lengths=LENGTHS, last=None):
    trainer = make_trainer(FILTER, *settings)
    result, _ = trainer.postprocess_generator_output(output(rewards, lengths, masks, last), uids)
    return [sum(mask) > 0 for mask in result["loss_masks"]], trainer.all_metrics


def test_the_filter_sees_rewards_of_tokens_as_it_sees_those_of_responses():
    for rewards in (TOTALS, per_token(TOTALS, LENGTHS)):
        kept, metrics = filtered(rewards)
        assert kept == [False, False, False, True, True, True]
        assert metrics["reward/num_zero_variance_filtered"] == 1


def test_the_filters_tolerance_and_what_is_masked_already():
    rewards = per_token([0.1, 0.10001, 0.1, 0.5, 0.1, 0.1], LENGTHS)
    assert filtered(rewards)[0] == [True] * 6
    tolerance = "trainer.algorithm.zero_variance_filter_tol=0.001"
    assert filtered(rewards, tolerance)[0] == [False] * 3 + [True] * 3
    masks = [[1, 1], [1, 1, 1], [1], [0, 0], [1, 1], [1, 1, 1]]
    assert filtered(rewards, masks=masks)[0] == [True] * 3 + [False] * 3, "only the masked sample differed"


def test_the_filter_drops_groups_whose_rewards_round():
    for reward in REWARDS:
        for size in SIZES:
            lengths = [2] * (size + 2)
            rewards = per_token([reward] * size + [0.0, 1.0], lengths)
            kept, _ = filtered(rewards, uids=["a"] * size + ["b"] * 2, lengths=lengths)
            assert kept == [False] * size + [True] * 2


def test_of_several_steps_the_last_ones_reward_counts_for_the_filter():
    rewards = [[0.0, 0.0], [0.0, 0.3], [0.0, 9.0], [0.0, 0.3], [0.0, 0.3], [0.0, 0.4]]
    last = [False, True, False, True, True, True]
    settings = ("generator.step_wise_trajectories=true",)
    kept, metrics = filtered(rewards, *settings, uids=list("aaaabb"), lengths=[2] * 6, last=last)
    assert kept == [False] * 4 + [True] * 2
    assert metrics["reward/num_zero_variance_filtered"] == 1


def test_nothing_is_filtered_unasked():
    trainer = make_trainer()
    result, _ = trainer.postprocess_generator_output(output(per_token(TOTALS, LENGTHS), LENGTHS), UIDS)
    assert all(sum(mask) for mask in result["loss_masks"])
    assert "reward/num_zero_variance_filtered" not in trainer.all_metrics
