"""Step-wise trajectories, merged or not, from SkyRL's generator output through SkyRL's own trainer methods to updates.

The oracle takes the trajectories as they were drawn: rows, mini-batches and advantages by hand, then SkyRL's losses on
a padded batch in one process.
"""

import copy
import json
import random
import statistics
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import apply_loss_reduction_to_advantages_minibatch
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.trainer import ArcticTrainerMixin
from integrations.arctic_rl.unjudged import UnjudgedMask
from tests.arctic_rl.in_process_backend import InProcessBackend
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.skyrl_reference import PAD_ID, ReferenceTrainer, action_log_probs

VOCAB = 128
PROMPTS, SAMPLES, MINI_BATCH = 4, 3, 2


class Trainer(ArcticTrainerMixin, RayPPOTrainer):
    """Ours and SkyRL's, without what only a whole run needs."""

    def __init__(self, cfg, dispatch):
        self.cfg, self.dispatch, self.global_step = cfg, dispatch, 1
        self.all_metrics, self.all_timings = {}, {}
        self.tokenizer = SimpleNamespace(pad_token_id=PAD_ID)
        self.ref_model = dispatch if cfg.trainer.algorithm.use_kl_loss else None


@dataclass
class Step:
    """A turn: what the engine was sent, what it said, and what the environment answered, which is not trained on."""

    prompt: list[int]
    action: list[int]
    observation: list[int]
    reward: float
    continues: bool
    """The prompt begins with all of the step before."""

    @property
    def row(self):
        mask = [1] * len(self.action) + [0] * len(self.observation)
        return self.prompt, self.action + self.observation, mask


def trajectory(draw, prompt):
    """One to four turns; now and then the history before a turn is another one than was generated."""
    steps = []
    for turn in range(draw.randint(1, 4)):
        prompt = list(prompt)
        continues = turn == 0 or draw.random() < 0.7
        if not continues:
            prompt[draw.randrange(len(prompt))] ^= 1
        elif turn:
            prompt += tokens(draw, 0, 2)
        steps.append(Step(prompt, tokens(draw, 1, 5), tokens(draw, 0, 4), draw.random(), continues))
        prompt = prompt + steps[-1].action + steps[-1].observation
    return steps


def tokens(draw, shortest, longest):
    return [draw.randrange(VOCAB) for _ in range(draw.randint(shortest, longest))]


def draw_trajectories(seed):
    """By prompt, by sample."""
    draw = random.Random(seed)
    prompts = [tokens(draw, 2, 6) for _ in range(PROMPTS)]
    return [[trajectory(draw, prompt) for _ in range(SAMPLES)] for prompt in prompts]


def generator_output(groups, unjudged=()):
    """SkyRL's step-wise form of them."""
    output = {name: [] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")}
    output |= {"rollout_logprobs": [], "trajectory_ids": [], "is_last_step": [], "env_metrics": []}
    for group, samples in enumerate(groups):
        for sample, steps in enumerate(samples):
            for step in steps:
                prompt, response, mask = step.row
                output["prompt_token_ids"].append(prompt)
                output["response_ids"].append(response)
                output["loss_masks"].append(UnjudgedMask(len(mask)) if (group, sample) in unjudged else mask)
                reward = [0.0] * len(response)
                reward[len(step.action) - 1] = step.reward
                output["rewards"].append(reward)
                output["rollout_logprobs"].append([-1.0] * len(step.action) + [0.0] * len(step.observation))
                output["stop_reasons"].append("stop")
                output["trajectory_ids"].append(TrajectoryID(instance_id=f"prompt {group}", repetition_id=sample))
                output["is_last_step"].append(step is steps[-1])
                output["env_metrics"].append({})
    output["rollout_metrics"] = None
    validate_generator_output(PROMPTS * SAMPLES, output, step_wise=True)
    return output


def merged_rows(steps):
    """Rows of one trajectory: a turn that continues the one before is one row with it."""
    rows = []
    for step in steps:
        prompt, response, mask = step.row
        if step is steps[0] or not step.continues:
            rows.append((prompt, response, mask))
            continue
        first, before, kept = rows[-1]
        between = prompt[len(first) + len(before) :]
        rows[-1] = (first, before + between + response, kept + [0] * len(between) + mask)
    return rows


def expected_batch(groups, *, merged):
    """The padded batch with advantages, and its mini-batches."""
    rows, advantages, boundaries = [], [], []
    for group, samples in enumerate(groups):
        # SkyRL's rule: the last row's reward is the trajectory's; a merged row holds the rewards of all its turns.
        returns = []
        for steps in samples:
            last = max(i for i, step in enumerate(steps) if i == 0 or not step.continues) if merged else -1
            returns.append(sum(step.reward for step in steps[last:]))
        mean, deviation = statistics.fmean(returns), statistics.stdev(returns)
        if group % MINI_BATCH == 0:
            boundaries.append((len(rows), 0))
        for steps, value in zip(samples, returns, strict=True):
            own = merged_rows(steps) if merged else [step.row for step in steps]
            rows += own
            advantages += [(value - mean) / (deviation + 1e-6)] * len(own)
        boundaries[-1] = (boundaries[-1][0], len(rows))
    prompts, responses, masks = zip(*rows, strict=True)
    zeros = [[0.0] * len(response) for response in responses]
    sequences, attention_mask, response_mask, _, loss_mask, *_ = convert_prompts_responses_to_batch_tensors(
        PAD_ID, list(prompts), list(responses), zeros, list(masks)
    )
    advantages = torch.tensor(advantages)[:, None] * response_mask
    for start, end in boundaries:
        advantages[start:end] = apply_loss_reduction_to_advantages_minibatch(
            advantages[start:end], loss_mask[start:end], "token_mean", micro_batch_size=1, max_seq_len=99
        )
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "advantages": advantages,
        }
    )
    batch.metadata = {"response_length": response_mask.shape[1]}
    return batch, boundaries


