"""Queries and responses made up to break the scorer, each with the outcome that costs one sample and nothing else."""

import hashlib
import os
import sqlite3
import stat
import time

import pytest

from envs.bird.config import BirdEnvConfig
from envs.bird.execute import ExecutionLimits, run_query
from envs.bird.extract import parse_response
from envs.bird.outcome import Outcome
from envs.bird.reward import compute_score
from envs.bird.score import score_response

LIMITS = ExecutionLimits(timeout_s=20.0, max_kept_rows=3)
A, B = "a" * 3000, "%a" * 20_000


@pytest.fixture(scope="module")
def nasty_db(tmp_path_factory):
    """Tables of SQLite's modules, a view with a trigger, a generated column, text and names that are not UTF-8."""
    path = tmp_path_factory.mktemp("nasty") / "nasty.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, x REAL);
        CREATE VIRTUAL TABLE f USING fts5(body);
        CREATE VIRTUAL TABLE f4 USING fts4(body);
        INSERT INTO f VALUES ('hello world');
        INSERT INTO f4 VALUES ('hello world');
        CREATE VIEW v AS SELECT id, name FROM t;
        CREATE TRIGGER tr INSTEAD OF INSERT ON v BEGIN INSERT INTO t(name) VALUES ('x'); END;
        CREATE TABLE g(a, b AS (a * 2) STORED);
        INSERT INTO g(a) VALUES (1), (2);
        CREATE TABLE odd(s TEXT, b BLOB, n);
        INSERT INTO odd VALUES (CAST(x'E96C' AS TEXT), x'E96C', 1), (CAST(x'FF00' AS TEXT), x'', -0.0);
        CREATE TABLE named(abcdefg TEXT);
        INSERT INTO named VALUES ('v');
        """
    )
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(i, f"n{i % 7}", i / 3) for i in range(6000)])
    connection.commit()
    connection.close()
    path.write_bytes(path.read_bytes().replace(b"abcdefg TEXT", b"ab\xffdefg TEXT"))
    return path


OK, SQL_ERROR, MEMORY, FORBIDDEN = Outcome.OK, Outcome.SQL_ERROR, Outcome.OUT_OF_MEMORY, Outcome.FORBIDDEN
REFUSED = (FORBIDDEN, SQL_ERROR)
"""Builds of SQLite differ in which modules and functions they have at all."""

ATTACKS = {
    # memory
    "printf width": ("SELECT printf('%*d', 99999999, 1)", (OK, MEMORY)),
    "printf beyond the longest value": ("SELECT printf('%*d', 200000000, 1)", (MEMORY, SQL_ERROR, OK)),
    "hex of a blob": ("SELECT hex(randomblob(99999999))", MEMORY),
    "zeroblob": ("SELECT zeroblob(2000000000)", MEMORY),
    "quote of a blob": ("SELECT quote(zeroblob(90000000))", MEMORY),
    "replace by more": ("SELECT replace(printf('%5000000d', 1), ' ', printf('%5000d', 1))", MEMORY),
    "group_concat with a blob": ("SELECT group_concat(name, zeroblob(100000)) FROM t", MEMORY),
    "doubling text": ("WITH RECURSIVE c(x) AS (SELECT 'x' UNION ALL SELECT x || x FROM c) SELECT length(x) FROM c",
                      MEMORY),
    "json that doubles": ("WITH RECURSIVE c(x) AS (SELECT '[1]' UNION ALL SELECT '[' || x || ',' || x || ']' FROM c) "
                          "SELECT json(x) FROM c", MEMORY),
    # the parser
    "deep parentheses": ("SELECT " + "(" * 100_000 + "1" + ")" * 100_000, SQL_ERROR),
    "deep subqueries": ("SELECT * FROM " + "(SELECT * FROM " * 1000 + "t" + ")" * 1000, SQL_ERROR),
    "deep EXISTS": ("SELECT " + "EXISTS(SELECT " * 1000 + "1" + ")" * 1000, SQL_ERROR),
    "many signs": ("SELECT " + "- " * 100_000 + "1", SQL_ERROR),
    "many NOT": ("SELECT " + "NOT " * 100_000 + "1", SQL_ERROR),
    "a long sum": ("SELECT 1" + "+1" * 100_000, SQL_ERROR),
    "a deep chain of CTEs": ("WITH c0 AS (SELECT * FROM t), "
                             + ", ".join(f"c{i} AS (SELECT * FROM c{i - 1})" for i in range(1, 2000))
                             + " SELECT * FROM c1999", (OK, SQL_ERROR)),
    "2000 columns": ("SELECT " + ", ".join(["1"] * 2000), OK),
    "5000 columns": ("SELECT " + ", ".join(["1"] * 5000), SQL_ERROR),
    "500 compounds": ("SELECT 1" + " UNION ALL SELECT 1" * 499, OK),
    "5000 compounds": ("SELECT 1" + " UNION ALL SELECT 1" * 5000, SQL_ERROR),
    "65 tables": ("SELECT * FROM " + ", ".join(f"g a{i}" for i in range(65)), SQL_ERROR),
    "a list of 200,000": ("SELECT count(*) FROM t WHERE id IN (" + ", ".join(map(str, range(200_000))) + ")", OK),
    "1 MB of text": ("SELECT '" + "x" * 1_000_000 + "'", OK),
    "1 MB of comment": ("SELECT 1 /*" + "x" * 1_000_000, OK),
    "1 MB of semicolons": ("SELECT 1" + ";" * 1_000_000, OK),
    "1 MB of spaces": ("SELECT" + " " * 1_000_000 + "1", OK),
    "a name of 100,000": ("SELECT * FROM `" + "a" * 100_000 + "`", SQL_ERROR),
    "wide names": ("SELECT " + ", ".join(f"{i} AS \"{'n' * 500}{i}\"" for i in range(1000)), OK),
    # characters
    "NUL": ("SELECT 1\0", SQL_ERROR),
    "NUL in a string": ("SELECT 'a\0b'", SQL_ERROR),
    "NUL behind the end": ("SELECT 1;\0", FORBIDDEN),
    "half a surrogate pair": ("SELECT '\ud83d'", SQL_ERROR),
    "an escaped byte": ("SELECT '\udce9'", SQL_ERROR),
    "a byte-order mark": ("\ufeffSELECT 1", OK),
    "a no-break space": ("SELECT\u00a01", SQL_ERROR),
    "a full-width semicolon": ("SELECT 1\uff1b DROP TABLE t", SQL_ERROR),
    "a line separator": ("SELECT 1 --\u2028; DROP TABLE t", OK),
    "an error message that is not UTF-8": ("SELECT json_extract('{}', CAST(x'ff' AS TEXT))", SQL_ERROR),
    "a name that is not UTF-8": ("SELECT * FROM named", SQL_ERROR),
    "char of anything": ("SELECT char(0), char(55296), char(1114111), unicode(char(0))", OK),
    # patterns and numbers
    "LIKE that backtracks": (f"SELECT '{A}' LIKE '{B}b'", OK),
    "GLOB that backtracks": (f"SELECT '{A}' GLOB '{'*a' * 1000}b'", OK),
    "a pattern too long": ("SELECT 'a' LIKE '" + "%" * 50_001 + "'", SQL_ERROR),
    "REGEXP": ("SELECT 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaa' REGEXP '(a+)+$'", SQL_ERROR),
    "infinities": ("SELECT 9e999, -9e999, 9e999 - 9e999, -0.0", OK),
    "overflow": ("SELECT abs(-9223372036854775808)", SQL_ERROR),
    "digits by the thousand": ("SELECT " + "9" * 100_000, OK),
    "a frame of 1e308": ("SELECT sum(x) OVER (ORDER BY id RANGE BETWEEN 1e308 PRECEDING AND 1e308 FOLLOWING) FROM t",
                         OK),
    "deep json": ("SELECT json('" + "[" * 100_000 + "]" * 100_000 + "')", SQL_ERROR),
    "deep json_patch": ("SELECT json_patch('{}', '" + '{"a":' * 1500 + "1" + "}" * 1500 + "')", (OK, SQL_ERROR)),
    "a json path far out": ("SELECT json_set('{}', '$[999999999]', 1)", OK),
    # statements
    "generate_series": ("SELECT value FROM generate_series(1, 10)", (SQL_ERROR, FORBIDDEN, OK)),
    "load_extension": ("SELECT load_extension('x')", FORBIDDEN),
    "fts3_tokenizer": ("SELECT fts3_tokenizer('a', zeroblob(8))", REFUSED),
    "ATTACH in memory": ("ATTACH ':memory:' AS m", FORBIDDEN),
    "ATTACH nothing": ("ATTACH '' AS m", FORBIDDEN),
    "a pragma with an argument": ("PRAGMA encoding = 'UTF-16'", FORBIDDEN),
    "a pragma as a call": ("PRAGMA page_size(512)", FORBIDDEN),
    "a folder for temporary files": ("PRAGMA temp_store_directory = '/tmp'", FORBIDDEN),
    "a pragma as a table": ("SELECT * FROM pragma_user_version", REFUSED),
    "a pragma as a quoted table": ("SELECT * FROM [pragma_database_list]", REFUSED),
    "pragma functions": ("SELECT * FROM pragma_function_list", REFUSED),
    "an allowed pragma": ("PRAGMA\ttable_info=t", OK),
    "an allowed pragma as a table": ("SELECT * FROM main.\"pragma_TABLE_info\"('t')", OK),
    "RETURNING": ("INSERT INTO t(name) VALUES ('q') RETURNING id", FORBIDDEN),
    "RETURNING in a CTE": ("WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x", SQL_ERROR),
    "a write through a trigger": ("INSERT INTO v(name) VALUES ('q')", FORBIDDEN),
    "a write behind a CTE": ("WITH q AS (SELECT 1) INSERT INTO v(name) SELECT 'q' FROM q", FORBIDDEN),
    "VACUUM INTO": ("VACUUM INTO 'copy.sqlite'", FORBIDDEN),
    "EXPLAIN of a write": ("EXPLAIN DROP TABLE t", FORBIDDEN),
    "EXPLAIN of a pragma": ("EXPLAIN PRAGMA user_version = 1", FORBIDDEN),
    "writefile": ("SELECT writefile('x', 'y')", REFUSED),
    "readfile": ("SELECT readfile('/etc/passwd')", REFUSED),
    "edit": ("SELECT edit('x')", REFUSED),
    "sqlite_dbpage": ("SELECT * FROM sqlite_dbpage", REFUSED),
    "dbstat": ("SELECT sum(pgsize) FROM dbstat", REFUSED),
    "sqlite_stmt": ("SELECT sql FROM sqlite_stmt", REFUSED),
    "fts5vocab": ("SELECT * FROM fts5vocab('f', 'row')", REFUSED),
    "an index merged by a SELECT": ("SELECT optimize(f4) FROM f4", REFUSED),
    "an index merged by an INSERT": ("INSERT INTO f(f) VALUES ('optimize')", FORBIDDEN),
    "rtreecheck": ("SELECT rtreecheck('t')", REFUSED),
    "a temporary view": ("CREATE TEMP VIEW z AS SELECT 1", FORBIDDEN),
    "two statements": ("SELECT 1; SELECT 1", FORBIDDEN),
    "two statements, one in a comment": ("SELECT 1; -- SELECT 2\n/* SELECT 3 */;", OK),
    "a semicolon in every kind of quotes": ("SELECT ';', \";\", x'3b' FROM g AS [;] /* ; */ WHERE `;`.a > 0", OK),
    "a transaction around it": ("BEGIN; SELECT 1; COMMIT", FORBIDDEN),
    "MySQL": ("SHOW TABLES", SQL_ERROR),
    "a shell's command": (".shell touch x", SQL_ERROR),
    "a generated column": ("SELECT b FROM g", OK),
    "a limit hidden in a comment": ("SELECT id FROM t -- LIMIT 1", OK),
    "a limit hidden in a string": ("SELECT id, ' LIMIT 1' FROM t", OK),
    "a parameter": ("SELECT ?1, :a, @b, $c", SQL_ERROR),
}  # fmt: skip


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 80


def test_each_attack_ends_as_it_must_and_leaves_nothing(nasty_db, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = digests(nasty_db.parent)
    wrong = {}
    for name, (sql, allowed) in ATTACKS.items():
        result = run_query(nasty_db, sql, LIMITS)
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        if result.outcome not in allowed or len(result.error) > 500:
            wrong[name] = (result.outcome, result.error)
        assert run_query(nasty_db, "SELECT count(*) FROM t", LIMITS).rows == ((6000,),), name
    assert wrong == {}
    assert digests(nasty_db.parent) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a limit hidden in a comment", "a limit hidden in a string"])
def test_what_looks_like_a_limit_limits_nothing(nasty_db, name):
    assert run_query(nasty_db, ATTACKS[name][0], LIMITS).fingerprint.row_count == 6000


SLOW = {
    "large rows, few of SQLite's steps": "SELECT zeroblob(50000000) FROM t",
    "a cross join of six": "SELECT 1 FROM t a, t b, t c, t d, t e, t f WHERE a.x + b.x + c.x + d.x + e.x + f.x = -1",
    "64 tables": "SELECT count(*) FROM " + ", ".join(f"t a{i}" for i in range(64)),
    "a repeating CTE": "WITH RECURSIVE c AS (SELECT 1 x UNION ALL SELECT x FROM c) SELECT x FROM c WHERE x=2",
    "EXISTS": "SELECT EXISTS (SELECT 1 FROM t a, t b, t c WHERE a.x + b.x + c.x = -1)",
    "a correlated subquery": "SELECT (SELECT count(*) FROM t b, t c WHERE b.x + c.x < a.x) FROM t a",
    "a window over a cross join": "SELECT max(a.x) OVER (ORDER BY b.x ROWS 6000 PRECEDING) FROM t a, t b",
    "a sort of a cross join": "SELECT a.id FROM t a, t b ORDER BY a.name || b.name",
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_queries_stop_at_their_time(nasty_db, name):
    limits = ExecutionLimits(timeout_s=0.3, max_kept_rows=0, max_compared_rows=10**9)
    start = time.monotonic()
    result = run_query(nasty_db, SLOW[name], limits)
    assert result.outcome in (Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY)
    assert time.monotonic() - start < 10


def test_two_million_rows_are_compared_or_said_to_be_too_many(nasty_db):
    million = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < {}) SELECT x % 7 FROM c"
    assert run_query(nasty_db, million.format(2_000_000), LIMITS).outcome is Outcome.TOO_LARGE
    whole = run_query(nasty_db, million.format(200_000), ExecutionLimits(timeout_s=60, max_kept_rows=0))
    assert (whole.fingerprint.row_count, whole.fingerprint.distinct_row_count) == (200_000, 7)


EQUAL = {
    "integer and real": ("SELECT 1", "SELECT 1.0", True),
    "zero and minus zero": ("SELECT 0.0", "SELECT -0.0", True),
    "infinity": ("SELECT 9e999", "SELECT 1e400", True),
    "plus and minus infinity": ("SELECT 9e999", "SELECT -9e999", False),
    "no number is NULL": ("SELECT 9e999 - 9e999", "SELECT NULL", True),
    "text and number": ("SELECT '1'", "SELECT 1", False),
    "text and BLOB": ("SELECT 'a'", "SELECT x'61'", False),
    "empty text and NULL": ("SELECT ''", "SELECT NULL", False),
    "empty text and empty BLOB": ("SELECT ''", "SELECT x''", False),
    "large integers": ("SELECT 9007199254740993", "SELECT 9007199254740992.0", False),
    "the largest integer as real": ("SELECT 9223372036854775807", "SELECT 9223372036854775807.0", False),
    "true": ("SELECT 1 = 1", "SELECT TRUE", True),
    "text with a NUL": ("SELECT CAST(x'610062' AS TEXT)", "SELECT 'a'", False),
    "bytes that are not UTF-8": ("SELECT CAST(x'ff' AS TEXT)", "SELECT CAST(x'fe' AS TEXT)", False),
    "a replacement character": ("SELECT CAST(x'ff' AS TEXT)", "SELECT char(65533)", False),
    "composed and decomposed": ("SELECT char(233)", "SELECT 'e' || char(769)", False),
    "trailing spaces": ("SELECT 'a '", "SELECT 'a'", False),
    "no rows, another width": ("SELECT 1 WHERE 0", "SELECT 1, 2 WHERE 0", True),
    "rows of another width": ("SELECT 1", "SELECT 1, NULL", False),
    "boundaries of cells": ("SELECT 'a, b', 'c'", "SELECT 'a', 'b, c'", False),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equality_is_that_of_sets_of_tuples(nasty_db, name):
    left, right, equal = EQUAL[name]
    record = compute_score("bird", left, right, {"db_path": str(nasty_db)})
    assert (record["score"] == 1.0) is equal
    connection = sqlite3.connect(nasty_db)
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    rows = [set(connection.execute(sql).fetchall()) for sql in (left, right)]
    connection.close()
    assert (rows[0] == rows[1]) is equal


RESPONSES = {
    # name: (response, query, format right)
    "prose around a block": ("<think>x</think>Sure! Here:\n```sql\nSELECT 1\n```\nIt lists one.", "SELECT 1", True),
    "prose in the block": ("<think>x</think>```sql\nHere it is: SELECT 1\n```", "Here it is: SELECT 1", True),
    "a fence in a fence": ("<think>x</think>````md\n```sql\nSELECT 1\n```\n````", "SELECT 1", True),
    "an unclosed think": ("<think>let me ```sql\nSELECT 1\n```", "SELECT 1", False),
    "a think closed twice": ("<think>x</think>```sql\nSELECT 1\n```</think>", None, False),
    "a think after the answer": ("```sql\nSELECT 1\n```<think>x</think>", None, False),
    "an end of thinking in a string": ("<think>x</think>```sql\nSELECT '</think>'\n```", "'", False),
    "a think in another case": ("<THINK>x</THINK>```sql\nSELECT 1\n```", "SELECT 1", False),
    "a query in the think only": ("<think>```sql\nSELECT 1\n```</think>I give up.", None, False),
    "two blocks": ("<think>x</think>```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", "SELECT 2", True),
    "a last block of comments": ("<think>x</think>```sql\nSELECT 1\n```\n```sql\n-- or so\n```", "SELECT 1", True),
    "another language": ("<think>x</think>```python\nprint('SELECT 1')\n```", None, False),
    "json with a lone surrogate": ('<think>x</think>```json\n{"sql": "SELECT \\ud83d"}\n```', "SELECT \ud83d", True),
    "json that is deep": ("<think>x</think>```json\n" + "[" * 100_000 + "\n```", None, False),
    "a promise": ("<think>x</think>I will select the best one with care.", None, False),
    "only fences": ("```" * 50_000, None, False),
    "nothing but thinking": ("<think>" * 20_000, None, False),
    "a digit in Arabic script": ("<think>x</think>```sql\nSELECT \u0661\n```", "SELECT \u0661", True),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_odd_responses(nasty_db, name):
    response, sql, format_correct = RESPONSES[name]
    answer = parse_response(response)
    if name == "an end of thinking in a string":
        # what stands behind the last end of thinking counts, whatever it is
        assert not answer.format_correct
    else:
        assert (answer.sql, answer.format_correct) == (sql, format_correct)
    score = score_response(response, ["SELECT 'nothing gives this'"], str(nasty_db), BirdEnvConfig())
    assert score.judged and score.reward <= 0.1


LONG = 128_000
REPEATED = [
    "SELECT ", "SELECT\n", "WITH a AS ", "WITH a(", "`", "`a ", "`SELECT 1 ", " a`b`", "```", "```sql\n", "``` ",
    "```json\n{", "```json\n{}\n```\n", "'", '"a', "[", "/*", "-", "--\n", ";", "a ", "<think>", "</think>", "\n",
    "\n \n", " ", "(SELECT ", "SELECT ;", "$", "\u00e9", "select from ", "WITH" + " " * 500, "WITH a" + " " * 500,
    "\n" + " " * 300 + "y", "WITH a (" + "b" * 1990, '"sql":', "{", "<",
]  # fmt: skip


def test_reading_a_response_takes_time_in_proportion_to_its_length():
    """Four times the text, about four times as long: nothing in it may be quadratic, whatever the policy repeats."""

    def seconds(text):
        start = time.process_time()
        parse_response(text)
        return time.process_time() - start

    slow = {}
    for piece in REPEATED:
        for before in ("", "`SELECT 1", "```sql\nSELECT "):
            text = before + piece * (LONG // len(piece))
            if seconds(text) > 0.5:
                ratio = min(seconds(text) for _ in range(2)) / min(seconds(text[: LONG // 4]) for _ in range(2))
                if ratio > 8:
                    slow[before + piece] = ratio
    assert slow == {}


def test_a_folder_that_cannot_be_written_to(tmp_path):
    folder = tmp_path / "read only \u00e9\u4e2d?#%20"
    folder.mkdir()
    path = folder / "d\u00e9b.sqlite"
    connection = sqlite3.connect(os.fspath(path))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t AS SELECT 'here' AS a")
    connection.commit()
    connection.close()
    before = digests(folder)
    path.chmod(stat.S_IRUSR)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        for sql in ("SELECT a FROM t", "SELECT a FROM t ORDER BY random()"):
            assert run_query(path, sql, LIMITS).rows == (("here",),)
        assert run_query(path, "WITH q AS (SELECT 1) DELETE FROM t", LIMITS).outcome is Outcome.FORBIDDEN
    finally:
        folder.chmod(stat.S_IRWXU)
    assert digests(folder) == before
