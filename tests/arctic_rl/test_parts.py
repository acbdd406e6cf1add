"""Steps given out in parts: one run for equal parts, a kill that costs one part, and bird's own steps."""

import asyncio
import importlib
import logging
import os
import sqlite3
import time
from pathlib import Path

import pytest

from integrations.arctic_rl.scoring import (
    EnvPool,
    ScoringClosed,
    ScoringConfig,
    ScoringEnvError,
    ScoringStartUpError,
    ScoringWorkerDied,
)
from integrations.arctic_rl.scoring import (
    pool as pool_module,
)
from integrations.arctic_rl.scoring.shared_results import SharedResults

IMPORTABLE = Path(__file__).parent / "importable"


@pytest.fixture(scope="module")
def envs():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(IMPORTABLE))
        yield importlib.import_module("part_envs")


@pytest.fixture(scope="module")
def common_pool(envs):
    """The workers of all tests that can do with them: each start costs a second."""
    pool = EnvPool(ScoringConfig(workers=2))
    yield pool
    pool.close()


@pytest.fixture
def pool(common_pool):
    """The common workers, with nothing counted and nothing kept."""
    common_pool._counters.clear()
    common_pool._shared = SharedResults(common_pool.config.shared_results_mb << 20)
    common_pool._thread_only.clear()
    common_pool._warned.clear()
    return common_pool


@pytest.fixture
def make_pool(envs):
    pools = []

    def make(**settings):
        pools.append(EnvPool(ScoringConfig(**{"workers": 2, **settings})))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def work(envs, tmp_path):
    log = str(tmp_path / "log")

    def make(name, key=None, **settings):
        return envs.Work(name, log, key, **settings)

    return make


@pytest.fixture
def ran(tmp_path):
    """The names of the parts that really ran, in order, and where."""

    def read():
        log = tmp_path / "log"
        lines = log.read_text(encoding="ascii").splitlines() if log.exists() else []
        return [line.rpartition(" ")[0] for line in lines], {int(line.rpartition(" ")[2]) for line in lines}

    return read


def step(pool, env, *lists):
    return asyncio.run(pool.call(env, "step", [list(parts) for parts in lists]))


def has_workers(pool, count):
    """Whether so many workers are alive soon."""
    deadline = time.monotonic() + 30
    while len(pool.process_ids()) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(pool.process_ids()) == count


def test_parts_run_in_workers_and_the_step_itself_here(envs, pool, work, ran):
    env = envs.PartsEnv()
    result = step(pool, env, [work("a")], [], [work("sleep 0.2"), work("b"), work("c")])
    assert result["seen"] is env.seen
    assert env.seen == [["did a"], [], ["did sleep 0.2", "did b", "did c"]] and env.turns == 1
    names, processes = ran()
    assert sorted(names) == ["a", "b", "c", "sleep 0.2"]
    assert result["pid"] == os.getpid() and os.getpid() not in processes and len(processes) == 2
    assert pool.counters["calls"] == 1 and pool.counters["parts"] == 4 and pool.counters["shared"] == 0


def test_equal_keys_run_once_also_when_under_way_at_the_same_time(envs, pool, work, ran):

    async def run():
        steps = [pool.call(envs.PartsEnv(), "step", [[work("sleep 0.3", key="gold")]]) for _ in range(8)]
        return await asyncio.gather(*steps)

    results = asyncio.run(run()) + asyncio.run(run())
    assert [result["seen"] for result in results] == [[["did sleep 0.3"]]] * 16
    assert ran()[0] == ["sleep 0.3"]
    assert pool.counters["parts"] == 1 and pool.counters["shared"] == 15


def test_a_shared_result_is_each_users_own(envs, pool, work):
    first, second = envs.PartsEnv(), envs.PartsEnv()
    for env in (first, second):
        step(pool, env, [work("a", key=1), work("a", key=1)])
    first.seen[0].append("changed")
    assert second.seen == [["did a", "did a"]]


