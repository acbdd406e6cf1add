import copy
import pickle

import pytest

from envs.bird.config import BirdEnvConfig, BirdSettingError
from envs.bird.env import BirdEnv
from envs.bird.outcome import Outcome

GOLD = "SELECT DISTINCT name FROM fruit"
RIGHT = f"<think>x</think>```sql\n{GOLD}\n```"
PROMPT = [{"role": "user", "content": "Which fruit are there?"}]


@pytest.fixture
def row(shop_db):
    return {
        "data_source": "bird",
        "reward_model": {"style": "rule", "ground_truth": GOLD},
        "extra_info": {"db_path": str(shop_db), "alternative_answers": None, "index": 3},
        "max_turns": 1,
    }


def make(row, **settings):
    return BirdEnv(env_config=settings, extras=row)


def test_an_episode(row):
    env = make(row)
    assert env.init(PROMPT) == (PROMPT, {})
    assert env.get_metrics() == {}
    output = env.step(RIGHT)
    assert output["reward"] == 1.0 and output["done"] is True and output["observations"] == []
    assert output["metadata"]["outcome"] == "ok"
    env.close()
    metrics = env.get_metrics()
    assert metrics["outcome/ok"] == metrics["execution_accuracy_set"] == metrics["format_correct"] == 1.0
    assert sum(value for key, value in metrics.items() if key.startswith("outcome/")) == 1.0


def test_reward_spec_is_read_too(row):
    row["reward_spec"] = row.pop("reward_model")
    assert make(row).step(RIGHT)["reward"] == 1.0
    row["reward_model"] = None
    assert make(row).step(RIGHT)["reward"] == 1.0
    row["reward_model"] = {"ground_truth": "SELECT 1"}
    with pytest.raises(ValueError, match="differ"):
        make(row)


def test_it_moves_between_processes_at_any_time(row):
    env = pickle.loads(pickle.dumps(make(row)))
    assert env.init(PROMPT) == (PROMPT, {})
    env = pickle.loads(pickle.dumps(env))
    output = env.step(RIGHT)
    assert pickle.loads(pickle.dumps(output)) == output
    assert pickle.loads(pickle.dumps(env)).get_metrics() == env.get_metrics()


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("reward_model",), None, "ground_truth"),
        (("reward_model", "ground_truth"), None, "ground_truth"),
        (("reward_model", "ground_truth"), "  ", r"reward_model\.ground_truth"),
        (("reward_model", "ground_truth"), ["SELECT 1"], r"reward_model\.ground_truth"),
        (("extra_info",), None, "extra_info is None"),
        (("extra_info", "db_path"), None, r"extra_info\.db_path"),
        (("extra_info", "alternative_answers"), "SELECT 1", r"extra_info\.alternative_answers"),
        (("extra_info", "alternative_answers"), [None], r"extra_info\.alternative_answers"),
    ],
)
def test_missing_fields_are_named(row, path, value, message):
    row = copy.deepcopy(row)
    target = row
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        make(row)


def test_a_missing_database_is_named(row, tmp_path):
    row["extra_info"]["db_path"] = str(tmp_path / "gone.sqlite")
    with pytest.raises(FileNotFoundError, match=r"gone\.sqlite"):
        make(row)
    with pytest.raises(ValueError, match="extras"):
        BirdEnv()


def test_settings(row, shop_db):
    assert make(row).config == BirdEnv(None, row).config == BirdEnvConfig()
    assert make(row, timeout_s=2).config.timeout_s == 2
    assert BirdEnv(BirdEnvConfig(comparison="multiset"), row).config.comparison == "multiset"
    with pytest.raises(ValueError, match="did you mean comparison"):
        make(row, comparision="set")
    row["extra_info"]["db_path"] = shop_db.name
    env = make(row, db_root=str(shop_db.parent))
    assert env.step(RIGHT)["reward"] == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": 0}, {"timeout_s": "30"}, {"timeout_s": float("nan")}, {"sqlite_heap_mb": 1},
        {"sqlite_heap_mb": 64.5}, {"max_value_mb": 2000}, {"max_compared_rows": -1}, {"comparison": "bag"},
        {"float_rtol": -1e-9}, {"float_rtol": 1}, {"max_compared_rows": True}, {"timeout_s": float("inf")},
        {"float_atol": float("nan")}, {"float_atol": float("inf")}, {"float_atol": True}, {"float_rtol": "1e-6"},
        {"max_compared_rows": 1.5}, {"max_compared_rows": float("inf")}, {"max_kept_rows": 0},
        {"max_kept_rows": 2.5},
        {"empty_gold_earns": "yes"}, {"empty_gold_earns": 1}, {"db_root": 3},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(BirdSettingError, match=rf"bird\.{next(iter(settings))}="):
        BirdEnvConfig.parse(settings)


