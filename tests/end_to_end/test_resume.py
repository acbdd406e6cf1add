"""A real run interrupted between two saves, taken up again, and its export trained on: Ray, DeepSpeed, vLLM."""

import json
import math
import pickle
import signal
from types import SimpleNamespace

import pytest
from recipes import byte_tokenizer, left_over, read_lines, run_processes, settings, start, wait_for_steps, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS, BATCH, EPOCHS = 12, 4, 3
STEPS = PROMPTS // BATCH * EPOCHS
LR = 1e-3


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


def finish(folder, changes):
    process = start(folder, settings(folder, changes))
    try:
        process.wait(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, (folder / "output.log").read_text()[-4000:]


def test_an_interrupted_run_goes_on_and_its_export_is_a_model_like_any_other(tmp_path):
    write_inputs(tmp_path, prompts=PROMPTS)
    changes = {
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
    process = start(tmp_path, settings(tmp_path, changes))
    try:
        wait_for_steps(tmp_path, process, 4)
        processes = run_processes(process)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    finally:
        process.kill()
    assert left_over(processes) == []
    first = (tmp_path / "output.log").read_text()
    assert "interrupted" in first, first[-4000:]
    saved = int((tmp_path / "checkpoints" / "latest_ckpt_global_step.txt").read_text())
    assert 4 <= saved < STEPS

    steps_before = len(read_lines(tmp_path / "logs" / "optimizer_steps.jsonl"))
    metrics_before = len(read_lines(tmp_path / "logs" / "metrics.jsonl"))
    finish(tmp_path, changes)

    logs = read_lines(tmp_path / "logs" / "metrics.jsonl")[metrics_before:]
    logs = [line for line in logs if "policy/final_loss" in line]
    assert [line["global_step"] for line in logs] == list(range(saved + 1, STEPS + 1))
    assert [line["trainer/epoch"] for line in logs] == [(step - 1) // 3 for step in range(saved + 1, STEPS + 1)]
    assert all(line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for line in logs)
    assert [dumped_prompts(tmp_path, step) for step in range(1, STEPS + 1)] == expected_prompts(tmp_path)
    lines = read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")[steps_before:]
    assert [line["optimizer_step"] for line in lines] == list(range(saved + 1, STEPS + 1))
    assert [line["lr"] for line in lines] == pytest.approx([_cosine(step) for step in range(saved, STEPS)], rel=1e-12)
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"global_step_8", "global_step_9", "latest_ckpt_global_step.txt"}
    assert len(json.loads((tmp_path / "checkpoints" / "global_step_9" / "policy" / "engines.json").read_text())) == 1

    export = tmp_path / "exports" / f"global_step_{STEPS}" / "policy"
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in export.iterdir()
    }
    again = {
        **changes,
        "trainer.policy.model.path": str(export),
        "trainer.ckpt_path": f"{tmp_path}/others",
        "trainer.log_path": f"{tmp_path}/other_logs",
        "trainer.dump_data_batch": False,
        "trainer.hf_save_interval": -1,
        "trainer.max_training_steps": 1,
    }
    finish(tmp_path, again)
    (line,) = [line for line in read_lines(tmp_path / "other_logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5, "vLLM and the trainer agree on the export"
    config = json.loads((export / "config.json").read_text())
    assert config == json.loads((tmp_path / "model" / "config.json").read_text())


def _cosine(step, warmup=2):
    if step < warmup:
        return LR * step / warmup
    return LR * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))
