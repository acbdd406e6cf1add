"""A remote backend without a server: records every call, and runs the pipeline in this process where it has models."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from integrations.arctic_rl.backends.base import RemoteBackend
from integrations.arctic_rl.backends.handle import BackendHandle
from integrations.arctic_rl.backends.sharding import join_rows, plan_ranks, split_rows
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.processors.pipeline import run_counted
from integrations.arctic_rl.random_state import random_state
from integrations.arctic_rl.server.checkpoint import (
    check_shares,
    digest_problems,
    engine_pieces,
    load_pieces,
    read_shares,
    reference_pieces,
    write_share,
)
from integrations.arctic_rl.zorro.cost import CostModel

CANNED_METRICS = ("pg_loss", "entropy", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ratio_max_deviation", "kl_loss")


def shards_of(batch: dict[str, torch.Tensor], ranks: int) -> list[dict[str, torch.Tensor]]:
    """Every rank's rows: micro-batches whole where the batch has some, else equal runs, without any balancing."""
    if "micro_batch_ids" not in batch:
        return split_rows(batch, ranks)
    return plan_ranks(batch, ranks, CostModel(per_token=1, per_pair=1, per_scored=1), shared=False).split(batch)


def packable(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with the attention that the server loads it with."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(attention_implementation("cpu"))
    return twin


class InProcessBackend(RemoteBackend):
    """Ranks run one after the other on one set of weights; their gradients are averaged as a process group would.

    Args:
        models: ``policy``, ``critic`` and ``ref``; without one its calls return zeros.
        ranks: data-parallel size by job; 1 where it is not given.
        max_grad_norm: clipping norm of a step.
        failing: names of calls that raise.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module] | None = None,
        *,
        ranks: Mapping[str, int] | None = None,
        lr: float = 1e-2,
        max_grad_norm: float = 1.0,
        failing: tuple[str, ...] = (),
    ) -> None:
        self._engines = {job: _Engine(model) for job, model in (models or {}).items()}
        self._ranks = dict(ranks or {})
        self._max_grad_norm = max_grad_norm
        self._failing = failing
        self._lr = lr
        self._optimizers = {
            job: torch.optim.AdamW(engine.module.parameters(), lr=lr, weight_decay=0.0)
            for job, engine in self._engines.items()
            if job != "ref"
        }
        self.calls: list[tuple[str, tuple]] = []
        self.version = 0

    def names(self) -> list[str]:
        """The calls so far, in order."""
        return [name for name, _ in self.calls]

    def arguments(self, name: str) -> list[tuple]:
        """Arguments of every call of that name."""
        return [arguments for called, arguments in self.calls if called == name]

    def gradient(self, job: str = "policy") -> dict[str, torch.Tensor]:
        """What the next step applies, before clipping."""
        ranks = self.dp_size(job)
        return {name: p.grad / ranks for name, p in self._engines[job].module.named_parameters()}

    @classmethod
    def from_config(cls, config: Any, handle: BackendHandle | None = None) -> "InProcessBackend":
        return cls()

    def reconnect_handle(self) -> BackendHandle:
        return BackendHandle(backend="in_process")

    def requires_single_forwarder(self) -> bool:
        return True

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        self._record("initialize", num_training_steps, *filter(None, (critic_training_steps,)))

    def dp_size(self, job: str) -> int:
        return self._ranks.get(job, 1)

    async def fwd_no_grad(self, job: str, batch: dict, meta: dict, processing: dict) -> dict:
        self._record("fwd_no_grad", job, batch, meta, processing)
        if job not in self._engines:
            name = "values" if job == "critic" else "logprobs"
            return {"batch": {name: torch.zeros(batch["input_ids"].shape)}, "metrics": {}}
        results = self._run(job, batch, meta, processing, backward=False)
        return {"batch": join_rows([result["batch"] for result in results]), "metrics": {}}

    async def fwd_bwd(self, batch: dict, meta: dict, processing: dict, job: str = "policy") -> dict:
        self._record(_of_job("fwd_bwd", job), batch, meta, processing)
        if job not in self._engines:
            canned = {"avg_loss": 0.0, "metrics": dict.fromkeys(CANNED_METRICS, 0.0), "lr": self._lr}
            return canned | {"micro_batches": [1] * self.dp_size(job)}
        results = self._run(job, batch, meta, processing, backward=True)
        tokens = [float(shard["loss_mask"].sum()) for shard in shards_of(batch, self.dp_size(job))]
        micro_batches = [result["micro_batches"] for result in results]
        busy = [place for place, number in enumerate(micro_batches) if number]
        metrics = {
            name: _over_ranks(
                name,
                [results[place]["metrics"][name] for place in busy],
                tokens=[tokens[place] for place in busy],
                micro_batches=[micro_batches[place] for place in busy],
                ranks=len(results),
            )
            for name in results[busy[0]]["metrics"]
        }
        loss = sum(result["avg_loss"] for result in results) / len(results)
        return {"avg_loss": loss, "metrics": metrics, "lr": self._lr, "micro_batches": micro_batches}

    async def step(self, job: str = "policy") -> dict[str, float]:
        self._record(_of_job("step", job))
        norm = 0.0
        if job in self._optimizers:
            parameters = list(self._engines[job].module.parameters())
            for parameter in parameters:
                parameter.grad /= self.dp_size(job)
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm))
            self._optimizers[job].step()
            self._optimizers[job].zero_grad()
        return {"lr": self._lr, "grad_norm": norm}

    async def generate(self, requests: list[dict]) -> list[dict]:
        self._record("generate", requests)
        return [{} for _ in requests]

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        self._record("sync_weights", *(("keep_cache",) if keep_cache else ()))
        self.version += 1
        return self.version

    async def update_reference(self) -> None:
        self._record("update_reference")
        if "ref" in self._engines:
            self._engines["ref"].module.load_state_dict(self._engines["policy"].module.state_dict())

    async def weight_norm(self, job: str) -> float:
        self._record("weight_norm", job)
        norms = [float(value.double().norm()) for value in self._engines[job].module.parameters()]
        return sum(norm**2 for norm in norms) ** 0.5

    async def sleep_training(self) -> None:
        self._record("sleep_training")

    async def wake_training(self) -> None:
        self._record("wake_training")

    async def sleep_log_prob(self) -> None:
        self._record("sleep_log_prob")

    async def wake_log_prob(self) -> None:
        self._record("wake_log_prob")

    async def sleep_sampling(self, level: int) -> None:
        self._record("sleep_sampling", level)

    async def wake_sampling(self, tags: list[str] | None) -> None:
        self._record("wake_sampling", *(tags or ()))

    async def pause_generation(self, *, in_flight: str = "finish") -> None:
        self._record("pause_generation", *(("keep",) if in_flight == "keep" else ()))

    async def resume_generation(self) -> None:
        self._record("resume_generation")

    async def reset_prefix_cache(self) -> None:
        self._record("reset_prefix_cache")

    async def empty_training_cache(self) -> None:
        self._record("empty_training_cache")

    async def save_checkpoint(self, job: str, directory: str) -> None:
        self._record("save_checkpoint", job, directory)
        if job in self._engines:
            facts = {
                "random": random_state(),
                "optimizer_steps": self.names().count(_of_job("step", job)),
                "settings": {},
            }
            pieces = self._pieces(job, allocate=False)
            write_share(directory, pieces, rank=0, world_size=1, replicated=True, buffers={}, facts=facts)

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        self._record("load_checkpoint", job, directory)
        steps, settings = 7, {"lr": self._lr}
        if job in self._engines:
            check_shares([digest_problems(directory, rank=0, world_size=1)])
            (share,) = read_shares(directory)
            steps = share["optimizer_steps"]
            load_pieces(directory, self._pieces(job, allocate=True), {})
        return {"same_ranks": True, "same_engines": True, "optimizer_steps": steps, "saved": settings, "now": settings}

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        self._record(_of_job("save_weights", job), directory)
        Path(directory).mkdir()
        (Path(directory) / "config.json").write_text("{}")

    async def start_profile(self, settings: dict[str, Any]) -> None:
        self._record("start_profile", settings)

    async def profile_step(self) -> None:
        self._record("profile_step")

    async def stop_profile(self) -> None:
        self._record("stop_profile")

    async def node_ids(self) -> list[str]:
        self._record("node_ids")
        return ["this-node"]

    async def shutdown(self) -> None:
        self._record("shutdown")

    async def destroy(self) -> None:
        self._record("destroy")

    def _record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self._failing:
            raise RuntimeError(f"{name} was told to fail")

    def _pieces(self, job: str, *, allocate: bool) -> list[Any]:
        engine = self._engines[job]
        if job == "ref":
            return reference_pieces(engine.module)
        return engine_pieces(engine, self._optimizers[job], 0, allocate=allocate)

    def _run(self, job: str, batch: dict, meta: dict, processing: dict, *, backward: bool) -> list[dict]:
        meta = dict(meta)
        max_tokens = meta.pop("max_token_len_per_gpu")
        results = []
        for shard in shards_of(batch, self.dp_size(job)):
            result, micro_batches = run_counted(
                self._engines[job],
                (),
                shard,
                meta,
                processing,
                "cpu",
                backward=backward,
                pack=True,
                max_tokens_per_mb=max_tokens,
                return_tensors=True,
            )
            results.append(result | {"micro_batches": micro_batches})
        return results


def _of_job(call: str, job: str) -> str:
    return call if job == "policy" else f"{job}_{call}"


class _Engine:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.module(*args, **inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


def _over_ranks(name: str, values: list[float], *, tokens: list[float], micro_batches: list[int], ranks: int) -> float:
    """Losses are averaged over ranks, extremes are those of all ranks, metrics of SkyRL's losses are a mean over
    micro-batches, everything else is one over tokens; values are those of ranks that had rows."""
    if name.endswith("loss"):
        return sum(values) / ranks
    if name.endswith(("_max_deviation", "_max")):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    weights = micro_batches if name.startswith("loss_metrics/") else tokens
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(sum(weights), 1)
