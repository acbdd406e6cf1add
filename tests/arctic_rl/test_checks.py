"""Values that cannot work: each is refused by its own name, all of them at once, and nothing else is."""

import pytest

from integrations.arctic_rl.checks import setting_problems
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.skyrl_config import parse_config

BASE = ["trainer.logger=console", "trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct"]


def parsed(overrides):
    return parse_config([*BASE, *overrides.split()])


def settings(lines):
    return [line.split("=")[0] for line in lines]


def refused(overrides):
    return inspect_config(parsed(overrides)).refused


class TestSampling:
    @pytest.mark.parametrize("section", ["sampling_params", "eval_sampling_params"])
    def test_the_way_to_a_repetition_penalty_that_is_advised_works(self, section):
        (line,) = refused(f"generator.{section}.repetition_penalty=1.1")
        advised = line.rpartition("write ")[2]
        assert advised == f"generator.{section}.additional_kwargs.repetition_penalty"
        assert refused(f"{advised}=1.1") == []

    @pytest.mark.parametrize("section", ["sampling_params", "eval_sampling_params"])
    def test_all_that_is_wrong_is_said_at_once_under_the_names_of_the_recipe(self, section):
        names = ("top_p=3", "min_p=-1", "top_k=-7", "max_generate_length=0", "additional_kwargs.presence_penalty=5")
        lines = setting_problems(parsed(" ".join(f"generator.{section}.{name}" for name in names)))
        assert set(settings(lines)) == {f"generator.{section}.{name.split('=')[0]}" for name in names}

    def test_evaluations_that_do_not_take_place_are_not_checked(self):
        bad = "generator.eval_sampling_params.temperature=5 trainer.eval_batch_size=0"
        bad += " generator.eval_n_samples_per_prompt=0"
        assert set(settings(setting_problems(parsed(bad)))) == {
            "generator.eval_sampling_params.temperature",
            "trainer.eval_batch_size",
            "generator.eval_n_samples_per_prompt",
        }
        assert setting_problems(parsed(f"{bad} trainer.eval_interval=-1")) == []

    @pytest.mark.parametrize("value", ["-1", "0", ".nan", ".inf"])
    def test_trainings_own_temperature_is_named_where_it_is_the_wrong_one(self, value):
        lines = setting_problems(parsed(f"trainer.algorithm.temperature={value}"))
        assert settings(lines) == ["trainer.algorithm.temperature"]
        lines = setting_problems(parsed(f"generator.sampling_params.temperature={value}"))
        assert settings(lines) == ["generator.sampling_params.temperature"]
