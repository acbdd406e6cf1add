import hashlib
import itertools
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.bird import execute
from envs.bird.database import PendingChangesError, open_read_only, read_only_uri
from envs.bird.execute import ExecutionLimits, ScorerError, run_query
from envs.bird.outcome import Outcome

LIMITS = ExecutionLimits(timeout_s=10.0)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_rows_columns_and_fingerprint(shop_db):
    result = run_query(shop_db, "SELECT name, count(*) AS n FROM fruit GROUP BY name ORDER BY 1", LIMITS)
    assert result.outcome is Outcome.OK
    assert result.columns == ("name", "n")
    assert result.rows == (("apple", 2), ("pear", 1))
    assert not result.rows_cut
    assert (result.fingerprint.row_count, result.fingerprint.distinct_row_count) == (2, 2)


@pytest.mark.parametrize(
    "sql, rows",
    [
        ("SELECT id FROM t -- all rows", 6000),
        ("SELECT id FROM t; -- done", 6000),
        ("SELECT id FROM t;;\n ; /* end", 6000),
        ("SELECT id, speed_limit FROM t", 6000),
        ("SELECT id FROM t WHERE id IN (SELECT id FROM t LIMIT 10)", 10),
        ("SELECT id FROM t LIMIT\r\n7", 7),
        ("VALUES (1),(2)", 2),
        ("SELECT ';' -- ; SELECT 2", 1),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 9) SELECT x FROM c", 9),
        ("SELECT value FROM json_each('[1, 2, 3]')", 3),
        ("SELECT name FROM pragma_table_info('t')", 4),
        ("PRAGMA table_info(t)", 4),
        ("EXPLAIN QUERY PLAN SELECT 1 FROM t", 1),
        ("SELECT name FROM sqlite_master", 4),
        ("SELECT avg(x) OVER (ORDER BY id) FROM t LIMIT 5", 5),
        ("SELECT * FROM fruit WHERE 0", 0),
        ('SELECT "no such column"', 1),
    ],
)
def test_reads_run_as_written(shop_db, sql, rows):
    result = run_query(shop_db, sql, LIMITS)
    assert (result.outcome, result.error) == (Outcome.OK, "")
    assert result.fingerprint.row_count == rows


def test_the_row_cap_cuts_what_is_kept_and_never_what_is_compared(shop_db):
    up, down, cut = (
        run_query(shop_db, sql, ExecutionLimits(max_kept_rows=5000))
        for sql in ("SELECT id FROM t ORDER BY id", "SELECT id FROM t ORDER BY id DESC", "SELECT id FROM t LIMIT 5000")
    )
    assert len(up.rows) == len(down.rows) == 5000 and up.rows_cut and down.rows_cut
    assert set(up.rows) != set(down.rows)
    assert up.fingerprint.as_set == down.fingerprint.as_set
    assert up.fingerprint.as_set != cut.fingerprint.as_set
    assert not cut.rows_cut


def test_kept_bytes_are_bounded(shop_db):
    result = run_query(shop_db, "SELECT zeroblob(400) FROM fruit", ExecutionLimits(max_kept_bytes=1000))
    assert len(result.rows) == 2 and result.rows_cut
    assert result.fingerprint.row_count == 3


def test_more_rows_than_are_compared(shop_db):
    at, past = (run_query(shop_db, "SELECT id FROM t", ExecutionLimits(max_compared_rows=n)) for n in (6000, 5999))
    assert at.outcome is Outcome.OK
    assert past.outcome is Outcome.TOO_LARGE and past.fingerprint is None


def test_text_that_is_not_utf8_is_kept_exactly(shop_db):
    result = run_query(shop_db, "SELECT s FROM e", LIMITS)
    assert [row[0].encode("utf-8", "surrogateescape") for row in result.rows] == [b"ok", b"\xe9l", b"l"]
    broken, plain = (run_query(shop_db, f"SELECT s FROM e WHERE id = {i}", LIMITS).fingerprint for i in (2, 3))
    assert broken.as_set != plain.as_set


SQL_ERRORS = [
    "SELEC 1", "SELECT * FROM nowhere", "SELECT nothing FROM t", "SELECT ?", "SELECT :name", "SELECT 1 +",
    "SELECT '\udce9'", "SELECT 1\0", "", "   -- nothing", ";", "SELECT nofunction(1)", "Here is the answer",
    "SELECT json_extract('{', '$')", "SELECT " + "(" * 3000 + "1" + ")" * 3000, "SELECT 'unclosed",
]  # fmt: skip


@pytest.mark.parametrize("sql", SQL_ERRORS, ids=range(len(SQL_ERRORS)))
def test_wrong_sql_is_an_sql_error(shop_db, sql):
    result = run_query(shop_db, sql, LIMITS)
    assert result.outcome is Outcome.SQL_ERROR
    assert result.error and len(result.error) <= 500
    assert result.fingerprint is None


