"""SkyRL's fully asynchronous trainer with our part in front, on a backend and a generator in this process."""

import asyncio
import itertools
import json
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.compose import apply_mixin, with_mixin
from integrations.arctic_rl.errors import ArcticError, CheckpointError, UnsupportedError
from integrations.arctic_rl.experiment import ArcticExpMixin
from integrations.arctic_rl.fully_async import ArcticFullyAsyncMixin, ShuffledPasses, WatchedGenerator
from integrations.arctic_rl.generator import make_generator_class
from integrations.arctic_rl.inference import ArcticInferenceClient
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.unjudged import UnjudgedMask
from integrations.arctic_rl.weight_versions import WeightVersionsMixin
from tests.arctic_rl import resume_runs
from tests.arctic_rl.in_process_backend import InProcessBackend

SAMPLES, MINI_BATCH, STALENESS, WORKERS = 2, 4, 1, 6
STEPS_PER_EPOCH = 5
UPDATE_S = 0.02


class Prompts(list):
    """Data set of prompts of token ids; the first token is the prompt's number."""

    def collate_fn(self, items):
        return list(items)


def prompts(count):
    return Prompts({"prompt": [row, 99], "env_class": None, "env_extras": {}, "uid": str(row)} for row in range(count))


class Tokenizer:
    pad_token_id = 127

    def decode(self, ids):
        return str(ids)

    def save_pretrained(self, folder):
        pass


class Tracker:
    def __init__(self):
        self.finished = False

    def log(self, payload, step, commit=False):
        assert all(isinstance(name, str) for name in payload)

    def finish(self):
        self.finished = True


class Client:
    weight_version = 0

    def increment_weight_version(self):
        self.weight_version += 1


class SlowBackend(InProcessBackend):
    """Updates take a while; notes when each began and ended."""

    def __init__(self, during_update, **kwargs):
        super().__init__(**kwargs)
        self.updates = []
        self._during_update = during_update

    async def fwd_bwd(self, batch, meta, processing, job="policy"):
        start = time.monotonic()
        await asyncio.sleep(UPDATE_S)
        await self._during_update()
        result = await super().fwd_bwd(batch, meta, processing, job)
        self.updates.append((start, time.monotonic()))
        return result

    async def load_checkpoint(self, job, directory):
        return {**await super().load_checkpoint(job, directory), "optimizer_steps": 0}


class Groups:
    """Groups of random length and duration; notes when each began, at which step, and when it ended."""

    def __init__(self, reward=None, error_at=None, unjudged=()):
        self.trainer = None
        self.calls = []
        self._reward = reward or (lambda uid, sample: float(sample))
        self._error_at = error_at
        self._unjudged = unjudged

    async def during_update(self):
        """What an update waits for."""

    async def wait(self, number, call):
        """What a group waits for."""

    async def generate(self, input_batch, disable_tqdm=False):
        number = len(self.calls)
        draw = np.random.default_rng(number)
        rows = len(input_batch["prompts"])
        uid = input_batch["trajectory_ids"][0].instance_id
        call = SimpleNamespace(uid=uid, start=time.monotonic(), step=self.trainer.global_step, end=None)
        self.calls.append(call)
        if number == self._error_at:
            raise ArcticError("the scorer is gone")
        await asyncio.sleep(draw.random() * 2 * UPDATE_S)
        await self.wait(number, call)
        lengths = draw.integers(2, 6, rows)
        masks = [UnjudgedMask(n) if (uid, row) in self._unjudged else [1] * n for row, n in enumerate(lengths)]
        call.end = time.monotonic()
        return {
            "prompt_token_ids": [list(prompt) for prompt in input_batch["prompts"]],
            "response_ids": [draw.integers(1, 120, length).tolist() for length in lengths],
            "rewards": [[0.0] * (n - 1) + [self._reward(uid, row)] for row, n in enumerate(lengths)],
            "loss_masks": masks,
            "stop_reasons": ["stop"] * rows,
            "rollout_logprobs": [[-1.0] * length for length in lengths],
            "rollout_metrics": {"generate/scoring_failed": 1},
            "weight_versions": [(1, 2)] + [None] * (rows - 1),
        }


