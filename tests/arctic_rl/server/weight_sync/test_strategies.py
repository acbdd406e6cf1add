"""Every strategy: the right values under the right names, refused before anything moves, and no stale prefix."""

import asyncio
import copy

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.sampling_params import to_vllm_kwargs
from integrations.arctic_rl.server.weight_sync import SENDERS, STRATEGIES
from integrations.arctic_rl.server.weight_sync.shared_memory import kept_version, send_again
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.server.weight_sync.workers import Cluster

GREEDY = to_vllm_kwargs({"temperature": 0.0, "max_tokens": 4, "logprobs": None})
WAYS = [*((name, True) for name in STRATEGIES), ("low_memory", False)]
"""(strategy, whether all workers are on one node)"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    def build(strategy, *, tied=True, engines=2, dtype="float32", sampler=None):
        policy = tiny_model(seed=0, tie_word_embeddings=tied)
        policy.save_pretrained(tmp_path / "model")
        samplers = [copy.deepcopy(sampler or policy).to(getattr(torch, dtype)) for _ in range(engines)]
        path, folder = tmp_path / "model", tmp_path / "weights"
        folder.mkdir()
        return Cluster(policy, samplers, path, folder, monkeypatch, dtype=dtype, strategy=strategy)

    return build


def step(model):
    """One training step, which moves the embedding and the head."""
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("strategy", "one_node"), WAYS)
def test_engines_follow_the_trainer_and_no_name_comes_twice(cluster, strategy, one_node, tied, dtype):
    made = cluster(strategy, tied=tied, dtype=dtype)
    policy = made.workers["policy-0"]._engine.module

    async def check():
        for version in (1, 2):
            step(policy)
            await SENDERS[strategy](made.run(version, one_node=one_node))
            for engine in made.engines:
                held = dict(engine.extension.model.named_parameters())
                applied = [event for event in engine.events if event.startswith("apply")]
                assert sorted(applied) == sorted(f"apply {name}" for name in held) and len(applied) == len(
                    set(applied)
                )
                for name, value in policy.named_parameters():
                    assert torch.equal(held[name], value.to(getattr(torch, dtype))), name
                head = engine.extension.model.lm_head.weight
                assert (head is engine.extension.model.model.embed_tokens.weight) == tied
                assert torch.equal(head, policy.lm_head.weight.to(head.dtype))
                engine.events.clear()
            versions = [await made.workers[name].weight_version() for name in made.run(0).receivers]
            assert versions == [version, version]

    run(check())


@pytest.mark.parametrize(("strategy", "one_node"), WAYS)
def test_an_engine_that_unties_its_head_gets_a_copy(cluster, strategy, one_node):
    """The config ties the head; the engine keeps a tensor of its own, as vLLM does for some checkpoints."""
    sampler = tiny_model(seed=0, tie_word_embeddings=False)
    made = cluster(strategy, tied=True, sampler=sampler)
    policy = made.workers["policy-0"]._engine.module

    async def check():
        step(policy)
        await SENDERS[strategy](made.run(1, one_node=one_node))
        for engine in made.engines:
            model = engine.extension.model
            assert model.lm_head.weight is not model.model.embed_tokens.weight
            assert torch.equal(model.lm_head.weight, policy.lm_head.weight)
            assert torch.equal(model.model.embed_tokens.weight, policy.lm_head.weight)

    run(check())


def unknown(tensors):
    tensors["model.extra.weight"] = torch.nn.Parameter(torch.ones(3))


def missing(tensors):
    del tensors["model.norm.weight"]


def other_shape(tensors):
    tensors["model.norm.weight"] = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unknown, "unknown tensor 'model.extra.weight'"),
        (missing, "missing tensor 'model.norm.weight'"),
        (other_shape, r"'model.norm.weight' has shape \(3,\)"),
    ],
)
@pytest.mark.parametrize(("strategy", "one_node"), WAYS)
def test_a_mismatch_stops_before_the_first_tensor_is_applied(cluster, strategy, one_node, change, words):
    made = cluster(strategy)
    model = made.workers["policy-0"]._engine.module
    tensors = dict(model.named_parameters())
    change(tensors)
    model.named_parameters = lambda: iter(tensors.items())

    async def check():
        before = await made.workers["sampling-0"].generate([5], GREEDY, "a")
        with pytest.raises(ArcticError, match=words):
            await SENDERS[strategy](made.run(1, one_node=one_node))
        for engine in made.engines:
            assert not {"begin", "part", "end", "reset_prefix_cache"} & set(engine.events)
            assert not any(event.startswith("apply") for event in engine.events)
        if strategy != "shared_memory":
            assert made.calls == ["declare_weights", "check_tensors"], "nothing was sent"
        assert (await made.workers["sampling-0"].generate([5], GREEDY, "b"))["token_ids"] == before["token_ids"]
        assert await made.workers["sampling-0"].weight_version() == 0

    run(check())


@pytest.mark.parametrize(("strategy", "one_node"), WAYS)
def test_no_prompt_is_continued_from_the_old_weights(cluster, strategy, one_node):
    """Sync, reset, generate, in that order; a reset that is refused at first is made again before anything is
    generated, and one that is refused for ever ends in an error."""
    made = cluster(strategy, engines=1)
    worker, engine = made.workers["sampling-0"], made.engines[0]
    policy = made.workers["policy-0"]._engine.module

    async def check():
        first = await worker.generate([5], GREEDY, "a")
        for version in (1, 2):
            engine.events.clear()
            engine.resets_refused = version
            step(policy)
            await SENDERS[strategy](made.run(version, one_node=one_node))
            result = await worker.generate([5], GREEDY, "b")
            cached, weights = result["token_ids"]
            assert cached == weights != first["token_ids"][0]
            assert result["weight_version"] == result["last_weight_version"] == version
            order = [event for event in engine.events if event in ("reset_prefix_cache", "generate")]
            assert order == ["reset_prefix_cache"] * (version + 1) + ["generate"]
            last_applied = max(i for i, event in enumerate(engine.events) if event.startswith("apply"))
            assert last_applied < engine.events.index("reset_prefix_cache")
        engine.resets_refused = 10**6
        with pytest.raises(ArcticError, match="refused 20 times"):
            await SENDERS[strategy](made.run(3, one_node=one_node))
        with pytest.raises(ArcticError, match="cannot generate"):
            await worker.generate([5], GREEDY, "c")

    run(check())


@pytest.mark.parametrize("one_node", [True, False])
def test_a_bucket_is_bounded_and_is_all_that_is_held(cluster, tmp_path, one_node):
    made = cluster("low_memory", engines=1)
    bound = 12_000
    policy = made.workers["policy-0"]._engine.module
    sizes = [value.numel() * 4 for value in policy.parameters()]
    largest = max(*sizes, bound)
    seen = []
    extension = made.engines[0].extension
    load = extension.arctic_load_part
    extension.arctic_load_part = lambda path: (load(path), seen.append(extension.part_bytes))

    async def check():
        await SENDERS["low_memory"](made.run(1, one_node=one_node, bucket_bytes=bound))

    run(check())
    assert len(seen) > 3 and max(seen) <= largest and sum(seen) >= sum(sizes)
    files = list(tmp_path.rglob("weights.bin"))
    assert [file.parent.name for file in files] == (["weights"] if one_node else ["scratch"])
    assert files[0].stat().st_size <= largest


def test_a_failure_on_the_way_leaves_engines_that_refuse(cluster):
    made = cluster("low_memory")

    async def check():
        engine = made.engines[1]
        engine.extension.arctic_load_part = None
        with pytest.raises(ArcticError, match="vLLM failed"):
            await SENDERS["low_memory"](made.run(1))
        for name in ("sampling-0", "sampling-1"):
            with pytest.raises(ArcticError, match="loading weights of version 1 did not end"):
                await made.workers[name].generate([5], GREEDY, "a")

    run(check())


def test_what_shared_memory_keeps_can_be_loaded_again(cluster):
    made = cluster("shared_memory", engines=1)
    policy, model = made.workers["policy-0"]._engine.module, made.engines[0].extension.model

    async def check():
        assert kept_version(str(made.folder)) == 0
        for version in (1, 2):
            step(policy)
            await SENDERS["shared_memory"](made.run(version))
        expected = [value.detach().clone() for value in policy.parameters()]
        step(policy)
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        assert kept_version(str(made.folder)) == 2
        await send_again(made.run(2))
        for held, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(held, value)

    run(check())


def test_nccl_ranks_are_counted_over_all_engines(cluster):
    """Two engines of two processes: the sender is rank 0, the engines begin at 1 and 3."""
    made = cluster("nccl", engines=2)

    async def check():
        for version in (1, 2):
            await SENDERS["nccl"](made.run(version, bucket_bytes=4096))

    made.workers["policy-0"]._weight_sender()._free_address = lambda: ("10.0.0.1", 29500)
    run(check())
    (trainer,) = made.made
    assert trainer.info == {
        "rank": 0,
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "world_size": 5,
        "packed": True,
        "packed_buffer_size_bytes": 4096,
    }
    assert [engine.init_info["rank_offset"] for engine in made.engines] == [1, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ipc_copies_nothing_where_the_parameters_are_what_is_sent(cluster, dtype):
    made = cluster("ipc", engines=1, dtype=dtype)
    policy = made.workers["policy-0"]._engine.module

    async def check():
        await SENDERS["ipc"](made.run(1, bucket_bytes=64))

    run(check())
    (trainer,) = made.made
    largest = max(value.numel() for value in policy.parameters()) * getattr(torch, dtype).itemsize
    same = dtype == "float32"
    assert trainer.info == {"rank": 0, "packed": not same, "packed_buffer_size_bytes": largest}
    assert made.engines[0].init_info == {"packed": not same}
    pairs = zip(policy.parameters(), trainer.source, strict=True)
    shared = [value.data_ptr() == sent.data_ptr() for value, (_, sent) in pairs]
    assert shared == [same] * len(shared)
