"""Dynamic sampling in SkyRL's own trainer: what is kept, sampled again or replaced are groups of whole trajectories.

The oracle is the list of trajectories that each batch was made of.
"""

import copy
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from skyrl.train.config.config import SkyRLTrainConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.compose import with_mixin
from integrations.arctic_rl.equal_rewards import shifted_rewards
from integrations.arctic_rl.trainer import ArcticTrainerMixin
from integrations.arctic_rl.unjudged import UnjudgedMask

SAMPLES = 3


class Trainer(ArcticTrainerMixin, RayPPOTrainer):
    def __init__(self, kind, *overrides, batch, mini_batch=1, samples=SAMPLES):
        values = {
            "trainer.algorithm.dynamic_sampling.type": kind,
            "trainer.algorithm.dynamic_sampling.max_sample_batches": 5,
            "trainer.train_batch_size": batch,
            "trainer.policy_mini_batch_size": mini_batch,
            "generator.n_samples_per_prompt": samples,
        }
        self.cfg = SkyRLTrainConfig.from_cli_overrides([*(f"{k}={v}" for k, v in values.items()), *overrides])
        self.all_metrics = {}
        self.dynamic_sampling_state = None
        self.tokenizer = SimpleNamespace(pad_token_id=0)
        self.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)


def trajectories_of(seed, uids, equal, step_wise):
    """By uid, by sample: rows of (prompt, response, reward of the response)."""
    draw = random.Random(seed)
    groups = {}
    for uid in uids:
        groups[uid] = []
        for sample in range(SAMPLES):
            turns = [draw.random() for _ in range(draw.randint(1, 3) if step_wise else 1)]
            turns[-1] = 0.1 if uid in equal else sample + 0.1
            groups[uid].append([([draw.randrange(99)], [draw.randrange(99)] * draw.randint(1, 4), r) for r in turns])
    return groups


def output_of(groups, step_wise, unjudged=()):
    """SkyRL's form of them, and each row's uid."""
    output = {name: [] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")}
    ids, last, seconds = [], [], []
    for uid, samples in groups.items():
        for sample, rows in enumerate(samples):
            for prompt, response, reward in rows:
                output["prompt_token_ids"].append(prompt)
                output["response_ids"].append(response)
                output["rewards"].append([0.0] * (len(response) - 1) + [reward])
                mask = UnjudgedMask(len(response)) if (uid, sample) in unjudged else [1] * len(response)
                output["loss_masks"].append(mask)
                output["rollout_logprobs"].append([-1.0] * len(response))
                ids.append(TrajectoryID(instance_id=uid, repetition_id=sample))
                last.append(False)
                seconds.append(float(sample))
            last[-1] = True
    output |= {"stop_reasons": ["stop"] * len(last), "env_metrics": [{}] * len(last)}
    output |= {"trajectory_generation_times": seconds, "trajectory_time_splits": {"llm": seconds, "env": seconds}}
    output |= {"trajectory_ids": ids, "is_last_step": last} if step_wise else dict.fromkeys(IDS)
    return output, [row_id.instance_id for row_id in ids]


IDS = ("trajectory_ids", "is_last_step")


def check(trainer, result, uids, groups):
    """The batch holds these groups, (uid, trajectories), and trains on them."""
    rows = [(uid, sample, row) for uid, samples in groups for sample, own in enumerate(samples) for row in own]
    assert uids == [uid for uid, *_ in rows]
    assert result["prompt_token_ids"] == [prompt for _, _, (prompt, _, _) in rows]
    assert result["response_ids"] == [response for _, _, (_, response, _) in rows]
    assert [sum(reward) for reward in result["rewards"]] == [reward for _, _, (_, _, reward) in rows]
    assert result["trajectory_time_splits"]["env"] == [float(sample) for _, sample, _ in rows]
    if result["trajectory_ids"] is not None:
        pairs = [(row_id.instance_id, row_id.repetition_id) for row_id in result["trajectory_ids"]]
        assert pairs == [(uid, sample) for uid, sample, _ in rows]
        assert sum(result["is_last_step"]) == SAMPLES * len(groups)
    result, uids = trainer.postprocess_generator_output(result, uids)
    batch = trainer.convert_to_training_input(result, uids)
    ends = np.cumsum([sum(map(len, samples)) for _, samples in groups]).tolist()
    assert batch.metadata["policy_mini_batch_boundaries"] == list(zip([0, *ends[:-1]], ends, strict=True))
    batch["values"] = None
    advantages = trainer.compute_advantages_and_returns(batch)["advantages"][:, -1].tolist()
    expected = []
    for _, samples in groups:
        rewards = [rows[-1][2] for rows in samples]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        expected += [(rows[-1][2] - mean) / (deviation + 1e-6) for rows in samples for _ in rows]
    assert advantages == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("step_wise", "merged"), [(False, False), (True, False), (True, True)])
def test_filtering_collects_groups_that_differ(step_wise, merged):
    """0.1 three times has a deviation of 1.4e-17 in NumPy."""
    settings = (f"generator.step_wise_trajectories={step_wise}", f"generator.merge_stepwise_output={merged}")
    trainer = Trainer("filter", *(settings if step_wise else ()), batch=4)
    kept = []
    for seed, (uids, equal) in enumerate([("abc", "b"), ("def", "ef"), ("ghi", "")]):
        groups = trajectories_of(seed, uids, equal, step_wise)
        kept += [(uid, samples) for uid, samples in groups.items() if uid not in equal]
        output, row_uids = output_of(groups, step_wise)
        result, found, again = trainer.handle_dynamic_sampling(output, row_uids)
        assert again == (seed < 2)
        if again:
            assert (result, found) == (output, row_uids)
    assert [uid for uid, _ in kept[:4]] == ["a", "c", "d", "g"]
    assert trainer.dynamic_sampling_state is None
    check(trainer, result, found, kept[:4])


