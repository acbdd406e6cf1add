"""Values of SkyRL's settings that are not of the type that SkyRL annotates: its parser takes any."""

from __future__ import annotations

import copy
from typing import Any

from .support.entries import shown
from .support.leaves import MISSING, skyrl_leaves, value_of
from .value_types import describe, matches

_ALSO_LISTS = ("lora.target_modules", "lora.exclude_modules")
"""Annotated as one text; SkyRL's documentation allows a list."""

_ALSO_TEXT = ("data.train_data", "data.val_data")
"""Annotated as lists; SkyRL's data set takes one name as it is."""

_ALSO_NULL = ("trainer.project_name", "trainer.run_name", "trainer.algorithm.value_clip")
"""Annotated as text or a number; the trackers make up a name where there is none, as recipes with an unset variable
rely on, and SkyRL's value loss does not clip without a width."""

_IN_MAPPINGS = {("generator.inference_engine.engine_init_kwargs", "max_model_len"): int | None}
"""Keys of mappings that are counted with before whoever reads the mapping checks them."""


_COPIED = {
    "trainer.algorithm.temperature": "generator.sampling_params.temperature",
    "generator.eval_sampling_params.max_generate_length": "generator.sampling_params.max_generate_length",
    "generator.max_input_length": "trainer.max_prompt_length",
    "trainer.ref.model.path": "trainer.policy.model.path",
}
"""Settings that SkyRL fills from others where a recipe leaves them out."""


def type_problems(cfg: Any) -> list[str]:
    """Every setting whose value is of another type than its own, a line each."""
    leaves, mistyped = skyrl_leaves(), _mistyped(cfg)
    told = [name for name in mistyped if not (_COPIED.get(name) in mistyped and _is_copy(name, cfg))]
    lines = [f"{name}={shown(value_of(cfg, name))} is not {describe(leaves[name].hint)}" for name in told]
    lines += [
        f"{name}.{key}={shown(value_of(cfg, name)[key])} is not {describe(_IN_MAPPINGS[name, key])}"
        for name, key in _mistyped_keys(cfg)
    ]
    return lines + [
        f"{name}={{{key}}}: read as one name without a value; write {name}.{key.replace(':', '=', 1)}"
        for name, key in _glued_keys(cfg)
    ]


def _is_copy(name: str, cfg: Any) -> bool:
    return value_of(cfg, name) == value_of(cfg, _COPIED[name])


def _glued_keys(cfg: Any) -> list[tuple[str, str]]:
    """``{key:value}`` without a space is one key to YAML, and whoever reads the mapping sees nothing of it."""
    return [
        (name, key)
        for name in skyrl_leaves()
        if isinstance(value := value_of(cfg, name), dict)
        for key, item in value.items()
        if item is None and ":" in str(key)
    ]


def without_mistyped(cfg: Any) -> Any:
    """The config itself where every value is of its type, else a copy with SkyRL's defaults in place of the others,
    and without such keys of mappings, so that what else is wrong can be told."""
    mistyped, keys = _mistyped(cfg), [*_mistyped_keys(cfg), *_glued_keys(cfg)]
    if not mistyped and not keys:
        return cfg
    mended, leaves = copy.deepcopy(cfg), skyrl_leaves()
    for name in mistyped:
        section, _, leaf = name.rpartition(".")
        settings, value = vars(value_of(mended, section)), value_of(cfg, name)
        settings[leaf] = copy.deepcopy(leaves[name].default)
        for mapping in settings.values():
            # SkyRL copies some into a mapping beside them.
            if isinstance(mapping, dict) and leaf in mapping and mapping[leaf] == value:
                del mapping[leaf]
    for name, key in keys:
        del value_of(mended, name)[key]
    return mended


def _mistyped_keys(cfg: Any) -> list[tuple[str, str]]:
    return [
        (name, key)
        for (name, key), hint in _IN_MAPPINGS.items()
        if isinstance(value_of(cfg, name), dict) and not matches(value_of(cfg, name).get(key), hint)
    ]


def _mistyped(cfg: Any) -> list[str]:
    names = []
    for name, leaf in skyrl_leaves().items():
        value = value_of(cfg, name)
        if value is MISSING or matches(value, leaf.hint):
            continue
        if name.endswith(_ALSO_LISTS) and matches(value, list[str]):
            continue
        if name in _ALSO_TEXT and isinstance(value, str):
            continue
        if name in _ALSO_NULL and value is None:
            continue
        names.append(name)
    return names
