"""The routes of the server over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from ...backends.base import trained_job
from ...errors import ArcticError
from ...wire.body import CONTENT_TYPE, VERSION, decode, encode_answer
from .calls import CALLS, Arguments, Call, NewJob, Prompts, Trained
from .checks import check_batch, check_processing, check_prompt, folder_inside
from .errors import HttpError, status_of, to_answer
from .gate import REQUEST_ID, Gate
from .job import Job, Jobs
from .replay import Replays
from .settings import HttpSettings

logger = logging.getLogger(__name__)

JSON, NDJSON = "application/json", "application/x-ndjson"
_BATCH_BODY = {"requestBody": {"content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}


class Metrics:
    """What ``/metrics`` shows."""

    def __init__(self, jobs: Jobs) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "arctic_rl_requests", "Answers by call and status", ["call", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "arctic_rl_request_seconds",
            "Seconds of an answer by call",
            ["call"],
            registry=self.registry,
            buckets=(0.01, 0.1, 1, 10, 60, 600, 3600),
        )
        job = Gauge("arctic_rl_job_running", "Whether a job is up", registry=self.registry)
        job.set_function(lambda: jobs.running is not None)
        prompts = Gauge("arctic_rl_prompts_under_way", "Prompts that are being answered", registry=self.registry)
        prompts.set_function(lambda: 0 if jobs.running is None else jobs.running.prompts_under_way)

    def count(self, path: str, status: int, seconds: float) -> None:
        """An answer; paths that are no call count as one."""
        last = path.rsplit("/", 1)[-1]
        call = last if last in _NAMES else "other"
        self._requests.labels(call, str(status)).inc()
        self._seconds.labels(call).observe(seconds)


_PAGES = {"redoc_url": None, "swagger_ui_oauth2_redirect_url": None}
_NAMES = {*CALLS, "jobs", "generate", "fwd_no_grad", "fwd_bwd", "healthz", "metrics"}


def make_app(settings: HttpSettings) -> Gate:
    """The ASGI application.

    Args:
        settings: what the server allows.
    """
    jobs = Jobs(settings)
    metrics = Metrics(jobs)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(jobs.watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await jobs.stop_running()

    app = FastAPI(title="Arctic RL server", version=str(VERSION), lifespan=lifespan, **_PAGES)
    _add_error_handlers(app)
    _add_status(app, jobs, metrics)
    _add_jobs(app, jobs, settings)
    _add_batch_calls(app, jobs, settings)
    _add_generate(app, jobs, settings)
    for name, call in CALLS.items():
        _add_call(app, jobs, settings, name, call)
    return Gate(app, settings, metrics.count)


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        status, headers = status_of(error), None
        if isinstance(error, HTTPException):
            cause, headers = error.__cause__, error.headers
            if not isinstance(cause, HttpError):
                because = "" if cause is None else f": {cause}"
                cause = HttpError(f"{request.url.path}: {error.detail}{because}", error.status_code)
            error, status = cause, cause.status
        elif isinstance(error, RequestValidationError):
            kind = request.headers.get("content-type", "none")
            if kind.partition(";")[0].strip().lower() == JSON:
                problems = "; ".join(f"{_place(item['loc'])}: {item['msg']}" for item in error.errors()[:10])
                error, status = HttpError(problems, 422), 422
            else:
                error, status = HttpError(f"the content-type is {kind}: send {JSON}", 415), 415
        elif status >= 500:
            logger.exception("request %s failed", request.state.request_id, exc_info=error)
        return JSONResponse(to_answer(error, request.state.request_id), status, headers)

    for kind in (ArcticError, ValueError, TimeoutError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _place(location: tuple) -> str:
    return ".".join(str(part) for part in location if part != "body") or "the body"


def _add_status(app: FastAPI, jobs: Jobs, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Whether the server is up, and whether a job runs")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "job_running": jobs.running is not None, "version": VERSION}

    @app.get("/metrics", summary="Counters in Prometheus' text format")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_jobs(app: FastAPI, jobs: Jobs, settings: HttpSettings) -> None:
    starts = Replays(kept=8)

    async def begin(new: NewJob) -> dict[str, Any]:
        job = await jobs.start(new)
        return {"job_id": job.job_id, "dp_sizes": job.jobs(), "lease_s": settings.lease_s}

    @app.post("/v1/jobs", status_code=201, summary="Start the workers of a run")
    async def start(request: Request, new: NewJob) -> dict[str, Any]:
        asked = _fingerprint("start", new.model_dump())
        return await starts.once(request.state.request_id, asked, lambda: begin(new))

    @app.get("/v1/jobs/{job_id}", summary="A sign of life of a job's client")
    async def renew(job_id: str) -> dict[str, Any]:
        return {"job_id": jobs.get(job_id).job_id}

    @app.delete("/v1/jobs/{job_id}", summary="Stop a job and its workers")
    async def stop(job_id: str) -> dict[str, Any]:
        await jobs.stop(jobs.get(job_id))
        return {"job_id": job_id}


class NumbersResponse(JSONResponse):
    """JSON that may hold numbers that are not finite, as Python's own does: the norm of a gradient is one at times."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def _add_call(app: FastAPI, jobs: Jobs, settings: HttpSettings, name: str, call: Call) -> None:
    kind = call.arguments

    async def endpoint(job_id: str, request: Request, arguments: Arguments) -> JSONResponse:
        job = jobs.get(job_id)
        values = arguments.model_dump()
        if "directory" in values:
            values["directory"] = folder_inside(settings.storage_root, values["directory"])
        if "job" in values:
            job.check_serves(values["job"], trained=issubclass(kind, Trained))
        if "settings" in values:
            save_path = values["settings"]["save_path"]
            values["settings"]["save_path"] = folder_inside(settings.storage_root, save_path)
        value = await _carried_out(job, request, settings, call.changes, values, name, lambda: _run(job, name, values))
        return NumbersResponse({"value": value}, headers=job.fault_headers())

    endpoint.__annotations__["arguments"] = Annotated[kind, Body()]
    app.post(f"/v1/jobs/{{job_id}}/{name}", name=name, summary=f"RemoteBackend.{name}")(endpoint)


