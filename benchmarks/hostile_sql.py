"""What a policy under training may write, by the thousand: ``python -m benchmarks.hostile_sql [--count 10000]``

Responses from a seeded fuzzer (a grammar of SQLite's dialect with its dangerous corners, then mutations and splices of
the text, then odd ways to present it) are scored by bird in the process pool at a time limit of 0.2 s. One job in ten
is healthy, with a reward that is known. Four counts, each of which must be 0:

hangs: no answer from any worker for a minute.
surviving_processes: processes of the pool, or started by one of its workers, once it is closed.
files_changed: files created, changed or removed beside the database, in the working directory, or in the folder for
temporary files.
wrong_rewards: a healthy job with another reward than its own; a hostile one that is not judged, or that earns 1.0: the
gold gives a word that only another database beside the first one holds.

About five minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import secrets
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.report import print_line
from envs.bird.env import BirdEnv
from integrations.arctic_rl.scoring import EnvPool, ScoringConfig

TIME_LIMIT_S, HEALTHY_TIME_LIMIT_S, HANG_S = 0.2, 60.0, 60.0
HEALTHY_SHARE = 0.1
IN_FLIGHT = 64

FILES = ("secret.sqlite", "new.sqlite", ":memory:", "", "file:new.sqlite?mode=rwc", "file:secret.sqlite?mode=ro",
         "/etc/passwd", "../new.sqlite", "\udce9.sqlite")  # fmt: skip
FUNCTIONS = {
    0: ("changes", "last_insert_rowid", "pi", "random", "sqlite_version", "sqlite_source_id", "total_changes",
        "fts5_source_id", "date", "julianday"),
    1: ("abs", "avg", "char", "count", "date", "exp", "fts3_tokenizer", "fts5", "hex", "json", "json_array",
        "json_group_array", "json_quote", "json_valid", "length", "load_extension", "lower", "ltrim", "max", "min",
        "quote", "randomblob", "readfile", "round", "rtreecheck", "sign", "soundex", "sum", "total", "trim", "typeof",
        "unicode", "upper", "zeroblob", "unhex", "edit", "lsmode", "optimize", "sqlite_offset", "group_concat",
        "sqlite_compileoption_get", "subtype", "eval", "unixepoch", "writefile", "matchinfo", "offsets", "bm25"),
    2: ("coalesce", "date", "format", "fts3_tokenizer", "glob", "group_concat", "ifnull", "instr", "json_extract",
        "json_group_object", "json_object", "json_patch", "json_remove", "like", "likelihood", "load_extension", "max",
        "min", "mod", "nullif", "pow", "printf", "round", "rtreenode", "sqlite_log", "strftime", "substr", "writefile",
        "sqlar_uncompress", "rtreecheck", "datetime", "char", "regexp", "match"),
    3: ("iif", "json_set", "like", "printf", "replace", "substr", "json_insert", "highlight", "format", "coalesce"),
}  # fmt: skip
WINDOW_FUNCTIONS = ("row_number()", "rank()", "dense_rank()", "lag(id)", "lead(id, 2)", "ntile(4)", "sum(x)",
                    "first_value(name)", "nth_value(id, 2)", "percent_rank()", "group_concat(name)")  # fmt: skip
UNKNOWN_FUNCTIONS = ("nosuchfunction(1)", "fts3(1)", "match(1, 2)", "abs()", "replace(1)", "json_each('[1]')")
TABLES = (
    "t", "t", "t", "fruit", "v", "f", "r", "(SELECT * FROM t)", "sqlite_master", "sqlite_temp_master", "sqlite_schema",
    "main.t", "temp.t", "aux.t", "secret", "dbstat", "sqlite_dbpage", "sqlite_stmt", "fts3tokenize", "fts5vocab",
    "bytecode('SELECT 1')", "tables_used('SELECT 1')", "json_each('[1,2,3]')", "json_tree('{\"a\":[1,{\"b\":2}]}')",
    "generate_series(1, 1000000000)", "pragma_database_list", "pragma_table_info('t')", "pragma_table_xinfo('t')",
    "pragma_journal_mode", "pragma_writable_schema", "pragma_function_list", "pragma_module_list",
    "pragma_table_list", "pragma_integrity_check", "pragma_wal_checkpoint", "pragma_mmap_size(100000000)",
    "fsdir('.')", "readfile('/etc/passwd')", "csv", "zipfile('x.zip')", "vfsstat", "completion('SEL')",
)  # fmt: skip
PRAGMAS = (
    "writable_schema", "journal_mode", "user_version", "page_size", "query_only", "hard_heap_limit", "soft_heap_limit",
    "temp_store", "temp_store_directory", "data_store_directory", "optimize", "incremental_vacuum", "integrity_check",
    "quick_check", "database_list", "table_info", "table_list", "foreign_key_check", "locking_mode", "mmap_size",
    "cache_size", "cache_spill", "wal_checkpoint", "case_sensitive_like", "trusted_schema", "encoding",
    "compile_options", "threads", "secure_delete", "shrink_memory", "automatic_index", "reverse_unordered_selects",
    "schema_version", "analysis_limit", "busy_timeout", "key", "rekey", "recursive_triggers", "stats", "nosuchpragma",
)  # fmt: skip
STATEMENTS = (
    "ATTACH '{file}' AS e", "ATTACH DATABASE '{file}' AS e KEY 'k'", "DETACH main", "VACUUM", "VACUUM INTO '{file}'",
    "CREATE TABLE z(a)", "CREATE TEMP TABLE z AS SELECT * FROM t", "CREATE VIEW z AS SELECT 1",
    "CREATE VIRTUAL TABLE z USING fts5(a)", "CREATE VIRTUAL TABLE temp.z USING csv(filename='{file}')",
    "CREATE TRIGGER z AFTER INSERT ON t BEGIN SELECT 1; END", "CREATE INDEX z ON t(name)",
    "INSERT INTO t(name) VALUES ('x')", "INSERT INTO t(name) VALUES ('x') RETURNING *",
    "INSERT INTO f(f) VALUES ('optimize')", "INSERT INTO f(f, rank) VALUES ('rank', 'bm25(10.0)')",
    "REPLACE INTO t(id) VALUES (1)", "UPDATE t SET name = 'x' RETURNING id", "UPDATE sqlite_master SET sql = ''",
    "DELETE FROM t RETURNING *", "DROP TABLE t", "DROP VIEW IF EXISTS v", "ALTER TABLE t RENAME TO u",
    "ALTER TABLE t ADD COLUMN z", "ANALYZE", "REINDEX", "BEGIN IMMEDIATE", "COMMIT", "ROLLBACK", "SAVEPOINT s",
    "RELEASE s", "WITH q AS (SELECT 1) INSERT INTO t(name) SELECT * FROM q", "WITH q AS (SELECT 1) DELETE FROM t",
    "EXPLAIN ATTACH '{file}' AS e", "EXPLAIN QUERY PLAN DELETE FROM t", "EXPLAIN VACUUM INTO '{file}'",
    "SELECT * FROM t INTO OUTFILE '{file}'", ".shell touch new", ".open {file}", "COPY t TO '{file}'",
)  # fmt: skip
BOMBS = (
    "SELECT length(randomblob(900000000))", "SELECT zeroblob(2000000000)", "SELECT hex(zeroblob(90000000))",
    "SELECT replace(replace(hex(zeroblob(50000000)), '0', '0000'), '0', '0000')",
    "SELECT printf('%999999999d', 1)", "SELECT printf('%.999999999f', 1)", "SELECT group_concat(hex(zeroblob(999))) "
    "FROM t a, t b", "SELECT json_group_array(a.name) FROM t a, t b", "SELECT a.*, b.*, c.* FROM t a, t b, t c",
    "WITH RECURSIVE c(x) AS (SELECT 'x' UNION ALL SELECT x || x FROM c) SELECT length(x) FROM c",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x + 1 FROM c) SELECT * FROM c ORDER BY x DESC",
    "SELECT * FROM (SELECT randomblob(1000) r FROM t a, t b) ORDER BY r",
    "SELECT count(*) OVER (ORDER BY a.x, b.x) FROM t a, t b", "SELECT DISTINCT a.x + b.x + c.x FROM t a, t b, t c",
    "SELECT '{a}' LIKE '{percent}b'", "SELECT '{a}' GLOB '{star}b'",
)  # fmt: skip
STUCK = (
    "SELECT instr(hex(zeroblob(40000000)), hex(zeroblob(19000000)) || '1')",
    "SELECT length(replace(hex(zeroblob(30000000)), hex(zeroblob(6000)) || '1', ''))",
    "SELECT hex(zeroblob(20000000)) LIKE '%' || substr(hex(zeroblob(20000)), 1, 40000) || '1%'",
)
RUNAWAYS = (
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "SELECT count(*) FROM t a, t b, t c, t d WHERE a.x + b.x + c.x + d.x = 1",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT 1 WHERE 2 IN (SELECT x FROM c)",
    "SELECT (WITH RECURSIVE c(x) AS (SELECT id UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c) FROM t",
)


class Fuzzer:
    """Hostile responses, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def response(self) -> str:
        """A response of the policy."""
        query = self.query()
        if self.rng.random() < 0.2:
            query = self._mutated(query)
        if self.rng.random() < 0.05:
            query = self._spliced(query, self.query())
        return self._presented(query)

    def query(self) -> str:
        """A query, before it is mutated."""
        kind = self.rng.random()
        if kind < 0.55:
            return self._select(3)
        if kind < 0.75:
            return self._filled(self.rng.choice(STATEMENTS))
        if kind < 0.82:
            return self._pragma()
        if kind < 0.88:
            return self._filled(self.rng.choice(BOMBS))
        if kind < 0.93:
            return self.rng.choice(RUNAWAYS)
        if kind < 0.935:
            return self.rng.choice(STUCK)
        if kind < 0.97:
            return f"{self._select(1)}; {self._filled(self.rng.choice(STATEMENTS))}"
        return self._extreme()

    def _filled(self, template: str) -> str:
        count = self.rng.choice((10, 1000, 49_000))
        filled = template.replace("{file}", self.rng.choice(FILES)).replace("{a}", "a" * count)
        return filled.replace("{percent}", "%a" * (count // 2)).replace("{star}", "*a" * (count // 2))

    def _pragma(self) -> str:
        name = self.rng.choice(PRAGMAS)
        argument = self.rng.choice(("", " = 1", " = 'x'", "(t)", "(0)", " = WAL", " = -1", "('new.sqlite')"))
        return f"PRAGMA {self.rng.choice(('', 'main.', 'temp.', 'e.'))}{name}{argument}"

    def _select(self, depth: int, *, columns: int | None = None) -> str:
        rng = self.rng
        width = rng.choice((1, 1, 2, 3)) if columns is None else columns
        selected = ["*"] if columns is None and rng.random() < 0.15 else [self._value(depth) for _ in range(width)]
        text = f"SELECT {rng.choice(('', '', 'DISTINCT ', 'ALL '))}{', '.join(selected)} FROM {self._sources(depth)}"
        if rng.random() < 0.4:
            text += f" WHERE {self._value(depth)}"
        if rng.random() < 0.2:
            text += f" GROUP BY {self._value(1)}"
            if rng.random() < 0.5:
                text += f" HAVING {self._value(1)}"
        if depth > 1 and rng.random() < 0.15 and selected != ["*"]:
            compound = rng.choice(("UNION", "UNION ALL", "INTERSECT", "EXCEPT"))
            text += f" {compound} {self._select(depth - 1, columns=width)}"
        if rng.random() < 0.3:
            text += f" ORDER BY {rng.choice(('1', '1', '1 DESC', self._value(1)))}"
        if rng.random() < 0.3:
            text += f" LIMIT {rng.choice(('5', '-1', '1e9', '(SELECT 3)', '5 OFFSET 2', '9223372036854775807'))}"
        if depth > 1 and rng.random() < 0.15:
            recursion = f"c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < {rng.choice((9, 10**9))})"
            plain = f"c AS ({self._select(depth - 1, columns=1)})"
            text = f"WITH {rng.choice((f'RECURSIVE {recursion}', plain))} {text}"
        if rng.random() < 0.05:
            text = f"EXPLAIN {rng.choice(('', 'QUERY PLAN '))}{text}"
        return text

    def _sources(self, depth: int) -> str:
        """One to three tables, the first one with the columns that expressions use."""
        rng = self.rng
        sources = ["t AS a" if rng.random() < 0.9 else rng.choice(TABLES)]
        sources += [rng.choice(TABLES) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
        if depth > 1 and rng.random() < 0.1:
            sources.append(f"({self._select(depth - 1)})")
        joint = rng.choice((", ", " JOIN ", " LEFT JOIN ", " NATURAL JOIN ", " CROSS JOIN ", " FULL JOIN "))
        return joint.join(sources)

    def _value(self, depth: int) -> str:
        """An expression."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.005:
            return rng.choice(UNKNOWN_FUNCTIONS)
        if kind < 0.01:
            return rng.choice(
                ("?", ":p", "'\udce9'", "nosuchcolumn", "*", "t.*", "'unclosed", "c.i", "RAISE(ABORT, 'x')", "#1")
            )
        if depth <= 0 or kind < 0.35:
            return rng.choice(
                ("a.id", "a.name", "a.x", "a.rowid", "1", "-1", "0", "1.5e308", "9223372036854775807", "NULL", "''",
                 "'a'", '"a text"', "x'00ff'", "CURRENT_TIMESTAMP", "'\u00e9'", "0x7f", "'; DROP TABLE t; --'", "2000",
                 "/* c */ 2", "9e999", "'2020-01-01'", "'[1, {\"b\": 2}]'", "'$.b'", "'new.sqlite'", "'now'",
                 "1000000")
            )  # fmt: skip
        if kind < 0.65:
            arity = rng.choice((0, 1, 1, 1, 2, 2, 3))
            return f"{rng.choice(FUNCTIONS[arity])}({', '.join(self._value(depth - 1) for _ in range(arity))})"
        if kind < 0.7:
            frame = rng.choice(("", f" ORDER BY {self._value(0)}", " PARTITION BY a.x ORDER BY a.id ROWS 3 PRECEDING"))
            return f"{rng.choice(WINDOW_FUNCTIONS)} OVER ({frame})"
        if kind < 0.85:
            operator = rng.choice(("+", "-", "*", "/", "%", "||", "=", "<>", "<", "LIKE", "GLOB", "REGEXP", "MATCH",
                                   "IS", "AND", "OR", "->", "->>", "<<", "IS DISTINCT FROM"))  # fmt: skip
            return f"({self._value(depth - 1)} {operator} {self._value(depth - 1)})"
        if kind < 0.9:
            return f"({self._select(depth - 1, columns=1)})"
        if kind < 0.93:
            return f"({self._value(depth - 1)} IN ({self._select(depth - 1, columns=1)}))"
        if kind < 0.95:
            return f"EXISTS ({self._select(depth - 1)})"
        if kind < 0.97:
            return f"CASE WHEN {self._value(depth - 1)} THEN {self._value(depth - 1)} END"
        return f"CAST({self._value(depth - 1)} AS {rng.choice(('TEXT', 'BLOB', 'REAL', 'INTEGER', 'nonsense'))})"

    def _extreme(self) -> str:
        rng = self.rng
        size = rng.choice((100, 2000, 30_000))
        return rng.choice(
            (
                "SELECT " + "(" * size + "1" + ")" * size,
                "SELECT " + "-" * size + "1",
                "SELECT " + "NOT " * size + "1",
                "SELECT " + ", ".join(["id"] * min(size, 2500)) + " FROM t",
                "SELECT 1" + " UNION ALL SELECT 1" * size,
                "SELECT 1" + " + 1" * size,
                "SELECT '" + "x" * size * 10 + "'",
                "SELECT " + "'" * size,
                "SELECT * FROM " + ", ".join(f"t a{n}" for n in range(min(size, 70))),
                "SELECT (" * min(size, 500) + "SELECT 1" + ")" * min(size, 500),
                "SELECT id FROM t WHERE id IN (" + ",".join(map(str, range(size))) + ")",
                "SELECT " + "json_array(" * min(size, 900) + "1" + ")" * min(size, 900),
                f"SELECT json_valid('{'[' * size}'), json('{'[' * size}{']' * size}')",
                "SELECT CASE" + " WHEN 1 THEN 1" * size + " END",
                f"WITH {', '.join(f'c{n} AS (SELECT * FROM t)' for n in range(min(size, 300)))} SELECT * FROM c0",
                "/*" * size + " SELECT 1 " + "*/" * size,
                "--" + "x" * size + "\nSELECT 1",
                "\n" * size + "SELECT 1",
                "SELECT 1" + ";" * size,
                f"SELECT date('now'{', "+1 day"' * min(size, 120)})",
            )
        )

    def _mutated(self, text: str) -> str:
        characters = list(text)
        for _ in range(self.rng.choice((1, 1, 1, 2, 5))):
            index = self.rng.randrange(len(characters) + 1)
            action = self.rng.random()
            if action < 0.3:
                del characters[index : index + self.rng.choice((1, 1, 3, 10))]
            elif action < 0.7:
                characters.insert(index, self.rng.choice(_SPICE))
            elif action < 0.85 and characters:
                start = self.rng.randrange(len(characters))
                characters[index:index] = characters[start : start + self.rng.choice((2, 10, 40))]
            elif characters:
                characters[index % len(characters)] = characters[index % len(characters)].swapcase()
        return "".join(characters)

    def _spliced(self, left: str, right: str) -> str:
        return left[: self.rng.randrange(len(left) + 1)] + right[self.rng.randrange(len(right) + 1) :]

    def _presented(self, query: str) -> str:
        rng = self.rng
        think = rng.choice(("<think>Let me see.</think>\n", "", "<think>", "</think>", "<think></think></think>",
                            "Thought: none.\n</think>\n"))  # fmt: skip
        if rng.random() < 0.6:
            return f"<think>So.</think>\n```sql\n{query}\n```"
        return think + rng.choice(
            (
                query, f"```sql\n{query}", f"```\n{query}\n```", f"```SQL {query}```", f"`{query}`",
                f"````sql\n```sql\n{query}\n````", f"The answer is: {query}",
                f"```sql\nSELECT 1\n```\nor\n```sql\n{query}\n```",
                f"```python\ncursor.execute('{query}')\n```", f'```json\n{{"sql": "{query}"}}\n```',
                f"```sql\n{query}\n```\n```sql\n-- nothing\n```", f"I cannot answer. {query[:20]}",
            )
        )  # fmt: skip


_SPICE = (
    "'", '"', "`", "[", "]", "(", ")", ";", "--", "/*", "*/", "\0", "\x1a", " ", "\n", "\r", "\t", "\u00a0", "\u2028",
    "\udce9", "\ud83d", "\u00e9", "\uff0c", "\uff1b", "%", "\\", "$", "@", "#", "?1", "||", "``` ", "</think>", "0",
    "LIMIT 1", " UNION SELECT ", " ATTACH 'new.sqlite' AS z ", "\ufeff", "9" * 40,
)  # fmt: skip


@dataclass
class Job:
    """A response, and what it must earn; None = anything below 1.0 that is judged."""

    response: str
    gold: str
    timeout_s: float
    reward: float | None = None


@dataclass
class Findings:
    """What went wrong, and how the responses ended."""

    hangs: int = 0
    surviving_processes: int = 0
    files_changed: int = 0
    wrong_rewards: int = 0
    examples: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def write_databases(folder: Path, word: str) -> Path:
    """The database that queries run on, and one beside it that none may read."""
    with sqlite3.connect(folder / "data.sqlite") as connection:
        connection.executescript(
            """
            CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, x REAL);
            CREATE TABLE fruit(name TEXT, price REAL);
            CREATE VIEW v AS SELECT name FROM t WHERE id < 10;
            CREATE VIRTUAL TABLE f USING fts5(body);
            CREATE VIRTUAL TABLE r USING rtree(id, low, high);
            INSERT INTO fruit VALUES ('apple', 1.0), ('apple', 1.0), ('pear', 2.5), (CAST(x'E96C' AS TEXT), NULL);
            INSERT INTO f VALUES ('hello world'), ('hello there');
            INSERT INTO r VALUES (1, 2, 3);
            """
        )
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", ((n, f"n{n % 7}", n / 3) for n in range(6000)))
    connection.close()
    with sqlite3.connect(folder / "secret.sqlite") as connection:
        connection.execute("CREATE TABLE secret(word)")
        connection.execute("INSERT INTO secret VALUES (?)", (word,))
    connection.close()
    return folder / "data.sqlite"


def make_jobs(count: int, seed: int, word: str) -> Iterator[Job]:
    """Hostile jobs, and healthy ones between them."""
    fuzzer, rng = Fuzzer(seed), random.Random(seed + 1)
    for number in range(count):
        yield Job(fuzzer.response(), f"SELECT '{word}'", TIME_LIMIT_S)
        if rng.random() < HEALTHY_SHARE:
            right = rng.random() < 0.5
            sql = f"SELECT count(*), {number} FROM t WHERE id < {number % 6000 + (0 if right else 1)}"
            gold = f"SELECT {number % 6000}, {number}"
            response = f"<think>So.</think>\n```sql\n{sql}\n```"
            yield Job(response, gold, HEALTHY_TIME_LIMIT_S, 1.0 if right else 0.1)


def digests(*folders: Path) -> dict[str, str]:
    """SHA-256 of every file below the folders."""
    files = [path for folder in folders for path in folder.rglob("*")]
    return {
        os.fspath(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in files
    }


async def score_all(pool: EnvPool, database: Path, batch: list[Job], found: Findings, *, show: bool) -> None:
    """Scores every job and notes wrong rewards and hangs."""
    waiting, running = iter(batch), set()
    progress = tqdm(total=len(batch), desc="hostile", file=sys.stderr, disable=not show)

    async def one(job: Job) -> None:
        row = {"reward_model": {"ground_truth": job.gold}, "extra_info": {"db_path": str(database)}}
        step = await pool.call(BirdEnv({"timeout_s": job.timeout_s}, row), "step", job.response)
        metadata, reward = step["metadata"], step["reward"]
        found.outcomes[metadata["outcome"]] += 1
        healthy = job.reward is not None
        if not metadata["judged"] or (reward != job.reward if healthy else reward >= 1.0):
            found.wrong_rewards += 1
            found.examples.append(f"{reward} {metadata['outcome']} {metadata['error']}: {job.response[:300]!r}")
        progress.update()

    with contextlib.closing(progress):
        while True:
            for job in waiting:
                running.add(asyncio.ensure_future(one(job)))
                if len(running) >= IN_FLIGHT:
                    break
            if not running:
                return
            done, running = await asyncio.wait(running, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                found.hangs += len(running)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                return


def run(count: int, *, seed: int, workers: int, show: bool = True) -> Findings:
    """Fuzz in a folder of its own; the working directory is changed meanwhile."""
    found, word, began = Findings(), secrets.token_hex(16), time.perf_counter()
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        data, here, temporary = (Path(root) / name for name in ("data", "here", "temporary"))
        for folder in (data, here, temporary):
            folder.mkdir()
        database = write_databases(data, word)
        os.link(data / "secret.sqlite", here / "secret.sqlite")
        before = digests(data, here, temporary)
        with _environment(here, TMPDIR=str(temporary), SQLITE_TMPDIR=str(temporary)):
            asyncio.run(_run_pool(database, list(make_jobs(count, seed, word)), workers, found, show))
        after = digests(data, here, temporary)
    assert Path.cwd() == home
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    found.files_changed = len(changed)
    found.examples.extend(sorted(changed))
    survivors = [process for process in psutil.Process().children(recursive=True) if process.pid not in mine]
    # multiprocessing's own, which lives as long as this process
    survivors = [process for process in survivors if "resource_tracker" not in " ".join(process.cmdline())]
    found.surviving_processes = len(survivors)
    found.seconds = time.perf_counter() - began
    return found


async def _run_pool(database: Path, batch: list[Job], workers: int, found: Findings, show: bool) -> None:
    pool = EnvPool(ScoringConfig(workers=workers, modules=("envs",)))
    try:
        await score_all(pool, database, batch, found, show=show)
    finally:
        found.counters = pool.counters
        await pool.aclose()


@contextlib.contextmanager
def _environment(folder: Path, **variables: str) -> Iterator[None]:
    old, home = {name: os.environ.get(name) for name in variables}, Path.cwd()
    os.environ.update(variables)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(home)
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="hostile responses")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the pool")
    arguments = parser.parse_args(argv)
    found = run(arguments.count, seed=arguments.seed, workers=arguments.workers)
    for example in found.examples[:20]:
        print(example.encode("ascii", "backslashreplace").decode(), file=sys.stderr)
    more: dict[str, Any] = {"hostile": arguments.count, "seed": arguments.seed, "seconds": round(found.seconds, 1)}
    ok = True
    for name in ("hangs", "surviving_processes", "files_changed", "wrong_rewards"):
        ok &= print_line(f"hostile_sql/{name}", getattr(found, name), 0, "max", **more)
    print_line(
        "hostile_sql/outcomes", sum(found.outcomes.values()), None, "none", **dict(sorted(found.outcomes.items())),
        killed=found.counters["timed_out"], workers_lost=found.counters["worker_died"],
        out_of_memory_of_the_process=found.counters["out_of_memory"],
    )  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
