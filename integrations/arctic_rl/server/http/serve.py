"""``python -m integrations.arctic_rl.server``: serve the calls of a backend over HTTP."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...backends.registry import RemoteBackendRegistry
from ...errors import ArcticError, ConfigError
from ...uv_run import uv_run_problems
from .settings import HttpSettings, read_settings

if TYPE_CHECKING:
    import uvicorn

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; a job that runs is stopped then, and Ray too if it was started here."""
    parser = argparse.ArgumentParser(prog="python -m integrations.arctic_rl.server", description=__doc__)
    parser.add_argument("--config", help="YAML or JSON file of settings (see HttpSettings)")
    parser.add_argument("--host", help="address to listen on; any but a loopback one needs ARCTIC_RL_TOKEN")
    parser.add_argument("--port", type=int, help="port to listen on; 0 = a free one, which is printed")
    parser.add_argument("--storage_root", help="folder below which checkpoints, exports and logs are written")
    given = parser.parse_args(arguments)
    try:
        settings = read_settings(given.config, host=given.host, port=given.port, storage_root=given.storage_root)
        serve(settings)
    except ArcticError as error:
        sys.exit(f"error: {error}")


def uvicorn_config(settings: HttpSettings) -> uvicorn.Config:
    """How uvicorn serves the application.

    Raises:
        ArcticError: the TLS files cannot be used.
    """
    import uvicorn

    from .app import make_app

    config = uvicorn.Config(
        make_app(settings),
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
    )
    try:
        config.load()
    except OSError as error:
        raise ArcticError(
            f"tls_certificate={settings.tls_certificate!r} and tls_key={settings.tls_key!r} cannot be used ({error}): "
            "give the PEM files of a certificate and of its key, without a passphrase"
        ) from error
    return config


def check_backend(settings: HttpSettings) -> None:
    """Refuse a backend that no job could run on.

    Raises:
        ConfigError: it is not registered, its dotted path leads nowhere, or it is itself a client of such a server.
    """
    if settings.backend == "http":
        raise ConfigError("backend='http' is the client of this server: write one that trains, such as builtin")
    try:
        RemoteBackendRegistry.check_name(settings.backend)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("trainer.arctic_rl.")) from error


def address(settings: HttpSettings, port: int) -> str:
    """The URL that a client on this host, or one that knows it by that name, is told."""
    scheme = "http" if settings.tls_certificate is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{port}"


def serve(settings: HttpSettings) -> None:
    """Run the server in this process.

    Raises:
        ConfigError: the backend is unknown, or Ray could not start workers as the server was started.
        ArcticError: the port is taken, or the TLS files cannot be used.
    """
    check_backend(settings)
    if problems := list(uv_run_problems()):
        raise ConfigError("\n".join(problems))
    import ray
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list | None = None) -> None:
            await super().startup(sockets)
            print(f"serving on {address(settings, socket.getsockname()[1])}", flush=True)

    config = uvicorn_config(settings)
    try:
        socket = config.bind_socket()
    except SystemExit as error:
        raise ArcticError(f"port={settings.port} on {settings.host} cannot be listened on: choose another") from error
    started_ray = settings.backend == "builtin" and not ray.is_initialized()
    if started_ray:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(include_dashboard=False, log_to_driver=False)
    # Uvicorn stops in order at a signal and then raises it again for its earlier handler: Ray's exits with 15.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    try:
        Server(config).run(sockets=[socket])
    finally:
        socket.close()
        if started_ray:
            ray.shutdown()
