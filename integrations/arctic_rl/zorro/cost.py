"""Estimated cost of rows whose prefixes are shared, in floating-point operations of a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .groups import RowGroup

__all__ = ["CostModel", "cost_model", "group_cost", "prefix_cost", "suffix_cost"]


@dataclass(frozen=True)
class CostModel:
    """Operations of a forward pass; a backward pass takes twice as many, so ratios are those of an update too."""

    per_token: float
    """Of the linear layers, a token."""
    per_pair: float
    """Of the attention, a query and a key it sees."""
    per_scored: float
    """Of the LM or value head, a token that gets a log-prob or a value."""


def cost_model(config: Any, outputs: int | None = None) -> CostModel:
    """The cost of a transformers model from its config; of a mixture of experts those that a token goes through.

    Args:
        config: a ``PreTrainedConfig`` of a decoder with ``hidden_size``, ``num_hidden_layers`` and ``vocab_size``.
        outputs: width of the model's head; None = ``vocab_size``.
    """
    text = config.get_text_config()
    known = {name: value for name, value in text.to_dict().items() if isinstance(value, int)}
    hidden, layers = text.hidden_size, text.num_hidden_layers
    heads = text.num_attention_heads if hasattr(text, "num_attention_heads") else 1
    width = heads * known.get("head_dim", hidden // heads)
    kv_width = width * known.get("num_key_value_heads", heads) // heads
    intermediate = known.get("intermediate_size", 4 * hidden)
    if "num_experts_per_tok" in known:
        intermediate = known.get("moe_intermediate_size", intermediate) * known["num_experts_per_tok"]
    weights = hidden * (2 * width + 2 * kv_width + 3 * intermediate)
    return CostModel(
        per_token=2.0 * weights * layers,
        per_pair=4.0 * width * layers,
        per_scored=2.0 * hidden * (text.vocab_size if outputs is None else outputs),
    )


def prefix_cost(cost: CostModel, shared: int) -> float:
    """Of a prefix of ``shared`` tokens, once."""
    return cost.per_token * shared + cost.per_pair * shared * (shared + 1) / 2


def suffix_cost(cost: CostModel, shared: int, length: int, scored: int) -> float:
    """Of one row's tokens after the prefix.

    Args:
        length: tokens of the row, prefix included.
        scored: tokens of the row that get a log-prob.
    """
    own = length - shared
    return cost.per_token * own + cost.per_pair * own * (shared + (own + 1) / 2) + cost.per_scored * scored


def group_cost(cost: CostModel, group: RowGroup, lengths: Sequence[int], scored: Sequence[int]) -> float:
    """Of a group, given lengths and scored tokens of all rows."""
    suffixes = (suffix_cost(cost, group.shared, int(lengths[row]), int(scored[row])) for row in group.rows)
    return prefix_cost(cost, group.shared) + sum(suffixes)
