"""The quickstart's job: make data and model once, train through the override, report.

``python -m examples.quickstart --cache_dir C --run_dir R [--seed S] -- [SkyRL overrides ...]``
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.report import summarize, table

VALIDATION = "validation"
HELD_OUT = "validation_heldout_db"

SETTINGS = {
    "environment.env_class": "bird",
    "trainer.placement.colocate_all": "true",
    "trainer.placement.policy_num_gpus_per_node": "1",
    "generator.inference_engine.num_engines": "1",
    "trainer.epochs": "20",
    "trainer.max_training_steps": "30",
    "trainer.train_batch_size": "16",
    "trainer.policy_mini_batch_size": "8",
    "trainer.micro_forward_batch_size_per_gpu": "32",
    "trainer.micro_train_batch_size_per_gpu": "32",
    "trainer.gradient_checkpointing": "false",
    "trainer.max_prompt_length": "256",
    "trainer.eval_batch_size": "1024",
    "trainer.eval_interval": "30",
    "trainer.eval_before_train": "true",
    "trainer.ckpt_interval": "1000",
    "trainer.resume_mode": "null",
    "trainer.bf16": "false",
    "trainer.logger": "console",
    "trainer.print_example_interval": "10",
    "trainer.algorithm.advantage_estimator": "grpo",
    "trainer.algorithm.use_kl_loss": "false",
    "trainer.policy.optimizer_config.lr": "3.0e-4",
    "generator.inference_engine.model_dtype": "float32",
    "generator.n_samples_per_prompt": "8",
    "generator.sampling_params.temperature": "1.0",
    "generator.sampling_params.max_generate_length": "96",
    "generator.inference_engine.enable_ray_prometheus_stats": "false",
    "trainer.enable_ray_gpu_monitor": "false",
}


def make_inputs(cache_dir: Path, seed: int) -> tuple[Path, Path]:
    """Data and starting model of a seed, made unless they are there already.

    Returns:
        The data folder and the model folder.
    """
    data, model = make_data(cache_dir, seed), cache_dir / f"model-{seed}"
    _make(model, ["examples.make_model", "--data_dir", str(data), "--output_dir", str(model), "--seed", str(seed)])
    return data, model


def make_data(cache_dir: Path, seed: int, env_class: str = "bird") -> Path:
    """The folder of a seed's data whose rows name ``env_class``, made unless it is there already."""
    data = cache_dir / (f"data-{seed}" if env_class == "bird" else f"data-{seed}-{env_class}")
    command = ["examples.make_data", "--output_dir", str(data), "--seed", str(seed), "--env_class", env_class]
    _make(data, command)
    return data


def _make(target: Path, command: list[str]) -> None:
    done = target / ".complete"
    if done.exists():
        print(f"== found {target}", flush=True)
        return
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", *command], check=True)
    done.touch()


def recipe(data: Path, model: Path, run_dir: Path, seed: int) -> list[str]:
    """The quickstart's SkyRL overrides."""
    settings = {
        **SETTINGS,
        "data.train_data": f"['{data}/train.parquet']",
        "data.val_data": f"['{data}/{VALIDATION}.parquet','{data}/{HELD_OUT}.parquet']",
        "trainer.policy.model.path": str(model),
        "trainer.seed": str(seed),
        "generator.sampling_params.additional_kwargs.seed": str(seed),
        "trainer.log_path": f"{run_dir}/logs",
        "trainer.ckpt_path": f"{run_dir}/checkpoints",
        "trainer.export_path": f"{run_dir}/exports",
        "trainer.run_name": run_dir.name,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def start(overrides: list[str], run_dir: Path, output: IO[str] | None = None) -> subprocess.Popen:
    """Start SkyRL's own entry module with the override appended; ``output`` takes its output, None = shown here."""
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *overrides]
    command.append("trainer.override_entrypoint=integrations.arctic_rl.entrypoint")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, env=environment, cwd=run_dir, stdout=output, stderr=output and subprocess.STDOUT)


def train(overrides: list[str], run_dir: Path) -> None:
    """Train to the end.

    Raises:
        subprocess.CalledProcessError: when the run fails.
    """
    with start(overrides, run_dir) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # ctrl-C reached it too, and it stops what it started
            raise
    if status:
        raise subprocess.CalledProcessError(status, process.args)


def run(cache_dir: Path, run_dir: Path, *, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Make the inputs, train and write ``summary.json`` into the run's folder; returns the summary."""
    start = time.time()
    run_dir = run_dir.resolve()
    data, model = make_inputs(cache_dir.resolve(), seed)
    train([*recipe(data, model, run_dir, seed), *overrides], run_dir)
    summary = summarize(run_dir, split=VALIDATION, seconds_total=time.time() - start)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache_dir", type=Path, required=True, help="where data and starting model are kept")
    parser.add_argument("--run_dir", type=Path, required=True, help="folder of this run")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, starting model and training")
    parser.add_argument("overrides", nargs="*", help="SkyRL overrides, put after the quickstart's own")
    arguments = parser.parse_args(argv)
    summary = run(arguments.cache_dir, arguments.run_dir, seed=arguments.seed, overrides=arguments.overrides)
    print(f"\n{table(summary)}\n\n{arguments.run_dir.resolve() / 'summary.json'}", flush=True)


if __name__ == "__main__":
    main()
