"""The pieces of work that scoring one response consists of.

Scoring is a generator that yields lists of parts and is sent their results, so that whoever runs it decides where: in
this process (`run_here`), or in workers that can be killed. A part is plain data. Parts with equal keys have equal
results, so that one run may serve them all.
"""

import marshal
import math
import re
from collections.abc import Generator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol

from .compare import ComparisonMode
from .execute import ExecutionLimits, QueryResult, run_query
from .extract import Answer, parse_response
from .handles import FileIdentity, file_identity
from .outcome import Outcome
from .tolerance import ComparisonTimeout, Tolerance, equal_within

type FailureCause = Literal["timed_out", "out_of_memory", "crashed"]

RETRY_AFTER_TIMEOUTS = 10.0
"""Time limits after which a query that ran out of time or memory is tried a second and last time."""

FAILURES = {
    "timed_out": Outcome.TIMED_OUT,
    "out_of_memory": Outcome.OUT_OF_MEMORY,
    # of the stack, as far as SQLite's own limits let anything crash it
    "crashed": Outcome.OUT_OF_MEMORY,
}
"""How a query ends whose process had to be killed, or crashed."""

_VOLATILE = re.compile(
    r"\b(?:now|subsec|subsecond|random|randomblob|localtime|current_date|current_time|current_timestamp)\b"
    r"|\b(?:date|time|datetime|julianday|unixepoch)\s*\(\s*\)"
    r"|\bstrftime\s*\([^,()]*\)",
    re.IGNORECASE,
)
_RETRIED = frozenset({Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY})


class Part(Protocol):
    """A picklable piece of work."""

    @property
    def key(self) -> Any:
        """Hashable; parts with equal keys have equal results. None = the result is nobody else's."""

    @property
    def time_limit_s(self) -> float:
        """Seconds that `run` takes at most if it keeps to its own limit; past it, the process is stuck."""

    def run(self) -> Any:
        """Does the work. An exception says that it could not be done, here and now."""

    def failed(self, cause: FailureCause, error: str) -> Any:
        """Returns what stands in for the result where the process that ran it had to be killed, or crashed."""

    def keep_s(self, result: Any, runs: int) -> float:
        """Returns the seconds for which `result`, of the `runs`-th run, may serve parts with the same key."""


@dataclass(frozen=True)
class Reading:
    """What a response says, and the file that it is about."""

    answer: Answer
    identity: FileIdentity | None = None
    """None if there is a failure."""
    failure: Outcome = Outcome.OK
    """TIMED_OUT or OUT_OF_MEMORY while the response was read, SCORER_FAILED if the database is not there; else OK."""
    error: str = ""


@dataclass(frozen=True)
class ReadResponse:
    """Extracts the query of a response and identifies the database file. A `Part`."""

    response: str | Answer
    """The text, or what has been read from it."""
    db_path: str
    time_limit_s: float
    key: None = None

    def run(self) -> Reading:
        answer = self.response if isinstance(self.response, Answer) else parse_response(self.response)
        try:
            return Reading(answer, file_identity(self.db_path))
        except OSError as failure:
            return Reading(answer, None, Outcome.SCORER_FAILED, f"{type(failure).__name__}: {failure}")

    def failed(self, cause: FailureCause, error: str) -> Reading:
        return Reading(Answer(sql=None, format_correct=False), None, FAILURES[cause], error)

    def keep_s(self, result: Reading, runs: int) -> float:
        return 0.0


@dataclass(frozen=True)
class RunQuery:
    """Runs a query, gold or predicted, on the very file that `identity` names. A `Part`; gives a `QueryResult`.

    Its rows are packed into bytes, if any are kept at all. The key is the file's identity, the query and the limits;
    a query whose result depends on the time of day or on chance has none. One that ran out of time or memory is tried
    a second time, once, when `RETRY_AFTER_TIMEOUTS` time limits have passed.
    """

    db_path: str
    identity: FileIdentity
    sql: str
    limits: ExecutionLimits

    @property
    def key(self) -> Any:
        if _VOLATILE.search(self.sql):
            return None
        text = blake2b(self.sql.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        return (self.identity, text, self.limits)

    @property
    def time_limit_s(self) -> float:
        return self.limits.timeout_s

    def run(self) -> QueryResult:
        """Raises what `run_query` raises."""
        result = run_query(self.db_path, self.sql, self.limits, expected=self.identity)
        packed = marshal.dumps(result.rows) if result.rows and not result.rows_cut else b""
        return replace(result, columns=(), rows=(), packed_rows=packed)

    def failed(self, cause: FailureCause, error: str) -> QueryResult:
        return QueryResult(FAILURES[cause], error)

    def keep_s(self, result: QueryResult, runs: int) -> float:
        retried = result.outcome in _RETRIED and runs == 1
        return RETRY_AFTER_TIMEOUTS * self.limits.timeout_s if retried else math.inf


@dataclass(frozen=True)
class CompareRows:
    """Compares two results, as `RunQuery` packs them, within a tolerance. A `Part`; gives True, False or None.

    None = it took too long or too much memory.
    """

    predicted: bytes
    gold: bytes
    tolerance: Tolerance
    mode: ComparisonMode
    gold_orders_rows: bool
    time_limit_s: float
    key: None = None

    def run(self) -> bool | None:
        rows = [marshal.loads(packed) if packed else () for packed in (self.predicted, self.gold)]
        try:
            return equal_within(
                *rows,
                self.tolerance,
                self.mode,
                gold_orders_rows=self.gold_orders_rows,
                timeout_s=self.time_limit_s,
            )
        except ComparisonTimeout:
            return None

    def failed(self, cause: FailureCause, error: str) -> None:
        return None

    def keep_s(self, result: bool | None, runs: int) -> float:
        return 0.0


class PartRunner(Protocol):
    """Whatever runs a part and may answer it from an earlier run, such as a `ResultCache`."""

    def run(self, part: Part) -> Any: ...


def run_here[Result](parts: Generator[list[Part], list[Any], Result], runner: PartRunner) -> Result:
    """Runs the parts of a generator one after another in this process and returns what it returns.

    An exception of a part is thrown into the generator.
    """
    try:
        wanted = next(parts)
        while True:
            try:
                results = [runner.run(part) for part in wanted]
            except Exception as failure:
                wanted = parts.throw(failure)
            else:
                wanted = parts.send(results)
    except StopIteration as end:
        return end.value
