"""Sizes of a model from its ``config.json``; no weight is read or made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..server.model_config import load_model_config

if TYPE_CHECKING:
    from ..server.specs import LoraSpec


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on."""

    parameters: int
    """All of them, tied ones once."""
    trained: int
    """Those that are trained; with adapters, the adapters', which ``parameters`` leaves out."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    query: int
    """Width of all attention heads together."""
    key: int
    """Width of all key heads together, and of the value heads."""
    mlp: int
    """Width of the MLP's inner layer that one token sees."""
    positions: int
    """Longest sequence that the model is made for."""


def model_size(
    path: str, changes: Mapping[str, Any] | None = None, *, lora: LoraSpec | None = None, value_model: bool = False
) -> ModelSize:
    """Sizes of a Hugging Face model.

    Args:
        path: its folder or hub name.
        changes: values in place of those of its ``config.json``.
        lora: adapters that are trained in place of its weights.
        value_model: without the LM head, with a value head.

    Raises:
        OSError: there is no such model.
        ValueError: ``transformers`` has no such model, or adapters do not fit it.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from ..server.lora import add_adapters

    config = load_model_config(path, changes)
    text = config.get_text_config()
    kind = AutoModel if value_model else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=True)
        parameters = sum(value.numel() for value in model.parameters())
        if lora is not None:
            add_adapters(model, lora, seed=0)
    head = text.hidden_size if value_model else 0
    trained = parameters + head
    if lora is not None:
        trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    values = text.to_dict()
    heads = values["num_attention_heads"]
    width = values.get("head_dim") or text.hidden_size // heads
    mlp = values.get("intermediate_size", 4 * text.hidden_size)
    if "moe_intermediate_size" in values and "num_experts_per_tok" in values:
        mlp = values["moe_intermediate_size"] * values["num_experts_per_tok"]
    return ModelSize(
        parameters=parameters + head,
        trained=trained,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query=heads * width,
        key=values.get("num_key_value_heads", heads) * width,
        mlp=mlp,
        positions=values["max_position_embeddings"],
    )
