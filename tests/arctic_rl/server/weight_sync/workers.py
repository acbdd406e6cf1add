"""A policy's rank and sampling workers in this process, around a stand-in for vLLM that holds a transformers model."""

import asyncio
import inspect
import pickle
from types import SimpleNamespace

import ray
import torch

from integrations.arctic_rl.server import sampling_worker
from integrations.arctic_rl.server.allocator import Segments
from integrations.arctic_rl.server.sampling_worker import SamplingWorker
from integrations.arctic_rl.server.training_worker import TrainingWorker
from integrations.arctic_rl.server.weight_extension import WeightExtension
from integrations.arctic_rl.server.weight_sync import transfer
from integrations.arctic_rl.server.weight_sync.run import SyncRun
from integrations.arctic_rl.server.weights import read_manifest
from tests.arctic_rl.specs import sampling_spec


class Extension(WeightExtension):
    """What runs in the engine's process, with transformers' names in place of vLLM's loader."""

    def __init__(self, model, path, events):
        self.model, self.events = model, events
        self.model_config = SimpleNamespace(
            model=str(path), hf_overrides={}, trust_remote_code=False, dtype=next(model.parameters()).dtype
        )
        self.model_runner = SimpleNamespace(get_model=lambda: model, reload_weights=self.apply)

    def apply(self, weights_iterator):
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in weights_iterator:
                self.events.append(f"apply {name}")
                parameters[name].copy_(value)

    def arctic_begin_parts(self):
        self.events.append("begin")

    def arctic_load_part(self, path):
        self.events.append("part")
        self.part_bytes = read_manifest(path).nbytes
        self.apply(self._arctic_weights(path))

    def arctic_end_parts(self):
        self.events.append("end")


class StandInEngine:
    """vLLM's ``AsyncLLM``: a request is answered with the version under which its prompt was cached."""

    def __init__(self, model, path):
        self.events, self.cached, self.version, self.errored = [], {}, 0, False
        self.extension = Extension(model, path, self.events)
        self.resets_refused = 0
        self.init_info = None

    async def generate(self, prompt, params, request_id):
        self.events.append("generate")
        weights = float(next(self.extension.model.parameters()).detach().double().sum())
        cached = self.cached.setdefault(tuple(prompt), weights)
        completion = SimpleNamespace(token_ids=[cached, weights], logprobs=None, finish_reason="stop", text=None)
        yield SimpleNamespace(outputs=[completion])

    async def collective_rpc(self, method, args=()):
        return [getattr(self.extension, method)(*args)]

    async def reset_prefix_cache(self, reset_running_requests=False):
        self.events.append("reset_prefix_cache")
        if self.resets_refused:
            self.resets_refused -= 1
            return False
        self.cached.clear()
        return True

    async def init_weight_transfer_engine(self, request):
        self.init_info = request.init_info

    async def start_weight_update(self):
        self.events.append("begin")

    async def update_weights(self, request):
        self.events.append("part")
        self.extension.apply(request.update_info["weights"])

    async def finish_weight_update(self):
        self.events.append("end")


class StandInTrainerEngine:
    """vLLM's trainer engine: the same calls of the client, with tensors in the update itself."""

    def __init__(self, backend, info, client, source):
        self.backend, self.info, self.client, self.source = backend, info, client, source
        client.init_weight_transfer_engine({"rank_offset": 1} if backend == "nccl" else {"packed": info["packed"]})

    def send_weights(self):
        declared = [(meta.name, tuple(meta.shape), meta.dtype) for meta in self.source.metadata()]
        held = list(self.source)
        assert [(name, tuple(value.shape), value.dtype) for name, value in held] == declared
        self.client.start_weight_update()
        for start in range(0, len(held), 4):
            self.client.update_weights({"weights": held[start : start + 4]})
        self.client.finish_weight_update()


class Handle:
    """A Ray actor's handle."""

    def __init__(self, worker, loop):
        self._worker, self._loop = worker, loop

    def __getattr__(self, method):
        def remote(*arguments):
            return asyncio.run_coroutine_threadsafe(getattr(self._worker, method)(*arguments), self._loop)

        return SimpleNamespace(remote=remote)


def use_store(monkeypatch):
    """Put a dict in place of Ray's object store, and return it: what arrives is a copy, by reference."""
    stored = {}

    def put(value):
        stored[f"ref {len(stored)}"] = pickle.dumps(value)
        return f"ref {len(stored) - 1}"

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", lambda ref: pickle.loads(stored[ref]))
    return stored


class Cluster:
    """One policy rank and some engines; ``policy`` and ``samplers`` are their models."""

    def __init__(self, policy, samplers, path, folder, monkeypatch, *, dtype="float32", strategy="shared_memory"):
        monkeypatch.setattr(sampling_worker, "_prompt", lambda token_ids, salt: token_ids)
        monkeypatch.setattr(sampling_worker, "_sampling_params", lambda params, end: params)
        monkeypatch.setattr(sampling_worker, "_CACHE_RESET_PAUSE_SECONDS", 0.001)
        monkeypatch.setattr(transfer, "_wait", lambda calls: [call.result(20) for call in list(calls)])
        monkeypatch.setattr(transfer, "trainer_engine", self.trainer_engine)
        use_store(monkeypatch)
        self.made = []
        self.calls = []
        self.folder, self.dtype = folder, dtype
        trainer = object.__new__(TrainingWorker)
        trainer._rank, trainer._asleep, trainer._sender, trainer._receiver = 0, set(), None, None
        trainer._segments = Segments(asked_for=False)
        trainer._spec = SimpleNamespace(role="policy", dtype="float32", zero_stage=0)
        trainer._engine = SimpleNamespace(module=policy)
        self.workers = {"policy-0": trainer}
        self.engines = []
        for number, model in enumerate(samplers):
            worker = SamplingWorker(_spec(path, dtype, strategy, folder))
            worker._engine = StandInEngine(model, path)
            self.engines.append(worker._engine)
            self.workers[f"sampling-{number}"] = worker

    def trainer_engine(self, *arguments):
        self.made.append(StandInTrainerEngine(*arguments))
        return self.made[-1]

    async def call(self, names, method, *arguments):
        self.calls.append(method)
        answers = []
        for name in names:
            function = getattr(self.workers[name], method)
            answer = await asyncio.to_thread(function, *arguments) if name == "policy-0" else function(*arguments)
            answers.append(await answer if inspect.isawaitable(answer) else answer)
        return answers

    def run(self, version, *, one_node=True, bucket_bytes=20_000, keep_cache=False):
        names = tuple(name for name in self.workers if name.startswith("sampling"))
        loop = asyncio.get_running_loop()
        self.handles = self.__dict__.get("handles") or tuple(Handle(self.workers[name], loop) for name in names)
        return SyncRun(
            call=self.call,
            senders=("policy-0",),
            receivers=names,
            handles=self.handles,
            processes=2,
            folder=str(self.folder),
            version=version,
            dtype=self.dtype,
            bucket_bytes=bucket_bytes,
            one_node=one_node,
            keep_cache=keep_cache,
        )


def _spec(path, dtype, strategy, folder):
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    on_gpu = strategy in ("nccl", "ipc")
    return sampling_spec(
        path,
        dtype=dtype,
        max_model_len=64,
        max_num_seqs=4,
        device="cuda" if on_gpu else "cpu",
        gpu_memory_utilization=0.5,
        scratch_directory=str(scratch),
        weight_transfer=strategy if on_gpu else None,
    )
