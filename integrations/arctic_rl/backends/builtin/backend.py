"""The contract's methods, each handed to the part that does it, and the order in which workers come up."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import ArcticError, UnsupportedError
from ...server.offload import PARTS, WEIGHTS
from ...server.specs import ServerConfig
from ..base import Batch, InFlight, RemoteBackend
from ..handle import BackendHandle
from ..turns import CACHE, SLEEP_LEVEL, Turns, sharing_jobs
from . import checkpoints
from .calls import Calls
from .restart import supervise
from .sampling import Engines
from .training import Ranks
from .weights import Weights
from .workers import Workers


class BuiltinBackend(RemoteBackend):
    """See ``RemoteBackend``; every worker is one Ray actor with a log file of its own."""

    def __init__(self, config: ServerConfig, handle: BackendHandle | None = None) -> None:
        self._config = config
        self._attached = handle is not None
        self._workers = Workers(config, handle)
        self._calls = Calls(self._workers)
        self._turns = self._take_turns(config)
        self._engines = Engines(self._workers, self._calls)
        self._ranks = Ranks(self._workers, self._calls, self._turns)
        self._weights = Weights(config, self._workers, self._calls, self._turns, self._engines)
        self._suspects: set[str] = set()

    @classmethod
    def from_config(cls, config: ServerConfig, handle: BackendHandle | None = None) -> BuiltinBackend:
        return cls(config, handle)

    def reconnect_handle(self) -> BackendHandle:
        return self._workers.handle()

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
        plan = await self._workers.place()
        self._workers.start(plan)
        self._engines.started()
        horizons = {"policy": num_training_steps, "critic": critic_training_steps, "ref": num_training_steps}
        setups = self._setups({job: steps for job, steps in horizons.items() if plan.of(job)})
        try:
            await asyncio.wait_for(setups, self._config.startup_timeout_s)
        except TimeoutError as error:
            self._suspects = set(self._workers.actors)
            tails = "\n".join(self._workers.tail(name) for name in self._workers.actors)
            raise ArcticError(
                f"the workers were not up within trainer.arctic_rl.startup_timeout_s={self._config.startup_timeout_s}:"
                f"\n{tails}"
            ) from error
        await self._note_processes()
        supervise(
            self._config,
            self._workers,
            self._calls,
            restore=self._restore_engine,
            may_restart_now=lambda: self._engines.asleep_at is None,
            one_by_one=self._turns.of_engines,
        )

    async def _setups(self, horizons: dict[str, int]) -> None:
        """Set all workers up, one job after the other where they share GPUs, each asleep before the next one begins.

        The engines come first: vLLM measures how much memory a GPU has left for its cache.
        """
        await self._note_processes()
        if self._workers.reservation is None or not self._config.colocate_all:
            training = (self._setup_training(job, steps) for job, steps in horizons.items())
            await asyncio.gather(*training, self._call("sampling", "setup"))
            return
        await self._call("sampling", "setup")
        await self.sleep_sampling(SLEEP_LEVEL)
        for job, steps in horizons.items():
            await self._setup_training(job, steps)
            await self._call(job, "sleep", self._turns.parts_to_sleep(job))

    async def _setup_training(self, job: str, num_training_steps: int) -> None:
        names = self._workers.names(job)
        address, port = await self._calls.call(names[0], "address")
        await self._calls.call_all(names, "setup", address, port, num_training_steps)

    async def _note_processes(self) -> None:
        """Ask every worker for its processes, which may have to be killed when it no longer answers."""
        names = list(self._workers.actors)
        answers = await self._calls.call_all(names, "process_ids")
        self._workers.process_ids = dict(zip(names, answers, strict=True))

    async def _restore_engine(self, name: str) -> None:
        actor = self._workers.actors[name]
        async with self._turns.cleared_for("sampling"):
            await actor.setup.remote()
            self._workers.process_ids[name] = await actor.process_ids.remote()
            dropped = await self._engines.rest(name, self._turns.asleep("sampling"))
        if dropped:
            await actor.refuse.remote("it was started anew while it slept: its weights come with the next sync")
        else:
            await self._weights.load_current(name)
        await self._engines.bring_into_line(name)

    def _take_turns(self, config: ServerConfig) -> Turns:
        jobs = {"policy": True, "critic": config.critic is not None, "ref": config.reference is not None}
        shared = sharing_jobs(
            jobs=[*(job for job, there in jobs.items() if there), "sampling"],
            colocate_all=config.colocate_all,
            colocate_policy_ref=config.colocate_policy_ref,
        )
        awake = not config.colocate_all or config.policy.device == "cpu"
        return Turns(
            shared,
            self._put_to_sleep,
            self._wake,
            awake=awake,
            alone=not self._attached,
            keep_optimizer=frozenset(config.optimizers_that_stay),
        )

    async def _put_to_sleep(self, job: str, parts: list[str]) -> None:
        await (self._engines.sleep(SLEEP_LEVEL) if job == "sampling" else self._call(job, "sleep", parts))

    async def _wake(self, job: str, parts: list[str]) -> None:
        await (self._engines.wake(parts) if job == "sampling" else self._call(job, "wake", parts))

    async def _call(self, job: str, method: str, *args: Any) -> list[Any]:
        """The answers of all workers of a job."""
        return await self._calls.call_all(self._workers.names(job), method, *args)

    async def fwd_no_grad(self, job: str, batch: Batch, meta: dict, processing: dict) -> dict:
        return await self._ranks.forward(job, self._serves(job), batch, meta, processing)

    async def fwd_bwd(self, batch: Batch, meta: dict, processing: dict, job: str = "policy") -> dict:
        return await self._ranks.backward(job, batch, meta, processing)

    async def step(self, job: str = "policy") -> dict[str, float]:
        self._calls.require_workers("step")
        async with self._weights.may_change(job), self._turns.turn(job):
            return (await self._call(job, "step"))[0]

    async def generate(self, requests: list[dict]) -> list[dict]:
        return list(await asyncio.gather(*(self._engines.generate(request) for request in requests)))

    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        return await self._weights.sync(keep_cache=keep_cache)

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

    async def update_reference(self) -> None:
        await self._weights.update_reference()

    async def sleep_sampling(self, level: int) -> None:
        await self._engines.sleep(level)
        self._turns.note("sampling", asleep=(WEIGHTS, CACHE))

    async def wake_sampling(self, tags: list[str] | None) -> None:
        self._calls.require_workers("wake_up")
        await self._turns.make_room()
        await self._engines.wake(tags)
        self._turns.note("sampling", awake=(WEIGHTS, CACHE) if tags is None else tags)

    async def pause_generation(self, *, in_flight: InFlight = "finish") -> None:
        await self._engines.pause(in_flight)

    async def resume_generation(self) -> None:
        await self._engines.resume()

    async def reset_prefix_cache(self) -> None:
        await self._call("sampling", "reset_prefix_cache")

    async def empty_training_cache(self) -> None:
        await self._calls.call_all(self._workers.names("policy", "critic", "ref"), "empty_cache")

    async def save_checkpoint(self, job: str, directory: str) -> None:
        await checkpoints.save(self._workers, self._calls, self._turns, job, directory)

    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        return await checkpoints.load(self._workers, self._calls, self._turns, self._weights, job, directory)

    async def save_weights(self, directory: str, job: str = "policy") -> None:
        async with self._turns.turn(job, [WEIGHTS]):
            await self._call(job, "save_weights", directory)

    async def weight_norm(self, job: str) -> float:
        async with self._turns.turn(job, [WEIGHTS]):
            return (await self._call(job, "weight_norm"))[0]

    async def sleep_training(self) -> None:
        await self._calls.call_all(self._workers.names("policy", "critic"), "sleep")
        for job in ("policy", "critic"):
            self._turns.note(job, asleep=PARTS)

    async def wake_training(self) -> None:
        await self._calls.call_all(self._workers.names("policy", "critic"), "wake")
        for job in ("policy", "critic"):
            self._turns.note(job, awake=PARTS)

    async def sleep_log_prob(self) -> None:
        await self._call("ref", "sleep")
        self._turns.note("ref", asleep=PARTS)

    async def wake_log_prob(self) -> None:
        await self._call("ref", "wake")
        self._turns.note("ref", awake=[WEIGHTS])

    async def start_profile(self, settings: dict[str, Any]) -> None:
        await self._call("policy", "start_profile", settings)

    async def profile_step(self) -> None:
        await self._call("policy", "profile_step")

    async def stop_profile(self) -> None:
        await self._call("policy", "stop_profile")

    async def node_ids(self) -> list[str]:
        return sorted(set(await self._calls.call_all(self._workers.names("policy", "critic"), "node_id")))

    async def engine_configs(self) -> dict[str, dict]:
        """The settings that every built training engine and sampling engine runs with, by worker."""
        names = self._workers.names("policy", "critic", "sampling")
        return dict(zip(names, await self._calls.call_all(names, "engine_config"), strict=True))

    def take_fault_metrics(self) -> dict[str, float]:
        supervisor = self._calls.supervisor
        return {} if supervisor is None else supervisor.take_metrics()

    async def destroy(self) -> None:
        if not self._attached:
            await self.shutdown()
            return
        self._calls.stop_watching()
        self._workers.actors.clear()

    async def shutdown(self) -> None:
        dead = self._calls.dead()
        self._calls.stop_watching()
        await self._workers.shut_down(dead | self._suspects)

    def _serves(self, job: str) -> str:
        """The job whose workers serve a model: the policy's without adapters are a reference model without its own."""
        return "policy" if job == "ref" and self._config.reference is None else job
