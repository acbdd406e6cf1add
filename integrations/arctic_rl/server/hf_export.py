"""A trained model as a Hugging Face model folder, from any ZeRO stage."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError

_GENERATION = "generation_config.json"


def export_model(
    engine: Any,
    zero_stage: int,
    model_path: str,
    directory: str | os.PathLike,
    *,
    rank: int,
    model_config: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write weights and config to ``directory``, which is made; of a model that generates also its generation config
    and its own code, if any.

    Every rank must call it; rank 0 holds the whole model in memory and writes. The weights are those that the model
    computes with, in their dtype: in a bfloat16 run those that training used and the engines were given, not the
    optimizer's float32 ones. Tied weights are written once, under names of the Hugging Face hub. Adapters are merged
    into the weights; those of a language model also stand in a folder of their own (``lora.EXPORT_FOLDER``), which
    ``peft`` loads.

    Args:
        engine: a DeepSpeed engine around a ``transformers`` model.
        zero_stage: 0 to 3.
        model_path: folder or hub name that the model was loaded from; its config is written, with the new dtype.
        directory: the folder.
        rank: this rank.
        model_config: see ``TrainingSpec``; written into the config.

    Raises:
        CheckpointError: the folder could not be written, with the system's reason.
    """
    from .engine import full_adapters, full_parameters

    weights, dtype = {}, next(engine.module.parameters()).dtype
    for name, value in full_parameters(engine, zero_stage):
        if rank == 0:
            weights[name] = value.to("cpu", dtype, copy=True)
    adapters = full_adapters(engine, zero_stage)
    if rank == 0:
        _write(engine.module, weights, adapters, model_path, model_config, Path(directory))


def _files_of(model_path: str) -> list[Path]:
    """The base model's generation config and code, which are taken over as they are."""
    from transformers.utils import cached_file

    generation = cached_file(model_path, _GENERATION, _raise_exceptions_for_missing_entries=False)
    return [*([] if generation is None else [Path(generation)]), *Path(model_path).glob("*.py")]


@contextlib.contextmanager
def _own_generation_config_aside(model: Any) -> Iterator[None]:
    """Many a model's own generation config is one that transformers loads and refuses to write."""
    from transformers import GenerationConfig

    if not model.can_generate():
        yield
        return
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _write(
    model: Any,
    weights: dict[str, Any],
    adapters: dict[str, Any],
    model_path: str,
    model_config: Mapping[str, Any],
    folder: Path,
) -> None:
    from safetensors import SafetensorError

    from .checkpoint import persistent_buffers, sync_file
    from .lora import EXPORT_FOLDER, write_adapters
    from .model_config import load_model_config

    config = load_model_config(model_path, model_config)
    config.dtype = next(iter(weights.values())).dtype
    config.architectures = [type(model).__name__]
    state = weights | {name: value.cpu() for name, value in persistent_buffers(model).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _own_generation_config_aside(model):
            model.save_pretrained(folder, state_dict=state)
        config.save_pretrained(folder)
        (folder / _GENERATION).unlink(missing_ok=True)
        for file in _files_of(model_path) if model.can_generate() else ():
            shutil.copy(file, folder)
        if adapters:
            write_adapters(model, adapters, model_path, folder / EXPORT_FOLDER)
        for file in folder.rglob("*"):
            sync_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model could not be written to {folder}: {error}; make room there, or give the run another "
            "trainer.export_path"
        ) from error
