"""Settings of the scoring pool and of our environments that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .config import PREFIX


def scoring_problems(cfg: Any) -> Iterator[str]:
    """A line for each of our environments whose limits do not fit into a scoring process.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl``. An environment counts if the recipe selects it, or
            changes a setting of it; a section of a recipe's own class is left alone.
    """
    from skyrl_arctic_rl.envs.bird.check_dataset import ENV_IDS
    from skyrl_arctic_rl.envs.bird.config import BirdEnvConfig, memory_problem

    limit_mb = cfg.trainer.arctic_rl.scoring_memory_limit_mb
    for env_id in sorted(ENV_IDS):
        section = vars(cfg.environment.skyrl_gym)[env_id]
        if not isinstance(section, BirdEnvConfig):
            continue
        if cfg.environment.env_class != env_id and section == type(section)():
            continue
        problem = memory_problem(section, limit_mb)
        if problem:
            setting = f"environment.skyrl_gym.{env_id}.sqlite_heap_mb"
            problem = problem.replace(f"{section.SECTION}.sqlite_heap_mb", setting)
            yield f"{problem} ({PREFIX}.scoring_memory_limit_mb)"
