"""A short fuzz of what a policy may write; every healthy query in between keeps its score."""

import hashlib
import random

from envs.bird.config import BirdEnvConfig
from envs.bird.outcome import Outcome
from envs.bird.score import score_response

EXPRESSIONS = ["*", "1", "name", "t.id", "count(*)", "hex(zeroblob(99999))", "randomblob(2000)", "x'00'", "NULL", "?",
               "load_extension('x')", "'é\udce9'", "printf('%9999d', 1)", "(SELECT 1)", "sum(id)"]  # fmt: skip
SOURCES = ["t", "t a, t b", "e", "nowhere", "json_each('[1]')", "pragma_table_info('t')", "(SELECT * FROM fruit)", "c",
           "pragma_database_list", "sqlite_master", "dbstat"]  # fmt: skip
TAILS = [
    "",
    " WHERE id < 10",
    " LIMIT 5",
    " -- LIMIT 1",
    " ORDER BY 1",
    "; DROP TABLE t",
    ";",
    " GROUP BY 1",
    " /*",
    "'",
]
STARTS = ["", "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) ", "EXPLAIN ", "CREATE TABLE z AS "]
OTHERS = ["ATTACH 'z.sqlite' AS z", "VACUUM INTO 'z.sqlite'", "PRAGMA user_version = 3", "CREATE TEMP TABLE z(a)",
          "INSERT INTO t(name) VALUES (1)", "DELETE FROM t", "BEGIN", "SELECT 1; ATTACH 'z.sqlite' AS z",
          "PRAGMA journal_mode = WAL", "ALTER TABLE t ADD COLUMN z", "I would say 42."]  # fmt: skip


def hostile(rng):
    if rng.random() < 0.3:
        text = rng.choice(OTHERS)
    else:
        columns = ", ".join(rng.choices(EXPRESSIONS, k=rng.randint(1, 3)))
        text = f"{rng.choice(STARTS)}SELECT {columns} FROM {rng.choice(SOURCES)}{rng.choice(TAILS)}"
    characters = list(text)
    while rng.random() < 0.3:
        index = rng.randrange(len(characters))
        characters[index : index + rng.randint(0, 2)] = rng.choice(
            ["", "'", "(", ")", ";", "--", "\0", " ", "\n", "`"]
        )
        if not characters:
            break
    return "".join(characters)


def test_hostile_queries_change_nothing_and_hold_nothing_up(shop_db, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = BirdEnvConfig(timeout_s=0.1, max_compared_rows=5000)
    healthy_config = BirdEnvConfig(timeout_s=30)
    before = hashlib.sha256(shop_db.read_bytes()).hexdigest()
    rng = random.Random(17)
    outcomes = set()
    for i in range(400):
        response = hostile(rng) if rng.random() < 0.2 else f"<think>x</think>```sql\n{hostile(rng)}\n```"
        score = score_response(response, ["SELECT 'nothing gives this'"], str(shop_db), config)
        assert score.reward < 1.0 and score.judged, response
        outcomes.add(score.outcome)
        if i % 20 == 0:
            healthy = score_response(f"SELECT {i} FROM t", [f"SELECT {i}"], str(shop_db), healthy_config)
            assert healthy.reward == 1.0
    assert outcomes >= {
        Outcome.WRONG_RESULT,
        Outcome.TOO_LARGE,
        Outcome.SQL_ERROR,
        Outcome.TIMED_OUT,
        Outcome.FORBIDDEN,
        Outcome.NO_SQL,
    }
    assert hashlib.sha256(shop_db.read_bytes()).hexdigest() == before
    assert [entry.name for entry in shop_db.parent.iterdir()] == [shop_db.name]
    assert list(tmp_path.iterdir()) == []
