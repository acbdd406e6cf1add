"""A client's connections to a server over HTTP: the token it shows, whom it trusts, and what a failure means."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator

import httpx

from ..errors import ArcticError, ConfigError, WorkerDiedError
from ..server.http.settings import TOKEN_VARIABLE, token_problem

CA_VARIABLE = "ARCTIC_RL_CA_FILE"
"""Environment variable with a PEM file: the certificate of a server that no public authority has signed, or of the
authority that did."""
CONNECT_TIMEOUT_S = 10.0


def open_client() -> httpx.AsyncClient:
    """A pool of connections; proxies of the environment are not used.

    Raises:
        ConfigError: the file in ``ARCTIC_RL_CA_FILE`` cannot be used.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(verify=_trusted(), limits=limits, trust_env=False, timeout=timeout)


def token_headers() -> dict[str, str]:
    """The header with the token of the environment; none where there is no token.

    Raises:
        ConfigError: it is no token.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return {}
    problem = token_problem(token)
    if problem is not None:
        raise ConfigError(problem)
    return {"authorization": f"Bearer {token}"}


def is_final(error: httpx.TransportError) -> bool:
    """Whether another try would fail in the same way."""
    final = httpx.LocalProtocolError | httpx.UnsupportedProtocol | httpx.ReadTimeout | httpx.WriteTimeout
    return isinstance(error, final) or any(isinstance(cause, ssl.SSLError) for cause in _causes(error))


def connection_error(error: httpx.TransportError, url: str) -> ArcticError:
    """One line for a server that gave no answer.

    Args:
        error: of the last try.
        url: of the server.
    """
    where = f"the server at trainer.arctic_rl.server_url={url!r}"
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return WorkerDiedError(f"{where} gave no answer in time")
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError(
                f"{where} shows a certificate that is not trusted here ({cause.verify_message}): set {CA_VARIABLE} to "
                "the PEM file of that certificate or of its authority, and write the URL with a host that it names"
            )
        if isinstance(cause, ssl.SSLError):
            return ConfigError(f"{where} speaks no TLS that this side knows ({cause}): is it one with http://?")
    secure = "" if url.startswith("https:") else " (one with TLS files wants https://)"
    return WorkerDiedError(
        f"{where} cannot be reached ({type(error).__name__}: {error}): is it running, and is the address "
        f"right{secure}?"
    )


def _trusted() -> ssl.SSLContext | bool:
    file = os.environ.get(CA_VARIABLE)
    if file is None:
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise ConfigError(
            f"{CA_VARIABLE}={file!r} holds no certificate that can be read ({error}): write the path of a PEM file"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
