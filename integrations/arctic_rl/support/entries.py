"""What the support table says about one setting of SkyRL's config."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from ..reference_model import reference_is_base

Limit = Callable[[str, Any, Any], Iterable[str]]
"""(setting, value, whole config) -> lines that refuse this value."""

Idle = Callable[[Any], str | None]
"""whole config -> None, or why the setting has no effect in that recipe."""

EFFECT_TESTS = "tests/arctic_rl/test_support_effects.py::test_a_changed_value_reaches_the_backend"
"""Changes a setting and finds another value in what the backend is told; one case a setting, named after it."""


@dataclass(frozen=True)
class Honoured:
    """The setting takes effect."""

    what: str
    """What it does here."""
    evidence: tuple[str, ...]
    """Tests (``file::test``) that change it and see the effect, or SkyRL functions (``module:name``) that read it."""
    limit: Limit | None = None
    """Refuses single values."""
    idle: Idle | None = None
    """Tells recipes in which it has no effect."""


@dataclass(frozen=True)
class NoEffect:
    """The setting changes nothing here, and the result does not depend on it."""

    why: str


@dataclass(frozen=True)
class Refused:
    """A run whose recipe sets it away from its default does not start."""

    why: str
    instead: str
    same: Callable[[Any], bool] | None = None
    """Other values that mean what the default means."""
    idle: Idle | None = None
    """Tells recipes in which it has no effect, and is not refused."""


@dataclass(frozen=True)
class RefusedKeys:
    """A mapping of which some keys have no effect, and every other one is refused."""

    why: str
    """Why keys are refused."""
    instead: str
    without_effect: Container[str]
    """Keys that change nothing here."""
    why_no_effect: str
    elsewhere: Container[str]
    """Keys that SkyRL fills from settings of their own, which are refused themselves."""
    idle: Idle | None = None
    """Tells recipes in which no key has an effect."""


@dataclass(frozen=True)
class PartOf:
    """A detail of a feature that is refused as a whole; without that feature it has no effect."""

    feature: str
    """The setting that asks for the feature and is refused."""
    why: str
    """Why it has no effect without it."""


Entry = Honoured | NoEffect | Refused | RefusedKeys | PartOf


def ours(what: str, *tests: str, limit: Limit | None = None, idle: Idle | None = None) -> Honoured:
    """A setting that this package applies; without tests of its own it is a case of ``EFFECT_TESTS``."""
    return Honoured(what, tests or (EFFECT_TESTS,), limit, idle)


def skyrls(what: str, *functions: str, limit: Limit | None = None, idle: Idle | None = None) -> Honoured:
    """A setting that SkyRL's own code applies, named as ``module:function``, which runs unchanged here."""
    return Honoured(what, functions, limit, idle)


def under(prefix: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries with their names below ``prefix``."""
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}


def refusal(setting: str, value: object, why: str, instead: str) -> str:
    """One line: setting, value, reason, and what to write instead."""
    return f"{setting}={shown(value)}: {why}; {instead}"


def shown(value: object) -> str:
    """A value as a recipe writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def first_of(*idles: Idle) -> Idle:
    """The first reason that one of several conditions gives."""

    def idle(cfg: Any) -> str | None:
        return next((reason for condition in idles if (reason := condition(cfg)) is not None), None)

    return idle


def without_megatron(cfg: Any) -> str | None:
    return None if cfg.trainer.strategy == "megatron" else "read with trainer.strategy=megatron only"


def without_reference(cfg: Any) -> str | None:
    algorithm = cfg.trainer.algorithm
    uses_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    return None if uses_reference else "no KL term, so no reference model"


def without_critic(cfg: Any) -> str | None:
    return None if cfg.trainer.critic.model.path else "no critic"


def without_lora(cfg: Any) -> str | None:
    return None if cfg.trainer.policy.model.lora.rank > 0 else "trainer.policy.model.lora.rank=0"


def without_critic_lora(cfg: Any) -> str | None:
    adapted = cfg.trainer.critic.model.lora.rank > 0
    return without_critic(cfg) or (None if adapted else "trainer.critic.model.lora.rank=0")


def base_is_reference(cfg: Any) -> str | None:
    return "the policy without its adapters is the reference model" if reference_is_base(cfg.trainer) else None


def on_cpus(cfg: Any) -> str | None:
    from ..devices import device_here

    return (
        None if device_here(cfg) == "cuda" else "on CPUs (trainer.arctic_rl.device) there is nothing that it could set"
    )


def without_evaluation(cfg: Any) -> str | None:
    return None if cfg.trainer.eval_interval > 0 else "no evaluation"


def one_of(*names: str | None) -> Limit:
    """Refuses a value that is none of the names."""

    def limit(setting: str, value: Any, cfg: Any) -> Iterable[str]:
        if value not in names:
            yield refusal(setting, value, "no such choice", f"write one of {', '.join(map(shown, names))}")

    return limit
