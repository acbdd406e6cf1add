"""From raw folders to parquet, in steps each of which continues where a run that was killed left off."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .bird import read_bird
from .check_all import check_golds
from .databases import build_databases, describe_databases, drop_missing
from .gretelai import read_gretelai
from .lengths import drop_long
from .questions import SourceData
from .report import Report, make_report
from .rows import make_row, write_parquet
from .run import Progress, Run
from .settings import PreprocessSettings, SettingError, Source, Split
from .spider import read_spider
from .tokens import TokenCounter
from .workers import Workers
from .workspace import Workspace

READERS: dict[Source, Callable[[PreprocessSettings], SourceData]] = {
    "bird": read_bird,
    "spider": read_spider,
    "gretelai": read_gretelai,
}


def preprocess(settings: PreprocessSettings, *, progress: Progress, say: Callable[[str], object] = print) -> Report:
    """Writes `train.parquet` and `validation.parquet` (those of `settings.splits`), `summary.json` and, with
    `settings.check`, `check.json` to `settings.output_dir`, and GretelAI's databases below it.

    Each file appears under its name only when it is complete. Killed at any moment, the next run with the same
    settings takes over what was finished. Equal data, settings and places give equal bytes.

    Args:
        settings: What to read and write.
        progress: Makes progress bars; tqdm fits.
        say: Told which files are used, and what an earlier run had finished.

    Raises:
        SettingError, LayoutError: a setting is wrong, the data is not where it should be, or no question is left.
        WorkspaceBusyError: another run writes to the same folder.
    """
    counter = None if settings.tokenizer is None else TokenCounter(settings.tokenizer)
    with Workspace(settings.output_dir) as work, Workers(settings.worker_count) as workers:
        run = Run(settings, work, workers, progress, say)
        data = {source: READERS[source](settings) for source in settings.sources}
        for one in data.values():
            for line in one.found:
                say(line)
            run.questions += one.questions
            run.problems += one.problems
        for path in {question.db_path for question in run.questions}:
            settings.stored_path(path)
        build_databases(run, {path: script for one in data.values() for path, script in one.contexts.items()})
        drop_missing(run)
        texts = describe_databases(run)
        if counter is not None and settings.max_tokens is not None:
            drop_long(run, texts, counter, settings.max_tokens)
        check = check_golds(run) if settings.check else None
        rows = {split: _write_split(run, texts, split) for split in settings.splits}
        report = make_report(run, data, rows, check)
        if check is not None:
            work.write(settings.output_dir / "check.json", partial(_write_json, record=asdict(check)))
        work.write(settings.output_dir / "summary.json", partial(_write_json, record=report.record()))
        work.clear()
    empty = [name for name, count in report.rows.items() if not count]
    if empty:
        raise SettingError(f"no question is left for {', '.join(empty)}; {settings.output_dir}/summary.json says why")
    return report


def _write_split(run: Run, texts: dict[str, str], split: Split) -> int:
    questions = [question for question in run.questions if question.split == split]
    bar = run.bar(len(questions), 0, f"{split} rows written")

    def rows() -> Iterator[dict[str, Any]]:
        for index, question in enumerate(questions):
            stored = run.settings.stored_path(question.db_path)
            text, env_class = texts[question.db_path], run.settings.env_class
            yield make_row(question, text, stored_path=stored, index=index, env_class=env_class)
            bar.update()

    run.work.write(run.settings.output_dir / f"{split}.parquet", lambda path: write_parquet(path, rows()))
    bar.close()
    return len(questions)


def _write_json(path: Path, *, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