class TurnsOfGroups(Groups):
    """Three rows a sample; the second of every other sample goes on where the first ended, so that they can merge."""

    async def generate(self, input_batch, disable_tqdm=False):
        output = await super().generate(input_batch)
        output = {name: column for name, column in output.items() if name != "weight_versions"}
        rows = {name: [] for name in output if name != "rollout_metrics"}
        ids, last = [], []
        for row, row_id in enumerate(input_batch["trajectory_ids"]):
            for turn in range(3):
                for name, values in rows.items():
                    values.append(output[name][row])
                if turn == 1 and row % 2:
                    rows["prompt_token_ids"][-1] = output["prompt_token_ids"][row] + output["response_ids"][row]
                ids.append(row_id)
                last.append(turn == 2)
        rows |= {"trajectory_ids": ids, "is_last_step": last, "env_metrics": [{}] * len(ids)}
        return rows | {"rollout_metrics": output["rollout_metrics"]}


class GroupsAhead(Groups):
    """Groups of a later step end while a step's update runs, and the update waits for one of them."""

    def __init__(self):
        super().__init__()
        self._begun = 0
        self._ended = Counter()

    async def during_update(self):
        self._begun += 1
        if self._begun % STEPS_PER_EPOCH:
            await until(lambda: self._ended[self._begun] > 0)

    async def wait(self, number, call):
        if number >= MINI_BATCH * call.step:
            await until(lambda: self._begun >= call.step)
            self._ended[self._begun] += 1


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def config(tmp_path, **settings):
    values = {
        "trainer.logger": "console",
        "trainer.log_path": tmp_path / "logs",
        "trainer.export_path": tmp_path / "exports",
        "trainer.ckpt_path": tmp_path / "checkpoints",
        "trainer.epochs": 2,
        "trainer.train_batch_size": MINI_BATCH,
        "trainer.policy_mini_batch_size": MINI_BATCH,
        "trainer.resume_mode": "null",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.enable_ray_gpu_monitor": False,
        "trainer.placement.colocate_all": False,
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.max_staleness_steps": STALENESS,
        "trainer.fully_async.num_parallel_generation_workers": WORKERS,
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.use_kl_loss": False,
        "generator.batched": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.n_samples_per_prompt": SAMPLES,
    }
    return parse_config([f"{key}={value}" for key, value in (values | settings).items()])


def start(cfg, loop, generator=None, count=20):
    """A trainer as the experiment makes it, not yet started."""
    generator, tracker = generator or Groups(), Tracker()
    plain = FullyAsyncRayPPOTrainer(
        cfg=cfg,
        tracker=tracker,
        tokenizer=Tokenizer(),
        train_dataset=prompts(count),
        inference_engine_client=Client(),
        generator=generator,
    )
    trainer = apply_mixin(ArcticFullyAsyncMixin, plain)
    generator.trainer = trainer
    backend = SlowBackend(generator.during_update)
    trainer.attach_backend(backend, loop)
    trainer.build_models(None, None, None)
    return SimpleNamespace(trainer=trainer, backend=backend, generator=generator, tracker=tracker, cfg=cfg)


def train(*args, **kwargs):
    run = start(*args, **kwargs)
    asyncio.run(run.trainer.train())
    return run


