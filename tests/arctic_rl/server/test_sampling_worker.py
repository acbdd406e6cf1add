"""The worker's order of events against a fake engine, and numbers against transformers with a real one."""

import asyncio
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError, UnsupportedError, WorkerDiedError
from integrations.arctic_rl.sampling_params import to_vllm_kwargs
from integrations.arctic_rl.server import sampling_worker
from integrations.arctic_rl.server.sampling_spec import (
    SamplingSpec,
    end_token_ids,
    engine_arguments,
    engine_environment,
)
from integrations.arctic_rl.server.sampling_worker import SamplingWorker
from integrations.arctic_rl.server.weights import write_weights

GREEDY = to_vllm_kwargs({"temperature": 0.0, "max_tokens": 4, "logprobs": 1})


def spec(**changes):
    fields = {
        "model_path": "none",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 96,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "device": "cpu",
        "cpu_kv_cache_gib": 0.0625,
        "gpu_memory_utilization": 0.9,
        "seed": 0,
    }
    return SamplingSpec(**(fields | changes))


class FakeEngine:
    """Answers with the weight version under which the prompt was cached; records what happens in order."""

    def __init__(self):
        self.events = []
        self.cached = {}
        self.version = 0
        self.errored = False
        self.resets_refused = 0
        self.problems = []
        self.load_error = None
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, prompt, params, request_id):
        self.events.append(f"generate {request_id}")
        cached = self.cached.setdefault(tuple(prompt), self.version)
        await self.hold.wait()
        if self.errored:
            raise RuntimeError("engine dead")
        completion = SimpleNamespace(
            token_ids=[cached, self.version],
            logprobs=[{cached: SimpleNamespace(logprob=-1.0)}, {self.version: SimpleNamespace(logprob=-2.0)}],
            finish_reason="stop",
            text="text",
        )
        self.events.append(f"done {request_id}")
        yield SimpleNamespace(outputs=[completion])

    async def collective_rpc(self, method, args=()):
        self.events.append(method)
        if method == "arctic_check_weights":
            return [self.problems]
        if self.load_error is not None:
            raise self.load_error
        self.version = json.loads(Path(args[0]).read_text())["version"]
        return [self.version]

    async def reset_prefix_cache(self):
        self.events.append("reset_prefix_cache")
        if self.resets_refused > 0:
            self.resets_refused -= 1
            return False
        self.cached.clear()
        return True

    async def sleep(self, level):
        self.events.append(f"sleep {level}")

    async def wake_up(self, tags):
        self.events.append(f"wake {tags}")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(sampling_worker, "_prompt", lambda token_ids, salt: token_ids)
    monkeypatch.setattr(sampling_worker, "_sampling_params", lambda params, end: params)
    monkeypatch.setattr(sampling_worker, "_CACHE_RESET_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(sampling_worker, "_WATCH_SECONDS", 0.001)

    def build(**changes):
        worker = SamplingWorker(spec(**changes))
        worker._engine = FakeEngine()
        return worker, worker._engine

    return build


def weights_at(tmp_path, version):
    return str(write_weights([("w", torch.full((2,), float(version)))], tmp_path, version, "float32"))


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_a_sync_empties_the_cache_before_anything_is_generated(fake, tmp_path):
    async def check():
        worker, engine = fake()
        assert (await worker.generate([5], GREEDY, "a"))["token_ids"] == [0, 0]
        assert await worker.sync_weights(weights_at(tmp_path, 2), 2) == 2
        result = await worker.generate([5], GREEDY, "b")
        assert result["token_ids"] == [2, 2] and result["weight_version"] == 2
        assert engine.events == [
            "generate a",
            "done a",
            "arctic_check_weights",
            "arctic_load_weights",
            "reset_prefix_cache",
            "generate b",
            "done b",
        ]

    run(check())


def test_a_refused_cache_reset_is_tried_again(fake, tmp_path):
    async def check():
        worker, engine = fake()
        await worker.generate([5], GREEDY, "a")
        engine.resets_refused = 3
        await worker.sync_weights(weights_at(tmp_path, 1), 1)
        assert engine.events.count("reset_prefix_cache") == 4
        assert (await worker.generate([5], GREEDY, "b"))["token_ids"] == [1, 1]

    run(check())


def test_no_generation_after_a_cache_that_stays(fake, tmp_path):
    async def check():
        worker, engine = fake()
        await worker.generate([5], GREEDY, "a")
        engine.resets_refused = 10**6
        with pytest.raises(ArcticError, match="refused 20 times to empty its prefix cache"):
            await worker.sync_weights(weights_at(tmp_path, 1), 1)
        with pytest.raises(ArcticError, match="cannot generate: its prefix cache could not be emptied"):
            await worker.generate([5], GREEDY, "b")
        engine.resets_refused = 0
        await worker.sync_weights(weights_at(tmp_path, 1), 1)
        assert (await worker.generate([5], GREEDY, "c"))["token_ids"] == [1, 1]

    run(check())


def test_a_reset_alone_does_not_hide_a_failed_load(fake, tmp_path):
    async def check():
        worker, engine = fake()
        engine.load_error = RuntimeError("half way")
        with pytest.raises(ArcticError, match="vLLM failed: half way"):
            await worker.sync_weights(weights_at(tmp_path, 1), 1)
        await worker.reset_prefix_cache()
        with pytest.raises(ArcticError, match="loading weights of version 1 did not end"):
            await worker.generate([5], GREEDY, "a")
        assert await worker.weight_version() == 0

    run(check())


def test_a_sync_waits_for_running_requests_and_holds_new_ones(fake, tmp_path):
    async def check():
        worker, engine = fake()
        engine.hold.clear()
        running = asyncio.create_task(worker.generate([5], GREEDY, "running"))
        await asyncio.sleep(0)
        sync = asyncio.create_task(worker.sync_weights(weights_at(tmp_path, 1), 1))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(worker.generate([5], GREEDY, "waiting"))
        await asyncio.sleep(0.01)
        assert engine.events == ["generate running"]
        engine.hold.set()
        results = await asyncio.gather(running, sync, waiting)
        assert results[0]["token_ids"] == [0, 0] and results[0]["weight_version"] == 0
        assert results[2]["token_ids"] == [1, 1] and results[2]["weight_version"] == 1
        order = ["done running", "arctic_check_weights", "arctic_load_weights", "reset_prefix_cache"]
        assert engine.events == ["generate running", *order, "generate waiting", "done waiting"]

    run(check())


def test_a_cancelled_request_does_not_block_a_sync(fake, tmp_path):
    async def check():
        worker, engine = fake()
        engine.hold.clear()
        request = asyncio.create_task(worker.generate([5], GREEDY, "a"))
        await asyncio.sleep(0.01)
        request.cancel()
        assert await worker.sync_weights(weights_at(tmp_path, 1), 1) == 1

    run(check())


def test_weights_that_do_not_fit_change_nothing(fake, tmp_path):
    async def check():
        worker, engine = fake()
        engine.problems = [f"missing tensor {i}" for i in range(7)]
        with pytest.raises(ArcticError, match=r"missing tensor 0; .*missing tensor 4; and 2 more"):
            await worker.sync_weights(weights_at(tmp_path, 1), 1)
        with pytest.raises(ArcticError, match="have version 1, expected 2"):
            await worker.sync_weights(weights_at(tmp_path, 1), 2)
        assert "arctic_load_weights" not in engine.events
        assert (await worker.generate([5], GREEDY, "a"))["weight_version"] == 0

    run(check())


def test_a_sleeping_engine_refuses_until_both_parts_are_awake(fake, tmp_path):
    """SkyRL's colocated order: sleep, wake the weights, sync, wake the cache, generate."""

    async def check():
        worker, engine = fake()
        await worker.sleep()
        await worker.sleep()
        assert await worker.is_sleeping()
        with pytest.raises(ArcticError, match="kv_cache and weights asleep"):
            await worker.generate([5], GREEDY, "a")
        with pytest.raises(ArcticError, match="sleeping engine"):
            await worker.sync_weights(weights_at(tmp_path, 1), 1)
        await worker.wake_up(["weights"])
        await worker.sync_weights(weights_at(tmp_path, 1), 1)
        with pytest.raises(ArcticError, match=r"\(kv_cache asleep\)"):
            await worker.generate([5], GREEDY, "b")
        await worker.wake_up(["kv_cache"])
        assert (await worker.generate([5], GREEDY, "c"))["token_ids"] == [1, 1]
        assert not any(event.startswith(("sleep", "wake")) for event in engine.events)
        with pytest.raises(UnsupportedError, match="tags"):
            await worker.wake_up(["everything"])

    run(check())


def test_weights_dropped_on_a_gpu_must_be_synced(fake, tmp_path):
    async def check():
        worker, engine = fake(device="cuda", enable_sleep_mode=True)
        await worker.sleep(level=2)
        await worker.wake_up()
        with pytest.raises(ArcticError, match="dropped by sleep level 2"):
            await worker.generate([5], GREEDY, "a")
        await worker.sync_weights(weights_at(tmp_path, 1), 1)
        await worker.generate([5], GREEDY, "b")
        assert engine.events[:2] == ["sleep 2", "wake ['kv_cache', 'weights']"]
        with pytest.raises(UnsupportedError, match="enable_sleep_mode=False"):
            await fake(device="cuda")[0].sleep()

    run(check())


def test_a_dead_engine_is_named(fake):
    async def check():
        worker, engine = fake()
        watch = asyncio.create_task(worker.watch())
        await asyncio.sleep(0.01)
        assert not watch.done()
        engine.errored = True
        with pytest.raises(WorkerDiedError, match=f"sampling worker {os.getpid()} died"):
            await worker.generate([5], GREEDY, "a")
        with pytest.raises(WorkerDiedError) as error:
            await watch
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)

    run(check())


