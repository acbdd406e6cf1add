"""A reference model becomes a copy of the policy, through the weights that its workers hand over."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.server.engine import InferenceEngine
from integrations.arctic_rl.server.training_worker import TrainingWorker
from integrations.arctic_rl.server.weight_sync import low_memory
from integrations.arctic_rl.server.weight_sync.run import SyncRun
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.server.weight_sync.workers import use_store


def worker(role, model, dtype):
    result = object.__new__(TrainingWorker)
    result._rank, result._asleep, result._sender, result._receiver = 0, set(), None, None
    result._spec = SimpleNamespace(role=role, dtype=dtype, zero_stage=2)
    result._engine = InferenceEngine(model, dtype) if role == "ref" else SimpleNamespace(module=model)
    return result


def update(policy, reference, folder, dtype, *, one_node=True, bucket_bytes=20_000):
    """What the backend does, with workers in this process."""
    workers = {"policy-0": policy, "ref-0": reference}

    async def call(names, method, *arguments):
        return [getattr(workers[name], method)(*arguments) for name in names]

    run = SyncRun(
        call=call,
        senders=("policy-0",),
        receivers=("ref-0",),
        handles=(None,),
        processes=1,
        folder=str(folder),
        version=0,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        one_node=one_node,
    )
    asyncio.run(low_memory.send(run))


@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_are_the_policys_in_the_references_dtype(tmp_path, monkeypatch, dtype, tied, one_node):
    stored = use_store(monkeypatch)
    policy, other = (tiny_model(seed=seed, tie_word_embeddings=tied) for seed in (0, 3))
    reference = worker("ref", other, dtype)
    update(worker("policy", policy, dtype), reference, tmp_path, dtype, one_node=one_node)
    assert any(tmp_path.iterdir()) == one_node, "nothing is written for a reference model on another node"
    assert (len(stored) > 1) == (not one_node)
    held = reference._engine.module
    for name, value in policy.named_parameters():
        assert torch.equal(dict(held.named_parameters())[name], value.to(getattr(torch, dtype))), name
    assert (held.lm_head.weight is held.model.embed_tokens.weight) == tied
    assert not any(parameter.requires_grad for parameter in held.parameters())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert any(parameter.any() for parameter in held.parameters()), "a copy, not a view"


def test_weights_of_another_model_are_refused_before_anything_is_replaced(tmp_path):
    policy = tiny_model(vocab_size=64, tie_word_embeddings=False)
    reference = worker("ref", tiny_model(seed=3), "float32")
    before = {name: value.clone() for name, value in reference._engine.module.named_parameters()}
    with pytest.raises(ArcticError, match="do not fit the reference model") as caught:
        update(worker("policy", policy, "float32"), reference, tmp_path, "float32")
    assert "unknown tensor 'lm_head.weight'" in str(caught.value)
    for name, value in reference._engine.module.named_parameters():
        assert torch.equal(value, before[name])


def test_a_reference_model_without_all_its_weights_is_refused():
    reference = worker("ref", tiny_model(seed=3), "float32")
    specs = worker("policy", tiny_model(seed=0), "float32").declare_weights("float32")
    reference.check_tensors(specs, "float32")
    reference.begin_update(0)
    with pytest.raises(ArcticError, match=r"got no 'lm_head.weight'|got no 'model\.embed_tokens\.weight'"):
        reference.end_update(False)
