"""Scoring a response: extract the query, run it and the golds, compare, look the reward up."""

import sqlite3
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from .cache import RESULTS
from .compare import equal_results
from .config import BirdEnvConfig
from .database import PendingChangesError
from .execute import DatabaseChangedError, QueryResult, ScorerError
from .extract import Answer
from .outcome import EXECUTED, NOT_JUDGED, PARTIAL_REWARD, UNDETERMINED, Outcome, reward_of
from .parts import CompareRows, Part, PartRunner, Reading, ReadResponse, RunQuery, run_here
from .sqltext import orders_rows

type Parts[Result] = Generator[list[Part], list[Any], Result]


@dataclass(frozen=True)
class Score:
    """What a response earns, and why."""

    outcome: Outcome
    reward: float
    format_correct: bool
    execution_success: bool
    """SQLite accepted the response's query and ran it."""
    sql: str | None
    """The response's query; None if it has none."""
    error: str = ""
    """Why the query, the gold or the scorer failed."""
    gold_outcome: Outcome = Outcome.OK
    """How the gold ended; if it is not OK, no response to this question can be judged."""
    gold_empty: bool = False
    """Every gold gives no row."""
    gold_row_count: int = -1
    """Rows of the gold matched, else of the first that ran; -1 = unknown."""
    row_count: int = -1
    """Rows of the response's query; -1 = it did not run to its end."""

    @property
    def judged(self) -> bool:
        """False if the score says nothing about the response, which must then not be trained on."""
        return self.outcome not in NOT_JUDGED


def score_record(score: Score, config: BirdEnvConfig) -> dict[str, Any]:
    """Returns the flat record of a score that `standalone.compute_score` describes."""
    return {
        "score": score.reward,
        "format_correct": score.format_correct,
        "execution_success": score.execution_success,
        "outcome": score.outcome.value,
        "judged": score.judged,
        "error": score.error,
        "gold_outcome": score.gold_outcome.value,
        "gold_empty": score.gold_empty,
        "gold_row_count": score.gold_row_count,
        "row_count": score.row_count,
        "comparison": config.comparison,
    }


def score_response(
    response: str, golds: Sequence[str], db_path: str, config: BirdEnvConfig, *, cache: PartRunner = RESULTS
) -> Score:
    """Scores a response against one or more golds. Never raises for what a response holds.

    The golds run first: if they fail, every response to the question gets the same outcome.
    """
    return run_here(score_parts(response, golds, db_path, config), cache)


def score_sql(
    sql: str, golds: Sequence[str], db_path: str, config: BirdEnvConfig, *, cache: PartRunner = RESULTS
) -> Score:
    """Scores a query that stands alone, as a response in the right format would be."""
    return run_here(score_parts(Answer(sql=sql, format_correct=True), golds, db_path, config), cache)


def score_parts(response: str | Answer, golds: Sequence[str], db_path: str, config: BirdEnvConfig) -> Parts[Score]:
    """Scores a response, or what has been read from one, in parts that run wherever the caller wants."""
    answer = response if isinstance(response, Answer) else Answer(sql=None, format_correct=False)
    try:
        for may_retry in (True, False):
            [reading] = yield [ReadResponse(response, db_path, config.timeout_s)]
            answer = reading.answer
            if reading.failure is not Outcome.OK:
                return failed_score(reading.failure, reading.error, answer)
            try:
                return (yield from _score_answer(reading, golds, db_path, config))
            except DatabaseChangedError:
                # read the new file, from the golds on
                if not may_retry:
                    raise
        raise AssertionError
    except (ScorerError, PendingChangesError, OSError, sqlite3.OperationalError) as failure:
        return failed_score(Outcome.SCORER_FAILED, f"{type(failure).__name__}: {failure}", answer)


def failed_score(outcome: Outcome, error: str, answer: Answer) -> Score:
    """Returns the score of a response whose scoring was cut short by `outcome`."""
    return Score(
        outcome=outcome,
        reward=reward_of(outcome, format_correct=answer.format_correct),
        format_correct=answer.format_correct,
        execution_success=False,
        sql=answer.sql,
        error=error,
    )


