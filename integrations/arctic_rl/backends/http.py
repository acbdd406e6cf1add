"""A server that is reached over HTTP (``python -m integrations.arctic_rl.server``)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

from ..errors import ArcticError, ConfigError, WorkerDiedError
from ..server.http.errors import from_answer
from ..server.http.gate import FAULTS, REQUEST_ID, WIRE_VERSION
from ..server.plain import to_plain
from ..server.specs import ServerConfig
from ..server_url import url_problem
from ..wire.body import CONTENT_TYPE, VERSION, decode_answer, encode
from .base import Batch, InFlight, RemoteBackend
from .handle import BackendHandle
from .http_connection import CONNECT_TIMEOUT_S, connection_error, is_final, open_client, token_headers
from .prompt_streams import Deliver, PromptStreams

T = TypeVar("T")

TRIES = 5
"""Times that a request is sent while the connection fails."""
FIRST_PAUSE_S = 0.5
"""Pause before the second try; each further one is twice as long."""
JOB = "server"


class HttpBackend(RemoteBackend):
    """See ``RemoteBackend``.

    A request whose connection fails is sent again under the same id, which the server carries out once; a server that
    is silent for its whole lease ends every call.

    Args:
        config: with ``server_url``.
        handle: of a job that runs on the server.

    Raises:
        ConfigError: there is no URL, or the config holds code.
    """

    def __init__(self, config: ServerConfig, handle: BackendHandle | None = None) -> None:
        url = config.server_url if handle is None else handle.address
        problem = url_problem(url)
        if problem is not None:
            raise ConfigError(f"trainer.arctic_rl.server_url={url!r} {problem}")
        self._url = url.rstrip("/")
        self._config = (
            None if handle is not None else to_plain(dataclasses.replace(config, server_url=None, env_vars={}))
        )
        self._startup_timeout_s = config.startup_timeout_s
        self._job_id = None if handle is None else handle.job_ids[JOB]
        self._dp_sizes: dict[str, int] = {} if handle is None else dict(handle.facts["dp_sizes"])
        self._lease_s = 120.0 if handle is None else handle.facts["lease_s"]
        self._attached = handle is not None
        self._client: httpx.AsyncClient | None = None
        self._signs: asyncio.Task | None = None
        self._faults, self._told = Counter(), Counter()
        self._prompts = PromptStreams(self._stream, self._retried)

    @classmethod
    def from_config(cls, config: ServerConfig, handle: BackendHandle | None = None) -> HttpBackend:
        return cls(config, handle)

    def reconnect_handle(self) -> BackendHandle:
        """See ``RemoteBackend``; it holds no token: the attaching process has its own.

        Raises:
            ArcticError: no job runs.
        """
        if self._job_id is None:
            raise ArcticError("there is no job to attach to: call initialize first")
        facts = {"dp_sizes": dict(self._dp_sizes), "lease_s": self._lease_s}
        return BackendHandle(backend="http", job_ids={JOB: self._job_id}, address=self._url, facts=facts)

    def requires_single_forwarder(self) -> bool:
        return True

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        new = {"config": self._config, "num_training_steps": num_training_steps}
        if critic_training_steps:
            new["critic_training_steps"] = critic_training_steps
        started = (await self._send("POST", "/v1/jobs", json=new, timeout_s=self._startup_timeout_s + 60)).json()
        self._job_id, self._dp_sizes = started["job_id"], started["dp_sizes"]
        self._lease_s = started["lease_s"]

    def dp_size(self, job: str) -> int:
        return self._dp_sizes[job]

    async def fwd_no_grad(self, job: str, batch: Batch, meta: dict, processing: dict) -> dict:
        return await self._pass("fwd_no_grad", {"job": job, "meta": meta, "processing": processing}, batch)

    async def fwd_bwd(self, batch: Batch, meta: dict, processing: dict, job: str = "policy") -> dict:
        return await self._pass("fwd_bwd", {"job": job, "meta": meta, "processing": processing}, batch)

    async def step(self, job: str = "policy") -> dict[str, float]:
        return await self._call("step", job=job)

    async def generate(self, requests: list[dict]) -> list[dict]:
        self._job_path()
        return await self._prompts.ask(requests)

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        return await self._call("sync_weights", keep_cache=keep_cache)

    async def update_weights(self, *, in_flight: InFlight = "finish", keep_cache: bool = False) -> int:
        return await self._call("update_weights", in_flight=in_flight, keep_cache=keep_cache)

    async def update_reference(self) -> None:
        await self._call("update_reference")

    async def weight_norm(self, job: str) -> float:
        return await self._call("weight_norm", job=job)

    async def sleep_training(self) -> None:
        await self._call("sleep_training")

    async def wake_training(self) -> None:
        await self._call("wake_training")

    async def sleep_log_prob(self) -> None:
        await self._call("sleep_log_prob")

    async def wake_log_prob(self) -> None:
        await self._call("wake_log_prob")

    async def sleep_sampling(self, level: int) -> None:
        await self._call("sleep_sampling", level=level)

    async def wake_sampling(self, tags: list[str] | None) -> None:
        await self._call("wake_sampling", tags=tags)

    async def pause_generation(self, *, in_flight: InFlight = "finish") -> None:
        await self._call("pause_generation", in_flight=in_flight)

    async def resume_generation(self) -> None:
        await self._call("resume_generation")

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def empty_training_cache(self) -> None:
        await self._call("empty_training_cache")

    async def save_checkpoint(self, job: str, directory: str) -> None:
        await self._call("save_checkpoint", job=job, directory=directory)

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        return await self._call("load_checkpoint", job=job, directory=directory)

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        await self._call("save_weights", directory=directory, job=job)

    async def start_profile(self, settings: dict[str, Any]) -> None:
        await self._call("start_profile", settings=settings)

    async def profile_step(self) -> None:
        await self._call("profile_step")

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def node_ids(self) -> list[str]:
        return await self._call("node_ids")

    def take_fault_metrics(self) -> dict[str, float]:
        news, self._told = self._faults - self._told, self._faults
        return dict(news)

    async def shutdown(self) -> None:
        with contextlib.suppress(ArcticError):
            if self._job_id is not None:
                await self._send("DELETE", f"/v1/jobs/{self._job_id}", tries=2)
        await self._close()

    async def destroy(self) -> None:
        await (self._close() if self._attached else self.shutdown())

    async def _close(self) -> None:
        self._job_id = None
        self._prompts.close()
        if self._signs is not None:
            self._signs.cancel()
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _call(self, name: str, **arguments: Any) -> Any:
        answer = await self._send("POST", f"{self._job_path()}/{name}", json=arguments)
        return answer.json()["value"]

    async def _pass(self, name: str, values: dict[str, Any], batch: Batch) -> dict:
        body = await asyncio.to_thread(encode, values, batch)
        headers = {"content-type": CONTENT_TYPE}
        answer = await self._send("POST", f"{self._job_path()}/{name}", content=body, headers=headers)
        result, rows = await asyncio.to_thread(decode_answer, answer.content, batch)
        return result if rows is None else result | {"batch": rows}

    async def _stream(self, requests: list[dict[str, Any]], deliver: Deliver) -> None:
        """Ask once, and hand each response or error over as it comes."""
        url = f"{self._url}{self._job_path()}/generate"
        async with self._connection().stream(
            "POST", url, json={"requests": requests}, headers=self._headers()
        ) as answer:
            if answer.status_code != 200:
                raise from_answer(answer.status_code, _json(await answer.aread()), url)
            async for line in answer.aiter_lines():
                item = json.loads(line)
                result = item["result"] if "result" in item else from_answer(item["status"], item, url)
                deliver(item["index"], result)

    async def _send(
        self, method: str, path: str, *, timeout_s: float | None = None, tries: int = TRIES, **content: Any
    ) -> httpx.Response:
        """One answer, whatever number of tries it takes.

        Raises:
            ArcticError: the server refuses, fails, or cannot be reached.
        """
        headers = {**self._headers(), **content.pop("headers", {}), REQUEST_ID: uuid.uuid4().hex}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)

        def request() -> Awaitable[httpx.Response]:
            return self._connection().request(method, self._url + path, headers=headers, timeout=timeout, **content)

        answer = await self._retried(request, tries)
        if answer.is_success:
            # The largest: answers may overtake each other.
            self._faults = self._faults | Counter(json.loads(answer.headers.get(FAULTS, "{}")))
            return answer
        raise from_answer(answer.status_code, _json(answer.content), self._url + path)

    async def _retried(self, attempt: Callable[[], Awaitable[T]], tries: int = TRIES) -> T:
        """The outcome of the first try whose connection holds.

        Raises:
            ArcticError: none does, or the server is silent for its whole lease.
        """
        pause = FIRST_PAUSE_S
        for number in range(1, tries + 1):
            try:
                return await self._while_alive(attempt())
            except httpx.TransportError as error:
                if number == tries or is_final(error):
                    raise connection_error(error, self._url) from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("every try returns or raises")

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """The outcome of a request, unless the server gives no sign of life meanwhile."""
        task = asyncio.ensure_future(call)
        if self._job_id is not None and (self._signs is None or self._signs.done()):
            self._signs = asyncio.ensure_future(self._give_signs())
            self._signs.add_done_callback(lambda signs: signs.cancelled() or signs.exception())
        waited = {task} if self._signs is None else {task, self._signs}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            task.cancel()
            raise
        if task.done():
            return task.result()
        task.cancel()
        self._signs.result()
        raise WorkerDiedError(f"the job on {self._url} has ended")

    async def _give_signs(self) -> None:
        """Tell the server that this client lives; raises when the server is silent, or knows no such job."""
        url, silent_since = f"{self._url}/v1/jobs/{self._job_id}", asyncio.get_running_loop().time()
        while True:
            try:
                answer = await self._connection().get(url, headers=self._headers(), timeout=CONNECT_TIMEOUT_S)
            except httpx.TransportError as error:
                if asyncio.get_running_loop().time() - silent_since > self._lease_s:
                    raise connection_error(error, self._url) from error
            else:
                silent_since = asyncio.get_running_loop().time()
                if not answer.is_success:
                    raise from_answer(answer.status_code, _json(answer.content), url)
            await asyncio.sleep(self._lease_s / 6)

    def _connection(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = open_client()
        return self._client

    def _headers(self) -> dict[str, str]:
        return {WIRE_VERSION: str(VERSION), **token_headers()}

    def _job_path(self) -> str:
        if self._job_id is None:
            raise ArcticError(f"no job of this run is on {self._url}: call initialize first")
        return f"/v1/jobs/{self._job_id}"


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
