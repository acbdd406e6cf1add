"""Checking the golds of all questions, and reporting what was found."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..config import BirdEnvConfig
from .check import SCORES_FULL, Finding, Verdict, check_gold, check_ties, max_seconds
from .problems import ProblemKind, printable
from .questions import Question
from .run import Run
from .workers import JobFailure
from .workspace import Journal, code_state, file_state, job_key

type Gold = tuple[str, str]
"""(path of the database, query)."""


@dataclass
class CheckReport:
    """What the check found."""

    settings: dict[str, Any]
    """The scorer's."""
    counts: dict[str, dict[str, int]]
    """Golds by finding, by "source/split"; every finding is there."""
    findings: list[dict[str, str]]
    """One record for each question whose gold is not simply ok, in the order of the rows."""

    @property
    def failed(self) -> int:
        """Golds that do not score 1.0 against themselves."""
        return sum(
            count for of in self.counts.values() for name, count in of.items() if Finding(name) not in SCORES_FULL
        )


def check_golds(run: Run) -> CheckReport:
    """Checks the gold of each question that is left; with `drop_failed`, drops those that do not score 1.0."""
    config = BirdEnvConfig(timeout_s=run.settings.query_timeout_s)
    journal = run.work.journal("check")
    code = code_state()
    keys = {gold: job_key(code, asdict(config), file_state(gold[0]), gold[1]) for gold in map(_gold, run.questions)}
    verdicts = _judge(
        _Judge("golds scored", check_gold, max_seconds(config, 2), Finding.TIMED_OUT, Finding.SCORER_FAILED),
        run,
        journal,
        keys,
        config,
    )
    settled = {gold: job_key("ties", key) for gold, key in keys.items() if verdicts[gold].finding is Finding.OK}
    verdicts |= _judge(
        _Judge("ties broken", check_ties, max_seconds(config, 6), Finding.TIES_UNKNOWN, Finding.TIES_UNKNOWN),
        run,
        journal,
        settled,
        config,
    )
    report = _report(run.questions, verdicts, config)
    if run.settings.drop_failed:
        run.drop(ProblemKind.GOLD_FAILED, lambda question: _failure(question, verdicts[_gold(question)]))
    return report


@dataclass(frozen=True)
class _Judge:
    """One kind of judgement of golds."""

    name: str
    function: Callable[[str, str, BirdEnvConfig], Verdict]
    max_seconds: float
    if_killed: Finding
    """What it means if the judgement takes longer."""
    if_lost: Finding
    """What it means if the judgement's process dies."""


def _judge(
    judge: _Judge, run: Run, journal: Journal, keys: dict[Gold, str], config: BirdEnvConfig
) -> dict[Gold, Verdict]:
    todo = [gold for gold in keys if keys[gold] not in journal]
    bar = run.bar(len(keys), len(keys) - len(todo), judge.name)
    verdicts = {gold: Verdict.of(journal[key]) for gold, key in keys.items() if key in journal}
    jobs = [(gold, (gold[1], gold[0], config)) for gold in todo]
    for gold, result in run.workers.run(judge.function, jobs, timeout_s=judge.max_seconds):
        if isinstance(result, JobFailure):
            verdicts[gold] = Verdict(judge.if_killed if result.timed_out else judge.if_lost, result.reason)
        else:
            verdicts[gold] = result
            journal.put(keys[gold], result.record())
        bar.update()
    bar.close()
    return verdicts


def _gold(question: Question) -> Gold:
    return question.db_path, question.sql


def _failure(question: Question, verdict: Verdict) -> tuple[str, str] | None:
    if verdict.finding in SCORES_FULL:
        return None
    return f"question {question.question_id} ({question.db_id})", f"{verdict.finding.value}: {verdict.detail}"


def _report(questions: list[Question], verdicts: dict[Gold, Verdict], config: BirdEnvConfig) -> CheckReport:
    counts: dict[str, dict[str, int]] = {}
    findings = []
    for question in questions:
        verdict = verdicts[_gold(question)]
        of = counts.setdefault(f"{question.source}/{question.split}", {finding.value: 0 for finding in Finding})
        of[verdict.finding.value] += 1
        if verdict.finding is not Finding.OK:
            findings.append(
                {
                    "finding": verdict.finding.value,
                    "detail": printable(verdict.detail),
                    "source": question.source,
                    "split": question.split,
                    "question_id": question.question_id,
                    "db_id": question.db_id,
                    "question": question.question,
                    "sql": question.sql,
                }
            )
    return CheckReport(asdict(config), counts, findings)
