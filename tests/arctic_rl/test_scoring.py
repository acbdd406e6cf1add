import asyncio
import gc
import importlib
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path

import pytest

from integrations.arctic_rl import scoring
from integrations.arctic_rl.scoring import (
    EnvPool,
    ScoringClosed,
    ScoringConfig,
    ScoringEnvError,
    ScoringError,
    ScoringMemoryExceeded,
    ScoringStartUpError,
    ScoringTimeout,
    ScoringWorkerDied,
    WorkerTraceback,
)

IMPORTABLE = Path(__file__).parent / "importable"
ROOT = Path(scoring.__file__).resolve().parents[3]
UNBOUNDED = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
THREE_WAY_JOIN = (
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 6000) "
    "SELECT count(*) FROM t a, t b, t c WHERE a.n + b.n + c.n = 1"
)
LONG_BUILT_IN = "SELECT instr(hex(zeroblob(40000000)), hex(zeroblob(19000000)) || '1')"
BIG_BLOB = "SELECT length(randomblob(900000000))"
NESTED_REPLACE = "SELECT length(replace(replace(hex(zeroblob(100000000)), '0', 'ab'), 'a', 'cd'))"
ROW_FLOOD = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n, hex(randomblob(500)) FROM r"


@pytest.fixture
def envs(monkeypatch):
    monkeypatch.syspath_prepend(str(IMPORTABLE))
    return importlib.import_module("plain_envs")


@pytest.fixture
def make_pool(envs):
    pools = []

    def make(**settings):
        pools.append(EnvPool(ScoringConfig(**settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def alive(process_id):
    try:
        status = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def wait_gone(process_ids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(process_id) for process_id in process_ids):
            return True
        time.sleep(0.02)
    return False


def run_script(tmp_path, body, *arguments, as_module=False, timeout=60):
    script = tmp_path / "parent_script.py"
    script.write_text(textwrap.dedent(body), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(IMPORTABLE), str(tmp_path)])}
    command = ["-m", "parent_script"] if as_module else [str(script)]
    done = subprocess.run(
        [sys.executable, *command, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_result_and_state_come_back_over_several_turns(envs, make_pool):
    pool = make_pool(workers=2)
    env, here = envs.CountingEnv(), envs.CountingEnv()

    async def run():
        prompt = [{"role": "user", "content": "q"}]
        assert await pool.call(env, "init", prompt) == here.init(prompt)
        for action in ("wrong", "right", "right"):
            assert await pool.call(env, "step", action, bonus=0.5) == here.step(action, bonus=0.5)
            assert vars(env) == vars(here)
        result = await pool.call(env, "step", "last")
        assert result["history"] is env.history

    asyncio.run(run())
    assert env.turns == 4
    assert pool.counters["calls"] == 5 and pool.counters["in_thread"] == 0


def test_calls_run_in_worker_processes_that_stay(envs, make_pool):
    pool = make_pool(workers=1)

    async def run():
        return [await pool.call(envs.CountingEnv(), "where") for _ in range(3)]

    places = asyncio.run(run())
    assert {process_id for process_id, _ in places} == set(pool.process_ids())
    assert os.getpid() not in pool.process_ids()


def test_one_pool_serves_one_event_loop_after_another(envs, make_pool):
    pool = make_pool(workers=2)
    env = envs.CountingEnv()

    async def many():
        return await asyncio.gather(*(pool.call(env, "where") for _ in range(6)))

    places = asyncio.run(many()) + asyncio.run(many())
    assert len({process_id for process_id, _ in places}) <= 2


def test_results_stay_with_their_call(envs, make_pool):
    pool = make_pool(workers=4, time_limit_s=1.0)

    async def one(key):
        env = envs.TroubleEnv(key)
        if key == 3:
            return await pool.call(env, "die")
        if key == 7:
            return await pool.call(env, "python_loop")
        return await pool.call(env, "answer", 1 - key % 2, 0.02 * (12 - key))

    async def run(keys):
        return await asyncio.gather(*(one(key) for key in keys), return_exceptions=True)

    # In the order of numbers, and of the same numbers as text: 0, 1, 10, 11, 2, ...
    for keys in (list(range(12)), sorted(range(12), key=str)):
        results = asyncio.run(run(keys))
        assert len(results) == 12
        for key, result in zip(keys, results, strict=True):
            if key == 3:
                assert type(result) is ScoringWorkerDied
            elif key == 7:
                assert type(result) is ScoringTimeout
            else:
                assert result == (key, 1 - key % 2)


@pytest.mark.parametrize("query", [UNBOUNDED, THREE_WAY_JOIN, LONG_BUILT_IN], ids=["unbounded", "join", "built-in"])
def test_time_limit_kills_the_worker(envs, make_pool, query):
    pool = make_pool(workers=1, time_limit_s=0.8)
    env = envs.TroubleEnv()

    async def run():
        process_id = await pool.call(env, "process_id")
        with pytest.raises(ScoringTimeout, match=r"TroubleEnv\.sql\(\).*time_limit_s=0\.8"):
            await asyncio.wait_for(pool.call(env, "sql", query), 5.0)
        assert wait_gone([process_id])
        assert await asyncio.wait_for(pool.call(env, "sql", "SELECT 1"), 5.0) == [(1,)]

    asyncio.run(run())
    assert pool.counters["timed_out"] == 1
    assert 0.8 <= pool.busy_seconds < 1.8


def test_an_environments_own_limit_of_its_step_comes_with_a_grace(envs, make_pool, monkeypatch):
    monkeypatch.setattr(scoring.pool, "STEP_GRACE_S", 1.0)
    pool = make_pool(workers=1, time_limit_s=0.6)

    async def run():
        # Longer than the pool's limit, shorter than its own; then past its own, within the grace.
        assert await pool.call(envs.SelfLimitedEnv(1.5), "step", 0.9) == 0.9
        assert await pool.call(envs.SelfLimitedEnv(0.1), "step", 0.5) == 0.5
        first = pool.process_ids()
        with pytest.raises(ScoringTimeout, match=r"SelfLimitedEnv\.step\(\) ran past its max_step_s=0\.1 by 1\.0 s"):
            await pool.call(envs.SelfLimitedEnv(0.1), "step", 20.0)
        for env, method in ((envs.SelfLimitedEnv(1.5), "wait"), (envs.SelfLimitedEnv(None), "step")):
            with pytest.raises(ScoringTimeout, match=r"time_limit_s=0\.6"):
                await pool.call(env, method, 0.9)
        assert not set(first) & set(pool.process_ids())

    asyncio.run(run())
    assert pool.counters["timed_out"] == 3


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), "30", True], ids=str)
def test_an_own_limit_that_is_no_number_of_seconds_is_refused(envs, make_pool, limit):
    with pytest.raises(ScoringEnvError, match=r"SelfLimitedEnv\.max_step_s="):
        asyncio.run(make_pool(workers=1).call(envs.SelfLimitedEnv(limit), "step", 0.0))


