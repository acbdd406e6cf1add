"""A remote backend on real training workers in spawned processes, without Ray and without engines that sample."""

import asyncio
import logging
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from integrations.arctic_rl.backends.base import RemoteBackend
from integrations.arctic_rl.backends.sharding import join_rows
from integrations.arctic_rl.server.checkpoint import check_shares
from integrations.arctic_rl.server.specs import TrainingSpec
from integrations.arctic_rl.server.weight_sync import low_memory
from integrations.arctic_rl.server.weight_sync.run import SyncRun
from tests.arctic_rl.gloo_ranks import free_port
from tests.arctic_rl.in_process_backend import shards_of


class RankProcesses:
    """One process a rank; each holds a worker of every job, which ``setup`` makes anew."""

    def __init__(self, world_size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.world_size = world_size
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, port, str(folder)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, job: str, *arguments: Any, shards: list[Any] | None = None, **keywords: Any) -> list:
        """Results of all ranks of a method of ``job``'s worker; ``shards`` are first arguments, one a rank."""
        for rank, pipe in enumerate(self._pipes):
            first = () if shards is None else (shards[rank],)
            pipe.send((method, job, (*first, *arguments), keywords))
        answers = [pipe.recv() for pipe in self._pipes]
        for error in (answer for failed, answer in answers if failed):
            raise error
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def rank_processes(world_size: int, folder: Path) -> Iterator[RankProcesses]:
    processes = RankProcesses(world_size, folder)
    try:
        yield processes
    finally:
        processes.close()


def _serve(pipe: Any, rank: int, world_size: int, port: int, folder: str) -> None:
    from integrations.arctic_rl.server.training_worker import TrainingWorker

    workers: dict[str, Any] = {}
    while (message := pipe.recv()) is not None:
        method, job, arguments, keywords = message
        try:
            if method == "limit_file_size":
                answer = _limit_file_size(*arguments)
            elif method == "setup":
                spec, horizon = arguments
                workers[job] = TrainingWorker(spec, rank, world_size, f"{folder}/rank-{rank}.log")
                answer = workers[job].setup("127.0.0.1", port, horizon)
            else:
                if method == "run":
                    _draw(rank)
                answer = getattr(workers[job], method)(*arguments, **keywords)
        except Exception as error:
            print(f"{method}: {error}", file=sys.stderr, flush=True)
            pipe.send((True, error))
        else:
            pipe.send((False, answer))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _draw(rank: int) -> None:
    """Use up random numbers, on each rank another count, so that a random state that is not brought back shows."""
    for _ in range(rank + 1):
        random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)


def _limit_file_size(nbytes: int | None) -> None:
    import resource

    # The rank's own logs are files too, and have grown with every test before.
    os.ftruncate(1, 0)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            os.truncate(handler.baseFilename, 0)
    limit = resource.RLIM_INFINITY if nbytes is None else nbytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


class ProcessBackend(RemoteBackend):
    """Training, log-probs and checkpoints; what samplers would do is skipped."""

    def __init__(
        self,
        processes: RankProcesses,
        policy: TrainingSpec,
        reference: TrainingSpec | None = None,
        critic: TrainingSpec | None = None,
    ) -> None:
        self._processes = processes
        self._specs = {"policy": policy, "critic": critic, "ref": reference}

    @classmethod
    def from_config(cls, config: Any, handle: Any = None) -> "ProcessBackend":
        raise AssertionError("made by tests alone")

    def reconnect_handle(self) -> Any:
        raise AssertionError("attached to by nobody")

    def requires_single_forwarder(self) -> bool:
        return True

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        for job, spec in self._specs.items():
            if spec is not None:
                steps = critic_training_steps if job == "critic" else num_training_steps
                await self._call("setup", job, spec, steps)

    def dp_size(self, job: str) -> int:
        return self._processes.world_size

    async def fwd_no_grad(self, job: str, batch: dict, meta: dict, processing: dict) -> dict:
        outputs = await self._run(job, batch, meta, processing, backward=False)
        return {"batch": join_rows([output["batch"] for output in outputs]), "metrics": {}}

    async def fwd_bwd(self, batch: dict, meta: dict, processing: dict, job: str = "policy") -> dict:
        outputs = await self._run(job, batch, meta, processing, backward=True)
        rate = (await self._call("learning_rate", job))[0]
        result = {"avg_loss": outputs[0]["avg_loss"], "metrics": outputs[0]["metrics"], "lr": rate}
        return result | {"micro_batches": [output["micro_batches"] for output in outputs]}

    async def step(self, job: str = "policy") -> dict[str, float]:
        return (await self._call("step", job))[0]

    async def update_reference(self) -> None:
        import tempfile

        async def call(names: tuple[str, ...], method: str, *arguments: Any) -> list[Any]:
            return (await self._call(method, names[0].split("-")[0], *arguments))[: len(names)]

        ranks = range(self._processes.world_size)
        with tempfile.TemporaryDirectory() as folder:
            run = SyncRun(
                call=call,
                senders=tuple(f"policy-{rank}" for rank in ranks),
                receivers=tuple(f"ref-{rank}" for rank in ranks),
                handles=(),
                processes=1,
                folder=folder,
                version=0,
                dtype=self._specs["ref"].dtype,
                bucket_bytes=2**20,
                one_node=True,
            )
            await low_memory.send(run)

    async def save_checkpoint(self, job: str, directory: str) -> None:
        await self._call("save_checkpoint", job, directory)

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        check_shares(await self._call("checkpoint_problems", job, directory))
        return (await self._call("load_checkpoint", job, directory))[0] | {"same_engines": True}

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        await self._call("save_weights", job, directory)

    async def weight_norm(self, job: str) -> float:
        return (await self._call("weight_norm", job))[0]

    async def sleep_training(self) -> None:
        await self._call("sleep", "policy")

    async def wake_training(self) -> None:
        await self._call("wake", "policy")

    async def sleep_log_prob(self) -> None:
        await self._call("sleep", "ref")

    async def wake_log_prob(self) -> None:
        await self._call("wake", "ref")

    async def shutdown(self) -> None: ...

    async def generate(self, requests: list[dict]) -> list[dict]:
        raise AssertionError("rollouts come from a recording")

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        return 0

    async def sleep_sampling(self, level: int) -> None: ...

    async def wake_sampling(self, tags: list[str] | None) -> None: ...

    async def pause_generation(self, *, in_flight: str = "finish") -> None: ...

    async def resume_generation(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def empty_training_cache(self) -> None: ...

    async def start_profile(self, settings: dict[str, Any]) -> None:
        await self._call("start_profile", "policy", settings)

    async def profile_step(self) -> None:
        await self._call("profile_step", "policy")

    async def stop_profile(self) -> None:
        await self._call("stop_profile", "policy")

    async def node_ids(self) -> list[str]:
        return ["this-node"]

    async def destroy(self) -> None: ...

    async def _run(self, job: str, batch: dict, meta: dict, processing: dict, *, backward: bool) -> list[dict]:
        meta = dict(meta)
        max_tokens = meta.pop("max_token_len_per_gpu")
        base_only = self._specs[job] is None
        return await self._call(
            "run",
            "policy" if base_only else job,
            meta,
            processing,
            shards=shards_of(batch, self._processes.world_size),
            backward=backward,
            max_tokens_per_mb=max_tokens,
            base_only=base_only,
        )

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        return await asyncio.to_thread(self._processes.call, method, *arguments, **keywords)
