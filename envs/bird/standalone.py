"""Scoring as a plain function, for callers that have no pool of processes, such as verl's reward managers.

What a model writes may run for ever inside one call of SQLite's, or take all memory. So the parts of a score run in
worker processes here too: those of a pool that each process which scores starts when it first needs one, and that ends
with it.
"""

import asyncio
import difflib
import multiprocessing
import os
import threading
import warnings
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

from .cache import RESULTS
from .config import WORKER_BASE_MB, BirdEnvConfig, setting_names, unknown_setting
from .extract import Answer
from .outcome import Outcome
from .parts import run_here
from .score import Parts, Score, failed_score, score_parts, score_record
from .task import database_path, gold_queries

MEMORY_LIMIT_MB = 512
"""Private memory in MiB of a worker; more where `sqlite_heap_mb` needs it."""


def compute_score(
    data_source: str | None,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Scores one response; usable as verl's custom reward function, from any number of threads.

    A query past its time or memory limit is killed with the process that runs it, which is then replaced. Called in a
    daemonic process, which may have none of its own, it scores right there, after a warning: then nothing stops a
    single long built-in call.

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
    return score_record(_run(parts, config), config)


def _run(parts: Parts[Score], config: BirdEnvConfig) -> Score:
    if multiprocessing.current_process().daemon:
        warnings.warn(
            "compute_score was called in a daemonic process, which cannot start others: a query that stays inside one "
            "long built-in call will not be stopped",
            RuntimeWarning,
            stacklevel=3,
        )
        return run_here(parts, RESULTS)
    from skyrl_arctic_rl.scoring import ScoringClosed, ScoringError, ScoringStartUpError

    try:
        return _scorer(config.sqlite_heap_mb).run(parts)
    except (ScoringClosed, ScoringStartUpError):
        raise
    except ScoringError as failure:
        return failed_score(
            Outcome.SCORER_FAILED, f"{type(failure).__name__}: {failure}", Answer(sql=None, format_correct=False)
        )


class _Scorer:
    """A pool, and a thread with the event loop that it lives in."""

    def __init__(self, sqlite_heap_mb: int) -> None:
        from skyrl_arctic_rl.scoring import EnvPool, ScoringConfig

        memory_limit_mb = max(MEMORY_LIMIT_MB, sqlite_heap_mb + WORKER_BASE_MB)
        self.pool = EnvPool(ScoringConfig(memory_limit_mb=memory_limit_mb))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bird-scorer", daemon=True)
        self._thread.start()

    def run(self, parts: Parts[Score]) -> Score:
        future = asyncio.run_coroutine_threadsafe(self.pool.run_in_parts(parts), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self.pool.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# by SQLite's heap limit, which a worker can only lower
_scorers: dict[int, _Scorer] = {}
_abandoned: list[_Scorer] = []
_lock = threading.Lock()


def _scorer(sqlite_heap_mb: int) -> _Scorer:
    with _lock:
        if not _scorers:
            # unlike atexit, also where this process is one of multiprocessing's own
            Finalize(None, stop_workers, exitpriority=0)
        if sqlite_heap_mb not in _scorers:
            _scorers[sqlite_heap_mb] = _Scorer(sqlite_heap_mb)
        return _scorers[sqlite_heap_mb]


def stop_workers() -> None:
    """Ends the worker processes of `compute_score`, as the end of this process does; the next call starts others."""
    with _lock:
        scorers = list(_scorers.values())
        _scorers.clear()
    for scorer in scorers:
        scorer.close()


def _forget_parents_workers() -> None:
    # a forked child has the objects and neither the thread nor the processes; finalising them would disturb the parent
    global _lock
    _lock = threading.Lock()
    _abandoned.extend(_scorers.values())
    _scorers.clear()


os.register_at_fork(after_in_child=_forget_parents_workers)


def _settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = setting_names()
    for name in kwargs:
        if name not in names and difflib.get_close_matches(name, names, n=1, cutoff=0.8):
            raise ValueError(unknown_setting(name))
    return {name: value for name, value in kwargs.items() if name in names}
