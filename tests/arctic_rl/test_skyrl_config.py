"""The settings of our environments in SkyRL's config, and its class with ours (importing SkyRL's takes a while)."""

import dataclasses
import pickle
import re

import pytest
from skyrl.train.config.config import (
    EnvironmentConfig,
    SkyRLGymConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_yaml_str,
    make_config,
)

from envs.bird.config import BirdEnvConfig
from envs.bird.multi_turn_config import BirdMultiTurnConfig
from integrations.arctic_rl.config import ArcticRLConfig
from integrations.arctic_rl.errors import ConfigError
from integrations.arctic_rl.skyrl_config import parse_config, with_arctic_settings
from integrations.arctic_rl.support import without_effect

ODD = {
    "timeout_s": 2.5,
    "sqlite_heap_mb": 64,
    "max_value_mb": 3,
    "max_compared_rows": 77,
    "comparison": "multiset",
    "float_rtol": 0.125,
    "float_atol": 0.5,
    "max_kept_rows": 66,
    "empty_gold_earns": False,
    "db_root": "/data",
}


ODD_TURNS = {
    "tool_timeout_s": 0.5,
    "tool_time_s": 7.0,
    "tool_max_rows": 3,
    "tool_max_characters": 99,
    "tool_max_cell_characters": 9,
    "explain_tool": False,
}


@dataclasses.dataclass
class RecipeGym(SkyRLGymConfig):
    bird_sql: dict = dataclasses.field(default_factory=lambda: {"timeout_s": 4.0})


@dataclasses.dataclass
class RecipeEnvironment(EnvironmentConfig):
    skyrl_gym: RecipeGym = dataclasses.field(default_factory=RecipeGym)


@dataclasses.dataclass
class RecipeConfig(SkyRLTrainConfig):
    trainer: TrainerConfig = dataclasses.field(default_factory=lambda: TrainerConfig(epochs=9))
    environment: RecipeEnvironment = dataclasses.field(default_factory=lambda: RecipeEnvironment(env_class="bird"))


def overrides(env_id):
    return [f"environment.skyrl_gym.{env_id}.{name}={value}" for name, value in ODD.items()]


def test_every_setting_of_bird_has_an_odd_value_here():
    defaults = dataclasses.asdict(BirdEnvConfig())
    assert list(ODD) == list(defaults)
    assert all(ODD[name] != default for name, default in defaults.items())


@pytest.mark.parametrize("config_class", [None, make_config()], ids=["ours", "a recipe's"])
@pytest.mark.parametrize(("env_id", "other"), [("bird", "bird_sql"), ("bird_sql", "bird")])
def test_each_setting_reaches_the_environment_it_is_written_for(config_class, env_id, other):
    gym = parse_config(overrides(env_id), config_class).environment.skyrl_gym
    assert dataclasses.asdict(vars(gym)[env_id]) == ODD
    assert BirdEnvConfig.parse(vars(gym)[env_id]) == BirdEnvConfig(**ODD)
    assert BirdEnvConfig.parse(vars(gym)[other]) == BirdEnvConfig()


def test_each_setting_of_bird_multi_turn_reaches_it():
    defaults = dataclasses.asdict(BirdMultiTurnConfig())
    assert list(ODD | ODD_TURNS) == list(defaults)
    assert all((ODD | ODD_TURNS)[name] != default for name, default in defaults.items())
    written = [f"environment.skyrl_gym.bird_multi_turn.{name}={value}" for name, value in (ODD | ODD_TURNS).items()]
    for config_class in (None, RecipeConfig):
        gym = parse_config(written, config_class).environment.skyrl_gym
        assert BirdMultiTurnConfig.parse(gym.bird_multi_turn) == BirdMultiTurnConfig(**ODD | ODD_TURNS)
        assert BirdEnvConfig.parse(gym.bird) == BirdEnvConfig()
    with pytest.raises(ConfigError, match=r"bird_multi_turn\.tool_max_rows=0 must be a whole number"):
        parse_config(["environment.skyrl_gym.bird_multi_turn.tool_max_rows=0"])
    with pytest.raises(ConfigError, match=r"did you mean 'environment\.skyrl_gym\.bird_multi_turn\.tool_max_rows'"):
        parse_config(["environment.skyrl_gym.bird_multi_turn.tool_max_row=3"])


def test_settings_are_objects_of_a_light_module():
    kind = type(parse_config([]).environment.skyrl_gym.bird)
    assert kind.__module__ == "skyrl_arctic_rl.envs.bird.config"
    assert [base.__module__ for base in kind.__mro__[1:]] == ["builtins"]


def test_the_config_with_them_is_written_out_and_crosses_a_process():
    cfg = parse_config(overrides("bird"))
    assert "comparison: multiset" in get_config_as_yaml_str(cfg)
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_an_unknown_setting_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean 'environment\.skyrl_gym\.bird\.timeout_s'"):
        parse_config(["environment.skyrl_gym.bird.timeout=3"])


@pytest.mark.parametrize(
    "bad",
    ["timeout_s=0", "timeout_s=.inf", "comparison=bag", "float_rtol=1.5", "empty_gold_earns=maybe", "db_root=3"],
)
def test_a_value_out_of_range_is_one_clear_line(bad):
    name, value = bad.split("=")
    with pytest.raises(ConfigError, match=rf"^environment\.skyrl_gym\.bird\.{name}=.*{re.escape(value[-3:])}"):
        parse_config([f"environment.skyrl_gym.bird.{bad}"])


def test_a_recipes_defaults_and_its_own_sections_hold():
    cfg = parse_config(["generator.sampling_params.temperature=0.3"], RecipeConfig)
    assert (cfg.trainer.epochs, cfg.trainer.arctic_rl) == (9, ArcticRLConfig())
    assert cfg.environment.env_class == "bird" and isinstance(cfg.environment, RecipeEnvironment)
    assert cfg.environment.skyrl_gym.bird_sql == {"timeout_s": 4.0}
    assert cfg.environment.skyrl_gym.bird == parse_config([]).environment.skyrl_gym.bird
    # Filled by SkyRL from the sampling parameters once the whole config is there.
    assert cfg.trainer.algorithm.temperature == 0.3
    again = with_arctic_settings(RecipeConfig)()
    assert again.environment.skyrl_gym is not with_arctic_settings(RecipeConfig)().environment.skyrl_gym


def test_threads_for_environments_are_said_to_have_no_effect():
    assert without_effect(parse_config([])) == []
    (line,) = without_effect(parse_config(["environment.skyrl_gym.max_env_workers=4"]))
    assert line.startswith("environment.skyrl_gym.max_env_workers=4") and "scoring_workers" in line
