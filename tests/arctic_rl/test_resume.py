"""Saving and resuming in SkyRL's own trainer, on a backend in this process."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback

from integrations.arctic_rl import resume
from integrations.arctic_rl.checkpoint import LATEST_NAME
from integrations.arctic_rl.errors import CheckpointError
from integrations.arctic_rl.resume import STATE_NAME
from tests.arctic_rl.in_process_backend import InProcessBackend
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.resume_runs import EPOCHS, ROWS, STEPS, Rollouts, config, prompts, resuming, run
from tests.arctic_rl.shares import assembled, flip_a_byte

LATEST = "trainer.resume_mode=latest"
KL = ("trainer.algorithm.use_kl_loss=true",)


def train(cfg, loop, recording=None, *, flat=(), **keywords):
    models = {"policy": tiny_model(), "ref": tiny_model(seed=3)}
    backend = InProcessBackend(models)
    rollouts = Rollouts({} if recording is None else recording, flat)
    done = run(cfg, backend, loop, rollouts, **keywords)
    done.backend, done.weights, done.reference = backend, models["policy"].state_dict(), models["ref"].state_dict()
    done.seen = rollouts.seen
    return done


def same(ours, theirs):
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


class Stop(Exception):
    pass


class StopAfter(TrainingCallback):
    """Ends a run as an exception does, in the step after the given one."""

    def __init__(self, step):
        self._step = step

    def on_step_end(self, trainer, callback_input, control):
        if callback_input.global_step > self._step:
            raise Stop


def stopped(cfg, loop, step, recording, **keywords):
    with pytest.raises(Stop):
        train(cfg, loop, recording, callbacks=[StopAfter(step)], **keywords)


def steps_below(folder):
    return sorted(int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").glob("global_step_*"))


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_latest_is_taken_up(tmp_path, loop, stop):
    recording = {}
    whole = train(config(tmp_path / "whole"), loop, recording)
    stopped(config(tmp_path / "stopped", LATEST), loop, stop, recording)
    rest = train(config(tmp_path / "stopped", LATEST), loop, recording)
    assert rest.logs == {step: whole.logs[step] for step in range(stop + 1, STEPS + 1)}
    assert rest.seen == whole.seen[stop:]
    assert same(rest.weights, whole.weights)
    assert rest.lines[-2:] == whole.lines[-2:]
    assert rest.lines[-1]["optimizer_step"] == 2 * STEPS
    assert steps_below(tmp_path / "stopped") == list(range(1, STEPS + 1))


class Versions(TrainingCallback):
    """The weight version that each step's rollouts are sampled with."""

    def __init__(self):
        self.of_step = {}

    def on_step_start(self, trainer, callback_input, control):
        self.of_step[callback_input.global_step] = trainer.inference_engine_client.weight_version


@pytest.mark.parametrize("first", [3, 4])
def test_weight_versions_which_seeds_hang_on_go_on(tmp_path, loop, first):
    """The first run's last checkpoint comes before the weight sync of its step, or at its end, behind it."""
    folder, recording, versions = tmp_path / "run", {}, Versions()
    shorter = ("trainer.ckpt_interval=3", f"trainer.max_training_steps={first}", "trainer.max_ckpts_to_keep=9")
    train(config(folder, *shorter), loop, recording, callbacks=[versions])
    assert steps_below(folder)[-1] == first
    train(config(folder, LATEST), loop, recording, callbacks=[versions])
    assert versions.of_step == {step: step for step in range(1, STEPS + 1)}


def test_the_interval_is_honoured_and_lost_steps_are_taken_again(tmp_path, loop):
    settings = ("trainer.ckpt_interval=4", LATEST)
    recording = {}
    whole = train(config(tmp_path / "whole", *settings), loop, recording)
    assert steps_below(tmp_path / "whole") == [2, 4, 6], "each epoch's end too, as SkyRL has it"
    stopped(config(tmp_path / "stopped", *settings), loop, 4, recording)
    rest = train(config(tmp_path / "stopped", *settings), loop, recording)
    assert rest.seen == whole.seen[4:] and same(rest.weights, whole.weights)


