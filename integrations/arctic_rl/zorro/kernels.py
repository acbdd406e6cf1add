"""Attention back ends that return the log-sum-exp of their scores, forward and backward.

A back end takes packed queries [Tq, H, D], keys and values [Tk, Hk, D] (H a multiple of Hk) and an
:class:`AttentionPass`, and gives the output [Tq, H, D] and the log-sum-exp [H, Tq] in float32 (float64 for float64
inputs); its backward takes output and log-sum-exp as arguments. Handed those of a softmax over *more* keys than the
pass has, it yields that softmax's exact gradients for the pass's part: with P = exp(score - lse) and
delta = rowsum(dO * O), the gradient of a score is P (dO v - delta), whichever keys the others were.

Results may be wider than the inputs: the CPU back ends leave them in float32, so that a merge of two rounds only once.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from .passes import AttentionPass, Block, blocks

__all__ = ["KERNELS", "Kernel", "ScoreSettings", "choose_kernel"]

_MATH_BLOCK = 256
"""Queries whose scores the math back end holds at once."""


@dataclass(frozen=True)
class ScoreSettings:
    """What happens to the product of a query and a key."""

    scale: float
    """Factor of the product."""
    window: int | None = None
    """A query sees the keys less than this many positions before it; None = all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None = they stay."""


Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """One back end."""

    name: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """``f(q, k, v, pass, settings) -> (out, lse)``; a query without keys gets 0 and -inf."""
    backward: Callable[..., Grads]
    """``f(grad_out, q, k, v, out, lse, pass, settings) -> (grad_q, grad_k, grad_v)``."""
    looping: bool = False
    """Whether it takes one problem of a pass at a time."""


@functools.cache
def choose_kernel(
    device_type: str, dtype: torch.dtype, settings: ScoreSettings, *, head_dims: tuple[int, int]
) -> Kernel:
    """The fastest back end that computes exactly what is asked for.

    Args:
        device_type: "cpu" or "cuda".
        dtype: of queries, keys and values.
        head_dims: widths of a key and of a value.
    """
    if device_type == "cpu":
        plain = settings.softcap is None and head_dims[0] == head_dims[1]
        return KERNELS["cpu_flash" if plain else "math"]
    if dtype not in (torch.float16, torch.bfloat16) or head_dims[0] != head_dims[1]:
        return KERNELS["math"]
    if settings.window is None and settings.softcap is None and importlib.util.find_spec("flash_attn_interface"):
        return KERNELS["flash_attn_3"]
    if settings.window is None and importlib.util.find_spec("flash_attn"):
        return KERNELS["flash_attn_2"]
    if settings.window is None and settings.softcap is None:
        return KERNELS["torch_varlen"]
    return KERNELS["math"]


def _looping(name: str, forward: Callable, backward: Callable) -> Kernel:
    """A back end that takes one block at a time, in float32 also for 16-bit inputs; so are its results."""

    def run_forward(q, k, v, of_pass: AttentionPass, settings: ScoreSettings):
        wide = _wide(q.dtype)
        out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=wide)
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
        for block in blocks(of_pass, settings.window, q.device):
            inputs = (x.to(wide) for x in (q[block.queries], k[block.keys], v[block.keys]))
            out[block.queries], lse[:, block.queries] = forward(*inputs, block, settings)
        return out, lse

    def run_backward(grad_out, q, k, v, out, lse, of_pass: AttentionPass, settings: ScoreSettings) -> Grads:
        wide = _wide(q.dtype)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for block in blocks(of_pass, settings.window, q.device):
            queries, keys = block.queries, block.keys
            inputs = (x.to(wide) for x in (grad_out[queries], q[queries], k[keys], v[keys], out[queries]))
            grads = backward(*inputs, lse[:, queries], block, settings)
            grad_q[queries] += grads[0]
            grad_k[keys] += grads[1]
            grad_v[keys] += grads[2]
        return grad_q, grad_k, grad_v

    return Kernel(name, run_forward, run_backward, looping=True)


def _grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[S, H, D] to [H / Hk, Hk, S, D]: the query heads of one key head along the batch, no copy."""
    return x.unflatten(1, (num_kv_heads, -1)).permute(2, 1, 0, 3)


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    """[g, Hk, S, D] to [S, Hk * g, D]."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)


def _cpu_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> tuple[Any, ...]:
    num_kv_heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = (_grouped(x, num_kv_heads).expand(repeats, -1, -1, -1) for x in (k, v))
    bias = None
    if block.visible is not None:
        bias = torch.zeros_like(block.visible, dtype=q.dtype).masked_fill_(~block.visible, -torch.inf)
    return _grouped(q, num_kv_heads), keys, values, bias


def _cpu_flash_forward(q, k, v, block: Block, settings: ScoreSettings):
    query, key, value, bias = _cpu_inputs(q, k, v, block)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, block.causal, attn_mask=bias, scale=settings.scale
    )
    return _ungrouped(out), lse.transpose(0, 1).flatten(0, 1)


def _cpu_flash_backward(grad_out, q, k, v, out, lse, block: Block, settings: ScoreSettings) -> Grads:
    query, key, value, bias = _cpu_inputs(q, k, v, block)
    num_kv_heads = k.shape[1]
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _grouped(grad_out, num_kv_heads),
        query,
        key,
        value,
        _grouped(out, num_kv_heads),
        lse.unflatten(0, (num_kv_heads, -1)).transpose(0, 1),
        0.0,
        block.causal,
        attn_mask=bias,
        scale=settings.scale,
    )
    return _ungrouped(grad_q), grad_k.sum(dim=0).transpose(0, 1), grad_v.sum(dim=0).transpose(0, 1)


def _math_scores(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor | None, settings: ScoreSettings):
    """(scores [H, S, K], derivative of the soft-capping or None)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k).mul_(settings.scale)
    slope = None
    if settings.softcap is not None:
        capped = torch.tanh(scores / settings.softcap)
        scores, slope = capped * settings.softcap, 1 - capped * capped
    return (scores if visible is None else scores.masked_fill_(~visible, -torch.inf)), slope