def test_parts_of_another_class_or_key_are_not_mixed_up(envs, pool, work, ran):
    step(pool, envs.PartsEnv(), [work("a", key=1), work("b", key=2)], [work("c", key=None), work("c", key=None)])
    assert sorted(ran()[0]) == ["a", "b", "c", "c"]


def test_waiting_for_an_equal_part_holds_no_worker(envs, pool, work):

    async def run():
        waiting = [
            asyncio.ensure_future(pool.call(envs.PartsEnv(), "step", [[work("sleep 2", key="gold")]]))
            for _ in range(6)
        ]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(pool.call(envs.PartsEnv(), "step", [[work("a")]]), 30)
        return [task.done() for task in waiting], await asyncio.gather(*waiting)

    # Warm, so that both workers are there.
    asyncio.run(asyncio.wait_for(warm(pool, envs, work), 30))
    done, _ = asyncio.run(run())
    assert not any(done)


async def warm(pool, envs, work):
    await asyncio.gather(*(pool.call(envs.PartsEnv(), "step", [[work("sleep 0.2")]]) for _ in range(2)))


def test_a_result_serves_for_its_time_and_then_the_next_run_decides(envs, pool, work, ran):
    for _ in range(3):
        step(pool, envs.PartsEnv(), [work("never", key=1, kept_s=(0.0,))])
    for _ in range(4):
        step(pool, envs.PartsEnv(), [work("retried", key=2, kept_s=(1e-9, float("inf")))])
    names = ran()[0]
    assert names.count("never") == 3 and names.count("retried") == 2


def test_results_kept_are_bounded_in_bytes(envs, make_pool, work, ran):
    pool = make_pool(shared_results_mb=1)
    for _ in range(2):
        for key in range(4):
            step(pool, envs.PartsEnv(), [work("large 400000", key=key)])
    assert len(ran()[0]) == 8 and pool._shared.nbytes <= 1 << 20 and len(pool._shared) == 2
    step(pool, envs.PartsEnv(), [work("large 400000", key=3)])
    assert len(ran()[0]) == 8


@pytest.mark.parametrize("trouble", ["hang", "memory"])
def test_a_killed_part_is_answered_for_and_its_answer_shared(envs, make_pool, work, ran, trouble, monkeypatch):
    monkeypatch.setattr(pool_module, "PART_GRACE_S", 0.3)
    pool = make_pool(memory_limit_mb=256)

    async def run():
        bad = [pool.call(envs.PartsEnv(), "step", [[work(trouble, key=1, time_limit_s=0.4)]]) for _ in range(3)]
        good = [pool.call(envs.PartsEnv(), "step", [[work("a")], [work("b")]]) for _ in range(4)]
        return await asyncio.gather(*bad, *good)

    results = asyncio.run(run())
    cause = {"hang": "timed_out", "memory": "out_of_memory"}[trouble]
    for result in results[:3]:
        assert result["seen"][0][0].startswith(f"{cause}: Work.run() ")
    assert [result["seen"] for result in results[3:]] == [[["did a"], ["did b"]]] * 4
    assert ran()[0].count(trouble) == 1 and pool.counters[cause] == 1
    assert has_workers(pool, 2)


def test_a_part_that_crashes_its_workers_is_answered_for_too(envs, pool, work, ran):
    """What a policy writes may crash SQLite; that is no failure of the scorer, which would end the run."""
    for _ in range(2):
        result = step(pool, envs.PartsEnv(), [work("crash", key=1)], [work("crash_once", key=2)], [work("a")])
        assert result["seen"][0][0].startswith("crashed: the worker running Work.run() died twice (exit codes [-11")
        assert result["seen"][1:] == [["did crash_once"], ["did a"]]
    assert ran()[0] == ["crash", "crash", "crash_once", "crash_once", "a", "a"]
    assert pool.counters["worker_died"] == 3


