"""SkyRL's whole training loop, through our trainer and dispatch, against the same run in one plain process.

The reference sees the rollouts and does everything after them itself: SkyRL's functions one after the other on padded
tensors, ``torch.optim.AdamW``, no dispatch, no packing, no micro-batches.
"""

import asyncio
import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    AdvantageEstimatorRegistry,
    apply_loss_reduction_to_advantages_minibatch,
    compute_approx_kl,
    register_advantage_estimator,
)
from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.utils import validate_batch_sizes

from integrations.arctic_rl.compose import apply_mixin
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.trainer import ArcticTrainerMixin
from tests.arctic_rl.in_process_backend import InProcessBackend, packable
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.skyrl_reference import PAD_ID, ReferenceTrainer, action_log_probs

PROMPTS, SAMPLES, MINI_BATCH = 8, 2, 4
LR = 1e-2
DRIFT = "minibatch_rollout_logprobs_abs_diff"


class Prompts(list):
    """Data set of prompts of token ids."""

    def collate_fn(self, items):
        return list(items)


def prompts(count):
    return Prompts(
        {"prompt": [3 + row, 5, 7 + row % 3], "env_class": None, "env_extras": {}, "uid": str(row)}
        for row in range(count)
    )


class Rollouts:
    """Random responses, the same in every run, whose rewards are numbers, or numbers per token."""

    def __init__(self, per_token, tokens=6, rewards=(0.0, 0.1, 0.5, 1.0)):
        self._per_token = per_token
        self._tokens = tokens
        self._rewards = rewards
        self.given = []

    async def generate(self, input_batch, disable_tqdm=False):
        draw = np.random.default_rng([7, len(self.given)])
        rows = len(input_batch["prompts"])
        lengths = draw.integers(1, self._tokens + 1, rows)
        rewards = draw.choice(self._rewards, rows).tolist()
        output = {
            "prompt_token_ids": [list(prompt) for prompt in input_batch["prompts"]],
            "response_ids": [draw.integers(1, 128, length).tolist() for length in lengths],
            "rewards": rewards,
            "loss_masks": [(draw.random(length) < 0.8).astype(int).tolist() for length in lengths],
            "stop_reasons": ["stop"] * rows,
            "rollout_logprobs": [(-4 - draw.random(length)).tolist() for length in lengths],
            "rollout_metrics": None,
        }
        if self._per_token:
            output["rewards"] = [
                [0.25] * (length > 1) + [0.0] * (length - 2) + [reward]
                for length, reward in zip(lengths.tolist(), rewards, strict=True)
            ]
        self.given.append((copy.deepcopy(output), [item.instance_id for item in input_batch["trajectory_ids"]]))
        return output


class Client:
    weight_version = 0

    def increment_weight_version(self):
        self.weight_version += 1

    async def sleep(self):
        pass


class Tracker:
    def __init__(self):
        self.logs = []

    def log(self, payload, step, commit=False):
        self.logs.append(dict(payload))

    def finish(self):
        pass


def config(tmp_path, *settings):
    values = {
        "trainer.logger": "console",
        "trainer.log_path": tmp_path,
        "trainer.export_path": tmp_path,
        "trainer.epochs": 1,
        "trainer.train_batch_size": PROMPTS,
        "trainer.policy_mini_batch_size": MINI_BATCH,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 3,
        "trainer.resume_mode": "null",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.enable_ray_gpu_monitor": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "trainer.algorithm.use_kl_loss": False,
        "generator.n_samples_per_prompt": SAMPLES,
    }
    return parse_config([*(f"{key}={value}" for key, value in values.items()), *settings])


def models():
    return {"policy": tiny_model(attention="eager"), "ref": tiny_model(attention="eager", seed=3)}


