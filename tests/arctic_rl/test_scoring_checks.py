from types import SimpleNamespace

import pytest
from skyrl_arctic_rl.envs.bird.config import WORKER_BASE_MB, BirdEnvConfig
from skyrl_arctic_rl.envs.bird.sections import SECTIONS

from integrations.arctic_rl.scoring_checks import scoring_problems


def problems(limit_mb, env_class="bird", **sections):
    gym = SimpleNamespace(**{name: kind() for name, kind in SECTIONS.items()} | sections)
    trainer = SimpleNamespace(arctic_rl=SimpleNamespace(scoring_memory_limit_mb=limit_mb))
    environment = SimpleNamespace(env_class=env_class, skyrl_gym=gym)
    return list(scoring_problems(SimpleNamespace(trainer=trainer, environment=environment)))


def test_the_defaults_fit():
    assert problems(512) == []
    assert BirdEnvConfig().sqlite_heap_mb + WORKER_BASE_MB <= 512


@pytest.mark.parametrize("heap", [2000, 512, 512 - WORKER_BASE_MB + 1])
def test_a_heap_that_does_not_fit_is_refused_with_both_settings(heap):
    [line] = problems(512, bird=BirdEnvConfig(sqlite_heap_mb=heap))
    assert line.startswith(f"environment.skyrl_gym.bird.sqlite_heap_mb={heap} ")
    assert "512 MiB" in line and "trainer.arctic_rl.scoring_memory_limit_mb" in line
    assert f"write at most {512 - WORKER_BASE_MB}" in line and f"at least {heap + WORKER_BASE_MB}" in line
    assert problems(heap + WORKER_BASE_MB, bird=BirdEnvConfig(sqlite_heap_mb=heap)) == []


def test_only_environments_that_are_used_or_set_count():
    assert problems(256, env_class="my_env") == []
    assert problems(256, env_class="my_env", bird={"sqlite_heap_mb": 900}) == []
    for env_id in ("bird_sql", "bird_multi_turn"):
        [line] = problems(256, env_class=env_id)
        assert line.startswith(f"environment.skyrl_gym.{env_id}.")
    [line] = problems(256, env_class="my_env", bird=BirdEnvConfig(sqlite_heap_mb=321))
    assert line.startswith("environment.skyrl_gym.bird.")
