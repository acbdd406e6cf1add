"""The leaves of a config class: what can be set, of which type, and its default."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

MISSING = dataclasses.MISSING
"""Stands for a value that is not there: a leaf of an optional section that is null, or one without a default."""


@dataclass(frozen=True)
class Leaf:
    """One setting."""

    hint: Any
    """Its annotation."""
    default: Any
    """Its value in a config of defaults; below an optional section, which is null then, as ``bare``."""
    bare: Any
    """Its value in a section of its own class's defaults, which a section has once a recipe writes to it; ``MISSING``
    where there is none."""


@functools.cache
def skyrl_leaves() -> dict[str, Leaf]:
    """Every setting of SkyRL's own config by its dotted name, in the order of the classes."""
    from skyrl.train.config.config import SkyRLTrainConfig

    return leaves(SkyRLTrainConfig)


def leaves(config_class: type) -> dict[str, Leaf]:
    """Every leaf of a nested dataclass; mappings and lists are leaves, optional sections are looked into."""
    return dict(_walk(config_class, config_class(), ""))


def value_of(cfg: Any, setting: str) -> Any:
    """A setting's value; ``MISSING`` where its section is null."""
    for name in setting.split("."):
        if cfg is None:
            return MISSING
        cfg = vars(cfg)[name]
    return cfg


def section_class(hint: Any) -> type | None:
    """The dataclass of an annotation ``Section`` or ``Section | None``; None for a leaf's."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


def _walk(section: type, instance: Any, prefix: str) -> typing.Iterator[tuple[str, Leaf]]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        value = _default(field) if instance is None else vars(instance)[field.name]
        inner = section_class(hints[field.name])
        if inner is None:
            yield prefix + field.name, Leaf(hints[field.name], value, _default(field))
        else:
            yield from _walk(inner, value, f"{prefix}{field.name}.")


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
