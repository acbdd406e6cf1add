"""BIRD's raw layout: `train.json` and `train_databases/`, `dev.json` and `dev_databases/`."""

import re
from pathlib import Path

from .find import find_databases, find_file, require_folder
from .questions import FieldNames, SourceData, add_questions, read_records
from .settings import PreprocessSettings, Split

NAMES = FieldNames(
    question="question",
    sql="SQL",
    db_id="db_id",
    evidence="evidence",
    difficulty="difficulty",
    question_id="question_id",
)

PREFIX: dict[Split, str] = {"train": "train", "validation": "dev"}


def read_bird(settings: PreprocessSettings) -> SourceData:
    """Reads the questions of the splits asked for.

    The question file and the folder of databases may lie anywhere below `bird_dir`, three levels deep at most.

    Raises LayoutError if one of them is not there, or there are several.
    """
    root = settings.folder("bird")
    require_folder(root, "--bird_dir")
    skip = [settings.output_dir, root / "spider", root / "gretelai"]
    skip += [folder for folder in (settings.spider_dir, settings.gretelai_dir) if folder is not None]
    data = SourceData()
    for split in settings.splits:
        prefix = PREFIX[split]
        # later releases of the dev set carry their date in the file's name
        name = re.compile(rf"{prefix}(?:_\d{{8}})?\.json\Z")
        questions = find_file(root, lambda path, name=name: _is_question_file(path, name), f"{prefix}.json", skip=skip)
        databases = find_databases(root, f"{prefix}_databases", skip=skip)
        data.found += [f"bird {split} questions: {questions}", f"bird {split} databases: {databases}"]
        add_questions(data, read_records(questions), NAMES, "bird", split, databases)
    return data


def _is_question_file(path: Path, name: re.Pattern[str]) -> bool:
    return name.match(path.name) is not None and not (path.parent / "train_spider.json").exists()
