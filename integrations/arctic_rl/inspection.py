"""Everything that can be said of a parsed recipe before anything is started."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .checks import setting_problems
from .preflight import checkpoint_problems, data_problems, model_kind_problems, model_problems, tracker_problems
from .recipe_checks import import_recipe_modules, recipe_problems, worker_count_problems
from .support import refusals, without_effect
from .support.entries import shown
from .support.leaves import skyrl_leaves, value_of
from .type_checks import type_problems, without_mistyped


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
    named = _settings_of(refused)
    refused = [*(line for line in unknown if setting_of(line) not in named), *refused]
    ignored = without_effect(cfg, refused=_settings_of(refused))
    files = [*data_problems(cfg), *model_problems(cfg), *checkpoint_problems(cfg)]
    missing = [*files, *_key_problems(cfg), *tracker_problems(cfg), *worker_count_problems(cfg)]
    return Findings(_distinct([*refused, *_skyrl_problems(cfg)]), missing, ignored)


def _key_problems(cfg: Any) -> Iterator[str]:
    if cfg.trainer.logger == "wandb" and not os.environ.get("WANDB_API_KEY"):
        yield (
            "trainer.logger=wandb: the environment variable WANDB_API_KEY is not set; export it (any value will do "
            "with WANDB_MODE=offline), or write trainer.logger=console"
        )


def _skyrl_problems(cfg: Any) -> list[str]:
    """The first of SkyRL's own checks that fails, as a line; ``validate_cfg`` also rewrites some settings."""
    from skyrl.train.utils import validate_cfg

    try:
        with _key_for_checks():
            validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError, ArithmeticError, TypeError, AttributeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())
        if not message or isinstance(error, ArithmeticError):
            failed = "cannot be computed" if message else "does not hold"
            message = f"{message}: {_failed_statement(frame, cfg, failed)}".removeprefix(": ")
        return [f"SkyRL's own check: {message} ({type(error).__name__} in {frame.name})"]
    return []


def _failed_statement(frame: traceback.FrameSummary, cfg: Any, failed: str) -> str:
    """The source of a check that does not name its settings, and their values."""
    lines = [linecache.getline(frame.filename, number) for number in range(frame.lineno, frame.end_lineno + 1)]
    source = " ".join(" ".join(lines).split()).rstrip(" ,(")
    settings = dict.fromkeys(re.findall(r"\bcfg\.([a-z_]+(?:\.[a-z_]+)+)", source))
    values = [f"{name}={shown(value_of(cfg, name))}" for name in settings if name in skyrl_leaves()]
    return f"{source} {failed}{' with ' + ' and '.join(values) if values else ''}; change one of them"


@contextlib.contextmanager
def _key_for_checks() -> Iterator[None]:
    """SkyRL's checks end at a missing key for wandb, which is told apart."""
    if os.environ.get("WANDB_API_KEY"):
        yield
        return
    os.environ["WANDB_API_KEY"] = "none"
    try:
        yield
    finally:
        del os.environ["WANDB_API_KEY"]


def setting_of(line: str) -> str:
    """The setting that a line is about."""
    return re.split("[=:]", line, maxsplit=1)[0]


def _settings_of(lines: Iterable[str]) -> set[str]:
    return {setting_of(line) for line in lines}


def _distinct(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(lines))
