"""A running server of the public package ``arctic-platform``, driven through its own client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...errors import ArcticError, ConfigError, RequestError, UnsupportedError, WorkerDiedError
from ...server.sampling_spec import end_token_ids
from ...server.specs import ServerConfig
from ..base import Batch, InFlight, RemoteBackend
from ..handle import BackendHandle
from . import checkpoints, jobs
from .payload import forward_payload, forward_result, update_payload, update_result
from .prompt_text import PromptTexts, check_prompt_seen
from .rollouts import group_requests, rollout, server_params
from .rows import check_rows, pad_rows, row_chunks

__all__ = ["ArcticPlatformBackend"]

NAME = "arctic-platform"
REQUEST_TIMEOUT_S = 4 * 3600.0
"""Seconds that a call may take; the package's client needs a number."""
STATUS_TIMEOUT_S = 30.0
_JOBS = {"policy": "training", "sampling": "sampling", "ref": "log_prob"}
"""Our names of the server's jobs."""
_OWN = "only the process that started the jobs counts weight versions: call it there"


@dataclasses.dataclass(frozen=True)
class _Model:
    """What is read of the model's folder."""

    texts: PromptTexts
    end_token_ids: list[int]
    vocabulary: int
    context_length: int


class ArcticPlatformBackend(RemoteBackend):
    """See ``RemoteBackend``.

    Prompts travel as text, each checked to have the very tokens of the request; the first request of every process
    has the engine name the tokens that it saw. What the server has no call for is refused.

    Args:
        config: with ``server_url``.
        handle: of jobs that run on the server.

    Raises:
        ConfigError: there is no URL that the client can be told, or the package is not the one this is written for.
        UnsupportedError: a line for each setting that the server would ignore.
    """

    def __init__(self, config: ServerConfig, handle: BackendHandle | None = None) -> None:
        if handle is not None:
            config = dataclasses.replace(config, server_url=handle.address)
        self._host, self._port = jobs.server_address(config.server_url)
        jobs.check_package()
        jobs.check_config(config)
        self._config = config
        self._handle = handle
        self._client: Any = None
        self._model: _Model | None = None
        self._version = 0
        self._gradient_is_there = False
        self._asleep: set[str] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._under_way = 0
        self._idle = asyncio.Condition()
        self._prompts_seen = asyncio.Lock()
        self._prompts_are_seen = False

    @classmethod
    def from_config(cls, config: ServerConfig, handle: BackendHandle | None = None) -> ArcticPlatformBackend:
        return cls(config, handle)

    def reconnect_handle(self) -> BackendHandle:
        """See ``RemoteBackend``.

        Raises:
            ArcticError: no job runs.
        """
        handles = self._jobs()
        ids = {ours: vars(handles)[theirs] for ours, theirs in _JOBS.items()}
        return BackendHandle(
            backend=NAME,
            job_ids={job: str(number) for job, number in ids.items() if number is not None},
            address=self._url,
        )

    def requires_single_forwarder(self) -> bool:
        return True

    def dp_size(self, job: str) -> int:
        sizes = {"policy": self._config.policy_ranks, "ref": self._config.ref_ranks}
        if job not in sizes or (job == "ref" and self._config.reference is None):
            raise UnsupportedError(f"job {job!r}: this server has none")
        return sizes[job]

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        await self._load_model()
        await asyncio.to_thread(self._check_server)
        config = self._client_config(self._config.startup_timeout_s)
        try:
            client = await asyncio.to_thread(_new_client, config)
        except ArcticError:
            raise
        except Exception as error:
            raise ArcticError(f"arctic-platform's server on {self._url} did not start its jobs: {error}") from error
        client.transport.timeout = REQUEST_TIMEOUT_S
        self._client = client

    async def fwd_no_grad(self, job: str, batch: Batch, meta: dict, processing: dict) -> dict:
        import torch

        self._check_awake(job)
        await self._check_batch(batch)
        micro_rows = self._config.micro_batch_rows
        ranks, pieces = self.dp_size(job), self._pieces if job == "policy" else 1
        size = None if micro_rows is None else ranks * pieces * micro_rows
        rows = []
        for chunk in row_chunks(batch, size):
            padded = pad_rows(chunk, ranks * pieces)
            payload = forward_payload(padded, meta, processing)
            with self._explained("forward"):
                answer = await self._connected().fwd_no_grad(payload, reference_model=job == "ref")
            rows.append(forward_result(answer, padded)["batch"]["logprobs"][: len(chunk["input_ids"])])
        return {"batch": {"logprobs": torch.cat(rows)}, "metrics": {}}

    async def fwd_bwd(self, batch: Batch, meta: dict, processing: dict, job: str = "policy") -> dict:
        self._check_policy(job)
        self._check_awake("policy")
        if self._gradient_is_there:
            raise UnsupportedError(
                "fwd_bwd twice before a step: this server's engine would take its step in the midst of the second "
                "call: send the whole mini-batch at once"
            )
        if meta.get("dp_size") is not None and meta["dp_size"] != self.dp_size("policy"):
            raise RequestError(f"dp_size={meta['dp_size']}: the policy has {self.dp_size('policy')} ranks")
        rows, most = len(batch["input_ids"]), self._config.mini_batch_rows
        if most is not None and rows > most:
            raise RequestError(f"a mini-batch of {rows} rows, and the server was started for {most}")
        await self._check_batch(batch)
        padded = pad_rows(batch, self.dp_size("policy") * self._pieces)
        payload = update_payload(padded, meta, processing)
        with self._explained("forward-backward"):
            answer = await self._connected().fwd_bwd(payload)
        self._gradient_is_there = True
        return {
            **update_result(answer, batch, meta, processing),
            "lr": self._config.policy.optimizer.lr,
            "micro_batches": [self._pieces] * self.dp_size("policy"),
        }

    async def step(self, job: str = "policy") -> dict[str, float]:
        self._check_policy(job)
        self._check_awake("policy")
        if not self._gradient_is_there:
            raise RequestError("step without a gradient: call fwd_bwd first")
        with self._explained("step"):
            metrics = (await self._connected().step())["metrics"]
        self._gradient_is_there = False
        lr, norm = _of_first_rank(metrics["last_lr"]), _of_first_rank(metrics.get("grad_norm"))
        expected = self._config.policy.optimizer.lr
        if lr != expected:
            raise ArcticError(f"arctic-platform's server took a step at the rate {lr}, the run's is {expected}")
        if norm is None or not math.isfinite(norm):
            raise ArcticError(f"the gradient norm is {norm}: the loss or a gradient is not finite")
        return {"lr": lr, "grad_norm": norm}

    async def generate(self, requests: list[dict]) -> list[dict]:
        if not requests:
            return []
        model = await self._load_model()
        texts = [model.texts.text(request["prompt_token_ids"]) for request in requests]
        params = [server_params(request["params"], model.end_token_ids) for request in requests]
        async with self._request():
            answers: list[Any] = [None] * len(requests)
            async with self._prompts_seen:
                if not self._prompts_are_seen:
                    (answers[0],) = await self._sample([texts[0]], {**params[0], "prompt_logprobs": 0})
                    check_prompt_seen(requests[0]["prompt_token_ids"], answers[0], whole=True)
                    self._prompts_are_seen = True

            async def fill(places: list[int]) -> None:
                found = await self._sample([texts[place] for place in places], params[places[0]])
                for place, answer in zip(places, found, strict=True):
                    answers[place] = answer

            left = [
                [place for place in places if answers[place] is None]
                for places in group_requests([{"params": item} for item in params])
            ]
            await asyncio.gather(*(fill(places) for places in left if places))
        results = []
        for request, answer in zip(requests, answers, strict=True):
            check_prompt_seen(request["prompt_token_ids"], answer, whole=False)
            with_logprobs = request["params"]["logprobs"] is not None
            results.append(rollout(answer, with_logprobs=with_logprobs, version=self._version))
        return results

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        from arctic_platform.client.requests import sync_weights_request

        if self._handle is not None:
            raise UnsupportedError(f"sync_weights: {_OWN}")
        if keep_cache:
            raise UnsupportedError("keep_cache=True: this server's client empties the prefix cache with every sync")
        self._check_awake("policy")
        await self._call(sync_weights_request(self._jobs()))
        if "kv_cache" not in self._asleep:
            # The text of a prompt has no salt: what older weights computed must go.
            await self.reset_prefix_cache()
        self._version += 1
        return self._version

    async def update_weights(self, *, in_flight: InFlight = "finish", keep_cache: bool = False) -> int:
        if self._handle is not None:
            raise UnsupportedError(f"update_weights: {_OWN}")
        return await super().update_weights(in_flight=in_flight, keep_cache=keep_cache)

    async def update_reference(self) -> None:
        raise UnsupportedError("update_reference: this server's reference model stays what it was loaded as")

    async def weight_norm(self, job: str) -> float:
        self._check_policy(job)
        if self._config.policy.zero_stage == 3 and self._config.policy_ranks > 1:
            raise UnsupportedError("weight_norm with ZeRO stage 3: this server would wait for its other ranks")
        handles = self._jobs()
        body = {"training_job_id": handles.training, "sampling_job_id": handles.sampling}
        return float((await self._call(_request("weight-norm", None, body)))["training_norm"])

    async def sleep_training(self) -> None:
        with self._explained("sleep-training"):
            await self._connected().sleep_training()
        self._asleep.add("policy")

    async def wake_training(self) -> None:
        with self._explained("wake-training"):
            await self._connected().wake_training()
        self._asleep.discard("policy")

    async def sleep_log_prob(self) -> None:
        if self._config.reference is not None:
            await self._call(_request("sleep-log-prob", self._jobs().log_prob, {}))
            self._asleep.add("ref")

    async def wake_log_prob(self) -> None:
        if self._config.reference is not None:
            await self._call(_request("wake-log-prob", self._jobs().log_prob, {}))
            self._asleep.discard("ref")

    async def sleep_sampling(self, level: int) -> None:
        with self._explained("sleep-inference"):
            _check_engines("sleep", await self._connected().sleep_inference(level))
        self._asleep |= {"weights", "kv_cache"}

    async def wake_sampling(self, tags: list[str] | None) -> None:
        with self._explained("wake-inference"):
            _check_engines("wake up", await self._connected().wake_inference(tags))
        self._asleep -= {"weights", "kv_cache"} if tags is None else set(tags)

    async def pause_generation(self, *, in_flight: InFlight = "finish") -> None:
        if in_flight == "keep":
            raise UnsupportedError('pause_generation(in_flight="keep"): this server cannot stop requests under way')
        self._running.clear()
        async with self._idle:
            await self._idle.wait_for(lambda: not self._under_way)

    async def resume_generation(self) -> None:
        self._running.set()

    async def reset_prefix_cache(self) -> None:
        with self._explained("reset-prefix-cache"):
            await self._connected().reset_prefix_cache()

    async def empty_training_cache(self) -> None:
        await self._call(_request("empty-training-cache", self._jobs().training, {}))

    async def save_checkpoint(self, job: str, directory: str) -> None:
        self._check_policy(job)
        with self._explained("save"):
            answer = await self._connected().save_checkpoint(path=directory)
        await asyncio.to_thread(checkpoints.write_facts, directory, answer, self._config.policy.optimizer)

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        self._check_policy(job)
        optimizer = self._config.policy.optimizer
        facts = await asyncio.to_thread(checkpoints.read_facts, directory, optimizer)
        with self._explained("load-checkpoint"):
            answer = await self._connected().load_checkpoint(path=directory)
        self._gradient_is_there = False
        return checkpoints.load_outcome(directory, facts, answer, optimizer)

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        self._check_policy(job)
        scratch = f"{directory}.deepspeed"
        with self._explained("save"):
            answer = await self._connected().save_checkpoint(path=scratch, export_hf=True)
        await asyncio.to_thread(checkpoints.move_export, answer["hf_path"], directory, scratch)

    async def start_profile(self, settings: dict[str, Any]) -> None:
        raise UnsupportedError("start_profile: this server has no profiler")

    async def profile_step(self) -> None:
        raise UnsupportedError("profile_step: this server has no profiler")

    async def stop_profile(self) -> None:
        """Nothing runs that could be stopped."""

    async def node_ids(self) -> list[str]:
        return [self._url.removeprefix("http://")]

    async def shutdown(self) -> None:
        if self._client is None and self._handle is not None:
            self._connected()
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await client.transport.aclose()
                await asyncio.to_thread(client.transport.shutdown)

    async def destroy(self) -> None:
        if self._handle is None:
            await self.shutdown()
        elif self._client is not None:
            await self._client.transport.aclose()
            self._client = None

    @property
    def _url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def _pieces(self) -> int:
        return jobs.micro_batches_of_a_step(self._config)

    def _client_config(self, request_timeout_s: float) -> Any:
        length = 1 if self._model is None else self._model.context_length
        return jobs.client_config(self._config, request_timeout_s=request_timeout_s, context_length=length)

    def _check_server(self) -> None:
        """Refuse a server whose jobs would not be those that the run asks for."""
        import requests

        try:
            answer = requests.get(f"{self._url}/status", timeout=STATUS_TIMEOUT_S)
            answer.raise_for_status()
            problems = list(jobs.allocation_problems(self._config, answer.json()))
        except (requests.RequestException, ValueError, KeyError) as error:
            raise ArcticError(
                f"no arctic-platform server answers at trainer.arctic_rl.server_url={self._url!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        if problems:
            raise ConfigError("\n".join(problems))

    async def _load_model(self) -> _Model:
        if self._model is None:
            self._model = await asyncio.to_thread(_read_model, self._config.policy.model_path)
        return self._model

    def _connected(self) -> Any:
        """The client; of an attached process one that knows the jobs' ids."""
        if self._client is None and self._handle is not None:
            ids = {f"{_JOBS[job]}_job_id": int(number) for job, number in self._handle.job_ids.items()}
            self._client = _new_client(self._client_config(REQUEST_TIMEOUT_S).model_copy(update=ids))
        if self._client is None:
            raise ArcticError(f"no job of this run is on {self._url}: call initialize first")
        return self._client

    def _jobs(self) -> Any:
        return self._connected().jobs

    async def _call(self, request: Any) -> Any:
        with self._explained(request.op):
            return await self._connected().transport.acall(request)

    async def _sample(self, texts: list[str], params: dict[str, Any]) -> list[dict[str, Any]]:
        with self._explained("generate"):
            answers = await self._connected().generate(texts, params)
        if len(answers) != len(texts):
            raise ArcticError(f"arctic-platform's server gave {len(answers)} responses to {len(texts)} prompts")
        return answers

    @contextlib.contextmanager
    def _explained(self, op: str) -> Iterator[None]:
        """Errors of the transport as ours."""
        import aiohttp

        try:
            yield
        except aiohttp.ClientResponseError as error:
            raise ArcticError(
                f"arctic-platform's server on {self._url} answered {op} with {error.status} {error.message}: the "
                "cause stands in the server's own log"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerDiedError(
                f"arctic-platform's server on {self._url} cannot be reached for {op} ({type(error).__name__}: {error})"
            ) from error

    @contextlib.asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        """A request under way; it waits while generation is paused."""
        await self._running.wait()
        if self._asleep & {"weights", "kv_cache"}:
            raise ArcticError("the engines sleep: call wake_sampling first")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            async with self._idle:
                self._idle.notify_all()

    def _check_awake(self, job: str) -> None:
        if job in self._asleep:
            raise ArcticError(f"the ranks of {job} sleep: wake them first")

    def _check_policy(self, job: str) -> None:
        if job != "policy":
            raise UnsupportedError(f"job {job!r}: this server trains, saves and measures the policy alone")

    async def _check_batch(self, batch: Batch) -> None:
        """On a GPU an id that the model has not would end the server."""
        check_rows(batch)
        ids, vocabulary = batch["input_ids"], (await self._load_model()).vocabulary
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise RequestError(f"input_ids from {int(ids.min())} to {int(ids.max())}: the model has {vocabulary}")


def _new_client(config: Any) -> Any:
    from arctic_platform.client import AsyncArcticRLClient

    return AsyncArcticRLClient(config)


def _request(op: str, job_id: int | None, body: dict[str, Any]) -> Any:
    """A call that the server has and the client no method for."""
    from arctic_platform.client.transport import Request

    return Request(op, job_id, body)


def _read_model(path: str) -> _Model:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(path, trust_remote_code=True).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    return _Model(PromptTexts(tokenizer), end_token_ids(path), config.vocab_size, config.max_position_embeddings)


def _of_first_rank(value: Any) -> float | None:
    return value[0] if isinstance(value, list) else value


def _check_engines(call: str, answer: dict[str, Any]) -> None:
    """The server reports an engine that failed among its results, and calls that success."""
    workers = answer["sampling"].get("workers", [])
    failed = [worker["message"] for worker in workers if worker.get("status") == "error"]
    if failed:
        raise ArcticError(f"{len(failed)} of {len(workers)} engines did not {call}: {failed[0]}")