def test_none_starts_afresh_beside_older_checkpoints(tmp_path, loop):
    train(config(tmp_path), loop)
    cfg = config(tmp_path, "trainer.resume_mode=none", "trainer.max_training_steps=1", "trainer.max_ckpts_to_keep=3")
    again = train(cfg, loop)
    assert sorted(again.logs) == [1]
    assert steps_below(tmp_path) == [1, 5, 6], "those that were saved last"
    assert (tmp_path / "checkpoints" / LATEST_NAME).read_text() == "1"


def test_latest_without_a_checkpoint_starts_afresh(tmp_path, loop):
    done = train(config(tmp_path, LATEST, "trainer.max_training_steps=1"), loop)
    assert sorted(done.logs) == [1]
    assert "load_checkpoint" not in done.backend.names()


def test_old_checkpoints_go_once_a_new_one_is_whole(tmp_path, loop):
    cfg = config(tmp_path, "trainer.max_ckpts_to_keep=2")
    there = []

    class Look(TrainingCallback):
        def on_save(self, trainer, callback_input, control):
            there.append(steps_below(tmp_path))

    train(cfg, loop, callbacks=[Look()])
    assert there == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]

    class FailingBackend(InProcessBackend):
        async def save_checkpoint(self, job, directory):
            Path(directory).mkdir(parents=True)
            (Path(directory) / "rank-00000.json").write_text("{")
            there.append(steps_below(tmp_path))
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        run(cfg, FailingBackend({"policy": tiny_model()}), loop, Rollouts({}))
    assert there[-1] == steps_below(tmp_path) == [5, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "global_step_5",
        "global_step_6",
        LATEST_NAME,
    ]


def test_a_run_that_is_complete_trains_nothing_and_writes_nothing(tmp_path, loop, monkeypatch):
    for settings in ((), ("trainer.max_training_steps=3",)):
        folder = tmp_path / str(len(settings))
        first = train(config(folder, *settings), loop)
        files = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}
        said = []
        with monkeypatch.context() as patch:
            patch.setattr(resume, "logger", SimpleNamespace(info=str, warning=said.append))
            again = train(config(folder, *settings, LATEST), loop)
        assert again.logs == {} and again.seen == []
        steps = max(first.logs)
        (text,) = said
        assert f"is at step {steps}, " in text and f"give this run {steps}: nothing is left to train" in text
        assert same(again.weights, first.weights)
        assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")} == files


def test_more_epochs_go_on_where_the_run_ended(tmp_path, loop):
    recording = {}
    whole = train(config(tmp_path / "whole", f"trainer.epochs={EPOCHS + 1}"), loop, recording)
    train(config(tmp_path / "short"), loop, recording)
    longer = train(config(tmp_path / "short", f"trainer.epochs={EPOCHS + 1}", LATEST), loop, recording)
    assert longer.seen == whole.seen[STEPS:] and same(longer.weights, whole.weights)


