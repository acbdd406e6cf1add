"""A backend in this process with a real model: trains by the pipeline, samples by plain forward passes."""

import asyncio
import shutil
from typing import Any

import torch

from integrations.arctic_rl.backends.handle import BackendHandle
from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.server.critic import load_value_model
from tests.arctic_rl.in_process_backend import InProcessBackend, packable

ATTACHED: dict[str, "ModelBackend"] = {}
PATH = f"{__name__}.ModelBackend"


class ModelBackend(InProcessBackend):
    """One set of weights for training, a copy of them for sampling, a reference model where the config has one."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        def load(path: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

        self._path = config.policy.model_path
        models = {"policy": packable(load(self._path))}
        if config.critic is not None:
            models["critic"] = load_value_model(config.critic, attention_implementation("cpu"))
        if config.reference is not None:
            models["ref"] = packable(load(config.reference.model_path))
        super().__init__(models, lr=config.policy.optimizer.lr, max_grad_norm=config.policy.optimizer.max_grad_norm)
        self._sampler = load(self._path).eval()
        self._running: asyncio.Event | None = None
        self._asleep: set[str] = set()
        self._owner: ModelBackend | None = None
        self.run_id = config.run_id

    @classmethod
    def from_config(cls, config: Any, handle: BackendHandle | None = None) -> "ModelBackend":
        return cls(config) if handle is None else Attached(ATTACHED[handle.job_ids["server"]])

    def reconnect_handle(self) -> BackendHandle:
        return BackendHandle(backend=PATH, job_ids={"server": self.run_id})

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        ATTACHED[self.run_id] = self
        self._running = asyncio.Event()
        self._running.set()

    async def fwd_no_grad(self, job: str, batch: dict, meta: dict, processing: dict) -> dict:
        self._awake(job)
        return await super().fwd_no_grad(job, batch, meta, processing)

    async def fwd_bwd(self, batch: dict, meta: dict, processing: dict, job: str = "policy") -> dict:
        self._awake("policy")
        if meta.get("dp_size") != self.dp_size(job):
            raise ArcticError(f"dp_size={meta.get('dp_size')} for {self.dp_size(job)} ranks")
        return await super().fwd_bwd(batch, meta, processing, job)

    async def generate(self, requests: list[dict]) -> list[dict]:
        self._awake("sampling")
        await self._running.wait()
        return [await asyncio.to_thread(self._sample, request) for request in requests]

    @torch.no_grad()
    def _sample(self, request: dict) -> dict:
        params, ids = request["params"], list(request["prompt_token_ids"])
        generator = torch.Generator()
        generator.seed() if params["seed"] is None else generator.manual_seed(params["seed"])
        tokens, logprobs, reason = [], [], "length"
        for _ in range(params["max_tokens"]):
            logits = self._sampler(torch.tensor([ids + tokens])).logits[0, -1]
            scaled = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
            token = int(scaled.argmax())
            if params["temperature"]:
                token = int(torch.multinomial(scaled.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(scaled[token]))
            if token in params["stop_token_ids"]:
                reason = "stop"
                break
        return {"token_ids": tokens, "logprobs": logprobs, "stop_reason": reason, "weight_version": self.version}

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        self._sampler.load_state_dict(self._engines["policy"].module.state_dict())
        return await super().sync_weights(keep_cache=keep_cache)

    async def pause_generation(self, *, in_flight: str = "finish") -> None:
        self._running.clear()

    async def resume_generation(self) -> None:
        self._running.set()

    async def sleep_sampling(self, level: int) -> None:
        self._asleep.add("sampling")

    async def wake_sampling(self, tags: list[str] | None) -> None:
        self._asleep.discard("sampling")

    async def sleep_training(self) -> None:
        self._asleep.add("policy")

    async def wake_training(self) -> None:
        self._asleep.discard("policy")

    async def sleep_log_prob(self) -> None:
        self._asleep.add("ref")

    async def wake_log_prob(self) -> None:
        self._asleep.discard("ref")

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        model = self._engines[job].module
        shutil.copytree(self._path, directory)
        model.save_pretrained(directory)

    async def shutdown(self) -> None:
        ATTACHED.pop(self.run_id, None)

    def _awake(self, job: str) -> None:
        if job in self._asleep:
            raise ArcticError(f"{job} sleeps")


class Attached(ModelBackend):
    """Shares everything with the backend that it is attached to."""

    def __init__(self, owner: ModelBackend) -> None:
        vars(self).update(vars(owner))
        self._owner = owner

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        return await self._owner.sync_weights(keep_cache=keep_cache)

    async def destroy(self) -> None: ...
