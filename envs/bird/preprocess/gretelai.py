"""GretelAI's synthetic_text_to_sql: parquet or JSON-lines files, the databases given as statements."""

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .find import LayoutError, listing, require_folder, walk_folders
from .questions import FieldNames, MalformedQuestion, SourceData, add_question, make_question, malformed, text_of
from .settings import PreprocessSettings, Split

NAMES = FieldNames(question="sql_prompt", sql="sql", difficulty="sql_complexity", question_id="id")
CONTEXT = "sql_context"

WORDS: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("test", "validation")}
_COLUMNS = (NAMES.question_id, NAMES.question, CONTEXT, NAMES.sql, NAMES.difficulty)


def read_gretelai(settings: PreprocessSettings) -> SourceData:
    """Reads the questions of the splits asked for; equal contexts share one database.

    A file belongs to the split whose word its name holds: "train", or "test" or "validation".

    Raises LayoutError if a split has no file, or a file cannot be read.
    """
    root = settings.folder("gretelai")
    require_folder(root, "--gretelai_dir")
    files = [
        path
        for _, folder in walk_folders(root, skip=[settings.output_dir])
        for path in sorted(folder.iterdir())
        if path.suffix in (".parquet", ".jsonl") and path.is_file() and not path.name.startswith(".")
    ]
    data = SourceData()
    for split in settings.splits:
        chosen = [path for path in files if any(word in path.name for word in WORDS[split])]
        if not chosen:
            raise LayoutError(
                f"looked for .parquet or .jsonl files with {' or '.join(map(repr, WORDS[split]))} in their name in "
                f"{root}; found {listing(root)}"
            )
        for path in chosen:
            data.found.append(f"gretelai {split} questions: {path}")
            _add_file(data, path, split, settings.output_dir)
    return data


def context_database(output_dir: Path, context: str) -> tuple[str, str]:
    """Returns the name and the absolute path of the database that `context` makes."""
    digest = blake2b(context.encode(), digest_size=8).hexdigest()
    folder = os.path.join(os.path.abspath(output_dir), "gretelai_databases", digest[:2])
    return f"gretelai_{digest}", os.path.join(folder, f"gretelai_{digest}.sqlite")


def _add_file(data: SourceData, path: Path, split: Split, output_dir: Path) -> None:
    for record in _records(path):
        position = data.read.setdefault(split, 0)
        data.read[split] += 1
        try:
            context = text_of(record, CONTEXT)
            db_id, db_path = context_database(output_dir, context)
            question = make_question(
                record, NAMES, source="gretelai", split=split, position=position, db_id=db_id, db_path=db_path
            )
        except MalformedQuestion as problem:
            data.problems.append(malformed("gretelai", split, position, problem))
            continue
        if add_question(data, question):
            data.contexts[db_path] = context


def _records(path: Path) -> Iterator[Any]:
    return _parquet_records(path) if path.suffix == ".parquet" else _json_lines(path)


def _parquet_records(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"the question file {path} cannot be read: {error}") from error


def _json_lines(path: Path) -> Iterator[Any]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            for line in file:
                if line.strip():
                    yield _json_value(line)
    except OSError as error:
        raise LayoutError(f"the question file {path} cannot be read: {error}") from error


def _json_value(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line