@pytest.fixture(scope="module")
def models():
    return {"policy": tiny_model(attention="eager"), "ref": tiny_model(attention="eager", seed=3)}


@pytest.fixture
def make_trainer(models, loop, tmp_path):
    def make(*overrides, ranks=1, ref_ranks=1):
        twins = {job: copy.deepcopy(model) for job, model in models.items()}
        for twin in twins.values():
            twin.set_attn_implementation(attention_implementation("cpu"))
        backend = InProcessBackend(twins, ranks={"policy": ranks, "ref": ref_ranks}, max_grad_norm=float("inf"))
        cfg = parse_config(
            [
                "trainer.logger=console",
                f"trainer.log_path={tmp_path}",
                f"trainer.train_batch_size={PROMPTS}",
                f"trainer.policy_mini_batch_size={MINI_BATCH}",
                "trainer.micro_train_batch_size_per_gpu=3",
                "trainer.micro_forward_batch_size_per_gpu=2",
                "trainer.algorithm.kl_loss_coef=0.1",
                f"generator.n_samples_per_prompt={SAMPLES}",
                "generator.step_wise_trajectories=true",
                f"trainer.placement.policy_num_gpus_per_node={ranks}",
                f"trainer.placement.ref_num_gpus_per_node={ref_ranks}",
                *overrides,
            ]
        )
        dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None)
        return Trainer(cfg, dispatch), backend, twins["policy"]

    return make


