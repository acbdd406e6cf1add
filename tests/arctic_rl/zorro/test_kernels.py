"""Attention over shared prefixes against a float64 softmax over each row alone, forward and backward.

The GPU back ends are not run here; what they rely on is: a backward that is handed the output and log-sum-exp of a
softmax over more keys gives that softmax's gradients. The CPU back ends go the same way.
"""

import sys
import types

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.zorro.attention import merge, shared_attention
from integrations.arctic_rl.zorro.groups import RowGroup, find_groups, own_groups
from integrations.arctic_rl.zorro.kernels import KERNELS, ScoreSettings, choose_kernel
from integrations.arctic_rl.zorro.layout import share_rows
from integrations.arctic_rl.zorro.passes import blocks, packed_pass
from tests.arctic_rl.zorro.families import rollouts

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def row_attention(q, k, v, settings: ScoreSettings) -> torch.Tensor:
    """Plain causal attention of one row, [S, H, D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    visible = (distance >= 0) & (distance < (len(q) if settings.window is None else settings.window))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def check(rows, kernel: str, settings: ScoreSettings, dtype: torch.dtype, heads: tuple[int, int], dims=(8, 8)) -> None:
    generator = torch.Generator().manual_seed(3)
    num_tokens = rows.input_ids.shape[1]
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    exact = [
        torch.randn(num_tokens, *shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes
    ]
    given = [x.detach().to(dtype).requires_grad_() for x in exact]
    weights = torch.randn(*rows.shape, heads[0], dims[1], dtype=torch.float64, generator=generator)
    weights[~rows.attention_mask] = 0

    out = rows.expand(shared_attention(*given, rows.segments, settings, KERNELS[kernel]))
    (out.double() * weights).sum().backward()
    expected = torch.zeros_like(weights)
    for number, kept in enumerate(rows.attention_mask):
        places = rows.place[number][kept]
        expected[number, kept] = row_attention(*(x[places] for x in exact), settings)
    (expected * weights).sum().backward()
    tolerance = TOLERANCE[dtype]
    assert (out - expected).abs().max() <= tolerance
    for ours, theirs in zip(given, exact, strict=True):
        assert (ours.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm()


def shared(seed: int, **kwargs):
    batch = rollouts([4, 1, 3, 2], seed, **kwargs)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return share_rows(ids, mask, find_groups(ids, mask, batch["prompt_lengths"]))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 2, 5, 9, 64])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_equals_attention_of_each_row(kernel: str, dtype: torch.dtype, window: int | None, heads: tuple[int, int]):
    check(shared(1), kernel, ScoreSettings(0.4, window), dtype, heads)


@pytest.mark.parametrize("window", [None, 5])
def test_soft_capping_and_values_of_another_width(window: int | None):
    settings = ScoreSettings(0.9, window, softcap=1.5)
    check(shared(2), "math", settings, torch.float64, (4, 2))
    check(shared(2), "math", settings, torch.float32, (4, 2), dims=(8, 6))


@pytest.mark.parametrize("window", [None, 40, 270, 500, 900])
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_long_rows(kernel: str, window: int | None):
    """Rows longer than any block, windows shorter and longer than a suffix and a prefix."""
    ids = torch.arange(900).repeat(4, 1)
    mask = (torch.arange(900) < torch.tensor([900, 601, 640, 700])[:, None]).long()
    ids[3] += 1
    rows = share_rows(ids, mask, [RowGroup((0, 1, 2), 600), RowGroup((3,), 700)])
    check(rows, kernel, ScoreSettings(0.3, window), torch.float32, (2, 1))


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_nothing_shared(kernel: str):
    batch = rollouts([2, 2], 4)
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = share_rows(batch["input_ids"], batch["attention_mask"], own_groups(lengths))
    assert rows.segments.cross is None
    check(rows, kernel, ScoreSettings(0.4), torch.float64, (2, 2))


def test_borders_alone_make_the_same_pass():
    batch = rollouts([2, 2], 4)
    lengths = batch["attention_mask"].sum(1).tolist()
    own = share_rows(batch["input_ids"], batch["attention_mask"], own_groups(lengths)).segments.own
    assert packed_pass(own.cu_q, max(lengths), sum(lengths), looping=True) == own
    borders = packed_pass(own.cu_q, max(lengths), sum(lengths), looping=False)
    assert borders.problems == borders.joined == ()
    assert (borders.cu_q is own.cu_q, borders.max_q, borders.num_keys) == (True, max(lengths), sum(lengths))


def test_merging_two_softmaxes():
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, 5, 9, generator=generator).double(), torch.randn(9, 2, 4).double()
    parts = []
    for keys in (slice(0, 3), slice(3, 9)):
        part = scores[..., keys]
        parts += [torch.einsum("hqk,khd->qhd", part.softmax(-1), values[keys]), part.logsumexp(-1)]
    out, lse = merge(*parts)
    assert torch.allclose(out, torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), atol=1e-14)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-14)
    nothing = torch.zeros_like(parts[0]), torch.full_like(parts[1], -torch.inf)
    out, lse = merge(*parts[:2], *nothing)
    assert torch.equal(out, parts[0])
    assert torch.equal(lse, parts[1])


@pytest.mark.parametrize("window", [None, 300, 40])
def test_no_block_holds_a_square_of_all_tokens(window: int | None):
    ids = torch.zeros(9, 4200, dtype=torch.int64)
    ids[:, 4096:] = torch.arange(9)[:, None]
    rows = share_rows(ids, torch.ones_like(ids), [RowGroup(tuple(range(9)), 4096)])
    segments = rows.segments
    for of_pass in (segments.own, segments.cross):
        for block in blocks(of_pass, window, torch.device("cpu")):
            if block.visible is not None:
                assert block.visible.numel() <= 256 * (256 + window)


def test_which_back_end_is_chosen(monkeypatch):
    def name(device="cuda", dtype=torch.bfloat16, dims=(64, 64), **settings) -> str:
        return choose_kernel.__wrapped__(device, dtype, ScoreSettings(0.1, **settings), head_dims=dims).name

    assert name("cpu", torch.float32) == "cpu_flash"
    assert name("cpu", torch.float32, softcap=5.0) == "math"
    assert name("cpu", torch.float32, dims=(64, 32)) == "math"
    assert name() == "torch_varlen"
    assert name(dtype=torch.float32) == "math"
    assert name(window=9) == "math"
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module == "flash_attn")
    assert name() == "flash_attn_2"
    assert name(softcap=5.0) == "flash_attn_2"
    assert name(window=9) == "math"
    monkeypatch.setattr("importlib.util.find_spec", lambda module: True)
    assert name() == "flash_attn_3"
    assert name(softcap=5.0) == "flash_attn_2"


def flash_stand_in(kernel):
    """flash-attn's varlen calls, as its 2.8 release declares them, computed by ``kernel`` from the borders alone."""

    def as_pass(cu_q, cu_k, causal):
        spans = [list(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)) for cu in (cu_q, cu_k)]
        joined = tuple((*q, *k) for q, k in zip(*spans, strict=True))
        return types.SimpleNamespace(problems=(), joined=joined, causal=causal)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal, window_left=-1, window_right=-1,
                softcap=0.0, alibi_slopes=None, return_softmax=False):  # fmt: skip
        assert max_q == int(cu_q.diff().max())
        assert max_k == int(cu_k.diff().max())
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
        assert (dropout_p, window_left, window_right, softcap) == (0.0, -1, -1, 0.0)
        out, lse = kernel.forward(q, k, v, as_pass(cu_q, cu_k, causal), ScoreSettings(softmax_scale))
        return out, lse, None, None

    def backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal,
                 window_left, window_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
        assert lse.is_contiguous()
        assert lse.shape == (q.shape[1], len(q))
        assert (dropout_p, window_left, window_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        of_pass = as_pass(cu_q, cu_k, causal)
        grads = kernel.backward(dout, q, k, v, out, lse, of_pass, ScoreSettings(softmax_scale))
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    return forward, backward


def test_flash_attention_2_is_called_as_it_declares(monkeypatch):
    forward, backward = flash_stand_in(KERNELS["math"])
    package = types.ModuleType("flash_attn")
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._wrapped_flash_attn_varlen_forward = forward
    interface._wrapped_flash_attn_varlen_backward = backward
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    check(shared(3), "flash_attn_2", ScoreSettings(0.4), torch.float64, (4, 2))


def test_flash_attention_3_is_called_as_it_declares(monkeypatch):
    forward, backward = flash_stand_in(KERNELS["math"])

    def forward_3(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        out, lse, _, _ = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal
        )
        return out, lse, None, None

    def backward_3(dout, q, k, v, out, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
                   softmax_scale, is_causal):  # fmt: skip
        backward(dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
                 softmax_scale, is_causal, -1, -1, 0.0, None, False)  # fmt: skip

    interface = types.ModuleType("flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = forward_3, backward_3
    monkeypatch.setitem(sys.modules, "flash_attn_interface", interface)
    check(shared(3), "flash_attn_3", ScoreSettings(0.4), torch.float64, (4, 4))


def test_torch_varlen_is_called_as_it_declares(monkeypatch):
    """Its public call and the operator of its backward exist with the parameters that are passed."""
    import inspect

    from torch.nn.attention import varlen

    parameters = inspect.signature(varlen.varlen_attn).parameters
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"return_aux", "scale", "window_size", "enable_gqa"} <= set(parameters)
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    expected = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
    assert [argument.name for argument in schema.arguments] == expected.split()


@pytest.mark.parametrize("kernel", ["flash_attn_2", "flash_attn_3", "torch_varlen"])
def test_back_ends_without_windows_refuse_them(kernel: str, monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface"):
        module = types.ModuleType(name)
        module._wrapped_flash_attn_varlen_forward = module._flash_attn_forward = None
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UnsupportedError, match=r"sliding_window=4.*use_zorro=false"):
        check(shared(3), kernel, ScoreSettings(0.4, window=4), torch.float32, (2, 2))
