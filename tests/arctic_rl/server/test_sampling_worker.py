"""The worker's order of events against a fake engine, and numbers against transformers with a real one."""

import asyncio
import json
import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError, UnsupportedError, WorkerDiedError
from integrations.arctic_rl.sampling_params import expand_seed, to_vllm_kwargs
from integrations.arctic_rl.server import sampling_worker
from integrations.arctic_rl.server.sampling_spec import (
    end_token_ids,
    engine_arguments,
    engine_environment,
)
from integrations.arctic_rl.server.sampling_worker import SamplingWorker
from integrations.arctic_rl.server.weight_sync.buckets import plan_buckets
from integrations.arctic_rl.server.weight_sync.part import pack
from integrations.arctic_rl.server.weights import TensorSpec, declare, write_weights
from tests.arctic_rl.server import engine_rollouts
from tests.arctic_rl.server.engine_configs import built_configs
from tests.arctic_rl.server.engine_rollouts import RETOKENISED, TEMPLATE
from tests.arctic_rl.specs import sampling_spec

GREEDY = to_vllm_kwargs({"temperature": 0.0, "max_tokens": 4, "logprobs": 1})


def spec(**changes):
    fields = {"model_path": "none", "max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 96}
    fields |= {"cpu_kv_cache_gib": 0.0625, "gpu_memory_utilization": 0.9}
    return sampling_spec(**(fields | changes))


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
        if method == "arctic_tied_copies":
            return [{"head": "embedding"}]
        self.events.append(method)
        if method == "arctic_check_weights":
            assert args == ([("w", [2], "float32")], "float32")
            return [self.problems]
        if method in ("arctic_load_weights", "arctic_load_part"):
            if self.load_error is not None:
                raise self.load_error
            self.version = json.loads(Path(args[0]).read_text())["version"]
        return [self.version]

    async def start_weight_update(self):
        self.events.append("start")

    async def finish_weight_update(self):
        self.events.append("finish")

    async def init_weight_transfer_engine(self, request):
        self.events.append(("init", request.init_info))

    async def update_weights(self, request):
        self.events.append(("update", request.update_info))
        self.version += 1

    async def pause_generation(self, *, mode, clear_cache):
        self.events.append(f"pause {mode}{' and clear' if clear_cache else ''}")

    async def resume_generation(self):
        self.events.append("resume")

    async def reset_prefix_cache(self, reset_running_requests=False):
        self.events.append("preempt and reset_prefix_cache" if reset_running_requests else "reset_prefix_cache")
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
    tensors = [("w", torch.full((2,), float(version)))]
    return str(write_weights(declare(tensors, "float32"), tensors, tmp_path, version, "float32"))


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


@pytest.mark.parametrize("keep_cache", [True, False])
def test_a_sync_does_not_wait_for_frozen_requests(fake, tmp_path, keep_cache):
    async def check():
        worker, engine = fake()
        engine.hold.clear()
        running = asyncio.create_task(worker.generate([5], GREEDY, "running"))
        await asyncio.sleep(0)
        await worker.freeze()
        assert await worker.sync_weights(weights_at(tmp_path, 1), 1, keep_cache) == 1
        with pytest.raises(ArcticError, match="frozen requests cannot sleep"):
            await worker.sleep()
        await worker.thaw()
        engine.hold.set()
        result = await running
        assert result["token_ids"] == [0, 1]
        assert (result["weight_version"], result["last_weight_version"]) == (0, 1)
        reset = [] if keep_cache else ["preempt and reset_prefix_cache"]
        loaded = ["pause keep", "arctic_check_weights", "arctic_load_weights", *reset, "resume"]
        assert engine.events == ["generate running", *loaded, "done running"]
        await worker.sync_weights(weights_at(tmp_path, 2), 2)
        assert engine.events[-1] == "reset_prefix_cache", "nothing is frozen any more"

    run(check())


def test_frozen_requests_do_not_go_on_with_half_loaded_weights(fake, tmp_path):
    async def check():
        worker, engine = fake()
        engine.hold.clear()
        running = asyncio.create_task(worker.generate([5], GREEDY, "running"))
        await asyncio.sleep(0)
        await worker.freeze()
        engine.load_error = RuntimeError("half way")
        with pytest.raises(ArcticError, match="vLLM failed: half way"):
            await worker.sync_weights(weights_at(tmp_path, 1), 1)
        with pytest.raises(ArcticError, match="loading weights of version 1 did not end"):
            await worker.thaw()
        assert "resume" not in engine.events
        running.cancel()

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


W = [TensorSpec("w", (2,), "float32")]


def test_an_update_in_parts_empties_the_cache_before_anything_is_generated(fake, tmp_path):
    """Names first; then requests under way end, new ones wait until the last part is loaded and the cache is empty."""

    async def check():
        worker, engine = fake(scratch_directory=str(tmp_path))
        assert await worker.check_tensors(W, "float32") == {"head": "embedding"}
        engine.hold.clear()
        running = asyncio.create_task(worker.generate([5], GREEDY, "running"))
        await asyncio.sleep(0)
        begin = asyncio.create_task(worker.begin_update(2))
        await asyncio.sleep(0.01)
        engine.hold.set()
        await begin
        waiting = asyncio.create_task(worker.generate([5], GREEDY, "waiting"))
        await worker.load_part(weights_at(tmp_path, 2))
        await worker.load_part(pack(W, [("w", torch.ones(2))], 2, "float32"))
        assert not waiting.done()
        assert await worker.end_update() == 2
        assert (await running)["weight_version"] == 0
        assert (await waiting)["token_ids"] == [2, 2] and (await waiting)["weight_version"] == 2
        parts = ["arctic_begin_parts", "arctic_load_part", "arctic_load_part", "arctic_end_parts"]
        asked = ["arctic_check_weights", "generate running", "done running"]
        assert engine.events == [*asked, *parts, "reset_prefix_cache", "generate waiting", "done waiting"]

    run(check())


def test_an_update_that_is_given_up_leaves_an_engine_that_refuses(fake, tmp_path):
    async def check():
        worker, engine = fake(scratch_directory=str(tmp_path))
        await worker.begin_update(1)
        waiting = asyncio.create_task(worker.generate([5], GREEDY, "a"))
        engine.load_error = RuntimeError("half way")
        with pytest.raises(ArcticError, match="vLLM failed: half way"):
            await worker.load_part(weights_at(tmp_path, 1))
        await worker.abort_update()
        await worker.abort_update()
        for late in (worker.load_part("x"), worker.transfer_start(), worker.end_update()):
            with pytest.raises(ArcticError, match="no update was opened"):
                await late
        with pytest.raises(ArcticError, match="loading weights of version 1 did not end"):
            await waiting
        engine.load_error = None
        await worker.sync_weights(weights_at(tmp_path, 1), 1)
        assert (await worker.generate([5], GREEDY, "b"))["token_ids"] == [1, 1]

    run(check())


def test_vllms_transfer_runs_inside_an_update(fake):
    """The worker hands vLLM's four calls on, and no parts of its own."""

    async def check():
        worker, engine = fake(device="cuda", weight_transfer="nccl")
        await worker.transfer_init({"rank_offset": 1})
        assert (await worker.generate([5], GREEDY, "a"))["token_ids"] == [0, 0]
        await worker.begin_update(1)
        await worker.transfer_start()
        await worker.transfer_update({"names": ["w"]})
        await worker.transfer_finish()
        assert await worker.end_update() == 1
        assert (await worker.generate([5], GREEDY, "b"))["token_ids"] == [1, 1]
        assert engine.events == [
            ("init", {"rank_offset": 1}),
            "generate a",
            "done a",
            "start",
            ("update", {"names": ["w"]}),
            "finish",
            "reset_prefix_cache",
            "generate b",
            "done b",
        ]

    run(check())


def test_an_engine_without_its_weights_refuses_until_a_sync(fake, tmp_path):
    async def run():
        worker, _ = fake()
        await worker.refuse("it was restarted")
        await worker.reset_prefix_cache()
        with pytest.raises(ArcticError, match="cannot generate: it was restarted"):
            await worker.generate([5], GREEDY, "a")
        await worker.sync_weights(str(weights_at(tmp_path, 3)), 3)
        return await worker.generate([5], GREEDY, "b")

    assert asyncio.run(run())["weight_version"] == 3


def test_a_sleeping_engine_refuses_until_both_parts_are_awake(fake, tmp_path):
    """SkyRL's colocated order: sleep, wake the weights, sync, wake the cache, generate."""

    async def check():
        worker, engine = fake()
        await worker.sleep()
        await worker.sleep()
        assert await worker.is_sleeping()
        with pytest.raises(ArcticError, match="kv_cache and weights asleep"):
            await worker.generate([5], GREEDY, "a")
        for sync in (worker.sync_weights(weights_at(tmp_path, 1), 1), worker.begin_update(1)):
            with pytest.raises(ArcticError, match="sleeping engine"):
                await sync
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


def test_a_sign_of_life_comes_from_the_engines_processes(fake):
    async def check():
        worker, engine = fake()
        await worker.ping()
        assert engine.events == ["arctic_ping"]
        engine.collective_rpc = lambda method, args=(): asyncio.sleep(60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.ping(), 0.05)

        async def broken(method, args=()):
            engine.errored = True
            raise RuntimeError("engine dead")

        engine.collective_rpc = broken
        with pytest.raises(WorkerDiedError):
            await worker.ping()

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
    assert built["trust_remote_code"] is True, "models with code of their own load, as in SkyRL"
    trusting = spec(engine_kwargs={"trust_remote_code": False})
    assert engine_arguments(trusting, [*known, "trust_remote_code"])["trust_remote_code"] is False
    assert built["generation_config"] == "vllm" and built["kv_cache_memory_bytes"] == 2**26
    assert built["worker_extension_cls"] == "integrations.arctic_rl.server.weight_extension.WeightExtension"
    assert "weight_transfer_config" not in built
    by_nccl = engine_arguments(spec(device="cuda", weight_transfer="nccl"), known)
    assert by_nccl["weight_transfer_config"] == {"backend": "nccl"}
    with pytest.raises(UnsupportedError, match=r"hf_override: .*did you mean 'hf_overrides'"):
        engine_arguments(spec(engine_kwargs={"hf_override": {}}), known)


def test_the_environment_follows_the_spec(tmp_path):
    assert engine_environment(spec(threads=2, model_path=str(tmp_path), scratch_directory="/s")) == {
        "VLLM_RPC_BASE_PATH": "/s",
        "TMPDIR": "/s",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": None,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "TORCHDYNAMO_DISABLE": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
    assert engine_environment(spec(device="cuda")) == {"VLLM_NO_USAGE_STATS": "1"}
    ipc = engine_environment(spec(device="cuda", weight_transfer="ipc"))
    assert ipc == {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


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


END, PAD, SECOND_END = 256, 257, 258
VOCABULARY = 260


def save_model(folder, *, tied=True, seed=0):
    """A tiny Qwen3 with random weights, a byte-level tokenizer, and a generation config that must have no effect."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=["<|second_end|>"], pad_token="<|pad|>"
    )
    assert tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>", "<|second_end|>"]) == [END, PAD, SECOND_END]
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    generation = {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "max_new_tokens": 16}
    (Path(folder) / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [END, SECOND_END]}))
    return model


def random_prompts(count, seed, low=5, high=150):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_logprobs(model, prompt, response, temperature):
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def reference_greedy(model, prompt, length):
    """Greedy decoding by full forward passes: no cache, no generation config."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One engine as a Ray actor; tests must leave it with the weights of ``real.model``."""
    import ray

    folder = tmp_path_factory.mktemp("engine")
    scratch = tempfile.mkdtemp()
    model = save_model(folder / "model")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor = (
        ray.remote(SamplingWorker)
        .options(num_cpus=0, max_concurrency=1000)
        .remote(
            spec(
                model_path=str(folder / "model"),
                max_model_len=512,
                engine_kwargs={"block_size": 32},
                log_file=str(folder / "engine.log"),
                scratch_directory=scratch,
            )
        )
    )
    try:
        ray.get(actor.setup.remote(), timeout=500)
        yield SimpleNamespace(actor=actor, model=model, get=ray.get, counter=0, folder=folder, scratch=scratch)
        ray.get(actor.shutdown.remote(), timeout=30)
    except ray.exceptions.RayActorError:
        pass
    finally:
        ray.shutdown()
        shutil.rmtree(scratch)


def ask(real, prompts, params, salt=None):
    requests = []
    for prompt, one in zip(prompts, params if isinstance(params, list) else [params] * len(prompts), strict=True):
        real.counter += 1
        kwargs = to_vllm_kwargs({"logprobs": 1, **one})
        requests.append(
            {"prompt_token_ids": prompt, "params": kwargs, "request_id": str(real.counter), "cache_salt": salt}
        )
    return real.get(real.actor.generate_many.remote(requests), timeout=120)


def greedy(real, prompts, length, **params):
    return ask(real, prompts, {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, **params})


def sync(real, tensors, version, dtype="float32"):
    tensors = dict(tensors)
    path = write_weights(declare(tensors.items(), dtype), tensors.items(), real.folder, version, dtype)
    return real.get(real.actor.sync_weights.remote(str(path), version), timeout=60)


@pytest.mark.slow
def test_odd_values_are_those_of_the_config_that_vllm_builds(tmp_path):
    save_model(tmp_path)
    common = {"max_model_len": 300, "max_num_seqs": 7, "max_num_batched_tokens": 640}
    raw = {"block_size": 64, "hf_overrides": {"rms_norm_eps": 0.25}}
    for_gpus = {"tensor_parallel_size": 2, "enforce_eager": False, "gpu_memory_utilization": 0.37, "device": "cuda"}
    kwargs = {**raw, "enable_chunked_prefill": False}
    off = spec(model_path=str(tmp_path), **common, enable_prefix_caching=False, engine_kwargs=kwargs)
    drafts = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 6}
    gpus = spec(model_path=str(tmp_path), **common, **for_gpus, engine_kwargs=raw, speculative_config=drafts)
    on_cpus, on_gpus = built_configs([off, gpus])
    shared = {**common, "pipeline_parallel_size": 1, "block_size": 64, "rms_norm_eps": 0.25}
    told = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "enforce_eager": True, "drafts": None}
    assert (shared | told).items() <= on_cpus.items()
    told = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "enforce_eager": False}
    told |= {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.37}
    told["drafts"] = {**drafts, "rejection_sample_method": "standard"}
    assert (shared | told).items() <= on_gpus.items()


