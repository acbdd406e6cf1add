"""Attention over shared prefixes, registered with transformers under its own name.

The layout of a micro-batch travels as the forward keyword argument ``shared_segments``, part of the call that gradient
checkpointing repeats. Without it the call is one over packed or padded rows: it goes to the attention of those, or,
for packed rows on GPUs and for what that attention does not do, to the same back ends for the first pass alone.

For a suffix the softmax over prefix and own past is the merge of two: with lse = log(exp(lse_1) + exp(lse_2)), the
output is exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2. The backward hands the merged output and log-sum-exp to the
backward of each pass, which makes the gradients exact and keeps one output alive instead of two.
"""

import math

import torch
from torch import nn

from ..errors import UnsupportedError
from ..processors.attention import note_call, padding_mask_only, varlen_attention_forward
from .kernel_check import checked_kernel
from .kernels import Kernel, ScoreSettings
from .layout import SharedSegments
from .passes import AttentionPass, packed_pass

__all__ = ["SHARED_ATTENTION", "merge", "register_shared_attention", "shared_attention", "shared_attention_forward"]

SHARED_ATTENTION = "arctic_zorro"
"""Name to pass as ``attn_implementation`` to transformers after :func:`register_shared_attention`."""

_WITHOUT_EFFECT = frozenset(
    {"use_cache", "cache_position", "output_hidden_states", "output_attentions", "output_router_logits", "return_dict"}
    | {"num_items_in_batch", "position_ids", "deterministic", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)


def register_shared_attention() -> str:
    """Make :data:`SHARED_ATTENTION` known to transformers, and return it; harmless when repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SHARED_ATTENTION, shared_attention_forward)
    AttentionMaskInterface.register(SHARED_ATTENTION, padding_mask_only)
    return SHARED_ATTENTION


def shared_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shared_segments: SharedSegments | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [1, H, T, D]; ``key`` and ``value`` [1, Hk, T, D].
        sliding_window: a query sees the keys less than this many positions before it.
        softcap: soft-capping of the scores.
        shared_segments: the layout of the T tokens.
        cu_seq_lens_q: borders of rows laid end to end, where nothing is shared.

    Returns:
        ([1, T, H, D], None).

    Raises:
        UnsupportedError: dropout, attention that is not causal, or an argument that this attention does not know.
    """
    packed = shared_segments is None and cu_seq_lens_q is not None
    if packed and not query.is_cuda and softcap is None:
        packed = sliding_window is not None and kwargs["max_length_q"] > sliding_window
    if shared_segments is None and not packed:
        extra = {} if softcap is None else {"softcap": softcap}
        return varlen_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            sliding_window=sliding_window,
            cu_seq_lens_q=cu_seq_lens_q,
            **extra,
            **kwargs,
        )
    note_call(module, sliding_window, has_layout=shared_segments is not None)
    if dropout:
        raise _refused("dropout", dropout)
    if not (module.is_causal if is_causal is None else is_causal):
        raise _refused("is_causal", False)
    for name, setting in kwargs.items():
        if setting is not None and setting is not False and name not in _WITHOUT_EFFECT:
            raise _refused(name, setting)
    num_tokens = query.shape[2] if packed else shared_segments.num_tokens
    if query.shape[0] != 1 or query.shape[2] != num_tokens or key.shape[2] != num_tokens or attention_mask is not None:
        raise ValueError(
            f"shared_segments lay out {num_tokens} tokens without a mask, got queries {list(query.shape)} and keys "
            f"{list(key.shape)}"
        )
    longest_row = kwargs["max_length_q"] if packed else shared_segments.longest_row
    settings = ScoreSettings(
        scale=1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        window=None if sliding_window is None or longest_row <= sliding_window else sliding_window,
        softcap=softcap,
    )
    kernel = checked_kernel(query.device.type, query.dtype, settings, head_dims=(key.shape[-1], value.shape[-1]))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed:
        own = packed_pass(cu_seq_lens_q, longest_row, num_tokens, looping=kernel.looping)
        return _SharedAttention.apply(q, k, v, own, None, settings, kernel)[None], None
    return shared_attention(q, k, v, shared_segments, settings, kernel)[None], None


def shared_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: SharedSegments,
    settings: ScoreSettings,
    kernel: Kernel,
) -> torch.Tensor:
    """Causal attention of every row over its prefix and itself, differentiable once.

    Args:
        q: [T, H, D]; ``k`` and ``v`` [T, Hk, D], H a multiple of Hk.

    Returns:
        [T, H, D].
    """
    return _SharedAttention.apply(q, k, v, segments.own, segments.cross, settings, kernel)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two softmax-weighted sums over disjoint keys as the one over both.

    Args:
        out: [T, H, D] and ``lse`` [H, T] of one set of keys, finite; ``other_*`` of the other, where a query without
            keys has 0 and -inf.

    Returns:
        Output, in ``out``'s dtype, and log-sum-exp.
    """
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((part - total).exp().T[..., None] for part in (lse, other_lse))
    return (out * weight).addcmul_(other_out, other_weight).to(out.dtype), total


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, own: AttentionPass, cross: AttentionPass | None, settings: ScoreSettings, kernel: Kernel
    ):
        out, lse = kernel.forward(q, k, v, own, settings)
        if cross is not None:
            suffixes, prefixes = _parts(q, cross)
            over_prefix = kernel.forward(q[suffixes], k[prefixes], v[prefixes], cross, settings)
            out[suffixes], lse[:, suffixes] = merge(out[suffixes], lse[:, suffixes], *over_prefix)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = own, cross, settings, kernel
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        own, cross, settings, kernel = ctx.settings
        grad_q, grad_k, grad_v = kernel.backward(grad_out, q, k, v, out, lse, own, settings)
        if cross is not None:
            suffixes, prefixes = _parts(q, cross)
            queries = grad_out[suffixes], q[suffixes]
            keys = k[prefixes], v[prefixes]
            merged = out[suffixes], lse[:, suffixes]
            over_prefix = kernel.backward(*queries, *keys, *merged, cross, settings)
            grad_q[suffixes] += over_prefix[0]
            grad_k[prefixes] += over_prefix[1]
            grad_v[prefixes] += over_prefix[2]
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _parts(q: torch.Tensor, cross: AttentionPass) -> tuple[slice, slice]:
    """The suffixes' tokens, which are the last, and those of their prefixes, which are the first."""
    return slice(len(q) - cross.num_queries, None), slice(cross.num_keys)


def _refused(name: str, setting: object) -> UnsupportedError:
    if isinstance(setting, torch.Tensor):
        setting = f"a tensor {list(setting.shape)}"
    return UnsupportedError(
        f"attention {SHARED_ATTENTION!r} does not do {name}={setting} over shared prompts: write "
        "trainer.arctic_rl.use_zorro=false"
    )
