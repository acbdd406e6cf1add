"""Workers without Ray, DeepSpeed or vLLM for the built-in backend: actors in this process that die or stand still when
they are told to."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import torch

from integrations.arctic_rl.backends.builtin import BuiltinBackend, workers
from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.placement import ClusterDescription, Node
from integrations.arctic_rl.server.specs import ServerConfig
from integrations.arctic_rl.server.weights import TensorSpec, declare, read_manifest, write_weights
from integrations.arctic_rl.wire.body import decode, encode_answer
from integrations.arctic_rl.zorro.cost import CostModel
from tests.arctic_rl.specs import sampling_spec, training_spec

TRAINED = training_spec(zero_stage=2)


class ActorDiedError(Exception):
    """As Ray's: what every call on a dead actor raises."""


def expected_sample(prompt, seed, version):
    """What every fake engine answers."""
    return [sum(prompt) % 97, seed, version]


class FakeEngine:
    """The calls that the backend makes on a sampling worker."""

    def __init__(self):
        self.version, self.asleep, self.frozen, self.requests = 0, set(), asyncio.Event(), 0
        self.frozen.set()
        self.refusal = None
        self.update, self.parts = None, []

    async def setup(self): ...

    async def ping(self): ...

    async def process_ids(self):
        return [id(self)]

    async def generate(self, prompt, params, request_id, cache_salt=None):
        assert not self.asleep
        if self.refusal is not None:
            raise ArcticError(f"the engine cannot generate: {self.refusal}")
        self.requests += 1
        await asyncio.sleep(0.002)
        await self.frozen.wait()
        tokens = expected_sample(prompt, params["seed"], self.version)
        return {"token_ids": tokens, "logprobs": None, "stop_reason": "stop", "weight_version": self.version}

    async def sync_weights(self, path, version, keep_cache=False):
        assert read_manifest(path).version == version
        self.version, self.refusal = version, None
        return version

    async def refuse(self, reason):
        self.refusal = reason

    async def check_tensors(self, tensors, dtype):
        return {}

    async def begin_update(self, version):
        assert self.update is None
        self.update, self.parts = version, []

    async def load_part(self, part):
        if self.update is None:
            raise ArcticError("a part of the weights came to an engine that no update was opened on")
        self.parts.append(part)

    async def end_update(self, keep_cache=False):
        assert len(set(self.parts)) == 1, "weights of one step of the policy"
        self.version, self.update, self.refusal = self.update, None, None
        return self.version

    async def abort_update(self):
        self.update = None

    async def weight_version(self):
        return self.version

    async def freeze(self):
        self.frozen.clear()

    async def thaw(self):
        self.frozen.set()

    async def sleep(self, level):
        self.asleep = self.asleep or {"weights", "kv_cache"}

    async def wake_up(self, tags):
        self.asleep -= {"weights", "kv_cache"} if tags is None else set(tags)

    async def reset_prefix_cache(self): ...

    async def random_state(self):
        return ["{}"]

    async def set_random_state(self, state): ...

    async def shutdown(self): ...


class FakeRank:
    """The calls that the backend makes on a training worker."""

    def __init__(self, rank, *, trained):
        self.rank, self.steps, self.awake = rank, 0, {"weights", *(["optimizer"] if trained else [])}

    async def sleep(self, parts):
        self.awake -= set(parts)

    async def wake(self, parts):
        self.awake |= set(parts)

    async def address(self):
        return "here", 1

    async def setup(self, address, port, steps): ...

    async def ping(self): ...

    async def process_ids(self):
        return [id(self)]

    async def sharing_cost(self):
        return CostModel(1.0, 0.0, 0.0), False

    async def run_rows(self, rows, meta, processing, **keywords):
        _, batch = decode(rows, max_cells=1 << 20)
        await asyncio.sleep(0.002)
        if keywords["backward"]:
            return {"avg_loss": 0.5, "metrics": {}, "micro_batches": 1}, None
        outputs = {"logprobs": torch.zeros(len(batch["input_ids"]), batch["input_ids"].shape[1])}
        return {"micro_batches": 1}, encode_answer({}, outputs, batch)

    async def learning_rate(self):
        return 1e-3

    async def step(self):
        await asyncio.sleep(0.002)
        self.steps += 1
        return {"lr": 1e-3, "grad_norm": 1.0, "skipped": False}

    async def export_weights(self, directory, version, dtype):
        assert "weights" in self.awake
        tensors = [("w", torch.full((2,), float(version)))]
        return None if self.rank else str(write_weights(declare(tensors, dtype), tensors, directory, version, dtype))

    async def declare_weights(self, dtype):
        return [TensorSpec(name, (2,), "float32") for name in ("v", "w")]

    async def export_bucket(self, names, directory, version, dtype):
        assert "weights" in self.awake
        await asyncio.sleep(0.002)
        return self.steps

    async def transfer_weights(self, backend, *arguments):
        await asyncio.Event().wait()

    async def save_checkpoint(self, directory):
        await asyncio.sleep(0.002)
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"rank-{self.rank}").write_text("whole")


