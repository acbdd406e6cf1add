"""Imports of the modules that register gym environments, in every process that makes or runs them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from .errors import ConfigError

OWN_ENV_MODULE = "skyrl_arctic_rl.envs"


def environment_modules(env_modules: Iterable[str]) -> list[str]:
    """Our environments, under the name that no folder called ``envs`` can shadow, and the recipe's own."""
    return [OWN_ENV_MODULE, *env_modules]


def register_environments(env_modules: Iterable[str]) -> None:
    """Import ``environment_modules``.

    Raises:
        ConfigError: naming the module that cannot be imported, and why.
    """
    for module in environment_modules(env_modules):
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"trainer.arctic_rl.env_modules: {module!r} cannot be imported: {error}") from error
