"""SkyRL's whole PPO loop with our critic, against the same run in one plain process on SkyRL's own critic."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    AdvantageEstimatorRegistry,
    apply_loss_reduction_to_advantages_minibatch,
    ppo_critic_loss,
)
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.compose import apply_mixin
from integrations.arctic_rl.trainer import ArcticTrainerMixin
from tests.arctic_rl import test_own_trainer as runs
from tests.arctic_rl.in_process_backend import InProcessBackend, packable
from tests.arctic_rl.resume_runs import STEPS, Rollouts, resuming, run
from tests.arctic_rl.resume_runs import config as resumable
from tests.arctic_rl.skyrl_critic import skyrls_twin, skyrls_values, value_model, values_of_tokens

CRITIC_MINI_BATCH = 2
PPO = (
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.critic.model.path=some/model",
    f"trainer.critic_mini_batch_size={CRITIC_MINI_BATCH}",
)


def train(cfg, loop, *, ranks=1, per_token=True):
    """Our run: trained models, the tracker's logs, the backend, the rollouts."""
    twins = {name: packable(model) for name, model in (runs.models() | {"critic": value_model()}).items()}
    backend = InProcessBackend(twins, ranks=dict.fromkeys(twins, ranks), lr=runs.LR)
    tracker, generator = runs.Tracker(), runs.Rollouts(per_token)
    plain = RayPPOTrainer(
        cfg=cfg,
        tracker=tracker,
        tokenizer=SimpleNamespace(pad_token_id=runs.PAD_ID),
        train_dataset=runs.prompts(runs.PROMPTS),
        inference_engine_client=runs.Client(),
        generator=generator,
    )
    trainer = apply_mixin(ArcticTrainerMixin, plain)
    trainer.attach_backend(backend, loop)
    trainer.build_models(None, None, None)
    asyncio.run(trainer.train())
    return SimpleNamespace(**twins, logs=tracker.logs, backend=backend, given=generator.given, trainer=trainer)


