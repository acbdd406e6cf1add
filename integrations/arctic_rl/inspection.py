"""Everything that can be said of a parsed recipe before anything is started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .adapter_checks import adapter_problems
from .checks import setting_problems
from .preflight import (
    checkpoint_problems,
    data_problems,
    environment_problems,
    model_kind_problems,
    model_problems,
    package_problems,
    tracker_problems,
)
from .recipe_checks import gpu_placement_problems, import_recipe_modules, recipe_problems, worker_count_problems
from .skyrl_checks import skyrl_problems
from .support import refusals, without_effect
from .type_checks import type_problems, without_mistyped
from .uv_run import uv_run_problems


@dataclass(frozen=True)
class Findings:
    """Lines about one recipe, each naming its setting."""

    refused: list[str]
    """What stands against the run on any machine: features that are not there, values that cannot work, and the
    first of SkyRL's own checks that fails."""
    missing: list[str]
    """What this machine lacks for it: files, folders, keys, and room for its processes."""
    ignored: list[str]
    """Settings that change nothing, a line for each reason."""


def inspect_config(cfg: Any, unknown: Sequence[str] = ()) -> Findings:
    """Check a parsed config; SkyRL's own ``validate_cfg`` is run on it, which rewrites some settings.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl``.
        unknown: lines about settings that its parser refused; not repeated where a check names the setting too.
    """
    mistyped = type_problems(cfg)
    cfg = without_mistyped(cfg)
    imports = import_recipe_modules(cfg)
    refused = [*mistyped, *imports, *refusals(cfg), *recipe_problems(cfg)]
    named = _settings_of(refused)
    refused += [line for line in setting_problems(cfg) if setting_of(line) not in named]
    refused += model_kind_problems(cfg)
    refused += gpu_placement_problems(cfg)
    named = _settings_of(refused)
    refused += [line for line in adapter_problems(cfg) if setting_of(line) not in named]
    named = _settings_of(refused)
    refused = [*(line for line in unknown if setting_of(line) not in named), *refused]
    ignored = without_effect(cfg, refused=_settings_of(refused))
    files = [*data_problems(cfg), *model_problems(cfg), *environment_problems(cfg), *checkpoint_problems(cfg)]
    packages = [*tracker_problems(cfg), *package_problems(cfg)]
    missing = [*files, *_key_problems(cfg), *packages, *worker_count_problems(cfg), *uv_run_problems()]
    return Findings(_distinct([*refused, *skyrl_problems(cfg)]), missing, ignored)


def _key_problems(cfg: Any) -> Iterator[str]:
    if cfg.trainer.logger == "wandb" and not os.environ.get("WANDB_API_KEY"):
        yield (
            "trainer.logger=wandb: the environment variable WANDB_API_KEY is not set; export it (any value will do "
            "with WANDB_MODE=offline), or write trainer.logger=console"
        )


def setting_of(line: str) -> str:
    """The setting that a line is about."""
    return re.split("[=:]", line, maxsplit=1)[0]


def _settings_of(lines: Iterable[str]) -> set[str]:
    return {setting_of(line) for line in lines}


def _distinct(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(lines))
