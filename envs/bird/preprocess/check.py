"""Running every gold through the scorer: what does not score 1.0 against itself, is empty, or hangs on a tie."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ..compare import Value, equal_results
from ..config import BirdEnvConfig
from ..execute import run_query
from ..outcome import FULL_REWARD, Outcome
from ..prompt import build_response
from ..score import Score, score_response, score_sql
from ..sqltext import orders_rows, split_statements
from .ties import tie_variants

GRACE_S = 5.0
"""Seconds past the queries' own time limits after which the process that runs them is killed."""

_ROWS_ROUNDED = 5000


class Finding(StrEnum):
    """The closed set of what the check says about a gold."""

    OK = "ok"
    EMPTY = "empty"
    """It scores 1.0, but its result has no row."""
    TIES = "ties"
    """It scores 1.0, but its result depends on an order that it leaves open, mostly a LIMIT that cuts through tied
    rows: a right answer may score less."""
    ROUNDING = "rounding"
    """It scores 1.0, but a sum of real numbers in it differs in its last digits with the order of addition, which a
    right answer may change: set the environment's `float_rtol`."""
    TIES_UNKNOWN = "ties_unknown"
    """It scores 1.0, but whether ties matter cannot be told: breaking them otherwise takes too long or too much."""
    UNSTABLE = "unstable"
    """Run twice, it gives two results."""
    NOT_EXTRACTED = "not_extracted"
    """Written as an answer, it is not read back as it stands."""
    SQL_ERROR = "sql_error"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_LARGE = "too_large"
    FORBIDDEN = "forbidden"
    SCORER_FAILED = "scorer_failed"


SCORES_FULL = frozenset({Finding.OK, Finding.EMPTY, Finding.TIES, Finding.ROUNDING, Finding.TIES_UNKNOWN})
"""Findings about golds that score 1.0 against themselves."""


@dataclass(frozen=True)
class Verdict:
    """What the check says about one gold."""

    finding: Finding
    detail: str = ""

    def record(self) -> list[str]:
        """Returns the JSON form."""
        return [self.finding.value, self.detail]

    @classmethod
    def of(cls, record: Any) -> "Verdict":
        """Reads the JSON form."""
        finding, detail = record
        return cls(Finding(finding), detail)


def check_gold(sql: str, db_path: str, config: BirdEnvConfig) -> Verdict:
    """Scores a response that gives the gold itself."""
    score = score_response(build_response("", sql), [sql], db_path, config)
    if score.reward == FULL_REWARD and score.format_correct:
        return Verdict(Finding.EMPTY if score.gold_empty else Finding.OK)
    return Verdict(_failure(score, sql), score.error)


def check_ties(sql: str, db_path: str, config: BirdEnvConfig) -> Verdict:
    """Compares the gold, which must score 1.0 against itself, with what it gives where ties and open orders fall out
    otherwise."""
    verdict = _reversed(sql, db_path, config)
    if verdict.finding is Finding.TIES or not tie_variants(sql, columns=1):
        return verdict
    # a sub-query with LIMIT 0 is not run
    shape = run_query(db_path, f"SELECT * FROM ({split_statements(sql)[0]}\n) LIMIT 0", config.limits())
    if shape.outcome is not Outcome.OK:
        return _unknown(shape.outcome, shape.error)
    for variant in tie_variants(sql, columns=len(shape.columns)):
        score = score_sql(variant, [sql], db_path, config)
        if score.outcome is Outcome.WRONG_RESULT:
            return Verdict(Finding.TIES, variant)
        if score.outcome is not Outcome.OK:
            verdict = _unknown(score.outcome, score.error)
    return verdict


def _reversed(sql: str, db_path: str, config: BirdEnvConfig) -> Verdict:
    limits = replace(config.limits(), max_kept_rows=_ROWS_ROUNDED)
    plain, backwards = (run_query(db_path, sql, limits, reverse_unordered=reverse) for reverse in (False, True))
    for result in (plain, backwards):
        if result.outcome is not Outcome.OK:
            return _unknown(result.outcome, result.error)
    ordered = config.comparison == "ordered" and orders_rows(sql)
    if equal_results(backwards.fingerprint, plain.fingerprint, config.comparison, gold_orders_rows=ordered):
        return Verdict(Finding.OK)
    rounding = not (plain.rows_cut or backwards.rows_cut) and _rounded(plain.rows) == _rounded(backwards.rows)
    return Verdict(Finding.ROUNDING if rounding else Finding.TIES, "PRAGMA reverse_unordered_selects=ON")


def _rounded(rows: Sequence[tuple[Value, ...]]) -> set[tuple[Value, ...]]:
    return {tuple(f"{cell:.9e}" if isinstance(cell, float) else cell for cell in row) for row in rows}


def _unknown(outcome: Outcome, error: str) -> Verdict:
    return Verdict(Finding.TIES_UNKNOWN, f"{outcome.value}: {error}")


def max_seconds(config: BirdEnvConfig, queries: int) -> float:
    """Returns after how long a process that runs so many queries is stuck."""
    return queries * config.timeout_s + GRACE_S


def _failure(score: Score, sql: str) -> Finding:
    if score.outcome is Outcome.GOLD_FAILED:
        return Finding(score.gold_outcome.value)
    if score.outcome is Outcome.SCORER_FAILED:
        return Finding.SCORER_FAILED
    if score.sql is None or score.sql.strip() != sql.strip() or not score.format_correct:
        return Finding.NOT_EXTRACTED
    return Finding(score.outcome.value) if score.outcome is not Outcome.WRONG_RESULT else Finding.UNSTABLE