def _pieces(block: Block, num_queries: int, device: torch.device):
    """(queries, keys, visible) of at most ``_MATH_BLOCK`` queries each."""
    for start in range(0, num_queries, _MATH_BLOCK):
        stop = min(num_queries, start + _MATH_BLOCK)
        if block.causal:
            visible = torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril_(start)
            yield slice(start, stop), slice(0, stop), visible
        else:
            yield slice(start, stop), slice(None), None if block.visible is None else block.visible[start:stop]


def _math_forward(q, k, v, block: Block, settings: ScoreSettings):
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[1], len(q))
    for queries, keys, visible in _pieces(block, len(q), q.device):
        scores, _ = _math_scores(q[queries], k[keys], visible, settings)
        lse[:, queries] = scores.logsumexp(dim=-1)
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out[queries] = torch.einsum("hqk,khd->qhd", (scores - lse[:, queries, None]).exp_(), values)
    return out, lse


def _math_backward(grad_out, q, k, v, out, lse, block: Block, settings: ScoreSettings) -> Grads:
    repeats = q.shape[1] // k.shape[1]
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad_out * out).sum(dim=-1).T
    for queries, keys, visible in _pieces(block, len(q), q.device):
        scores, slope = _math_scores(q[queries], k[keys], visible, settings)
        p = (scores - lse[:, queries, None]).exp_()
        keys_repeated, values = (x[keys].repeat_interleave(repeats, dim=1) for x in (k, v))
        grad_v[keys] += torch.einsum("hqk,qhd->khd", p, grad_out[queries]).unflatten(1, (-1, repeats)).sum(dim=2)
        grad_scores = p * (torch.einsum("qhd,khd->hqk", grad_out[queries], values) - delta[:, queries, None])
        grad_scores = (grad_scores if slope is None else grad_scores * slope) * settings.scale
        grad_q[queries] = torch.einsum("hqk,khd->qhd", grad_scores, keys_repeated)
        grad_k[keys] += torch.einsum("hqk,qhd->khd", grad_scores, q[queries]).unflatten(1, (-1, repeats)).sum(dim=2)
    return grad_q, grad_k, grad_v


