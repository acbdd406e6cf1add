"""The built-in post-processors. What they return is aligned to tokens: [rows, S], entry i belongs to token i."""

from collections.abc import Mapping
from typing import Any

import torch

from .registry import register_post_processor

__all__ = ["ENTROPY_POST_PROCESSORS"]

ENTROPY_POST_PROCESSORS = frozenset({"compute_entropy", "compute_entropy_and_logprobs"})
"""Names that ask for the entropy: run_pipeline then computes it in the same pass as the log-probs."""


@register_post_processor("compute_logprobs")
def compute_logprobs(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, device: Any
) -> dict[str, torch.Tensor]:
    """``logprobs``: log P(token | tokens before it) at ``meta["temperature"]``."""
    return {"logprobs": model_outputs["logprobs"]}


@register_post_processor("compute_entropy")
def compute_entropy(model_outputs: Mapping[str, Any], batch: dict, meta: dict, device: Any) -> dict[str, torch.Tensor]:
    """``entropy``, in nats, of the distribution that each token was drawn from."""
    return {"entropy": model_outputs["entropy"]}


@register_post_processor("compute_entropy_and_logprobs")
def compute_entropy_and_logprobs(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, device: Any
) -> dict[str, torch.Tensor]:
    """``entropy`` and ``logprobs`` from one pass."""
    return {"entropy": model_outputs["entropy"], "logprobs": model_outputs["logprobs"]}


@register_post_processor("compute_values")
def compute_values(model_outputs: Mapping[str, Any], batch: dict, meta: dict, device: Any) -> dict[str, torch.Tensor]:
    """``values`` of a value model: at a token, that of the tokens before it."""
    return {"values": model_outputs["values"]}


@register_post_processor("apply_temperature")
def apply_temperature(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, device: Any
) -> dict[str, torch.Tensor]:
    """Adds nothing: ``meta["temperature"]`` divides the logits in every pass, once, whether this is listed or not.

    The name demands that the temperature be there, for clients that list it.
    """
    from .outputs import temperature_of

    temperature_of(meta)
    return {}


@register_post_processor("identity")
def identity(model_outputs: Mapping[str, Any], batch: dict, meta: dict, device: Any) -> dict[str, torch.Tensor]:
    """Adds nothing."""
    return {}