@pytest.mark.slow
def test_the_engine_is_built_as_told(real):
    config = real.get(real.actor.engine_config.remote())
    expected = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 96,
        "block_size": 32,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "logprobs_mode": "processed_logprobs",
        "default_sampling_params": {},
        "kv_cache_memory_bytes": 2**26,
        "end_token_ids": [END, SECOND_END],
    }
    assert expected.items() <= config.items()
    names = real.get(real.actor.weight_names.remote())
    assert names == [(name, tuple(p.shape), "float32") for name, p in real.model.named_parameters()]
    log = (real.folder / "engine.log").read_text()
    assert "Initializing a V1 LLM engine" in log and "Loading weights took" in log


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_samples_agree_with_transformers(real, temperature):
    """Prompts split over steps of 96 tokens, seeded; the checkpoint's penalty, top-k and length have no effect."""
    prompts = random_prompts(32, seed=1)
    params = [
        {"temperature": temperature, "max_tokens": 40, "ignore_eos": True, "seed": i} for i in range(len(prompts))
    ]
    results = ask(real, prompts, params)
    differences = []
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result["token_ids"]) == 40 and result["stop_reason"] == "length"
        expected = reference_logprobs(real.model, prompt, result["token_ids"], temperature)
        differences.append((torch.tensor(result["logprobs"]) - expected).abs())
    difference = torch.cat(differences)
    assert difference.mean() < 1e-5 and difference.max() < 1e-3