class FakeActor:
    """A Ray actor's handle: ``actor.method.remote(...)`` is a future that fails when the actor dies."""

    def __init__(self, cluster, name, worker):
        self._cluster, self._name, self._worker = cluster, name, worker
        self.death = asyncio.get_running_loop().create_future()
        self.stopped = False

    def __getattr__(self, method):
        call = SimpleNamespace(remote=lambda *args, **keywords: self._start(method, *args, **keywords))
        call.options = lambda **options: call
        return call

    def die(self):
        if not self.death.done():
            self.death.set_exception(ActorDiedError(f"{self._name} was killed"))
            self.death.exception()

    def _start(self, method, *args, **keywords):
        self._cluster.called(self._name, method, keywords)
        return asyncio.ensure_future(self._call(method, *args, **keywords))

    async def _call(self, method, *args, **keywords):
        if method == "watch":
            return await asyncio.shield(self.death)
        work = asyncio.ensure_future(self._work(method, *args, **keywords))
        await asyncio.wait({work, self.death}, return_when=asyncio.FIRST_COMPLETED)
        if self.death.done():
            work.cancel()
        return await (asyncio.shield(self.death) if self.death.done() else work)

    async def _work(self, method, *args, **keywords):
        result = await getattr(self._worker, method)(*args, **keywords)
        while self.stopped:
            await asyncio.sleep(0.005)
        return result


class FakeCluster:
    """Every actor that was started; one of them can be hurt at the first call that begins a phase."""

    def __init__(self):
        self.actors = {}
        self.hurt_at = None

    def hurt(self, name, begins, how):
        """Kill, or stop, actor ``name`` right after the first call for which ``begins(method, keywords)``."""
        self.hurt_at = name, begins, how

    def called(self, name, method, keywords):
        if self.hurt_at is not None and self.hurt_at[1](method, keywords):
            victim, _, how = self.hurt_at
            self.hurt_at = None
            actor = self.actors[victim][-1]
            if how == "stopped":
                actor.stopped = True
            else:
                asyncio.get_running_loop().call_soon(actor.die)

    def start(self, worker, world_size):
        name, self.loop = f"{worker.job}-{worker.rank}", asyncio.get_running_loop()
        made = FakeEngine() if worker.job == "sampling" else FakeRank(worker.rank, trained=worker.job != "ref")
        actor = FakeActor(self, name, made)
        self.actors.setdefault(name, []).append(actor)
        return actor

    def alive(self):
        return [actor for actors in self.actors.values() for actor in actors if not actor.death.done()]

    def kill_processes(self, process_ids):
        for actor in self.alive():
            if id(actor._worker) in process_ids:
                actor._cluster.loop.call_soon_threadsafe(actor.die)


def fake_backend(monkeypatch, tmp_path, *, engines=2, most=8, timeout_s=30.0, startup_s=20.0, **settings):
    """A built-in backend with two policy ranks, a critic, a reference model and engines, and its cluster.

    ``settings`` are further fields of the server's config.
    """
    import ray

    cluster = FakeCluster()
    monkeypatch.setattr(workers.Workers, "start_actor", lambda _, *arguments: cluster.start(*arguments))
    monkeypatch.setattr(workers, "describe_cluster", lambda: ClusterDescription((Node("here", 8, 0),)))
    monkeypatch.setattr(workers, "kill_processes", cluster.kill_processes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    # A process that stands still does not read what Ray tells it.
    monkeypatch.setattr(ray, "kill", lambda actor: None if actor.stopped else actor.die())
    config = ServerConfig(
        policy=TRAINED,
        critic=dataclasses.replace(TRAINED, role="critic", value_head="value_head"),
        reference=dataclasses.replace(TRAINED, role="ref"),
        sampling=sampling_spec(),
        policy_ranks=2,
        critic_ranks=1,
        ref_ranks=1,
        engines=engines,
        max_cpu_workers=4 + engines,
        sync_dtype="float32",
        log_dir=str(tmp_path / "logs"),
        run_id="fake",
        startup_timeout_s=startup_s,
        shutdown_timeout_s=1.0,
        max_engine_restarts=most,
        worker_timeout_s=timeout_s,
        **settings,
    )
    return BuiltinBackend(config), cluster
