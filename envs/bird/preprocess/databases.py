"""Making the databases that a source gives as statements, and turning each database into the text of its prompts."""

import os
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .build import TIMEOUT_S, ContextFailed, build_database
from .describe import UnreadableDatabase, describe_database
from .descriptions import description_files
from .problems import Problem, ProblemKind
from .run import Run
from .settings import DescribeLimits
from .workers import JobFailure
from .workspace import code_state, file_state, job_key

_BUILD_GRACE_S = 5.0


def build_databases(run: Run, contexts: dict[str, str]) -> None:
    """Makes the database of each script at its path, unless it is there; drops the questions about those that fail."""
    if not contexts:
        return
    # an empty file is what a crash of the whole machine may leave
    missing = {path: script for path, script in contexts.items() if not _has_content(path)}
    bar = run.bar(len(contexts), len(contexts) - len(missing), "databases built")
    failures = {}
    jobs = [(path, (script,)) for path, script in missing.items()]
    for path, result in run.workers.run(build_job, jobs, timeout_s=TIMEOUT_S + _BUILD_GRACE_S):
        if isinstance(result, JobFailure):
            failures[path] = result.reason
        else:
            _write_database(run, path, result)
        bar.update()
    bar.close()
    run.drop(
        ProblemKind.CONTEXT_FAILED,
        lambda question: (question.db_id, failures[question.db_path]) if question.db_path in failures else None,
    )


def drop_missing(run: Run) -> None:
    """Drops the questions about databases that are not there."""
    missing = {question.db_path for question in run.questions if not os.path.isfile(question.db_path)}
    run.drop(
        ProblemKind.DATABASE_MISSING,
        lambda question: (question.db_id, "there is no such file") if question.db_path in missing else None,
    )


def describe_databases(run: Run) -> dict[str, str]:
    """Returns the text that shows each database, by path; drops the questions about those that cannot be shown."""
    settings = run.settings
    journal = run.work.journal("databases")
    code, limits = code_state(), asdict(settings.describe)
    databases = {question.db_path: question for question in run.questions}
    keys = {
        path: job_key(code, sqlite3.sqlite_version, limits, file_state(path), _description_state(one.descriptions))
        for path, one in databases.items()
    }
    todo = [path for path in databases if keys[path] not in journal]
    bar = run.bar(len(databases), len(databases) - len(todo), "databases read")
    failures = {}
    jobs = [(path, (path, databases[path].descriptions, settings.describe)) for path in todo]
    for path, result in run.workers.run(describe_job, jobs, timeout_s=settings.database_timeout_s):
        if isinstance(result, JobFailure):
            failures[path] = result.reason
        else:
            journal.put(keys[path], result)
        bar.update()
    bar.close()
    texts = {}
    for path, question in databases.items():
        if path in failures:
            continue
        shown = journal[keys[path]]
        texts[path] = shown["text"]
        for kind, field in (
            (ProblemKind.DESCRIPTION_SKIPPED, "skipped_files"),
            (ProblemKind.SCHEMA_INCOMPLETE, "incomplete"),
        ):
            for what, reason in shown[field]:
                run.problems.append(Problem(kind, question.source, None, f"{question.db_id}: {what}", reason, 0))
    run.drop(
        ProblemKind.DATABASE_UNREADABLE,
        lambda question: (question.db_id, failures[question.db_path]) if question.db_path in failures else None,
    )
    return texts


def build_job(script: str) -> bytes | JobFailure:
    """`build_database` for a worker."""
    try:
        return build_database(script)
    except ContextFailed as error:
        return JobFailure(False, str(error))


def describe_job(db_path: str, descriptions: str | None, limits: DescribeLimits) -> dict[str, Any] | JobFailure:
    """`describe_database` for a worker; returns JSON values."""
    try:
        return asdict(describe_database(db_path, descriptions, limits))
    except UnreadableDatabase as error:
        return JobFailure(False, str(error))


def _has_content(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) > 0


def _write_database(run: Run, path: str, content: bytes) -> None:
    partial = run.work.path / "database.partial"
    partial.write_bytes(content)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.replace(partial, path)


def _description_state(folder: str | None) -> list[Any]:
    if folder is None or not os.path.isdir(folder):
        return [folder]
    try:
        return [file_state(str(path)) for path in description_files(Path(folder))]
    except OSError as error:
        return [folder, str(error)]
