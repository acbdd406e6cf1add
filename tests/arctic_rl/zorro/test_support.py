"""Models that cannot share prompts are refused by name, with the setting that turns sharing off."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.zorro.attention import register_shared_attention
from integrations.arctic_rl.zorro.support import check_can_share, longest_exact_row, reasons_against
from tests.arctic_rl.zorro.families import FAMILIES, family_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
NEXT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
OPT = {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}

REFUSED = {
    "linear attention": ("Qwen3NextConfig", SMALL | NEXT, "layers of type linear_attention"),
    "convolutions": (
        "Lfm2Config",
        SMALL | {"layer_types": ["conv", "full_attention"] * 2},
        "layers of type conv",
    ),
    "state space": ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "MambaMixer"),
    "chunked attention": ("Llama4TextConfig", SMALL | {"num_local_experts": 2}, "layers of type chunked_attention"),
    "sinks": ("GptOssConfig", SMALL | {"num_local_experts": 2}, "attention sinks"),
    "learned positions": ("GPT2Config", GPT | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "wpe"),
    "learned positions of OPT": ("OPTConfig", SMALL | OPT, "learned absolute positions"),
    "position biases": ("BloomConfig", GPT | {"hidden_size": 32}, "do not come from a rotary embedding"),
    "mrope": ("Qwen3Config", SMALL | {"rope_parameters": MROPE}, "mrope"),
    "dropout": ("LlamaConfig", SMALL | {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "residual dropout": ("Phi3Config", SMALL | {"resid_pdrop": 0.2}, "resid_attn_dropout, p=0.2"),
    "dropout that is no module": (
        "SeedOssConfig",
        SMALL | {"attention_dropout": 0.0, "residual_dropout": 0.1},
        "residual_dropout=0.1",
    ),
    "dropout of embeddings": ("Starcoder2Config", SMALL | {"embedding_dropout": 0.2}, "embedding_dropout=0.2"),
    "noise on what experts get": (
        "PhimoeConfig",
        SMALL | {"num_local_experts": 2, "router_jitter_noise": 0.0, "input_jitter_noise": 0.3},
        "input_jitter_noise=0.3",
    ),
    "attention of its own": ("GPTNeoXJapaneseConfig", SMALL, "attention of its own"),
    "router noise": (
        "MixtralConfig",
        SMALL | {"num_local_experts": 2, "router_jitter_noise": 0.1},
        "router_jitter_noise",
    ),
}


def build(config_name: str, settings: dict, attention: str | None = None) -> torch.nn.Module:
    import transformers

    config = getattr(transformers, config_name)(**settings)
    implementation = register_shared_attention() if attention is None else attention
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str):
    config_name, settings, phrase = REFUSED[name]
    model = build(config_name, settings)
    with pytest.raises(UnsupportedError, match=r"use_zorro=false") as refusal:
        check_can_share(model, training=True)
    assert phrase in str(refusal.value)
    assert type(model).__name__ in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_tested_families_can(family: str):
    check_can_share(family_model(family), training=True)
    assert longest_exact_row(family_model(family)) is None


@pytest.mark.parametrize(
    "name",
    ["dropout", "residual dropout", "dropout that is no module", "noise on what experts get", "router noise"],
)
def test_what_is_drawn_in_training_does_not_matter_otherwise(name: str):
    config_name, settings, _ = REFUSED[name]
    assert list(reasons_against(build(config_name, settings), training=False)) == []


def test_another_attention_and_other_modules():
    with pytest.raises(UnsupportedError, match=r"attn_implementation='sdpa' instead of 'arctic_zorro'"):
        check_can_share(family_model("llama", "sdpa"), training=False)
    with pytest.raises(UnsupportedError, match=r"Linear cannot share prompts.*not a transformers model"):
        check_can_share(torch.nn.Linear(2, 2), training=False)
    assert list(reasons_against(family_model("llama", "sdpa"), training=False)) != []


def test_dropout_of_heads_that_a_language_model_does_not_have():
    for name in ("classifier_dropout", "summary_first_dropout"):
        assert list(reasons_against(build("LlamaConfig", SMALL | {name: 0.1}), training=True)) == []


def test_attention_that_is_not_causal():
    assert "not causal" in " ".join(reasons_against(family_model("llama", is_causal=False), training=False))
    model = family_model("gemma3", use_bidirectional_attention=True)
    assert "attention that is not causal" in " ".join(reasons_against(model, training=False))


def test_frequencies_that_depend_on_the_longest_row():
    longrope = SMALL | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    assert longest_exact_row(build("Phi3Config", longrope | {"max_position_embeddings": 64})) == 32
    dynamic = SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    assert longest_exact_row(build("LlamaConfig", dynamic | {"max_position_embeddings": 48})) == 48
