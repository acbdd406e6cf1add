"""One real run of a recipe's own entry module, with everything on that looks at a run, under adapters.

Its trainer, config fields, callback and logger of samples; evaluation, dumps, profiler and wandb. What is trained is
LoRA under examples/custom_loss.py, in the KL term, with log-probs from existing logits.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipes import left_over, read_lines, run_processes, settings, wait_for_steps, write_inputs
from wandb_file import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, BATCH, SAMPLES, EVAL_SAMPLES = 12, 4, 4, 2
STEPS = PROMPTS // BATCH
EVALUATED = [0, 1, 2, 3]
"""Before training, as the callback asks for, at the interval, and at the end."""
ADAPTERS = {
    "trainer.arctic_rl.processor_modules": "[custom_loss]",
    "trainer.arctic_rl.loss_fn": "truncated_reinforce",
    "trainer.arctic_rl.loss_config.max_weight": 0.5,
    "trainer.arctic_rl.logits_optimization": "compute",
    "trainer.algorithm.use_kl_loss": True,
    "trainer.policy.model.lora.rank": 4,
    "trainer.policy.optimizer_config.lr": 1e-2,
    "trainer.hf_save_interval": STEPS,
    "generator.sampling_params.additional_kwargs.seed": 7,
}
MODULES = Path(__file__).parent / "modules"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The module is a file in a folder that is not the run's, and imports another one beside it."""
    tmp_path = tmp_path_factory.mktemp("watched")
    write_inputs(tmp_path, prompts=PROMPTS)
    elsewhere = tmp_path / "else where"
    shutil.copytree(MODULES, elsewhere)
    shutil.copy(Path(__file__).parents[2] / "examples" / "custom_loss.py", tmp_path)
    profiler = "trainer.policy.torch_profiler_config"
    changes = {
        "trainer.algorithm.penalty": 0.02,
        "trainer.algorithm.free_tokens": 2,
        "trainer.placement.colocate_all": False,
        "trainer.placement.colocate_policy_ref": False,
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": BATCH,
        "trainer.eval_before_train": True,
        "trainer.eval_interval": 2,
        "trainer.eval_batch_size": 5,
        "generator.eval_n_samples_per_prompt": EVAL_SAMPLES,
        "generator.eval_sampling_params.temperature": 1.0,
        "generator.eval_sampling_params.max_generate_length": 8,
        "trainer.dump_data_batch": True,
        "trainer.dump_eval_results": True,
        "trainer.logger": "wandb",
        "trainer.project_name": "watched",
        "trainer.run_name": "once",
        "trainer.tags": "[one,two]",
        "trainer.num_logger_eval_samples": 3,
        "trainer.num_logger_train_samples": 2,
        "trainer.policy.record_memory": True,
        f"{profiler}.enable": True,
        f"{profiler}.save_path": f"{tmp_path}/traces",
        f"{profiler}.skip_first": 0,
        f"{profiler}.wait": 1,
        f"{profiler}.warmup": 0,
        f"{profiler}.active": 1,
        f"{profiler}.repeat": 1,
        **ADAPTERS,
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_API_KEY": "none"}
    module = f"{elsewhere}/penalty.py"
    command = [sys.executable, "-m", "integrations.arctic_rl.launch", module, *settings(tmp_path, changes)]
    with open(tmp_path / "output.log", "w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_steps(tmp_path, process, 1)
        processes = run_processes(process)
        process.wait(timeout=400)
    finally:
        process.kill()
    output = (tmp_path / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]
    assert left_over(processes) == []
    return SimpleNamespace(folder=tmp_path, output=output, logs=read_lines(tmp_path / "logs" / "metrics.jsonl"))


def test_everything_that_looks_at_a_run(run):
    tmp_path, output, logs = run.folder, run.output, run.logs
    assert "trainer.policy.record_memory" in output, "it has no effect here, and that is said"

    check_events(read_lines(tmp_path / "logs" / "events.jsonl"), tmp_path)
    check_evaluations(logs, tmp_path)
    check_wandb(logs, tmp_path)
    assert "main ends after the run" in output
    for line in logs[1:]:
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
        assert line["policy/grad_norm"] > 0
        assert 0 < line["penalty/lost"] <= 0.02 * 14
        rest = line["penalty/rewards_before"] - line["penalty/lost"]
        assert line["reward/avg_raw_reward"] == pytest.approx(rest, abs=1e-6)
        assert line["timing/sync_weights_only_transfer"] > 0, "of get_timing_metrics"
    for step in range(1, STEPS + 1):
        (path,) = (tmp_path / "exports").rglob(f"global_step_{step}_training_input*")
        assert len(pickle.loads(path.read_bytes())["sequences"]) == BATCH * SAMPLES
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "rank0_w0.pt.trace.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names, "the second step, backward pass and update included"


def test_adapters_under_a_loss_of_the_users_own(run):
    logs = run.logs[1:]
    for line in logs:
        assert line["policy/loss_metrics/weight"] == pytest.approx(0.5, abs=1e-3), "the ratio is near 1, cut at 0.5"
        assert line["policy/grad_norm"] > 0
        assert line["policy/final_loss"] == pytest.approx(
            line["policy/policy_loss"] + 0.001 * line["policy/policy_kl"], abs=1e-6
        )
        assert "policy/loss_metrics/clip_ratio" not in line, "the recipe's own policy loss ran"
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5, "the engine has the adapters too"
    assert logs[0]["policy/policy_kl"] < logs[1]["policy/policy_kl"]
    assert logs[-1]["policy/policy_kl"] > 1e-3
    workers = {path.stem for path in (run.folder / "logs" / "workers").glob("*.log")}
    assert workers == {"policy-0", "sampling-0"}, "the base model is the reference, without a worker of its own"
    (listing,) = (run.folder / "checkpoints" / "global_step_1" / "policy").glob("rank-*.json")
    assert all(".lora_" in piece["name"] for piece in json.loads(listing.read_text())["pieces"])
    exported = run.folder / "exports" / f"global_step_{STEPS}" / "policy"
    assert {"model.safetensors", "lora_adapter", "tokenizer.json"} <= {path.name for path in exported.iterdir()}


def check_events(events, folder):
    order = []
    for step in range(1, STEPS + 1):
        order += [("step_start", step), ("step_end", step)]
        order += [("save", step)] if step == 1 else []
        order += [("eval_start", step), ("eval_end", step)] if step in EVALUATED else []
        order += [("log", step)]
    order = [("eval_start", 0), ("eval_end", 0), ("log", 0), *order]
    seen = [(event["event"], event["step"]) for event in events]
    inside = [event for event in seen if event[0] not in ("train_start", "train_end", "epoch_start", "epoch_end")]
    assert inside == order
    assert [seen[0][0], seen[-1][0]] == ["train_start", "train_end"]
    assert [name for name, _ in seen if name.startswith("epoch")] == ["epoch_start", "epoch_end"]
    assert events[0]["total_steps"] == STEPS
    assert [event["rows"] for event in events if event["event"] == "step_end"] == [BATCH * SAMPLES] * STEPS
    (saved,) = [event["path"] for event in events if event["event"] == "save"]
    assert saved == f"{folder}/checkpoints/global_step_1"
    assert (folder / "checkpoints" / "latest_ckpt_global_step.txt").read_text() == "1"


def check_evaluations(logs, folder):
    """The logged scores are those of the dumped rows, two of each prompt."""
    assert [line["global_step"] for line in logs] == list(range(STEPS + 1))
    for line, step in zip(logs, EVALUATED, strict=True):
        dumped = folder / "exports" / "dumped_evals" / f"global_step_{step}_evals" / "letters.jsonl"
        rows = read_lines(dumped)
        assert len(rows) == PROMPTS * EVAL_SAMPLES
        scores = [sum(row["score"]) if isinstance(row["score"], list) else row["score"] for row in rows]
        assert line["eval/all/avg_score"] == pytest.approx(sum(scores) / len(scores))
        best = {}
        for row, score in zip(rows, scores, strict=True):
            best[row["input_prompt"]] = max(score, best.get(row["input_prompt"], 0.0))
        assert len(best) == PROMPTS
        share = sum(score > 0 for score in best.values()) / PROMPTS
        assert line[f"eval/all/pass_at_{EVAL_SAMPLES}"] == pytest.approx(share)
        assert line["own/twice_the_step"] == 2.0 * step


def check_wandb(logs, folder):
    """wandb has what metrics.jsonl has, and the tables of samples."""
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    about, rows = read_run(path)
    assert about == {"project": "watched", "name": "once", "tags": ["one", "two"]}
    logged = {}
    for row in rows:
        logged.setdefault(int(row["_step"]), {}).update(row)
    for line in logs:
        row = logged[line["global_step"]]
        for name in ("eval/all/avg_score", "own/twice_the_step", "policy/final_loss", "reward/avg_raw_reward"):
            assert (name in row) == (name in line)
            assert name not in line or float(row[name]) == pytest.approx(line[name])
    tables = {}
    for file in sorted((path.parent / "files" / "media" / "table" / "trajectories").glob("*.table.json")):
        tables.setdefault(file.name.split("_")[0], []).append(json.loads(file.read_text()))
    assert {name: len(files) for name, files in tables.items()} == {"train": STEPS, "eval": len(EVALUATED)}
    for name, samples, times in (("train", 2, STEPS), ("eval", 3, len(EVALUATED))):
        table = max(tables[name], key=lambda table: len(table["data"]))
        assert len(table["data"]) == samples * times
        text = table["columns"].index("trajectory")
        assert all("HOW MANY LETTERS" in row[text] for row in table["data"]), "the recipe's own logger"
