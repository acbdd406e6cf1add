"""Parameter counts against transformers' models and files, bytes against sums by hand."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from integrations.arctic_rl.doctor.memory import (
    activations,
    checkpoint_bytes,
    engine_memory,
    kv_bytes_per_token,
    loading_memory,
    training_memory,
)
from integrations.arctic_rl.doctor.model_size import ModelSize, model_size
from integrations.arctic_rl.server.critic import value_model_class
from integrations.arctic_rl.server.lora import add_adapters
from integrations.arctic_rl.server.specs import LoraSpec
from tests.arctic_rl.processors.helpers import tiny_model

LORA = LoraSpec(rank=3, alpha=6, dropout=0.0, target_modules="all-linear", exclude_modules=None, init_method="kaiming")


@pytest.fixture(params=["qwen3", "llama"])
def folder(request, tmp_path):
    tiny_model(request.param).save_pretrained(tmp_path)
    return tmp_path


def test_parameters_are_those_that_the_files_hold(folder):
    size = model_size(str(folder))
    assert (
        size.parameters
        == size.trained
        == sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    )
    assert (size.layers, size.hidden, size.query, size.key, size.mlp, size.positions) == (2, 32, 32, 16, 48, 512)


def test_a_value_model_and_adapters_are_counted_as_built(folder):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    value_model = value_model_class(type(config), "value_head")(config)
    assert model_size(str(folder), value_model=True).parameters == sum(p.numel() for p in value_model.parameters())
    model = tiny_model("qwen3" if config.model_type == "qwen3" else "llama")
    base = sum(value.numel() for value in model.parameters())
    add_adapters(model, LORA, seed=0)
    size = model_size(str(folder), lora=LORA)
    assert (size.parameters, size.trained) == (base, sum(p.numel() for p in model.parameters() if p.requires_grad))
    layer = 3 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 48) + (48 + 32))
    assert size.trained == 2 * layer


def test_values_in_place_of_the_configs_own_count(folder):
    plain, wider = model_size(str(folder)), model_size(str(folder), {"intermediate_size": 50})
    assert (wider.mlp, wider.parameters - plain.parameters) == (50, 2 * 3 * 2 * 32)


SIZE = ModelSize(1000, 1000, layers=3, hidden=10, query=8, key=4, mlp=20, positions=64)


def of(size=SIZE, **changes):
    settings = {"dtype": "bfloat16", "zero_stage": 2, "ranks": 4, "tokens": 7, "gradient_checkpointing": True}
    return training_memory(size, logits=5, **(settings | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2000, 1000, 2000, 1000, 2000)),
        ({"dtype": "float32"}, (4000, 1000, 2000, 1000, 4000)),
        ({"bucket": 100}, (2000, 1000, 2000, 1000, 200)),
        ({"bucket": 5000, "whole_bucket": True}, (2000, 1000, 2000, 1000, 10000)),
        ({"zero_stage": 3, "live": 300}, (500, 1000, 2000, 1000, 4000, 600)),
        ({"zero_stage": 3, "ranks": 1}, (2000, 4000, 8000, 4000, 4000)),
        ({"zero_stage": 1}, (2000, 1000, 2000, 4000, 2000)),
        ({"zero_stage": 1, "dtype": "float32"}, (4000, 1000, 2000, 4000, 1000, 4000)),
        ({"zero_stage": 0}, (2000, 4000, 8000, 4000, 2000)),
        ({"zero_stage": 0, "dtype": "float32"}, (4000, 0, 8000, 4000)),
    ],
)
def test_bytes_of_a_rank(changes, expected):
    *parts, kept, logits = of(**changes).values()
    assert tuple(parts) == expected and logits == 5
    assert kept == (4 if changes.get("dtype") == "float32" else 2) * 7 * (3 * 10 + 40 + 24 + 12 + 80)


def test_only_adapters_have_gradients_and_moments():
    parts = of(dataclasses.replace(SIZE, trained=40), ranks=1)
    assert list(parts.values())[:5] == [2 * 1040, 160, 320, 160, 80]


def test_activations_without_checkpointing_are_those_of_every_layer():
    assert activations(SIZE, width=4, tokens=2, gradient_checkpointing=False) == 4 * 2 * 3 * (40 + 24 + 12 + 80)


def test_bytes_of_engines_and_checkpoints():
    assert kv_bytes_per_token(SIZE, "bfloat16") == 2 * 3 * 4 * 2
    assert engine_memory(SIZE, dtype="float32", kv_cache=9, tensor_parallel_size=3) == {"weights": 1334, "KV cache": 9}
    assert (loading_memory(SIZE), checkpoint_bytes(SIZE)) == (4000, 12000)


def test_keys_and_values_are_as_large_as_transformers_own_cache(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    cache = model(input_ids=torch.ones(1, 6, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 6 * kv_bytes_per_token(model_size(str(folder)), "float32")
