"""Databases made from statements that nobody has vetted."""

import sqlite3

import pytest

from envs.bird.check_dataset import database_problem
from envs.bird.execute import ExecutionLimits, run_query
from envs.bird.preprocess import build
from envs.bird.preprocess.build import ContextFailed, build_database

SCRIPT = """
    CREATE TABLE t(id INT PRIMARY KEY, "a;b" TEXT, made TEXT DEFAULT CURRENT_TIMESTAMP);
    INSERT INTO t VALUES (1, 'x; DROP TABLE t', date('2020-02-28', '+2 days'));
    INSERT INTO t(id, "a;b", made) VALUES (2, 'now', strftime('%Y', '1999-01-01'));
    CREATE INDEX i ON t(date(made));
    CREATE VIEW v AS SELECT id, date('now') AS today FROM t;
    CREATE TRIGGER g AFTER DELETE ON t BEGIN INSERT INTO t(id) VALUES (9); END;
    UPDATE t SET id = 3 WHERE id = 2;
"""
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


def test_a_database_as_the_scorer_reads_it(tmp_path):
    content = build_database(SCRIPT)
    assert content == build_database(SCRIPT)
    path = tmp_path / "built.sqlite"
    path.write_bytes(content)
    assert database_problem(str(path)) == ""
    result = run_query(path, "SELECT * FROM t ORDER BY id", ExecutionLimits())
    assert result.rows == ((1, "x; DROP TABLE t", "2020-03-01"), (3, "now", "1999"))
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_transaction_left_open_is_committed(tmp_path):
    path = tmp_path / "built.sqlite"
    path.write_bytes(build_database("BEGIN; CREATE TABLE t(a); INSERT INTO t VALUES (5)"))
    assert run_query(path, "SELECT a FROM t", ExecutionLimits()).rows == ((5,),)


@pytest.mark.parametrize(
    "script, reason",
    [
        ("ATTACH 'leak.sqlite' AS e", "ATTACH is not allowed"),
        ("CREATE TABLE t(a); DETACH main", "DETACH is not allowed"),
        ("VACUUM", "ATTACH is not allowed"),
        ("VACUUM INTO 'leak.sqlite'", "ATTACH is not allowed"),
        ("PRAGMA writable_schema=ON", "PRAGMA is not allowed"),
        ("CREATE TEMP TABLE t(a)", "a temporary table is not allowed"),
        ("CREATE VIRTUAL TABLE f USING fts5(a)", "a virtual table is not allowed"),
        ("SELECT load_extension('leak')", "load_extension is not allowed"),
        (
            "CREATE TABLE t(a DEFAULT (load_extension('leak')), b); INSERT INTO t(b) VALUES (1)",
            "unsafe use of load_extension",
        ),
        ("CREATE TABLE t(a); INSERT INTO sqlite_master VALUES (1, 2, 3, 4, 5)", "may not be modified"),
        ("CREATE TABLE t(a); INSERT INTO t VALUES (RANDOM())", "depends on chance (random)"),
        ("CREATE TABLE t(a DEFAULT (hex(randomblob(4))), b); INSERT INTO t(b) VALUES (1)", "depends on chance"),
        ("CREATE TABLE t(a DEFAULT CURRENT_TIMESTAMP, b); INSERT INTO t(b) VALUES (1)", "time of day (current_time"),
        ("CREATE TABLE t(a); INSERT INTO t VALUES (date(' NOW '))", "time of day (date)"),
        ("CREATE TABLE t(a); INSERT INTO t SELECT strftime('%s', 'n' || 'ow')", "time of day (strftime)"),
        ("CREATE TABLE t(a); INSERT INTO t VALUES (datetime())", "time of day (datetime)"),
        ("CREATE TABLE t(a); INSERT INTO t VALUES (time('12:00', 'localtime'))", "time of day (time)"),
        ("CREATE TABLE t(a); INSERT INTO t VALUES (zeroblob(900000000))", "too big"),
        (f"CREATE TABLE t(a); {ENDLESS} INSERT INTO t SELECT zeroblob(1000000) FROM c", "full"),
        ("CREATE TABLE t(a ENUM('x'))", "syntax error"),
        ("CREATE TABLE t(a); INSERT INTO u VALUES (1)", "no such table: u"),
        ("SELECT 1", "make no table"),
        ("-- CREATE TABLE t(a)", "make no table"),
        ("CREATE TABLE t(a);\0", "null character"),
    ],
)
def test_what_makes_no_database(tmp_path, monkeypatch, script, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContextFailed) as caught:
        build_database(script)
    assert reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_statements_without_end_are_stopped(monkeypatch):
    monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    with pytest.raises(ContextFailed, match=r"take more than 0\.2 s"):
        build_database(f"CREATE TABLE t(a); {ENDLESS} INSERT INTO t SELECT x FROM c WHERE x < 0")
