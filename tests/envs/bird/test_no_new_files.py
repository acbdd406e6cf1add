import errno
import os
import resource
import time

import pytest

from envs.bird import execute
from envs.bird.execute import ExecutionLimits, run_query
from envs.bird.handles import HANDLES
from envs.bird.no_new_files import ONE_CALL_VARIABLE, no_new_files, runs_one_call_at_a_time
from envs.bird.outcome import Outcome
from integrations.arctic_rl.scoring.worker import ONE_CALL_VARIABLE as OF_WORKERS

LIMITS = ExecutionLimits(timeout_s=60.0, max_kept_rows=5)


@pytest.fixture
def alone(monkeypatch):
    """This process as a scoring worker is."""
    monkeypatch.setenv(ONE_CALL_VARIABLE, str(os.getpid()))


@pytest.fixture
def attempts(monkeypatch):
    """Whether a query could have used files, for each time that one ran."""
    made = []

    def noting(*args, spills):
        made.append(spills)
        return run(*args, spills=spills)

    run = execute._run_watched
    monkeypatch.setattr(execute, "_run_watched", noting)
    return made


def test_a_query_that_needs_memory_has_that_of_idle_connections_too(alone, shop_db, tmp_path):
    other = tmp_path / "other.sqlite"
    other.write_bytes(shop_db.read_bytes())
    assert run_query(other, "SELECT count(*) FROM t", LIMITS).outcome is Outcome.OK
    assert run_query(shop_db, "SELECT 1", LIMITS).outcome is Outcome.OK
    assert len(HANDLES) == 2
    distinct = "SELECT count(*) FROM (SELECT DISTINCT randomblob(1000000) FROM t LIMIT {})"
    assert run_query(shop_db, distinct.format(400), LIMITS).outcome is Outcome.OUT_OF_MEMORY
    assert len(HANDLES) == 0
    assert run_query(other, "SELECT count(*) FROM t", LIMITS).outcome is Outcome.OK
    assert run_query(shop_db, distinct.format(100), LIMITS).outcome is Outcome.OK
    assert len(HANDLES) == 1


def test_no_file_can_be_opened_and_open_ones_stay(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "a").write_text("read")
    with (tmp_path / "a").open() as file, no_new_files():
        for path in (tmp_path / "new", tmp_path / "a", "/dev/null"):
            with pytest.raises(OSError) as caught:
                os.open(path, os.O_RDWR | os.O_CREAT)
            assert caught.value.errno == errno.EMFILE
        assert file.read() == "read"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    with pytest.raises(ZeroDivisionError), no_new_files():
        raise ZeroDivisionError
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert os.listdir(tmp_path) == ["a"]


def test_only_a_process_that_is_told_so_is_alone(monkeypatch, alone):
    assert OF_WORKERS == ONE_CALL_VARIABLE
    assert runs_one_call_at_a_time()
    for value in (str(os.getppid()), "1", ""):
        monkeypatch.setenv(ONE_CALL_VARIABLE, value)
        assert not runs_one_call_at_a_time()
    monkeypatch.delenv(ONE_CALL_VARIABLE)
    assert not runs_one_call_at_a_time()


SMALL = [
    "SELECT name, count(*) FROM t GROUP BY name",
    "SELECT id, x FROM t ORDER BY x DESC, id LIMIT 7",
    "SELECT DISTINCT name, speed_limit FROM t",
    "SELECT name, rank() OVER (ORDER BY speed_limit, id) FROM t",
    "SELECT name FROM t UNION SELECT name FROM fruit",
    "WITH m AS MATERIALIZED (SELECT * FROM t) SELECT count(*) FROM m a, m b WHERE a.id = b.id",
    "SELECT count(*) FROM t a JOIN t b ON a.x = b.x",
]
LARGE = [
    "SELECT count(*) FROM (SELECT DISTINCT a.id * 6000 + b.id FROM t a, t b LIMIT 300000)",
    "SELECT a.x * b.x AS v, hex(zeroblob(300)) FROM t a, t b WHERE a.id < 15 ORDER BY v",
    "WITH m AS MATERIALIZED (SELECT a.id, b.x FROM t a, t b LIMIT 300000) SELECT count(*), max(x) FROM m",
]


@pytest.mark.parametrize("sql", SMALL)
def test_what_fits_runs_once_and_gives_the_same(shop_db, attempts, monkeypatch, sql):
    expected = run_query(shop_db, sql, LIMITS)
    assert attempts == [False] and expected.outcome is Outcome.OK
    monkeypatch.setenv(ONE_CALL_VARIABLE, str(os.getpid()))
    result = run_query(shop_db, sql, LIMITS)
    assert attempts == [False, True]
    assert (result.fingerprint, result.rows) == (expected.fingerprint, expected.rows)


@pytest.mark.parametrize("sql", LARGE)
def test_what_would_need_a_file_runs_again_in_memory_and_gives_the_same(shop_db, attempts, monkeypatch, sql):
    expected = run_query(shop_db, sql, LIMITS)
    assert expected.outcome is Outcome.OK
    monkeypatch.setenv(ONE_CALL_VARIABLE, str(os.getpid()))
    attempts.clear()
    for _ in range(2):
        result = run_query(shop_db, sql, LIMITS)
        assert (result.fingerprint, result.rows) == (expected.fingerprint, expected.rows)
    assert attempts == [True, False] * 2


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [
        ("SELECT nothing FROM t", Outcome.SQL_ERROR),
        ("WITH q AS (SELECT 1) DELETE FROM t", Outcome.FORBIDDEN),
        ("SELECT load_extension('x')", Outcome.FORBIDDEN),
        ("SELECT id FROM t", Outcome.OK),
        ("SELECT zeroblob(200000000)", Outcome.OUT_OF_MEMORY),
        ("SELECT a.id FROM t a, t b", Outcome.TOO_LARGE),
    ],
)
def test_every_other_end_is_final(shop_db, alone, attempts, sql, outcome):
    limits = ExecutionLimits(timeout_s=20, max_compared_rows=10_000)
    assert run_query(shop_db, sql, limits).outcome is outcome
    assert attempts == [True]


def test_both_attempts_share_one_time_limit(shop_db, alone, attempts):
    sql = "SELECT count(*) FROM (SELECT DISTINCT a.id * 6000 + b.id FROM t a, t b)"
    start = time.monotonic()
    assert run_query(shop_db, sql, ExecutionLimits(timeout_s=1.0)).outcome is Outcome.TIMED_OUT
    assert attempts == [True, False] and time.monotonic() - start < 6


def test_memory_that_one_way_lacks_is_no_verdict(shop_db, alone, attempts):
    """The second way has the last word on memory."""
    sql = "SELECT group_concat(hex(zeroblob(1000000))) FROM t"
    assert run_query(shop_db, sql, LIMITS).outcome is Outcome.OUT_OF_MEMORY
    assert attempts in ([True], [True, False])
    assert run_query(shop_db, "SELECT count(*) FROM t", LIMITS).rows == ((6000,),)
