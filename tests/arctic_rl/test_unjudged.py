"""Rewards and advantages around samples that could not be judged; SkyRL's own trainer methods are the oracle."""

import copy
import math
import pickle
import random
import statistics
from collections import Counter

import pytest

from integrations.arctic_rl.unjudged import JudgedBaselineMixin, UnjudgedMask, fill_unjudged_rewards


def test_the_mask_is_a_zero_mask_that_stays_itself():
    mask = UnjudgedMask(3)
    assert mask == [0, 0, 0] and isinstance(mask, list)
    for same in (copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask))):
        assert same == mask and type(same) is UnjudgedMask
    assert type(mask[:]) is list


def test_an_unjudged_sample_earns_the_mean_of_its_judged_siblings():
    rewards, unjudged = [1.0, 0.0, 0.0, 0.25, 0.0, 0.0], [False, True, False, False, True, True]
    assert fill_unjudged_rewards(rewards, unjudged, list("aabbbc")) == [1.0, 1.0, 0.0, 0.25, 0.125, 0.0]
    assert fill_unjudged_rewards(rewards, [False] * 6, list("aabbbc")) == rewards


def test_rewards_per_token_are_filled_at_the_last_token():
    rewards = [[0.0, 0.25, 0.5], [0.0, 0.0], [0.0, 0.0, 0.5], [7.0], []]
    filled = fill_unjudged_rewards(rewards, [False, True, False, True, True], ["a", "a", "a", "b", "b"])
    assert filled == [[0.0, 0.25, 0.5], [0.0, 0.625], [0.0, 0.0, 0.5], [0.0], []]


def test_of_several_rows_of_a_trajectory_the_last_counts():
    rewards = [[9.0], [0.0, 1.0], [9.0], [0.0, 0.0], [0.5, 0.0]]
    last = [False, True, False, True, True]
    filled = fill_unjudged_rewards(rewards, [False, False, True, True, False], ["a"] * 5, last)
    assert filled == [[9.0], [0.0, 1.0], [0.0], [0.0, 0.75], [0.5, 0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_the_groups_mean_and_whether_it_varies_stay(seed):
    draw = random.Random(seed)
    n = draw.randint(2, 9)
    rewards = [draw.choice([0.0, 0.1, 1.0]) for _ in range(n)]
    unjudged = [draw.random() < 0.4 for _ in range(n - 1)] + [False]
    judged = [reward for reward, left_out in zip(rewards, unjudged, strict=True) if not left_out]
    filled = fill_unjudged_rewards(rewards, unjudged, ["a"] * n)
    assert statistics.fmean(filled) == pytest.approx(statistics.fmean(judged), abs=1e-12)
    assert (len(set(filled)) > 1) == (len(set(judged)) > 1)
    assert max(filled) == max(judged)
    m = len(judged)
    if m > 1:
        shrunk = statistics.stdev(judged) * math.sqrt((m - 1) / (n - 1))
        assert statistics.stdev(filled) == pytest.approx(shrunk, abs=1e-12)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="zip"):
        fill_unjudged_rewards([1.0], [False, True], ["a", "a"])


ESTIMATORS = [("grpo", True), ("grpo", False), ("rloo", True), ("maxrl", True), ("reinforce++", True)]


def make_trainer(*overrides, mixin):
    from skyrl.train.config.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer

    kind = type("Composed", (JudgedBaselineMixin, RayPPOTrainer), {}) if mixin else RayPPOTrainer
    trainer = object.__new__(kind)
    trainer.cfg = SkyRLTrainConfig.from_cli_overrides(list(overrides))
    trainer.all_metrics = {}
    return trainer


def make_batch(rewards, response_mask, uids, unjudged_rows=None):
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    batch = TrainingInputBatch({"rewards": rewards, "response_mask": response_mask, "values": None})
    batch.metadata = {"uids": list(uids), "avg_response_length": 1.0}
    if unjudged_rows is not None:
        batch.metadata["unjudged_rows"] = unjudged_rows
    return batch


def random_case(seed):
    """Rewards [B, R], a right-aligned mask [B, R], uids and the judged rows; group g2 has none, g3 one judged row."""
    import torch

    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    uids = [f"g{group}" for group in range(6) for _ in range(5)]
    width = 7
    lengths = torch.randint(1, width + 1, (len(uids),), generator=generator)
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    rewards = torch.zeros(len(uids), width)
    rewards[:, -1] = torch.tensor([draw.choice([0.0, 0.1, 1.0]) for _ in uids])
    # As a KL penalty in the reward leaves it: something at every token.
    rewards -= 0.05 * torch.rand(rewards.shape, generator=generator) * mask
    judged = [draw.random() > 0.3 for _ in uids]
    judged[10:15], judged[15:20] = [False] * 5, [False, False, True, False, False]
    judged[0:2] = [True, True]
    return rewards, mask, uids, judged


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("estimator", "by_std"), ESTIMATORS)
def test_advantages_are_those_of_a_batch_without_the_unjudged_rows(estimator, by_std, seed):
    import torch

    overrides = [
        f"trainer.algorithm.advantage_estimator={estimator}",
        f"trainer.algorithm.grpo_norm_by_std={str(by_std).lower()}",
    ]
    rewards, mask, uids, judged = random_case(seed)
    kept = [row for row, known in enumerate(judged) if known]
    out = [row for row, known in enumerate(judged) if not known]

    expected = make_trainer(*overrides, mixin=False).compute_advantages_and_returns(
        make_batch(rewards[kept], mask[kept], [uids[row] for row in kept])
    )["advantages"]
    if estimator != "reinforce++":
        # A single judged sample has no baseline.
        sizes = Counter(uids[row] for row in kept)
        expected[[sizes[uids[row]] == 1 for row in kept]] = 0.0
    data = make_trainer(*overrides, mixin=True).compute_advantages_and_returns(
        make_batch(rewards.clone(), mask, uids, unjudged_rows=out)
    )
    torch.testing.assert_close(data["advantages"][kept], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(data["advantages"][out], torch.zeros(len(out), mask.shape[1]))
    assert torch.equal(data["response_mask"], mask)
    assert data.metadata["uids"] == uids and "unjudged_rows" not in data.metadata

    plain = make_trainer(*overrides, mixin=False).compute_advantages_and_returns(make_batch(rewards, mask, uids))
    assert not torch.allclose(plain["advantages"][kept], expected, atol=1e-3)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++"])
def test_a_batch_that_is_judged_throughout_is_skyrls(estimator):
    import torch

    rewards, mask, uids, _ = random_case(7)
    both = [
        make_trainer(f"trainer.algorithm.advantage_estimator={estimator}", mixin=mixin).compute_advantages_and_returns(
            make_batch(rewards, mask, uids)
        )
        for mixin in (False, True)
    ]
    assert torch.equal(both[0]["advantages"], both[1]["advantages"])


@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_returns_of_a_critics_values_are_too(seed):
    import torch

    rewards, mask, uids, judged = random_case(seed)
    values = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(seed)) * mask
    settings = ("trainer.algorithm.advantage_estimator=gae", "trainer.algorithm.lambd=0.9")
    kept, out = ([row for row, known in enumerate(judged) if known is wanted] for wanted in (True, False))
    batch = make_batch(rewards.clone(), mask, uids, out)
    batch["values"] = values
    ours = make_trainer(*settings, mixin=True).compute_advantages_and_returns(batch)
    alone = make_batch(rewards[kept], mask[kept], [uids[row] for row in kept])
    alone["values"] = values[kept]
    expected = make_trainer(*settings, mixin=False).compute_advantages_and_returns(alone)
    tokens = mask[kept].bool()
    for name in ("advantages", "returns"):
        torch.testing.assert_close(ours[name][kept][tokens], expected[name][tokens], rtol=1e-6, atol=1e-6)


