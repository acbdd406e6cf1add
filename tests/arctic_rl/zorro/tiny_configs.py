"""A tiny random model of any causal language model family that transformers has."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 97
EVERY_FAMILY = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_NUMBERS = {
    4: "num_hidden_layers num_layers num_attention_heads n_head n_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_heads mamba_n_heads "
    "mamba_num_heads first_k_dense_replace rotary_dim laurel_rank attention_chunk_size",
    2: "num_key_value_heads num_experts_per_tok moe_k n_layer n_layers encoder_layers decoder_layers index_n_heads "
    "linear_num_key_heads linear_num_value_heads mamba_expand altup_num_inputs num_attention_groups eos_token_id "
    "max_window_layers",
    1: "n_group topk_group n_shared_experts bos_token_id mamba_n_groups n_groups",
    0: "num_kv_shared_layers pad_token_id",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state "
    "ssm_state_size chunk_size hidden_size_per_layer_input global_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank index_head_dim mamba_d_head "
    "mamba_head_dim",
    32: "hidden_size d_model n_embd word_embed_proj_dim",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim",
    256: "max_position_embeddings seq_length n_positions n_ctx max_seq_len",
    512: "index_topk",
    VOCAB: "vocab_size vocab_size_per_layer_input",
    6: "sliding_window",
}
_SETTINGS = {name: number for number, names in _NUMBERS.items() for name in names.split()}
_NONE_DROPPED = (
    "attention_dropout dropout attn_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob "
    "attention_probs_dropout_prob embedding_dropout residual_dropout embed_dropout activation_dropout "
    "router_jitter_noise"
)
_SETTINGS |= dict.fromkeys(_NONE_DROPPED.split(), 0.0)
_SETTINGS |= {"use_sliding_window": True, "is_decoder": True, "tie_word_embeddings": False, "initializer_range": 0.15}

_OWN = {
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "lfm2": {"layer_types": ["full_attention"] * 4},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4, "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "phi4_multimodal": {
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    },
    "zaya": {"num_experts_per_tok": 1},
}

_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": None},
    {"head_dim": None, "num_key_value_heads": None},
    {"sliding_window": None},
    {"q_lora_rank": None},
    {"head_dim": None, "q_lora_rank": None},
    {"num_hidden_layers": 8},
    {"num_key_value_heads": 4},
    {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16},
)
"""Tried in this order until a model can be built and run; None = the config's own default."""


def tiny_configs(family: str) -> Iterator[Any]:
    """Configs of a family whose models have at most 8 layers of width 32 or 64.

    Of a family for several kinds of input, the part that generates text. Some of them no model can be built from.
    """
    config_class = type(CONFIG_MAPPING[family]().get_text_config(decoder=True))
    known = {*config_class().to_dict(), *inspect.signature(config_class.__init__).parameters}
    for changes in _CHANGES:
        settings = {
            name if name in known else config_class.attribute_map.get(name, name): value
            for name, value in (_SETTINGS | changes).items()
            if value is not None and known & {name, config_class.attribute_map.get(name, name)}
        }
        try:
            yield config_class(**settings | _OWN.get(family, {}))
        except (ValueError, TypeError, AttributeError, LookupError):
            continue


def tiny_model(config: Any, attention: str) -> torch.nn.Module:
    """The model of a config in float32, with the same weights every time.

    Raises:
        ValueError: it would not be tiny.
    """
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > 2e7:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.2 * noise if weight.ndim > 1 else weight + 0.1 * noise)
    return model.eval()
