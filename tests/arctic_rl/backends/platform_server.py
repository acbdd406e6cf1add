"""``arctic-platform``'s own HTTP server on CPUs, as a program: ``python -m ...platform_server PORT``.

Its app, its split of payloads, its DeepSpeed worker and its weight sync are the package's. What needs a GPU is not:
the worker runs in this process, in float32 and with SDPA whatever dtype it is told, so that numbers can be compared;
and vLLM's replicas (``arctic_inference``, which is not installed) are a plain sampler of transformers.
"""

import asyncio
import concurrent.futures
import os
import sys
import types
from typing import Any

import torch

TRAINING_GPUS = SAMPLING_GPUS = LOG_PROB_GPUS = 1
_THREAD = concurrent.futures.ThreadPoolExecutor(max_workers=1)


class Reference:
    """What a call on an actor returns: awaitable, and taken by ``ray.get``."""

    def __init__(self, future: concurrent.futures.Future) -> None:
        self.future = future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future).__await__()


class Actor:
    """An object whose methods are called as those of a Ray actor, one after the other."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return types.SimpleNamespace(remote=lambda *args: Reference(_THREAD.submit(method, *args)))


def ray_get(references: Any) -> Any:
    if isinstance(references, list):
        return [reference.future.result() for reference in references]
    return references.future.result()


def make_worker_class(worker: Any) -> Any:
    """The package's worker, with what asks for a GPU left out."""
    import deepspeed
    from arctic_platform.model import ModelSpec
    from transformers import AutoModelForCausalLM

    class CpuWorker(worker):
        def initialize(self, master_addr: str, job_config: dict) -> bool:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            if not torch.distributed.is_initialized():
                store = torch.distributed.HashStore()
                torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
                deepspeed.init_distributed("gloo", verbose=False)
            self.job_type = job_config["job_type"]
            worker_config = job_config["ds_worker_config"]
            spec = ModelSpec.from_ds_worker_config(job_config["model_name"], worker_config)
            assert spec.attn_implementation == "flash_attention_2"
            self._has_optimizer = self.job_type != "log_prob"
            if self._has_optimizer:
                config = self.ds_training_config(job_config, job_config["ds_config"], worker_config)
            else:
                config = self.ds_inference_config(job_config["log_prob_config"], worker_config)
            assert config["bf16"]["enabled"] and not config.get("torch_autocast", {}).get("enabled")
            config["bf16"] = {"enabled": False}
            model = AutoModelForCausalLM.from_pretrained(
                spec.model_path_or_name, dtype=torch.float32, attn_implementation="sdpa"
            )
            trained = {"model_parameters": model.parameters()} if self._has_optimizer else {}
            self.engine, *_ = deepspeed.initialize(model=model, config=config, **trained)
            self._device, self.cpu_device = "cpu", torch.device("cpu")
            return True

        def offload_to_cpu(self) -> dict:
            return {"status": "offloaded"}

        def backload_to_gpu(self) -> dict:
            return {"status": "on_gpu"}

        def destroy(self) -> bool:
            self.engine = None
            return True

    class Spawned:
        @staticmethod
        def options(**_: Any) -> Any:
            return types.SimpleNamespace(remote=lambda *args: Actor(CpuWorker(*args)))

    return Spawned


