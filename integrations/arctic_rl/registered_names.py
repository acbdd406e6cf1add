"""Names that a recipe's own entry module may register in its Ray task, which the driver cannot know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

STAND_INS = {
    "trainer.algorithm.policy_loss_type": "regular",
    "trainer.algorithm.advantage_estimator": "grpo",
    "environment.env_class": "gsm8k",
}
"""Such settings, and the name that is checked in place of one that nobody has registered yet."""


def unregistered(cfg: Any) -> list[str]:
    """Which settings of ``STAND_INS`` hold a name that is not registered in this process, as ``setting=name``."""
    import skyrl_gym
    from skyrl.backends.skyrl_train.utils.ppo_utils import (
        AdvantageEstimatorRegistry,
        PolicyLossRegistry,
        repopulate_all_registries,
    )

    repopulate_all_registries()
    known = {
        "trainer.algorithm.policy_loss_type": PolicyLossRegistry.list_available(),
        "trainer.algorithm.advantage_estimator": AdvantageEstimatorRegistry.list_available(),
        "environment.env_class": skyrl_gym.envs.registration.registry,
    }
    values = {setting: vars(_section(cfg, setting))[_field(setting)] for setting in known}
    return [f"{setting}={value}" for setting, value in values.items() if value not in known[setting]]


@contextlib.contextmanager
def stand_ins(cfg: Any) -> Iterator[None]:
    """Meanwhile, unregistered names in a config are those of ``STAND_INS``; the task checks the names themselves."""
    replaced = dict(line.split("=", 1) for line in unregistered(cfg))
    for setting in replaced:
        setattr(_section(cfg, setting), _field(setting), STAND_INS[setting])
    try:
        yield
    finally:
        for setting, value in replaced.items():
            setattr(_section(cfg, setting), _field(setting), value)


def _section(cfg: Any, setting: str) -> Any:
    for name in setting.split(".")[:-1]:
        cfg = vars(cfg)[name]
    return cfg


def _field(setting: str) -> str:
    return setting.rpartition(".")[2]