def _flash_2_forward(q, k, v, of_pass: AttentionPass, settings: ScoreSettings):
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward as forward

    _check_no_window("flash_attn_2", settings)
    out, lse, _, _ = forward(
        q,
        k,
        v,
        of_pass.cu_q,
        of_pass.cu_k,
        of_pass.max_q,
        of_pass.max_k,
        0.0,
        settings.scale,
        causal=of_pass.causal,
        softcap=0.0 if settings.softcap is None else settings.softcap,
    )
    return out, lse


def _flash_2_backward(grad_out, q, k, v, out, lse, of_pass: AttentionPass, settings: ScoreSettings) -> Grads:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward as backward

    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        *grads,
        of_pass.cu_q,
        of_pass.cu_k,
        of_pass.max_q,
        of_pass.max_k,
        0.0,
        settings.scale,
        of_pass.causal,
        -1,
        -1,
        0.0 if settings.softcap is None else settings.softcap,
        None,
        False,
    )
    return grads


def _flash_3_forward(q, k, v, of_pass: AttentionPass, settings: ScoreSettings):
    from flash_attn_interface import _flash_attn_forward

    _check_no_window("flash_attn_3", settings)
    out, lse, *_ = _flash_attn_forward(
        q,
        k,
        v,
        cu_seqlens_q=of_pass.cu_q,
        cu_seqlens_k=of_pass.cu_k,
        max_seqlen_q=of_pass.max_q,
        max_seqlen_k=of_pass.max_k,
        softmax_scale=settings.scale,
        causal=of_pass.causal,
    )
    return out, lse


def _flash_3_backward(grad_out, q, k, v, out, lse, of_pass: AttentionPass, settings: ScoreSettings) -> Grads:
    from flash_attn_interface import _flash_attn_backward

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        cu_seqlens_q=of_pass.cu_q,
        cu_seqlens_k=of_pass.cu_k,
        max_seqlen_q=of_pass.max_q,
        max_seqlen_k=of_pass.max_k,
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=settings.scale,
        is_causal=of_pass.causal,
    )
    return dq, dk, dv


def _torch_varlen_forward(q, k, v, of_pass: AttentionPass, settings: ScoreSettings):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    _check_no_window("torch_varlen", settings)
    return varlen_attn(
        q,
        k,
        v,
        of_pass.cu_q,
        of_pass.cu_k,
        of_pass.max_q,
        of_pass.max_k,
        return_aux=AuxRequest(lse=True),
        scale=settings.scale,
        window_size=(-1, 0) if of_pass.causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _torch_varlen_backward(grad_out, q, k, v, out, lse, of_pass: AttentionPass, settings: ScoreSettings) -> Grads:
    import torch.nn.attention.varlen

    return torch.ops.torch_attn._varlen_attn_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        of_pass.cu_q,
        of_pass.cu_k,
        of_pass.max_q,
        of_pass.max_k,
        of_pass.causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        settings.scale,
        [-1, 0] if of_pass.causal else [-1, -1],
    )


def _check_no_window(name: str, settings: ScoreSettings) -> None:
    if settings.window is not None:
        raise UnsupportedError(
            f"attention back end {name!r} does not do sliding_window={settings.window} over shared prompts; write "
            "trainer.arctic_rl.use_zorro=false"
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


KERNELS = {
    kernel.name: kernel
    for kernel in (
        _looping("cpu_flash", _cpu_flash_forward, _cpu_flash_backward),
        _looping("math", _math_forward, _math_backward),
        Kernel("flash_attn_2", _flash_2_forward, _flash_2_backward),
        Kernel("flash_attn_3", _flash_3_forward, _flash_3_backward),
        Kernel("torch_varlen", _torch_varlen_forward, _torch_varlen_backward),
    )
}
"""Back ends by name."""
