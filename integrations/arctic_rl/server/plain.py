"""Specs as plain values and back, for servers that are told what to run in JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from ..config import nearest
from ..errors import ConfigError
from ..value_types import describe, matches
from .sampling_spec import SamplingSpec
from .specs import LoraSpec, OptimizerSpec, ServerConfig, TrainingSpec

_NESTED = {
    (ServerConfig, "policy"): TrainingSpec,
    (ServerConfig, "critic"): TrainingSpec,
    (ServerConfig, "reference"): TrainingSpec,
    (ServerConfig, "sampling"): SamplingSpec,
    (TrainingSpec, "optimizer"): OptimizerSpec,
    (TrainingSpec, "lora"): LoraSpec,
}


def to_plain(config: ServerConfig) -> dict[str, Any]:
    """The config in JSON types.

    Raises:
        ConfigError: it holds a function, which only a Ray worker can be sent.
    """
    if config.policy.policy_loss is not None:
        raise ConfigError(
            "a policy loss that the recipe registered with SkyRL is code and is not sent to a server over HTTP: "
            "register it there with trainer.arctic_rl.processor_modules and name it in trainer.arctic_rl.loss_fn, or "
            "leave trainer.arctic_rl.comm_protocol=ray"
        )
    return _lists(dataclasses.asdict(config))


def from_plain(kind: type, values: Any, where: str = "config") -> Any:
    """A spec from plain values.

    Args:
        kind: ``ServerConfig`` or one of its parts.
        values: a mapping of its fields; those with defaults may be left out.
        where: how errors name the mapping.

    Raises:
        ConfigError: a line for each field that is unknown, missing or of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping of {kind.__name__}'s fields")
    hints, fields = typing.get_type_hints(kind), {item.name: item for item in dataclasses.fields(kind)}
    problems = [f"{where}.{name} is unknown: {nearest(str(name), fields)}" for name in values if name not in fields]
    arguments = {}
    for name, item in fields.items():
        if name not in values:
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                problems.append(f"{where}.{name} is missing")
            continue
        value, part = values[name], _NESTED.get((kind, name))
        optional = name in ("critic", "reference", "lora") and value is None
        try:
            arguments[name] = value if part is None or optional else from_plain(part, value, f"{where}.{name}")
        except ConfigError as error:
            problems.append(str(error))
            continue
        if part is None and not _fits(value, hints[name]):
            problems.append(f"{where}.{name}={value!r} is not {_describe(hints[name])}")
        elif part is None:
            arguments[name] = tuple(value) if isinstance(value, list) and _takes_tuple(hints[name]) else value
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _takes_tuple(hint: Any) -> bool:
    return any(get_origin(option) is tuple for option in (hint, *get_args(hint)))


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is types.UnionType and _takes_tuple(hint):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if not isinstance(value, list | tuple):
            return False
        if items[-1] is Ellipsis:
            return all(matches(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(matches, value, items))
    if hint == bytes | None:
        return value is None
    if hint == dict[str, str]:
        return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return matches(value, hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return "a list of " + describe(get_args(hint)[0])
    if hint == bytes | None:
        return "null"
    simple = get_origin(hint) in (None, list, dict, Literal, types.UnionType, typing.Union)
    return describe(hint) if simple else str(hint)
