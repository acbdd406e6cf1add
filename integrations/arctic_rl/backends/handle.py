"""What another process needs to attach to a server that is up: where it is, and nothing of what it was told to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BackendHandle:
    """A small picklable bundle; ``RemoteBackendRegistry.attach`` makes a backend of it.

    It names no policy setting: those come from the config that is given beside it.
    """

    backend: str
    """The backend's registered name or dotted path, which the attaching process looks up anew."""
    job_ids: Mapping[str, str] = field(default_factory=dict)
    """The server's name of each job: ``policy``, ``ref``, ``sampling``, ..."""
    address: str | None = None
    """URL of a server that is reached over a network."""
    actors: Mapping[str, Any] = field(default_factory=dict)
    """Ray actor handles, by worker."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the backend's own, such as a folder that its workers share."""