def test_step_wise_rows_take_the_advantage_of_their_trajectory():
    import torch

    # Three trajectories of a prompt with two rows each; the second cannot be judged.
    rewards = torch.zeros(6, 3)
    rewards[:, -1] = torch.tensor([5.0, 1.0, 5.0, 0.5, 5.0, 0.0])
    mask = torch.ones(6, 3, dtype=torch.long)
    trainer = make_trainer(
        "generator.step_wise_trajectories=true", "trainer.algorithm.grpo_norm_by_std=false", mixin=True
    )
    batch = make_batch(rewards, mask, ["p"] * 6, unjudged_rows=[2, 3])
    batch.metadata["is_last_step"] = [False, True] * 3
    advantages = trainer.compute_advantages_and_returns(batch)["advantages"]
    assert advantages[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, -0.5, -0.5]


def make_output(masks, rewards):
    count = len(masks)
    return {
        "prompt_token_ids": [[1, 2]] * count,
        "response_ids": [[3] * len(mask) for mask in masks],
        "rewards": rewards,
        "loss_masks": masks,
        "stop_reasons": ["stop"] * count,
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.5] * len(mask) for mask in masks],
    }


def test_marks_go_from_a_generator_output_through_dynamic_sampling_into_the_batch():
    from types import SimpleNamespace

    from skyrl.train.generators.utils import concatenate_generator_outputs, slice_generator_output

    masks = [[1, 1], UnjudgedMask(3), [1], [0, 0], UnjudgedMask(1), [1, 1, 1]]
    first = slice_generator_output(make_output(masks, [1.0, 0.5, 0.0, 1.0, 0.0, 0.0]), [5, 4, 3, 1])
    output = concatenate_generator_outputs([first, make_output([UnjudgedMask(2), [1]], [0.0, 1.0])])
    trainer = make_trainer("generator.n_samples_per_prompt=2", "trainer.train_batch_size=3", mixin=True)
    trainer.cfg.trainer.policy_mini_batch_size = 3
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 4)
    output, uids = trainer.postprocess_generator_output(output, ["a", "a", "b", "b", "c", "c"])
    batch = trainer.convert_to_training_input(output, uids)
    assert batch.batch_size == 8
    assert batch.metadata["unjudged_rows"] == [1, 3, 4]
    assert batch["loss_mask"].sum(dim=1).tolist() == [3, 0, 0, 0, 0, 1, 0, 0]
    batch["values"] = None
    assert trainer.compute_advantages_and_returns(batch)["advantages"][[1, 3, 4]].abs().sum() == 0

    judged = make_output([[1, 1], [0, 0]], [1.0, 0.5])
    trainer.cfg.trainer.policy_mini_batch_size = trainer.cfg.trainer.train_batch_size = 1
    output, uids = trainer.postprocess_generator_output(judged, ["a", "a"])
    assert "unjudged_rows" not in trainer.convert_to_training_input(output, uids).metadata
