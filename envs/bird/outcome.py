"""How scoring a response can end, and what each end earns."""

from enum import StrEnum


class Outcome(StrEnum):
    """The closed set of ends. The first four of a query that ran; the last two say nothing about the response."""

    OK = "ok"
    """The query ran to its end; for a whole response: its result equals a gold's."""
    WRONG_RESULT = "wrong_result"
    """The query ran to its end and its result equals no gold's."""
    TOO_LARGE = "too_large"
    """The query gave more rows than are compared."""
    SQL_ERROR = "sql_error"
    """SQLite refused the query: syntax, a missing table or column, an error while it ran."""
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    """The query, or one value in it, needed more memory than allowed, or crashed the process that ran it, twice."""
    FORBIDDEN = "forbidden"
    """The statement is not a confined read: it writes, attaches, sets a pragma, or is more than one statement."""
    NO_SQL = "no_sql"
    """The response holds no query."""
    GOLD_FAILED = "gold_failed"
    """A gold query did not run to its end, so that the response cannot be judged."""
    SCORER_FAILED = "scorer_failed"
    """The scorer itself failed: an unreadable or corrupt file, a lost worker."""


FULL_REWARD = 1.0
PARTIAL_REWARD = 0.1

REWARDS: dict[Outcome, tuple[float, float]] = {
    Outcome.OK: (FULL_REWARD, FULL_REWARD),
    Outcome.WRONG_RESULT: (PARTIAL_REWARD, PARTIAL_REWARD),
    Outcome.TOO_LARGE: (PARTIAL_REWARD, PARTIAL_REWARD),
    Outcome.SQL_ERROR: (PARTIAL_REWARD, 0.0),
    Outcome.TIMED_OUT: (0.0, 0.0),
    Outcome.OUT_OF_MEMORY: (0.0, 0.0),
    Outcome.FORBIDDEN: (0.0, 0.0),
    Outcome.NO_SQL: (0.0, 0.0),
    Outcome.GOLD_FAILED: (0.0, 0.0),
    Outcome.SCORER_FAILED: (0.0, 0.0),
}
"""Reward by outcome: (with the right format, without)."""

EXECUTED = frozenset({Outcome.OK, Outcome.WRONG_RESULT, Outcome.TOO_LARGE})
"""Outcomes of a query that SQLite accepted and ran."""

UNDETERMINED = frozenset({Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY, Outcome.TOO_LARGE})
"""Outcomes after which a query's result is unknown, though it has one."""

NOT_JUDGED = frozenset({Outcome.GOLD_FAILED, Outcome.SCORER_FAILED})
"""Outcomes that must not be trained on as a wrong answer."""


def reward_of(outcome: Outcome, *, format_correct: bool) -> float:
    with_format, without_format = REWARDS[outcome]
    return with_format if format_correct else without_format