def test_many_requests_in_one_call_keep_their_order(fake):
    async def check():
        worker, _ = fake()
        requests = [{"prompt_token_ids": [i], "params": GREEDY, "request_id": str(i)} for i in range(5)]
        results = await worker.generate_many(requests)
        assert [result["logprobs"] for result in results] == [[-1.0, -2.0]] * 5 and len(results) == 5
        assert results[0]["text"] is None

    run(check())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 2}, "num_engines"),
        ({"threads": 0}, "threads=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"cpu_kv_cache_gib": 0.0}, "cpu_kv_cache_gib"),
        ({"engine_kwargs": {"logprobs_mode": "raw_logprobs"}}, "engine_init_kwargs.logprobs_mode"),
        ({"engine_kwargs": {"generation_config": "auto"}}, "engine_init_kwargs.generation_config"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        spec(**changes)


def test_engine_arguments_and_the_nearest_known_name():
    known = ["model", "hf_overrides", "block_size"]
    built = engine_arguments(spec(engine_kwargs={"block_size": 32}), known)
    assert built["block_size"] == 32 and built["logprobs_mode"] == "processed_logprobs"
    assert built["generation_config"] == "vllm" and built["kv_cache_memory_bytes"] == 2**26
    assert built["worker_extension_cls"] == "integrations.arctic_rl.server.weight_extension.WeightExtension"
    with pytest.raises(UnsupportedError, match=r"hf_override: .*did you mean 'hf_overrides'"):
        engine_arguments(spec(engine_kwargs={"hf_override": {}}), known)


def test_the_environment_follows_the_spec(tmp_path):
    assert engine_environment(spec(threads=2, model_path=str(tmp_path))) == {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": None,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert engine_environment(spec(device="cuda")) == {"VLLM_NO_USAGE_STATS": "1"}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 7}, [7, 8]),
        ({}, {"eos_token_id": 9}, [9]),
        (None, {"text_config": {"eos_token_id": [1, 106]}}, [1, 106]),
        (None, {"eos_token_id": None}, []),
    ],
)
def test_every_declared_end_id_is_read(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(str(tmp_path)) == expected
