"""Pickling of environments, with what skyrl-gym's ``text2sql`` keeps that Python cannot pickle."""

import io
import pickle
from typing import Any

_MADE_ANEW = ("skyrl_gym.tools.sql", "SQLCodeExecutorToolGroup")


class EnvPickler(pickle.Pickler):
    """A pickler that takes ``text2sql``'s tool group apart: its registry holds lambdas, which are made anew.

    Without it the SQL that a model wrote would run in the trainer's process. Other tool groups stay there: they wait
    for servers and subprocesses, and share connections.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        if (type(obj).__module__, type(obj).__qualname__) != _MADE_ANEW:
            return NotImplemented
        state = {name: value for name, value in vars(obj).items() if name != "_tool_registry"}
        return _tool_group, (type(obj), state)


def dumps(obj: Any) -> bytes:
    """``pickle.dumps`` with ``EnvPickler``."""
    file = io.BytesIO()
    EnvPickler(file).dump(obj)
    return file.getvalue()


def _tool_group(cls: type, state: dict[str, Any]) -> Any:
    group = object.__new__(cls)
    group.__dict__.update(state, _tool_registry={})
    group._register_tools()
    return group