def test_a_worker_for_bird_is_small_and_outlives_birds_own_limits(envs, make_pool, tmp_path):
    from envs.bird.config import WORKER_BASE_MB, BirdEnvConfig
    from envs.bird.env import BirdEnv

    database = tmp_path / "one.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE t(a)")
    connection.close()
    row = {"reward_model": {"ground_truth": "SELECT 1"}, "extra_info": {"db_path": str(database)}}

    def env(**settings):
        return BirdEnv(BirdEnvConfig(**settings), row)

    # The pool's own limit is shorter than the environment's.
    pool = make_pool(workers=1, time_limit_s=1.0, modules=["skyrl_arctic_rl.envs"])

    async def run():
        right = await pool.call(env(timeout_s=5.0), "step", "SELECT 1")
        workers = pool.process_ids()
        endless = await pool.call(env(timeout_s=1.5), "step", UNBOUNDED)
        large = await pool.call(
            env(timeout_s=5.0, max_compared_rows=2), "step", "SELECT 1 UNION SELECT 2 UNION SELECT 3"
        )
        assert pool.process_ids() == workers
        looks = ("modules", "resident_mb", "private_mb", "thread_variable")
        return [right, endless, large], [await pool.call(envs.TroubleEnv(), name) for name in looks]

    steps, (modules, resident_mb, private_mb, threads) = asyncio.run(run())
    assert [step["metadata"]["outcome"] for step in steps] == ["ok", "timed_out", "too_large"]
    assert pool.counters["timed_out"] == 0 and pool.counters["in_thread"] == 0
    assert pool.busy_seconds > 1.5
    top = {name.split(".")[0] for name in modules}
    assert "skyrl_gym" in top
    assert not top & {"torch", "skyrl", "vllm", "deepspeed", "ray", "transformers", "datasets"}
    assert resident_mb < 200 and private_mb < WORKER_BASE_MB
    assert threads == "1"


