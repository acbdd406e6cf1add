"""A reference model becomes a copy of the policy, through the weights that its workers hand over."""

from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.server.engine import InferenceEngine
from integrations.arctic_rl.server.training_worker import TrainingWorker
from tests.arctic_rl.processors.helpers import tiny_model


def worker(role, model, dtype):
    result = object.__new__(TrainingWorker)
    result._rank = 0
    result._spec = SimpleNamespace(role=role, dtype=dtype, zero_stage=2)
    result._engine = InferenceEngine(model, dtype) if role == "ref" else SimpleNamespace(module=model)
    return result


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_are_the_policys_in_the_references_dtype(tmp_path, dtype, tied):
    policy, other = (tiny_model(seed=seed, tie_word_embeddings=tied) for seed in (0, 3))
    reference = worker("ref", other, dtype)
    manifest = worker("policy", policy, dtype).export_weights(str(tmp_path), 0, dtype)
    reference.load_weights(manifest)
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
    manifest = worker("policy", policy, "float32").export_weights(str(tmp_path), 0, "float32")
    with pytest.raises(ArcticError, match="do not fit the reference model") as caught:
        reference.load_weights(manifest)
    assert "unknown tensor 'lm_head.weight'" in str(caught.value)
    for name, value in reference._engine.module.named_parameters():
        assert torch.equal(value, before[name])