HOSTILE = [
    "ATTACH 'x.sqlite' AS e",
    "/* c */ -- c\n attach database 'x.sqlite' as e",
    "ATTACH ':memory:' AS e",
    "ATTACH 'file:x.sqlite?mode=rwc' AS e",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO 'copy.sqlite'",
    "VACUUM main INTO 'copy.sqlite' -- LIMIT 1",
    "PRAGMA writable_schema = 1",
    "PRAGMA journal_mode = WAL",
    "PRAGMA journal_mode",
    "PRAGMA user_version = 7",
    "PRAGMA page_size = 512",
    "PRAGMA main.wal_checkpoint",
    "PRAGMA query_only = 0",
    "PRAGMA hard_heap_limit = 0",
    "PRAGMA temp_store_directory = '.'",
    "PRAGMA optimize",
    "PRAGMA incremental_vacuum",
    "PRAGMA integrity_check",
    "PRAGMA database_list",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_journal_mode",
    "CREATE TABLE z(a)",
    "CREATE TEMP TABLE z(a)",
    "CREATE TEMPORARY VIEW z AS SELECT 1",
    "CREATE TABLE z AS SELECT * FROM t",
    "CREATE VIRTUAL TABLE z USING fts5(a)",
    "CREATE TRIGGER z AFTER INSERT ON t BEGIN SELECT 1; END",
    "CREATE INDEX z ON t(name)",
    "INSERT INTO t(name) VALUES ('x')",
    "INSERT INTO t(name) VALUES ('x') RETURNING id",
    "WITH q AS (SELECT 1) INSERT INTO t(name) SELECT * FROM q",
    "WITH q AS (SELECT 1) DELETE FROM t WHERE id IN q",
    "WITH q AS (SELECT 1) UPDATE t SET name = 'x'",
    "EXPLAIN INSERT INTO t(name) VALUES ('x')",
    "REPLACE INTO t(id) VALUES (1)",
    "UPDATE t SET name = 'x'",
    "UPDATE sqlite_master SET sql = ''",
    "DELETE FROM t",
    "DROP TABLE t",
    "ALTER TABLE t RENAME TO u",
    "ANALYZE",
    "REINDEX",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT s",
    "RELEASE s",
    "SELECT load_extension('mod')",
    "SELECT LOAD_EXTENSION('mod', 'entry')",
    "SELECT fts3_tokenizer('simple')",
    "SELECT fts3_tokenizer('simple', x'00')",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE t",
    "SELECT 1;ATTACH 'x.sqlite' AS e",
]


def test_hostile_statements_are_forbidden_and_leave_nothing(shop_db, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = digests(shop_db.parent)
    outcomes = {sql: run_query(shop_db, sql, LIMITS).outcome for sql in HOSTILE}
    assert {sql: outcome for sql, outcome in outcomes.items() if outcome is not Outcome.FORBIDDEN} == {}
    assert digests(shop_db.parent) == before
    assert list(tmp_path.iterdir()) == []


def test_the_authorizer_refuses_them_without_a_look_at_the_text(shop_db, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = digests(shop_db.parent)
    for sql in HOSTILE:
        if ";" in sql or sql == "REINDEX":
            continue
        result = execute._run_statement(shop_db, sql, LIMITS, time.monotonic())
        refused = result.outcome is Outcome.FORBIDDEN or "may not be modified" in result.error
        assert refused, (sql, result)
    assert digests(shop_db.parent) == before
    assert list(tmp_path.iterdir()) == []


def test_functions_that_touch_files_are_refused_where_a_build_has_them():
    for name in ("readfile", "WRITEFILE", "edit"):
        assert execute._refusal(sqlite3.SQLITE_FUNCTION, None, name, frozenset())
    assert execute._refusal(sqlite3.SQLITE_READ, "fsdir", "name", frozenset())
    assert not execute._refusal(sqlite3.SQLITE_READ, "fsdir", "name", frozenset({"fsdir"}))
    assert not execute._refusal(sqlite3.SQLITE_FUNCTION, None, "count", frozenset())


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT readfile('/etc/passwd')", "SELECT WriteFile('x', 'y')", "SELECT edit('x')", "SELECT zipfile(1, 2)",
        "SELECT * FROM fsdir('/etc')", "SELECT * FROM sqlite_dbpage",
    ],
)  # fmt: skip
def test_and_where_it_lacks_them(shop_db, sql):
    assert run_query(shop_db, sql, LIMITS).outcome is Outcome.FORBIDDEN