@pytest.mark.slow
def test_seeds_give_the_same_samples_in_any_batch(real):
    prompts = [random_prompts(1, seed=2, low=120, high=121)[0]] * 16
    params = [{"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 100 + i} for i in range(16)]
    first = [result["token_ids"] for result in ask(real, prompts, params)]
    other = random_prompts(4, seed=3)
    crowd = ask(real, other + prompts[::-1], [{"temperature": 1.0, "max_tokens": 30}] * 4 + params[::-1])
    assert [result["token_ids"] for result in crowd[4:]][::-1] == first
    assert len({tuple(tokens) for tokens in first}) == 16
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    best = [[result["token_ids"] for result in ask(real, other, greedy)] for _ in range(2)]
    assert best[0] == best[1]
    unseeded = ask(real, prompts[:2], {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True})
    assert unseeded[0]["token_ids"] != unseeded[1]["token_ids"]


@pytest.mark.slow
def test_requests_without_a_seed_are_sampled_again_from_the_same_random_state(real):
    """With the prompts as new to the engine as before: it draws for each part of a prompt too."""
    prompts, params = random_prompts(3, seed=5), {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}

    def sample():
        real.get(real.actor.reset_prefix_cache.remote())
        return [ask(real, [prompt], params)[0]["token_ids"] for prompt in prompts]

    states = real.get(real.actor.random_state.remote())
    first, second = sample(), sample()
    real.get(real.actor.set_random_state.remote(states))
    assert sample() == first != second


def assert_sampled_from(expected: torch.Tensor, counts: torch.Tensor) -> None:
    """Chi-square over tokens [V] expected at least 5 times, the others as one; 5 sigma above its mean is the bound."""
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    freedom = len(expected) - 1
    assert freedom > 20
    assert float(((counts - expected) ** 2 / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.slow
def test_expanded_seeds_sample_the_models_distribution(real):
    """The first tokens of 2048 responses."""
    prompt = random_prompts(1, seed=11, low=20, high=21)[0]
    params = [
        {"temperature": 1.0, "max_tokens": 1, "ignore_eos": True, "logprobs": None, "seed": seed}
        for seed in (expand_seed(seed=0, step=0, prompt_key="p", sample=i, turn=0) for i in range(2048))
    ]
    tokens = torch.tensor([result["token_ids"][0] for result in ask(real, [prompt] * 2048, params)])
    with torch.no_grad():
        expected = real.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1) * 2048
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    assert_sampled_from(expected, counts)


@pytest.mark.slow
def test_parameters_reach_the_engine(real):
    """Each of these leaves one token to choose from, so that sampling must equal greedy decoding."""
    prompts = random_prompts(4, seed=4)
    expected = [reference_greedy(real.model, prompt, 12) for prompt in prompts]
    assert [result["token_ids"] for result in greedy(real, prompts, 12)] == expected
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        results = ask(real, prompts, {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, **narrow})
        assert [result["token_ids"] for result in results] == expected, narrow
    allowed = ask(real, prompts, {"temperature": 1.0, "max_tokens": 12, "allowed_token_ids": [65, 66]})
    assert {token for result in allowed for token in result["token_ids"]} <= {65, 66}
    penalised = greedy(real, prompts, 12, repetition_penalty=1.9)
    assert [result["token_ids"] for result in penalised] != expected
    short = ask(real, prompts[:1], {"temperature": 0.0, "max_tokens": 3, "logprobs": None})[0]
    assert short["logprobs"] is None and short["text"] is None and short["stop_reason"] == "length"


@pytest.mark.slow
def test_stop_strings_and_stop_ids_end_a_response(real):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.folder / "model")
    letters = list(range(33, 90))
    prompt = letters * 2
    free = ask(real, [prompt], {"temperature": 1.0, "seed": 1, "max_tokens": 24, "allowed_token_ids": letters})[0]
    tokens = free["token_ids"]
    text = tokenizer.decode(tokens[6:9])
    end = next(i for i in range(1, 25) if text in tokenizer.decode(tokens[:i]))
    same = {"temperature": 1.0, "seed": 1, "max_tokens": 24, "allowed_token_ids": letters}
    stopped = ask(real, [prompt], {**same, "stop": [text]})[0]
    assert stopped["token_ids"] == tokens[:end] and stopped["stop_reason"] == "stop"
    assert stopped["text"] == tokenizer.decode(tokens[:end]) and stopped["text"].endswith(text)
    by_id = ask(real, [prompt], {**same, "stop_token_ids": [tokens[7]]})[0]
    assert by_id["token_ids"] == tokens[: tokens.index(tokens[7]) + 1] and by_id["stop_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("end", [END, SECOND_END])
def test_every_end_id_of_the_checkpoint_stops(real, end):
    forced = {"temperature": 1.0, "max_tokens": 5, "logit_bias": {end: 100.0}}
    prompt = random_prompts(1, seed=6)[0]
    result = ask(real, [prompt], forced)[0]
    assert result["token_ids"] == [end] and result["stop_reason"] == "stop" and len(result["logprobs"]) == 1
    ignored = ask(real, [prompt], {**forced, "ignore_eos": True})[0]
    assert ignored["token_ids"] == [end] * 5 and ignored["stop_reason"] == "length"


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_refused(real):
    with pytest.raises(UnsupportedError, match=r"vLLM refused a request: .*513.* 512"):
        ask(real, [[1] * 513], {"temperature": 0.0, "max_tokens": 4})
    with pytest.raises(UnsupportedError, match=r"vLLM refused a request: .*999999"):
        ask(real, [[1]], {"temperature": 0.0, "max_tokens": 4, "allowed_token_ids": [999999]})
    assert len(greedy(real, [[1, 2, 3]], 2)[0]["token_ids"]) == 2


GENERATOR = {
    "one batch": {"batched": True},
    "one batch, overlong": {"batched": True, "apply_overlong_filtering": True},
    "a conversation": {"max_turns": 3},
    "stop strings": {"max_turns": 3, "stop": ["?", "!!"]},
    "stop strings without end token": {
        "max_turns": 3,
        "stop": ["?", "!!"],
        "append_eos_token_after_stop_str_in_multi_turn": False,
    },
    "overlong": {"apply_overlong_filtering": True},
    "no reward": {"zero_reward_on_non_stop": True},
    "template arguments": {"chat_template_kwargs": {"mark": "#"}},
    "a template of the recipe's own": {"max_turns": 3, "chat_template": RETOKENISED, "logprobs": None},
    "a short conversation": {"max_turns": 3, "max_input_length": 60},
}


def rollouts(real, name, *, ours):
    """A generator's output with settings of ``GENERATOR``, on likely end tokens and question marks."""
    from skyrl.train.config import ChatTemplateConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.folder / "model")
    tokenizer.chat_template = TEMPLATE
    settings = {"max_turns": 1, "max_input_length": 400, **GENERATOR[name]}
    sampling = {key: settings.pop(key) for key in ("stop", "logprobs") if key in settings}
    sampling["additional_kwargs"] = {"logit_bias": {END: 5.0, ord("?") - 33: 5.0}}
    if "chat_template" in settings:
        file = real.folder / "own.jinja"
        file.write_text(settings["chat_template"])
        settings["chat_template"] = ChatTemplateConfig(source="file", name_or_path=str(file))
    return engine_rollouts.run(real.actor, tokenizer, 16, ours=ours, name=name, seed=3, sampling=sampling, **settings)


def without_times(output):
    metrics = {k: v for k, v in output["rollout_metrics"].items() if "time" not in k and "scoring_" not in k}
    return {k: v for k, v in output.items() if "time" not in k} | {"rollout_metrics": metrics}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GENERATOR if not GENERATOR[name].get("batched")])
