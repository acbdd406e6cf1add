"""One vLLM engine in a process of its own: generation, weight sync, prefix cache, sleep."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing import resource_tracker
from typing import Any

from ..errors import ArcticError, UnsupportedError, WorkerDiedError
from .process import end_with_parent, log_tail, own_process_ids
from .sampling_spec import SamplingSpec, end_token_ids, engine_arguments, engine_environment
from .weight_sync.part import Part, as_file
from .weights import TensorSpec, read_manifest
from .worker_log import open_worker_log

logger = logging.getLogger(__name__)

_CACHE_RESET_TRIES = 20
_CACHE_RESET_PAUSE_SECONDS = 0.1
_WATCH_SECONDS = 0.5
_SHUTDOWN_SECONDS = 3.0
_STOP_REASONS = ("stop", "length", "abort")
_WEIGHTS_TAG, _CACHE_TAG = "weights", "kv_cache"


class SamplingWorker:
    """A vLLM engine behind plain async methods; built cheaply, started by ``setup``.

    Weights change only while no request is running, and the prefix cache is emptied before the next one starts:
    a response never mixes two versions. Calls of ``generate`` made meanwhile wait. Only requests that ``freeze`` has
    stopped are not waited for: they go on with the new weights from the token at which they stopped.

    As a Ray actor it needs a ``max_concurrency`` above the number of requests that may wait.
    """

    def __init__(self, spec: SamplingSpec) -> None:
        self._spec = spec
        self._engine: Any = None
        self._engine_process_ids: list[int] = []
        self._end_token_ids: list[int] = []
        self._own_directory: str | None = None
        self._scratch: str | None = spec.scratch_directory
        self._update: tuple[AsyncExitStack, int] | None = None
        self._refusals: tuple[type[Exception], ...] = (ValueError,)
        self._version = 0
        self._asleep: set[str] = set()
        self._unusable: str | None = None
        self._frozen = False
        self._running = 0
        self._changed = asyncio.Condition()
        self._exclusive = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()

    async def setup(self) -> None:
        """Start the engine; the event loop is blocked meanwhile (about half a minute).

        Raises:
            UnsupportedError: for an engine argument that vLLM does not know.
            ArcticError: when the engine does not come up, with the end of its log.
        """
        spec = self._with_scratch()
        if spec.log_file is not None:
            open_worker_log(spec.log_file)
            end_with_parent()
        for name, value in engine_environment(spec).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.async_llm import AsyncLLM

        self._refusals = (ValueError, VLLMClientError)
        known = {argument.name for argument in dataclasses.fields(AsyncEngineArgs)}
        arguments = engine_arguments(spec, known)
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            self._engine_process_ids = await self._engine.collective_rpc("arctic_prepare")
        except Exception as error:
            await self.shutdown()
            raise ArcticError(f"the vLLM engine did not start: {error}{self._log_end()}") from error
        self._end_token_ids = end_token_ids(spec.model_path)
        logger.info("the engine samples from %s", spec.model_path)

    def _with_scratch(self) -> SamplingSpec:
        """The spec with a folder that is on this node."""
        spec = self._spec
        if spec.scratch_directory is None or not os.path.isdir(spec.scratch_directory):
            self._own_directory = tempfile.mkdtemp(prefix="arctic-rl-")
            spec = dataclasses.replace(spec, scratch_directory=self._own_directory)
        self._scratch = spec.scratch_directory
        return spec

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: dict[str, Any],
        request_id: str,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """One response to one prompt.

        Args:
            prompt_token_ids: the prompt.
            params: keyword arguments of ``vllm.SamplingParams``, as ``to_vllm_kwargs`` makes them; the model's own
                end-of-sequence ids are added to ``stop_token_ids`` unless ``ignore_eos`` is set.
            request_id: unique among the requests under way.
            cache_salt: prefix-cache blocks are shared only between requests of one salt.

        Returns:
            ``token_ids`` exactly as sampled, ``logprobs`` (one float a token under the sampled distribution, None
            unless asked for), ``stop_reason`` ("stop", "length" or "abort"), ``text`` (None where ``detokenize`` is
            off; vLLM's own, which ends at a stop string), ``weight_version`` (the one it began with) and
            ``last_weight_version`` (the one it ended with; another one only if it was frozen meanwhile).

        Raises:
            UnsupportedError: for a prompt or parameters that the engine does not accept.
            ArcticError: while the engine sleeps, or after a failed weight sync.
            WorkerDiedError: when the engine's process is gone.
        """
        async with self._request():
            return await self._generate(prompt_token_ids, params, request_id, cache_salt)

    async def generate_many(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``generate`` for several requests (dicts of its arguments) in one call; results in the same order."""
        return list(await asyncio.gather(*(self.generate(**request) for request in requests)))

    async def freeze(self) -> None:
        """Stop the requests under way where they are, with their tokens and cache, and schedule no new one."""
        async with self._exclusive:
            await self._engine_call(self._engine.pause_generation(mode="keep", clear_cache=False))
            self._frozen = True

    async def thaw(self) -> None:
        """Let frozen requests go on.

        Raises:
            ArcticError: after a failed weight sync; they stay frozen.
        """
        self._check_usable()
        await self._engine_call(self._engine.resume_generation())
        self._frozen = False

    async def sync_weights(self, path: str, version: int, keep_cache: bool = False) -> int:
        """Load all weights, which ``write_weights`` left at ``path``, and empty the prefix cache.

        Waits for the requests under way unless they are frozen; names, shapes and dtype are compared before any
        tensor is applied.

        Args:
            path: a manifest or its folder.
            version: the version that it must hold.
            keep_cache: leave the caches of prompts and of frozen requests as they are. Otherwise frozen requests
                compute theirs anew with the new weights.

        Returns:
            The version that the engine now holds.

        Raises:
            ArcticError: where the weights do not fit the model (nothing has changed then), or where loading or the
                cache reset fails (the engine then refuses to generate until a sync succeeds).
        """
        manifest = read_manifest(path)
        if manifest.version != version:
            raise ArcticError(f"the weights at {path!r} have version {manifest.version}, expected {version}")
        self._check_weights_awake()
        async with self._alone():
            await self.check_tensors(manifest.tensors, manifest.dtype)
            self._unusable = f"loading weights of version {version} did not end"
            held = await self._worker_call("arctic_load_weights", path)
            if set(held) != {version}:
                raise ArcticError(f"the engine's processes hold weights of versions {held}, expected {version}")
            await self._take_over(version, keep_cache)
        return version

    async def check_tensors(self, tensors: Iterable[TensorSpec], dtype: str) -> dict[str, str]:
        """Compare what a sync will send with the engine's model; changes nothing, and holds no request up.

        Returns:
            Names that the engine keeps apart although the model ties them -> the name whose values they get.

        Raises:
            ArcticError: a name is unknown or missing, or a shape or the dtype differs.
        """
        plain = [(spec.name, list(spec.shape), spec.dtype) for spec in tensors]
        for problems in await self._worker_call("arctic_check_weights", plain, dtype):
            if problems:
                shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
                raise ArcticError(f"the weights do not fit the sampler's model: {shown}")
        return (await self._worker_call("arctic_tied_copies"))[0]

    async def begin_update(self, version: int) -> None:
        """Open an update that comes in parts or by vLLM's transfer engine; nothing is generated before ``end_update``.

        Waits for the requests under way unless they are frozen; ``check_tensors`` must have passed.
        """
        self._check_weights_awake()
        stack = AsyncExitStack()
        await stack.enter_async_context(self._alone())
        self._update = stack, version
        self._unusable = f"loading weights of version {version} did not end"
        if self._spec.weight_transfer is None:
            await self._worker_call("arctic_begin_parts")

    async def load_part(self, part: Part) -> None:
        """Load one part of an update, which may be overwritten or freed when this returns.

        Raises:
            ArcticError: no update is open, as on an engine that was restarted meanwhile.
        """
        self._opened_update()
        path = await asyncio.to_thread(as_file, part, self._scratch)
        await self._worker_call("arctic_load_part", path)

    async def transfer_init(self, info: dict[str, Any]) -> None:
        """Meet the trainer, as vLLM's ``init_weight_transfer_engine`` does."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine_call(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def transfer_start(self) -> None:
        """vLLM's ``start_weight_update``."""
        self._opened_update()
        await self._engine_call(self._engine.start_weight_update())

    async def transfer_update(self, info: dict[str, Any]) -> None:
        """vLLM's ``update_weights``: receive the tensors that the trainer sends now."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine_call(self._engine.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def transfer_finish(self) -> None:
        """vLLM's ``finish_weight_update``."""
        await self._engine_call(self._engine.finish_weight_update())

    async def end_update(self, keep_cache: bool = False) -> int:
        """Take the weights of the open update over; see ``sync_weights``.

        Returns:
            The version that the engine now holds.
        """
        stack, version = self._opened_update()
        async with stack:
            self._update = None
            if self._spec.weight_transfer is None:
                await self._worker_call("arctic_end_parts")
            await self._take_over(version, keep_cache)
        return version

    async def abort_update(self) -> None:
        """Give an open update up: the engine refuses to generate until a sync succeeds."""
        if self._update is not None:
            stack, self._update = self._update[0], None
            await stack.aclose()

    async def refuse(self, reason: str) -> None:
        """Refuse to generate until a sync succeeds.

        Args:
            reason: what is said of the engine to who asks.
        """
        self._unusable = reason

    def _opened_update(self) -> tuple[AsyncExitStack, int]:
        if self._update is None:
            raise ArcticError("a part of the weights came to an engine that no update was opened on")
        return self._update

    def _check_weights_awake(self) -> None:
        if _WEIGHTS_TAG in self._asleep:
            raise ArcticError("weights were sent to a sleeping engine: call wake_up with the tag 'weights' first")

    async def _take_over(self, version: int, keep_cache: bool) -> None:
        if not keep_cache:
            await self._reset_prefix_cache()
        self._unusable = None
        self._version = version
        logger.info("weights of version %d are loaded", version)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache once the requests under way are done.

        Raises:
            ArcticError: when vLLM keeps refusing; the engine does not generate before a reset has succeeded.
        """
        async with self._alone():
            await self._reset_prefix_cache()

    async def sleep(self, level: int = 2) -> None:
        """Refuse to generate until ``wake_up``, once the requests under way are done.

        On GPUs level 1 moves the weights to host memory and level 2 drops them, so that a weight sync must follow;
        both drop the KV cache. On CPUs nothing is freed.
        """
        if level not in (1, 2):
            raise UnsupportedError(f"sleep level={level}: write 1 or 2")
        if self._spec.device == "cuda" and not self._spec.enable_sleep_mode:
            raise UnsupportedError("sleep: the engine was built with enable_sleep_mode=False")
        if self._asleep:
            return
        if self._frozen:
            raise ArcticError("an engine with frozen requests cannot sleep: thaw it first")
        async with self._alone():
            if self._spec.device == "cuda":
                await self._engine_call(self._engine.sleep(level=level))
                if level == 2:
                    self._unusable = "its weights were dropped by sleep level 2 and not synced since"
            self._asleep = {_WEIGHTS_TAG, _CACHE_TAG}

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake the parts named by ``tags`` ("weights", "kv_cache"; None = both); generation needs both."""
        wanted = {_WEIGHTS_TAG, _CACHE_TAG} if tags is None else set(tags)
        if not wanted <= {_WEIGHTS_TAG, _CACHE_TAG}:
            raise UnsupportedError(f"wake_up tags={tags}: write 'weights', 'kv_cache' or nothing")
        wanted &= self._asleep
        if wanted and self._spec.device == "cuda":
            await self._engine_call(self._engine.wake_up(tags=sorted(wanted)))
        self._asleep -= wanted

    async def is_sleeping(self) -> bool:
        """Whether a part sleeps."""
        return bool(self._asleep)

    async def weight_version(self) -> int:
        """The version of the last successful sync; 0 = the checkpoint's own weights."""
        return self._version

    async def weight_names(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(Hugging Face name, shape, the model's dtype) of each tensor that a sync must send, each once."""
        names = (await self._worker_call("arctic_weight_names"))[0]
        return [(name, tuple(shape), dtype) for name, shape, dtype in names]

    async def random_state(self) -> list[str]:
        """The random state of each process of the engine, as JSON."""
        return await self._worker_call("arctic_random_state")

    async def set_random_state(self, states: list[str]) -> None:
        """Put back what ``random_state`` returned."""
        await self._worker_call("arctic_set_random_state", states)

    async def watch(self) -> None:
        """Never returns while the engine lives.

        Raises:
            WorkerDiedError: when its process ends.
        """
        while self._engine is None or not self._engine.errored:
            await asyncio.sleep(_WATCH_SECONDS)
        raise self._died()

    async def ping(self) -> None:
        """Returns once every process of the engine has answered, between two of its steps.

        Raises:
            WorkerDiedError: when the engine's process is gone.
        """
        if self._engine is not None:
            await self._engine_call(self._engine.collective_rpc("arctic_ping"))

    async def process_ids(self) -> list[int]:
        """This process and all its descendants."""
        return own_process_ids()

    async def node_id(self) -> str:
        """Ray's id of this node; the host name outside Ray."""
        import ray

        return ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()

    async def engine_config(self) -> dict[str, Any]:
        """The settings that the built engine runs with."""
        config = self._engine.vllm_config
        model, cache, scheduler, parallel = (
            config.model_config,
            config.cache_config,
            config.scheduler_config,
            config.parallel_config,
        )
        return {
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "seed": model.seed,
            "max_model_len": model.max_model_len,
            "enforce_eager": model.enforce_eager,
            "logprobs_mode": model.logprobs_mode,
            "generation_config": model.generation_config,
            "default_sampling_params": dict(model.get_diff_sampling_param()),
            "hf_overrides": model.hf_overrides,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "block_size": cache.block_size,
            "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "distributed_executor_backend": str(parallel.distributed_executor_backend),
            "worker_extension_cls": parallel.worker_extension_cls,
            "end_token_ids": list(self._end_token_ids),
            "environment": {name: os.environ.get(name) for name in engine_environment(self._spec)},
        }

    async def shutdown(self) -> None:
        """End the engine's processes and remove what they leave behind; the worker is of no use afterwards."""
        import psutil

        self._unusable = "it was shut down"
        if self._engine is not None:
            # nothing is left to save, and vLLM's own way out hangs in gloo until it is killed
            await asyncio.to_thread(self._engine.shutdown, 0)
            self._engine = None
        left = [psutil.Process(pid) for pid in self._engine_process_ids if psutil.pid_exists(pid)]
        for process in left:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, left, _SHUTDOWN_SECONDS)
        # ends the tracker process, which then unlinks the semaphores of the killed engine
        await asyncio.to_thread(resource_tracker._resource_tracker._stop)
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)
            self._own_directory = None

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        await self._gate.wait()
        self._check_usable()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                async with self._changed:
                    self._changed.notify_all()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """No request runs inside: new ones wait, those under way end first or are frozen."""
        async with self._exclusive:
            self._gate.clear()
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._frozen or not self._running)
                yield
            finally:
                self._gate.set()

    def _check_usable(self) -> None:
        if self._asleep:
            parts = " and ".join(sorted(self._asleep))
            raise ArcticError(
                f"a sleeping engine was asked to generate ({parts} asleep): sync weights and wake it first"
            )
        if self._unusable is not None:
            raise ArcticError(f"the engine cannot generate: {self._unusable}")

    async def _generate(
        self, prompt_token_ids: list[int], params: Mapping[str, Any], request_id: str, cache_salt: str | None
    ) -> dict[str, Any]:
        version = self._version
        completion = await self._engine_call(self._complete(prompt_token_ids, params, request_id, cache_salt))
        token_ids = list(completion.token_ids)
        if completion.finish_reason not in _STOP_REASONS:
            raise ArcticError(f"request {request_id} ended with the unknown reason {completion.finish_reason!r}")
        logprobs = None
        if completion.logprobs is not None:
            logprobs = [chosen[token].logprob for token, chosen in zip(token_ids, completion.logprobs, strict=True)]
        return {
            "token_ids": token_ids,
            "logprobs": logprobs,
            "stop_reason": completion.finish_reason,
            "text": completion.text if params["detokenize"] else None,
            "weight_version": version,
            "last_weight_version": self._version,
        }

    async def _complete(
        self, prompt_token_ids: list[int], params: Mapping[str, Any], request_id: str, cache_salt: str | None
    ) -> Any:
        prompt = _prompt(prompt_token_ids, cache_salt)
        stream = self._engine.generate(prompt, _sampling_params(params, self._end_token_ids), request_id)
        outputs = [output async for output in stream]
        return outputs[-1].outputs[0]

    async def _reset_prefix_cache(self) -> None:
        before, self._unusable = self._unusable, "its prefix cache could not be emptied"
        for _ in range(_CACHE_RESET_TRIES):
            if await self._engine_call(self._engine.reset_prefix_cache(reset_running_requests=self._frozen)):
                self._unusable = before
                return
            await asyncio.sleep(_CACHE_RESET_PAUSE_SECONDS)
        raise ArcticError(
            f"vLLM refused {_CACHE_RESET_TRIES} times to empty its prefix cache although no request is running"
        )

    async def _worker_call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``WeightExtension`` in each process of the engine."""
        return await self._engine_call(self._engine.collective_rpc(method, args=arguments))

    async def _engine_call(self, call: Awaitable[Any]) -> Any:
        """Await a call to the engine; a dead engine and refused input become errors of ours."""
        try:
            return await call
        except ArcticError:
            raise
        except Exception as error:
            if self._engine is None or self._engine.errored:
                raise self._died() from error
            if isinstance(error, self._refusals):
                raise UnsupportedError(f"vLLM refused a request: {error}") from error
            raise ArcticError(f"vLLM failed: {error}{self._log_end()}") from error

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError(f"the vLLM engine of sampling worker {os.getpid()} died{self._log_end()}")

    def _log_end(self) -> str:
        return "" if self._spec.log_file is None else f"\n{log_tail(self._spec.log_file)}"


def _prompt(token_ids: list[int], cache_salt: str | None) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(token_ids, cache_salt=cache_salt)


def _sampling_params(params: Mapping[str, Any], end_token_ids: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kwargs = dict(params)
    if not kwargs["ignore_eos"]:
        kwargs["stop_token_ids"] = list(dict.fromkeys([*kwargs["stop_token_ids"], *end_token_ids]))
    return SamplingParams(**kwargs, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
