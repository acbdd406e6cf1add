"""Files, model folders and leftovers of earlier runs that a recipe names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .checkpoint import STEP_PREFIX, as_swept, latest, read_manifest
from .checkpoint_kind import kind_problems
from .devices import device_here
from .errors import CheckpointError, ConfigError
from .prompt_dataset import check_data_files
from .recipe_checks import tokens_of_a_rollout

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TRACKER_PACKAGES = ("wandb", "mlflow", "swanlab", "tensorboard")
"""SkyRL's trackers that are a package of the same name."""


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


def environment_problems(cfg: Any) -> Iterator[str]:
    """The folder of databases of SkyRL-gym's ``text2sql`` where it is not here: each rollout would fail on it."""
    path = cfg.environment.skyrl_gym.text2sql.db_path
    if cfg.environment.env_class == "text2sql" and not Path(path).is_dir():
        yield (
            f"environment.skyrl_gym.text2sql.db_path={path}: there is no such folder, where environment.env_class="
            "text2sql reads its databases; write the folder that holds SynSQL-2.5M, spider or bird"
        )


def tracker_problems(cfg: Any) -> Iterator[str]:
    """The tracker's package where it is not installed: SkyRL imports it once the workers are being brought up."""
    name = cfg.trainer.logger
    if name in TRACKER_PACKAGES and find_spec(name) is None:
        yield f"trainer.logger={name}: its package is not installed; install it, or write trainer.logger=console"


def package_problems(cfg: Any) -> Iterator[str]:
    """The package of ``arctic-platform`` where that backend is asked for and it is another release, or not here."""
    if cfg.trainer.arctic_rl.backend != "arctic-platform":
        return
    from .backends.arctic_platform.jobs import check_package

    try:
        check_package()
    except ConfigError as error:
        yield str(error)


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
        config |= _changes(cfg, setting.split(".")[1])
        yield from _context_problems(setting, config, cfg)
        yield from _attention_problems(setting, config, cfg)
        yield from _head_problems(setting, config, cfg)
    yield from _unknown_values(cfg)


def _changes(cfg: Any, role: str) -> dict[str, Any]:
    """Values that the recipe puts in place of those of a model's ``config.json``."""
    return {} if cfg.trainer.strategy == "megatron" else vars(cfg.trainer)[role].model_config_kwargs


def _unknown_values(cfg: Any) -> Iterator[str]:
    from transformers import AutoConfig

    from .server.model_config import unknown_names

    for role in _roles(cfg):
        path, changes = vars(cfg.trainer)[role].model.path, _changes(cfg, role)
        if not changes or path is None or not (Path(path).expanduser() / "config.json").is_file():
            continue
        try:
            config = AutoConfig.from_pretrained(str(Path(path).expanduser()), trust_remote_code=True)
        except (OSError, ValueError) as error:
            yield f"trainer.{role}.model.path={path}: its config cannot be loaded ({' '.join(str(error).split())})"
            continue
        for name in unknown_names(config, changes):
            yield (
                f"trainer.{role}.model_config_kwargs.{name}={changes[name]}: the config of {path} "
                f"({type(config).__name__}) has no such value; leave it out"
            )


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


def _attention_problems(setting: str, config: dict[str, Any], cfg: Any) -> Iterator[str]:
    text = config.get("text_config", config)
    window, needed = text.get("sliding_window"), tokens_of_a_rollout(cfg)
    windowed = isinstance(window, int) and text.get("use_sliding_window", True) and needed > window
    if windowed and cfg.trainer.arctic_rl.use_zorro is False:
        yield (
            f"trainer.arctic_rl.use_zorro=false: {setting} has a sliding window of {window} tokens, which CPUs then "
            f"compute no longer rows with, and trainer.max_prompt_length and max_generate_length are {needed} "
            "together; leave it out, or lower these"
        )
    dropout = text.get("attention_dropout")
    if dropout and setting.startswith("trainer.policy."):
        yield f"{setting}: attention_dropout={dropout} in its config.json is not done on CPUs; write 0.0 there"


def _head_problems(setting: str, config: dict[str, Any], cfg: Any) -> Iterator[str]:
    heads = config.get("text_config", config).get("num_attention_heads")
    size = cfg.generator.inference_engine.tensor_parallel_size
    on_gpus = setting.startswith("trainer.policy.") and device_here(cfg) == "cuda"
    if on_gpus and isinstance(heads, int) and size > 0 and heads % size:
        yield (
            f"generator.inference_engine.tensor_parallel_size={size}: the {heads} attention heads of {setting} are "
            "dealt out evenly; write a number that divides them"
        )


def _models(cfg: Any) -> list[tuple[str, str]]:
    """``(setting=path, path)`` of every model that the recipe loads, once where both are the same."""
    paths = {role: vars(cfg.trainer)[role].model.path for role in _roles(cfg)}
    distinct = {path: role for role, path in reversed(paths.items()) if path is not None}
    return [(f"trainer.{role}.model.path={path}", path) for path, role in reversed(distinct.items())]


def _roles(cfg: Any) -> list[str]:
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    uses_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    return ["policy", *(["ref"] if uses_reference else []), *(["critic"] if trainer.critic.model.path else [])]


def checkpoint_problems(cfg: Any) -> Iterator[str]:
    """Folders that cannot be written, and a checkpoint to go on from that is missing or not whole, a line each."""
    trainer = cfg.trainer
    written = {"export_path": True, "ckpt_path": trainer.ckpt_interval > 0, "log_path": True}
    folders = {f"trainer.{name}": vars(trainer)[name] for name, used in written.items() if used}
    profiler = trainer.policy.torch_profiler_config
    if profiler.enable and profiler.save_path:
        folders["trainer.policy.torch_profiler_config.save_path"] = profiler.save_path
    for setting, folder in folders.items():
        problem = _folder_problem(_local(folder))
        if problem is not None:
            yield f"{setting}={folder}: {problem}"
    try:
        if trainer.resume_mode == "latest":
            setting = f"trainer.resume_mode=latest, ckpt_path={trainer.ckpt_path}"
            folder = latest(_local(trainer.ckpt_path))
        elif trainer.resume_mode == "from_path" and trainer.resume_path:
            setting, folder = f"trainer.resume_path={trainer.resume_path}", _local(trainer.resume_path)
        else:
            return
        if folder is not None:
            if not folder.name.startswith(STEP_PREFIX):
                yield f"{setting}: SkyRL wants a folder whose name begins with {STEP_PREFIX}"
            yield from (f"{setting}: {line}" for line in kind_problems(folder, read_manifest(as_swept(folder)), cfg))
    except CheckpointError as error:
        yield f"{setting}: {' '.join(str(error).split())}"


def _local(path: str) -> Path:
    return Path(path).expanduser()


def _folder_problem(folder: Path) -> str | None:
    """Why nothing can be written below a folder, which need not be there yet."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        return f"{at} is not a folder"
    return None if os.access(at, os.W_OK | os.X_OK) else f"no permission to write to {at}"