def test_a_generators_settings_give_what_skyrls_own_generator_gives(real, name):
    """Not in one batch, whose requests have no session ids in SkyRL, and so other seeds."""
    (expected, _), (actual, _) = (rollouts(real, name, ours=ours) for ours in (False, True))
    assert without_times(actual) == without_times(expected)


@pytest.mark.slow
def test_a_generators_settings_take_effect_on_a_real_engine(real):
    outputs, sent = {}, {}
    for name in GENERATOR:
        outputs[name], sent[name] = rollouts(real, name, ours=True)

    def ends_with_added_token(name):
        """Places where an end token without loss follows a stop string."""
        question, output = ord("?") - 33, outputs[name]
        return sum(
            (one, other, kept) == (question, END, 0)
            for ids, mask in zip(output["response_ids"], output["loss_masks"], strict=True)
            for one, other, kept in zip(ids, ids[1:], mask[1:], strict=False)
        )

    for name in ("one batch, overlong", "overlong"):
        reasons, masks = outputs[name]["stop_reasons"], outputs[name]["loss_masks"]
        assert {"stop", "length"} <= set(reasons)
        assert [any(mask) for mask in masks] == [reason == "stop" for reason in reasons]
    assert all(all(mask) for mask in outputs["one batch"]["loss_masks"])
    assert outputs["one batch"]["response_ids"] == outputs["one batch, overlong"]["response_ids"]
    assert outputs["overlong"]["response_ids"] == outputs["no reward"]["response_ids"]

    plain, zeroed = ([sum(row) for row in outputs[name]["rewards"]] for name in ("overlong", "no reward"))
    reasons = outputs["no reward"]["stop_reasons"]
    assert zeroed == [own if reason == "stop" else 0.0 for own, reason in zip(plain, reasons, strict=True)] != plain

    assert ends_with_added_token("stop strings") > ends_with_added_token("stop strings without end token") + 3
    assert ends_with_added_token("a conversation") == 0
    marked = outputs["template arguments"]["prompt_token_ids"]
    assert all(ord("#") - 33 in prompt for prompt in marked)
    assert not any(ord("#") - 33 in prompt for prompt in outputs["overlong"]["prompt_token_ids"])
    own = outputs["a template of the recipe's own"]
    assert own["rollout_logprobs"] is None
    assert any(0 in mask and 1 in mask for mask in own["loss_masks"])
    assert all(ord(">") - 33 in prompt for prompt in sent["a template of the recipe's own"])
    assert max(map(len, sent["a conversation"])) > 60 >= max(map(len, sent["a short conversation"]))
    assert outputs["a short conversation"]["stop_reasons"].count("length") > outputs["a conversation"][
        "stop_reasons"
    ].count("length")