@pytest.mark.parametrize("step_wise", [False, True], ids=["a row a trajectory", "a row a turn"])
@pytest.mark.parametrize("bad", ["b", "ac", "bde"])
def test_replacing_takes_the_place_of_groups_that_do_not_differ(step_wise, bad):
    """SkyRL's own batch holds a prompt twice under one uid, which no mini-batch can be made of."""
    trainer = Trainer(
        "replace",
        f"generator.step_wise_trajectories={step_wise}",
        "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.3",
        batch=5,
    )
    groups = trajectories_of(3, "abcde", bad, step_wise)
    np.random.seed(0)
    output, row_uids = output_of(groups, step_wise)
    result, uids, again = trainer.handle_dynamic_sampling(output, row_uids)
    assert not again
    places = list(dict.fromkeys(uids))
    expected = []
    for uid, place in zip("abcde", places, strict=True):
        good, between, of = place.partition("/in place of/")
        assert (uid not in bad) == (place == uid)
        assert uid not in bad or (between and of == uid and good not in bad)
        expected.append((place, groups[good]))
    check(trainer, result, uids, expected)
    strict = Trainer("replace", "trainer.algorithm.dynamic_sampling.min_replace_ratio=1.0", batch=5)
    rows, row_uids = output_of(trajectories_of(3, "abcde", bad, False), False)
    assert strict.handle_dynamic_sampling(rows, row_uids) == (rows, row_uids, True)


def test_the_choice_does_not_depend_on_how_strings_are_hashed():
    """The order of a set of strings is another one in each process."""
    names, choices, orders = list("abcdefgh"), set(), set()
    output, uids = output_of(trajectories_of(0, names, "bdfh", False), False)

    class Uid(str):
        factor = 1

        def __hash__(self):
            return self.factor * ord(self[0])

    for factor in (1, -1, 3):
        Uid.factor = factor
        orders.add("".join({Uid(name) for name in names}))
        np.random.seed(1)
        trainer = Trainer("replace", "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.2", batch=8)
        _, chosen, _ = trainer.handle_dynamic_sampling(output, list(map(Uid, uids)))
        choices.add(tuple(dict.fromkeys(map(str, chosen))))
    assert len(orders) > 1
    assert len(choices) == 1


def test_rows_that_could_not_be_judged_stay_so_in_a_copy():
    trainer = Trainer("replace", "generator.step_wise_trajectories=true", batch=2)
    groups = trajectories_of(5, "ab", "b", True)
    output, uids = output_of(groups, True, unjudged={("a", 2)})
    result, uids, _ = trainer.handle_dynamic_sampling(output, uids)
    result, uids = trainer.postprocess_generator_output(result, uids)
    batch = trainer.convert_to_training_input(result, uids)
    batch["values"] = None
    advantages = trainer.compute_advantages_and_returns(batch)["advantages"]
    counts = [len(rows) for _ in range(2) for rows in groups["a"]]
    for sample, part in enumerate(torch.split(advantages, counts)):
        assert bool((part == 0).all()) == (sample % SAMPLES == 2)


def test_a_batch_without_any_group_that_differs_is_sampled_again_until_the_limit():
    equal = output_of(trajectories_of(0, "ab", "ab", False), False)
    trainer = Trainer("filter", "trainer.algorithm.dynamic_sampling.max_sample_batches=3", batch=2)
    for _ in range(2):
        assert trainer.handle_dynamic_sampling(*equal)[2]
    with pytest.raises(RuntimeError, match="max_sample_batches=3"):
        trainer.handle_dynamic_sampling(*equal)
    trainer = Trainer("filter", batch=1)
    assert trainer.handle_dynamic_sampling(*equal)[2]
    result, kept, again = trainer.handle_dynamic_sampling(*output_of(trajectories_of(0, "cd", "c", False), False))
    assert (kept, again) == (["d"] * SAMPLES, False)
    assert len(result["response_ids"]) == SAMPLES


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_the_callers_output_is_left_alone(kind):
    given = output_of(trajectories_of(0, "ab", "a", True), True)
    before = copy.deepcopy(given)
    trainer = Trainer(kind, "generator.step_wise_trajectories=true", batch=1)
    assert not trainer.handle_dynamic_sampling(*given)[2]
    assert given == before


def test_rewards_of_responses_are_compared_too():
    output, uids = output_of(trajectories_of(0, "ab", "a", False), False)
    output["rewards"] = [sum(reward) for reward in output["rewards"]]
    result, kept, _ = Trainer("filter", batch=1).handle_dynamic_sampling(output, uids)
    assert (kept, result["rewards"]) == (["b"] * SAMPLES, output["rewards"][SAMPLES:])
    assert shifted_rewards(output["rewards"], uids) == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]


def test_a_recipes_own_is_given_what_was_generated():
    class Own(RayPPOTrainer):
        def handle_dynamic_sampling(self, generator_output, uids):
            return generator_output, uids, "own"

    trainer = object.__new__(with_mixin(ArcticTrainerMixin, Own))
    given = output_of(trajectories_of(0, "ab", "ab", False), False)
    result, uids, again = trainer.handle_dynamic_sampling(*given)
    assert (result is given[0], uids is given[1], again) == (True, True, "own")
