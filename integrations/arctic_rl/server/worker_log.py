"""A worker's logs: ``<worker>.log`` takes what its processes print, native libraries too; ``<worker>.jsonl`` what is
logged, a JSON object a line."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from .process import redirect_output

OURS = __name__.split(".server.")[0]
"""Name above all of our loggers."""


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "worker", "process_id", "logger", "message"}``, and ``error`` with a traceback if there is
    one; ``time`` is ISO 8601 in UTC."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "worker": self._worker,
            "process_id": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _WorkerHandler(logging.FileHandler):
    """Marks the handler of ``open_worker_log``, which replaces an earlier one."""


def open_worker_log(log_file: str) -> None:
    """Send this process's output to ``log_file``, and its log records to the file of that name in ``.jsonl``.

    Logged are what our own modules tell and warnings of any other; warnings are printed too.
    """
    redirect_output(log_file)
    path = Path(log_file)
    handler = _WorkerHandler(path.with_suffix(".jsonl"), encoding="utf-8")
    handler.setFormatter(JsonFormatter(path.stem))
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith(OURS))
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if isinstance(each, _WorkerHandler)]:
        root.removeHandler(earlier)
        earlier.close()
    if not root.handlers:
        printed = logging.StreamHandler()
        printed.setLevel(logging.WARNING)
        root.addHandler(printed)
    root.addHandler(handler)
    logging.getLogger(OURS).setLevel(logging.INFO)
    logging.getLogger(__name__).info("process %d of this worker begins", os.getpid())
