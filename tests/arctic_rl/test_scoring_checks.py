from types import SimpleNamespace

import pytest
from skyrl_arctic_rl.envs.bird.config import WORKER_BASE_MB, BirdEnvConfig

from integrations.arctic_rl.scoring_checks import scoring_problems


def problems(limit_mb, env_class="bird", bird=None, bird_sql=None):
    gym = SimpleNamespace(
        bird=BirdEnvConfig() if bird is None else bird, bird_sql=BirdEnvConfig() if bird_sql is None else bird_sql
    )
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
    [line] = problems(256, env_class="bird_sql")
    assert line.startswith("environment.skyrl_gym.bird_sql.")
    [line] = problems(256, env_class="my_env", bird=BirdEnvConfig(sqlite_heap_mb=321))
    assert line.startswith("environment.skyrl_gym.bird.")