@pytest.mark.parametrize("query", [BIG_BLOB, NESTED_REPLACE, ROW_FLOOD], ids=["blob", "replace", "rows"])
def test_memory_limit_costs_one_call(envs, make_pool, query):
    pool = make_pool(workers=2, time_limit_s=20.0, memory_limit_mb=256)
    queries = ["SELECT 1"] * 3 + [query] + ["SELECT 2"] * 4

    async def run():
        results = await asyncio.gather(
            *(pool.call(envs.TroubleEnv(), "sql", text) for text in queries), return_exceptions=True
        )
        again = await asyncio.gather(*(pool.call(envs.TroubleEnv(), "sql", "SELECT 3") for _ in range(4)))
        return results, again

    results, again = asyncio.run(run())
    assert type(results.pop(3)) is ScoringMemoryExceeded
    assert results == [[(1,)]] * 3 + [[(2,)]] * 4
    assert again == [[(3,)]] * 4
    assert pool.counters["out_of_memory"] == 1


def test_memory_stays_below_the_limit(envs, make_pool):
    pool = make_pool(workers=1, memory_limit_mb=256)
    env = envs.TroubleEnv()

    async def run():
        assert await pool.call(env, "allocate", 150) == 150 << 20
        with pytest.raises(ScoringMemoryExceeded):
            await pool.call(env, "allocate", 250)
        # The worker that ran out is replaced.
        return await pool.call(env, "resident_peak_mb")

    assert asyncio.run(run()) < 100


def test_a_large_result_beyond_the_limit_is_a_memory_failure(envs, make_pool):
    pool = make_pool(workers=1, memory_limit_mb=128)

    async def run():
        assert len(await pool.call(envs.TroubleEnv(), "large", 8)) == 8 << 20
        with pytest.raises(ScoringMemoryExceeded):
            await pool.call(envs.TroubleEnv(), "large", 90)

    asyncio.run(run())


def test_worker_killed_from_outside_is_replaced_and_its_call_retried(envs, make_pool, tmp_path):
    pool = make_pool(workers=2)

    async def run():
        marker = str(tmp_path / "died")
        healthy = [pool.call(envs.TroubleEnv(key), "answer", "ok", 0.2) for key in range(6)]
        return await asyncio.gather(pool.call(envs.TroubleEnv(), "die_once", marker), *healthy)

    first, *others = asyncio.run(run())
    assert first == "second try"
    assert others == [(key, "ok") for key in range(6)]
    assert pool.counters["worker_died"] == 1 and pool.counters["retried"] == 1


def test_workers_killed_in_the_middle_of_a_batch_lose_nothing(envs, make_pool):
    pool = make_pool(workers=2)

    async def run():
        calls = [asyncio.ensure_future(pool.call(envs.TroubleEnv(key), "answer", key, 0.3)) for key in range(8)]
        for _ in range(2):
            await asyncio.sleep(0.5)
            os.kill(pool.process_ids()[0], signal.SIGKILL)
        return await asyncio.gather(*calls)

    assert asyncio.run(run()) == [(key, key) for key in range(8)]
    assert len(pool.process_ids()) == 2


def test_all_workers_killed_while_idle(envs, make_pool):
    pool = make_pool(workers=2)

    async def run(pause_s):
        await asyncio.gather(*(pool.call(envs.TroubleEnv(), "answer", 0, 0.1) for _ in range(2)))
        killed = pool.process_ids()
        assert len(killed) == 2
        for process_id in killed:
            os.kill(process_id, signal.SIGKILL)
        await asyncio.sleep(pause_s)
        answers = await asyncio.gather(*(pool.call(envs.TroubleEnv(key), "answer", 1) for key in range(4)))
        assert answers == [(key, 1) for key in range(4)]
        assert not set(killed) & set(pool.process_ids())

    asyncio.run(run(0.0))
    asyncio.run(run(0.5))


