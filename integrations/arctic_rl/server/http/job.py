"""The one job that a server runs at a time, and the client that it belongs to."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from typing import Any

from ...backends.base import RemoteBackend
from ...backends.registry import RemoteBackendRegistry
from ..plain import from_plain
from ..process import kill_run
from ..specs import ServerConfig
from .calls import NewJob
from .checks import check_config, folder_inside
from .errors import HttpError
from .gate import FAULTS
from .replay import Replays
from .settings import HttpSettings

logger = logging.getLogger(__name__)

LOG_FOLDER = "arctic-rl-logs"
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Job:
    """A backend that is up, with what is remembered of its requests."""

    def __init__(self, backend: RemoteBackend, config: ServerConfig) -> None:
        self.job_id = uuid.uuid4().hex
        self.backend = backend
        self.config = config
        self.replays = Replays()
        self.seen = time.monotonic()
        self.prompts_under_way = 0
        self._faults: Counter[str] = Counter()

    def fault_headers(self) -> dict[str, str]:
        """The header that tells a client's ``take_fault_metrics``."""
        self._faults.update(self.backend.take_fault_metrics())
        return {FAULTS: json.dumps(self._faults)} if self._faults else {}

    def jobs(self) -> dict[str, int]:
        """Training jobs with their data-parallel size."""
        specs = {"policy": self.config.policy, "critic": self.config.critic, "ref": self.config.reference}
        return {name: self.backend.dp_size(name) for name, spec in specs.items() if spec is not None}

    def check_serves(self, name: Any, *, trained: bool = False) -> None:
        """Refuse a training job that is not there, or is not trained.

        Raises:
            HttpError: with those that are.
        """
        known = [job for job in self.jobs() if not (trained and job == "ref")]
        if name not in known:
            raise HttpError(f"job {name!r} is not served: known are {', '.join(known)}")

    def check_ranks(self, name: str, dp_size: int) -> None:
        """Refuse an update whose loss is scaled for another number of ranks.

        Raises:
            HttpError: with the number of ranks.
        """
        ranks = self.backend.dp_size(name)
        if dp_size != ranks:
            raise HttpError(f"meta['dp_size']={dp_size}, but the job {name!r} has {ranks} ranks: send that number")


class Jobs:
    """Starts a job, finds it, and stops it when its client asks or is gone.

    Args:
        settings: the server's.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._job: Job | None = None
        self._changing = asyncio.Lock()

    @property
    def running(self) -> Job | None:
        return self._job

    def get(self, job_id: str) -> Job:
        """The job of an id, whose client is seen to be alive by this.

        Raises:
            HttpError: it is not running.
        """
        if self._job is None or self._job.job_id != job_id:
            now = "none runs" if self._job is None else "another one runs"
            raise HttpError(f"there is no job {job_id[:64]!r}: {now}; it has ended, or the id is wrong", 404)
        self._job.seen = time.monotonic()
        return self._job

    async def start(self, new: NewJob) -> Job:
        """Bring up the workers of a job.

        Raises:
            HttpError: one is running already, or the settings do not allow this one.
            ConfigError: the config is not one.
        """
        if self._changing.locked() or self._job is not None:
            raise HttpError(
                "a job is running already: the server runs one at a time; it ends with its run, or when its client "
                f"has been silent for lease_s={self._settings.lease_s}",
                409,
            )
        async with self._changing:
            config = from_plain(ServerConfig, new.config)
            if not _RUN_ID.fullmatch(config.run_id):
                raise HttpError(f"config.run_id={config.run_id!r} must be 1 to 64 letters, digits, '-' or '_'")
            if config.env_vars:
                raise HttpError(
                    "config.env_vars: the server's workers get the server's own environment; leave it empty"
                )
            await asyncio.to_thread(check_config, config, self._settings)
            logs = folder_inside(self._settings.storage_root, os.path.join(LOG_FOLDER, config.run_id))
            # Not the client's: what carries a run's id is killed at its end, and the client may be on this machine.
            config = dataclasses.replace(config, log_dir=logs, run_id=f"server-{uuid.uuid4().hex[:12]}")
            backend = RemoteBackendRegistry.get(self._settings.backend).from_config(config)
            job = Job(backend, config)
            try:
                critics = {} if config.critic is None else {"critic_training_steps": new.critic_training_steps}
                await backend.initialize(new.num_training_steps, **critics)
            except BaseException:
                await self._end(job)
                raise
            job.seen = time.monotonic()
            self._job = job
            return job

    async def stop(self, job: Job) -> None:
        """Stop a job; does nothing for one that has ended."""
        async with self._changing:
            if self._job is job:
                self._job = None
                await self._end(job)

    async def stop_running(self) -> None:
        if self._job is not None:
            await self.stop(self._job)

    async def watch(self) -> None:
        """Never returns; stops the job of a client that has given no sign of life for ``lease_s``."""
        while True:
            await asyncio.sleep(min(self._settings.lease_s / 4, 5.0))
            job = self._job
            if job is not None and time.monotonic() - job.seen > self._settings.lease_s:
                logger.warning("job %s is stopped: its client was silent for %s s", job.job_id, self._settings.lease_s)
                await self.stop(job)

    async def _end(self, job: Job) -> None:
        try:
            await job.backend.shutdown()
        finally:
            await asyncio.to_thread(kill_run, job.config.run_id)