def _run(job: Job, name: str, values: dict[str, Any]) -> Awaitable[Any]:
    if issubclass(CALLS[name].arguments, Trained):
        others = {key: value for key, value in values.items() if key != "job"}
        values = {**others, **trained_job(values["job"])}
    return getattr(job.backend, name)(**values)


def _add_batch_calls(app: FastAPI, jobs: Jobs, settings: HttpSettings) -> None:
    async def read(request: Request, names: tuple[str, ...], *, updates: bool) -> tuple[dict, dict, bytes]:
        body = await request.body()
        values, batch = await asyncio.to_thread(decode, body, max_cells=settings.max_cells)
        if set(values) != set(names):
            raise HttpError(
                f"the body must hold {', '.join(names)}; it holds {', '.join(sorted(values)) or 'nothing'}"
            )
        check_processing(values["processing"], settings)
        await asyncio.to_thread(check_batch, batch, values["meta"], updates=updates)
        return values, batch, body

    @app.post("/v1/jobs/{job_id}/fwd_no_grad", summary="RemoteBackend.fwd_no_grad", openapi_extra=_BATCH_BODY)
    async def fwd_no_grad(job_id: str, request: Request) -> Response:
        job = jobs.get(job_id)
        values, batch, _ = await read(request, ("job", "meta", "processing"), updates=False)
        job.check_serves(values["job"])
        result = await _in_time(
            job.backend.fwd_no_grad(values["job"], batch, values["meta"], values["processing"]), settings
        )
        return await _with_rows(job, result, batch)

    @app.post("/v1/jobs/{job_id}/fwd_bwd", summary="RemoteBackend.fwd_bwd", openapi_extra=_BATCH_BODY)
    async def fwd_bwd(job_id: str, request: Request) -> Response:
        job = jobs.get(job_id)
        values, batch, body = await read(request, ("job", "meta", "processing"), updates=True)
        job.check_serves(values["job"], trained=True)
        job.check_ranks(values["job"], values["meta"]["dp_size"])
        result = await _carried_out(
            job,
            request,
            settings,
            True,
            body,
            "fwd_bwd",
            lambda: job.backend.fwd_bwd(batch, values["meta"], values["processing"], **trained_job(values["job"])),
        )
        return await _with_rows(job, result, batch)