def test_an_exception_reaches_every_step_that_waits_and_is_not_kept(envs, pool, work, ran):

    async def run():
        return await asyncio.gather(
            *(pool.call(envs.PartsEnv(), "step", [[work("raise x", key=1)], [work("a")]]) for _ in range(3))
        )

    for result in asyncio.run(run()):
        assert result["seen"] == ["raised raise x", ["did a"]]
    assert ran()[0].count("raise x") == 1
    assert step(pool, envs.PartsEnv(), [work("b"), work("raise x", key=1)])["seen"] == ["raised raise x"]
    assert ran()[0].count("raise x") == 2


def test_what_a_step_does_not_catch_is_raised(envs, pool, work):
    with pytest.raises(ScoringWorkerDied, match=r"Work\.run\(\) died twice"):
        step(pool, envs.PartsEnv(), [work("die", key=1)])
    with pytest.raises(ZeroDivisionError, match="between parts"):
        step(pool, envs.FaultyEnv(), [work("a")])
    for seconds in (0.0, float("inf"), "5", None):
        with pytest.raises(ScoringEnvError, match=r"Work\.time_limit_s="):
            step(pool, envs.PartsEnv(), [work("a", time_limit_s=seconds)])
    assert step(pool, envs.PartsEnv(), [work("a")])["seen"] == [["did a"]]


def test_a_step_that_a_subclass_overrides_is_called_whole(envs, pool, work, ran):
    env = envs.WholeAgainEnv()
    result = step(pool, env, [work("a", key=1)])
    assert result["seen"] == [["did a"]] and result["pid"] != os.getpid() and env.turns == 1
    assert pool.counters["parts"] == 0


def test_a_cancelled_step_leaves_the_others_their_part(envs, make_pool, work, ran):
    pool = make_pool(workers=1)

    async def run():
        await warm(pool, envs, work)
        first, second = (
            asyncio.ensure_future(pool.call(envs.PartsEnv(), "step", [[work("sleep 0.5", key="shared")]]))
            for _ in range(2)
        )
        alone = asyncio.ensure_future(pool.call(envs.PartsEnv(), "step", [[work("hang", key="alone")]]))
        await asyncio.sleep(0.2)
        first.cancel()
        assert (await second)["seen"] == [["did sleep 0.5"]]
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.sleep(0.2)
        alone.cancel()
        await asyncio.wait([alone])
        # The cancelled part's worker is killed, and the key is free again.
        result = await asyncio.wait_for(pool.call(envs.PartsEnv(), "step", [[work("b", key="alone")]]), 30)
        assert result["seen"] == [["did b"]]

    asyncio.run(run())
    assert ran()[0].count("sleep 0.5") == 1


def test_a_part_that_cannot_travel_runs_in_a_thread_with_one_warning(envs, pool, work, ran, caplog):
    with caplog.at_level(logging.WARNING, logger=pool_module.__name__):
        for _ in range(2):
            result = step(pool, envs.PartsEnv(), [work("a", extra=lambda: None)])
            assert result["seen"] == [["did a"]]
    assert ran()[1] == {os.getpid()}
    assert len(caplog.records) == 1 and "part_envs.Work" in caplog.text


def test_a_worker_that_keeps_memory_is_replaced(envs, make_pool, work, ran):
    pool = make_pool(workers=1, memory_limit_mb=300)
    for _ in range(3):
        assert step(pool, envs.PartsEnv(), [work("hoard")])["seen"] == [["did hoard"]]
    assert len(ran()[1]) == 3 and pool.counters["out_of_memory"] == 0


