"""Splits the questions and writes them as BIRD's raw folders and as verl-format parquet.

Layout under the output folder::

    train/train.json, train/train_databases/<db>/<db>.sqlite, train/train_databases/<db>/database_description/*.csv
    dev/dev.json, dev/dev_databases/...              both validation splits; holds every database
    train.parquet                                    training questions on the training databases
    validation.parquet                               other questions on the same databases
    validation_heldout_db.parquet                    questions on databases that training never sees
    demonstrations.jsonl                             prompt and response pairs for the starting model's warm start,
                                                     several answers of mixed quality to each training question
"""

import json
import random
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..prompt import build_messages, schema_text
from .database import build_database, write_descriptions
from .domains import HELD_OUT_DOMAINS, TRAIN_DOMAINS, Domain
from .questions import DIFFICULTY, Question, demonstrate, draw_questions


@dataclass(frozen=True)
class SplitSizes:
    """Questions a database."""

    train: int = 250
    """Training questions on each training database."""
    validation: int = 30
    """Held-out questions on each training database."""
    heldout_db: int = 60
    """Questions on each held-out database."""
    demonstrations: int = 5
    """Demonstrated answers to each training question."""

    def __post_init__(self) -> None:
        for name in ("train", "validation", "heldout_db", "demonstrations"):
            if getattr(self, name) < 1:
                raise ValueError(f"SplitSizes.{name}={getattr(self, name)} must be at least 1")


def write_dataset(
    output_dir: Path,
    *,
    seed: int,
    sizes: SplitSizes | None = None,
    relative_paths: bool = False,
    env_class: str = "bird",
    progress: Callable[[Iterable[Domain]], Iterable[Domain]] = iter,
) -> dict[str, int]:
    """Write everything under ``output_dir``; equal arguments give equal bytes.

    Args:
        output_dir: created if missing.
        seed: decides rows, questions, splits and demonstrations.
        sizes: None = ``SplitSizes()``.
        relative_paths: store ``extra_info.db_path`` relative to ``output_dir`` (for the environment's ``db_root``
            setting), so that the bytes do not depend on it; otherwise absolute.
        env_class: the environment that rows name; a row's own goes before the recipe's ``environment.env_class``.
        progress: wraps the iterable of domains; tqdm fits.

    Returns:
        The number of rows of each parquet file, by split.

    Raises:
        ValueError: a database has too few different questions for ``sizes``.
    """
    sizes = SplitSizes() if sizes is None else sizes
    output_dir = Path(output_dir).resolve()
    stored_from = output_dir if relative_paths else None
    train_root = output_dir / "train" / "train_databases"
    dev_root = output_dir / "dev" / "dev_databases"
    train: list[Question] = []
    validation: list[Question] = []
    heldout_db: list[Question] = []
    for domain in progress([*TRAIN_DOMAINS, *HELD_OUT_DOMAINS]):
        _write_database(domain, dev_root, seed=seed)
        if domain in HELD_OUT_DOMAINS:
            heldout_db += _draw(domain, dev_root, sizes.heldout_db, seed=seed)
            continue
        _write_database(domain, train_root, seed=seed)
        drawn = _draw(domain, dev_root, sizes.validation + sizes.train, seed=seed)
        validation += drawn[: sizes.validation]
        train += drawn[sizes.validation :]
    random.Random(f"{seed}/order").shuffle(train)

    _write_raw(output_dir / "train" / "train.json", train)
    _write_raw(output_dir / "dev" / "dev.json", [*validation, *heldout_db])
    splits = {
        "train": (train, train_root),
        "validation": (validation, dev_root),
        "validation_heldout_db": (heldout_db, dev_root),
    }
    for split, (questions, root) in splits.items():
        path = output_dir / f"{split}.parquet"
        _write_parquet(path, questions, root, split=split, stored_from=stored_from, env_class=env_class)
    _write_demonstrations(
        output_dir / "demonstrations.jsonl", train, train_root, answers=sizes.demonstrations, seed=seed
    )
    return {split: len(questions) for split, (questions, _) in splits.items()}


def database_path(root: Path, db_id: str) -> Path:
    """BIRD's place of a database under ``train_databases`` or ``dev_databases``."""
    return root / db_id / f"{db_id}.sqlite"


def _write_database(domain: Domain, root: Path, *, seed: int) -> None:
    build_database(domain, database_path(root, domain.name), seed=seed)
    write_descriptions(domain, root / domain.name / "database_description")


def _draw(domain: Domain, root: Path, count: int, *, seed: int) -> list[Question]:
    connection = sqlite3.connect(database_path(root, domain.name))
    try:
        drawn = list(islice(draw_questions(domain, connection, seed=seed), count))
    finally:
        connection.close()
    if len(drawn) < count:
        raise ValueError(f"database {domain.name!r} has only {len(drawn)} different questions; {count} were asked for")
    return drawn


def _write_raw(path: Path, questions: Iterable[Question]) -> None:
    rows = [
        {
            "question_id": index,
            "db_id": question.db_id,
            "question": question.draft.text,
            "evidence": question.draft.evidence,
            "SQL": question.draft.sql,
            "difficulty": DIFFICULTY[question.kind],
        }
        for index, question in enumerate(questions)
    ]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _messages(questions: Iterable[Question], root: Path) -> list[list[dict[str, str]]]:
    schemas: dict[str, str] = {}
    prompts = []
    for question in questions:
        if question.db_id not in schemas:
            schemas[question.db_id] = schema_text(database_path(root, question.db_id))
        prompts.append(build_messages(schemas[question.db_id], question.draft.text, question.draft.evidence))
    return prompts


def _stored_path(path: Path, stored_from: Path | None) -> str:
    return str(path if stored_from is None else path.relative_to(stored_from))


def _write_parquet(
    path: Path, questions: list[Question], root: Path, *, split: str, stored_from: Path | None, env_class: str
) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": split,
            "env_class": env_class,
            "prompt": messages,
            "reward_model": {"style": "rule", "ground_truth": question.draft.sql},
            "extra_info": {
                "db_id": question.db_id,
                "db_path": _stored_path(database_path(root, question.db_id), stored_from),
                "question": question.draft.text,
                "evidence": question.draft.evidence,
                "difficulty": DIFFICULTY[question.kind],
                "kind": question.kind,
                "split": split,
                "index": index,
            },
        }
        for index, (question, messages) in enumerate(zip(questions, _messages(questions, root), strict=True))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _write_demonstrations(path: Path, questions: list[Question], root: Path, *, answers: int, seed: int) -> None:
    rng = random.Random(f"{seed}/demonstrations")
    prompts = _messages(questions, root)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(answers):
            for question, messages in zip(questions, prompts, strict=True):
                row = {"prompt": messages, "response": demonstrate(question, rng)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
