"""What a model looks up in the database before it answers: finding its query, running it, showing the result.

A turn calls the tool with a query inside `<sql></sql>`, in a ```sql block or bare, behind its last `</think>`. The
first such pair counts, whatever follows it. A turn that opens `<sql>` and does not close it says nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .compare import Value
from .execute import run_query
from .extract import Answer
from .outcome import Outcome
from .parts import FAILURES, FailureCause, Reading, ReadResponse, RunQuery

CALL_START, CALL_END = "<sql>", "</sql>"

_FENCE = "```"
_LABELS = ("sqlite", "sql")
_BREAKS = re.compile(r"\s+")


def find_call(turn: str) -> str | None:
    """Returns the query that `turn` calls the tool with, or None if it calls no tool."""
    _, opened, rest = _said(turn).partition(CALL_START)
    query, closed, _ = rest.partition(CALL_END)
    return _without_fence(query.strip()) if opened and closed else None


def _said(turn: str) -> str:
    return turn.rpartition("</think>")[2]


def _without_fence(query: str) -> str:
    if not query.startswith(_FENCE):
        return query
    query = query.removeprefix(_FENCE).lstrip(" \t")
    for label in _LABELS:
        end = len(label)
        if query[:end].lower() == label and not query[end : end + 1].isalnum():
            query = query[end:]
            break
    return query.removesuffix(_FENCE).strip()


@dataclass(frozen=True)
class ReadTurn:
    """Splits a turn into a call of the tool or an answer, and identifies the database file. A `Part`."""

    turn: str
    db_path: str
    time_limit_s: float
    key: None = None

    def run(self) -> tuple[str | None, Reading]:
        """Returns the query of the call, None if there is none, and what the turn says as an answer: nothing if it
        opens a call."""
        opens_call = CALL_START in _said(self.turn)
        answer = Answer(sql=None, format_correct=False) if opens_call else self.turn
        return find_call(self.turn), ReadResponse(answer, self.db_path, self.time_limit_s).run()

    def failed(self, cause: FailureCause, error: str) -> tuple[str | None, Reading]:
        return None, ReadResponse(self.turn, self.db_path, self.time_limit_s).failed(cause, error)

    def keep_s(self, result: Any, runs: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Look:
    """What a look into the database gave."""

    outcome: Outcome
    """OK, TOO_LARGE (there are more rows than are shown), SQL_ERROR, TIMED_OUT, OUT_OF_MEMORY or FORBIDDEN."""
    text: str
    """The result as the model is shown it, or why there is none."""
    seconds: float

    @property
    def failed(self) -> bool:
        return self.outcome not in (Outcome.OK, Outcome.TOO_LARGE)


@dataclass(frozen=True)
class LookUp(RunQuery):
    """Runs a query of the model's and writes its result down, capped. A `Part`; gives a `Look`."""

    max_characters: int
    max_cell_characters: int

    @property
    def key(self) -> Any:
        key = super().key
        return None if key is None else (key, self.max_characters, self.max_cell_characters)

    def run(self) -> Look:
        """Raises what `run_query` raises."""
        result = run_query(self.db_path, self.sql, self.limits, expected=self.identity)
        if result.outcome not in (Outcome.OK, Outcome.TOO_LARGE):
            return Look(result.outcome, self._why(result.outcome, result.error), result.seconds)
        text, shown = table_text(
            result.columns,
            result.rows,
            max_characters=self.max_characters,
            max_cell_characters=self.max_cell_characters,
        )
        cut = result.rows_cut or shown < len(result.rows)
        if not cut:
            count = "1 row" if shown == 1 else f"{shown} rows"
        else:
            count = f"the first {shown} rows; there are more" if shown else "the rows are too long to be shown"
        return Look(result.outcome, f"{text}\n({count})", result.seconds)

    def failed(self, cause: FailureCause, error: str) -> Look:
        outcome = FAILURES[cause]
        return Look(outcome, self._why(outcome, error), self.limits.timeout_s)

    def _why(self, outcome: Outcome, error: str) -> str:
        match outcome:
            case Outcome.TIMED_OUT:
                return f"Error: the query took more than {self.limits.timeout_s:g} s"
            case Outcome.OUT_OF_MEMORY:
                return "Error: the query needs too much memory"
            case _:
                return f"Error: {_one_line(error, self.max_characters)}"


def table_text(
    columns: Sequence[str], rows: Sequence[Sequence[Value]], *, max_characters: int, max_cell_characters: int
) -> tuple[str, int]:
    """Returns a line of column names and a line a row, values set apart by " | ", and how many rows are in it.

    NULL and BLOBs look as in SQL; white space within a value is one space; text that is not UTF-8 has replacement
    characters. The first row past `max_characters` and all after it are left out.
    """
    lines = [" | ".join(_one_line(name, max_cell_characters) for name in columns)]
    if len(lines[0]) > max_characters:
        lines[0] = f"{lines[0][:max_characters]}..."
    left = max_characters - len(lines[0])
    for row in rows:
        line = " | ".join(_cell_text(value, max_cell_characters) for value in row)
        left -= len(line) + 1
        if left < 0:
            break
        lines.append(line)
    return "\n".join(lines), len(lines) - 1


def _cell_text(value: Value, max_characters: int) -> str:
    match value:
        case None:
            return "NULL"
        case bytes():
            digits = value[: max_characters // 2].hex()
            return f"x'{digits}{'...' if 2 * len(value) > len(digits) else ''}'"
        case str():
            return _one_line(value, max_characters)
        case _:
            return str(value)


def _one_line(text: str, max_characters: int) -> str:
    start = text[: max_characters + 1]
    readable = start.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    shown = _BREAKS.sub(" ", readable)
    return f"{shown[:max_characters]}..." if len(text) > max_characters else shown
