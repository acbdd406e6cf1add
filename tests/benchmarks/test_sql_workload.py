import pytest

from benchmarks.sql_workload import REWARDS, jobs, questions, runaway, write_database
from envs.bird.config import BirdEnvConfig
from envs.bird.execute import ExecutionLimits, run_query
from envs.bird.outcome import Outcome
from envs.bird.score import score_response


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("sales") / "sales.sqlite"
    write_database(path, rows=4000)
    return path


def test_the_shares_are_those_of_the_benchmark():
    asked = questions()
    batch = jobs(asked)
    kinds = [job.kind for job in batch]
    assert (len(asked), len(batch)) == (64, 512) and len({question.gold for question in asked}) == 64
    assert {kind: kinds.count(kind) for kind in REWARDS} == {"right": 307, "wrong": 128, "syntax": 51, "runaway": 26}
    assert sum(job.kind == "right" and job.sql == job.gold for job in batch) == 153
    assert [job.question for job in batch] == [number // 8 for number in range(512)]
    runaways = {job.sql for job in batch if job.kind == "runaway"}
    assert len(runaways) == 26
    assert all(len(question.rewrites) == 2 and len(question.wrong) == 3 for question in asked)
    assert jobs(asked, seed=1) != batch == jobs(asked, seed=0)


def test_rewrites_are_right_and_wrong_texts_are_wrong(database):
    config = BirdEnvConfig()
    for question in questions():
        assert run_query(database, question.gold, ExecutionLimits()).fingerprint.row_count > 0
        for sql in question.rewrites:
            assert score_response(sql, [question.gold], str(database), config).outcome is Outcome.OK, sql
        for sql in question.wrong:
            assert score_response(sql, [question.gold], str(database), config).outcome is Outcome.WRONG_RESULT, sql


def test_responses_earn_what_their_kind_says(database):
    config = BirdEnvConfig(timeout_s=5.0)
    for job in jobs(questions(8)):
        if job.kind != "runaway":
            assert score_response(job.response, [job.gold], str(database), config).reward == REWARDS[job.kind]


def test_runaways_do_not_end(database):
    for number in (1, 2, 3, 4):
        result = run_query(database, runaway(number), ExecutionLimits(timeout_s=0.3))
        assert result.outcome is Outcome.TIMED_OUT, runaway(number)
