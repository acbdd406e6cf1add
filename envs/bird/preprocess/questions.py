"""Questions as all sources give them, and reading them from JSON records."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..execute import FORBIDDEN_STARTS
from ..sqltext import first_word, split_statements
from .find import LayoutError
from .problems import Problem, ProblemKind
from .settings import Source, Split


@dataclass(frozen=True)
class Question:
    """One question with its gold query."""

    source: Source
    split: Split
    question_id: str
    """The source's own number; its position in the source's questions of that split if it has none."""
    db_id: str
    db_path: str
    """Absolute path of the SQLite file, which need not exist."""
    question: str
    evidence: str
    """BIRD's hint; empty if there is none."""
    sql: str
    """The gold, as written."""
    difficulty: str | None
    descriptions: str | None = None
    """Folder of CSV files that describe the columns, which need not exist; None = the source has none."""


@dataclass
class SourceData:
    """What a source holds."""

    found: list[str] = field(default_factory=list)
    """The files and folders that are used, a line each."""
    questions: list[Question] = field(default_factory=list)
    """In the order of the source's files."""
    read: dict[Split, int] = field(default_factory=dict)
    """Questions in the files, those that were dropped included."""
    problems: list[Problem] = field(default_factory=list)
    contexts: dict[str, str] = field(default_factory=dict)
    """Scripts that make databases, by the absolute path of the file to make."""


@dataclass(frozen=True)
class FieldNames:
    """Under which names a source's records hold what a question needs; None = it has no such field."""

    question: str
    sql: str
    db_id: str | None = None
    evidence: str | None = None
    difficulty: str | None = None
    question_id: str | None = None


class MalformedQuestion(ValueError):
    """A record that is no question; the message says why."""


def read_records(path: Path) -> list[Any]:
    """Returns the list in a JSON file.

    Raises LayoutError if the file is unreadable or holds anything but a list.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise LayoutError(f"the question file {path} cannot be read: {error}") from error
    if not isinstance(records, list):
        raise LayoutError(f"the question file {path} holds a JSON {type(records).__name__}, not a list of questions")
    return records


def add_questions(
    data: SourceData, records: Iterable[Any], names: FieldNames, source: Source, split: Split, databases: Path
) -> None:
    """Appends what `records` of one split hold to `data`; a record that cannot be used becomes a problem.

    `databases` is the folder of `<db>/<db>.sqlite`. May be called several times for one split.
    """
    for record in records:
        position = data.read.setdefault(split, 0)
        data.read[split] += 1
        try:
            db_id = plain_name(text_of(record, names.db_id))
            folder = os.path.join(os.path.abspath(databases), db_id)
            question = make_question(
                record,
                names,
                source=source,
                split=split,
                position=position,
                db_id=db_id,
                db_path=os.path.join(folder, f"{db_id}.sqlite"),
                descriptions=os.path.join(folder, "database_description") if source == "bird" else None,
            )
        except MalformedQuestion as problem:
            data.problems.append(malformed(source, split, position, problem))
            continue
        add_question(data, question)


def make_question(
    record: Mapping[str, Any],
    names: FieldNames,
    *,
    source: Source,
    split: Split,
    position: int,
    db_id: str,
    db_path: str,
    descriptions: str | None = None,
) -> Question:
    """Returns the question that a record holds.

    Raises MalformedQuestion if a field is missing or has the wrong type.
    """
    question_id = record.get(names.question_id) if names.question_id is not None else None
    if question_id is not None and (isinstance(question_id, bool) or not isinstance(question_id, int | str)):
        raise MalformedQuestion(f"{names.question_id} is {question_id!r}, neither a number nor text")
    return Question(
        source=source,
        split=split,
        question_id=str(position) if question_id is None else _unicode(str(question_id), names.question_id),
        db_id=db_id,
        db_path=db_path,
        question=text_of(record, names.question),
        evidence=optional_text(record, names.evidence) or "",
        sql=text_of(record, names.sql),
        difficulty=optional_text(record, names.difficulty),
        descriptions=descriptions,
    )


def add_question(data: SourceData, question: Question) -> bool:
    """Appends a question, or a problem if its gold is no single query; says whether it was a question."""
    reason = _no_query(question.sql)
    if reason is None:
        data.questions.append(question)
        return True
    subject = f"question {question.question_id} ({question.db_id})"
    data.problems.append(Problem(ProblemKind.GOLD_NOT_A_QUERY, question.source, question.split, subject, reason, 1))


def malformed(source: Source, split: Split, position: int, problem: MalformedQuestion) -> Problem:
    """Returns the problem to report for the record at `position`, counted from 0."""
    return Problem(ProblemKind.QUESTION_MALFORMED, source, split, f"record {position}", str(problem), 1)


def text_of(record: Any, name: str | None) -> str:
    """Returns a field that must hold text.

    Raises MalformedQuestion if it does not.
    """
    if not isinstance(record, Mapping):
        raise MalformedQuestion(f"it is {_brief(record)}, not a record with fields")
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise MalformedQuestion(f"{name} is {_brief(value)}, not text; the fields are {sorted(map(str, record))}")
    return _unicode(value, name)


def optional_text(record: Mapping[str, Any], name: str | None) -> str | None:
    """Returns a field that may be absent, null or blank (all None) or hold text.

    Raises MalformedQuestion if it holds anything else.
    """
    value = None if name is None else record.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        raise MalformedQuestion(f"{name} is {_brief(value)}, not text")
    return _unicode(value, name)


def plain_name(name: str) -> str:
    """Returns `name` if a file may be called so.

    Raises MalformedQuestion if it would lead elsewhere.
    """
    if name in (os.curdir, os.pardir) or os.sep in name or "\0" in name:
        raise MalformedQuestion(f"the database name {name!r} is no plain file name")
    return name


def _no_query(sql: str) -> str | None:
    statements = split_statements(sql)
    if len(statements) != 1:
        return f"it holds {len(statements)} statements"
    word = first_word(statements[0])
    return f"{word} is not a read" if word in FORBIDDEN_STARTS else None


def _unicode(text: str, name: str | None) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedQuestion(f"{name} is not valid Unicode: {error}") from error
    return text


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
