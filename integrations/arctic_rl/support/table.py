"""The support table, and what it says about a recipe."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from .algorithm import ALGORITHM
from .data import DATA
from .engine import ENGINE
from .entries import Entry, Honoured, NoEffect, PartOf, Refused, RefusedKeys, refusal, shown
from .generation import ENVIRONMENT, GENERATION
from .leaves import MISSING, skyrl_leaves, value_of
from .megatron import MEGATRON, REFERENCE_MEGATRON
from .models import CRITIC, POLICY, REFERENCE
from .placement import PLACEMENT
from .run_control import RUN_CONTROL

SECTIONS: dict[str, dict[str, Entry]] = {
    "Data": DATA,
    "Placement, memory and precision": PLACEMENT,
    "Policy": POLICY,
    "Policy, Megatron": MEGATRON,
    "Reference model": REFERENCE,
    "Reference model, Megatron": REFERENCE_MEGATRON,
    "Critic": CRITIC,
    "Algorithm": ALGORITHM,
    "Run, evaluation, checkpoints, logging": RUN_CONTROL,
    "Engines": ENGINE,
    "Rollouts": GENERATION,
    "Environments": ENVIRONMENT,
}
"""Every setting of SkyRL 0.4.0 by its dotted name, in sections of the README's table."""

TABLE: dict[str, Entry] = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


def refusals(cfg: Any) -> list[str]:
    """Every setting of a SkyRL config that this backend refuses, a line each.

    Args:
        cfg: a ``SkyRLTrainConfig`` as the recipe gives it: SkyRL's ``validate_cfg`` rewrites some settings.
    """
    return [line for name in TABLE for line in _refusals(name, cfg)]


def without_effect(cfg: Any, refused: Container[str] = ()) -> list[str]:
    """Settings away from SkyRL's defaults that change nothing in this recipe, a line for each reason.

    Args:
        cfg: see ``refusals``.
        refused: settings whose values are refused anyway, and that are left out.
    """
    grouped: dict[str, list[str]] = {}
    for name in TABLE:
        for setting, value, why in _without_effect(name, cfg):
            if setting not in refused:
                grouped.setdefault(why, []).append(f"{setting}={shown(value)}")
    return [f"{', '.join(settings)}: {why}" for why, settings in grouped.items()]


_FILLED_BY_SKYRL = (
    "trainer.ref.model.path",
    "generator.inference_engine.delta_weight_sync.local_checkpoint_dir",
    "generator.inference_engine.delta_weight_sync.publish_staging_dir",
)
"""What SkyRL fills from other settings where a recipe leaves it out: it is never told to have no effect."""


def is_set(name: str, cfg: Any) -> bool:
    """Whether a setting of SkyRL's is away from its defaults."""
    value, leaf = value_of(cfg, name), skyrl_leaves()[name]
    return value is not MISSING and value not in (leaf.default, leaf.bare)


def _refusals(name: str, cfg: Any) -> Iterator[str]:
    entry, value = TABLE[name], value_of(cfg, name)
    if value is MISSING:
        return
    if isinstance(entry, Honoured) and entry.limit is not None:
        if _idle(entry, cfg) is None:
            yield from entry.limit(name, value, cfg)
    elif isinstance(entry, RefusedKeys) and entry.idle(cfg) is None:
        for key in _changed_keys(name, value):
            if key not in entry.without_effect and not _ruled_elsewhere(entry, name, key, value[key], cfg):
                yield refusal(f"{name}.{key}", value[key], entry.why, entry.instead)
    elif isinstance(entry, Refused) and _asked_for(entry, name, cfg) and _idle(entry, cfg) is None:
        yield refusal(name, value, entry.why, entry.instead)


def _without_effect(name: str, cfg: Any) -> Iterator[tuple[str, Any, str]]:
    entry, value = TABLE[name], value_of(cfg, name)
    if not is_set(name, cfg) or name in _FILLED_BY_SKYRL:
        return
    match entry:
        case NoEffect(why=why):
            yield name, value, why
        case PartOf(feature=feature, why=why) if not _refusals_of(feature, cfg):
            yield name, value, why
        case RefusedKeys():
            idle = entry.idle(cfg)
            for key in _changed_keys(name, value):
                if idle is not None or key in entry.without_effect:
                    yield f"{name}.{key}", value[key], entry.why_no_effect if idle is None else idle
        case Honoured() | Refused():
            idle = _idle(entry, cfg)
            if idle is not None and not (isinstance(entry, Refused) and entry.same is not None and entry.same(value)):
                yield name, value, idle


def _refusals_of(feature: str, cfg: Any) -> list[str]:
    return list(_refusals(feature, cfg))


def _asked_for(entry: Refused, name: str, cfg: Any) -> bool:
    return is_set(name, cfg) and not (entry.same is not None and entry.same(value_of(cfg, name)))


def _idle(entry: Honoured | Refused, cfg: Any) -> str | None:
    return None if entry.idle is None else entry.idle(cfg)


def _changed_keys(name: str, value: dict[str, Any]) -> list[str]:
    default = skyrl_leaves()[name].default
    return [key for key in value if key not in default or value[key] != default[key]]


def _ruled_elsewhere(entry: RefusedKeys, name: str, key: str, value: Any, cfg: Any) -> bool:
    return key in entry.elsewhere and value_of(cfg, f"{name.rpartition('.')[0]}.{key}") == value