@pytest.mark.slow
def test_synced_weights_are_sampled_and_no_stale_prefix_is(real):
    """Prompts of eight cache blocks before and after; greedy output equals transformers token by token."""
    prompts = random_prompts(4, seed=7, low=260, high=300)
    before = [result["token_ids"] for result in greedy(real, prompts, 20)]
    assert before == [reference_greedy(real.model, prompt, 20) for prompt in prompts]
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in real.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    assert sync(real, real.model.named_parameters(), 1) == 1
    after = greedy(real, prompts, 20)
    expected = [reference_greedy(real.model, prompt, 20) for prompt in prompts]
    assert [result["token_ids"] for result in after] == expected and expected != before
    assert {result["weight_version"] for result in after} == {1}
    results = ask(real, prompts, {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "seed": 3})
    for prompt, result in zip(prompts, results, strict=True):
        expected = reference_logprobs(real.model, prompt, result["token_ids"], 1.0)
        assert (torch.tensor(result["logprobs"]) - expected).abs().mean() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("keep_cache", [False, True])
def test_frozen_requests_go_on_with_the_new_weights(real, keep_cache):
    """Log-probs of the old weights up to the sync and of the new ones behind it; exactly so with an empty cache."""
    from integrations.arctic_rl.server.weights import read_manifest

    version = real.get(real.actor.weight_version.remote()) + 1
    prompts = random_prompts(4, seed=12, low=40, high=60)
    params = to_vllm_kwargs({"logprobs": 1, "temperature": 1.0, "max_tokens": 400, "ignore_eos": True, "seed": 5})
    old = {name: parameter.detach().clone() for name, parameter in real.model.named_parameters()}
    running = [
        real.actor.generate.remote(prompt, params, f"frozen-{version}-{index}") for index, prompt in enumerate(prompts)
    ]
    # A short request that came last ends when the others have about as many tokens.
    real.get(real.actor.generate.remote(prompts[0], {**params, "max_tokens": 40}, f"short-{version}"), timeout=60)
    real.get(real.actor.freeze.remote())
    late = real.actor.generate.remote(prompts[0], {**params, "max_tokens": 4}, f"late-{version}")
    time.sleep(0.2)
    generator = torch.Generator().manual_seed(version)
    new = {name: value + torch.randn(value.shape, generator=generator) * 0.05 for name, value in old.items()}
    path = write_weights(declare(new.items(), "float32"), new.items(), real.folder, version, "float32")
    assert read_manifest(path).version == version
    assert real.get(real.actor.sync_weights.remote(str(path), version, keep_cache), timeout=60) == version
    real.get(real.actor.thaw.remote())
    results = real.get(running, timeout=120)
    assert real.get(late, timeout=60)["weight_version"] in (version - 1, version)

    before, after = [], []
    for weights, references in ((old, before), (new, after)):
        real.model.load_state_dict(weights, strict=False)
        for prompt, result in zip(prompts, results, strict=True):
            references.append(reference_logprobs(real.model, prompt, result["token_ids"], 1.0))
    for old_logprobs, new_logprobs, result in zip(before, after, results, strict=True):
        assert (result["weight_version"], result["last_weight_version"]) == (version - 1, version)
        sampled = torch.tensor(result["logprobs"])
        matches_old = (sampled - old_logprobs).abs() < 1e-3
        stopped = int(matches_old.long().cumprod(0).sum())
        assert 0 < stopped < len(sampled) == 400
        tail = (sampled - new_logprobs)[stopped:].abs()
        if keep_cache:
            assert tail.mean() > 1e-3, "keys and values of the old weights were computed anew"
        else:
            assert tail.max() < 1e-3


