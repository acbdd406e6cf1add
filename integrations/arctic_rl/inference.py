"""SkyRL's inference engine interface in front of a remote backend: token ids in, token ids out."""

import difflib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NoReturn, Protocol

from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
)

from .errors import ArcticError, UnsupportedError
from .sampling_params import expand_seed, to_vllm_kwargs
from .weight_versions import note_weight_versions

_STOP_REASONS = ("stop", "length", "abort")
_SERVED_INPUTS = ("prompt_token_ids", "sampling_params", "session_ids", "cache_salt")
_REFUSED_INPUTS = {
    "prompts": "send prompt_token_ids; the client does not apply chat templates",
    "mm_features": "images and other modalities are not served; use a text recipe",
    "routed_experts_prompt_starts": "set generator.inference_engine.enable_return_routed_experts=false",
    "return_sample_support": "set generator.inference_engine.enable_return_sample_support_set=false",
}


class SamplingBackend(Protocol):
    """What the client needs of a backend."""

    async def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One result a request, in order.

        A request has ``prompt_token_ids``, ``params`` (keyword arguments of ``vllm.SamplingParams``), ``cache_salt``
        and ``session_id``; a result ``token_ids``, ``logprobs`` (or None) and ``stop_reason``.
        """

    async def reset_prefix_cache(self) -> None: ...

    async def sleep_sampling(self, level: int) -> None: ...

    async def wake_sampling(self, tags: list[str] | None) -> None: ...

    async def pause_generation(self, *, in_flight: Literal["finish", "keep"]) -> None: ...

    async def resume_generation(self) -> None: ...


def prompt_digest(token_ids: Sequence[int]) -> str:
    """A stable name for a prompt."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


