"""Keeping SQLite from creating temporary files, in processes where nobody else needs to open one meanwhile."""

import contextlib
import os
import resource
from collections.abc import Iterator

ONE_CALL_VARIABLE = "ARCTIC_RL_ONE_CALL_AT_A_TIME"
"""An environment variable that holds a process's id if it runs one call at a time and does nothing else."""


def runs_one_call_at_a_time() -> bool:
    """Says whether this process does nothing besides its current call, as scoring workers do."""
    return os.environ.get(ONE_CALL_VARIABLE) == str(os.getpid())


@contextlib.contextmanager
def no_new_files() -> Iterator[None]:
    """Makes every attempt of this whole process to open a file fail (EMFILE); files that are open stay so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(2)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
