"""Groups from tokens alone: whatever the order, the padding and the split into prompt and response."""

import itertools

import pytest
import torch

from integrations.arctic_rl.zorro.groups import RowGroup, find_groups, own_groups
from integrations.arctic_rl.zorro.layout import num_shared_tokens
from tests.arctic_rl.zorro.families import rollouts


def padded(rows: list[list[int]], *, left: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows)) + left
    ids = torch.full((len(rows), width), 77)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        start = left * (number % 2)
        ids[number, start : start + len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[number, start : start + len(row)] = 1
    return ids, mask


def num_tokens(groups: list[RowGroup], rows: list[list[int]]) -> int:
    return sum(num_shared_tokens(group, [len(row) for row in rows]) for group in groups)


def best_saving(rows: list[list[int]], enough: int) -> int:
    """Most tokens that a grouping into sets of any rows can save where a prefix of ``enough`` tokens may be shared."""

    def common(members: tuple[int, ...]) -> int:
        columns = zip(*(rows[i] for i in members), strict=False)
        return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))

    def best(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        first, rest = left[0], left[1:]
        found = 0
        for size in range(len(rest) + 1):
            for others in itertools.combinations(rest, size):
                shared = common((first, *others)) if others else 0
                if others and shared < enough:
                    continue
                remaining = tuple(row for row in rest if row not in others)
                found = max(found, shared * len(others) + best(remaining))
        return found

    return best(tuple(range(len(rows))))


P1, P2 = [1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5]
ROWS = [
    [*P1, 10],
    [*P1, 11, 12, 13, 14],
    [*P1, 15, 16, 17, 18, 19, 20],
    [*P2, 30, 31],
    [*P2, 32, 33, 34],
    [*P1, 40, 41],
    [*P1[:-1], 8, 50, 51, 52],
]
PROMPTS = [7, 7, 7, 5, 5, 7, 7]


@pytest.mark.parametrize("seed", range(5))
def test_equal_prompts_share_and_a_changed_last_token_does_not(seed: int):
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [ROWS[number] for number in order]
    groups = find_groups(*padded(rows, left=3), [PROMPTS[number] for number in order])
    assert sum(map(len, rows)) == 66
    assert num_tokens(groups, rows) == 40
    originals = {frozenset(order[row] for row in group.rows): group.shared for group in groups}
    assert originals == {frozenset({0, 1, 2, 5}): 7, frozenset({3, 4}): 5, frozenset({6}): 10}


def test_a_dropped_row_and_single_rows():
    groups = find_groups(*padded(ROWS[1:]), PROMPTS[1:])
    assert num_tokens(groups, ROWS[1:]) == 39
    alone = [ROWS[0], ROWS[3], ROWS[6]]
    assert find_groups(*padded(alone), [7, 5, 7]) == [RowGroup((0,), 8), RowGroup((1,), 7), RowGroup((2,), 10)]


def test_duplicates_are_shared_whole():
    rows = [ROWS[1], ROWS[3], ROWS[1], ROWS[1][:9]]
    groups = find_groups(*padded(rows), [7, 5, 7, 7])
    assert num_tokens(groups, rows) == 9 + 2 + 2 + len(ROWS[3])
    assert find_groups(*padded([ROWS[1]] * 4), [7] * 4) == [RowGroup((0, 1, 2, 3), 11)]


def test_a_window_that_takes_the_end_of_some_prompts_shares_no_less():
    """SkyRL's forward pass sends a window as wide as the longest response, so prompts seem to end early."""
    groups = find_groups(*padded(ROWS), [len(row) - 6 for row in ROWS])
    assert num_tokens(groups, ROWS) <= 40
    assert {frozenset(group.rows) for group in groups} == {frozenset({0, 1, 2, 5, 6}), frozenset({3, 4})}
    rows = [row for row in ROWS if row is not ROWS[6]]
    assert find_groups(*padded(rows), [len(row) - 6 for row in rows]) == find_groups(*padded(rows), PROMPTS[:6])


def test_steps_of_trajectories_share_the_prompt_they_have_in_common():
    prompt = list(range(20))
    rows, prompts = [], []
    for rollout in range(4):
        turns = [100 + rollout, 110 + rollout]
        rows += [[*prompt, *turns[:1]], [*prompt, *turns[:1], 50, *turns[1:]]]
        prompts += [20, 22]
    groups = find_groups(*padded(rows), prompts)
    assert groups == [RowGroup(tuple(range(8)), 20)]
    later = find_groups(*padded(rows[1::2]), prompts[1::2])
    assert later == [RowGroup((row,), 23) for row in range(4)]
    assert find_groups(*padded(rows[1::2]), prompts[1::2], min_partial=20) == [RowGroup((0, 1, 2, 3), 20)]


def test_a_short_common_beginning_of_other_prompts_is_not_shared():
    rows = [[*range(10), 20 + number, 30] for number in range(3)]
    assert len(find_groups(*padded(rows), [11, 11, 11])) == 3
    assert len(find_groups(*padded(rows))) == 3
    assert find_groups(*padded(rows), min_partial=10) == [RowGroup((0, 1, 2), 10)]


@pytest.mark.parametrize("seed", range(30))
def test_no_grouping_of_any_kind_saves_more(seed: int):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (6,), generator=generator).tolist()
    rows = [torch.randint(0, 2, (length,), generator=generator).tolist() for length in lengths]
    enough = 1 + seed % 3
    groups = find_groups(*padded(rows, left=2), min_partial=enough)
    assert sorted(row for group in groups for row in group.rows) == list(range(6))
    for group in groups:
        assert len({tuple(rows[row][: group.shared]) for row in group.rows}) == 1
        assert len(group.rows) == 1 or group.shared >= enough
    assert sum(map(len, rows)) - num_tokens(groups, rows) == best_saving(rows, enough)


def test_order_and_side_of_the_padding_have_no_part_in_it():
    for side in ("both", "left", "right"):
        batch = rollouts([3, 1, 4, 2], 5, side=side)
        groups = find_groups(batch["input_ids"], batch["attention_mask"], batch["prompt_lengths"])
        order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
        shuffled = find_groups(*(batch[name][order] for name in ("input_ids", "attention_mask", "prompt_lengths")))
        back = {frozenset(order[list(group.rows)].tolist()): group.shared for group in shuffled}
        assert back == {frozenset(group.rows): group.shared for group in groups}


def test_no_rows_and_empty_rows():
    assert find_groups(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4)) == []
    ids = torch.zeros(3, 4, dtype=torch.int64)
    groups = find_groups(ids, torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]), [0, 1, 0])
    assert groups == [RowGroup((0,), 0), RowGroup((1,), 2), RowGroup((2,), 0)]
    assert own_groups([3, 0]) == [RowGroup((0,), 3), RowGroup((1,), 0)]
