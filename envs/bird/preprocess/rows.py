"""Rows in verl's format, and writing them as parquet."""

from collections.abc import Iterable, Iterator
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..prompt import ANSWER_SYSTEM_PROMPT, build_messages
from .questions import Question

if TYPE_CHECKING:
    import pyarrow

ABILITY = "text_to_sql"

_ROWS_PER_GROUP = 256


def prompt_of(question: Question, database: str) -> list[dict[str, str]]:
    """Returns the chat messages; `database` is the text that shows the database."""
    return build_messages(database, question.question, question.evidence, system=ANSWER_SYSTEM_PROMPT)


def make_row(
    question: Question, database: str, *, stored_path: str, index: int, env_class: str = "bird"
) -> dict[str, Any]:
    """Returns the row of a question; `index` counts the rows of its file from 0."""
    return {
        "data_source": question.source,
        "env_class": env_class,
        "prompt": prompt_of(question, database),
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": question.sql},
        "extra_info": {
            "index": index,
            "split": question.split,
            "question_id": question.question_id,
            "db_id": question.db_id,
            "db_path": stored_path,
            "question": question.question,
            "evidence": question.evidence,
            "difficulty": question.difficulty,
        },
    }


def row_schema() -> "pyarrow.Schema":
    """Returns the columns of the files; the same whatever the rows hold."""
    import pyarrow

    text = pyarrow.string()
    message = pyarrow.struct([("role", text), ("content", text)])
    extra_info = [
        ("index", pyarrow.int64()),
        *((name, text) for name in ("split", "question_id", "db_id", "db_path", "question", "evidence", "difficulty")),
    ]
    return pyarrow.schema(
        [
            ("data_source", text),
            ("env_class", text),
            ("prompt", pyarrow.list_(message)),
            ("ability", text),
            ("reward_model", pyarrow.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pyarrow.struct(extra_info)),
        ]
    )


def write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows as they come, a few hundred in memory at a time; equal rows give equal bytes."""
    import pyarrow
    import pyarrow.parquet

    schema = row_schema()
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(rows):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    yield from map(list, batched(rows, _ROWS_PER_GROUP))
