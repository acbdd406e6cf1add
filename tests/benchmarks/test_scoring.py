import json

import pytest

from benchmarks import scoring
from benchmarks.sql_workload import jobs, questions, write_database


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "sales.sqlite"
    write_database(path, rows=500)
    return path


@pytest.mark.slow
def test_a_small_run_prints_its_lines(database, monkeypatch, capsys):
    monkeypatch.setattr(scoring, "TIME_LIMIT_S", 0.3)
    monkeypatch.setattr(scoring, "questions", lambda: questions(4))
    scoring.measure(database, repeats=1, workers=2, seed=0)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [
        "scoring/throughput_of_one_repeat",
        "scoring/runaways_of_one_repeat",
        "scoring/throughput",
        "scoring/runaways",
    ]
    first, second = lines[:2]
    assert first["jobs"] + 1 <= second["jobs"] == 32
    # Each response is read, and each distinct query runs once.
    assert first["parts"] == first["jobs"] + first["distinct_queries"]
    assert [line["bound"] for line in lines[2:]] == [2.5, 1.3]


def test_a_wrong_reward_is_found():
    batch = jobs(questions(1))
    rewards = [scoring.REWARDS[job.kind] for job in batch]
    scoring.check(batch, rewards, "right")
    with pytest.raises(AssertionError, match="1 of 8 rewards are wrong"):
        scoring.check(batch, [rewards[0] + 0.5, *rewards[1:]], "wrong")
