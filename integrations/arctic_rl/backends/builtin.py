"""The built-in server: DeepSpeed training workers and vLLM sampling workers as Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

from ..errors import ArcticError, RequestError, UnsupportedError, WorkerDiedError
from ..placement import ClusterDescription, Node, PlacementPlan, WorkerPlacement, placement_request, plan_placement
from ..server.checkpoint import check_shares, write_file
from ..server.offload import PARTS, WEIGHTS
from ..server.placement_groups import Reservation, release, reserve
from ..server.process import RUN_ID_VARIABLE, kill_processes, log_tail
from ..server.sampling_worker import SamplingWorker
from ..server.specs import ServerConfig
from ..server.training_worker import TrainingWorker
from ..server.weight_sync import SENDERS, SyncPlan, low_memory, plan_sync
from ..server.weight_sync.run import SyncRun
from ..server.weight_sync.shared_memory import kept_version, send_again
from ..wire.body import decode_answer, encode
from ..zorro.cost import CostModel
from .alarm import Alarm
from .base import Batch, InFlight, RemoteBackend
from .engine_choice import EngineChoice
from .engine_supervisor import DEATH_GRACE_S, EngineSupervisor, first_line
from .handle import BackendHandle
from .heartbeat import watched
from .sharding import RankPlan, plan_ranks
from .turns import CACHE, SLEEP_LEVEL, Turns, sharing_jobs

logger = logging.getLogger(__name__)

END_LIMIT_S = 10.0
"""Seconds that another node gets to end processes."""
MOST_IN_FLIGHT = 9000
"""Requests that an engine has at once; more wait here, so that signs of life and other calls need not."""
ENGINES_NAME = "engines.json"
"""File of a checkpoint with the random state of each engine."""
RUN_DIRECTORY_PREFIX = "arctic-rl-"
WEIGHTS_FOLDER, SCRATCH_FOLDER = "weights", "s"


class BuiltinBackend(RemoteBackend):
    """See ``RemoteBackend``; every worker is one Ray actor with a log file of its own."""

    def __init__(self, config: ServerConfig, handle: BackendHandle | None = None) -> None:
        self._config = config
        self._attached = handle is not None
        self._reservation: Reservation | None = None
        self._turns = self._take_turns(config)
        self._actors: dict[str, Any] = {} if handle is None else dict(handle.actors)
        self._watches: dict[str, asyncio.Future] = {}
        self._deaths = Alarm()
        self._sharing: dict[str, tuple[CostModel, bool]] = {}
        self._choice = EngineChoice(self._names("sampling"))
        self._sync: SyncPlan | None = None if handle is None else SyncPlan(**handle.facts["weight_sync"])
        self._unsynced_step = False
        self._synced_version = 0
        self._syncing = False
        self._weights_kept = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()
        self._frozen = False
        self._run_dir: str | None = None if handle is None else handle.facts["run_dir"]
        self._request_count = 0
        self._client_id = uuid.uuid4().hex[:8]
        self._lease = asyncio.Condition()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._placed: dict[str, WorkerPlacement] = {}
        self._process_ids: dict[str, list[int]] = {}
        self._supervisor: EngineSupervisor | None = None
        self._suspects: list[str] = []
        self._asleep_at: int | None = None
        self._starts: Counter[str] = Counter()

    @classmethod
    def from_config(cls, config: ServerConfig, handle: BackendHandle | None = None) -> BuiltinBackend:
        return cls(config, handle)

    def reconnect_handle(self) -> BackendHandle:
        """See ``RemoteBackend``.

        Raises:
            ArcticError: the workers are not up.
        """
        if self._run_dir is None or not self._actors:
            raise ArcticError("there are no workers to attach to: call initialize first")
        jobs = {name.rsplit("-", 1)[0] for name in self._actors}
        return BackendHandle(
            backend="builtin",
            job_ids={job: f"{self._config.run_id}-{job}" for job in sorted(jobs)},
            actors=dict(self._actors),
            facts={"run_dir": self._run_dir, "weight_sync": dataclasses.asdict(self._sync)},
        )

    def requires_single_forwarder(self) -> bool:
        return True

    def dp_size(self, job: str) -> int:
        ranks = {
            "policy": self._config.policy_ranks,
            "critic": self._config.critic_ranks,
            "ref": self._config.ref_ranks,
        }
        return ranks[self._serves(job)]

    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        plan = await self._place()
        self._run_dir = run_directory(self._config.run_id)
        for folder in (WEIGHTS_FOLDER, SCRATCH_FOLDER):
            os.mkdir(os.path.join(self._run_dir, folder))
        self._start_actors(plan)
        horizons = {"policy": num_training_steps, "critic": critic_training_steps, "ref": num_training_steps}
        setups = self._setups({job: steps for job, steps in horizons.items() if plan.of(job)})
        try:
            await asyncio.wait_for(setups, self._config.startup_timeout_s)
        except TimeoutError as error:
            self._suspects = list(self._actors)
            tails = "\n".join(self._tail(name) for name in self._actors)
            raise ArcticError(
                f"the workers were not up within trainer.arctic_rl.startup_timeout_s={self._config.startup_timeout_s}:"
                f"\n{tails}"
            ) from error
        await self._supervise()

    async def _place(self) -> PlacementPlan:
        """Plan where workers run, and take the GPUs of that plan."""
        cluster = describe_cluster()
        plan = plan_placement(placement_request(self._config), cluster)
        self._sync = plan_sync(plan, self._config.weight_sync, here=own_node())
        names = {node.node_id: node.name for node in cluster.nodes}
        devices = None
        if plan.gpus:
            self._reservation = await asyncio.to_thread(reserve, plan, self._config.gpu_timeout_s)
            devices = self._reservation.devices
        logger.info("placement of the workers:\n%s", plan.table(devices, names))
        logger.info("weights reach the engines by %s", self._sync.strategy)
        return plan

    async def _setups(self, horizons: dict[str, int]) -> None:
        """Set all workers up, one job after the other where they share GPUs, each asleep before the next one begins.

        The engines come first: vLLM measures how much memory a GPU has left for its cache.
        """
        await self._note_processes()
        if self._reservation is None or not self._config.colocate_all:
            training = (self._setup_training(job, steps) for job, steps in horizons.items())
            await asyncio.gather(*training, self._setup_sampling())
            return
        await self._setup_sampling()
        await self.sleep_sampling(SLEEP_LEVEL)
        for job, steps in horizons.items():
            await self._setup_training(job, steps)
            await self._call_all(self._names(job), "sleep")

    def _take_turns(self, config: ServerConfig) -> Turns:
        jobs = {"policy": True, "critic": config.critic is not None, "ref": config.reference is not None}
        shared = sharing_jobs(
            jobs=[*(job for job, there in jobs.items() if there), "sampling"],
            colocate_all=config.colocate_all,
            colocate_policy_ref=config.colocate_policy_ref,
        )
        awake = not config.colocate_all or config.policy.device == "cpu"
        return Turns(shared, self._put_to_sleep, self._wake, awake=awake, alone=not self._attached)

    async def _put_to_sleep(self, job: str, parts: list[str]) -> None:
        if job == "sampling":
            self._asleep_at = SLEEP_LEVEL
        await self._call_all(self._names(job), "sleep", SLEEP_LEVEL if job == "sampling" else parts)

    async def _wake(self, job: str, parts: list[str]) -> None:
        await self._call_all(self._names(job), "wake_up" if job == "sampling" else "wake", parts)
        if job == "sampling":
            self._asleep_at = None

    async def fwd_no_grad(self, job: str, batch: Batch, meta: dict, processing: dict) -> dict:
        plan, outputs = await self._run_ranks(job, batch, meta, processing, backward=False)
        return {"batch": plan.join([output["batch"] for output in outputs]), "metrics": {}}

    async def fwd_bwd(self, batch: Batch, meta: dict, processing: dict, job: str = "policy") -> dict:
        plan, outputs = await self._run_ranks(job, batch, meta, processing, backward=True)
        result = {"avg_loss": outputs[0]["avg_loss"], "metrics": outputs[0]["metrics"]}
        result["micro_batches"] = [output["micro_batches"] for output in outputs]
        result["lr"] = await self._call(f"{job}-0", "learning_rate")
        if "batch" in outputs[0]:
            result["batch"] = plan.join([output["batch"] for output in outputs])
        return result

    async def step(self, job: str = "policy") -> dict[str, float]:
        self._require_workers("step")
        async with self._weights_may_change(job), self._turns.turn(job):
            results = await self._call_all(self._names(job), "step")
        return results[0]

    @contextlib.asynccontextmanager
    async def _weights_may_change(self, job: str) -> AsyncIterator[None]:
        """Inside, no restarted engine is being sent the policy's weights, of which none may be newer than others."""
        if job != "policy":
            yield
            return
        async with self._weights_kept:
            self._unsynced_step = True
            yield

    async def generate(self, requests: list[dict]) -> list[dict]:
        return list(await asyncio.gather(*(self._generate_one(request) for request in requests)))

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        version = 1 + await self._current_version()
        self._syncing = True
        try:
            await self._send_weights(version, keep_cache=keep_cache)
        finally:
            self._syncing = False
        self._synced_version, self._unsynced_step = version, False
        self._choice.clear()
        return version

    async def _send_weights(self, version: int, *, keep_cache: bool) -> None:
        """Send the policy's weights to all engines, from the beginning if one was restarted on the way."""
        while True:
            restarts = self._engine_restarts()
            try:
                await SENDERS[self._sync.strategy](self._sync_run("sampling", version, keep_cache=keep_cache))
                if self._sync.strategy == "shared_memory" or self._engine_restarts() == restarts:
                    return
            except WorkerDiedError:
                raise
            except ArcticError:
                if self._engine_restarts() == restarts:
                    raise
            logger.warning("weights of version %d are sent again: an engine was restarted", version)

    def _engine_restarts(self) -> int:
        return 0 if self._supervisor is None else self._supervisor.restarts

    async def _current_version(self) -> int:
        return max(self._synced_version, *await self._call_all(self._names("sampling"), "weight_version"))

    async def load_current_weights(self, name: str) -> int:
        """Bring one freshly started engine, which holds the checkpoint's own weights, to those of the last sync.

        Weights that were not kept are sent once more, to all engines; a sync that is under way begins anew by itself.

        Args:
            name: of the engine, such as ``sampling-0``.

        Returns:
            The version that it now holds; 0 where no sync has been.

        Raises:
            ArcticError: weights were not kept, and the policy has taken a step since.
        """
        self._choice.forget(name)
        if self._sync.strategy == "shared_memory":
            run = self._sync_run("sampling", kept_version(self._weights_folder()), names=(name,))
            if run.version:
                await send_again(run)
            return run.version
        if self._syncing:
            return 0
        async with self._weights_kept:
            while True:
                restarts = self._engine_restarts()
                try:
                    return await self._send_to_restarted(name)
                except WorkerDiedError:
                    raise
                except ArcticError:
                    if self._engine_restarts() == restarts:
                        raise

    async def _send_to_restarted(self, name: str) -> int:
        """Send the weights of the last sync to an engine and to all that are up; others that are being restarted come
        to this by themselves, and must not be waited for."""
        away = set() if self._supervisor is None else self._supervisor.restarting() - {name}
        names = tuple(engine for engine in self._names("sampling") if engine not in away)
        version = max(self._synced_version, *await self._call_all(list(names), "weight_version"))
        if version and self._unsynced_step:
            raise ArcticError(
                f"engine {name} cannot get the weights of version {version} any more: the policy has taken a step "
                f"since, and trainer.arctic_rl.weight_sync={self._sync.strategy} keeps no copy; where engines sample "
                "while the policy trains, write shared_memory if all are on one node"
            )
        if version:
            async with self._turns.beside("policy", [WEIGHTS]):
                await SENDERS[self._sync.strategy](self._sync_run("sampling", version, names=names))
        return version

    async def update_reference(self) -> None:
        directory = tempfile.mkdtemp(prefix="reference-", dir=self._run_dir)
        try:
            run = dataclasses.replace(self._sync_run("ref", 0), folder=directory, dtype=self._config.reference.dtype)
            async with self._turns.weights_of("policy", "ref"):
                await low_memory.send(run)
        finally:
            shutil.rmtree(directory)

    def _weights_folder(self) -> str:
        return os.path.join(self._run_dir, WEIGHTS_FOLDER)

    def _sync_run(
        self, job: str, version: int, *, keep_cache: bool = False, names: tuple[str, ...] | None = None
    ) -> SyncRun:
        """A sync of the policy's weights to all workers of a job, or to some of them."""
        receivers = tuple(self._names(job)) if names is None else names
        return SyncRun(
            call=self._call_all,
            senders=tuple(self._names("policy")),
            receivers=receivers,
            handles=tuple(self._actors[name] for name in receivers),
            processes=self._config.sampling.gpus,
            folder=self._weights_folder(),
            version=version,
            dtype=self._config.sync_dtype,
            bucket_bytes=self._config.weight_sync_bucket_mb * 2**20,
            one_node=self._sync.one_node,
            keep_cache=keep_cache,
        )

    async def sleep_sampling(self, level: int) -> None:
        self._asleep_at = level
        await self._call_all(self._names("sampling"), "sleep", level)
        self._turns.note("sampling", asleep=(WEIGHTS, CACHE))

    async def wake_sampling(self, tags: list[str] | None) -> None:
        self._require_workers("wake_up")
        await self._turns.make_room()
        await self._call_all(self._names("sampling"), "wake_up", tags)
        self._asleep_at = None
        self._turns.note("sampling", awake=(WEIGHTS, CACHE) if tags is None else tags)

    async def update_weights(self, *, in_flight: InFlight = "finish", keep_cache: bool = False) -> int:
        if not self._turns.of_engines or in_flight == "keep":
            async with self._turns.transfer():
                return await super().update_weights(in_flight=in_flight, keep_cache=keep_cache)
        if keep_cache:
            raise UnsupportedError('update_weights(keep_cache=True) needs in_flight="keep"')
        try:
            await self.pause_generation()
            async with self._turns.transfer():
                version = await self.sync_weights()
            await self.reset_prefix_cache()
        finally:
            await self.resume_generation()
        return version

    async def pause_generation(self, *, in_flight: InFlight = "finish") -> None:
        self._running.clear()
        if in_flight == "keep":
            self._frozen = True
            await self._call_all(self._names("sampling"), "freeze")
            return
        async with self._lease:
            await self._lease.wait_for(lambda: self._choice.idle)

    async def resume_generation(self) -> None:
        if self._frozen:
            await self._call_all(self._names("sampling"), "thaw")
            self._frozen = False
        self._running.set()

    async def reset_prefix_cache(self) -> None:
        await self._call_all(self._names("sampling"), "reset_prefix_cache")

    async def empty_training_cache(self) -> None:
        names = [name for job in ("policy", "critic", "ref") for name in self._names(job)]
        await self._call_all(names, "empty_cache")

    async def save_checkpoint(self, job: str, directory: str) -> None:
        async with self._turns.turn(job):
            await self._call_all(self._names(job), "save_checkpoint", directory)
        if job == "policy":
            states = await self._call_all(self._names("sampling"), "random_state")
            write_file(Path(directory) / ENGINES_NAME, json.dumps(states))

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        names = self._names(job)
        problems = await self._call_all(names, "checkpoint_problems", directory)
        check_shares(problems)
        async with self._weights_may_change(job), self._turns.turn(job):
            outcome = (await self._call_all(names, "load_checkpoint", directory))[0]
        if job == "policy":
            outcome["same_engines"] = await self._set_engines(Path(directory) / ENGINES_NAME)
        return outcome

    async def _set_engines(self, file: Path) -> bool:
        """Give the engines the random states of as many others; False where there were more or fewer."""
        states, names = json.loads(file.read_text(encoding="utf-8")), self._names("sampling")
        if len(states) != len(names):
            return False
        await self._gather(
            {
                name: self._send(name, "set_random_state", of_engine)
                for name, of_engine in zip(names, states, strict=True)
            }
        )
        return True

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        async with self._turns.turn(job, [WEIGHTS]):
            await self._call_all(self._names(job), "save_weights", directory)

    async def weight_norm(self, job: str) -> float:
        async with self._turns.turn(job, [WEIGHTS]):
            return (await self._call_all(self._names(job), "weight_norm"))[0]

    async def sleep_training(self) -> None:
        await self._call_all([*self._names("policy"), *self._names("critic")], "sleep")
        for job in ("policy", "critic"):
            self._turns.note(job, asleep=PARTS)

    async def wake_training(self) -> None:
        await self._call_all([*self._names("policy"), *self._names("critic")], "wake")
        for job in ("policy", "critic"):
            self._turns.note(job, awake=PARTS)

    async def sleep_log_prob(self) -> None:
        await self._call_all(self._names("ref"), "sleep")
        self._turns.note("ref", asleep=PARTS)

    async def wake_log_prob(self) -> None:
        await self._call_all(self._names("ref"), "wake")
        self._turns.note("ref", awake=[WEIGHTS])

    async def start_profile(self, settings: dict[str, Any]) -> None:
        await self._call_all(self._names("policy"), "start_profile", settings)

    async def profile_step(self) -> None:
        await self._call_all(self._names("policy"), "profile_step")

    async def stop_profile(self) -> None:
        await self._call_all(self._names("policy"), "stop_profile")

    async def node_ids(self) -> list[str]:
        names = [*self._names("policy"), *self._names("critic")]
        return sorted(set(await self._call_all(names, "node_id")))

    async def engine_configs(self) -> dict[str, dict]:
        """The settings that every built training engine and sampling engine runs with, by worker."""
        names = [name for job in ("policy", "critic", "sampling") for name in self._names(job)]
        return dict(zip(names, await self._call_all(names, "engine_config"), strict=True))

    async def destroy(self) -> None:
        if not self._attached:
            await self.shutdown()
            return
        self._stop_watching()
        self._actors.clear()

    def _stop_watching(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        if self._supervisor is not None:
            self._supervisor.close()

    async def shutdown(self) -> None:
        import ray

        dead = [name for name, watch in self._watches.items() if _failed(watch) and name in self._placed]
        for name in {*dead, *self._suspects, *([] if self._supervisor is None else self._supervisor.dead())}:
            await self._end(name)
        self._stop_watching()
        shutdowns = [self._actors[name].shutdown.remote() for name in self._names("sampling")]
        if shutdowns:
            await asyncio.to_thread(
                ray.wait, shutdowns, num_returns=len(shutdowns), timeout=self._config.shutdown_timeout_s
            )
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        if self._reservation is not None:
            release(self._reservation)
            self._reservation = None
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _serves(self, job: str) -> str:
        """The job whose workers serve a model: the policy's without adapters are a reference model without its own."""
        return "policy" if job == "ref" and self._config.reference is None else job

    def _names(self, job: str) -> list[str]:
        return [name for name in self._actors if name.rsplit("-", 1)[0] == job]

    def _log_file(self, name: str) -> str:
        return str(Path(self._config.log_dir) / f"{name}.log")

    def _start_actors(self, plan: PlacementPlan) -> None:
        for worker in plan.workers:
            name = f"{worker.job}-{worker.rank}"
            self._placed[name] = worker
            self._actors[name] = self._start_actor(worker, len(plan.of(worker.job)))
        self._choice = EngineChoice(self._names("sampling"))

    def _begin_watching(self, watches: dict[str, asyncio.Future]) -> None:
        self._watches, self._deaths = watches, Alarm()
        for watch in watches.values():
            self._deaths.follow(watch)

    def _watch(self, name: str) -> Any:
        return self._beside(name, "watch")

    def _beside(self, name: str, method: str) -> Any:
        """A call that a worker answers beside others."""
        bound = getattr(self._actors[name], method)
        return bound.remote() if name.startswith("sampling") else bound.options(concurrency_group=method).remote()

    def _watched(self, name: str) -> asyncio.Future:
        """Fails when a worker dies, or gives no sign of life."""
        ping = functools.partial(self._beside, name, "ping")
        return asyncio.ensure_future(watched(self._watch(name), ping, self._config.worker_timeout_s))

    async def _supervise(self) -> None:
        """From now on, look for signs of life, and restart engines."""
        await self._note_processes()
        self._stop_watching()
        engines = self._names("sampling")
        self._begin_watching({name: self._watched(name) for name in self._actors if name not in engines})
        self._supervisor = EngineSupervisor(
            self._actors,
            watch=self._watched,
            replace=self._replace_engine,
            last_words=self._tail,
            most=self._config.max_engine_restarts,
            may_restart_now=lambda: self._asleep_at is None,
        )
        self._supervisor.watch(engines)

    async def _note_processes(self) -> None:
        """Ask every worker for its processes, which may have to be killed when it no longer answers."""
        names = list(self._actors)
        self._process_ids = dict(zip(names, await self._call_all(names, "process_ids"), strict=True))

    async def _replace_engine(self, name: str) -> None:
        """Start an engine anew, with the current weights, in the state that the others are in.

        Raises:
            WorkerDiedError: it died too.
            ArcticError: it did not start.
        """
        await self._end(name)
        self._actors[name] = self._start_actor(self._placed[name], len(self._names("sampling")))
        death = asyncio.ensure_future(_as_future(self._watch(name)))
        try:
            await asyncio.wait_for(self._restore_engine(self._actors[name], name), self._config.startup_timeout_s)
        except TimeoutError as error:
            raise ArcticError(
                f"worker {name} was not up again within trainer.arctic_rl.startup_timeout_s="
                f"{self._config.startup_timeout_s}\n{self._tail(name)}"
            ) from error
        except Exception as error:
            await asyncio.wait({death}, timeout=DEATH_GRACE_S)
            if _failed(death):
                raise WorkerDiedError(f"while it was restarted: {first_line(death.exception())}") from error
            cause = getattr(error, "cause", None) or error
            raise ArcticError(f"worker {name} could not be restarted: {cause}\n{self._tail(name)}") from error
        finally:
            death.cancel()

    async def _restore_engine(self, actor: Any, name: str) -> None:
        await actor.setup.remote()
        self._process_ids[name] = await actor.process_ids.remote()
        await self.load_current_weights(name)
        if self._frozen:
            await actor.freeze.remote()
        if self._asleep_at is not None:
            await actor.sleep.remote(self._asleep_at)

    async def _end(self, name: str) -> None:
        """End a worker's processes, also where they stand still."""
        import ray

        process_ids, node_id = self._process_ids.get(name, []), self._placed[name].node_id
        if node_id == ray.get_runtime_context().get_node_id():
            await asyncio.to_thread(kill_processes, process_ids)
        else:
            there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(kill_processes)
            await asyncio.to_thread(ray.wait, [remote.remote(process_ids)], timeout=END_LIMIT_S)
        ray.kill(self._actors[name])

    def _start_actor(self, worker: WorkerPlacement, world_size: int) -> Any:
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
        if self._reservation is not None:
            options |= self._reservation.actor_options(worker)
            devices = self._reservation.visible_devices(worker)
        name = f"{worker.job}-{worker.rank}"
        if worker.job == "sampling":
            # Engines of one seed, and a successor, would draw the same noise for rollouts without a seed.
            seed = self._config.sampling.seed + worker.rank + world_size * self._starts[name]
            self._starts[name] += 1
            spec = dataclasses.replace(
                self._config.sampling,
                seed=seed % 2**32,
                log_file=self._log_file(name),
                scratch_directory=os.path.join(self._run_dir, SCRATCH_FOLDER),
                visible_devices=devices,
                weight_transfer=self._sync.vllm_backend,
            )
            return ray.remote(SamplingWorker).options(**options, max_concurrency=MOST_IN_FLIGHT + 1000).remote(spec)
        specs = {"policy": self._config.policy, "critic": self._config.critic, "ref": self._config.reference}
        spec = dataclasses.replace(specs[worker.job], visible_devices=devices)
        actor = ray.remote(concurrency_groups={"watch": 1, "ping": 1}, **options)(TrainingWorker)
        return actor.remote(spec, worker.rank, world_size, self._log_file(name))

    async def _setup_training(self, job: str, num_training_steps: int) -> None:
        names = self._names(job)
        address, port = await self._call(names[0], "address")
        await self._call_all(names, "setup", address, port, num_training_steps)

    async def _setup_sampling(self) -> None:
        await self._call_all(self._names("sampling"), "setup")

    async def _run_ranks(
        self, job: str, batch: Batch, meta: dict, processing: dict, *, backward: bool
    ) -> tuple[RankPlan, list[dict]]:
        meta = dict(meta)
        max_tokens = meta.pop("max_token_len_per_gpu")
        server = self._serves(job)
        names = self._names(server)
        if meta.get("dp_size") not in (None, len(names)):
            raise RequestError(f"meta['dp_size']={meta['dp_size']}, but the job {job!r} has {len(names)} ranks")
        if server not in self._sharing:
            self._sharing[server] = await self._call(names[0], "sharing_cost")
        cost, can_share = self._sharing[server]
        plan = plan_ranks(batch, len(names), cost, shared=can_share and meta["zorro_train_enable"] is not False)
        shards = plan.split(batch)
        bodies = await asyncio.gather(*(asyncio.to_thread(encode, {}, shard) for shard in shards))
        async with self._turns.turn(server, PARTS if backward else [WEIGHTS]):
            calls = {
                name: self._actors[name].run_rows.remote(
                    rows,
                    meta,
                    processing,
                    backward=backward,
                    max_tokens_per_mb=max_tokens,
                    base_only=server != job,
                )
                for name, rows in zip(names, bodies, strict=True)
            }
            outputs = await self._gather(calls)
        answers = zip(outputs, shards, strict=True)
        return plan, [
            result if rows is None else result | {"batch": decode_answer(rows, shard)[1]}
            for (result, rows), shard in answers
        ]

    async def _generate_one(self, request: dict) -> dict:
        await self._running.wait()
        self._require_workers("generate")
        assignment = self._choice.assign(
            request["prompt_token_ids"], request["params"]["max_tokens"], request.get("session_id")
        )
        name = assignment.engine
        self._request_count += 1
        request_id = f"{name}-{self._client_id}-{self._request_count}"
        try:
            async with self._slots.setdefault(name, asyncio.Semaphore(MOST_IN_FLIGHT)):
                return await self._call(
                    name,
                    "generate",
                    request["prompt_token_ids"],
                    request["params"],
                    request_id,
                    request.get("cache_salt"),
                )
        finally:
            self._choice.finish(assignment)
            async with self._lease:
                self._lease.notify_all()

    def _require_workers(self, method: str) -> None:
        if not self._actors:
            raise ArcticError(
                f"no workers are up that could do {method!r}: they start when the trainer is built (build_models), "
                "which an experiment that evaluates or samples alone has to do too"
            )

    async def _call(self, name: str, method: str, *args: Any) -> Any:
        return (await self._call_all([name], method, *args))[0]

    async def _call_all(self, names: list[str], method: str, *args: Any) -> list[Any]:
        self._require_workers(method)
        answers = self._gather({name: self._send(name, method, *args) for name in names})
        return await (self._while_engines_live(answers) if method == "transfer_weights" else answers)

    async def _while_engines_live(self, answers: Awaitable[list[Any]]) -> list[Any]:
        """What ranks that meet the engines answer: they would wait for one that is gone without an end.

        Raises:
            WorkerDiedError: an engine died meanwhile, and the ranks stand in different places since.
        """
        if self._supervisor is None:
            return await answers
        transfer, death = asyncio.ensure_future(answers), self._supervisor.next_death()
        await asyncio.wait({transfer, death}, return_when=asyncio.FIRST_COMPLETED)
        if not transfer.done():
            await asyncio.wait({transfer}, timeout=DEATH_GRACE_S)
        if not death.done() or (transfer.done() and not _failed(transfer)):
            return await transfer
        transfer.add_done_callback(_failed)
        transfer.cancel()
        raise WorkerDiedError(
            f"an engine died while ranks of the policy met it by trainer.arctic_rl.weight_sync={self._sync.strategy}, "
            "and they cannot be called back; where a run has to survive that, write low_memory"
        )

    def _send(self, name: str, method: str, *args: Any) -> Awaitable[Any]:
        if self._supervisor is not None and name.startswith("sampling") and not self._supervisor.restarts_here(name):
            return self._supervisor.call(name, method, *args)
        return getattr(self._actors[name], method).remote(*args)

    def take_fault_metrics(self) -> dict[str, float]:
        return {} if self._supervisor is None else self._supervisor.take_metrics()

    async def _gather(self, calls: dict[str, Any]) -> list[Any]:
        """Results of one call a worker; the first failure of a call, or the death of any worker but an engine that is
        restarted, ends the wait."""
        if not calls:
            return []
        if not self._watches:
            self._begin_watching({name: asyncio.ensure_future(_as_future(self._watch(name))) for name in self._actors})
        futures = {name: asyncio.ensure_future(_as_future(ref)) for name, ref in calls.items()}
        pending: set[Awaitable] = set(futures.values())
        death = self._deaths.waiter()
        try:
            while pending:
                done, _ = await asyncio.wait({*pending, death}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                if death in done or any(_failed(future) for future in done):
                    raise await self._explain({**futures}) from None
            return [future.result() for future in futures.values()]
        finally:
            self._deaths.forget(death)
            for future in futures.values():
                if not future.done():
                    future.cancel()
                elif not future.cancelled():
                    future.exception()

    async def _explain(self, futures: dict[str, asyncio.Future]) -> Exception:
        """The error to raise: a refused call's, else a dead worker's if one is found within a short grace time, else
        the first failure."""
        for name, future in futures.items():
            error = future.exception() if _failed(future) else None
            cause = getattr(error, "cause", None) or error
            if isinstance(error, WorkerDiedError) and cause is error:
                return error
            if isinstance(cause, ValueError):
                return RequestError(f"worker {name} refused the call: {cause}")
            if isinstance(cause, ArcticError) and not isinstance(cause, WorkerDiedError):
                return ArcticError(f"worker {name} failed: {cause}\n{self._tail(name)}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_GRACE_S):
                while not any(_failed(watch) for watch in self._watches.values()):
                    await asyncio.wait(self._watches.values(), return_when=asyncio.FIRST_COMPLETED)
        dead = [name for name, watch in self._watches.items() if _failed(watch)]
        if dead:
            tails = "\n".join(self._tail(name) for name in dead)
            causes = "; ".join(f"{name}: {first_line(self._watches[name].exception())}" for name in dead)
            return WorkerDiedError(f"worker {', '.join(dead)} died ({causes})\n{tails}")
        name, error = next((n, f.exception()) for n, f in futures.items() if _failed(f))
        cause = getattr(error, "cause", None) or error
        return ArcticError(f"worker {name} failed: {type(cause).__name__}: {cause}\n{self._tail(name)}")

    def _tail(self, name: str) -> str:
        return f"--- last log lines of {name} ({self._log_file(name)})\n{log_tail(self._log_file(name))}"


def _failed(future: asyncio.Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


async def _as_future(ref: Any) -> Any:
    return await ref


def describe_cluster() -> ClusterDescription:
    """The live nodes of the Ray cluster, this one first."""
    import ray

    here = own_node()
    nodes = [
        Node(
            node["NodeID"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
            node["NodeManagerAddress"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return ClusterDescription(tuple(sorted(nodes, key=lambda node: (node.node_id != here, node.node_id))))


def own_node() -> str:
    """Ray's id of the node of this process."""
    import ray

    return ray.get_runtime_context().get_node_id()


def run_directory(run_id: str) -> str:
    """A fresh folder in shared memory, or in the temporary folder where there is none.

    Its name holds this process's id; folders whose process is gone, left by a run that was killed, are removed.
    """
    import psutil

    base = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    for folder in base.glob(f"{RUN_DIRECTORY_PREFIX}*"):
        owner = folder.name.removeprefix(RUN_DIRECTORY_PREFIX).split("-", 1)[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{RUN_DIRECTORY_PREFIX}{os.getpid()}-{run_id}-", dir=base)