class Sampler:
    """One replica: a model that samples by plain forward passes, and its tokenizer."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def load_weights_from_shm_path(self, path: str) -> None:
        missing, unexpected = self.model.load_state_dict(dict(torch.load(path)), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}

    def norm(self) -> dict:
        squares = [value.double().square().sum().item() for value in self.model.parameters()]
        return {"norm": sum(squares) ** 0.5, "num_params": len(squares)}

    @torch.no_grad()
    def sample(self, prompt: str, params: dict) -> dict:
        ids = self.tokenizer(prompt).input_ids
        generator = torch.Generator()
        generator.seed() if params["seed"] is None else generator.manual_seed(params["seed"])
        tokens, logprobs, reason = [], [], "length"
        for _ in range(params["max_tokens"]):
            logits = self.model(torch.tensor([ids + tokens])).logits[0, -1]
            scaled = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
            token = int(scaled.argmax())
            if params["temperature"]:
                token = int(torch.multinomial(scaled.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append({token: {"logprob": float(scaled[token]), "rank": 1}})
            if token in params["stop_token_ids"]:
                reason = "stop"
                break
        answer = {"text": "", "token_ids": tokens, "finish_reason": reason, "prompt_len": len(ids)}
        if params["logprobs"] is not None:
            answer["logprobs"] = logprobs
        if params.get("prompt_logprobs") is not None:
            answer["prompt_logprobs"] = [None, *({token: {"logprob": -1.0, "rank": 1}} for token in ids[1:])]
        return answer


class ReplicaPool:
    """What the server asks of ``arctic_inference``'s pool."""

    def __init__(self) -> None:
        self._config: Any = None
        self._workers: list[Actor] = []
        self.sleeping = False
        self.num_replicas = self.tp_size = 1

    async def initialize(self, config: Any, num_replicas: int) -> None:
        assert config.extra_engine_kwargs["logprobs_mode"] == "processed_logprobs"
        self._config = config
        self._workers = [Actor(await asyncio.wrap_future(_THREAD.submit(Sampler, config.model)))]

    async def shutdown(self) -> None:
        self._config = None
        self._workers = []

    async def generate(self, prompts: list[str], params: dict, strict: bool = False) -> list[dict]:
        if self.sleeping:
            raise RuntimeError("Model is sleeping; call /wake_up first")
        return [await self._workers[0].sample.remote(prompt, params) for prompt in prompts]

    async def sleep(self, level: int, offload_weights: bool) -> dict:
        self.sleeping = True
        return {"status": "sleeping", "workers": [{"status": "sleeping"}]}

    async def wake_up(self, tags: list[str] | None, restore_weights: bool) -> dict:
        self.sleeping = self.sleeping and tags is not None and "kv_cache" not in tags
        return {"status": "ready"}

    async def reset_prefix_cache(self) -> dict:
        return {"status": "prefix_cache_reset"}

    async def compute_weight_norm(self) -> dict:
        return await self._workers[0].norm.remote()

    async def close_weight_sync(self) -> None: ...


def make_inference_config() -> types.ModuleType:
    """The one module of ``arctic_inference`` that the server imports for a sampling job."""
    from pydantic import BaseModel

    class ModelConfig(BaseModel):
        model: str
        tensor_parallel_size: int = 1
        max_model_len: int = 32768
        max_num_seqs: int = 1024
        gpu_memory_utilization: float = 0.95
        trust_remote_code: bool = True
        extra_engine_kwargs: dict[str, Any] = {}

    module = types.ModuleType("arctic_inference.server.config")
    module.ModelConfig = ModelConfig
    return module


def make_app() -> Any:
    from arctic_platform.common import deepspeed_worker, http_server
    from arctic_platform.common.utils import weight_sync
    from arctic_platform.common.utils.ray_pg import ColocatePlacement

    for name in ("arctic_inference", "arctic_inference.server"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["arctic_inference.server.config"] = make_inference_config()
    spawned = make_worker_class(deepspeed_worker.DeepSpeedWorker.__ray_metadata__.modified_class)
    for module in (deepspeed_worker, http_server):
        module.DeepSpeedWorker = spawned
    for module in (http_server, weight_sync):
        module.ray = types.SimpleNamespace(get=ray_get)
    state = http_server.app.state
    state.training_gpus, state.sampling_gpus, state.log_prob_gpus = TRAINING_GPUS, SAMPLING_GPUS, LOG_PROB_GPUS
    state.log_prob_engine, state.colocate, state.placement = "deepspeed", True, ColocatePlacement()
    state.training_workers, state.log_prob_workers = [], []
    state.sampling_pool, state.log_prob_pool, state.log_prob_tokenizer = ReplicaPool(), None, None
    state.jobs, state.next_job_id = {}, 1
    return http_server.app


if __name__ == "__main__":
    import uvicorn

    torch.set_num_threads(1)
    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
