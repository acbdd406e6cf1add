"""A remote backend of your own in one process: plain PyTorch, one set of weights, samples token by token.

It stands for a training system that you have already; only what the contract asks for is here. Select it with
trainer.arctic_rl.backend=examples.own_backend.OwnBackend, test it with the three lines of docs/backends.md.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integrations.arctic_rl.backends import BackendHandle, RemoteBackend
from integrations.arctic_rl.errors import CheckpointError, RequestError, UnsupportedError
from integrations.arctic_rl.processors.pipeline import run_pipeline

RUNNING: dict[str, OwnBackend] = {}
"""Servers by id; one in a process of its own would be reached by an address instead."""


class OwnBackend(RemoteBackend):
    """See ``RemoteBackend``."""

    @classmethod
    def from_config(cls, config: Any, handle: BackendHandle | None = None) -> OwnBackend:
        if config.critic is not None:
            raise UnsupportedError("this backend has no critic: write trainer.critic.model.path=null")
        return cls(config) if handle is None else _Attached(RUNNING[handle.job_ids["server"]])

    def __init__(self, config: Any) -> None:
        self.config, self.version, self.asleep = config, 0, set()
        self.running = asyncio.Event()
        self.running.set()

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        policy, reference = self.config.policy, self.config.reference
        load = AutoModelForCausalLM.from_pretrained
        self.models = {"policy": load(policy.model_path, dtype=torch.float32)}
        if reference is not None:
            self.models["ref"] = load(reference.model_path, dtype=torch.float32)
        self.sampler = load(policy.model_path, dtype=torch.float32).eval()
        self.settings = policy.optimizer
        self.optimizer = torch.optim.AdamW(
            self.models["policy"].parameters(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        RUNNING[self.config.run_id] = self

    def reconnect_handle(self) -> BackendHandle:
        return BackendHandle(backend=f"{__name__}.OwnBackend", job_ids={"server": self.config.run_id})

    def requires_single_forwarder(self) -> bool:
        return True

    def dp_size(self, job: str) -> int:
        return 1

    async def fwd_no_grad(self, job: str, batch: dict, meta: dict, processing: dict) -> dict:
        return await asyncio.to_thread(self._run, job, batch, meta, processing, backward=False)

    async def fwd_bwd(self, batch: dict, meta: dict, processing: dict, job: str = "policy") -> dict:
        if meta.get("dp_size") != 1:
            raise RequestError(f"meta['dp_size']={meta.get('dp_size')}, but there is one rank")
        result = await asyncio.to_thread(self._run, job, batch, meta, processing, backward=True)
        return result | {"lr": self.settings.lr, "micro_batches": [len(batch["input_ids"])]}

    def _run(self, job: str, batch: dict, meta: dict, processing: dict, *, backward: bool) -> dict:
        if job in self.asleep:
            raise RequestError(f"{job} sleeps")
        meta = {name: value for name, value in meta.items() if name != "max_token_len_per_gpu"}
        meta["zorro_train_enable"] = False
        engine = _Engine(self.models[job])
        return run_pipeline(
            engine, (), batch, meta, processing, "cpu", backward=backward, pack=False, return_tensors=True
        )

    async def step(self, job: str = "policy") -> dict[str, float]:
        weights = list(self.models["policy"].parameters())
        limit = self.settings.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(weights, limit))
        if norm < float("inf"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "lr": self.settings.lr}

    async def generate(self, requests: list[dict]) -> list[dict]:
        await self.running.wait()
        if "sampling" in self.asleep:
            raise RequestError("the engine sleeps")
        return [await asyncio.to_thread(self._sample, request) for request in requests]

    @torch.no_grad()
    def _sample(self, request: dict) -> dict:
        params, tokens, logprobs = request["params"], [], []
        generator = torch.Generator()
        generator.seed() if params["seed"] is None else generator.manual_seed(params["seed"])
        while len(tokens) < params["max_tokens"] and not set(tokens[-1:]) & set(params["stop_token_ids"]):
            logits = self.sampler(torch.tensor([[*request["prompt_token_ids"], *tokens]])).logits[0, -1]
            scores = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
            chosen = (
                torch.multinomial(scores.exp(), 1, generator=generator) if params["temperature"] else scores.argmax()
            )
            tokens.append(int(chosen))
            logprobs.append(float(scores[tokens[-1]]))
        stopped = tokens[-1] in params["stop_token_ids"]
        return {"token_ids": tokens, "logprobs": logprobs, "stop_reason": "stop" if stopped else "length"}

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        self.sampler.load_state_dict(self.models["policy"].state_dict())
        self.version += 1
        return self.version

    async def update_reference(self) -> None:
        self.models["ref"].load_state_dict(self.models["policy"].state_dict())

    async def weight_norm(self, job: str) -> float:
        squares = [weight.detach().double().square().sum() for weight in self.models[job].parameters()]
        return float(torch.stack(squares).sum().sqrt())

    async def sleep_training(self) -> None:
        self.asleep.add("policy")

    async def wake_training(self) -> None:
        self.asleep.discard("policy")

    async def sleep_log_prob(self) -> None:
        self.asleep.add("ref")

    async def wake_log_prob(self) -> None:
        self.asleep.discard("ref")

    async def sleep_sampling(self, level: int) -> None:
        self.asleep.add("sampling")

    async def wake_sampling(self, tags: list[str] | None) -> None:
        self.asleep.discard("sampling")

    async def pause_generation(self, *, in_flight: str = "finish") -> None:
        self.running.clear()

    async def resume_generation(self) -> None:
        self.running.set()

    async def save_checkpoint(self, job: str, directory: str) -> None:
        Path(directory).mkdir(parents=True)
        state = {"model": self.models[job].state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, Path(directory) / "state.pt")

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        try:
            state = torch.load(Path(directory) / "state.pt", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{directory} cannot be read: {error}") from error
        self.models[job].load_state_dict(state["model"])
        if job == "policy":
            self.optimizer.load_state_dict(state["optimizer"])
            self.optimizer.zero_grad()
        steps = max((int(values["step"]) for values in state["optimizer"]["state"].values()), default=0)
        same = {"same_ranks": True, "same_engines": True, "saved": {}, "now": {}}
        return same | {"optimizer_steps": steps}

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        self.models[job].save_pretrained(directory)
        AutoTokenizer.from_pretrained(self.config.policy.model_path).save_pretrained(directory)

    async def node_ids(self) -> list[str]:
        return ["this-process"]

    async def shutdown(self) -> None:
        RUNNING.pop(self.config.run_id, None)

    async def destroy(self) -> None:
        await self.shutdown()

    async def _nothing(self, *args: Any) -> None:
        """There is no cache and no profiler here."""

    reset_prefix_cache = empty_training_cache = start_profile = profile_step = stop_profile = _nothing


class _Attached(OwnBackend):
    """Another object on a server that is up, which goes on without it."""

    def __init__(self, owner: OwnBackend) -> None:
        self.__dict__ = owner.__dict__

    async def destroy(self) -> None: ...


class _Engine:
    """What ``run_pipeline`` drives."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.train, self.eval = module, module.train, module.eval

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
