"""What every request passes before its body is read: its id, size, version and token; and what is counted of it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from ...wire.body import VERSION
from .errors import HttpError, to_answer
from .settings import HttpSettings

logger = logging.getLogger(__name__)

REQUEST_ID, WIRE_VERSION = "x-request-id", "x-arctic-rl-version"
FAULTS = "x-arctic-rl-faults"
"""Of an answer: what failed and was mended since the job began, counts by name in JSON; left out where nothing was."""
OPEN_PATHS = ("/healthz",)
"""What a caller without a token may read."""
WITHOUT_VERSION = ("/healthz", "/metrics", "/openapi.json", "/docs")
MAX_ID_LENGTH = 128

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Gate:
    """ASGI middleware in front of the routes.

    Args:
        app: the routes.
        settings: token and size limit.
        count: called with path, status and seconds of every answer.
    """

    def __init__(self, app: Any, settings: HttpSettings, count: Callable[[str, int, float], None]) -> None:
        self._app = app
        self._settings = settings
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get(REQUEST_ID) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        start, status, whole = time.perf_counter(), 500, False

        async def answer(message: dict[str, Any]) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))],
                }
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._limited(receive), answer)
        except HttpError as error:
            request_id = request_id if _is_plain(request_id) else uuid.uuid4().hex
            await _refuse(answer, error, request_id)
        except Exception:
            # Starlette raises again what it has answered with status 500, and uvicorn would cut the connection.
            if not whole:
                raise
        finally:
            self._count(scope["path"], status, time.perf_counter() - start)

    def _check(self, path: str, headers: dict[str, str]) -> None:
        if REQUEST_ID in headers and not _is_plain(headers[REQUEST_ID]):
            raise HttpError(f"{REQUEST_ID} must be 1 to {MAX_ID_LENGTH} letters, digits, '-', '_' or '.'")
        token = self._settings.token
        if token is not None and path not in OPEN_PATHS:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise HttpError("the bearer token is missing or wrong: set ARCTIC_RL_TOKEN to the server's", 401)
        if path not in WITHOUT_VERSION and headers.get(WIRE_VERSION) != str(VERSION):
            raise HttpError(
                f"{WIRE_VERSION} is {headers.get(WIRE_VERSION)!r}; this server speaks version {VERSION}: install the "
                "same release on both sides",
                426,
            )
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise HttpError(f"content-length {length!r} is not a number")
        self._check_size(int(length))

    def _check_size(self, size: int) -> None:
        if size > self._settings.max_body_mb * 2**20:
            raise HttpError(
                f"the request has {size} bytes; the server's max_body_mb={self._settings.max_body_mb}", 413
            )

    def _limited(self, receive: Receive) -> Receive:
        """Counts what arrives, as a body in chunks announces no length, and refuses one that does not go on."""
        size, whole = 0, False

        async def counted() -> dict[str, Any]:
            nonlocal size, whole
            if whole:
                return await receive()
            limit = self._settings.body_timeout_s
            try:
                message = await asyncio.wait_for(receive(), limit)
            except TimeoutError as error:
                raise HttpError(
                    f"the body stopped after {size} bytes: nothing came in the server's body_timeout_s={limit}", 408
                ) from error
            size += len(message.get("body", b""))
            self._check_size(size)
            whole = not message.get("more_body", False)
            return message

        return counted


def _is_plain(request_id: str) -> bool:
    return 0 < len(request_id) <= MAX_ID_LENGTH and request_id.isascii() and set(request_id) <= _ID_CHARACTERS


_ID_CHARACTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


async def _refuse(send: Send, error: HttpError, request_id: str) -> None:
    body = json.dumps(to_answer(error, request_id)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
