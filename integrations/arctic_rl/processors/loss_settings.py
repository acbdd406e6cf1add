"""A loss's settings from its two sources, checked, and the tensors that a loss needs of its batch."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..errors import UnsupportedError
from .registry import nearest_name

__all__ = ["check_choice", "mask_of", "required", "settings_of"]


def settings_of[T](cls: type[T], loss: str, config: Mapping[str, Any], meta: Mapping[str, Any]) -> T:
    """Both sources of settings as one checked config; a setting given twice must be the same."""
    known = {field.name: field for field in fields(cls)}
    given: dict[str, Any] = {}
    for source, values in (("config", config), ("actor_config", meta.get("actor_config") or {})):
        for name, value in values.items():
            if name not in known:
                raise UnsupportedError(
                    f"{source}.{name}={value!r}: the {loss} loss has no such setting{nearest_name(name, known)}; "
                    f"known: {', '.join(known)}"
                )
            if name in given and given[name] != value:
                raise UnsupportedError(f"{name} is {given[name]!r} in config and {value!r} in actor_config; give one")
            _check_type(f"{source}.{name}", value, known[name].type, known[name].default)
            given[name] = value
    return cls(**given)


def _check_type(name: str, value: Any, annotation: Any, default: Any) -> None:
    if value is None:
        if "None" in str(annotation):
            return
        raise UnsupportedError(f"{name}=None: give a value{'' if default is MISSING else f', such as {default!r}'}")
    wanted = str(annotation)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not math.isfinite(value):
        raise UnsupportedError(f"{name}={value!r} must be finite")
    if "dict" in wanted:
        right = isinstance(value, Mapping)
    elif "bool" in wanted:
        right = isinstance(value, bool)
    else:
        right = is_number if "float" in wanted else isinstance(value, str)
    if not right:
        raise UnsupportedError(f"{name}={value!r} must be of type {getattr(annotation, '__name__', annotation)}")


def check_choice(name: str, value: str | None, choices: tuple[str, ...], *, optional: bool = False) -> None:
    """Refuse a value that is not among the choices, with the nearest one."""
    if value not in choices and not (optional and value is None):
        raise UnsupportedError(
            f"{name}={value!r} is unknown{nearest_name(str(value), choices)}; known: {', '.join(choices)}"
        )


def mask_of(batch: Mapping[str, Any], user: str) -> torch.Tensor:
    """The effective mask [b, S] of a batch; ``user`` names the loss in the error."""
    if batch.get("loss_mask") is None:
        raise ValueError(f"the {user} loss needs 'loss_mask' or 'response_mask' in the batch")
    return batch["loss_mask"]


def required(batch: Mapping[str, Any], key: str, user: str) -> torch.Tensor:
    """A tensor that the loss ``user`` cannot do without."""
    value = batch.get(key)
    if value is None:
        raise ValueError(f"the {user} loss needs {key!r} in the batch{nearest_name(key, batch)}")
    return value