async def _with_rows(job: Job, result: dict[str, Any], batch: dict[str, Any]) -> Response:
    rest = {name: value for name, value in result.items() if name != "batch"}
    body = await asyncio.to_thread(encode_answer, rest, result.get("batch"), batch)
    return Response(body, media_type=CONTENT_TYPE, headers=job.fault_headers())


def _add_generate(app: FastAPI, jobs: Jobs, settings: HttpSettings) -> None:
    @app.post("/v1/jobs/{job_id}/generate", summary="RemoteBackend.generate, a line a response as each is done")
    async def generate(job_id: str, prompts: Prompts) -> StreamingResponse:
        job = jobs.get(job_id)
        requests = [check_prompt(prompt) for prompt in prompts.requests]
        if job.prompts_under_way + len(requests) > settings.max_requests:
            raise HttpError(
                f"{job.prompts_under_way} prompts are under way; {len(requests)} more are above the server's "
                f"max_requests={settings.max_requests}",
                429,
            )
        return StreamingResponse(_lines(job, requests), media_type=NDJSON)


async def _lines(job: Job, requests: list[dict[str, Any]]) -> AsyncIterator[str]:
    """A JSON line for each response, with its place among the requests; what is left is given up with the client."""

    async def one(index: int) -> dict[str, Any]:
        try:
            (result,) = await job.backend.generate([requests[index]])
        except Exception as error:
            return {"index": index, "status": status_of(error), **to_answer(error, f"prompt {index}")}
        return {"index": index, "result": result}

    job.prompts_under_way += len(requests)
    tasks = [asyncio.ensure_future(one(index)) for index in range(len(requests))]
    try:
        for task in asyncio.as_completed(tasks):
            yield json.dumps(await task) + "\n"
    finally:
        job.prompts_under_way -= len(requests)
        for task in tasks:
            task.cancel()


async def _carried_out(
    job: Job,
    request: Request,
    settings: HttpSettings,
    changes: bool,
    asked: bytes | dict[str, Any],
    name: str,
    start: Callable[[], Awaitable[Any]],
) -> Any:
    """The outcome of a call; one that changes something is carried out once for each request id.

    Raises:
        HttpError: it has no id.
        TimeoutError: it takes longer than ``request_timeout_s``; it goes on, and a repeated request gets its outcome.
    """
    if not changes:
        return await _in_time(start(), settings)
    if REQUEST_ID not in request.headers:
        raise HttpError(f"{name} changes the server's state: send a {REQUEST_ID} of its own with each such request")
    once = job.replays.once(request.headers[REQUEST_ID], _fingerprint(name, asked), start)
    return await _in_time(once, settings)


def _fingerprint(name: str, asked: bytes | dict[str, Any]) -> str:
    """Of a call and what it takes."""
    content = asked if isinstance(asked, bytes) else json.dumps(asked, sort_keys=True).encode()
    return hashlib.blake2b(name.encode() + b"\0" + content).hexdigest()


async def _in_time(call: Awaitable[Any], settings: HttpSettings) -> Any:
    try:
        return await asyncio.wait_for(call, settings.request_timeout_s)
    except TimeoutError as error:
        raise TimeoutError(
            f"the call takes longer than the server's request_timeout_s={settings.request_timeout_s}"
        ) from error
