"""What was left out or could not be shown, and why."""

from dataclasses import dataclass
from enum import StrEnum


class ProblemKind(StrEnum):
    """The closed set of things that a run survives and reports."""

    QUESTION_MALFORMED = "question_malformed"
    """A question without a field that it needs, or with one of the wrong type."""
    GOLD_NOT_A_QUERY = "gold_not_a_query"
    """The gold is a statement that writes, several statements, or none."""
    DATABASE_MISSING = "database_missing"
    """There is no such database file."""
    DATABASE_UNREADABLE = "database_unreadable"
    """The database is corrupt, has changes waiting in a write-ahead log, or takes too long or too much to read."""
    CONTEXT_FAILED = "context_failed"
    """The statements that should make a database do not."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt has more tokens than are allowed."""
    GOLD_FAILED = "gold_failed"
    """The gold does not score 1.0 against itself."""
    DESCRIPTION_SKIPPED = "description_skipped"
    """A file of column descriptions cannot be used, or not wholly; the questions stay."""
    SCHEMA_INCOMPLETE = "schema_incomplete"
    """A prompt lacks a table, or examples for it; the questions stay."""


@dataclass(frozen=True)
class Problem:
    """One thing to report."""

    kind: ProblemKind
    source: str
    split: str | None
    """The split of the questions that are dropped; None if none is."""
    subject: str
    """Database, file or question."""
    reason: str
    questions: int
    """How many questions are dropped for it."""

    def record(self) -> dict[str, object]:
        """Returns the JSON form."""
        return {
            "kind": self.kind.value,
            "source": self.source,
            "split": self.split,
            "subject": printable(self.subject),
            "reason": printable(self.reason),
            "questions_dropped": self.questions,
        }


def printable(text: str) -> str:
    """Returns `text` with what is not Unicode (bytes of file names and cells that are not UTF-8) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
