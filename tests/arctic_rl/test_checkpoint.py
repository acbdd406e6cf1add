"""Folders of checkpoints: whole or not there, whatever happens while they are written."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.checkpoint import (
    LATEST_NAME,
    MANIFEST_NAME,
    checkpoints,
    latest,
    read_manifest,
    remove_old,
    set_latest,
    sweep,
    verify,
    write_manifest,
    written_aside,
)
from integrations.arctic_rl.errors import CheckpointError
from integrations.arctic_rl.preflight import checkpoint_problems
from integrations.arctic_rl.server.checkpoint import Piece, write_share
from tests.arctic_rl.shares import flip_a_byte


def save(root, step, text="state"):
    """A checkpoint with a share of two ranks and a file."""
    target = root / f"global_step_{step}"
    with written_aside(target) as aside:
        folder = aside / target.name
        folder.mkdir()
        for rank in range(2):
            piece = Piece("a.weight", (8,), 4 * rank, {"weight": torch.arange(4.0) + step + 4 * rank}, None)
            write_share(
                folder / "policy", [piece], rank=rank, world_size=2, replicated=False, buffers={}, facts={"step": step}
            )
        (folder / "trainer_state.pt").write_text(text)
        write_manifest(folder, step)
    set_latest(root, step)
    return target


def names(root):
    return sorted(path.name for path in root.iterdir())


def content(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_checkpoint_is_listed_and_verified(tmp_path):
    before = time.time()
    folder = save(tmp_path, 3)
    assert names(tmp_path) == ["global_step_3", LATEST_NAME]
    manifest = verify(folder)
    assert (manifest.step, manifest.parts) == (3, ("policy",))
    assert before <= manifest.saved_at <= time.time()
    assert sorted(manifest.files) == ["policy/rank-00000.json", "policy/rank-00001.json", "trainer_state.pt"]
    assert manifest == read_manifest(folder)
    assert latest(tmp_path) == folder


FILES = (
    "manifest.json",
    "trainer_state.pt",
    "policy/rank-00000.json",
    "policy/rank-00001.json",
    "policy/rank-00001-00000.safetensors",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "longer"])
def test_damage_is_told_with_the_files_name(tmp_path, name, damage):
    save(tmp_path, 2)
    folder = save(tmp_path, 4)
    path = folder / name
    if damage == "missing":
        path.unlink()
    else:
        text = path.read_bytes()
        path.write_bytes(text[:-1] if damage == "cut" else text + b" 1")
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert name in str(caught.value)
    if name != MANIFEST_NAME:
        assert "Other checkpoints there: global_step_2;" in str(caught.value)


@pytest.mark.parametrize("name", FILES[:4])
def test_a_flipped_bit_anywhere_in_a_small_file_is_told(tmp_path, name):
    folder = save(tmp_path, 4)
    path = folder / name
    whole = path.read_bytes()
    for offset in range(0, len(whole), 7):
        flip_a_byte(path, offset)
        with pytest.raises(CheckpointError, match=name):
            verify(folder)
        path.write_bytes(whole)
    verify(folder)


def test_a_failure_while_writing_leaves_what_was_there(tmp_path):
    save(tmp_path, 2)
    before = content(tmp_path)
    for step in (2, 4):
        target = tmp_path / f"global_step_{step}"
        said = pytest.raises(CheckpointError, match=f"global_step_{step} could not be written: .*No space.*untouched")
        with said, written_aside(target) as aside:
            (aside / target.name).mkdir()
            raise OSError(28, "No space left on device")
        with pytest.raises(KeyboardInterrupt), written_aside(target) as aside:
            (aside / target.name).mkdir()
            raise KeyboardInterrupt
    assert content(tmp_path) == before
    assert latest(tmp_path) == tmp_path / "global_step_2"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"), written_aside(tmp_path / "file" / "global_step_1"):
        raise AssertionError("was entered")


def test_a_share_that_cannot_be_seen_is_no_part_of_a_checkpoint(tmp_path):
    said = pytest.raises(CheckpointError, match=r"(?s)rank-00001-00000\.safetensors: No such file.*every node shares")
    with said, written_aside(tmp_path / "global_step_1") as aside:
        folder = aside / "global_step_1"
        shutil.copytree(save(tmp_path, 7), folder)
        (folder / "policy" / "rank-00001-00000.safetensors").unlink()
        write_manifest(folder, 1)
    assert not (tmp_path / "global_step_1").exists()


def test_the_same_step_is_replaced_and_a_kill_between_the_renames_undone(tmp_path, monkeypatch):
    folder = save(tmp_path, 3, "first")
    save(tmp_path, 3, "second")
    assert names(tmp_path) == ["global_step_3", LATEST_NAME]
    assert (folder / "trainer_state.pt").read_text() == "second"

    class Killed(BaseException):
        pass

    rename = type(folder).rename

    def killed_at_the_second(path, target):
        if path.parent.name.startswith(".saving-"):
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(type(folder), "rename", killed_at_the_second)
    with pytest.raises(Killed):
        save(tmp_path, 3, "third")
    monkeypatch.undo()
    assert not folder.exists()
    assert latest(tmp_path) == folder, "the next start's checks find it before it is brought back"
    assert list(checkpoint_problems(resuming_from(tmp_path, "latest"))) == []
    assert list(checkpoint_problems(resuming_from(tmp_path, "from_path", folder))) == []
    sweep(tmp_path)
    assert names(tmp_path) == ["global_step_3", LATEST_NAME]
    assert (folder / "trainer_state.pt").read_text() == "second"
    verify(folder)


def resuming_from(root, mode, path=None):
    trainer = SimpleNamespace(
        ckpt_interval=1,
        resume_mode=mode,
        resume_path=path,
        critic=SimpleNamespace(model=SimpleNamespace(path=None)),
        fully_async=SimpleNamespace(enabled=False),
        policy=SimpleNamespace(torch_profiler_config=SimpleNamespace(enable=False)),
        **dict.fromkeys(("ckpt_path", "export_path", "log_path"), root),
    )
    return SimpleNamespace(trainer=trainer)


def refusing(method, monkeypatch, *prefixes):
    """Let the system refuse a call on paths of these beginnings."""
    original = getattr(Path, method)

    def call(path, *args, **kwargs):
        if path.name.startswith(prefixes):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, method, call)


def test_a_replacement_that_is_refused_leaves_the_old_one_in_its_place(tmp_path, monkeypatch):
    save(tmp_path, 3, "first")
    before = content(tmp_path)
    original = Path.rename

    def second_refused(path, target):
        if path.parent.name.startswith(".saving-"):
            raise OSError(28, "No space left on device")
        return original(path, target)

    monkeypatch.setattr(Path, "rename", second_refused)
    with pytest.raises(CheckpointError, match=r"No space left on device.*untouched"):
        save(tmp_path, 3, "second")
    assert content(tmp_path) == before


def test_what_the_system_refuses_is_told(tmp_path, monkeypatch):
    for step in (3, 6):
        save(tmp_path, step)
    before = content(tmp_path)
    for methods, call, said in (
        (("rename", "unlink"), lambda: set_latest(tmp_path, 9), rf"{LATEST_NAME} could not be written.*ckpt_path"),
        (("rename",), lambda: remove_old(tmp_path, 1), r"global_step_3 could not be removed.*max_ckpts_to_keep=-1"),
    ):
        with monkeypatch.context() as patch:
            for method in methods:
                refusing(method, patch, ".saving-", "global_step_")
            with pytest.raises(CheckpointError, match=said):
                call()
        sweep(tmp_path)
        assert content(tmp_path) == before
    (tmp_path / ".replaced-global_step_9-0a1b").mkdir()
    refusing("rename", monkeypatch, ".replaced-")
    with pytest.raises(CheckpointError, match=r"could not be cleared away: .*Permission denied"):
        sweep(tmp_path)


def test_what_else_was_made_beside_a_checkpoint_goes_beside_it(tmp_path):
    for text in ("old", "new"):
        with written_aside(tmp_path / "global_step_1") as aside:
            (aside / "global_step_1").mkdir()
            (aside / "best.json").write_text(text)
    assert names(tmp_path) == ["best.json", "global_step_1"]
    assert (tmp_path / "best.json").read_text() == "new"


def test_leftovers_are_swept_away_and_nothing_else(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "notes.txt").touch()
    kept = content(tmp_path)
    for name in (".saving-global_step_4-0a1b", ".replaced-global_step_2-0a1b"):
        shutil.copytree(tmp_path / "global_step_2", tmp_path / name / "global_step_4")
    (tmp_path / f".saving-{LATEST_NAME}-0a1b").write_text("4")
    sweep(tmp_path)
    assert content(tmp_path) == kept
    assert names(tmp_path) == ["global_step_2", LATEST_NAME, "notes.txt"]
    sweep(tmp_path / "not there")


def test_old_ones_go_in_the_order_in_which_they_were_saved(tmp_path):
    for step in (90, 100, 2, 4):
        save(tmp_path, step)
    (tmp_path / "global_step_50").mkdir()
    (tmp_path / "global_step_50" / "trainer_state.pt").touch()
    assert [path.name for path, _ in checkpoints(tmp_path)] == [f"global_step_{step}" for step in (90, 100, 2, 4)]
    assert remove_old(tmp_path, -1) == remove_old(tmp_path, 4) == []
    assert [path.name for path in remove_old(tmp_path, 3)] == ["global_step_90"]
    set_latest(tmp_path, 100)
    assert [path.name for path in remove_old(tmp_path, 1)] == ["global_step_2"], "the latest stays"
    assert names(tmp_path) == ["global_step_100", "global_step_4", "global_step_50", LATEST_NAME]


def test_the_latest_without_its_file_is_the_last_that_is_whole(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "not there") is None
    save(tmp_path, 9)
    save(tmp_path, 2)
    (tmp_path / LATEST_NAME).unlink()
    assert latest(tmp_path) == tmp_path / "global_step_2"
    (tmp_path / "global_step_2" / MANIFEST_NAME).unlink()
    assert latest(tmp_path) == tmp_path / "global_step_9"


@pytest.mark.parametrize("text", ["", "four", "-1", "4.0"])
def test_a_file_that_names_no_step_is_told(tmp_path, text):
    save(tmp_path, 4)
    (tmp_path / LATEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="not a step"):
        latest(tmp_path)


def test_a_file_that_names_a_missing_checkpoint_is_told(tmp_path):
    save(tmp_path, 4)
    set_latest(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"names global_step_6, which is not there \(there are: global_step_4\)"):
        latest(tmp_path)


def test_another_format_is_told(tmp_path):
    folder = save(tmp_path, 4)
    listing = json.loads((folder / "policy" / "rank-00001.json").read_text())
    (folder / "policy" / "rank-00001.json").write_text(json.dumps(listing | {"format": 2}))
    os.unlink(folder / MANIFEST_NAME)
    with pytest.raises(CheckpointError, match=r"rank-00001\.json has format 2, this code reads 1"):
        write_manifest(folder, 4)
