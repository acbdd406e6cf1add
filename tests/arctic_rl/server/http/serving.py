"""A server over HTTP in a thread of this process, on a free port of the loopback address."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from integrations.arctic_rl.server.http.serve import uvicorn_config
from integrations.arctic_rl.server.http.settings import HttpSettings
from tests.arctic_rl.backends import model_backend


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """The URL of a server with an in-process backend behind it."""
    config = uvicorn_config(HttpSettings(**{"backend": model_backend.PATH, **settings}))
    config.timeout_graceful_shutdown = 2
    scheme = "https" if config.is_ssl else "http"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive(), "the server did not stop"