def test_to_explain_a_write_is_as_forbidden_as_the_write(shop_db, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for sql in ("VACUUM INTO 'copy.sqlite'", "DELETE FROM t", "ATTACH 'x.sqlite' AS x"):
        for explain in ("EXPLAIN", "explain query plan", "EXPLAIN /* x */ QUERY\nPLAN"):
            assert run_query(shop_db, f"{explain} {sql}", LIMITS).outcome is Outcome.FORBIDDEN, (explain, sql)
    assert run_query(shop_db, "EXPLAIN SELECT * FROM t", LIMITS).outcome is Outcome.OK
    assert list(tmp_path.iterdir()) == []


def test_tables_are_read_whatever_they_are_called(tmp_path):
    """Names that a module or a function has in some builds; virtual tables that the query names in quotes or not."""
    path = tmp_path / "names.sqlite"
    connection = sqlite3.connect(path)
    names = ("fsdir", "ZipFile", "vfsstat", "csv", "readfile", "load_extension", "EXPLAIN")
    for name in names:
        connection.execute(f'CREATE TABLE "{name}"(x)')
        connection.execute(f'INSERT INTO "{name}" VALUES (1)')
    connection.executescript(
        """
        CREATE VIRTUAL TABLE "we""ird" USING fts5(x);
        INSERT INTO "we""ird" VALUES (1);
        CREATE VIEW v AS SELECT x FROM "we""ird";
        """
    )
    connection.commit()
    connection.close()
    for name in (*names, 'we""ird', "v"):
        assert run_query(path, f'SELECT x FROM "{name}"', LIMITS).rows == ((1,),), name
    assert run_query(path, "SELECT count(*) FROM zipfile", LIMITS).rows == ((1,),)


def test_a_table_whose_module_is_missing_costs_no_other_table_anything(tmp_path):
    path = tmp_path / "missing.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t(x)")
    connection.execute("CREATE VIRTUAL TABLE abcdefg USING fts5(x)")
    connection.commit()
    connection.close()
    path.write_bytes(path.read_bytes().replace(b"abcdefg", b"ab\xffdefg").replace(b"USING fts5", b"USING xyz5"))
    assert run_query(path, "SELECT * FROM t", LIMITS).outcome is Outcome.OK


def test_tables_of_modules_can_be_read_but_not_written(tmp_path):
    path = tmp_path / "modules.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE VIRTUAL TABLE f USING fts5(x); INSERT INTO f VALUES ('hello world');"
        "CREATE VIRTUAL TABLE r USING rtree(id, low, high); INSERT INTO r VALUES (1, 2, 3);"
    )
    connection.close()
    for sql in (
        "SELECT x FROM f WHERE f MATCH 'hello'",
        "SELECT * FROM r",
        "SELECT snippet(f, 0, '', '', '', 3) FROM f",
    ):
        assert run_query(path, sql, LIMITS).outcome is Outcome.OK, sql
    for sql in ("WITH q AS (SELECT 1) INSERT INTO f VALUES ('x')", "WITH q AS (SELECT 1) DELETE FROM r"):
        assert run_query(path, sql, LIMITS).outcome is Outcome.FORBIDDEN, sql


RUNAWAYS = [
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x / 1000 FROM c",
    "SELECT count(*) FROM t a, t b, t c WHERE a.x + b.x + c.x = 1",
    "SELECT a.name, b.name FROM t a, t b, t c",
]


@pytest.mark.parametrize("sql", RUNAWAYS, ids=range(len(RUNAWAYS)))
def test_endless_queries_time_out(shop_db, sql):
    start = time.monotonic()
    result = run_query(shop_db, sql, ExecutionLimits(timeout_s=0.3, max_compared_rows=10**9))
    assert result.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - start < 5
    assert run_query(shop_db, "SELECT 1", LIMITS).outcome is Outcome.OK


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT length(randomblob(900000000))",
        "SELECT length(replace(replace(hex(zeroblob(100000000)), '0', '00'), '0', '00'))",
        "SELECT zeroblob(200000000)",
        "SELECT group_concat(hex(zeroblob(1000000))) FROM t",
    ],
)
def test_huge_values_are_out_of_memory(shop_db, sql):
    assert run_query(shop_db, sql, LIMITS).outcome is Outcome.OUT_OF_MEMORY


def test_the_heap_limit_holds():
    """In a process of its own: the limit is SQLite's, for the whole process, and only goes down."""
    script = """
import resource, sqlite3, sys, tempfile
from envs.bird.execute import ExecutionLimits, run_query
folder = tempfile.TemporaryDirectory()
path = folder.name + "/d.sqlite"
connection = sqlite3.connect(path)
connection.execute("CREATE TABLE t(a)")
connection.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(1000)])
connection.commit()
connection.close()
limits = ExecutionLimits(heap_bytes=32 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sort = "SELECT * FROM (SELECT randomblob(2000) AS r FROM t a, t b) ORDER BY r"
print(run_query(path, sort, limits).outcome, run_query(path, "SELECT count(*) FROM t", limits).outcome)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024)
folder.cleanup()
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["out_of_memory", "ok", "True"], done.stderr


def test_a_refused_allocation_is_out_of_memory():
    script = """
