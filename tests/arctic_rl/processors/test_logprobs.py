"""Log-probs and entropy against float64 log-softmax: chunks, dtypes, temperatures, borders, memory."""

import subprocess
import sys

import pytest
import torch

from integrations.arctic_rl.processors.logprobs import (
    align_to_tokens,
    chunk_rows,
    logprobs_and_entropy,
    logprobs_and_entropy_chunked,
    logprobs_and_entropy_from_hidden,
    next_token_targets,
    tile_shape,
)
from integrations.arctic_rl.processors.outputs import LogitsSettings


def exact(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def random_case(num: int, vocab: int, seed: int = 0, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num, vocab, generator=generator) * 3).to(dtype)
    return logits, torch.randint(0, vocab, (num,), generator=generator)


def test_targets_never_cross_a_border():
    ids, positions = torch.tensor([10, 11, 12, 20, 21]), torch.tensor([0, 1, 2, 0, 1])
    targets, predicts = next_token_targets(ids, positions)
    assert targets.tolist() == [11, 12, 0, 21, 0]
    assert predicts.tolist() == [True, True, False, True, False]
    values = torch.tensor([1.0, 2.0, float("nan"), 4.0, float("nan")])
    assert align_to_tokens(values, predicts).tolist() == [0.0, 1.0, 2.0, 0.0, 4.0]


def test_single_token_segments_have_no_targets():
    targets, predicts = next_token_targets(torch.tensor([5, 6, 7]), torch.tensor([0, 0, 0]))
    assert targets.tolist() == [0, 0, 0]
    assert not predicts.any()
    assert align_to_tokens(torch.ones(3), predicts).tolist() == [0.0, 0.0, 0.0]


def test_table_model_at_a_temperature():
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    targets = torch.tensor([0, 1])
    for temperature, expected in [(1.0, [-0.12693, -2.12693]), (0.5, [-0.01815, -4.01815])]:
        full, _ = logprobs_and_entropy(logits, targets, temperature, entropy=False)
        chunked, _ = logprobs_and_entropy_chunked(logits, targets, temperature, entropy=False, chunk=1)
        for values in (full, chunked):
            assert values.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("upcast", [True, False])
def test_bf16_is_read_in_float32(upcast: bool):
    """bf16 log-softmax is off by up to 0.07 on these logits; float32 on the same logits by 2e-5."""
    logits, targets = random_case(64, 151_936, dtype=torch.bfloat16)
    expected, _ = exact(logits, targets)
    full, _ = logprobs_and_entropy(logits, targets, 1.0, entropy=False, upcast=upcast)
    chunked, _ = logprobs_and_entropy_chunked(logits, targets, 1.0, entropy=False, chunk=10, upcast=upcast)
    for values in (full, chunked):
        error = (values.double() - expected).abs().max()
        assert error < 1e-4 if upcast else error > 1e-2
        assert values.dtype == (torch.float32 if upcast else torch.bfloat16)


@pytest.mark.parametrize("num", [0, 1, 128, 1000])
@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_equal_the_whole(num: int, entropy: bool):
    logits, targets = random_case(num, 50)
    weights = torch.randn(2, num, generator=torch.Generator().manual_seed(1))
    results = []
    for chunk in (128, 10_000, None):
        leaf = logits.clone().requires_grad_()
        if chunk is None:
            values = logprobs_and_entropy(leaf, targets, 0.8, entropy=entropy)
        else:
            values = logprobs_and_entropy_chunked(leaf, targets, 0.8, entropy=entropy, chunk=chunk)
        assert (values[1] is None) != entropy
        loss = (values[0] * weights[0]).sum() + ((values[1] * weights[1]).sum() if entropy else 0)
        loss.backward()
        results.append((values[0], values[1] if entropy else values[0], leaf.grad))
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [(1, 1), (7, 9), (40, 7), (3, 30), (1000, 1000)])
def test_gradients_from_hidden_states(bias: bool, tile: tuple[int, int]):
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(40, 6, generator=generator), torch.randn(30, 6, generator=generator)
    offset = torch.randn(30, generator=generator) if bias else None
    targets = torch.randint(0, 30, (40,), generator=generator)
    weights = torch.randn(2, 40, generator=generator).double()

    def run(dtype: torch.dtype, function) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, offset) if t is not None]
        logprobs, entropy = function(leaves[0], leaves[1], leaves[2] if bias else None)
        loss = (logprobs * weights[0]).sum() + (entropy * weights[1]).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, leaves)]

    expected = run(torch.float64, lambda h, w, b: exact(torch.nn.functional.linear(h, w, b), targets, 0.7))
    ours = run(
        torch.float32,
        lambda h, w, b: logprobs_and_entropy_from_hidden(h, w, b, targets, 0.7, entropy=True, tile=tile),
    )
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_gradient_of_one_output_alone():
    logits, targets = random_case(20, 11)
    logits = logits.double().requires_grad_()
    for pick in (0, 1):
        values = logprobs_and_entropy_chunked(logits, targets, 1.3, entropy=True, chunk=6)[pick]
        expected = exact(logits, targets, 1.3)[pick]
        ours, theirs = (torch.autograd.grad(v.square().sum(), logits)[0] for v in (values, expected))
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_gradcheck():
    logits, targets = random_case(5, 7)
    logits = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: logprobs_and_entropy_chunked(z, targets, 0.6, entropy=True, chunk=2), logits
    )
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64).requires_grad_() for n in (5, 7))
    assert torch.autograd.gradcheck(
        lambda h, w: logprobs_and_entropy_from_hidden(h, w, None, targets, 0.6, entropy=True, tile=(2, 3)),
        (hidden, weight),
    )