@pytest.mark.parametrize("method", ["die", "exit_with_status_zero"])
def test_a_call_that_always_ends_its_worker_fails_alone(envs, make_pool, method):
    pool = make_pool(workers=2)

    async def run():
        bad = pool.call(envs.TroubleEnv(), method)
        good = [pool.call(envs.TroubleEnv(key), "answer", "ok", 0.1) for key in range(6)]
        return await asyncio.gather(bad, *good, return_exceptions=True)

    bad, *good = asyncio.run(run())
    assert type(bad) is ScoringWorkerDied
    assert str([-9, -9] if method == "die" else [0, 0]) in str(bad)
    assert good == [(key, "ok") for key in range(6)]
    assert pool.counters["worker_died"] == 2 and pool.counters["retried"] == 1


def test_an_exception_of_the_environment_comes_back_as_itself(envs, make_pool):
    pool = make_pool(workers=1)
    env = envs.TroubleEnv()

    async def run():
        with pytest.raises(KeyError, match="no such table") as caught:
            await pool.call(env, "fail")
        return caught.value

    error = asyncio.run(run())
    assert isinstance(error.__cause__, WorkerTraceback)
    assert "plain_envs.py" in str(error.__cause__) and "in fail" in str(error.__cause__)
    assert env.touched is False
    assert pool.counters["raised"] == 1


@pytest.mark.parametrize(
    ("method", "text"), [("fail_unpicklably", "Local: only known here"), ("leave", "SystemExit: 3")]
)
def test_what_cannot_travel_as_an_exception_becomes_a_scoring_error(envs, make_pool, method, text):
    pool = make_pool(workers=1)

    async def run():
        with pytest.raises(ScoringEnvError) as caught:
            await pool.call(envs.TroubleEnv(), method)
        return str(caught.value)

    assert text in asyncio.run(run())


def test_an_environment_that_cannot_be_pickled_stays_in_a_thread_with_one_warning(envs, make_pool, caplog):
    pool = make_pool(workers=1)
    unpicklable = [envs.LambdaEnv() for _ in range(3)]

    async def run():
        for env in unpicklable:
            for action in ("wrong", "right"):
                await pool.call(env, "step", action)
        return await pool.call(unpicklable[0], "where"), await pool.call(envs.CountingEnv(), "where")

    with caplog.at_level(logging.WARNING, logger=scoring.pool.__name__):
        here, elsewhere = asyncio.run(run())
    assert here[0] == os.getpid() and here[1] != "MainThread"
    assert elsewhere[0] != os.getpid()
    assert [env.history for env in unpicklable] == [["wrong", "right"]] * 3
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "plain_envs.LambdaEnv" in warnings[0] and "lambda" in warnings[0]
    assert pool.counters["in_thread"] == 7


def test_an_environment_that_cannot_come_back_runs_in_a_thread_from_then_on(envs, make_pool, caplog):
    pool = make_pool(workers=1)
    env = envs.BecomesUnpicklableEnv()

    async def run():
        return [await pool.call(env, "step", action) for action in ("wrong", "right")]

    with caplog.at_level(logging.WARNING, logger=scoring.pool.__name__):
        results = asyncio.run(run())
    assert [result["reward"] for result in results] == [0.0, 1.0]
    assert env.turns == 2 and env.history == ["wrong", "right"]
    assert len(caplog.records) == 1 and "after step()" in caplog.records[0].getMessage()


def test_slots_stay_in_a_thread(envs, make_pool, caplog):
    pool = make_pool(workers=1)
    env = envs.SlottedEnv()
    with caplog.at_level(logging.WARNING, logger=scoring.pool.__name__):
        assert asyncio.run(pool.call(env, "step")) == 1
    assert env.turns == 1 and "__slots__" in caplog.text


def test_state_tied_to_the_training_stack_stays_in_a_thread_unless_listed(envs, make_pool, caplog, monkeypatch):
    monkeypatch.setattr(scoring.pool, "_STACK", frozenset({"fractions"}))
    env = envs.CountingEnv()
    env.share = [{"part": Fraction(1, 3)}]
    with caplog.at_level(logging.WARNING, logger=scoring.pool.__name__):
        process_id, _ = asyncio.run(make_pool(workers=1).call(env, "where"))
    assert process_id == os.getpid() and "['fractions']" in caplog.text
    process_id, _ = asyncio.run(make_pool(workers=1, modules=["fractions"]).call(env, "where"))
    assert process_id != os.getpid() and env.share == [{"part": Fraction(1, 3)}]


