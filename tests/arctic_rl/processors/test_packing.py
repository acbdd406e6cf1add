"""The plan of micro-batches, and rows to packed rows and back."""

import math

import numpy as np
import pytest
import torch

from integrations.arctic_rl.processors.packing import pack_rows, plan_micro_batches, row_lengths, rows_of_packed


def test_stated_rows():
    ids = torch.tensor([[9, 1, 2, 3, 9], [4, 5, 9, 9, 9], [9, 9, 9, 9, 9], [9, 9, 9, 9, 6]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    packed = pack_rows(ids, mask)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_length == 3
    unpacked = packed.unpack(packed.input_ids[0])
    assert unpacked.tolist() == (ids * mask).tolist()
    assert packed.pack(ids).tolist() == [1, 2, 3, 4, 5, 6]
    assert row_lengths(mask).tolist() == [3, 2, 0, 1]


def test_rows_of_packed_is_the_way_back():
    packed = rows_of_packed(torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([0, 3, 5, 6]))
    assert packed.unpack(packed.input_ids[0]).tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    for borders in ([0, 3, 5], [1, 6], [0, 5, 3, 6], [6]):
        with pytest.raises(ValueError, match="cu_seqlens must grow from 0"):
            rows_of_packed(torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor(borders))
    with pytest.raises(ValueError, match=r"must be \[1, T\]"):
        rows_of_packed(torch.ones(2, 3), torch.tensor([0, 6]))


@pytest.mark.parametrize("seed", range(20))
def test_random_rows_there_and_back(seed: int):
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = 5, 11
    start = torch.randint(0, width, (num_rows, 1), generator=generator)
    stop = torch.randint(0, width + 1, (num_rows, 1), generator=generator)
    column = torch.arange(width)
    mask = (column >= start) & (column < stop)
    values = torch.randn(num_rows, width, 3, generator=generator, requires_grad=True)
    packed = pack_rows(torch.arange(num_rows * width).view(num_rows, width), mask)
    back = packed.unpack(packed.pack(values))
    assert torch.equal(back, values * mask[:, :, None])
    back.sum().backward()
    assert torch.equal(values.grad, mask[:, :, None].expand_as(values).float())
    assert row_lengths(mask).tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 1, 0, 1, 0]], [[1, 1, 1, 1], [1, 0, 0, 1]]])
def test_holes_are_refused(mask: list):
    with pytest.raises(ValueError, match=f"row {len(mask) - 1} has a hole"):
        row_lengths(torch.tensor(mask))


def lower_bound(lengths: np.ndarray, budget: int) -> int:
    return math.ceil(int(lengths.sum()) / budget)


@pytest.mark.parametrize("seed", range(30))
def test_plans_hold_every_row_once_and_keep_the_budget(seed: int):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 50, size=generator.integers(1, 80))
    budget = int(generator.integers(50, 120))
    groups = plan_micro_batches(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(lengths[group].sum() <= budget for group in groups)
    assert all(group == sorted(group) for group in groups)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_rows", [500, 1500])
def test_plans_are_close_to_the_lower_bound(seed: int, num_rows: int):
    """Log-normal lengths, none above a quarter of the budget: within 2 %, or one."""
    generator = np.random.default_rng(seed)
    budget = 8192
    lengths = np.clip(generator.lognormal(6.0, 0.8, num_rows).astype(int), 1, budget // 4)
    bound = lower_bound(lengths, budget)
    assert len(plan_micro_batches(lengths, budget)) <= max(bound + 1, 1.02 * bound)


def test_plan_edges():
    assert plan_micro_batches([], 10) == []
    assert plan_micro_batches([0, 0], 10) == [[0, 1]]
    assert plan_micro_batches([10], 10) == [[0]]
    assert plan_micro_batches([3, 10, 7], 10) == [[1], [0, 2]]
    with pytest.raises(ValueError, match="row 1 has 11 tokens, more than max_tokens_per_mb=10; set it to at least 11"):
        plan_micro_batches([3, 11], 10)
    for budget in (0, -3, 8.0, None, True, "8"):
        with pytest.raises(ValueError, match=f"max_tokens_per_mb={budget!r} must be a whole number"):
            plan_micro_batches([], budget)
    assert plan_micro_batches([3, 4], np.int64(7)) == [[0, 1]]
