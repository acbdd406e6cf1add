"""What a server over HTTP allows, from the file of ``--config``."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import nearest
from ...errors import ConfigError
from ...value_types import describe, matches

TOKEN_VARIABLE = "ARCTIC_RL_TOKEN"
"""Environment variable with the bearer token, on both sides."""


@dataclass(frozen=True)
class HttpSettings:
    """Settings of the server itself; what a run is like comes with the recipe.

    Raises:
        ConfigError: a value is of the wrong type or out of range, or the server would be open to a network.
    """

    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs a token."""
    port: int = 8642
    """Port to listen on; 0 = a free one, which is printed."""
    backend: str = "builtin"
    """Registered name or dotted path of the backend that serves the calls."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that every request but ``/healthz`` must carry; from the environment, never from the file."""
    tls_certificate: str | None = None
    """Certificate file (PEM); with ``tls_key`` the server speaks HTTPS only."""
    tls_key: str | None = None
    """Key file of the certificate."""
    storage_root: str = "~"
    """Folder below which everything is written: checkpoints, exports, logs. A path that leads out of it is refused."""
    max_body_mb: int = 1024
    """Largest request, in MiB."""
    max_cells: int = 2**26
    """Largest batch, as rows times columns with padding."""
    max_requests: int = 20_000
    """Prompts of ``generate`` that may be under way at once."""
    request_timeout_s: float = 3600.0
    """Seconds after which a request is answered with status 504; the call itself goes on."""
    body_timeout_s: float = 60.0
    """Seconds without a further byte of a request's body after which it is refused."""
    lease_s: float = 120.0
    """Seconds without a sign of life from its client after which a job is stopped."""
    allowed_modules: list[str] = field(default_factory=list)
    """Modules whose functions a request may name by a dotted path, or ask to import."""
    allowed_models: list[str] = field(default_factory=list)
    """Models that a job may load: folders, below which everything is allowed, and hub names; empty = any that brings
    no code of its own."""
    allowed_engine_args: list[str] = field(default_factory=list)
    """Engine arguments that a job may set to a text, a list or a mapping; numbers, true and false need no leave."""
    max_workers: int = 64
    """Most training ranks and engines of a job."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        problems = [
            f"{item.name}={vars(self)[item.name]!r} is not {describe(hints[item.name])}"
            for item in dataclasses.fields(self)
            if not matches(vars(self)[item.name], hints[item.name])
        ]
        if not problems:
            problems = list(self._range_problems())
        if problems:
            raise ConfigError("\n".join(problems))

    def _range_problems(self) -> typing.Iterator[str]:
        for name, low in (("max_body_mb", 1), ("max_cells", 1), ("max_requests", 1), ("max_workers", 2)):
            if vars(self)[name] < low:
                yield f"{name}={vars(self)[name]} must be at least {low}"
        for name in ("request_timeout_s", "body_timeout_s", "lease_s"):
            if vars(self)[name] <= 0:
                yield f"{name}={vars(self)[name]} must be above 0"
        if not 0 <= self.port < 65536:
            yield f"port={self.port} must be from 0 to 65535"
        if (self.tls_certificate is None) != (self.tls_key is None):
            yield "tls_certificate and tls_key go together: give both or neither"
        for name in ("tls_certificate", "tls_key"):
            if vars(self)[name] is not None and not Path(vars(self)[name]).is_file():
                yield f"{name}={vars(self)[name]!r} is not a file"
        problem = None if self.token is None else token_problem(self.token)
        if problem is not None:
            yield problem
        if self.token is None and not is_loopback(self.host):
            yield (
                f"host={self.host!r} is open to a network: set {TOKEN_VARIABLE} to a token of at least 16 characters "
                "in the environment of the server and of its clients, or listen on 127.0.0.1"
            )


def token_problem(token: str) -> str | None:
    """What is wrong with a bearer token; None = nothing. The token itself is not told."""
    if len(token) < 16:
        return f"the token in {TOKEN_VARIABLE} has {len(token)} characters: write at least 16"
    if not token.isascii() or not token.isprintable() or token != token.strip():
        return (
            f"the token in {TOKEN_VARIABLE} does not fit into a header: write printable ASCII characters, without a "
            "space or a line break at its ends"
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_settings(path: str | None, **overrides: Any) -> HttpSettings:
    """The settings of a YAML or JSON file, those of the command line before them, the token from the environment.

    Raises:
        ConfigError: the file cannot be read, or names an unknown setting.
    """
    import yaml

    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise ConfigError(f"--config {path}: must be a mapping of settings to values")
    known = [item.name for item in dataclasses.fields(HttpSettings)]
    problems = [
        f"--config {path}: {name} is unknown: {nearest(str(name), known)}" for name in values if name not in known
    ]
    if "token" in values:
        problems.append(f"--config {path}: token does not belong into a file: set {TOKEN_VARIABLE} in the environment")
    if problems:
        raise ConfigError("\n".join(problems))
    given = {name: value for name, value in overrides.items() if value is not None}
    return HttpSettings(**{**values, "token": os.environ.get(TOKEN_VARIABLE), **given})
