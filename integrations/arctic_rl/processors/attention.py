"""A causal attention back end for packed rows, registered with transformers under its own name.

It runs one fused causal attention per segment, so its result for a row does not depend on neighbours by a single bit,
and no [T, T] mask is ever built. The borders of the segments travel as forward keyword arguments, under the names that
transformers gives them for flash attention: they are part of the call that gradient checkpointing repeats.

Borders are taken from ``cu_seq_lens_q`` if given, else from a 2-D padding mask, else from restarting ``position_ids``.

A model says in two ways which tokens see each other: by the mask that it asks transformers for, which is not built
here, and by the arguments of each call. :func:`attention_use` notes both during a forward pass, so that a model that
says something in the first way only is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ..errors import PackingError, UnsupportedError
from .packing import row_lengths

__all__ = [
    "VARLEN_ATTENTION",
    "AttentionUse",
    "attention_implementation",
    "attention_use",
    "keeps_segments_apart",
    "note_call",
    "register_attention",
    "varlen_kwargs",
]

VARLEN_ATTENTION = "arctic_varlen"
"""Name to pass as ``attn_implementation`` to transformers after :func:`register_attention`."""

_WITHOUT_EFFECT = frozenset(
    {"use_cache", "cache_position", "output_hidden_states", "return_dict", "num_items_in_batch", "max_length_q"}
    | {"max_length_k", "deterministic"}
)


def attention_implementation(device_type: str) -> str:
    """The ``attn_implementation`` for packed rows on a device type; ours is registered on the way.

    Raises:
        UnsupportedError: neither "cpu" nor "cuda".
    """
    if device_type == "cuda":
        return "flash_attention_2"
    if device_type == "cpu":
        register_attention()
        return VARLEN_ATTENTION
    raise UnsupportedError(
        f"no attention back end for packed rows on device type {device_type!r}; use 'cpu' or 'cuda'"
    )


def register_attention() -> None:
    """Make :data:`VARLEN_ATTENTION` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention_forward)
    AttentionMaskInterface.register(VARLEN_ATTENTION, padding_mask_only)


