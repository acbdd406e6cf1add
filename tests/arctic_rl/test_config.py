import dataclasses
import pickle

import pytest

from integrations.arctic_rl.config import ArcticRLConfig, check_setting_names
from integrations.arctic_rl.errors import ConfigError


def test_defaults_are_valid_and_need_no_argument():
    assert ArcticRLConfig().backend == "builtin"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("zero_stage", 4, "one of 0, 1, 2, 3"),
        ("zero_stage", "2", "one of 0, 1, 2, 3"),
        ("zero_stage", True, "one of 0, 1, 2, 3"),
        ("max_cpu_workers", 1, "between 2 and 64"),
        ("max_cpu_workers", 3.5, "a whole number"),
        ("cpu_threads", 0, "between 1 and 1024"),
        ("cpu_kv_cache_gib", -1, "at least 0.01"),
        ("cluster_gpus", [8, -1], "at least 0 for each node"),
        ("cluster_gpus", [], "at least 0 for each node"),
        ("env_modules", "mine", "a list of texts"),
        ("env_modules", [1], "a list of texts"),
        ("scoring_time_limit_s", 0, "at least 0.1"),
        ("backend", None, "a text"),
        ("loss_fn", 3, "a text or null"),
        ("loss_config", [1], "a mapping of names to values"),
        ("logits_optimization", "chunked", "one of none, compute, memory"),
        ("use_zorro", "yes", "true or false or null"),
        ("zorro_self_check", 1, "true or false"),
        ("logits_optimization_peak_mem_size_in_gib", 0, "at least 1e-06"),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value, said):
    with pytest.raises(ConfigError) as caught:
        ArcticRLConfig(**{name: value})
    assert f"trainer.arctic_rl.{name}={value!r}" in str(caught.value)
    assert said in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        ArcticRLConfig(zero_stage=7, cpu_threads=0)
    assert len(str(caught.value).splitlines()) == 2


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'zero_stage'"):
        check_setting_names(["trainer.epochs=1", "trainer.arctic_rl.zero_stge=2"])
    check_setting_names(["trainer.arctic_rl.zero_stage=2", "trainer.arctic=1", "trainer.arctic_rl.loss_config.a.b=1"])
    with pytest.raises(ConfigError, match=r"zero_stage\.a"):
        check_setting_names(["trainer.arctic_rl.zero_stage.a=2"])


def test_every_field_is_documented():
    source = __import__("inspect").getsource(ArcticRLConfig)
    for field in dataclasses.fields(ArcticRLConfig):
        after = source.split(f"\n    {field.name}:", 1)[1].splitlines()[1]
        assert after.strip().startswith('"""'), field.name


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ConfigError("a setting")))
    assert isinstance(error, ConfigError)
    assert str(error) == "a setting"