def _score_answer(reading: Reading, golds: Sequence[str], db_path: str, config: BirdEnvConfig) -> Parts[Score]:
    answer = reading.answer

    def run(sql: str) -> RunQuery:
        return RunQuery(db_path, reading.identity, sql, config.limits())

    gold_results = yield [run(gold) for gold in golds]
    gold_failure = _gold_failure(gold_results)
    if gold_failure is not None:
        return Score(
            outcome=Outcome.GOLD_FAILED,
            reward=reward_of(Outcome.GOLD_FAILED, format_correct=answer.format_correct),
            format_correct=answer.format_correct,
            execution_success=False,
            sql=answer.sql,
            error=gold_failure.error,
            gold_outcome=gold_failure.outcome,
        )
    usable = [(gold, result) for gold, result in zip(golds, gold_results, strict=True) if result.outcome is Outcome.OK]
    if answer.sql is None:
        predicted = QueryResult(Outcome.NO_SQL, "the response holds no query")
    else:
        [predicted] = yield [run(answer.sql)]
    outcome, error, matched = predicted.outcome, predicted.error, usable[0][1]
    if outcome is Outcome.OK:
        outcome, error, matched = yield from _compare(predicted, usable, config)
    reward = reward_of(outcome, format_correct=answer.format_correct)
    if outcome is Outcome.OK and matched.fingerprint.row_count == 0 and not config.empty_gold_earns:
        reward = PARTIAL_REWARD
    return Score(
        outcome=outcome,
        reward=reward,
        format_correct=answer.format_correct,
        execution_success=outcome in EXECUTED,
        sql=answer.sql,
        error=error,
        gold_empty=all(result.fingerprint.row_count == 0 for _, result in usable),
        gold_row_count=matched.fingerprint.row_count,
        row_count=-1 if predicted.fingerprint is None else predicted.fingerprint.row_count,
    )


def _compare(
    predicted: QueryResult, golds: Sequence[tuple[str, QueryResult]], config: BirdEnvConfig
) -> Parts[tuple[Outcome, str, QueryResult]]:
    """Returns the outcome, its reason, and the gold matched, else the first one."""
    for gold, result in golds:
        ordered = config.comparison == "ordered" and orders_rows(gold)
        if equal_results(predicted.fingerprint, result.fingerprint, config.comparison, gold_orders_rows=ordered):
            return Outcome.OK, "", result
    outcome, error = Outcome.WRONG_RESULT, ""
    for gold, result in golds if config.tolerance else ():
        ordered = config.comparison == "ordered" and orders_rows(gold)
        verdict = yield from _compare_within(predicted, result, config, ordered)
        if verdict:
            return Outcome.OK, "", result
        if verdict is None:
            outcome = Outcome.TOO_LARGE
            error = (
                f"the float tolerance was not applied: more than max_kept_rows={config.max_kept_rows} rows or 10**6 "
                "bytes of text, or the comparison took too long"
            )
    return outcome, error, golds[0][1]


def _compare_within(
    predicted: QueryResult, gold: QueryResult, config: BirdEnvConfig, ordered: bool
) -> Parts[bool | None]:
    """Says whether two results that are not equal exactly are equal within the tolerance; None = not known."""
    left, right = predicted.fingerprint, gold.fingerprint
    if config.comparison != "set" and left.row_count != right.row_count:
        return False
    if (left.row_count == 0) != (right.row_count == 0):
        return False
    if predicted.rows_cut or gold.rows_cut:
        return None
    part = CompareRows(
        predicted=predicted.packed_rows,
        gold=gold.packed_rows,
        tolerance=config.tolerance,
        mode=config.comparison,
        gold_orders_rows=ordered,
        time_limit_s=config.timeout_s,
    )
    [verdict] = yield [part]
    return verdict


def _gold_failure(results: Sequence[QueryResult]) -> QueryResult | None:
    """Returns the result that makes the question impossible to judge, or None.

    A gold that SQLite refuses has no result that a response could equal, so the others decide; a gold whose result
    stays unknown may be the very one that a response equals.
    """
    for result in results:
        if result.outcome in UNDETERMINED:
            return result
    return None if any(result.outcome is Outcome.OK for result in results) else results[0]