@pytest.mark.slow
def test_weights_in_buckets_are_sampled(real):
    """Fused layers lie in several buckets, each of which is overwritten by the next one; one comes as bytes."""
    version = real.get(real.actor.weight_version.remote()) + 1
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in real.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    tensors = dict(real.model.named_parameters())
    specs = declare(tensors.items(), "float32")
    assert real.get(real.actor.check_tensors.remote(specs, "float32")) == {}
    real.get(real.actor.begin_update.remote(version))
    buckets = plan_buckets(specs, 2**14)
    assert len(buckets) > 5
    for number, bucket in enumerate(buckets):
        values = [(spec.name, tensors[spec.name]) for spec in bucket]
        if number % 2:
            part = pack(bucket, values, version, "float32")
        else:
            part = str(write_weights(bucket, values, real.folder, version, "float32"))
        real.get(real.actor.load_part.remote(part), timeout=60)
    assert real.get(real.actor.end_update.remote(), timeout=60) == version
    prompts = random_prompts(4, seed=13, low=40, high=60)
    results = greedy(real, prompts, 20)
    assert [r["token_ids"] for r in results] == [reference_greedy(real.model, prompt, 20) for prompt in prompts]
    assert {result["weight_version"] for result in results} == {version}


@pytest.mark.slow
def test_wrong_weights_are_refused_before_anything_changes(real):
    prompts = random_prompts(2, seed=9)
    before = [result["token_ids"] for result in greedy(real, prompts, 12)]
    version = real.get(real.actor.weight_version.remote())
    other = {name: torch.zeros_like(p) for name, p in real.model.named_parameters()}
    wrong = {
        "unknown tensor 'lm_head.weight'": {**other, "lm_head.weight": torch.zeros(VOCABULARY, 64)},
        "missing tensor 'model.norm.weight'": {n: t for n, t in other.items() if n != "model.norm.weight"},
        "'model.norm.weight' has shape": {**other, "model.norm.weight": torch.zeros(65)},
    }
    for words, tensors in wrong.items():
        with pytest.raises(ArcticError, match=words):
            sync(real, tensors.items(), 99)
    with pytest.raises(ArcticError, match="cast to bfloat16"):
        sync(real, other.items(), 99, dtype="bfloat16")
    assert [result["token_ids"] for result in greedy(real, prompts, 12)] == before
    assert real.get(real.actor.weight_version.remote()) == version


