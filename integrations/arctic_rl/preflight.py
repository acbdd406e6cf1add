"""Files, model folders and leftovers of earlier runs that a recipe names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .prompt_dataset import check_data_files
from .recipe_checks import tokens_of_a_rollout

LATEST_CHECKPOINT = "latest_ckpt_global_step.txt"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def data_problems(cfg: Any) -> Iterator[str]:
    """Data files that are not there or cannot be read, a line each."""
    names = ["train_data", "val_data"] if cfg.trainer.eval_interval > 0 else ["train_data"]
    for name in names:
        try:
            check_data_files(vars(cfg.data)[name], setting=f"data.{name}")
        except ConfigError as error:
            first, *others = str(error).splitlines()
            files = [line.strip() for line in others if line.startswith("  ")]
            yield from [f"data.{name}: {line}" for line in files] or [first]


def model_problems(cfg: Any) -> Iterator[str]:
    """Model folders that are not there or not whole, a line each; names on the Hugging Face hub are not looked up."""
    for setting, path in _models(cfg):
        folder = Path(path).expanduser()
        if not folder.exists():
            if path.startswith((".", "/", "~")) or path.count("/") > 1:
                yield f"{setting}: there is no such folder"
            continue
        if not (folder / "config.json").is_file():
            yield f"{setting}: the folder holds no config.json"
        if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
            yield f"{setting}: the folder holds no weights ({' or '.join(WEIGHT_PATTERNS)})"


def model_kind_problems(cfg: Any) -> Iterator[str]:
    """Model folders of a kind that is not served, or whose context is too short for the recipe, a line each."""
    for setting, path in _models(cfg):
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            yield f"{setting}: {file.name} is not JSON ({error})"
            continue
        if config.get("vision_config") is not None:
            yield f"{setting}: a multimodal model, and those are not there yet; use a text model"
        yield from _context_problems(setting, config, cfg)


def _context_problems(setting: str, config: dict[str, Any], cfg: Any) -> Iterator[str]:
    text = config.get("text_config", config)
    context, scaling = text.get("max_position_embeddings"), text.get("rope_scaling") or text.get("rope_parameters")
    scaled = isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) != "default"
    if not isinstance(context, int) or scaled:
        return
    longest = cfg.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    if isinstance(longest, int) and longest > context:
        yield (
            f"generator.inference_engine.engine_init_kwargs.max_model_len={longest}: {setting} has a context of "
            f"{context} tokens; write at most that"
        )
    needed = tokens_of_a_rollout(cfg)
    if needed > context:
        yield (
            f"{setting}: its context of {context} tokens is shorter than trainer.max_prompt_length and "
            f"max_generate_length together ({needed}); lower one of them"
        )


def _models(cfg: Any) -> list[tuple[str, str]]:
    """``(setting=path, path)`` of every model that the recipe loads, once where both are the same."""
    trainer = cfg.trainer
    uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
    paths = {role: vars(trainer)[role].model.path for role in (["policy", "ref"] if uses_reference else ["policy"])}
    distinct = {path: role for role, path in reversed(paths.items()) if path is not None}
    return [(f"trainer.{role}.model.path={path}", path) for path, role in reversed(distinct.items())]


def checkpoint_problems(cfg: Any) -> Iterator[str]:
    """A checkpoint that ``resume_mode=latest`` finds: resuming is not there yet."""
    if cfg.trainer.resume_mode != "latest":
        return
    marker = Path(cfg.trainer.ckpt_path) / LATEST_CHECKPOINT
    if marker.is_file():
        yield (
            f"trainer.resume_mode=latest finds a checkpoint at {marker.parent} (step {marker.read_text().strip()}), "
            "and resuming is not there yet: write trainer.resume_mode=null to start afresh, or change ckpt_path"
        )