class ArcticInferenceClient(InferenceEngineInterface):
    """``InferenceEngineInterface`` of SkyRL 0.4.0, spoken to a backend.

    A response's text is ``tokenizer.decode(ids, skip_special_tokens=True)``, which is SkyRL's documented contract:
    vLLM's own text ends at a stop string although the last token may go on, and it is not needed otherwise.

    A seed in the sampling parameters is expanded per weight version, prompt, sample and turn. A session's requests
    count as its turns until ``finish_session``; without session ids, equal prompts of one call are told apart by
    their order.

    Args:
        backend: runs the requests; its methods are awaited as they are.
        tokenizer: the model's tokenizer.
        model_name: what SkyRL calls the policy, its model path.
        num_engines: engines behind the backend.
        tensor_parallel_size: processes of one engine.
    """

    def __init__(
        self,
        backend: SamplingBackend,
        *,
        tokenizer: Any,
        model_name: str,
        num_engines: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._world_size = (num_engines * tensor_parallel_size, tensor_parallel_size)
        self._weight_version = 0
        self._turns: Counter[Any] = Counter()

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def weight_version(self) -> int:
        """Weight syncs so far; SkyRL salts the prefix cache with it."""
        return self._weight_version

    def increment_weight_version(self) -> None:
        """Called once per completed weight sync."""
        self._weight_version += 1

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        """One response to each prompt, in order.

        Raises:
            UnsupportedError: for an input, a model name or a sampling parameter that is not served.
            ArcticError: when the backend's answer does not fit the request.
        """
        if model not in (None, "", self._model_name):
            raise UnsupportedError(
                f"model={model!r}: only the policy {self._model_name!r} is served, with its adapter merged into its "
                "weights; leave model out"
            )
        _check_inputs(input_batch)
        prompts = input_batch["prompt_token_ids"]
        params = input_batch.get("sampling_params")
        if params is None:
            raise UnsupportedError(
                "sampling_params is missing: an engine would use a length and a temperature of its own; pass the "
                "recipe's generator.sampling_params with every call"
            )
        kwargs = to_vllm_kwargs(params)
        sessions = input_batch.get("session_ids")
        if sessions is not None and len(sessions) != len(prompts):
            raise UnsupportedError(f"{len(sessions)} session_ids for {len(prompts)} prompts: write one for each")
        seeds = self._seeds(kwargs["seed"], prompts, sessions)
        requests = [
            {
                "prompt_token_ids": list(prompt),
                "params": {**kwargs, "seed": seed},
                "cache_salt": input_batch.get("cache_salt"),
                "session_id": None if sessions is None else sessions[index],
            }
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        results = await self._backend.generate(requests)
        note_weight_versions(results)
        return self._output(results, len(requests), with_logprobs=kwargs["logprobs"] is not None)

    def _seeds(
        self, seed: int | None, prompts: Sequence[Sequence[int]], sessions: Sequence[Any] | None
    ) -> list[int | None]:
        """One seed a prompt, all different."""
        if sessions is not None:
            turns = []
            for session in sessions:
                turns.append(self._turns[session])
                self._turns[session] += 1
        if seed is None:
            return [None] * len(prompts)
        seen: Counter[str] = Counter()
        expanded: list[int | None] = []
        for index, prompt in enumerate(prompts):
            key = prompt_digest(prompt)
            sample, turn = seen[key], 0
            seen[key] += 1
            if sessions is not None:
                key, sample, turn = f"{key}:{sessions[index]}", 0, turns[index]
            expanded.append(
                expand_seed(seed=seed, step=self._weight_version, prompt_key=key, sample=sample, turn=turn)
            )
        return expanded

    def _output(
        self, results: Sequence[Mapping[str, Any]], expected: int, *, with_logprobs: bool
    ) -> InferenceEngineOutput:
        if len(results) != expected:
            raise ArcticError(f"the backend returned {len(results)} responses to {expected} requests")
        for result in results:
            logprobs, token_ids = result["logprobs"], result["token_ids"]
            if result["stop_reason"] not in _STOP_REASONS:
                raise ArcticError(f"the backend returned the unknown stop reason {result['stop_reason']!r}")
            if with_logprobs and (logprobs is None or len(logprobs) != len(token_ids)):
                count = "no" if logprobs is None else len(logprobs)
                raise ArcticError(f"the backend returned {count} log-probs with {len(token_ids)} tokens")
        response_ids = [list(result["token_ids"]) for result in results]
        return InferenceEngineOutput(
            responses=[self._tokenizer.decode(ids, skip_special_tokens=True) for ids in response_ids],
            response_ids=response_ids,
            stop_reasons=[result["stop_reason"] for result in results],
            response_logprobs=[list(result["logprobs"]) for result in results] if with_logprobs else None,
            prompt_logprobs=None,
            rollout_expert_indices=None,
            rollout_sample_support=None,
        )

    async def finish_session(self, session_id: Any) -> None:
        """Forget the session's turns; an unknown session is ignored."""
        self._turns.pop(session_id, None)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Empty the engines' prefix caches once running requests are done.

        Raises:
            UnsupportedError: for ``reset_running_requests``.
        """
        if reset_running_requests:
            raise UnsupportedError(
                "reset_prefix_cache(reset_running_requests=True): running requests are waited for, not restarted; "
                "pass False"
            )
        await self._backend.reset_prefix_cache()

    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> None:
        """Put every engine to sleep; ``tags`` cannot choose parts.

        Raises:
            UnsupportedError: for ``tags``.
        """
        if tags is not None:
            raise UnsupportedError(f"sleep(tags={tags}): an engine sleeps as a whole; leave tags out")
        await self._backend.sleep_sampling(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake every engine, or the parts named by ``tags``."""
        await self._backend.wake_sampling(tags)

    async def pause_generation(self) -> None:
        """Hold new requests back and stop those under way where they are, as SkyRL's own client does."""
        await self._backend.pause_generation(in_flight="keep")

    async def resume_generation(self) -> None:
        """Let held requests through and stopped ones go on."""
        await self._backend.resume_generation()

    async def get_world_size(self) -> tuple[int, int]:
        """(processes of all engines, processes of one engine)."""
        return self._world_size

    async def teardown(self) -> None:
        """Nothing of the client's own to close: the backend belongs to the experiment."""

    def get_endpoint_url(self) -> NoReturn:
        raise UnsupportedError(
            "get_endpoint_url: there is no HTTP endpoint; use a generator that calls generate() with token ids, such "
            "as SkyRLGymGenerator"
        )

    async def chat_completion(self, request_payload: dict[str, Any]) -> NoReturn:
        raise _no_text_endpoint("chat_completion")

    async def completion(self, request_payload: dict[str, Any]) -> NoReturn:
        raise _no_text_endpoint("completion")

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> NoReturn:
        raise _no_text_endpoint("render_chat_completion")

    async def update_named_weights(self, request: Any) -> NoReturn:
        raise UnsupportedError(
            "update_named_weights: weights reach the engines through the dispatch; call its save_weights_for_sampler"
        )

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> NoReturn:
        raise UnsupportedError(
            f"load_lora_adapter({lora_name!r}): the engines serve one model, and the policy's adapter reaches them "
            "merged into its weights; call the dispatch's save_weights_for_sampler"
        )


def _check_inputs(input_batch: Mapping[str, Any]) -> None:
    for name, value in input_batch.items():
        if name in _SERVED_INPUTS or value is None or value is False:
            continue
        if name in _REFUSED_INPUTS:
            raise UnsupportedError(f"{name} is not served: {_REFUSED_INPUTS[name]}")
        close = difflib.get_close_matches(name, [*_SERVED_INPUTS, *_REFUSED_INPUTS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnsupportedError(f"generate() has no input {name!r}{hint}")
    if input_batch.get("prompt_token_ids") is None:
        raise UnsupportedError("prompt_token_ids is missing: the client is token in, token out")


def _no_text_endpoint(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: text endpoints are not served, only generate() with token ids; use SkyRLGymGenerator or call the "
        "tokenizer's apply_chat_template yourself"
    )