def test_a_worker_whose_modules_take_half_of_the_limit_stays(envs, make_pool, work, ran, tmp_path, monkeypatch):
    (tmp_path / "filling_module.py").write_text("held = bytearray(100 << 20)\n", encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = make_pool(workers=1, memory_limit_mb=220, modules=["filling_module"])
    for _ in range(4):
        step(pool, envs.PartsEnv(), [work("a")])
    assert len(ran()[1]) == 1


def test_workers_can_be_started_before_they_are_needed(envs, make_pool, work, ran):
    pool = make_pool(workers=3)
    began = time.monotonic()
    pool.start()
    pool.start()
    assert time.monotonic() - began < 5
    assert has_workers(pool, 3)
    started = set(pool.process_ids())
    step(pool, envs.PartsEnv(), [work("sleep 0.3") for _ in range(3)])
    assert ran()[1] == started == set(pool.process_ids())


def test_close_while_workers_start_leaves_nobody(envs, make_pool, work):
    pool = make_pool(workers=3)
    pool.start()
    pool.close()
    assert pool.process_ids() == []
    pool.start()
    assert pool.process_ids() == []
    with pytest.raises(ScoringClosed):
        step(pool, envs.PartsEnv(), [work("a")])


def test_a_start_that_fails_is_told_to_the_first_call(envs, make_pool, work):
    pool = make_pool(modules=["no_such_module_anywhere"])
    pool.start()
    with pytest.raises(ScoringStartUpError, match="no_such_module_anywhere"):
        step(pool, envs.PartsEnv(), [work("a")])


# -- bird


UNBOUNDED = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
CROSS_JOIN = "SELECT count(*) FROM t a, t b, t c WHERE a.x + b.x + c.x = 1"
LONG_BUILT_IN = "SELECT instr(hex(zeroblob(40000000)), hex(zeroblob(19000000)) || '1')"


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "t.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, x REAL)")
    connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, i / 3) for i in range(6000)])
    connection.commit()
    connection.close()
    return path


def bird_env(path, gold, **settings):
    from envs.bird.env import BirdEnv

    row = {"reward_model": {"ground_truth": gold}, "extra_info": {"db_path": str(path)}}
    return BirdEnv(settings, row)


def score_all(pool, jobs):
    """The metadata of each (environment, response), all under way at once."""

    async def run():
        steps = await asyncio.gather(*(pool.call(env, "step", response) for env, response in jobs))
        return [step["metadata"] for step in steps]

    return asyncio.run(run())


def formatted(sql):
    return f"<think>x</think>```sql\n{sql}\n```"


def test_a_group_runs_its_gold_once_and_equal_predictions_once(pool, database):
    gold = "SELECT count(*) FROM t"
    responses = [gold, "SELECT 6000", "SELECT 6000", gold, "SELECT 1", "SELEC", "no idea", "SELECT 1"]
    scores = score_all(pool, [(bird_env(database, gold), formatted(sql)) for sql in responses])
    assert [score["score"] for score in scores] == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1]
    assert [score["outcome"] for score in scores[5:7]] == ["sql_error", "sql_error"]
    # Each response is read; the queries that differ run once: the gold, 6000, 1, and the two that are no SQL.
    assert pool.counters["parts"] == 8 + 5
    assert pool.counters["shared"] == 8 + 8 - 5