def lines(cfg, name):
    with open(f"{cfg.trainer.log_path}/{name}", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def trained(cfg):
    """Prompts by step, each once for all of its samples."""
    by_step = {}
    for line in lines(cfg, "samples.jsonl"):
        if line["trained"]:
            by_step.setdefault(line["global_step"], []).append((line["uid"], line["sample"]))
    for pairs in by_step.values():
        uids = {uid for uid, _ in pairs}
        assert sorted(pairs) == sorted(itertools.product(uids, range(SAMPLES)))
        assert len(uids) == MINI_BATCH
    return {step: {uid for uid, _ in pairs} for step, pairs in by_step.items()}


def updated(backend):
    """Prompts of each update that the backend was asked for, from the rows themselves."""
    return [Counter(str(int(row)) for row in batch["prompts"][:, -2]) for batch, _, _ in backend.arguments("fwd_bwd")]


class TestTenSteps:
    @pytest.fixture(scope="class")
    @staticmethod
    def run(loop, tmp_path_factory):
        return train(config(tmp_path_factory.mktemp("run")), loop, GroupsAhead())

    def test_no_sample_is_lost_and_none_twice(self, run):
        by_step = trained(run.cfg)
        assert list(by_step) == list(range(1, 11))
        assert updated(run.backend) == [Counter(dict.fromkeys(uids, SAMPLES)) for uids in by_step.values()]
        for epoch in (range(1, 6), range(6, 11)):
            assert sorted(uid for step in epoch for uid in by_step[step]) == sorted(str(row) for row in range(20))
        assert [call.uid for call in run.generator.calls[:20]] != [call.uid for call in run.generator.calls[20:]]

    def test_generation_and_training_overlap(self, run):
        meanwhile = [
            sum(call.start < end and call.end > begin for call in run.generator.calls)
            for begin, end in run.backend.updates
        ]
        # At the end of an epoch SkyRL begins no group of the next one.
        assert [step for step, groups in enumerate(meanwhile, start=1) if not groups] == [5, 10]

    def test_no_more_groups_are_begun_than_the_capacity_allows(self, run):
        assert len(run.generator.calls) == 40
        for number, call in enumerate(run.generator.calls, start=1):
            assert number <= (STALENESS + call.step) * MINI_BATCH
            running = sum(other.start <= call.start < other.end for other in run.generator.calls)
            assert running <= WORKERS

    def test_staleness_is_written_for_each_sample(self, run):
        begun = {}
        for call in run.generator.calls:
            begun.setdefault(call.uid, []).append(call.step)
        for line in lines(run.cfg, "samples.jsonl"):
            assert line["scheduled_step"] == begun[line["uid"]][line["global_step"] > 5]
            assert line["staleness"] == line["global_step"] - line["scheduled_step"]
            versions = (line["first_weight_version"], line["last_weight_version"])
            assert versions == ((1, 2) if line["sample"] == 0 else (None, None))
        for line in lines(run.cfg, "metrics.jsonl"):
            of_step = [
                s["staleness"] for s in lines(run.cfg, "samples.jsonl") if s["global_step"] == line["global_step"]
            ]
            assert line["async/staleness_max"] == max(of_step)
            assert line["async/staleness_mean"] == sum(of_step) / len(of_step)
        assert any(line["staleness"] for line in lines(run.cfg, "samples.jsonl"))

    def test_each_step_is_a_line_of_metrics(self, run):
        metrics = lines(run.cfg, "metrics.jsonl")
        assert [line["global_step"] for line in metrics] == list(range(1, 11))
        for line in metrics:
            assert {"async/staleness_mean", "policy/final_loss", "timing/step", "timing/sync_weights"} <= set(line)
            assert line["async/samples_of_several_weights"] == 0.5
            assert line["generate/scoring_failed"] == MINI_BATCH
        assert run.tracker.finished

    def test_weights_are_synced_between_updates_with_requests_kept(self, run):
        sync = ["pause_generation", "sync_weights", "resume_generation"]
        calls = [name for name in run.backend.names() if name in ("fwd_bwd", "step", *sync)]
        assert calls == [*sync, *["fwd_bwd", "step", *sync] * 10]
        assert run.backend.arguments("pause_generation") == [("keep",)] * 11
        assert run.backend.arguments("sync_weights") == [("keep_cache",)] * 11


def test_prompts_behind_the_last_mini_batch_have_their_turn(loop, tmp_path):
    """22 prompts, 20 an epoch: SkyRL's own order is the same in each, so that two would never be trained on."""
    cfg = config(tmp_path, **{"trainer.epochs": 3})
    by_step = trained(train(cfg, loop, count=22).cfg)
    passes = [sorted(uid for step in range(1 + 5 * e, 6 + 5 * e) for uid in by_step[step]) for e in range(3)]
    assert all(len(set(each)) == 20 for each in passes)
    assert len(set().union(*passes)) == 22


def test_a_critic_is_trained_before_the_policy_of_each_step(loop, tmp_path):
    settings = {
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.critic.model.path": "some/model",
        "trainer.critic_mini_batch_size": MINI_BATCH // 2,
        "trainer.max_training_steps": 2,
    }
    run = train(config(tmp_path, **settings), loop)
    updates = ["critic_fwd_bwd", "critic_step"] * 2 + ["fwd_bwd", "step"]
    assert [name for name in run.backend.names() if name in updates] == updates * 2
    forward = [job for job, *_ in run.backend.arguments("fwd_no_grad")]
    assert forward.count("critic") == 4
    assert len(lines(run.cfg, "critic_optimizer_steps.jsonl")) == 4


class TestPasses:
    def loader(self, seed=3, workers=0):
        from skyrl.train.utils.trainer_utils import build_dataloader

        data = SimpleNamespace(dataloader=SimpleNamespace(num_workers=workers, persistent_workers=False))
        cfg = SimpleNamespace(trainer=SimpleNamespace(train_batch_size=4, seed=seed, epochs=1), data=data)
        return ShuffledPasses(build_dataloader(cfg, prompts(12), True, True), seed)

    def order(self, passes, count=None):
        return [batch[0]["uid"] for batch in itertools.islice(passes, count)]

    def test_a_pass_is_decided_by_the_seed_and_its_number(self):
        passes = self.loader()
        orders = [self.order(passes) for _ in range(3)]
        assert all(sorted(order, key=int) == [str(row) for row in range(12)] for order in orders)
        assert len({tuple(order) for order in orders}) == 3
        again = self.loader()
        self.order(again, 5)
        assert self.order(again) == orders[1], "a pass that was broken off"
        later = self.loader()
        later.go_to(2)
        later.load_state_dict({"whatever": 1})
        assert self.order(later) == orders[2] and later.state_dict() == {}
        assert self.order(self.loader(seed=4)) != orders[0]


class TestResume:
    @pytest.mark.parametrize("stop_at", [3, 5, 7])
    def test_a_stopped_run_goes_on_with_the_prompts_that_are_left(self, loop, tmp_path, stop_at):
        first = {"trainer.max_training_steps": stop_at, "trainer.ckpt_interval": 2}
        before = trained(train(config(tmp_path, **first), loop).cfg)
        latest = tmp_path / "checkpoints" / "latest_ckpt_global_step.txt"
        assert latest.read_text() == str(stop_at), "the number of steps that were trained"
        run = train(config(tmp_path, **{"trainer.resume_mode": "latest"}), loop, Groups())
        assert [name for name in run.backend.names() if "checkpoint" in name] == ["load_checkpoint"]
        by_step = trained(run.cfg)
        assert {step: by_step[step] for step in before} == before
        assert list(by_step) == list(range(1, 11))
        for epoch in (range(1, 6), range(6, 11)):
            assert sorted(uid for step in epoch for uid in by_step[step]) == sorted(str(row) for row in range(20))

    def test_a_synchronous_run_does_not_go_on_from_an_asynchronous_one_nor_the_reverse(self, loop, tmp_path):
        cfg = config(tmp_path, **{"trainer.max_training_steps": 1, "trainer.ckpt_interval": 1})
        train(cfg, loop)
        latest = "trainer.resume_mode=latest"
        with pytest.raises(CheckpointError, match=r"is of an asynchronous run.*fully_async\.enabled=true"):
            resume_runs.run(
                resume_runs.config(tmp_path, latest),
                InProcessBackend(),
                loop,
                resume_runs.Rollouts({}),
                dataset=prompts(20),
            )
        other = tmp_path / "other"
        resume_runs.run(
            resume_runs.config(other, "trainer.max_training_steps=1"),
            InProcessBackend(),
            loop,
            resume_runs.Rollouts({}),
            dataset=prompts(20),
        )
        with pytest.raises(CheckpointError, match=r"is of a synchronous run.*fully_async\.enabled=false"):
            train(config(other, **{"trainer.resume_mode": "latest"}), loop)

    def test_a_finished_run_has_nothing_left(self, loop, tmp_path):
        cfg = config(tmp_path, **{"trainer.ckpt_interval": 100})
        train(cfg, loop)
        run = train(config(tmp_path, **{"trainer.resume_mode": "latest"}), loop)
        assert "fwd_bwd" not in run.backend.names()
        assert run.generator.calls == []


class TestErrors:
    def test_an_error_of_a_generation_task_ends_the_run_with_it(self, loop, tmp_path):
        run = start(config(tmp_path), loop, Groups(error_at=13))
        with pytest.raises(ArcticError, match="the scorer is gone"):
            asyncio.run(run.trainer.train())
        assert 1 <= len(run.backend.updates) < 10

    def test_an_error_of_the_training_is_raised_as_it_is(self, loop, tmp_path):
        run = start(config(tmp_path), loop)
        run.backend._failing = ("step",)
        with pytest.raises(RuntimeError, match="step was told to fail"):
            asyncio.run(run.trainer.train())

    def test_an_error_elsewhere_is_not_taken_for_one_of_a_generation_task(self):
        class Failing:
            async def generate(self, input_batch):
                raise ArcticError("in an evaluation")

        watched = WatchedGenerator(Failing(), lambda error: False)
        with pytest.raises(ArcticError, match="in an evaluation"):
            asyncio.run(watched.generate({}))

    def test_the_progress_bar_is_switched_off_where_there_is_one(self):
        class Skyrls:
            async def generate(self, input_batch, disable_tqdm=False):
                return disable_tqdm

        class Ours(Skyrls):
            async def generate(self, input_batch, *args, **kwargs):
                return await super().generate(input_batch, *args, **kwargs)

        class Recipes(Skyrls):
            async def generate(self, input_batch):
                return "no bar"

        for cls, expected in ((Skyrls, True), (Ours, True), (Recipes, "no bar")):
            assert asyncio.run(WatchedGenerator(cls(), bool).generate({}, disable_tqdm=True)) == expected


class TestRewards:
    def test_groups_of_equal_rewards_are_replaced(self, loop, tmp_path):
        """Every third prompt's samples earn the same; dropped ones count as such, and nothing is lost."""
        cfg = config(
            tmp_path,
            **{
                "trainer.fully_async.sample_full_batch": True,
                "trainer.algorithm.zero_variance_filter": True,
                "trainer.ckpt_interval": 100,
                "trainer.epochs": 1,
            },
        )
        run = train(cfg, loop, Groups(reward=lambda uid, row: 0.7 if int(uid) % 3 == 0 else float(row)), count=24)
        by_step = trained(cfg)
        assert list(by_step) == [1, 2, 3, 4]
        assert all(int(uid) % 3 for uids in by_step.values() for uid in uids)
        dropped = {line["uid"] for line in lines(cfg, "samples.jsonl") if not line["trained"]}
        assert dropped == {str(row) for row in range(0, 24, 3)}
        assert (tmp_path / "checkpoints" / "latest_ckpt_global_step.txt").read_text() == "4"
        assert len(run.backend.updates) == 4

    def test_the_rewards_of_trajectories_are_compared_where_each_has_several_rows(self, loop, tmp_path):
        trainer = start(config(tmp_path), loop).trainer

        def keeps(final):
            output = {
                "rewards": [[0.0], [final[0]], [0.0], [final[1]]],
                "loss_masks": [[1]] * 4,
                "is_last_step": [False, True, False, True],
            }
            return trainer._should_keep_group(GeneratedOutputGroup(output, "0", 1))

        assert keeps([1.0, 0.0]) and not keeps([1.0, 1.0]) and not keeps([0.0, 0.0])

    @pytest.mark.parametrize("merged", [False, True])
    def test_each_row_is_logged_with_its_own_prompt(self, loop, tmp_path, merged):
        settings = {"generator.step_wise_trajectories": True, "generator.merge_stepwise_output": merged}
        run = start(config(tmp_path, **settings, **{"trainer.epochs": 1}), loop, TurnsOfGroups())
        seen = []

        def log(*, prompts, generator_output, **others):
            seen.append(len(prompts))
            for prompt, row in zip(prompts, generator_output["prompt_token_ids"], strict=True):
                assert row[:2] == prompt

        run.trainer.trajectory_logger = SimpleNamespace(log=log)
        asyncio.run(run.trainer.train())
        assert len(seen) == STEPS_PER_EPOCH
        assert min(seen) > MINI_BATCH * SAMPLES and any(size % 3 for size in seen) == merged

    def test_a_sample_that_could_not_be_judged_leaves_its_groups_baseline(self, loop, tmp_path):
        cfg = config(tmp_path, **{"trainer.epochs": 1, "generator.n_samples_per_prompt": 3})
        generator = Groups(reward=lambda uid, row: 9.0 if row == 2 else float(row), unjudged={("5", 2)})
        run = train(cfg, loop, generator)
        seen = 0
        for batch, _, _ in run.backend.arguments("fwd_bwd"):
            rows = batch["prompts"][:, -2] == 5
            if not rows.any():
                continue
            seen += 1
            advantages, mask = batch["advantages"][rows], batch["response_mask"][rows]
            totals = (advantages * mask).sum(-1) / mask.sum(-1)
            assert totals[2] == 0 and batch["loss_mask"][rows][2].sum() == 0
            assert torch.allclose(totals[0], -totals[1]) and totals[1] > 0, "the mean of the judged two is between"
        assert seen == 1


class Turns:
    """A generator of trajectories of two turns, whose requests overlap with those of other trajectories."""

    def __init__(self, client):
        self.client = client

    async def agent_loop(self, prompt, trajectory_id):
        for _ in range(2):
            await asyncio.sleep(0)
            await self.client.generate({"prompt_token_ids": [prompt], "sampling_params": {"max_tokens": 4}})

    async def generate(self, input_batch, disable_tqdm=False):
        pairs = zip(input_batch["prompts"], input_batch["trajectory_ids"], strict=True)
        await asyncio.gather(*(self.agent_loop(prompt, trajectory_id=row_id) for prompt, row_id in pairs))
        return {}


class VersionedBackend:
    """The prompt says under which versions its requests are sampled, one after the other."""

    def __init__(self):
        self.turns = Counter()

    async def generate(self, requests):
        await asyncio.sleep(0)
        (request,) = requests
        first, last = tuple(request["prompt_token_ids"])[2 * self.turns[tuple(request["prompt_token_ids"])] :][:2]
        self.turns[tuple(request["prompt_token_ids"])] += 1
        answer = {"token_ids": [1], "logprobs": [-1.0], "stop_reason": "stop"}
        return [answer | {"weight_version": first, "last_weight_version": last}]


class TestWeightVersions:
    def generator(self):
        tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
        client = ArcticInferenceClient(VersionedBackend(), tokenizer=tokenizer, model_name="tiny")
        return with_mixin(WeightVersionsMixin, Turns)(client)

    def batch(self, phase):
        return {
            "prompts": [[1, 1, 1, 2], [3, 4, 5, 5], [6, 6, 6, 6]],
            "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1), TrajectoryID("b", 0)],
            "batch_metadata": BatchMetadata(global_step=1, training_phase=phase),
        }

    def test_a_trajectory_has_the_versions_of_all_its_requests(self):
        output = asyncio.run(self.generator().generate(self.batch("train"), disable_tqdm=True))
        assert output == {"weight_versions": [(1, 2), (3, 5), (6, 6)]}

    def test_an_evaluation_is_left_as_it_is(self):
        assert asyncio.run(self.generator().generate(self.batch("eval"))) == {}


def test_scoring_metrics_of_overlapping_calls_add_up():
    class Failing:
        def __init__(self):
            self.inference_engine_client = None

        async def generate(self, input_batch):
            self._scoring_counts["failed"] += 1
            await asyncio.sleep(0.01)
            return {"rollout_metrics": None, "loss_masks": [], "rewards": []}

    async def both():
        generator = make_generator_class(Failing)()
        return await asyncio.gather(generator.generate({}), generator.generate({}))

    counts = [output["rollout_metrics"]["generate/scoring_failed"] for output in asyncio.run(both())]
    assert sum(counts) == 2


class TestTheExperimentsTrainer:
    def trainer(self, cfg, loop, base=BasePPOExp):
        experiment = object.__new__(with_mixin(ArcticExpMixin, base))
        experiment.cfg, experiment._arctic_backend, experiment._arctic_loop = cfg, InProcessBackend(), loop
        return experiment.get_trainer(
            cfg=cfg,
            tracker=Tracker(),
            tokenizer=Tokenizer(),
            train_dataset=prompts(20),
            eval_dataset=None,
            inference_engine_client=Client(),
            generator=Groups(),
            colocate_pg=None,
        )

    def own(self, trainer_class):
        return type("Own", (BasePPOExp,), {"get_trainer": lambda self, **kwargs: trainer_class(**kwargs)})

    def test_the_config_chooses_it(self, loop, tmp_path):
        assert isinstance(self.trainer(config(tmp_path), loop), ArcticFullyAsyncMixin)
        plain = self.trainer(config(tmp_path, **{"trainer.fully_async.enabled": False}), loop)
        assert not isinstance(plain, FullyAsyncRayPPOTrainer | ArcticFullyAsyncMixin)

    def test_a_recipes_own_one_is_kept(self, loop, tmp_path):
        mine = type("Mine", (FullyAsyncRayPPOTrainer,), {})
        trainer = self.trainer(config(tmp_path), loop, self.own(mine))
        assert isinstance(trainer, mine) and isinstance(trainer, ArcticFullyAsyncMixin)

    def test_one_of_the_other_kind_is_refused(self, loop, tmp_path):
        with pytest.raises(UnsupportedError, match="enabled=true: the recipe's trainer RayPPOTrainer is not a Fully"):
            self.trainer(config(tmp_path), loop, self.own(RayPPOTrainer))
