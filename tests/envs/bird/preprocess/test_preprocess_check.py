"""The check of golds: findings and the rewriting that breaks ties otherwise."""

import random
import sqlite3

import pytest

from envs.bird.config import BirdEnvConfig
from envs.bird.execute import ExecutionLimits, run_query
from envs.bird.preprocess.check import Finding, Verdict, check_gold, check_ties
from envs.bird.preprocess.ties import tie_variants

CONFIG = BirdEnvConfig(timeout_s=5.0)


@pytest.fixture(scope="module")
def ties_db(tmp_path_factory):
    path = tmp_path_factory.mktemp("ties") / "ties.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, speed INT, team TEXT);
        INSERT INTO t VALUES (1, 'a', 5, 'x'), (2, 'b', 9, 'x'), (3, 'c', 9, 'x'), (4, 'd', 1, 'y'), (5, 'e', 1, 'y');
        CREATE TABLE money(amount REAL);
        INSERT INTO money VALUES (0.1), (0.2), (0.3);
        """
    )
    connection.commit()
    connection.close()
    return str(path)


@pytest.mark.parametrize(
    "sql, finding",
    [
        ("SELECT name FROM t", Finding.OK),
        ("SELECT name FROM t; -- done", Finding.OK),
        ("SELECT name FROM t WHERE id > 99", Finding.EMPTY),
        ("SELECT nme FROM t", Finding.SQL_ERROR),
        ("SELECT name FROM nowhere", Finding.SQL_ERROR),
        ("SELECT random()", Finding.UNSTABLE),
        ("SELECT name FROM t WHERE name = '```'", Finding.NOT_EXTRACTED),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c", Finding.TIMED_OUT),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c", Finding.TOO_LARGE),
        ("SELECT zeroblob(300000000)", Finding.OUT_OF_MEMORY),
        ("PRAGMA user_version", Finding.FORBIDDEN),
    ],
)
def test_findings(ties_db, sql, finding):
    limits = {"timeout_s": 0.5} if finding is Finding.TIMED_OUT else {"max_compared_rows": 1000}
    verdict = check_gold(sql, ties_db, BirdEnvConfig(**limits))
    assert verdict.finding is finding
    assert bool(verdict.detail) == (finding not in (Finding.OK, Finding.EMPTY, Finding.UNSTABLE))
    assert Verdict.of(verdict.record()) == verdict


def test_a_database_that_is_gone_is_the_scorers_failure(tmp_path):
    assert check_gold("SELECT 1", str(tmp_path / "gone.sqlite"), CONFIG).finding is Finding.SCORER_FAILED


@pytest.mark.parametrize(
    "sql, finding",
    [
        ("SELECT name FROM t ORDER BY speed DESC LIMIT 1", Finding.TIES),
        ("SELECT name FROM t ORDER BY speed DESC -- the fastest\nLIMIT 1;", Finding.TIES),
        ("SELECT name FROM t ORDER BY speed LIMIT 2, 1", Finding.OK),
        ("SELECT name FROM t ORDER BY speed DESC LIMIT 2", Finding.OK),
        ("SELECT speed FROM t ORDER BY speed DESC LIMIT 1", Finding.OK),
        ("SELECT team FROM t ORDER BY speed DESC LIMIT 1", Finding.OK),
        ("SELECT * FROM t ORDER BY speed DESC LIMIT 1", Finding.TIES),
        ("SELECT speed, team, t.* FROM t ORDER BY speed DESC LIMIT 1", Finding.TIES),
        ("SELECT name FROM t LIMIT 1", Finding.TIES),
        ("SELECT name FROM t LIMIT 99", Finding.OK),
        ("SELECT max(speed) FROM t LIMIT 1", Finding.OK),
        ("SELECT team FROM t GROUP BY team ORDER BY count(*) DESC LIMIT 1", Finding.OK),
        ("SELECT name FROM t WHERE id = (SELECT id FROM t ORDER BY speed DESC LIMIT 1)", Finding.TIES),
        ("SELECT name FROM t WHERE id IN (SELECT id FROM t ORDER BY speed DESC LIMIT 2)", Finding.OK),
        ("SELECT name FROM t UNION SELECT team FROM t ORDER BY 1 LIMIT 2", Finding.OK),
        ("WITH b AS (SELECT * FROM t ORDER BY speed LIMIT 1) SELECT name FROM b", Finding.TIES),
        ("SELECT group_concat(name) FROM t", Finding.TIES),
        ("SELECT 'ORDER BY x LIMIT 1', name FROM t", Finding.OK),
        ("SELECT name FROM t ORDER BY row_number() OVER (ORDER BY speed, id) LIMIT 1", Finding.OK),
        ("SELECT sum(amount) FROM money", Finding.ROUNDING),
        ("SELECT sum(amount) FROM money WHERE amount > 0.15", Finding.OK),
    ],
)
def test_ties(ties_db, sql, finding):
    assert check_gold(sql, ties_db, CONFIG).finding is Finding.OK
    verdict = check_ties(sql, ties_db, CONFIG)
    assert verdict.finding is finding, verdict


def test_ties_that_cannot_be_told(ties_db):
    slow = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c LIMIT 1"
    verdict = check_ties(slow, ties_db, BirdEnvConfig(timeout_s=0.5))
    assert verdict.finding is Finding.TIES_UNKNOWN and "timed_out" in verdict.detail


@pytest.mark.parametrize(
    "sql, columns, expected",
    [
        ("SELECT a FROM t", 1, None),
        ("SELECT a, b FROM t LIMIT 1", 2, "SELECT a, b FROM t ORDER BY 1 ASC, 2 ASC LIMIT 1"),
        ("SELECT * FROM t ORDER BY c LIMIT 1", 3, "SELECT * FROM t ORDER BY c , 1 ASC, 2 ASC, 3 ASC LIMIT 1"),
        ("SELECT f(a, b), (SELECT 1, 2) limit 1", 2, "SELECT f(a, b), (SELECT 1, 2) ORDER BY 1 ASC, 2 ASC limit 1"),
        (
            "SELECT (SELECT a FROM u ORDER BY b LIMIT 1) FROM t",
            1,
            "SELECT (SELECT a FROM u ORDER BY b , 1 ASC LIMIT 1) FROM t",
        ),
        ("SELECT 1 WHERE 'LIMIT' = \"LIMIT\" -- LIMIT", 1, None),
        ("VALUES (1), (2)", 1, None),
    ],
)  # fmt: skip
def test_rewriting(sql, columns, expected):
    variants = tie_variants(sql, columns=columns)
    if expected is None:
        assert variants == []
    else:
        assert variants == [expected, expected.replace(" ASC", " DESC")]


def test_ties_agree_with_a_look_at_all_tied_rows(tmp_path):
    """Over random tables: a LIMIT is reported exactly if two ways of taking tied rows can give two sets of results."""
    rng = random.Random(5)
    connection = sqlite3.connect(tmp_path / "random.sqlite")
    connection.execute("CREATE TABLE t(k INT, v INT)")
    seen = set()
    for _ in range(40):
        rows = [(rng.randint(0, 3), rng.randint(0, 2)) for _ in range(rng.randint(1, 7))]
        limit = rng.randint(1, 4)
        connection.execute("DELETE FROM t")
        connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
        connection.commit()
        ordered = sorted(rows)
        certain = {v for k, v in ordered[:limit] if len(ordered) <= limit or k < ordered[limit][0]}
        tied = [v for k, v in ordered if len(ordered) > limit and k == ordered[limit][0]]
        room = limit - sum(1 for k, _ in ordered if len(ordered) <= limit or k < ordered[limit][0])
        lowest = certain | set(sorted(tied)[:room])
        highest = certain | set(sorted(tied)[len(tied) - room :])
        sql = f"SELECT v FROM t ORDER BY k LIMIT {limit}"
        path = str(tmp_path / "random.sqlite")
        finding = check_ties(sql, path, CONFIG).finding
        assert finding is (Finding.OK if lowest == highest else Finding.TIES), (rows, limit)
        seen.add(finding)
    connection.close()
    assert seen == {Finding.OK, Finding.TIES}


def test_a_reversed_query_leaves_nothing_behind(ties_db):
    sql = "SELECT group_concat(name) FROM t"
    plain, backwards, again = (
        run_query(ties_db, sql, ExecutionLimits(), reverse_unordered=reverse).rows for reverse in (False, True, False)
    )
    assert plain == again == (("a,b,c,d,e",),) and backwards == (("e,d,c,b,a",),)