def keeps_segments_apart(implementation: str) -> bool:
    """Whether a transformers attention of that name separates packed rows, by our borders or by position_ids."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return implementation in ALL_MASK_ATTENTION_FUNCTIONS


def varlen_kwargs(cu_seqlens: torch.Tensor, max_length: int) -> dict[str, torch.Tensor | int]:
    """Forward keyword arguments that give the borders to flash attention and to ours."""
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_length,
        "max_length_k": max_length,
    }


@dataclass
class AttentionUse:
    """What a model asked of our attentions during a forward pass."""

    shared: bool
    """Whether every call has to bring the layout of shared prompts."""
    calls: int = 0
    """Calls so far."""
    windows: set[int] = field(default_factory=set)
    """Sliding windows of the calls, in tokens."""
    mask_windows: set[int] = field(default_factory=set)
    """Sliding windows, or chunks, of the masks that were asked for, in tokens."""

    def check(self, model: nn.Module, longest_row: int) -> None:
        """Refuse what would have changed the result and did not reach the attention.

        Args:
            model: what ran.
            longest_row: longest row of the forward pass, in tokens.

        Raises:
            UnsupportedError: a sliding window shorter than that was asked for in a mask only, or rows that share
                prompts went through other layers than attention.
        """
        if self.shared and not self.calls:
            raise UnsupportedError(
                f"{type(model).__name__} has attention of its own, which knows nothing of shared prompts; write "
                "trainer.arctic_rl.use_zorro=false"
            )
        missing = sorted(window for window in self.mask_windows - self.windows if window < longest_row)
        if missing and _has_window_layers(model):
            raise UnsupportedError(
                f"{type(model).__name__} has a sliding window of {missing[0]} tokens in its mask only, not in the "
                f"calls of its attention, so rows of {longest_row} tokens would see too much; make rows at most "
                f"{missing[0]} tokens long, or turn the window off in the model's config"
            )


_use: ContextVar[AttentionUse | None] = ContextVar("attention_use", default=None)


@contextmanager
def attention_use(*, shared: bool) -> Iterator[AttentionUse]:
    """Note what the forward pass inside asks of our attentions."""
    token = _use.set(AttentionUse(shared))
    try:
        yield _use.get()
    finally:
        _use.reset(token)


def note_call(module: nn.Module, sliding_window: int | None, *, has_layout: bool) -> None:
    """Note a call of one of our attentions.

    Raises:
        UnsupportedError: prompts are shared in this forward pass, and the layout did not come with the call.
    """
    use = _use.get()
    if use is None:
        return
    if use.shared and not has_layout:
        raise UnsupportedError(
            f"{type(module).__name__} does not get the arguments that its model was called with, among them the "
            "layout of shared prompts; write trainer.arctic_rl.use_zorro=false"
        )
    use.calls += 1
    if sliding_window is not None:
        use.windows.add(sliding_window)


def _has_window_layers(model: nn.Module) -> bool:
    """Whether a model has layers with a window, as far as its config says which layers have one."""
    text = model.config.get_text_config() if hasattr(model, "config") else None
    kinds = text.layer_types if hasattr(text, "layer_types") else None
    return not kinds or any("sliding" in kind or "chunked" in kind for kind in kinds)


def padding_mask_only(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: object,
) -> torch.Tensor | None:
    """transformers' mask hook: hand the 2-D padding mask through, [B, S] bool, and build no [T, T] mask.

    Args:
        local_size: sliding window or chunk of the mask.
        use_vmap: whether the model adds a function of its own to the mask.

    Raises:
        UnsupportedError: a mask that is not causal, or that the model adds to.
    """
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        what = "a mask that the model adds to" if use_vmap else "is_causal=False"
        raise UnsupportedError(
            f"attention {VARLEN_ATTENTION!r}, and prompt sharing, do not do {what}: write "
            "trainer.arctic_rl.use_zorro=false, and on CPUs load the model with attn_implementation='sdpa' and pass "
            "pack=False"
        )
    if q_length != kv_length:
        raise UnsupportedError(
            f"attention {VARLEN_ATTENTION!r} works on whole sequences, not with a key-value cache ({q_length} "
            f"queries, {kv_length} keys); load the model with attn_implementation='sdpa' to generate"
        )
    use = _use.get()
    if use is not None and local_size is not None:
        use.mask_windows.add(local_size)
    return attention_mask


def varlen_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside every segment.

    Args:
        query: [B, heads, S, head width]; ``key`` and ``value`` may have fewer heads (grouped-query attention).
        attention_mask: None, or [B, S] padding mask without holes.
        scaling: factor of the scores; None = 1 / sqrt(head width).
        cu_seq_lens_q: borders of the segments of the one packed row; then B is 1.

    Returns:
        ([B, S, heads, head width], None), 0 at padding.

    Raises:
        UnsupportedError: anything that would change the result and is not done here: dropout, a sliding window shorter
            than a segment, soft-capping, attention sinks, position biases, bidirectional attention, a key-value cache.
    """
    note_call(module, sliding_window, has_layout=False)
    if dropout:
        raise _refused("dropout", dropout, "set attention_dropout=0 in the model's config")
    if not (module.is_causal if is_causal is None else is_causal):
        raise _refused("is_causal", False, "use attn_implementation='sdpa'")
    for name, setting in kwargs.items():
        if setting is not None and setting is not False and name not in _WITHOUT_EFFECT:
            raise _refused(
                name, setting, "use attn_implementation='eager' or 'sdpa', with pack=False where packing is refused"
            )
    num_rows, _, width, _ = query.shape
    if key.shape[2] != width:
        raise _refused("a key-value cache of length", key.shape[2], "use attn_implementation='sdpa' to generate")

    segments = _segments(num_rows, width, attention_mask, cu_seq_lens_q, cu_seq_lens_k, position_ids)
    if sliding_window is not None:
        longest = max((stop - start for _, start, stop in segments), default=0)
        if longest > sliding_window:
            raise _refused("sliding_window", sliding_window, f"make rows shorter, there is one of {longest} tokens")

    grouped = query.shape[1] != key.shape[1]
    pieces: list[torch.Tensor] = []
    done = 0
    for row, start, stop in segments:
        place = row * width + start
        if place > done:
            pieces.append(_padding(query, value, place - done))
        span = slice(start, stop)
        out = scaled_dot_product_attention(
            query[row : row + 1, :, span],
            key[row : row + 1, :, span],
            value[row : row + 1, :, span],
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        pieces.append(out[0].transpose(0, 1))
        done = row * width + stop
    if done < num_rows * width or not pieces:
        pieces.append(_padding(query, value, num_rows * width - done))
    return torch.cat(pieces).view(num_rows, width, query.shape[1], value.shape[-1]), None


def _segments(
    num_rows: int,
    width: int,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every segment, in order."""
    if cu_seq_lens_q is not None:
        borders = cu_seq_lens_q.tolist()
        if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q and cu_seq_lens_k.tolist() != borders:
            raise _refused("cu_seq_lens_k", cu_seq_lens_k.tolist(), "give the same borders as cu_seq_lens_q")
        if attention_mask is not None:
            raise PackingError(
                f"attention {VARLEN_ATTENTION!r} got a mask {list(attention_mask.shape)} that the model made itself "
                "beside the borders of packed rows",
                "models of this family cannot be packed, pass pack=False",
            )
        if num_rows != 1 or borders[0] != 0 or borders[-1] != width:
            raise ValueError(f"cu_seq_lens_q {borders} must span one packed row, got [{num_rows}, {width}] tokens")
        return [(0, start, stop) for start, stop in pairwise(borders) if stop > start]
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise _refused("attention_mask of rank", attention_mask.ndim, "give a 2-D padding mask")
        lengths = row_lengths(attention_mask).tolist()
        starts = attention_mask.int().argmax(dim=1).tolist()
        rows = enumerate(zip(starts, lengths, strict=True))
        return [(row, start, start + length) for row, (start, length) in rows if length]
    if position_ids is not None and position_ids.shape[-1] == width:
        steps = position_ids.reshape(-1, width).expand(num_rows, width).diff(dim=1) != 1
        segments = []
        for row, borders in enumerate(steps.cpu()):
            edges = [0, *(borders.nonzero().squeeze(1) + 1).tolist(), width]
            segments += [(row, start, stop) for start, stop in pairwise(edges)]
        return segments
    return [(row, 0, width) for row in range(num_rows)]


def _padding(query: torch.Tensor, value: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return query.new_zeros(num_tokens, query.shape[1], value.shape[-1])


def _refused(name: str, setting: object, advice: str) -> PackingError:
    if isinstance(setting, torch.Tensor):
        setting = f"a tensor {list(setting.shape)}"
    return PackingError(f"attention {VARLEN_ATTENTION!r} does not do {name}={setting}", advice)
