"""What SkyRL's trainer shows of a training batch: each row beside the prompt that its tokens begin with."""

import asyncio
import random

import pytest
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.shown_prompts import ShownPromptsMixin
from tests.arctic_rl import resume_runs
from tests.arctic_rl.in_process_backend import InProcessBackend

SAMPLES = resume_runs.SAMPLES


class Shown:
    """A trajectory logger that keeps what it is given."""

    def __init__(self):
        self.tables = []

    def log(self, *, prompts, generator_output, wandb_key, **others):
        assert wandb_key == "trajectories/train"
        self.tables.append((prompts, generator_output["prompt_token_ids"], generator_output["rewards"]))


class Trainer(RayPPOTrainer):
    shown: Shown

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trajectory_logger = Shown()


class Turns:
    """One to three rows a trajectory, each beginning with the whole prompt; now and then all samples earn the same."""

    def __init__(self, step_wise):
        self.step_wise = step_wise
        self.draw = random.Random(2)

    async def generate(self, input_batch, disable_tqdm=False):
        columns = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
        output = {name: [] for name in columns}
        ids, last = [], []
        equal = {row_id.instance_id: self.draw.random() < 0.5 for row_id in input_batch["trajectory_ids"]}
        for prompt, row_id in zip(input_batch["prompts"], input_batch["trajectory_ids"], strict=True):
            turns = self.draw.randint(1, 3) if self.step_wise else 1
            for turn in range(turns):
                history = [self.draw.randrange(99) for _ in range(turn)]
                values = (prompt + history, [9, 9], [0.0, self.reward(row_id, equal)], [1, 1], [-1.0, -1.0])
                for name, value in zip(columns, values, strict=True):
                    output[name].append(value)
                ids.append(row_id)
                last.append(turn == turns - 1)
        output |= {"stop_reasons": ["stop"] * len(ids), "rollout_metrics": None}
        if self.step_wise:
            output |= {"trajectory_ids": ids, "is_last_step": last, "env_metrics": [{}] * len(ids)}
        return output

    @staticmethod
    def reward(row_id, equal):
        return 1.0 if equal[row_id.instance_id] else float(row_id.repetition_id)


@pytest.mark.parametrize("step_wise", [False, True], ids=["a row a trajectory", "a row a turn"])
@pytest.mark.parametrize("sampling", ["null", "filter", "replace"])
def test_each_row_is_shown_with_its_own_prompt(loop, tmp_path, step_wise, sampling):
    cfg = resume_runs.config(
        tmp_path,
        f"generator.step_wise_trajectories={step_wise}",
        f"trainer.algorithm.dynamic_sampling.type={sampling}",
        "trainer.algorithm.dynamic_sampling.max_sample_batches=-1",
        "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.1",
        "trainer.ckpt_interval=-1",
    )
    run = resume_runs.run(cfg, InProcessBackend(), loop, Turns(step_wise), trainer_class=Trainer)
    tables = run.trainer.trajectory_logger.tables
    assert len(tables) > 1
    misplaced = 0
    for prompts, rows, rewards in tables:
        assert len(prompts) == len(rows) == len(rewards)
        for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            assert row[: len(prompt)] == prompt
            misplaced += prompt != prompts[min(place // SAMPLES * SAMPLES, len(prompts) - 1)]
    assert misplaced > 0 or not step_wise, "rows that follow their number show little"
    assert not run.trainer._waiting(), "kept beyond its batch"


class Plain:
    """A trainer whose generator answers with the batch's number."""

    async def generate(self, batch):
        return {"number": batch["number"]}

    def postprocess_generator_output(self, output, uids):
        return output, uids


class Composed(ShownPromptsMixin, Plain):
    pass


def batch_of(number, uid):
    ids = None if uid is None else [TrajectoryID(instance_id=uid, repetition_id=0)]
    return {"number": number, "prompts": [f"prompt {number}"], "trajectory_ids": ids}


def test_batches_that_are_under_way_together_keep_their_prompts():
    """A recipe's loop may generate the next batch before it trains on this one, of the same prompt too."""
    trainer, batches = Composed(), [batch_of(number, uid) for number, uid in enumerate("aab")]
    outputs = [asyncio.run(trainer.generate(batch)) for batch in batches]
    for number in (1, 0, 2):
        trainer.postprocess_generator_output(outputs[number], ["aab"[number]] * 2)
        assert batches[number]["prompts"] == [f"prompt {number}"] * 2
    assert not trainer._waiting()
    for number in range(100):
        asyncio.run(trainer.generate(batch_of(number, "a")))
    assert len(trainer._waiting()) < 10, "a loop that shows nothing"


@pytest.mark.parametrize("uid", [None, "b"])
def test_a_batch_of_unknown_prompts_is_left_as_it_is(uid):
    trainer, batch = Composed(), batch_of(0, uid)
    output = asyncio.run(trainer.generate(batch))
    assert trainer.postprocess_generator_output(output, ["a", "a"]) == (output, ["a", "a"])
    assert batch == batch_of(0, uid)