def train(cfg, loop, *, ranks=1, per_token=True, lr=LR, count=PROMPTS, **rollouts):
    """Our run: trained weights, the tracker's logs, the backend, the rollouts, the trainer."""
    twins = {name: packable(model) for name, model in models().items()}
    backend = InProcessBackend(twins, ranks={"policy": ranks, "ref": ranks}, lr=lr)
    tracker, generator = Tracker(), Rollouts(per_token, **rollouts)
    plain = RayPPOTrainer(
        cfg=cfg,
        tracker=tracker,
        tokenizer=SimpleNamespace(pad_token_id=PAD_ID),
        train_dataset=prompts(count),
        inference_engine_client=Client(),
        generator=generator,
    )
    trainer = apply_mixin(ArcticTrainerMixin, plain)
    trainer.attach_backend(backend, loop)
    trainer.build_models(None, None, None)
    asyncio.run(trainer.train())
    return SimpleNamespace(
        policy=twins["policy"], ref=twins["ref"], logs=tracker.logs, backend=backend, given=generator.given
    )


class PlainRun:
    """The same run without any of our code."""

    def __init__(self, cfg, lr=LR):
        self._cfg = cfg
        self._reference = models()["ref"]
        self.trainer = ReferenceTrainer(
            models()["policy"],
            lr=lr,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            max_grad_norm=1.0,
            scheduler="constant",
            num_warmup_steps=0,
            num_training_steps=1,
        )
        self.updates = []
        self.kl_coef = cfg.trainer.algorithm.kl_loss_coef

    def batch(self, output, uids):
        """Update on one batch of rollouts."""
        trainer, algorithm = self._cfg.trainer, self._cfg.trainer.algorithm
        batch = self._tensors(output)
        if algorithm.use_kl_in_reward:
            self._penalise(batch)
        advantages, _ = AdvantageEstimatorRegistry.get(algorithm.advantage_estimator)(
            token_level_rewards=batch["rewards"],
            response_mask=batch["response_mask"],
            index=uids,
            grpo_norm_by_std=algorithm.grpo_norm_by_std,
            gamma=algorithm.gamma,
            config=algorithm,
        )
        if algorithm.advantage_batch_normalize:
            kept = batch["response_mask"].bool()
            mean = advantages.mean()
            advantages = (advantages - mean) / (advantages - mean)[kept].square().mean().clamp(min=1e-8).sqrt()
        batch["advantages"] = advantages
        samples = self._cfg.generator.n_samples_per_prompt
        size = trainer.policy_mini_batch_size * samples
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        for part in parts:
            part["advantages"] = apply_loss_reduction_to_advantages_minibatch(
                part["advantages"],
                part["loss_mask"],
                algorithm.loss_reduction,
                trainer.micro_train_batch_size_per_gpu,
                algorithm.max_seq_len,
                [(start, start + samples) for start in range(0, size, samples)],
            )
        for _ in range(trainer.update_epochs_per_batch):
            self.updates += [self.trainer.update(part, algorithm) for part in parts]

    def refresh_reference(self):
        self._reference.load_state_dict(self.trainer.model.state_dict())

    def _tensors(self, output):
        rewards = [
            reward if isinstance(reward, list) else [0.0] * (len(response) - 1) + [reward]
            for reward, response in zip(output["rewards"], output["response_ids"], strict=True)
        ]
        sequences, attention_mask, response_mask, rewards, loss_mask, rollout, *_ = (
            convert_prompts_responses_to_batch_tensors(
                PAD_ID,
                output["prompt_token_ids"],
                output["response_ids"],
                rewards,
                output["loss_masks"],
                output["rollout_logprobs"],
            )
        )
        batch = TrainingInputBatch(
            {
                "sequences": sequences,
                "attention_mask": attention_mask,
                "response_mask": response_mask,
                "rewards": rewards,
                "loss_mask": loss_mask,
                "rollout_logprobs": rollout,
            }
        )
        batch.metadata = {"response_length": response_mask.shape[1]}
        temperature = self._cfg.trainer.algorithm.temperature
        with torch.no_grad():
            batch["action_log_probs"] = action_log_probs(self.trainer.model, batch, temperature)[0]
            batch["base_action_log_probs"] = action_log_probs(self._reference, batch, temperature)[0]
        return batch

    def _penalise(self, batch):
        algorithm = self._cfg.trainer.algorithm
        kl = compute_approx_kl(
            batch["action_log_probs"], batch["base_action_log_probs"], batch["loss_mask"], algorithm.kl_estimator_type
        )
        batch["rewards"] = batch["rewards"] - kl * self.kl_coef
        if algorithm.kl_ctrl.type == "adaptive":
            mean = masked_mean(kl, batch["loss_mask"], dim=-1).mean().item()
            error = min(max(mean / algorithm.kl_ctrl.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * len(batch) / algorithm.kl_ctrl.horizon


def change(model):
    before = dict(models()["policy"].named_parameters())
    return {name: (value - before[name]).detach() for name, value in model.named_parameters()}


def distance(ours, expected):
    difference = sum(float((ours[name] - expected[name]).norm()) ** 2 for name in expected) ** 0.5
    return difference / sum(float(values.norm()) ** 2 for values in expected.values()) ** 0.5


@register_advantage_estimator("first_of_its_group")
def first_of_its_group(token_level_rewards, response_mask, index, **_):
    """An estimator of a user's own: a sample's reward less that of its group's first."""
    totals = token_level_rewards.sum(-1)
    first = {}
    for uid, total in zip(index, totals, strict=True):
        first.setdefault(uid, total)
    baseline = torch.stack([first[uid] for uid in index])
    advantages = (totals - baseline)[:, None] * response_mask
    return advantages, advantages


KL_LOSS = ("trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.3")
KL_REWARD = ("trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_loss_coef=0.3")
CORRECTION = "trainer.algorithm.off_policy_correction"
RUNS = {
    "grpo": (),
    "grpo without deviation": ("trainer.algorithm.grpo_norm_by_std=false",),
    "rloo": ("trainer.algorithm.advantage_estimator=rloo", "trainer.algorithm.loss_reduction=sequence_mean"),
    "reinforce++": (
        "trainer.algorithm.advantage_estimator=reinforce++",
        "trainer.algorithm.gamma=0.9",
        "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm",
        "trainer.algorithm.max_seq_len=16",
    ),
    "maxrl": ("trainer.algorithm.advantage_estimator=maxrl", "trainer.algorithm.loss_reduction=prompt_mean"),
    "a user's estimator": (
        "trainer.algorithm.advantage_estimator=first_of_its_group",
        "trainer.algorithm.loss_reduction=token_mean_legacy",
    ),
    "normalised over the batch": ("trainer.algorithm.advantage_batch_normalize=true",),
    "kl loss, k1, temperature": (
        *KL_LOSS,
        "trainer.algorithm.kl_estimator_type=k1",
        "generator.sampling_params.temperature=0.7",
    ),
    "kl loss, abs": (*KL_LOSS, "trainer.algorithm.kl_estimator_type=abs"),
    "kl loss, k2": (*KL_LOSS, "trainer.algorithm.kl_estimator_type=k2"),
    "kl loss, k3, entropy": (*KL_LOSS, "trainer.algorithm.use_entropy_loss=true"),
    "kl reward, k1": (*KL_REWARD, "trainer.algorithm.kl_estimator_type=k1"),
    "kl reward, k2": (*KL_REWARD, "trainer.algorithm.kl_estimator_type=k2"),
    "kl reward, k3, temperature": (*KL_REWARD, "generator.sampling_params.temperature=1.4"),
    "kl reward, abs, adaptive": (
        *KL_REWARD,
        "trainer.algorithm.kl_estimator_type=abs",
        "trainer.algorithm.kl_ctrl.type=adaptive",
        "trainer.algorithm.kl_ctrl.kl_target=0.1",
        "trainer.algorithm.kl_ctrl.horizon=50",
        "trainer.epochs=2",
    ),
    "gspo": ("trainer.algorithm.policy_loss_type=gspo", "trainer.algorithm.loss_reduction=sequence_mean"),
    "weights of tokens": (f"{CORRECTION}.tis_ratio_type=token", f"{CORRECTION}.token_tis_ratio_clip_high=1.2"),
    "a mask of sequences": (
        "trainer.algorithm.policy_loss_type=dual_clip",
        f"{CORRECTION}.sequence_mask_metric=geometric",
        f"{CORRECTION}.geo_mask_low=0.8",
        f"{CORRECTION}.geo_mask_high=1.4",
    ),
    "the sampler's log-probs": ("trainer.algorithm.policy_loss_type=rollout_is", "trainer.algorithm.eps_clip_high=9"),
    "two passes": ("trainer.update_epochs_per_batch=2",),
    "one pass for the old log-probs": ("trainer.recompute_old_logprobs_per_minibatch=false", *KL_LOSS),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_the_plain_one(name, loop, tmp_path):
    cfg = config(tmp_path, *RUNS[name])
    per_token = len(name) % 2 == 0
    ours = train(cfg, loop, ranks=1 + len(name) % 2, per_token=per_token)
    plain = PlainRun(cfg)
    for output, uids in ours.given:
        plain.batch(output, uids)
    assert distance(change(ours.policy), change(plain.trainer.model)) <= 1e-3
    updates_per_batch = len(plain.updates) // len(ours.logs)
    for number, log in enumerate(ours.logs):
        of_batch = plain.updates[number * updates_per_batch : (number + 1) * updates_per_batch]
        for key in of_batch[0].metrics:
            values = [update.metrics[key] for update in of_batch]
            value = max(values) if key.endswith("_max") else min(values) if key.endswith("_min") else np.mean(values)
            if not key.endswith("_sq_mean"):
                assert log[f"policy/{key}"] == pytest.approx(value, rel=2e-3, abs=2e-6), key
        squares = np.mean([update.metrics[f"{DRIFT}_sq_mean"] for update in of_batch])
        variance = squares - log[f"policy/{DRIFT}_mean"] ** 2
        assert log[f"policy/{DRIFT}_std"] == pytest.approx(variance**0.5, rel=2e-3)
        norm = np.mean([update.grad_norm for update in of_batch])
        assert log["policy/grad_norm"] == pytest.approx(norm, rel=2e-3)


def test_what_each_setting_changes_is_felt(loop, tmp_path):
    """The plain run's weights differ from those of the plain run without the settings."""
    base = train(config(tmp_path), loop)
    without = PlainRun(config(tmp_path))
    for output, uids in base.given:
        without.batch(output, uids)
    for name, settings in RUNS.items():
        if not settings or name == "one pass for the old log-probs":
            continue
        plain = PlainRun(config(tmp_path, *settings))
        for output, uids in base.given:
            plain.batch(output, uids)
        assert distance(change(plain.trainer.model), change(without.trainer.model)) > 1e-2, name


def step_lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "optimizer_steps.jsonl").read_text().splitlines()]


def test_two_mini_batches_are_two_optimizer_steps(loop, tmp_path):
    """8 prompts x 2 samples, mini-batches of 4 prompts: the weights of a plain loop over the two."""
    ours = train(config(tmp_path), loop, lr=1e-4)
    plain = PlainRun(config(tmp_path), lr=1e-4)
    for output, uids in ours.given:
        plain.batch(output, uids)
    for one, other in zip(ours.policy.parameters(), plain.trainer.model.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-6
    assert [name for name in ours.backend.names() if name in ("fwd_bwd", "step")] == ["fwd_bwd", "step"] * 2
    assert [line["num_rows"] for line in step_lines(tmp_path)] == [8, 8]


def test_clipping_bites_in_the_second_pass_over_a_batch(loop, tmp_path):
    """2 passes x 2 mini-batches, learning rate 0.1: old log-probs are those of the batch's start in all four."""
    cfg = config(tmp_path, "trainer.update_epochs_per_batch=2")
    ours = train(cfg, loop, lr=0.1)
    deviation = second_ratio_deviation(cfg, ours)
    assert deviation > 1e-3
    sent = [batch["old_log_probs"] for batch, _, _ in ours.backend.arguments("fwd_bwd")]
    assert torch.equal(sent[0], sent[2]) and torch.equal(sent[1], sent[3])
    assert ours.backend.names().index("fwd_bwd") > max(
        place for place, name in enumerate(ours.backend.names()) if name == "fwd_no_grad"
    )
    first, second, *again = step_lines(tmp_path)
    assert first["ratio_max_deviation"] < 1e-5 and first["pg_clipfrac"] == 0
    assert second["ratio_max_deviation"] > 1e-3
    assert all(line["pg_clipfrac"] > 0 for line in again)
    plain = PlainRun(cfg, lr=0.1)
    for output, uids in ours.given:
        plain.batch(output, uids)
    fractions = [update.metrics["loss_metrics/clip_ratio"] for update in plain.updates]
    assert [line["pg_clipfrac"] for line in step_lines(tmp_path)] == pytest.approx(fractions, abs=1e-6)
    assert distance(change(ours.policy), change(plain.trainer.model)) <= 1e-3


def second_ratio_deviation(cfg, ours):
    """Mean |ratio - 1| of the tokens of the second mini-batch, after the first update, in the plain run."""
    plain = PlainRun(cfg, lr=0.1)
    ((output, uids), *_) = ours.given
    size = MINI_BATCH * SAMPLES
    second = plain._tensors(output)[size:]
    plain.batch({**output}, uids)
    weights = [update.change for update in plain.updates]
    policy = models()["policy"]
    with torch.no_grad():
        for name, value in policy.named_parameters():
            value += weights[0][name]
        moved = action_log_probs(policy, second, 1.0)[0]
    kept = second["loss_mask"].bool()
    return float(((moved - second["action_log_probs"])[kept].exp() - 1).abs().mean())


@pytest.mark.parametrize("per_mini_batch", ["true", "false"])
def test_old_log_probs_are_taken_in_the_updates_own_parts_where_asked_for(loop, tmp_path, per_mini_batch):
    cfg = config(tmp_path, f"trainer.recompute_old_logprobs_per_minibatch={per_mini_batch}")
    ours = train(cfg, loop)
    rows = [len(batch["input_ids"]) for _, batch, _, _ in ours.backend.arguments("fwd_no_grad")]
    assert rows == ([8, 8] if per_mini_batch == "true" else [16])
    assert step_lines(tmp_path)[0]["ratio_max_deviation"] < 1e-5


def test_the_reference_follows_the_policy_at_each_epochs_end(loop, tmp_path):
    """Three epochs of one batch: refreshed twice, not after the last; then equal to the plain run's."""
    cfg = config(tmp_path, *KL_LOSS, "trainer.epochs=3", "trainer.update_ref_every_epoch=true")
    ours = train(cfg, loop)
    calls = [name for name in ours.backend.names() if name in ("step", "update_reference", "sync_weights")]
    epoch = ["step", "step"]
    refresh = ["update_reference", "sync_weights"]
    assert calls == ["sync_weights", *epoch, *refresh, *epoch, *refresh, *epoch, "sync_weights"]
    plain = PlainRun(cfg)
    for number, (output, uids) in enumerate(ours.given):
        plain.batch(output, uids)
        if number < 2:
            plain.refresh_reference()
    assert distance(change(ours.policy), change(plain.trainer.model)) <= 1e-3
    kept = PlainRun(cfg)
    for output, uids in ours.given:
        kept.batch(output, uids)
    assert distance(change(kept.trainer.model), change(plain.trainer.model)) > 1e-2
    assert ours.logs[1]["policy/policy_kl"] < 0.2 * ours.logs[0]["policy/policy_kl"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("global_step")], "nothing was exported"


@pytest.mark.parametrize(
    ("settings", "horizon"),
    [
        ((), 2),
        (("trainer.epochs=3",), 6),
        (("trainer.epochs=3", "trainer.update_epochs_per_batch=2"), 12),
        (("trainer.epochs=3", "trainer.max_training_steps=2"), 4),
        (("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "trainer.epochs=2"), 8),
    ],
)
def test_the_horizon_is_the_optimizer_steps_of_the_run(loop, tmp_path, settings, horizon):
    ours = train(config(tmp_path, *settings), loop)
    assert ours.backend.arguments("initialize") == [(horizon,)]
    assert ours.backend.names().count("step") == horizon


def test_forty_prompts_in_two_epochs_are_twenty_optimizer_steps(loop, tmp_path):
    """Batches of 8 prompts in mini-batches of 4."""
    ours = train(config(tmp_path, "trainer.epochs=2"), loop, count=40)
    assert ours.backend.arguments("initialize") == [(20,)]
    assert len(step_lines(tmp_path)) == 20


def test_two_warm_ups_that_differ_are_refused_before_anything_starts(loop, tmp_path):
    steps = "trainer.policy.optimizer_config.num_warmup_steps=3"
    settings = ("trainer.epochs=3", "trainer.arctic_rl.lr_warmup_ratio=0.5", steps)
    assert train(config(tmp_path, *settings), loop).backend.arguments("initialize") == [(6,)]
    with pytest.raises(ValueError, match="means 2 of the run's 4 optimizer steps"):
        train(config(tmp_path, *settings, "trainer.max_training_steps=2"), loop)


def test_groups_of_equal_rewards_leave_the_loss_where_the_filter_is_on(loop, tmp_path):
    cfg = config(tmp_path, "trainer.algorithm.zero_variance_filter=true")
    ours = train(cfg, loop, rewards=(0.1, 0.7))
    ((output, uids),) = ours.given
    totals = [sum(reward) for reward in output["rewards"]]
    equal = {
        uid for uid in uids if len({total for other, total in zip(uids, totals, strict=True) if other == uid}) == 1
    }
    assert equal and len(equal) < PROMPTS
    assert ours.logs[0]["reward/num_zero_variance_filtered"] == len(equal)
    tokens = sum(sum(mask) for mask, uid in zip(output["loss_masks"], uids, strict=True) if uid not in equal)
    assert sum(line["num_tokens"] for line in step_lines(tmp_path)) == tokens
    plain = PlainRun(cfg)
    masks = [[0] * len(mask) if uid in equal else mask for mask, uid in zip(output["loss_masks"], uids, strict=True)]
    plain.batch(output | {"loss_masks": masks}, uids)
    assert distance(change(ours.policy), change(plain.trainer.model)) <= 1e-3


def test_dynamic_sampling_trains_on_groups_that_differ(loop, tmp_path):
    sizes = (
        "trainer.train_batch_size=3",
        "trainer.policy_mini_batch_size=3",
        "trainer.micro_train_batch_size_per_gpu=6",
    )
    settings = ("trainer.algorithm.dynamic_sampling.type=filter", "trainer.epochs=9", "trainer.max_training_steps=1")
    ours = train(config(tmp_path, *settings, *sizes), loop, rewards=(0.1, 0.1, 0.7))
    assert len(ours.given) > 1
    collected = []
    for output, uids in ours.given:
        for start in range(0, len(uids), SAMPLES):
            rows = range(start, start + SAMPLES)
            if len({sum(output["rewards"][row]) for row in rows}) > 1:
                collected += [(output, row) for row in rows]
    tokens = sum(sum(output["loss_masks"][row]) for output, row in collected[: 3 * SAMPLES])
    assert sum(line["num_tokens"] for line in step_lines(tmp_path)) == tokens


LAYOUTS = {
    "tensor parallel": (
        "trainer.strategy=megatron",
        "trainer.policy.megatron_config.tensor_model_parallel_size=4",
        "trainer.placement.policy_num_gpus_per_node=8",
        "generator.inference_engine.tensor_parallel_size=8",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=5",
    ),
    "sequence parallel": (
        "trainer.policy.sequence_parallel_size=2",
        "trainer.placement.policy_num_gpus_per_node=2",
        "generator.inference_engine.tensor_parallel_size=2",
        "trainer.train_batch_size=3",
        "trainer.policy_mini_batch_size=3",
        "generator.n_samples_per_prompt=5",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_model_parallel_sizes_leave_every_prompt_of_a_batch(name, loop, tmp_path):
    """SkyRL accepts these batch sizes, which its data-parallel size divides and the number of GPUs does not."""
    cfg = config(tmp_path, "trainer.micro_train_batch_size_per_gpu=1", *LAYOUTS[name])
    validate_batch_sizes(cfg)
    size = cfg.trainer.train_batch_size
    ours = train(cfg, loop, ranks=cfg.trainer.placement.policy_num_gpus_per_node, count=2 * size)
    assert ours.backend.names().count("step") == len(ours.logs) == 2
    plain = PlainRun(cfg)
    for output, uids in ours.given:
        assert len(set(uids)) == size
        plain.batch(output, uids)
    assert distance(change(ours.policy), change(plain.trainer.model)) <= 1e-3
    for _, meta, _ in ours.backend.arguments("fwd_bwd"):
        assert meta["global_batch_size"] == size * 5
