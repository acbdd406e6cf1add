"""What can be known to fail before anything heavy starts; all problems at once, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .prompt_dataset import check_data_files

LATEST_CHECKPOINT = "latest_ckpt_global_step.txt"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def preflight_problems(cfg: Any) -> list[str]:
    """What is wrong with the files, model folders and leftovers that a recipe names, a line each."""
    return [*_data_problems(cfg), *_model_problems(cfg), *_checkpoint_problems(cfg)]


def _data_problems(cfg: Any) -> Iterator[str]:
    names = ["train_data", "val_data"] if cfg.trainer.eval_interval > 0 else ["train_data"]
    for name in names:
        try:
            check_data_files(vars(cfg.data)[name], setting=f"data.{name}")
        except ConfigError as error:
            yield str(error)


def _model_problems(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
    for role in ["policy", "ref"] if uses_reference else ["policy"]:
        path = vars(trainer)[role].model.path
        folder = Path(path).expanduser()
        setting = f"trainer.{role}.model.path={path}"
        if not folder.exists():
            if path.startswith((".", "/", "~")) or path.count("/") > 1:
                yield f"{setting}: there is no such folder"
            continue
        if not (folder / "config.json").is_file():
            yield f"{setting}: the folder holds no config.json"
        if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
            yield f"{setting}: the folder holds no weights ({' or '.join(WEIGHT_PATTERNS)})"


def _checkpoint_problems(cfg: Any) -> Iterator[str]:
    if cfg.trainer.resume_mode != "latest":
        return
    marker = Path(cfg.trainer.ckpt_path) / LATEST_CHECKPOINT
    if marker.is_file():
        yield (
            f"trainer.resume_mode=latest finds a checkpoint at {marker.parent} (step {marker.read_text().strip()}), "
            "and resuming is not there yet: write trainer.resume_mode=null to start afresh, or change ckpt_path"
        )