def test_dynamic_sampling_goes_on_at_the_batch_not_at_the_step(tmp_path, loop):
    """Some batches leave too few prompts whose samples differ: the steps and the batches drift apart."""
    settings = (
        "trainer.algorithm.dynamic_sampling.type=filter",
        "trainer.algorithm.dynamic_sampling.max_sample_batches=9",
        "trainer.epochs=8",
        f"trainer.train_batch_size={ROWS // 4}",
        "trainer.policy_mini_batch_size=2",
    )
    flat = tuple(range(1, 32, 2))
    recording, epochs = {}, []

    class Epochs(TrainingCallback):
        def on_epoch_start(self, trainer, callback_input, control):
            epochs.append(callback_input.epoch)

    whole = train(config(tmp_path / "whole", *settings), loop, recording, flat=flat, callbacks=[Epochs()])
    steps = max(whole.logs)
    assert 4 < steps < len(whole.seen) == 32
    assert epochs == list(range(8))
    for stop in (1, 2, steps // 2, steps - 1):
        saved = tmp_path / "whole" / "checkpoints" / f"global_step_{stop}"
        order = json.loads((saved / STATE_NAME).read_text())["order"]
        given = 4 * order["passes"] + order["batches"]
        assert (given > stop) == (stop > 1)
        epochs.clear()
        cfg = config(tmp_path / str(stop), *settings, *resuming(saved))
        rest = train(cfg, loop, recording, flat=flat, callbacks=[Epochs()])
        assert rest.seen == whole.seen[given:]
        assert rest.logs == {step: log for step, log in whole.logs.items() if step > stop}
        assert same(rest.weights, whole.weights)
        assert epochs == list(range(order["passes"], 8)), "no epoch begins twice"


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_the_reference_comes_back_and_an_update_that_was_due_is_made(tmp_path, loop, stop):
    recording = {}
    settings = (*KL, "trainer.update_ref_every_epoch=true")
    whole = train(config(tmp_path / "whole", *settings), loop, recording)
    saved = tmp_path / "whole" / "checkpoints" / f"global_step_{stop}"
    rest = train(config(tmp_path / "rest", *settings, *resuming(saved)), loop, recording)
    assert rest.logs == {step: whole.logs[step] for step in range(stop + 1, STEPS + 1)}
    assert same(rest.reference, whole.reference) and same(rest.weights, whole.weights)
    with pytest.raises(CheckpointError, match=r"update_ref_every_epoch=true"):
        train(config(tmp_path / "other", *KL, *resuming(saved)), loop, recording)
    train(config(tmp_path / "without", "trainer.max_training_steps=1", *resuming(saved)), loop, recording)


def test_an_adaptive_kl_coefficient_comes_back(tmp_path, loop):
    settings = (
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.kl_ctrl.type=adaptive",
        "trainer.algorithm.kl_ctrl.horizon=20",
        "trainer.algorithm.kl_loss_coef=0.3",
    )
    recording = {}
    whole = train(config(tmp_path / "whole", *settings), loop, recording)
    saved = tmp_path / "whole" / "checkpoints" / "global_step_3"
    rest = train(config(tmp_path / "rest", *settings, *resuming(saved)), loop, recording)
    assert rest.logs == {step: whole.logs[step] for step in range(4, STEPS + 1)}
    assert rest.trainer.reward_kl_controller.value == whole.trainer.reward_kl_controller.value != 0.3


def test_the_trainers_own_random_state_comes_back(tmp_path, loop):
    import random

    import numpy as np

    class Draws(Rollouts):
        async def generate(self, input_batch, disable_tqdm=False):
            drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
            return await super().generate(input_batch, disable_tqdm)

    drawn, recording = [], {}
    run(config(tmp_path / "whole"), InProcessBackend(), loop, Draws(recording))
    whole, drawn = drawn, []
    saved = tmp_path / "whole" / "checkpoints" / "global_step_4"
    random.seed(), np.random.seed(), torch.seed()
    run(config(tmp_path / "rest", *resuming(saved)), InProcessBackend(), loop, Draws(recording))
    assert drawn == whole[4:]


class TestRefusals:
    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory, loop):
        folder = tmp_path_factory.mktemp("saved")
        train(config(folder, "trainer.max_training_steps=3"), loop)
        return folder / "checkpoints"

    @pytest.fixture
    def root(self, saved, tmp_path):
        return Path(shutil.copytree(saved, tmp_path / "checkpoints"))

    @pytest.mark.parametrize(
        "name", ["policy/rank-00000-00000.safetensors", "policy/rank-00000.json", STATE_NAME, "data.pt"]
    )
    @pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
    def test_a_damaged_checkpoint_ends_the_start_before_anything_is_trained(self, root, loop, name, damage):
        path = root / "global_step_3" / name
        if damage == "missing":
            path.unlink()
        elif damage == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            flip_a_byte(path, path.stat().st_size // 2)
        before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        with pytest.raises(CheckpointError, match=name):
            train(config(root.parent, LATEST), loop)
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
        rest = train(config(root.parent, *resuming(root / "global_step_2")), loop)
        assert sorted(rest.logs) == [3, 4, 5, 6]

    def test_other_data_and_another_order(self, root, loop):
        cases = {
            "trainer.seed is 43, and was 42": (("trainer.seed=43",), None),
            "trainer.train_batch_size is 2, and was 4": (("trainer.train_batch_size=2",), None),
            "rows of data.train_data is 12, and was 8": ((), prompts(12)),
            "digest of data.train_data is .*, and was": ((), type(prompts())(reversed(prompts()))),
            "loading in processes .* is True, and was False": (("data.dataloader.num_workers=1",), None),
        }
        for said, (settings, dataset) in cases.items():
            with pytest.raises(CheckpointError, match=said):
                train(config(root.parent, *settings, LATEST), loop, dataset=dataset)

    def test_a_checkpoint_of_skyrls_own(self, root, loop):
        (root / "global_step_3" / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"not a checkpoint of this backend.*manifest\.json"):
            train(config(root.parent, LATEST), loop)

    def test_a_path_that_is_not_there_and_a_folder_that_was_renamed(self, root, loop):
        with pytest.raises(CheckpointError, match="there is no such folder"):
            train(config(root.parent, *resuming(root / "global_step_9")), loop)
        (root / "global_step_2").rename(root / "global_step_9")
        with pytest.raises(CheckpointError, match="holds the checkpoint of step 2"):
            train(config(root.parent, *resuming(root / "global_step_9")), loop)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, small_disk, loop):
    settings = (f"trainer.ckpt_path={small_disk}", LATEST)
    recording = {}
    whole = train(config(tmp_path / "whole"), loop, recording)
    with pytest.raises(CheckpointError, match=r"could not (be written|write).*No space left.*trainer\.ckpt_path"):
        train(config(tmp_path, *settings), loop, recording)
    kept = sorted(path.name for path in small_disk.iterdir())
    saved = int((small_disk / LATEST_NAME).read_text())
    assert kept == [*(f"global_step_{step}" for step in range(1, saved + 1)), LATEST_NAME] and 1 <= saved < STEPS
    shutil.rmtree(small_disk / "global_step_1")
    rest = train(config(tmp_path, *settings, "trainer.max_ckpts_to_keep=1"), loop, recording)
    assert rest.seen == whole.seen[saved:] and same(rest.weights, whole.weights)