def test_fp32_inputs_multiply_in_float32():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 64, generator=generator).bfloat16()
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    targets = torch.randint(0, 500, (200,), generator=generator)
    expected, _ = exact(hidden.double() @ weight.double().T, targets)
    errors = {}
    for fp32_inputs in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values, _ = logprobs_and_entropy_from_hidden(
            *leaves, None, targets, 1.0, entropy=False, tile=(33, 70), fp32_inputs=fp32_inputs
        )
        errors[fp32_inputs] = float((values - expected).detach().abs().max())
        assert [g.dtype for g in torch.autograd.grad(values.sum(), leaves)] == [torch.bfloat16] * 2
    assert errors[True] < 1e-4 < errors[False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["full", "chunked", "hidden"])
def test_masked_entries_leave_entropy_and_gradients_finite(way: str, dtype: torch.dtype):
    """Vocabulary masked to -inf: the same entropy and gradients as over the rest of the vocabulary alone."""
    generator = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64).to(dtype) for n in (6, 12))
    bias = torch.zeros(12, dtype=dtype)
    kept = torch.tensor([1, 2, 6, 7, 11])
    bias[torch.tensor([i for i in range(12) if i not in kept])] = -torch.inf
    targets = kept[torch.randint(0, len(kept), (6,), generator=generator)]
    weights = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    results = []
    for masked in (True, False):
        h = hidden.clone().to(dtype if masked else torch.float64).requires_grad_()
        w = weight.to(h.dtype)
        if not masked:
            logp = torch.log_softmax(h @ w[kept].T / 0.7, dim=-1)
            at = (targets[:, None] == kept).int().argmax(dim=1, keepdim=True)
            values = logp.gather(1, at).squeeze(1), -(logp.exp() * logp).sum(-1)
        elif way == "hidden":
            values = logprobs_and_entropy_from_hidden(h, w, bias, targets, 0.7, entropy=True, tile=(4, 3))
        elif way == "chunked":
            values = logprobs_and_entropy_chunked(h @ w.T + bias, targets, 0.7, entropy=True, chunk=4)
        else:
            values = logprobs_and_entropy(h @ w.T + bias, targets, 0.7, entropy=True)
        (gradient,) = torch.autograd.grad((values[0] * weights[0] + values[1] * weights[1]).sum(), h)
        results.append([*(value.detach().double() for value in values), gradient.double()])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for value, expected in zip(*results, strict=True):
        assert (value - expected).norm() <= tolerance * expected.norm()


def test_large_logits_stay_exact():
    logits = torch.tensor([[1e4, 1e4 - 1.0, -1e4], [-1e4, 0.0, 1.0]])
    targets = torch.tensor([1, 0])
    for values, expected in zip(
        logprobs_and_entropy_chunked(logits, targets, 1.0, entropy=True, chunk=1), exact(logits, targets), strict=True
    ):
        assert torch.allclose(values.double(), expected, rtol=1e-6, atol=1e-6)


def test_chunk_rows():
    assert chunk_rows(1 << 20, 1.0) == 128
    assert chunk_rows(1 << 20, 1e-9) == 1
    assert LogitsSettings().peak_gib("cuda") == 1.0
    assert LogitsSettings().peak_gib("cpu") < 0.1
    assert LogitsSettings(logits_optimization_peak_mem_size_in_gib=2).peak_gib("cpu") == 2


@pytest.mark.parametrize("narrow_width", [0, 64, 3584])
@pytest.mark.parametrize("size", [1e-9, 1e-4, 0.01, 0.25, 1.0, 100.0])
@pytest.mark.parametrize(
    ("positions", "vocab"), [(0, 50), (1, 151_936), (300, 1_280), (8_192, 151_936), (10**6, 32_000)]
)
def test_tiles_fill_the_budget_or_hold_the_logits(size: float, positions: int, vocab: int, narrow_width: int):
    rows, columns = tile_shape(positions, vocab, size, narrow_width=narrow_width)
    assert 1 <= rows <= max(1, positions)
    assert 1 <= columns <= vocab

    def fits(rows: int, columns: int) -> bool:
        return rows * columns * 10 + (rows + columns) * 12 * narrow_width <= size * 2**30 * (1 + 1e-9)

    assert fits(rows, columns) or (rows, columns) == (1, 1)
    assert not fits(rows, columns + 1) or columns == vocab
    assert not fits(rows + 1, columns + 1) or rows >= positions or columns == vocab
    whole = rows >= positions and columns == vocab
    assert whole or abs(rows - columns) <= 1 or rows >= positions or columns == vocab or rows * columns <= 4