class PlainPPO(runs.PlainRun):
    """The same run without any of our code."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.critic = skyrls_twin(value_model())
        self._optimizer = torch.optim.AdamW(self.critic.parameters(), lr=runs.LR, weight_decay=0.0)
        self.critic_losses, self.advantages = [], []

    def batch(self, output, uids):
        trainer, algorithm = self._cfg.trainer, self._cfg.trainer.algorithm
        batch = self._tensors(output)
        batch["values"] = skyrls_values(self._cfg, self.critic, batch)
        # As SkyRL's model has it where padding is removed.
        batch["values"][~values_of_tokens(batch)] = 0
        if algorithm.use_kl_in_reward:
            self._penalise(batch)
        advantages, batch["returns"] = AdvantageEstimatorRegistry.get("gae")(
            token_level_rewards=batch["rewards"],
            values=batch["values"],
            response_mask=batch["response_mask"],
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
        )
        kept = batch["response_mask"].bool()
        self.advantages.append(advantages[kept].abs().mean().item())
        if algorithm.advantage_batch_normalize:
            mean = advantages.mean()
            advantages = (advantages - mean) / (advantages - mean)[kept].square().mean().clamp(min=1e-8).sqrt()
        batch["advantages"] = advantages
        samples = self._cfg.generator.n_samples_per_prompt
        for _ in range(trainer.update_epochs_per_batch):
            for part in _parts(batch, CRITIC_MINI_BATCH * samples):
                self._step_of_the_critic(part)
        policy_parts = list(_parts(batch, trainer.policy_mini_batch_size * samples))
        for part in policy_parts:
            part["advantages"] = apply_loss_reduction_to_advantages_minibatch(
                part["advantages"], part["loss_mask"], algorithm.loss_reduction, 2, algorithm.max_seq_len
            )
        for _ in range(trainer.update_epochs_per_batch):
            self.updates += [self.trainer.update(part, algorithm) for part in policy_parts]

    def _step_of_the_critic(self, part):
        values = self.critic(part["sequences"], part.metadata["response_length"], part["attention_mask"])
        loss, _ = ppo_critic_loss(
            values, part["values"], part["returns"], self._cfg.trainer.algorithm, loss_mask=part["loss_mask"]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.critic_losses.append(loss.item())


def _parts(batch, size):
    return (batch[start : start + size] for start in range(0, len(batch), size))


def moved(model, before):
    start = dict(before.named_parameters())
    return {name: (value - start[name]).detach() for name, value in model.named_parameters()}


RUNS = {
    "gae": (),
    "gamma and lambda": ("trainer.algorithm.gamma=0.9", "trainer.algorithm.lambd=0.7"),
    "two epochs": ("trainer.update_epochs_per_batch=2", "trainer.epochs=2"),
    "clipped": ("trainer.update_epochs_per_batch=2", "trainer.algorithm.value_clip=0.02"),
    "kl in the reward": ("trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_loss_coef=0.3"),
    "normalised over the batch": ("trainer.algorithm.advantage_batch_normalize=true",),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_the_plain_one(name, loop, tmp_path):
    ranks = 2 if name in ("two epochs", "kl in the reward") else 1
    cfg = runs.config(tmp_path, *PPO, *RUNS[name], f"trainer.placement.critic_num_gpus_per_node={ranks}")
    ours = train(cfg, loop, ranks=ranks, per_token=name != "gae")
    plain = PlainPPO(cfg)
    for output, uids in ours.given:
        plain.batch(output, uids)
    critic, policy = value_model(), runs.models()["policy"]
    assert runs.distance(moved(ours.critic, critic), moved(plain.critic, critic)) < 1e-3
    assert runs.distance(moved(ours.policy, policy), moved(plain.trainer.model, policy)) < 1e-3
    steps = len(plain.critic_losses) // len(ours.logs)
    for number, log in enumerate(ours.logs):
        losses = plain.critic_losses[number * steps : (number + 1) * steps]
        assert log["critic/critic_loss"] == pytest.approx(sum(losses) / steps, rel=1e-4)
        assert log["loss/avg_raw_advantages_abs"] == pytest.approx(plain.advantages[number], rel=1e-4)


def test_advantages_are_skyrls_of_the_critics_values(loop, tmp_path):
    """Each setting that shapes them is felt."""
    logs = []
    for settings in ((), ("trainer.algorithm.gamma=0.9",), ("trainer.algorithm.lambd=0.7",)):
        cfg = runs.config(tmp_path, *PPO, *settings)
        ours, plain = train(cfg, loop), PlainPPO(cfg)
        plain.batch(*ours.given[0])
        logs.append(ours.logs[0]["critic/critic_loss"])
        assert ours.logs[0]["loss/avg_raw_advantages_abs"] == pytest.approx(plain.advantages[0], rel=1e-4)
    assert len(set(logs)) == 3


def test_the_critic_takes_its_own_optimizer_steps(loop, tmp_path):
    cfg = runs.config(tmp_path, *PPO, "trainer.update_epochs_per_batch=2")
    ours = train(cfg, loop)
    steps = ["critic_fwd_bwd", "critic_step"] * 4 * 2 + ["fwd_bwd", "step"] * 2 * 2
    assert [name for name in ours.backend.names() if name in steps] == steps
    assert ours.backend.arguments("initialize") == [(4, 8)]
    jobs = [job for job, *_ in ours.backend.arguments("fwd_no_grad")]
    assert jobs == ["critic"] * 4 + ["policy"] * 2, "each in its own mini-batches"
    (log,) = ours.logs
    theirs = ("critic_loss", "values_mean", "values_clipfrac", "critic_lr", "grad_norm")
    assert {name for name in log if name.startswith("critic/")} == {f"critic/{name}" for name in theirs}
    lines = [json.loads(line) for line in (tmp_path / "critic_optimizer_steps.jsonl").read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == [*range(1, 9)]
    assert lines[0]["values_clipfrac"] == 0, "old values are exact in the first pass over a mini-batch"
    assert len((tmp_path / "optimizer_steps.jsonl").read_text().splitlines()) == 4


def test_a_resumed_run_is_the_run_that_was_not_stopped(loop, tmp_path):
    settings = (*PPO, "trainer.critic_mini_batch_size=4")
    recording, ended = {}, []

    def go(folder, *more):
        models = {"policy": packable(runs.models()["policy"]), "critic": packable(value_model())}
        done = run(resumable(folder, *settings, *more), InProcessBackend(models), loop, Rollouts(recording))
        ended.append({name: model.state_dict() for name, model in models.items()})
        return done

    whole = go(tmp_path / "whole")
    for stop in (2, 3):
        saved = tmp_path / "whole" / "checkpoints" / f"global_step_{stop}"
        assert (saved / "critic" / "rank-00000.json").is_file()
        rest = go(tmp_path / f"from {stop}", *resuming(saved))
        assert rest.logs == {step: whole.logs[step] for step in range(stop + 1, STEPS + 1)}
        for name, weights in ended[0].items():
            assert all(torch.equal(ended[-1][name][key], value) for key, value in weights.items()), name


def test_a_checkpoint_without_a_critic_is_not_gone_on_from_with_one_nor_the_reverse(loop, tmp_path):
    from integrations.arctic_rl.errors import CheckpointError

    models = {"policy": packable(runs.models()["policy"])}
    first = resumable(tmp_path / "a", "trainer.max_training_steps=1")
    run(first, InProcessBackend(models), loop, Rollouts({}))
    models["critic"] = packable(value_model())
    before = {name: model.state_dict()["lm_head.weight"].clone() for name, model in models.items() if name == "policy"}
    saved = tmp_path / "a" / "checkpoints" / "global_step_1"
    with pytest.raises(CheckpointError, match=r"holds no critic.*leave trainer\.critic\.model\.path out"):
        run(resumable(tmp_path / "b", *PPO, *resuming(saved)), InProcessBackend(models), loop, Rollouts({}))
    assert all(torch.equal(models[name].state_dict()["lm_head.weight"], value) for name, value in before.items())
    run(resumable(tmp_path / "c", *PPO, "trainer.max_training_steps=1"), InProcessBackend(models), loop, Rollouts({}))
    saved = tmp_path / "c" / "checkpoints" / "global_step_1"
    backend = InProcessBackend({"policy": models["policy"]})
    with pytest.raises(CheckpointError, match=r"global_step_1 holds a critic.*write trainer\.critic\.model\.path"):
        run(resumable(tmp_path / "d", *resuming(saved)), backend, loop, Rollouts({}))
    assert "load_checkpoint" not in backend.names()