def test_settings_under_another_name_of_the_package_are_the_same(row):
    from skyrl_arctic_rl.envs.bird.config import BirdEnvConfig as Twin

    assert Twin is not BirdEnvConfig
    assert BirdEnv(Twin(timeout_s=3.0), row).config == BirdEnvConfig(timeout_s=3.0)
    assert BirdEnvConfig(max_compared_rows=1e6).limits() == BirdEnvConfig().limits()
    for wrong in (BirdEnvConfig, "timeout_s", 3):
        with pytest.raises(BirdSettingError, match="write a mapping"):
            BirdEnv(wrong, row)


def test_an_omegaconf_node_is_a_mapping(row):
    omegaconf = pytest.importorskip("omegaconf")
    assert BirdEnv(omegaconf.OmegaConf.create({"timeout_s": 3.0}), row).config.timeout_s == 3.0


@pytest.mark.parametrize("cause", ["timed_out", "out_of_memory", "scorer_failed"])
def test_a_killed_step_is_stood_in_for(row, cause):
    env = make(row)
    output = env.step_failed(RIGHT, cause, "worker 3 was killed")
    assert output["reward"] == 0.0 and output["done"] is True
    assert output["metadata"]["outcome"] == cause and output["metadata"]["format_correct"] is True
    assert output["metadata"]["judged"] is (cause != "scorer_failed")
    assert env.get_metrics()[f"outcome/{cause}"] == 1.0


def test_the_longest_step_counts_every_query(row):
    assert make(row, timeout_s=4).max_step_s == 8
    row["extra_info"]["alternative_answers"] = ["SELECT 1", "SELECT 2"]
    assert make(row, timeout_s=4).max_step_s == 12


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


@pytest.mark.parametrize("gold, timed_out", [(ENDLESS, 1.0), ("SELECT * FROM nowhere", 0.0)])
def test_a_failing_gold_is_counted_by_its_cause_and_has_no_accuracy(row, gold, timed_out):
    row["reward_model"]["ground_truth"] = gold
    env = make(row, timeout_s=0.2)
    output = env.step(RIGHT)
    assert output["metadata"]["judged"] is False
    metrics = env.get_metrics()
    assert metrics["outcome/gold_failed"] == 1.0 and metrics["gold_timed_out"] == timed_out
    assert not any(name.startswith("execution_accuracy") for name in metrics)


def test_an_empty_gold_is_counted(row):
    for gold, empty in (("SELECT 1 WHERE 0", 1.0), (GOLD, 0.0)):
        row["reward_model"]["ground_truth"] = gold
        env = make(row)
        env.step(RIGHT)
        assert env.get_metrics()["gold_empty"] == empty


def test_metrics_are_means_with_stable_keys(row):
    def metrics_of(response, gold=GOLD):
        env = make({**row, "reward_model": {"ground_truth": gold}}, comparison="multiset")
        env.step(response)
        return env.get_metrics()

    episodes = [metrics_of(RIGHT), metrics_of("SELECT 1"), metrics_of("?"), metrics_of(RIGHT, "SELECT x FROM no"), {}]
    mean = BirdEnv.aggregate_metrics(episodes)
    assert mean["outcome/ok"] == mean["outcome/wrong_result"] == mean["outcome/gold_failed"] == 0.25
    assert mean["execution_accuracy_multiset"] == pytest.approx(1 / 3)
    assert mean["format_correct"] == 0.5
    assert {f"outcome/{outcome.value}" for outcome in Outcome} < set(mean)
    assert list(mean) == list(BirdEnv.aggregate_metrics(episodes[:1]))
    assert BirdEnv.aggregate_metrics([]) == {}
