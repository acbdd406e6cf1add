"""A real run killed between two saves, taken up again, and its export trained on until the next kills."""

import json
import math
import pickle
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from recipes import (
    byte_tokenizer,
    left_over,
    read_lines,
    run_processes,
    settings,
    start,
    wait_for_steps,
    worker,
    write_inputs,
)

from integrations.arctic_rl.checkpoint import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS, BATCH, EPOCHS = 12, 4, 3
STEPS = PROMPTS // BATCH * EPOCHS
LR = 1e-3
STOP_LIMIT_S = 3 * 30.0


def expected_prompts(folder):
    """Per step the prompts' texts in the order of SkyRL's own dataset and loader."""
    from skyrl.train.dataset import PromptDataset
    from skyrl.train.utils.trainer_utils import build_dataloader

    dataset = PromptDataset(str(folder / "prompts.parquet"), byte_tokenizer(), max_prompt_length=64, num_workers=1)
    cfg = SimpleNamespace(
        trainer=SimpleNamespace(train_batch_size=BATCH, seed=42, epochs=EPOCHS),
        data=SimpleNamespace(dataloader=SimpleNamespace(num_workers=0, persistent_workers=False)),
    )
    loader = build_dataloader(cfg, dataset, is_train=True)
    return [[row["prompt"][0]["content"] for row in batch] for _ in range(EPOCHS) for batch in loader]


def dumped_prompts(folder, step):
    """The prompts' texts of a dumped training batch, one a group."""
    (path,) = (folder / "exports").rglob(f"global_step_{step}_training_input*")
    batch = pickle.loads(path.read_bytes())
    texts = byte_tokenizer().batch_decode(batch["sequences"], skip_special_tokens=True)
    return [text.split("user:")[1].split("?")[0] + "?" for text in texts[::4]]


CHANGES = {
    "trainer.epochs": EPOCHS,
    "trainer.train_batch_size": BATCH,
    "trainer.policy_mini_batch_size": BATCH,
    "trainer.policy.optimizer_config.lr": LR,
    "trainer.policy.optimizer_config.scheduler": "cosine",
    "trainer.policy.optimizer_config.num_warmup_steps": 2,
    "trainer.placement.colocate_all": False,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "trainer.arctic_rl.zero_stage": 3,
    "trainer.arctic_rl.cpu_threads": 1,
    "trainer.ckpt_interval": 2,
    "trainer.max_ckpts_to_keep": 2,
    "trainer.resume_mode": "latest",
    "trainer.dump_data_batch": True,
    "generator.sampling_params.additional_kwargs.seed": 7,
    "trainer.hf_save_interval": 100,
}


