"""Errors as answers: a status, and a cause that a client raises again."""

from __future__ import annotations

from typing import Any

from ...errors import (
    ArcticError,
    CheckpointError,
    ConfigError,
    PlacementError,
    RequestError,
    UnsupportedError,
    WorkerDiedError,
)
from ...wire.rows import WireError

_KINDS: dict[str, type[ArcticError]] = {
    kind.__name__: kind
    for kind in (
        ArcticError,
        CheckpointError,
        ConfigError,
        PlacementError,
        RequestError,
        UnsupportedError,
        WorkerDiedError,
        WireError,
    )
}


_REFUSED = (400, 408, 413, 415, 422, 429)
"""Statuses of requests that are refused for what they are."""


class HttpError(ArcticError):
    """A request that is refused before a backend sees it.

    Args:
        message: what is wrong, and what to send instead.
        status: 4xx.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.status)


def status_of(error: BaseException) -> int:
    """400 for what the request asks, 409 for a checkpoint that does not fit, 504 for a time-out, else 500."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, CheckpointError):
        return 409
    if isinstance(error, ValueError):
        return 400
    return 504 if isinstance(error, TimeoutError) else 500


def to_answer(error: BaseException, request_id: str) -> dict[str, Any]:
    """The body of an answer that says what went wrong."""
    return {"error": {"type": type(error).__name__, "message": str(error), "request_id": request_id}}


def from_answer(status: int, answer: Any, url: str) -> ArcticError:
    """The error that a client raises for an answer that is not a success."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return ArcticError(f"{url} answered with status {status}, and not as this server does: is the URL right?")
    message = f"{error['message']} (request {error.get('request_id')}, {url})"
    other = RequestError if status in _REFUSED else ArcticError
    return _KINDS.get(str(error.get("type")), other)(message)
