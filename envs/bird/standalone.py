"""Scoring as a plain function."""

import difflib
import os
from collections.abc import Mapping
from typing import Any

from .config import BirdEnvConfig, setting_names, unknown_setting
from .extract import parse_response
from .outcome import Outcome
from .score import failed_score, score_parts, score_record
from .task import database_path, gold_queries
from .workers import WorkersFailedError, run_in_workers


def compute_score(
    data_source: str | None,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Scores one response; usable as verl's custom reward function, from any number of threads.

    Queries run in worker processes, see `run_in_workers`.

    Args:
        data_source: Not used; part of verl's signature.
        solution_str: The response's text, without the prompt.
        ground_truth: The gold query, unless `extra_info["alternative_answers"]` lists some.
        extra_info: `db_path`, and optionally `alternative_answers`.
        **kwargs: Fields of `BirdEnvConfig`. Others, such as verl passes to every reward function, have no effect,
            but a name that looks like a misspelt field is refused.

    Returns:
        score (1.0, 0.1 or 0.0), format_correct, execution_success, outcome (an `Outcome`'s value), judged (False = do
        not train on it), error, gold_outcome, gold_empty, gold_row_count, row_count (-1 = unknown), comparison (the
        mode). The same keys always.

    Raises:
        ValueError: a field is missing, or a setting is unknown or out of range.
        FileNotFoundError: the database does not exist.
        ScoringStartUpError: worker processes cannot be started.
    """
    config = BirdEnvConfig.parse(_settings(kwargs))
    if extra_info is None:
        raise ValueError("extra_info is None; it must be a mapping with the field db_path")
    # absolute, because a worker's working directory is the one in which it was started
    path = os.path.abspath(config.resolve(database_path(extra_info)))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"extra_info.db_path: database file {path!r} does not exist")
    parts = score_parts(solution_str, gold_queries(ground_truth, extra_info), path, config)
    try:
        score = run_in_workers(parts, config.sqlite_heap_mb)
    except WorkersFailedError as failure:
        score = failed_score(Outcome.SCORER_FAILED, str(failure), parse_response(solution_str))
    return score_record(score, config)


def _settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = setting_names()
    for name in kwargs:
        if name not in names and difflib.get_close_matches(name, names, n=1, cutoff=0.8):
            raise ValueError(unknown_setting(name))
    return {name: value for name, value in kwargs.items() if name in names}
