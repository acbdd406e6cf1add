"""Whether a value of a config is of the type that its field is annotated with, and that type in words."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin


def matches(value: Any, hint: Any) -> bool:
    """Whether a parsed value fits an annotation; a whole number fits ``float``, true and false fit ``bool`` only."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(matches(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if origin is not None:
        return any(matches(value, option) for option in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """The annotation as a user would say it."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return "a list of " + describe(get_args(hint)[0]).removeprefix("a ") + "s"
    if dict in (hint, get_origin(hint)):
        return "a mapping of names to values"
    if get_origin(hint) is not None:
        return " or ".join(describe(option) for option in get_args(hint))
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}[hint]