@pytest.mark.slow
def test_no_process_outlives_a_killed_worker(real):
    import signal

    import psutil

    own, *children = real.get(real.actor.process_ids.remote())
    engine = [psutil.Process(pid) for pid in children]
    assert any(process.memory_info().rss > 2**28 for process in engine)
    assert os.listdir(real.scratch) != []
    os.kill(own, signal.SIGKILL)
    _, alive = psutil.wait_procs(engine, timeout=10)
    assert alive == []


class TestScratchFolder:
    """Sockets and files of an engine need a folder on its own node; a run's is on the node of the server's process."""

    def test_the_runs_own_where_this_node_has_it(self, tmp_path):
        worker = SamplingWorker(spec(scratch_directory=str(tmp_path)))
        assert worker._with_scratch().scratch_directory == worker._scratch == str(tmp_path)
        assert worker._own_directory is None

    @pytest.mark.parametrize("given", [None, "/dev/shm/arctic-rl-1-of-another-node/s"])
    def test_a_temporary_one_elsewhere(self, tmp_path, monkeypatch, given):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        worker = SamplingWorker(spec(scratch_directory=given))
        folder = worker._with_scratch().scratch_directory
        assert os.path.isdir(folder) and os.path.dirname(folder) == str(tmp_path)
        assert worker._scratch == worker._own_directory == folder
        asyncio.run(worker.shutdown())
        assert list(tmp_path.iterdir()) == []