def test_importing_what_an_environment_needs_is_not_part_of_the_call(envs, make_pool, tmp_path, monkeypatch):
    source = "import time\nfrom plain_envs import TroubleEnv\ntime.sleep(0.4)\nclass {name}(TroubleEnv):\n    pass\n"
    for name in ("SlowEnv", "SlowPart"):
        (tmp_path / f"{name.lower()}.py").write_text(source.format(name=name), encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    env = importlib.import_module("slowenv").SlowEnv(1)
    env.part = importlib.import_module("slowpart").SlowPart()
    pool = make_pool(workers=1, time_limit_s=0.5)

    async def run():
        with pytest.raises(ScoringTimeout):
            await pool.call(env, "python_loop")
        return await pool.call(env, "answer", "in time")

    assert asyncio.run(run()) == (1, "in time")


def test_a_class_that_a_worker_cannot_import_runs_in_a_thread(envs, make_pool, tmp_path, monkeypatch, caplog):
    (tmp_path / "gone_module.py").write_text(
        "from plain_envs import TroubleEnv\nclass GoneEnv(TroubleEnv):\n    pass\n", encoding="ascii"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = importlib.import_module("gone_module").GoneEnv()
    (tmp_path / "gone_module.py").unlink()
    pool = make_pool(workers=1)
    with caplog.at_level(logging.WARNING, logger=scoring.pool.__name__):
        assert asyncio.run(pool.call(env, "process_id")) == os.getpid()
    assert "No module named 'gone_module'" in caplog.text


def test_exceptions_in_a_thread_come_back_too(envs, make_pool):
    pool = make_pool(workers=1)
    env = envs.LambdaEnv()
    with pytest.raises(TypeError):
        asyncio.run(pool.call(env, "step"))
    assert pool.counters["raised"] == 1 and pool.counters["in_thread"] == 1


def test_the_event_loop_is_free_while_calls_run(envs, make_pool):
    pool = make_pool(workers=1)
    ticks = itertools.count()

    async def tick():
        while True:
            next(ticks)
            await asyncio.sleep(0.01)

    async def run():
        ticker = asyncio.ensure_future(tick())
        await pool.call(envs.TroubleEnv(), "answer", 0, 0.6)
        ticker.cancel()

    asyncio.run(run())
    assert next(ticks) > 10


def test_a_cancelled_call_frees_its_worker(envs, make_pool):
    pool = make_pool(workers=1, time_limit_s=60.0)

    async def run():
        process_id = await pool.call(envs.TroubleEnv(), "process_id")
        running = asyncio.ensure_future(pool.call(envs.TroubleEnv(), "python_loop"))
        waiting = asyncio.ensure_future(pool.call(envs.TroubleEnv(), "answer", "never"))
        await asyncio.sleep(0.3)
        running.cancel()
        waiting.cancel()
        assert await asyncio.wait_for(pool.call(envs.TroubleEnv(5), "answer", "next"), 10.0) == (5, "next")
        assert not alive(process_id)

    asyncio.run(run())


def test_what_the_environment_started_dies_with_the_worker(envs, make_pool, tmp_path):
    pool = make_pool(workers=1, time_limit_s=1.0)
    file = tmp_path / "child"

    async def run():
        with pytest.raises(ScoringTimeout):
            await pool.call(envs.TroubleEnv(), "start_child_and_hang", str(file))

    asyncio.run(run())
    assert wait_gone([int(file.read_text(encoding="ascii"))])


def test_close_leaves_no_process_and_ends_outstanding_calls(envs, make_pool):
    pool = make_pool(workers=2, time_limit_s=60.0)

    async def run():
        calls = [asyncio.ensure_future(pool.call(envs.TroubleEnv(), "python_loop")) for _ in range(4)]
        await asyncio.sleep(0.5)
        workers = pool.process_ids()
        assert len(workers) == 2
        await pool.aclose()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10.0)
        assert [type(result) for result in results] == [ScoringClosed] * 4
        with pytest.raises(ScoringClosed):
            await pool.call(envs.TroubleEnv(), "process_id")
        return workers

    workers = asyncio.run(run())
    assert not any(alive(process_id) for process_id in workers)
    assert pool.process_ids() == []
    pool.close()


@pytest.mark.slow
def test_repeated_time_outs_leak_no_file_descriptors(envs, make_pool):
    pool = make_pool(workers=1, time_limit_s=0.05)

    async def run(count):
        for _ in range(count):
            with pytest.raises(ScoringTimeout):
                await pool.call(envs.TroubleEnv(), "python_loop")

    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    asyncio.run(run(2))
    before = open_files()
    asyncio.run(run(10))
    # A leak of one file a worker would leave 10; a worker just being replaced accounts for a few.
    assert open_files() <= before + 6


@pytest.mark.slow
def test_replaced_workers_leak_no_semaphores(envs, make_pool, recwarn, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "semprefix", f"/scoring-test-{os.getpid()}")
    pool = make_pool(workers=1, memory_limit_mb=128)

    async def run():
        for _ in range(5):
            with pytest.raises(ScoringMemoryExceeded):
                await pool.call(envs.TroubleEnv(), "allocate", 500)

    def semaphores():
        return [name for name in os.listdir("/dev/shm") if name.startswith(f"sem.scoring-test-{os.getpid()}")]

    gc.disable()
    try:
        asyncio.run(run())
        assert len(semaphores()) <= 2
    finally:
        gc.enable()
    pool.close()
    assert semaphores() == []
    assert not [warning for warning in recwarn if "ResourceTracker" in str(warning.message)]


def test_a_module_that_does_not_import_is_named(envs, make_pool):
    pool = make_pool(workers=1, modules=["no_such_module_anywhere"])
    with pytest.raises(ScoringStartUpError, match="no_such_module_anywhere"):
        asyncio.run(pool.call(envs.TroubleEnv(), "process_id"))


def test_a_module_that_does_not_end_importing_is_named(envs, make_pool, tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("import time\ntime.sleep(600)\n", encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = make_pool(workers=1, modules=["never_imported"], start_up_limit_s=1.0)
    with pytest.raises(ScoringStartUpError, match="never_imported"):
        asyncio.run(pool.call(envs.TroubleEnv(), "process_id"))
    assert pool.process_ids() == []


def test_a_memory_limit_that_the_modules_fill_is_refused(envs, make_pool, tmp_path, monkeypatch):
    (tmp_path / "large_module.py").write_text("held = bytearray(100 << 20)\n", encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = make_pool(workers=1, modules=["large_module"], memory_limit_mb=128)
    with pytest.raises(ScoringStartUpError, match="memory_limit_mb=128; set at least"):
        asyncio.run(pool.call(envs.TroubleEnv(), "process_id"))


@pytest.mark.parametrize("as_module", [False, True])
def test_workers_do_not_import_the_parents_main(tmp_path, as_module):
    (tmp_path / "heavy_stack.py").write_text(
        "import os\nopen(os.environ['LOADED_BY'], 'a').write(f'{os.getpid()}\\n')\n", encoding="ascii"
    )
    loaded = tmp_path / "loaded_by"
    body = f"""
        import os
        os.environ["LOADED_BY"] = {str(loaded)!r}
        import heavy_stack
        import asyncio
        from integrations.arctic_rl.scoring import EnvPool, ScoringConfig
        from plain_envs import TroubleEnv

        class HereEnv(TroubleEnv):
            pass

        async def main():
            pool = EnvPool(ScoringConfig(workers=1))
            modules = await pool.call(TroubleEnv(), "modules")
            assert await pool.call(TroubleEnv(), "process_id") != os.getpid()
            print("heavy_stack" in modules, await pool.call(TroubleEnv(), "main_file"))
            assert await pool.call(HereEnv(), "process_id") == os.getpid()
            await pool.aclose()

        if __name__ == "__main__":
            asyncio.run(main())
    """
    assert run_script(tmp_path, body, as_module=as_module).split() == ["False", "None"]
    assert len(loaded.read_text(encoding="ascii").split()) == 1


def test_a_parent_that_forgets_to_close_still_exits_and_leaves_nobody(tmp_path):
    body = """
        import asyncio, os
        from integrations.arctic_rl.scoring import EnvPool, ScoringConfig
        from plain_envs import TroubleEnv

        async def main():
            pool = EnvPool(ScoringConfig(workers=2))
            await asyncio.gather(*(pool.call(TroubleEnv(), "answer", 0, 0.2) for _ in range(2)))
            print(*pool.process_ids())
            asyncio.ensure_future(pool.call(TroubleEnv(), "python_loop"))
            await asyncio.sleep(0.3)

        asyncio.run(main())
    """
    workers = [int(word) for word in run_script(tmp_path, body).split()]
    assert len(workers) == 2 and wait_gone(workers)


def test_workers_end_when_the_parent_is_killed(tmp_path):
    body = """
        import asyncio, os, signal
        from integrations.arctic_rl import scoring
        from plain_envs import TroubleEnv

        scoring.process._BACKSTOP_S = 0.5

        async def main():
            pool = scoring.EnvPool(scoring.ScoringConfig(workers=2, time_limit_s=1.5))
            await asyncio.gather(*(pool.call(TroubleEnv(), "answer", 0, 0.2) for _ in range(2)))
            print(*pool.process_ids(), flush=True)
            asyncio.ensure_future(pool.call(TroubleEnv(), "python_loop"))
            await asyncio.sleep(0.3)
            if os.fork() == 0:
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            await asyncio.sleep(10)

        asyncio.run(main())
    """
    script = tmp_path / "parent_script.py"
    script.write_text(textwrap.dedent(body), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(IMPORTABLE)])}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2 and wait_gone(workers, 10.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": 0}, "workers=0"),
        ({"time_limit_s": 0.0}, "time_limit_s=0.0"),
        ({"time_limit_s": float("inf")}, "time_limit_s=inf"),
        ({"start_up_limit_s": -1.0}, "start_up_limit_s=-1.0"),
        ({"memory_limit_mb": 16}, "memory_limit_mb=16"),
        ({"max_failures": -1}, "max_failures=-1"),
        ({"modules": "envs"}, "modules='envs'"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, named):
    with pytest.raises((ValueError, TypeError), match=named):
        ScoringConfig(**settings)


def test_worker_count_defaults_to_the_cpus_of_this_process():
    assert 1 <= ScoringConfig().worker_count <= len(os.sched_getaffinity(0))
    assert ScoringConfig(workers=3).worker_count == 3
    assert ScoringConfig(modules=["a", "b"]).modules == ("a", "b")


@pytest.mark.parametrize(
    "kind",
    [
        ScoringError,
        ScoringTimeout,
        ScoringMemoryExceeded,
        ScoringWorkerDied,
        ScoringStartUpError,
        ScoringEnvError,
        ScoringClosed,
    ],
)
def test_exceptions_can_be_pickled(kind):
    copy = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(copy) is kind and str(copy) == "what happened" and copy.cause == kind.cause


def test_importing_the_pool_is_light():
    code = "import sys, integrations.arctic_rl.scoring; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not set(out.split()) & {"torch", "skyrl", "skyrl_gym", "vllm", "deepspeed", "ray", "numpy"}


@pytest.mark.slow
def test_workers_started_inside_ray_do_not_import_ray(tmp_path):
    body = """
        import asyncio
        import ray

        @ray.remote(num_cpus=1)
        def score():
            import sys
            from integrations.arctic_rl.scoring import EnvPool, ScoringConfig
            from plain_envs import TroubleEnv

            async def main():
                pool = EnvPool(ScoringConfig(workers=1))
                result = [await pool.call(TroubleEnv(), name) for name in ("modules", "main_file", "process_id")]
                await pool.aclose()
                return result, "ray" in sys.modules

            return asyncio.run(main())

        if __name__ == "__main__":
            ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
            (modules, main_file, process_id), ray_in_parent = ray.get(score.remote())
            ray.shutdown()
            print("RESULT", ray_in_parent, "ray" in modules, main_file, process_id)
    """
    out = run_script(tmp_path, body, timeout=120)
    words = next(line for line in out.splitlines() if line.startswith("RESULT")).split()
    assert words[1:4] == ["True", "False", "None"]
    assert wait_gone([int(words[4])])
