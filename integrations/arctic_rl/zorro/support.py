"""Which models can share prompts exactly; what stands against it is named."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..errors import UnsupportedError
from .attention import SHARED_ATTENTION

__all__ = ["SWITCH_OFF", "check_can_share", "longest_exact_row", "reasons_against"]

SWITCH_OFF = "write trainer.arctic_rl.use_zorro=false (meta['zorro_train_enable']=False in a call of the pipeline)"
"""What to do about a model that cannot share prompts."""

_SHARED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_RECURRENT = re.compile(r"Mamba|SSM|Rwkv|RWKV|LinearAttention|GatedDelta|Recurrent|ShortConv|Retention|MinGRU|xLSTM")
"""Class names of layers whose state runs along the tokens."""

_ABSOLUTE_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_embed\w*)$")

_DRAWN = re.compile(r"drop(out|_?path|_prob|_rate|$)|pdrop|layerdrop|jitter")
"""Names of config entries for what is drawn at random in training."""

_OF_OTHER_HEADS = re.compile(r"^(classifier|summary|token_classifier|seq_classif|task)")
"""Names of config entries for heads that a language model does not have."""


def check_can_share(model: Any, *, training: bool) -> None:
    """Refuse a model whose results would change if rows shared their prefixes.

    Args:
        model: a transformers causal language model.
        training: whether the model is about to be trained, with whatever dropout it has.

    Raises:
        UnsupportedError: with every reason, and the setting that turns sharing off.
    """
    reasons = list(reasons_against(model, training=training))
    if reasons:
        raise UnsupportedError(
            f"{type(model).__name__} cannot share prompts between rollouts: {'; '.join(reasons)}. To compute every "
            f"rollout's prompt separately, {SWITCH_OFF}"
        )


def reasons_against(model: Any, *, training: bool) -> Iterator[str]:
    """Why a model cannot share prompts, a phrase each; nothing if it can."""
    config = model.config if isinstance(model, nn.Module) and hasattr(model, "config") else None
    if config is None or not hasattr(config, "get_text_config"):
        yield "it is not a transformers model"
        return
    if config._attn_implementation != SHARED_ATTENTION:
        yield f"it was loaded with attn_implementation={config._attn_implementation!r} instead of {SHARED_ATTENTION!r}"
    if not model._can_set_attn_implementation():
        yield "it has attention of its own, not transformers' attention interface"
    settings = config.get_text_config().to_dict()
    yield from _mixing(model, settings)
    yield from _positions(model, settings)
    if any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters()):
        yield "it has attention sinks"
    if settings.get("is_causal") is False or any(vars(module).get("is_causal") is False for module in model.modules()):
        yield "it has attention that is not causal"
    if training:
        yield from _randomness(model, settings)


def longest_exact_row(model: Any) -> int | None:
    """Longest row, in tokens, up to which a row's rotary frequencies do not depend on the rows beside it; None = any.

    The frequencies of "dynamic" and "longrope" are those of the longest row of a forward pass beyond the length that
    the model was first trained with.
    """
    parameters = list(_rope_parameters(model.config.get_text_config().to_dict()))
    kinds = {kind for rope in parameters if (kind := rope.get("rope_type")) in ("dynamic", "longrope")}
    if not kinds:
        return None
    limits = [
        rope["original_max_position_embeddings"] for rope in parameters if "original_max_position_embeddings" in rope
    ]
    return min(limits, default=model.config.get_text_config().max_position_embeddings)


def _mixing(model: nn.Module, settings: dict[str, Any]) -> Iterator[str]:
    """Layers that hand something from token to token other than by attention."""
    layer_types = {str(kind) for name in ("layer_types", "layers_block_type") for kind in settings.get(name) or ()}
    mixing = sorted(layer_types - _SHARED_LAYER_TYPES - {"attention"})
    if mixing:
        yield f"it has layers of type {', '.join(mixing)}"
        return
    names = sorted(
        {
            type(module).__name__
            for module in model.modules()
            if _RECURRENT.search(type(module).__name__) or isinstance(module, nn.RNNBase | nn.Conv1d)
        }
    )
    if names or model._is_stateful:
        yield f"it has recurrent or convolutional layers ({', '.join(names) or 'a recurrent state'})"


def _positions(model: nn.Module, settings: dict[str, Any]) -> Iterator[str]:
    """Positions that are not those of a rotary embedding of ``position_ids``."""
    learned = [
        name
        for name, module in model.named_modules()
        if _ABSOLUTE_POSITIONS.search(name) and isinstance(module, nn.Embedding)
    ]
    if learned:
        yield f"it has learned absolute positions ({learned[0]})"
    elif not any("Rotary" in type(module).__name__ for module in model.modules()):
        yield "its positions do not come from a rotary embedding"
    if any("mrope_section" in rope for rope in _rope_parameters(settings)):
        yield "it has multi-dimensional rotary positions (mrope)"


def _rope_parameters(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rotary settings, of the whole model or of each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = settings.get(name)
        if isinstance(rope, dict):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, dict))


def _randomness(model: nn.Module, settings: dict[str, Any]) -> Iterator[str]:
    """What is drawn anew for every row while training."""
    dropped = {
        name: module.p for name, module in model.named_modules() if isinstance(module, _DropoutNd) and module.p > 0
    }
    if dropped:
        name, p = next(iter(dropped.items()))
        yield f"it drops out activations in training ({name}, p={p}: each row would have to draw its own)"
    for name, value in _numbers(settings):
        if value > 0 and _DRAWN.search(name) and not _OF_OTHER_HEADS.search(name):
            yield f"{name}={value} in its config is drawn for each row in training"


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a config and of the configs in it, by name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
