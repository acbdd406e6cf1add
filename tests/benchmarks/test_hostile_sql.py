import random

import pytest

from benchmarks import hostile_sql
from benchmarks.hostile_sql import Findings, Fuzzer, digests, make_jobs, run


def test_the_same_seed_gives_the_same_responses():
    first, second, other = ([fuzzer.response() for _ in range(200)] for fuzzer in (Fuzzer(3), Fuzzer(3), Fuzzer(4)))
    assert first == second != other and len(set(first)) > 190


def test_the_fuzzer_reaches_every_corner():
    fuzzer = Fuzzer(0)
    text = "\n".join(fuzzer.response() for _ in range(4000)).upper()
    for corner in ("ATTACH", "VACUUM INTO", "PRAGMA", "LOAD_EXTENSION", "FTS3_TOKENIZER", "RETURNING", "WRITEFILE",
                   "SQLITE_DBPAGE", "DBSTAT", "GENERATE_SERIES", "RANDOMBLOB", "WITH RECURSIVE", "UNION ALL",
                   "PRAGMA_DATABASE_LIST", "INSTR(HEX(", "((((((", "JSON_ARRAY(", "TEMP TABLE", "```", "\0", "\udce9",
                   "OVER (", "; DROP", "EXPLAIN"):  # fmt: skip
        assert corner in text, corner


def test_healthy_jobs_are_mixed_in_with_known_rewards():
    batch = list(make_jobs(1000, 0, "word"))
    healthy = [job for job in batch if job.reward is not None]
    assert len(batch) - len(healthy) == 1000 and 60 < len(healthy) < 140
    assert {job.reward for job in healthy} == {1.0, 0.1}
    assert all(job.gold == "SELECT 'word'" for job in batch if job.reward is None)


def test_a_changed_file_is_found(tmp_path):
    (tmp_path / "a").write_text("a")
    before = digests(tmp_path)
    (tmp_path / "a").write_text("b")
    assert digests(tmp_path) != before
    (tmp_path / "a").write_text("a")
    assert digests(tmp_path) == before
    (tmp_path / "b").mkdir()
    assert digests(tmp_path) != before


@pytest.mark.slow
def test_five_hundred_hostile_responses_do_no_harm(monkeypatch):
    found = run(500, seed=random.Random(5).randrange(100), workers=2, show=False)
    counts = (found.hangs, found.surviving_processes, found.files_changed, found.wrong_rewards)
    assert counts == (0, 0, 0, 0), found.examples
    assert sum(found.outcomes.values()) > 530
    assert {"ok", "wrong_result", "forbidden", "sql_error", "timed_out", "no_sql"} <= set(found.outcomes)


@pytest.mark.slow
def test_what_must_be_counted_is_counted(monkeypatch):
    """Each detector, with the harm it is there for done by hand."""

    class Harm(hostile_sql.BirdEnv):
        def step(self, action):
            return {"reward": 1.0, "metadata": {"outcome": "ok", "error": "", "judged": True}}

    monkeypatch.setattr(hostile_sql, "BirdEnv", Harm)
    monkeypatch.setattr(hostile_sql, "HEALTHY_SHARE", 0.0)
    found = run(20, seed=0, workers=1, show=False)
    assert isinstance(found, Findings) and found.wrong_rewards == 20
