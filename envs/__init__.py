"""Gym environments; importing this package registers them with skyrl-gym."""

import sys
from pathlib import Path

import skyrl_gym


def register_env(env_id: str, entry_point: str) -> None:
    """Registers an environment with skyrl-gym; doing so again, under any name of the same package, has no effect.

    Args:
        env_id: What a recipe writes as `environment.env_class`, or a dataset row as `env_class`.
        entry_point: "package.module:ClassName"; write `f"{__name__}.module:ClassName"` in the package's own
            `__init__.py`, so that it holds under every name the package is imported by.

    Raises ValueError if another environment has the id.
    """
    if env_id not in skyrl_gym.registry:
        skyrl_gym.register(id=env_id, entry_point=entry_point)
        return
    present = skyrl_gym.registry[env_id].entry_point
    if _source(present) != _source(entry_point):
        raise ValueError(
            f"environment id {env_id!r} is already registered for {present!r}, so {entry_point!r} cannot have it; "
            f"import only one of the two packages, or register one under another id"
        )


def _source(entry_point: object) -> object:
    """Returns what identifies an entry point: its file and class where its package is loaded, else itself."""
    if not isinstance(entry_point, str):
        return entry_point
    module, _, name = entry_point.partition(":")
    for depth in range(module.count("."), 0, -1):
        package = ".".join(module.split(".")[:depth])
        if package in sys.modules and hasattr(sys.modules[package], "__path__"):
            below = module[len(package) + 1 :].split(".")
            folders = [Path(folder).resolve() for folder in sys.modules[package].__path__]
            return tuple(folder.joinpath(*below) for folder in folders), name
    return entry_point


for _env_id in ("bird", "bird_sql"):
    register_env(_env_id, f"{__name__}.bird.env:BirdEnv")
register_env("bird_multi_turn", f"{__name__}.bird.multi_turn:BirdMultiTurnEnv")