def test_bird_in_a_pool_scores_as_bird_here(pool, database):
    from envs.bird.reward import compute_score

    gold = "SELECT x FROM t WHERE id < 50"
    queries = [
        gold, "SELECT x + 1e-12 FROM t WHERE id < 50", "SELECT id FROM t", "SELECT zeroblob(200000000)", "",
        "DROP TABLE t", "SELECT 1; SELECT 2", "SELECT a.id FROM t a, t b", "SELECT nothing FROM t",
    ]  # fmt: skip
    settings = {"max_compared_rows": 7000, "float_rtol": 1e-9}
    expected = [compute_score("bird", formatted(sql), gold, {"db_path": str(database)}, **settings) for sql in queries]
    scores = score_all(pool, [(bird_env(database, gold, **settings), formatted(sql)) for sql in queries])
    assert scores == expected
    assert {score["outcome"] for score in scores} == {
        "ok", "wrong_result", "out_of_memory", "forbidden", "too_large", "sql_error", "no_sql"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sql", [UNBOUNDED, CROSS_JOIN, LONG_BUILT_IN], ids=["unbounded", "join", "built-in"])
def test_a_query_past_its_time_is_stopped_even_in_one_built_in_call(make_pool, database, sql):
    """The long built-in call never reaches the progress handler: its worker is killed half a second later."""
    pool = make_pool(workers=1, memory_limit_mb=1024)
    settings = {"timeout_s": 2.0, "sqlite_heap_mb": 512}
    [right] = score_all(pool, [(bird_env(database, "SELECT 1", **settings), "SELECT 1")])
    workers = pool.process_ids()
    began = time.monotonic()
    [score] = score_all(pool, [(bird_env(database, "SELECT 1", **settings), formatted(sql))])
    assert (score["outcome"], score["score"], score["judged"]) == ("timed_out", 0.0, True)
    assert 2.0 <= time.monotonic() - began < 5.0
    killed = sql == LONG_BUILT_IN
    assert pool.counters["timed_out"] == killed
    deadline = time.monotonic() + 5.0
    while killed and Path(f"/proc/{workers[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert Path(f"/proc/{workers[0]}").exists() is not killed
    [again] = score_all(pool, [(bird_env(database, "SELECT 1", **settings), "SELECT 1")])
    assert right["score"] == again["score"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("gold", [CROSS_JOIN, LONG_BUILT_IN], ids=["join", "built-in"])
def test_a_gold_past_its_time_runs_once_and_takes_its_whole_group_out(make_pool, database, gold):
    pool = make_pool(memory_limit_mb=1024)
    settings = {"timeout_s": 0.5, "sqlite_heap_mb": 512}
    scores = score_all(pool, [(bird_env(database, gold, **settings), formatted(gold)) for _ in range(8)])
    scores += score_all(pool, [(bird_env(database, gold, **settings), "SELECT 1")])
    for score in scores:
        assert (score["outcome"], score["gold_outcome"], score["judged"]) == ("gold_failed", "timed_out", False)
    assert pool.counters["parts"] == 9 + 1
    assert pool.counters["timed_out"] == (gold == LONG_BUILT_IN)


BIG_BLOB = "SELECT length(randomblob(900000000))"
NESTED_REPLACE = "SELECT length(replace(replace(hex(zeroblob(100000000)), '0', 'ab'), 'a', 'cd'))"
ROW_FLOOD = "SELECT a.id, hex(randomblob(500)) FROM t a, t b"


@pytest.mark.slow
@pytest.mark.parametrize("sql", [BIG_BLOB, NESTED_REPLACE, ROW_FLOOD], ids=["blob", "replace", "rows"])
def test_a_query_that_eats_memory_costs_one_sample(pool, database, sql):
    gold, settings = "SELECT count(*) FROM t", {"timeout_s": 3.0}
    responses = [gold] * 3 + [sql] + [gold, "SELECT 1", gold, "SELECT 2"]
    scores = score_all(pool, [(bird_env(database, gold, **settings), formatted(text)) for text in responses])
    bad = scores.pop(3)
    assert bad["outcome"] in ("out_of_memory", "timed_out", "too_large")
    assert bad["score"] == (0.1 if bad["outcome"] == "too_large" else 0.0)
    assert [score["score"] for score in scores] == [1.0, 1.0, 1.0, 1.0, 0.1, 1.0, 0.1]
    again = score_all(pool, [(bird_env(database, gold, **settings), formatted(f"SELECT {i}")) for i in range(8)])
    assert [score["score"] for score in again] == [0.1] * 8 and has_workers(pool, 2)


def test_a_database_replaced_during_the_run_is_scored_as_it_is_now(pool, tmp_path):

    def write(value):
        with sqlite3.connect(tmp_path / "new") as connection:
            connection.execute("CREATE TABLE t(a)")
            connection.execute("INSERT INTO t VALUES (?)", (value,))
        connection.close()
        os.replace(tmp_path / "new", tmp_path / "d.sqlite")

    for value in (1, 2, 3):
        write(value)
        env = bird_env(tmp_path / "d.sqlite", "SELECT a FROM t")
        scores = score_all(pool, [(env, f"SELECT {guess}") for guess in (1, 2, 3)])
        assert [score["score"] == 1.0 for score in scores] == [value == guess for guess in (1, 2, 3)]
    (tmp_path / "d.sqlite").unlink()
    [score] = score_all(pool, [(env, "SELECT 3")])
    assert (score["outcome"], score["judged"]) == ("scorer_failed", False) and "d.sqlite" in score["error"]
