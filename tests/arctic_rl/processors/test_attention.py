"""The packed-row attention of CPUs against transformers' eager attention, and what it refuses."""

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors import attention
from tests.arctic_rl.processors.helpers import (
    assert_gradients_agree,
    gradients,
    ragged_batch,
    reference_model,
    tiny_model,
)

KINDS = ["qwen3", "llama"]


class Layer(torch.nn.Module):
    is_causal = True


def eager(query, key, value, scale):
    repeat = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.repeat_interleave(repeat, 1)


def random_heads(*lengths: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    width = sum(lengths)
    shapes = [(1, 4, width, 8), (1, 2, width, 8), (1, 2, width, 8)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def borders(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("scaling", [None, 0.7])
def test_segments_equal_separate_attention(scaling: float | None):
    lengths = (3, 1, 7, 2)
    heads = random_heads(*lengths)
    cu = borders(*lengths)
    out, _ = attention.varlen_attention_forward(Layer(), *heads, None, scaling=scaling, cu_seq_lens_q=cu)
    pieces = [
        eager(*(h[:, :, start:stop] for h in heads), 8**-0.5 if scaling is None else scaling)
        for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)
    ]
    expected = torch.cat(pieces, dim=2).transpose(1, 2)
    assert torch.allclose(out, expected, atol=1e-12)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((out * weights).sum(), heads)
    theirs = torch.autograd.grad((expected * weights).sum(), heads)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_borders_come_from_kwargs_mask_or_positions():
    lengths = (3, 4)
    heads = random_heads(*lengths)
    cu = borders(*lengths)
    expected, _ = attention.varlen_attention_forward(Layer(), *heads, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    out, _ = attention.varlen_attention_forward(Layer(), *heads, None, position_ids=positions)
    assert torch.equal(out, expected)
    rows = [torch.nn.functional.pad(h, (0, 0, 1, 1)) for h in heads]
    padded = [torch.cat([h[:, :, :4], h.new_zeros(1, h.shape[1], 2, 8)], 2) for h in rows]
    mask = torch.tensor([[0, 1, 1, 1, 0, 0]])
    out, _ = attention.varlen_attention_forward(Layer(), *padded, mask)
    assert torch.equal(out[:, 1:4], expected[:, :3])
    assert (out[:, [0, 4, 5]] == 0).all()
    whole, _ = attention.varlen_attention_forward(Layer(), *heads, None)
    assert torch.allclose(whole, eager(*heads, 8**-0.5).transpose(1, 2), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows_equal_rows_alone(kind: str, side: str):
    model = tiny_model(kind)
    batch = ragged_batch(5, 3, side=side)
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": mask, "position_ids": positions, "use_cache": False}
    reference = reference_model(model)
    logits = model(**inputs).logits[mask.bool()]
    rows = [ids[kept][None] for ids, kept in zip(batch["input_ids"], mask.bool(), strict=True)]
    expected = torch.cat([reference(input_ids=row, use_cache=False).logits[0] for row in rows])
    assert (logits - expected).abs().max() < 1e-5
    logits.square().mean().backward()
    expected.square().mean().backward()
    assert_gradients_agree(model, reference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_repeats_the_call_with_its_own_borders(reentrant: bool):
    """Two packed calls are in flight at once; each must be recomputed with its own borders."""
    model = tiny_model("qwen3").train()
    ids = torch.randint(0, 128, (1, 10), generator=torch.Generator().manual_seed(1))

    def loss(lengths: tuple[int, ...]) -> torch.Tensor:
        cu = borders(*lengths)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        kwargs = attention.varlen_kwargs(cu, max(lengths))
        return model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits.square().mean()

    def both() -> dict[str, torch.Tensor]:
        model.zero_grad()
        first, second = loss((4, 6)), loss((7, 1, 2))
        first.backward()
        second.backward()
        return gradients(model)

    expected = both()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, value in both().items():
        assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dropout": 0.1}, "does not do dropout=0.1"),
        ({"sliding_window": 4}, "does not do sliding_window=4"),
        ({"softcap": 30.0}, "does not do softcap=30.0"),
        ({"s_aux": torch.ones(4)}, r"does not do s_aux=a tensor \[4\]; .*pack=False"),
        ({"position_bias": torch.ones(1)}, "does not do position_bias="),
        ({"is_causal": False}, "does not do is_causal=False"),
        ({"output_attentions": True}, "does not do output_attentions=True"),
        ({"cu_seq_lens_k": borders(4, 3)}, "does not do cu_seq_lens_k="),
    ],
)
def test_what_it_cannot_do_is_refused(kwargs: dict, message: str):
    heads = random_heads(5, 2)
    with pytest.raises(UnsupportedError, match=message):
        attention.varlen_attention_forward(Layer(), *heads, None, cu_seq_lens_q=borders(5, 2), **kwargs)


def test_harmless_arguments_are_accepted():
    heads = random_heads(5, 2)
    kwargs = {"sliding_window": 5, "softcap": None, "output_attentions": False, "use_cache": False, "dropout": 0.0}
    plain, _ = attention.varlen_attention_forward(Layer(), *heads, None, cu_seq_lens_q=borders(5, 2))
    out, _ = attention.varlen_attention_forward(Layer(), *heads, None, cu_seq_lens_q=borders(5, 2), **kwargs)
    assert torch.equal(plain, out)


def test_borders_that_do_not_fit_are_refused():
    heads = random_heads(5, 2)
    for cu in (borders(5, 3), borders(5), torch.tensor([1, 7])):
        with pytest.raises(ValueError, match="must span one packed row"):
            attention.varlen_attention_forward(Layer(), *heads, None, cu_seq_lens_q=cu)
    with pytest.raises(UnsupportedError, match=r"a mask \[1, 7\] that the model made itself.*pack=False"):
        mask = torch.ones(1, 7, dtype=torch.bool)
        attention.varlen_attention_forward(Layer(), *heads, mask, cu_seq_lens_q=borders(5, 2))
    query, key, value = heads
    with pytest.raises(UnsupportedError, match="key-value cache"):
        attention.varlen_attention_forward(Layer(), query[:, :, -1:], key, value, None)


def test_generation_with_a_cache_is_refused():
    model = tiny_model("qwen3")
    with pytest.raises(UnsupportedError, match="key-value cache"):
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, use_cache=True)


def test_attention_implementation():
    assert attention.attention_implementation("cpu") == "arctic_varlen"
    assert attention.attention_implementation("cuda") == "flash_attention_2"
    with pytest.raises(UnsupportedError, match="'mps'"):
        attention.attention_implementation("mps")


@pytest.mark.parametrize("name", ["arctic_varlen", "eager", "sdpa", "flash_attention_2", "flex_attention"])
def test_back_ends_that_keep_rows_apart(name: str):
    attention.register_attention()
    assert attention.keeps_segments_apart(name)
    assert not attention.keeps_segments_apart("an_attention_without_a_mask_function")