class WithState(RayPPOTrainer):
    """A recipe's trainer that keeps something of its own in a checkpoint, as the fully-asynchronous one does."""

    own = None

    def save_checkpoints(self):
        folder = super().save_checkpoints()
        (Path(folder) / "own.txt").write_text(f"own of step {self.global_step}")
        (Path(self.cfg.trainer.ckpt_path) / "best.txt").write_text(str(self.global_step))
        return folder

    def load_checkpoints(self):
        step, folder = super().load_checkpoints()
        if folder is not None:
            self.own = (Path(folder) / "own.txt").read_text()
        return step, folder


def test_a_recipes_own_part_of_a_checkpoint_is_part_of_the_whole(tmp_path, loop):
    train(config(tmp_path, "trainer.max_training_steps=2"), loop, trainer_class=WithState)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["best.txt", "global_step_1", "global_step_2", LATEST_NAME]
    assert "own.txt" in json.loads((root / "global_step_2" / "manifest.json").read_text())["body"]["files"]
    state = torch.load(root / "global_step_2" / "trainer_state.pt", weights_only=False)
    assert state["config"]["trainer"]["ckpt_path"] == str(root)
    rest = train(config(tmp_path, LATEST), loop, trainer_class=WithState)
    assert rest.trainer.own == "own of step 2"
    (root / "global_step_6" / "own.txt").write_text("another")
    with pytest.raises(CheckpointError, match=r"own\.txt: its content"):
        train(config(tmp_path, LATEST), loop, trainer_class=WithState)


def test_a_checkpoint_of_plain_adamw_is_what_torch_holds(tmp_path, loop):
    done = train(config(tmp_path), loop)
    saved = assembled(tmp_path / "checkpoints" / f"global_step_{STEPS}" / "policy")
    optimizer = done.backend._optimizers["policy"]
    parameters = dict(done.backend._engines["policy"].module.named_parameters())
    assert saved.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(saved[name]["weight"], parameter.detach().flatten())
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[name][moment], optimizer.state[parameter][moment].flatten())
