"""The actors of a run: where they are placed, how they are started, and how their processes are ended."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from ...errors import ArcticError
from ...placement import PlacementPlan, WorkerPlacement, placement_request, plan_placement
from ...server.placement_groups import Reservation, release, reserve
from ...server.process import RUN_ID_VARIABLE, kill_processes, log_tail
from ...server.run_directory import run_directory
from ...server.sampling_worker import SamplingWorker
from ...server.specs import ServerConfig
from ...server.training_worker import TrainingWorker
from ...server.weight_sync import SyncPlan, plan_sync
from ..handle import BackendHandle
from .cluster import describe_cluster, own_node

logger = logging.getLogger(__name__)

END_LIMIT_S = 10.0
"""Seconds that another node gets to end processes."""
MOST_IN_FLIGHT = 9000
"""Requests that an engine has at once; more wait here, so that signs of life and other calls need not."""
WEIGHTS_FOLDER, SCRATCH_FOLDER = "weights", "s"


class Workers:
    """Handles of all workers, by names such as ``policy-0``; each is one Ray actor with a log file of its own."""

    def __init__(self, config: ServerConfig, handle: BackendHandle | None) -> None:
        self._config = config
        self.actors: dict[str, Any] = {} if handle is None else dict(handle.actors)
        self.sync_plan: SyncPlan | None = None if handle is None else SyncPlan(**handle.facts["weight_sync"])
        self.run_dir: str | None = None if handle is None else handle.facts["run_dir"]
        self.process_ids: dict[str, list[int]] = {}
        """What may have to be killed where a worker no longer answers."""
        self.reservation: Reservation | None = None
        self._placed: dict[str, WorkerPlacement] = {}
        self._starts: Counter[str] = Counter()

    def handle(self) -> BackendHandle:
        """What another process attaches with.

        Raises:
            ArcticError: the workers are not up.
        """
        if self.run_dir is None or not self.actors:
            raise ArcticError("there are no workers to attach to: call initialize first")
        jobs = {name.rsplit("-", 1)[0] for name in self.actors}
        return BackendHandle(
            backend="builtin",
            job_ids={job: f"{self._config.run_id}-{job}" for job in sorted(jobs)},
            actors=dict(self.actors),
            facts={"run_dir": self.run_dir, "weight_sync": dataclasses.asdict(self.sync_plan)},
        )

    def names(self, *jobs: str) -> list[str]:
        """All workers of these jobs, job after job and in the order of their ranks."""
        return [name for job in jobs for name in self.actors if name.rsplit("-", 1)[0] == job]

    def weights_folder(self) -> str:
        return os.path.join(self.run_dir, WEIGHTS_FOLDER)

    def log_file(self, name: str) -> str:
        return str(Path(self._config.log_dir) / f"{name}.log")

    def tail(self, name: str) -> str:
        return f"--- last log lines of {name} ({self.log_file(name)})\n{log_tail(self.log_file(name))}"

    def watch(self, name: str) -> Any:
        """A call that fails when the worker dies, and else does not end."""
        return self.beside(name, "watch")

    def beside(self, name: str, method: str) -> Any:
        """A call that a worker answers beside others."""
        bound = getattr(self.actors[name], method)
        return bound.remote() if name.startswith("sampling") else bound.options(concurrency_group=method).remote()

    async def place(self) -> PlacementPlan:
        """Plan where workers run, and take the GPUs of that plan."""
        cluster = describe_cluster()
        plan = plan_placement(placement_request(self._config), cluster)
        self.sync_plan = plan_sync(plan, self._config.weight_sync, here=own_node())
        names = {node.node_id: node.name for node in cluster.nodes}
        devices = None
        if plan.gpus:
            self.reservation = await asyncio.to_thread(reserve, plan, self._config.gpu_timeout_s)
            devices = self.reservation.devices
        logger.info("placement of the workers:\n%s", plan.table(devices, names))
        logger.info("weights reach the engines by %s", self.sync_plan.strategy)
        return plan

    def start(self, plan: PlacementPlan) -> None:
        """Start all actors, which then have to be set up."""
        self.run_dir = run_directory(self._config.run_id)
        for folder in (WEIGHTS_FOLDER, SCRATCH_FOLDER):
            os.mkdir(os.path.join(self.run_dir, folder))
        for worker in plan.workers:
            name = f"{worker.job}-{worker.rank}"
            self._placed[name] = worker
            self.actors[name] = self.start_actor(worker, len(plan.of(worker.job)))

    async def start_again(self, name: str) -> None:
        """End what is left of a worker, and start another actor in its place."""
        await self.end(name)
        worker = self._placed[name]
        self.actors[name] = self.start_actor(worker, len(self.names(worker.job)))

    def start_actor(self, worker: WorkerPlacement, world_size: int) -> Any:
        import ray

        env_vars = {**self._config.env_vars, RUN_ID_VARIABLE: self._config.run_id}
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "runtime_env": {"env_vars": env_vars},
            "max_restarts": 0,
            "enable_task_events": False,  # else Ray's control process keeps 3 KiB of each of some 300 calls a step
        }
        devices = None
        if self.reservation is not None:
            options |= self.reservation.actor_options(worker)
            devices = self.reservation.visible_devices(worker)
        name = f"{worker.job}-{worker.rank}"
        if worker.job == "sampling":
            # Engines of one seed, and a successor, would draw the same noise for rollouts without a seed.
            seed = self._config.sampling.seed + worker.rank + world_size * self._starts[name]
            self._starts[name] += 1
            spec = dataclasses.replace(
                self._config.sampling,
                seed=seed % 2**32,
                log_file=self.log_file(name),
                scratch_directory=os.path.join(self.run_dir, SCRATCH_FOLDER),
                visible_devices=devices,
                weight_transfer=self.sync_plan.vllm_backend,
            )
            return ray.remote(SamplingWorker).options(**options, max_concurrency=MOST_IN_FLIGHT + 1000).remote(spec)
        specs = {"policy": self._config.policy, "critic": self._config.critic, "ref": self._config.reference}
        spec = dataclasses.replace(specs[worker.job], visible_devices=devices)
        actor = ray.remote(concurrency_groups={"watch": 1, "ping": 1}, **options)(TrainingWorker)
        return actor.remote(spec, worker.rank, world_size, self.log_file(name))

    async def end(self, name: str) -> None:
        """End a worker's processes, also where they stand still."""
        import ray

        process_ids, node_id = self.process_ids.get(name, []), self._placed[name].node_id
        if node_id == own_node():
            await asyncio.to_thread(kill_processes, process_ids)
        else:
            there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(kill_processes)
            await asyncio.to_thread(ray.wait, [remote.remote(process_ids)], timeout=END_LIMIT_S)
        ray.kill(self.actors[name])

    async def shut_down(self, unheard: set[str]) -> None:
        """End all workers and give back what was taken.

        Args:
            unheard: workers that died or do not answer, whose processes may be left.
        """
        import ray

        for name in unheard & self._placed.keys():
            await self.end(name)
        shutdowns = [self.actors[name].shutdown.remote() for name in self.names("sampling")]
        if shutdowns:
            await asyncio.to_thread(
                ray.wait, shutdowns, num_returns=len(shutdowns), timeout=self._config.shutdown_timeout_s
            )
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors.clear()
        if self.reservation is not None:
            release(self.reservation)
            self.reservation = None
        if self.run_dir is not None:
            shutil.rmtree(self.run_dir, ignore_errors=True)
