"""The address of a server over HTTP, before anything is sent to it."""

from __future__ import annotations

from urllib.parse import urlsplit


def url_problem(url: str | None) -> str | None:
    """What is wrong with the URL of a server, and what to write; None = nothing."""
    wanted = "must begin with http:// or https:// and hold a host, like http://127.0.0.1:8642"
    try:
        parts = urlsplit(url or "")
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return f"{wanted}: {error}"
    if not whole:
        return wanted
    if parts.username is not None or parts.query or parts.fragment:
        return "must hold a host, a port and a path only; a token belongs into ARCTIC_RL_TOKEN"
    return None