import resource, sqlite3, tempfile
from envs.bird.execute import ExecutionLimits, run_query
folder = tempfile.TemporaryDirectory()
path = folder.name + "/d.sqlite"
sqlite3.connect(path).execute("CREATE TABLE t(a)").connection.close()
resource.setrlimit(resource.RLIMIT_AS, (400 * 2**20, 400 * 2**20))
wide = "SELECT " + ", ".join(["b"] * 100) + " FROM (SELECT zeroblob(50000000) AS b LIMIT 1)"
print(run_query(path, wide, ExecutionLimits()).outcome, run_query(path, "SELECT 1", ExecutionLimits()).outcome)
folder.cleanup()
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["out_of_memory", "ok"], done.stderr


ODD_NAMES = ["plain", "a?mode=rwc", "a#b", "a%20b", "a b", "é", "a'b", 'a"b', "a&b=c", "a;b", "a+b", "a\\b", "a%"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_paths_open_that_very_file(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    path = folder / f"{name}.sqlite"
    connection = sqlite3.connect(os.fspath(path))
    connection.execute("CREATE TABLE t AS SELECT 'here' AS a")
    connection.commit()
    connection.close()
    before = digests(folder)
    assert run_query(path, "SELECT a FROM t", LIMITS).rows == (("here",),)
    assert run_query(os.fspath(path), "DELETE FROM t", LIMITS).outcome is Outcome.FORBIDDEN
    assert digests(folder) == before
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_path_that_is_not_utf8_opens(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xe9.sqlite"
    sqlite3.connect(path).execute("CREATE TABLE t(a)").connection.close()
    assert run_query(path, "SELECT count(*) FROM t", LIMITS).rows == ((0,),)


def test_two_leading_slashes_are_a_path_too(shop_db):
    assert run_query("/" + str(shop_db), "SELECT 1", LIMITS).outcome is Outcome.OK


def test_a_missing_file_is_not_created(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.sqlite"):
        run_query(tmp_path / "none.sqlite", "SELECT 1", LIMITS)
    with pytest.raises(ValueError, match="NUL"):
        read_only_uri("a\0b")
    assert list(tmp_path.iterdir()) == []


def test_a_database_left_in_wal_mode_gets_no_side_files(tmp_path):
    path = tmp_path / "wal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t AS SELECT 1 AS a")
    connection.commit()
    connection.close()
    before = digests(tmp_path)
    assert list(before) == ["wal.sqlite"]
    assert run_query(path, "SELECT a FROM t", LIMITS).rows == ((1,),)
    assert digests(tmp_path) == before


def test_pending_changes_are_refused_with_the_command_that_ends_them(tmp_path):
    path = tmp_path / "it's wal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t AS SELECT 1 AS a")
    connection.commit()
    for suffix in ("", "-wal"):
        (tmp_path / f"copy it's.sqlite{suffix}").write_bytes((tmp_path / f"it's wal.sqlite{suffix}").read_bytes())
    connection.close()
    copy = tmp_path / "copy it's.sqlite"
    with pytest.raises(PendingChangesError, match="changes waiting") as caught:
        open_read_only(copy)
    command = str(caught.value).split("first: ")[1]
    subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], check=True, timeout=60)
    assert run_query(copy, "SELECT a FROM t", LIMITS).rows == ((1,),)


def test_a_file_that_is_no_database_is_the_scorers_failure(tmp_path):
    path = tmp_path / "text.sqlite"
    path.write_text("This is not a database. " * 100)
    with pytest.raises(ScorerError, match="not a database"):
        run_query(path, "SELECT 1 FROM t", LIMITS)


def test_a_damaged_database_is_the_scorers_failure(tmp_path, shop_db):
    data = bytearray(shop_db.read_bytes())
    data[4096 * 3 :] = b"\xff" * (len(data) - 4096 * 3)
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(data)
    with pytest.raises(ScorerError, match="malformed"):
        run_query(path, "SELECT count(name) FROM t", LIMITS)


def test_nothing_is_left_open(shop_db):
    open_files = Path("/proc/self/fd")
    if not open_files.exists():
        pytest.skip("needs /proc")
    before = len(list(open_files.iterdir()))
    for sql in itertools.chain(HOSTILE, SQL_ERRORS):
        run_query(shop_db, sql, LIMITS)
    assert len(list(open_files.iterdir())) == before
