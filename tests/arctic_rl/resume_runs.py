"""Small whole runs of SkyRL's trainer that can be stopped and taken up again."""

import asyncio
import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.compose import apply_mixin
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.trainer import ArcticTrainerMixin

PAD_ID = 0
ROWS, BATCH, SAMPLES, MINI_BATCH, EPOCHS = 8, 4, 2, 2, 3
STEPS = ROWS // BATCH * EPOCHS


class Prompts(list):
    """Data set of prompts of token ids."""

    def collate_fn(self, items):
        return list(items)


def prompts(count: int = ROWS) -> Prompts:
    return Prompts(
        {"prompt": [3 + row, 5, 7 + row % 3], "env_class": None, "env_extras": {}, "uid": str(row)}
        for row in range(count)
    )


class Rollouts:
    """Random responses of each batch, kept in a recording that another run is given.

    A run that asks for other prompts than the recording has at a batch fails.

    Args:
        recording: rollouts by the number of the batch and its uids; filled.
        flat: numbers of batches of whose prompts only the first earns different rewards for its samples.
    """

    def __init__(self, recording: dict[Any, Any], flat: tuple[int, ...] = ()) -> None:
        self.recording = recording
        self.seen: list[list[str]] = []
        self._flat = flat

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        uids = [item.instance_id for item in input_batch["trajectory_ids"]]
        step = input_batch["batch_metadata"].global_step
        self.seen.append(uids[::SAMPLES])
        key = (step, *uids)
        if key not in self.recording:
            assert not any(old[0] == step and len(old) == len(key) for old in self.recording) or self._flat, (
                f"step {step} was given other prompts"
            )
            self.recording[key] = self._draw(input_batch["prompts"], len(self.recording))
        return copy.deepcopy(self.recording[key])

    def _draw(self, prompt_rows: list[list[int]], number: int) -> dict[str, Any]:
        draw = np.random.default_rng([7, number])
        rows = len(prompt_rows)
        lengths = draw.integers(1, 7, rows)
        rewards = draw.choice([0.0, 0.1, 0.5, 1.0], rows).tolist()
        if number in self._flat:
            rewards = [float(row) if row < SAMPLES else 0.5 for row in range(rows)]
        return {
            "prompt_token_ids": [list(prompt) for prompt in prompt_rows],
            "response_ids": [draw.integers(1, 128, length).tolist() for length in lengths],
            "rewards": rewards,
            "loss_masks": [(draw.random(length) < 0.8).astype(int).tolist() for length in lengths],
            "stop_reasons": ["stop"] * rows,
            "rollout_logprobs": [(-4 - draw.random(length)).tolist() for length in lengths],
            "rollout_metrics": None,
        }


WALL_CLOCK = ("timing/", "trainer/tokens_per_second_per_gpu")
"""Metrics that depend on how fast a run is."""


class Client:
    weight_version = 0

    def increment_weight_version(self):
        self.weight_version += 1

    async def sleep(self): ...


class Tracker:
    def __init__(self):
        self.logs = {}

    def log(self, payload, step, commit=False):
        self.logs[step] = {key: value for key, value in payload.items() if not key.startswith(WALL_CLOCK)}

    def finish(self): ...


class Tokenizer:
    pad_token_id = PAD_ID

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "tokenizer.json").write_text("{}")


def config(folder: Path, *settings: str) -> Any:
    """A run that saves a checkpoint after each step below ``folder``."""
    values = {
        "trainer.logger": "console",
        "trainer.log_path": folder / "logs",
        "trainer.export_path": folder / "exports",
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.epochs": EPOCHS,
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": MINI_BATCH,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 3,
        "trainer.resume_mode": "null",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": 1,
        "trainer.print_example_interval": -1,
        "trainer.enable_ray_gpu_monitor": False,
        "trainer.algorithm.use_kl_loss": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.n_samples_per_prompt": SAMPLES,
    }
    return parse_config([*(f"{key}={value}" for key, value in values.items()), *settings])


def resuming(path: Path) -> tuple[str, str]:
    return "trainer.resume_mode=from_path", f"trainer.resume_path={path}"


def run(
    cfg: Any,
    backend: Any,
    loop: Any,
    rollouts: Rollouts,
    *,
    trainer_class: type = RayPPOTrainer,
    dataset: Any = None,
    callbacks: Any = None,
    tokenizer: Any = None,
    tracker: Any = None,
) -> Any:
    """Train to the end; what was logged by step, the trainer, and the lines of each optimizer step."""
    tracker = tracker or Tracker()
    trainer = trainer_class(
        cfg=cfg,
        tracker=tracker,
        tokenizer=tokenizer or Tokenizer(),
        train_dataset=prompts() if dataset is None else dataset,
        inference_engine_client=Client(),
        generator=rollouts,
        callbacks=callbacks,
    )
    trainer = apply_mixin(ArcticTrainerMixin, trainer)
    trainer.attach_backend(backend, loop)
    trainer.build_models(None, None, None)
    asyncio.run(trainer.train())
    log = Path(cfg.trainer.log_path) / "optimizer_steps.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return SimpleNamespace(logs=vars(tracker).get("logs"), trainer=trainer, lines=lines)