@pytest.mark.parametrize("tile", [(50, 64), (9, 64), (50, 10), (7, 11)])
def test_narrow_gradients_are_rounded_once(tile: tuple[int, int]):
    """bf16 sums over tiles would be off by more with every tile; float32 sums of bf16 products are not."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((50, 16), (64, 16), (64,))
    )
    targets = torch.randint(0, 64, (50,), generator=generator)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    values, entropy = logprobs_and_entropy_from_hidden(*leaves, targets, 1.0, entropy=True, tile=tile)
    ours = torch.autograd.grad(values.sum() + entropy.sum(), leaves)
    doubles = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    exact_values, exact_entropy = exact(doubles[0] @ doubles[1].T + doubles[2], targets)
    theirs = torch.autograd.grad(exact_values.sum() + exact_entropy.sum(), doubles)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() <= 0.02 * b.norm()


def test_entries_that_cannot_be_sampled():
    """A bias of -inf on whole tiles, first and last, takes those entries out of the distribution."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(12, 4, generator=generator)
    bias = torch.zeros(12)
    bias[:3] = bias[9:] = -torch.inf
    targets = torch.randint(3, 9, (6,), generator=generator)
    expected, _ = exact(hidden @ weight[3:9].T, targets - 3)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    values, _ = logprobs_and_entropy_from_hidden(*leaves, bias, targets, 1.0, entropy=False, tile=(6, 3))
    assert torch.allclose(values.double(), expected, atol=1e-6)
    of_hidden, of_weight = torch.autograd.grad(values.sum(), leaves)
    assert of_hidden.isfinite().all()
    assert (of_weight[:3] == 0).all() and (of_weight[9:] == 0).all()


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_large_logits_in_tiles(columns: int):
    """The maximum moves from tile to tile, up and down, by more than float32's exponent can hold."""
    weight = torch.tensor([[1e4], [1e4 - 1.0], [-1e4], [0.0], [3e4]])
    hidden = torch.tensor([[1.0], [-1.0], [1e-4]])
    targets = torch.tensor([4, 2, 0])
    values = logprobs_and_entropy_from_hidden(hidden, weight, None, targets, 1.0, entropy=True, tile=(2, columns))
    for value, expected in zip(values, exact(hidden.double() @ weight.double().T, targets), strict=True):
        assert torch.allclose(value.double(), expected, rtol=1e-6, atol=1e-6)


MEMORY_SCRIPT = """
import sys, torch
from pathlib import Path
from integrations.arctic_rl.processors.logprobs import *
torch.set_num_threads(1)
kind, N, V, H = sys.argv[1], 2048, 32_000, int(sys.argv[2])
dtype, size = getattr(torch, sys.argv[3]), float(sys.argv[4])
def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
def growth(n):
    hidden = torch.empty(n, H, dtype=dtype).normal_().requires_grad_()
    weight = torch.empty(V, H, dtype=dtype).normal_().requires_grad_()
    targets = torch.randint(0, V, (n,))
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS:")
    if kind == "tiles":
        settings = dict(entropy=True, tile=tile_shape(n, V, size / 1024, narrow_width=H if dtype.itemsize == 2 else 0))
        values, entropy = logprobs_and_entropy_from_hidden(hidden, weight, None, targets, 0.7, **settings)
    else:
        values, entropy = logprobs_and_entropy(hidden @ weight.T, targets, 0.7, entropy=True)
    (values.sum() + entropy.sum()).backward()
    return (kib("VmHWM:") - before) / 1024 - (hidden.nbytes + weight.nbytes) / 2**20
growth(4)
print(growth(N))
"""


def growth_mib(*arguments: object) -> float:
    run = [sys.executable, "-c", MEMORY_SCRIPT, *map(str, arguments)]
    return float(subprocess.run(run, check=True, capture_output=True, text=True, timeout=300).stdout)


@pytest.mark.parametrize(
    ("hidden", "dtype", "size_mib"), [(16, "float32", 64), (16, "float32", 10), (512, "bfloat16", 16)]
)
def test_memory_from_hidden_states_stays_within_the_setting(hidden: int, dtype: str, size_mib: int):
    """2048 tokens x 32,000 entries, forward and backward with entropy, beyond the inputs and their gradients.

    Full float32 logits are 250 MiB, and a float32 copy of the bfloat16 LM head's gradient would be 62 MiB.
    """
    assert growth_mib("tiles", hidden, dtype, size_mib) < 1.5 * size_mib


def test_memory_of_full_logits_shows_in_the_same_measurement():
    assert growth_mib("full", 16, "float32", 0) > 500
