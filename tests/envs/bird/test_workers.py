"""`compute_score` and `BirdEnv.step` as whoever has no pool of processes calls them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.bird import workers as own
from envs.bird.env import BirdEnv
from envs.bird.no_new_files import ONE_CALL_VARIABLE
from envs.bird.reward import compute_score

REWARD_FILE = Path(own.__file__).with_name("reward.py")
LONG_BUILT_IN = "SELECT instr(hex(zeroblob(40000000)), hex(zeroblob(19000000))||'1')"
COUNTING = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 3000000) SELECT count(*) FROM c"

BY_PATH = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("custom_module", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["custom_module"] = module
spec.loader.exec_module(module)
answer = "<think>x</think>```sql\\nSELECT name FROM fruit\\n```"
record = module.compute_score(
    data_source="bird", solution_str=answer, ground_truth="SELECT name FROM fruit", extra_info={"db_path": sys.argv[2]}
)
print(json.dumps(record))
"""


def formatted(sql):
    return f"<think>x</think>\n```sql\n{sql}\n```"


def score(db_path, sql, gold="SELECT 1", **settings):
    return compute_score("bird", formatted(sql), gold, {"db_path": str(db_path)}, **settings)


def step(db_path, sql, **settings):
    extras = {"reward_model": {"ground_truth": "SELECT 1"}, "extra_info": {"db_path": str(db_path)}}
    return BirdEnv(env_config=settings, extras=extras).step(formatted(sql))


def workers():
    return [pid for pool in own._own_pools.values() for pid in pool.pool.process_ids()]


def killed_workers():
    return sum(pool.pool.counters["timed_out"] for pool in own._own_pools.values())


def test_verl_loads_the_file_by_its_path(shop_db, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BY_PATH, str(REWARD_FILE), str(shop_db)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["score"], record["format_correct"], record["execution_success"]) == (1.0, True, True)
    assert done.stderr == ""


def test_a_long_built_in_call_is_killed_and_costs_only_itself(shop_db):
    """It would run for hours, and never reaches the callback that looks at the clock."""
    assert score(shop_db, "SELECT 1")["score"] == 1.0
    killed = killed_workers()
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        stuck = threads.submit(score, shop_db, LONG_BUILT_IN, timeout_s=2.0)
        others = [threads.submit(score, shop_db, f"SELECT {i % 2}") for i in range(20)]
        assert [other.result()["score"] for other in others] == [0.1, 1.0] * 10
        record = stuck.result()
    assert (record["outcome"], record["score"], record["judged"]) == ("timed_out", 0.0, True)
    assert 2.0 <= time.monotonic() - began < 60.0
    assert killed_workers() == killed + 1
    assert score(shop_db, "SELECT 2 - 1")["score"] == 1.0


def test_a_step_outside_of_a_pool_is_stopped_too(shop_db):
    killed = killed_workers()
    output = step(shop_db, LONG_BUILT_IN, timeout_s=1.0)
    assert (output["reward"], output["done"], output["metadata"]["outcome"]) == (0.0, True, "timed_out")
    assert killed_workers() == killed + 1


def test_in_a_scoring_worker_it_runs_in_place(shop_db, monkeypatch):
    monkeypatch.setenv(ONE_CALL_VARIABLE, str(os.getpid()))
    monkeypatch.setattr(own, "_own_pool", None)
    assert step(shop_db, "SELECT 1")["reward"] == score(shop_db, "SELECT 1")["score"] == 1.0


def test_a_worker_that_is_killed_costs_nothing(shop_db):
    assert score(shop_db, "SELECT 1")["score"] == 1.0
    records = []
    thread = threading.Thread(target=lambda: records.append(score(shop_db, COUNTING, "SELECT 3000000")))
    thread.start()
    time.sleep(0.1)
    for pid in workers():
        os.kill(pid, signal.SIGKILL)
    thread.join()
    assert [record["score"] for record in records] == [1.0]


def test_workers_that_keep_dying_are_no_verdict(shop_db, monkeypatch):
    from skyrl_arctic_rl.scoring import EnvPool, ScoringWorkerDied

    async def died(pool, parts):
        raise ScoringWorkerDied("twice")

    monkeypatch.setattr(EnvPool, "run_in_parts", died)
    for record in (score(shop_db, "SELECT 1"), step(shop_db, "SELECT 1")["metadata"]):
        assert (record["outcome"], record["judged"], record["score"]) == ("scorer_failed", False, 0.0)
        assert record["error"] == "ScoringWorkerDied: twice" and record["format_correct"]


def test_a_relative_path_is_the_callers(shop_db, monkeypatch):
    assert score(shop_db, "SELECT 1")["score"] == 1.0
    monkeypatch.chdir(shop_db.parent)
    assert score(shop_db.name, "SELECT 1")["score"] == step(shop_db.name, "SELECT 1")["reward"] == 1.0


def test_a_smaller_heap_stays_with_its_own_calls(shop_db):
    sql = "SELECT length(group_concat(zeroblob(5000000))) FROM fruit"
    assert score(shop_db, sql, sql, sqlite_heap_mb=8)["gold_outcome"] == "out_of_memory"
    assert score(shop_db, sql, sql)["score"] == 1.0


def _score_in_child(db_path, answers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = score(db_path, "SELECT 1")
    answers.put((record["score"], [str(warning.message) for warning in caught if warning.category is RuntimeWarning]))


@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own_or_says_that_it_cannot(shop_db, daemon):
    assert score(shop_db, "SELECT 1")["score"] == 1.0
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_score_in_child, args=(shop_db, answers), daemon=daemon)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    reward, told = answers.get()
    assert reward == 1.0
    assert [("daemonic" in text) for text in told] == [True] * daemon
    assert score(shop_db, "SELECT 1")["score"] == 1.0