def prepared(trainer, output):
    """The training input of a generator output, with log-probs and advantages, as SkyRL's train() makes it."""
    uids = [trajectory_id.instance_id for trajectory_id in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.fwd_logprobs_values_reward(trainer.convert_to_training_input(output, uids))
    return trainer.compute_advantages_and_returns(batch)


@pytest.mark.parametrize("merged", [False, True], ids=["a row a turn", "merged"])
@pytest.mark.parametrize(
    ("seed", "ranks", "ref_ranks", "sequence_parallel_size", "per_mini_batch"),
    [
        (0, 1, 1, 1, True),
        (0, 2, 1, 1, True),
        (1, 3, 2, 1, True),
        (1, 2, 1, 1, False),
        (0, 4, 1, 2, True),
        (1, 2, 1, 2, False),
    ],
)
def test_old_log_probs_and_updates_agree_with_the_reference(
    make_trainer, models, tmp_path, merged, seed, ranks, ref_ranks, sequence_parallel_size, per_mini_batch
):
    groups = draw_trajectories(seed)
    trainer, backend, policy = make_trainer(
        f"generator.merge_stepwise_output={merged}",
        f"trainer.recompute_old_logprobs_per_minibatch={per_mini_batch}",
        f"trainer.policy.sequence_parallel_size={sequence_parallel_size}",
        ranks=ranks,
        ref_ranks=ref_ranks,
    )
    expected, boundaries = expected_batch(groups, merged=merged)
    rows = len(expected)
    assert len({end - start for start, end in boundaries}) > 1, "mini-batches of one size show little"

    batch = prepared(trainer, generator_output(groups))
    assert batch.metadata["policy_mini_batch_boundaries"] == boundaries
    assert len(batch) == -(-rows // trainer.dispatch.get_lcm_dp_size()) * trainer.dispatch.get_lcm_dp_size()
    for name in ("sequences", "attention_mask", "response_mask", "loss_mask"):
        assert torch.equal(batch[name][:rows].float(), expected[name].float()), name
    assert not batch["loss_mask"][rows:].any()
    for name, job in (("action_log_probs", "policy"), ("base_action_log_probs", "ref")):
        with torch.no_grad():
            expected[name] = action_log_probs(models[job], expected, 1.0)[0]
        assert (batch[name][:rows] - expected[name])[expected["response_mask"].bool()].abs().max() < 1e-5, name

    gradients, step = [], trainer.dispatch.optim_step
    trainer.dispatch.optim_step = lambda model: gradients.append(backend.gradient()) or step(model)
    metrics = trainer.train_critic_and_policy(batch)
    plain = ReferenceTrainer(
        copy.deepcopy(models["policy"]),
        lr=1e-2,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        max_grad_norm=0.0,
        scheduler="constant",
        num_warmup_steps=0,
        num_training_steps=2,
    )
    updates = [plain.update(expected[start:end], trainer.cfg.trainer.algorithm) for start, end in boundaries]
    for update, gradient, tolerance in zip(updates, gradients, (1e-5, 1e-3), strict=True):
        for name, theirs in update.gradient.items():
            assert (gradient[name] - theirs).norm() <= tolerance * theirs.norm(), name
    for before, theirs, ours in zip(
        models["policy"].parameters(), plain.model.parameters(), policy.parameters(), strict=True
    ):
        assert (ours - theirs).norm() < 1e-3 * (theirs - before).norm()
    for name in ("final_loss", "policy_loss", "policy_entropy", "policy_kl"):
        assert metrics[name] == pytest.approx(sum(u.metrics[name] for u in updates) / 2, rel=1e-3, abs=1e-6), name
    assert metrics["grad_norm"] == pytest.approx(sum(u.grad_norm for u in updates) / 2, rel=1e-3)

    sent = [meta for _, meta, _ in backend.arguments("fwd_bwd")]
    assert [meta["global_batch_size"] for meta in sent] == [end - start for start, end in boundaries]
    assert [meta["batch_num_tokens"] for meta in sent] == [
        int(expected["loss_mask"][start:end].sum()) for start, end in boundaries
    ]
    log = [json.loads(line) for line in (tmp_path / "optimizer_steps.jsonl").read_text().splitlines()]
    assert log[0]["ratio_max_deviation"] < 1e-4 < log[1]["ratio_max_deviation"]


@pytest.mark.parametrize("merged", [False, True], ids=["a row a turn", "merged"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trajectory_that_nobody_could_judge_leaves_its_group_as_if_it_were_not_there(make_trainer, merged, ranks):
    groups = draw_trajectories(5)
    unjudged = {(0, 1), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2)}
    trainer, *_ = make_trainer(f"generator.merge_stepwise_output={merged}", ranks=ranks)
    batch = prepared(trainer, generator_output(groups, unjudged))
    every, _ = expected_batch(groups, merged=merged)
    row = 0
    for group, samples in enumerate(groups):
        judged = [steps for sample, steps in enumerate(samples) if (group, sample) not in unjudged]
        rows_of = {id(steps): merged_rows(steps) if merged else [step.row for step in steps] for steps in samples}
        returns = {}
        for steps in judged:
            last = max(i for i, step in enumerate(steps) if i == 0 or not step.continues) if merged else -1
            returns[id(steps)] = sum(step.reward for step in steps[last:])
        for steps in samples:
            rows = slice(row, row + len(rows_of[id(steps)]))
            row = rows.stop
            advantage = 0.0
            if len(judged) > 1 and id(steps) in returns:
                mean, deviation = statistics.fmean(returns.values()), statistics.stdev(returns.values())
                advantage = (returns[id(steps)] - mean) / (deviation + 1e-6)
            expected = advantage * every["response_mask"][rows]
            assert torch.allclose(batch["advantages"][rows], expected.float(), atol=1e-5), (group, advantage)
            assert batch["loss_mask"][rows].any() == (id(steps) in returns)
    assert row == len(every)