@dataclass(frozen=True)
class Killed:
    """A run that is over since one of its processes was killed."""

    returncode: int
    output: str
    left: list[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_inputs(folder, prompts=PROMPTS)
    return folder


@pytest.fixture(scope="module")
def without_a_rank(folder):
    """Two ranks under ZeRO-3, one of them killed between two saves."""
    process = start(folder, settings(folder, CHANGES))
    try:
        wait_for_steps(folder, process, 4)
        processes = run_processes(process)
        worker(processes, "TrainingWorker").kill()
        killed = time.monotonic()
        process.wait(timeout=STOP_LIMIT_S)
        print(f"ended {time.monotonic() - killed:.1f} s after the kill")
    finally:
        process.kill()
    return Killed(process.returncode, (folder / "output.log").read_text(), left_over(processes))


@pytest.fixture(scope="module")
def resumed(folder, without_a_rank):
    """The same command again, which ends; returns the step it went on from and the lines logged before."""
    saved = int((folder / "checkpoints" / "latest_ckpt_global_step.txt").read_text())
    before = {name: len(read_lines(folder / "logs" / name)) for name in ("metrics.jsonl", "optimizer_steps.jsonl")}
    process = start(folder, settings(folder, CHANGES))
    try:
        process.wait(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, (folder / "output.log").read_text()[-4000:]
    return saved, before


@pytest.fixture(scope="module")
def without_a_driver(folder, resumed):
    """A run on the export, of which the engine is killed, and the driver once that was replaced."""
    changes = {
        **CHANGES,
        "trainer.policy.model.path": str(exported(folder)),
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.arctic_rl.zero_stage": 0,
        "trainer.epochs": 500,
        "trainer.ckpt_interval": 1,
        "trainer.ckpt_path": f"{folder}/others/checkpoints",
        "trainer.log_path": f"{folder}/others/logs",
        "trainer.dump_data_batch": False,
        "trainer.hf_save_interval": -1,
    }
    metrics = folder / "others" / "logs" / "metrics.jsonl"
    process = start(folder, settings(folder, changes))
    try:
        wait_for_steps(folder, process, 2, metrics)
        worker(run_processes(process), "SamplingWorker").kill()
        wait_for_steps(folder, process, len(read_lines(metrics)) + 3, metrics)
        processes = run_processes(process)
    finally:
        process.kill()
    output = (folder / "output.log").read_text()
    return Killed(process.wait(), output, left_over(processes, STOP_LIMIT_S))


def exported(folder):
    return folder / "exports" / f"global_step_{STEPS}" / "policy"


def test_a_killed_rank_ends_the_run_with_its_name_and_nothing_left(without_a_rank):
    assert without_a_rank.returncode not in (0, None)
    assert "worker policy-" in without_a_rank.output and "died" in without_a_rank.output
    assert "last log lines" in without_a_rank.output
    assert without_a_rank.left == []


def test_the_run_goes_on_from_what_was_saved(folder, resumed):
    saved, before = resumed
    assert 4 <= saved < STEPS
    lines = read_lines(folder / "logs" / "metrics.jsonl")
    logs = [line for line in lines[before["metrics.jsonl"] :] if "policy/final_loss" in line]
    assert all(line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for line in [*lines[:4], *logs])
    assert [line["global_step"] for line in logs] == list(range(saved + 1, STEPS + 1))
    assert [line["trainer/epoch"] for line in logs] == [(step - 1) // 3 for step in range(saved + 1, STEPS + 1)]
    assert [dumped_prompts(folder, step) for step in range(1, STEPS + 1)] == expected_prompts(folder)
    updates = read_lines(folder / "logs" / "optimizer_steps.jsonl")[before["optimizer_steps.jsonl"] :]
    assert [update["optimizer_step"] for update in updates] == list(range(saved + 1, STEPS + 1))
    assert [update["lr"] for update in updates] == pytest.approx(
        [_cosine(step) for step in range(saved, STEPS)], rel=1e-12
    )
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"global_step_8", "global_step_9", "latest_ckpt_global_step.txt"}
    assert len(json.loads((folder / "checkpoints" / "global_step_9" / "policy" / "engines.json").read_text())) == 1


def test_its_export_is_a_model_like_any_other(folder, without_a_driver):
    export = exported(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in export.iterdir()
    }
    assert json.loads((export / "config.json").read_text()) == json.loads(
        (folder / "model" / "config.json").read_text()
    )
    line, *_ = read_lines(folder / "others" / "logs" / "metrics.jsonl")
    assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5, "vLLM and the trainer agree on the export"


def test_a_killed_engine_is_replaced_and_a_killed_driver_leaves_nothing_behind(folder, without_a_driver):
    assert "worker sampling-0 died" in without_a_driver.output
    assert "worker sampling-0 is up again" in without_a_driver.output
    lines = read_lines(folder / "others" / "logs" / "metrics.jsonl")
    lines = [line for line in lines if "policy/final_loss" in line]
    assert sum(line.get("generate/engine_restarts", 0) for line in lines) == 1
    for line in lines:
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5, "the next engine has the current weights"
    assert without_a_driver.left == []
    checkpoints = folder / "others" / "checkpoints"
    latest = int((checkpoints / "latest_ckpt_global_step.txt").read_text())
    verify(checkpoints / f"global_step_{latest}")


def _cosine(step, warmup=2):
    if step < warmup:
        return LR * step / warmup
    return LR * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))
