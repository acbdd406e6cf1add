"""Every token of every row has its place, once where it is shared, and comes back from there."""

import pytest
import torch

from integrations.arctic_rl.zorro.groups import RowGroup, find_groups, own_groups
from integrations.arctic_rl.zorro.layout import num_shared_tokens, share_rows
from tests.arctic_rl.zorro.families import rollouts


def visible_tokens(segments) -> list[set[int]]:
    """For every token, the tokens that the two passes let it see."""
    seen = [set() for _ in range(segments.num_tokens)]
    for first, stop, keys, _, _ in segments.own.problems:
        for token in range(first, stop):
            seen[token] |= set(range(keys, token + 1))
    over_prefix = segments.cross
    for first, stop, keys, keys_end, ahead in () if over_prefix is None else over_prefix.problems:
        assert ahead == keys_end - keys
        for token in range(first, stop):
            seen[segments.suffix_start + token] |= set(range(keys, keys_end))
    return seen


def test_drawn_example():
    ids = torch.tensor([[7, 8, 9, 1, 0], [0, 4, 5, 1, 0], [7, 8, 9, 1, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    rows = share_rows(ids, mask, [RowGroup((0, 2), 3), RowGroup((1,), 3)], prompt_width=3)
    assert rows.input_ids.tolist() == [[7, 8, 9, 4, 5, 1, 1, 1, 3]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 3, 4]]
    assert rows.segments.borders == (0, 3, 6, 7, 9)
    assert rows.segments.prefix_borders == (0, 3)
    assert rows.segments.suffix_borders == (6, 9)
    assert rows.segments.suffix_prefix == (0, 0)
    assert rows.segments.longest_row == 5
    assert rows.scored.tolist() == [5, 6, 7, 8]
    assert rows.predictors.tolist() == [4, 2, 2, 7]
    assert rows.targets.tolist() == [1, 1, 1, 3]
    assert rows.to_rows(torch.tensor([10, 20, 30, 40])).tolist() == [
        [0, 0, 0, 20, 0],
        [0, 0, 0, 10, 0],
        [0, 0, 0, 30, 40],
    ]
    assert rows.to_predictors(torch.tensor([10, 20, 30, 40])).tolist() == [
        [0, 0, 20, 0, 0],
        [0, 0, 10, 0, 0],
        [0, 0, 30, 40, 0],
    ]


@pytest.mark.parametrize("side", ["both", "left", "right"])
@pytest.mark.parametrize("seed", range(4))
def test_a_token_sees_exactly_its_row_up_to_itself(seed: int, side: str):
    batch = rollouts([4, 1, 3, 2], seed, side=side)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    groups = find_groups(ids, mask, batch["prompt_lengths"])
    rows = share_rows(ids, mask, groups)
    seen = visible_tokens(rows.segments)
    lengths = mask.sum(1).tolist()
    assert rows.input_ids.shape[1] == sum(num_shared_tokens(group, lengths) for group in groups) < sum(lengths)
    for number, kept in enumerate(mask.bool()):
        places = rows.place[number][kept].tolist()
        assert rows.position_ids[0, places].tolist() == list(range(len(places)))
        assert rows.input_ids[0, places].tolist() == ids[number][kept].tolist()
        for position, place in enumerate(places):
            assert seen[place] == set(places[: position + 1])
    assert torch.equal(rows.expand(rows.input_ids[0]), ids * mask)


@pytest.mark.parametrize("seed", range(4))
def test_scored_tokens_and_what_predicts_them(seed: int):
    batch = rollouts([4, 1, 3, 2], seed)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    width = batch["prompts"].shape[1]
    rows = share_rows(ids, mask, find_groups(ids, mask, batch["prompt_lengths"]), width)
    response = (mask.bool()) & (torch.arange(mask.shape[1]) >= width)
    assert torch.equal(rows.scored_mask, response)
    assert torch.equal(rows.to_rows(rows.targets), ids * response)
    before = torch.where(response, rows.place.roll(1, 1), 0)
    assert torch.equal(rows.to_rows(rows.predictors), before)
    assert len(rows.scored) == len(set(rows.scored.tolist())) <= int(response.sum())
    everything = share_rows(ids, mask, own_groups(mask.sum(1).tolist()))
    assert len(everything.scored) == int(mask.sum()) - len(mask)


def test_gradients_of_shared_tokens_add_up():
    ids = torch.tensor([[7, 8, 1], [7, 8, 2], [7, 8, 3]])
    rows = share_rows(ids, torch.ones_like(ids), [RowGroup((0, 1, 2), 2)])
    values = torch.zeros(5, requires_grad=True)
    rows.expand(values).sum().backward()
    assert values.grad.tolist() == [3, 3, 1, 1, 1]
    scored = torch.zeros(len(rows.scored), requires_grad=True)
    rows.to_rows(scored).sum().backward()
    assert scored.grad.tolist() == [3, 1, 1, 1]


def test_rows_without_tokens_get_filler():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for groups in ([RowGroup((0, 1), 0)], own_groups([0, 0])):
        rows = share_rows(ids, torch.zeros_like(ids), groups)
        assert rows.input_ids.shape == (1, 2)
        assert rows.segments.borders == (0, 2)
        assert len(rows.scored) == 0
        assert torch.equal(rows.to_rows(torch.zeros(0)), torch.zeros(2, 3))
    mixed = share_rows(ids, torch.tensor([[0, 0, 0], [1, 1, 0]]), [RowGroup((0,), 0), RowGroup((1,), 2)])
    assert mixed.input_ids.shape == (1, 2)


def test_groups_that_do_not_fit_the_rows_are_refused():
    ids, mask = torch.tensor([[1, 2, 3], [1, 5, 6]]), torch.ones(2, 3)
    with pytest.raises(ValueError, match="differ within their shared prefix"):
        share_rows(ids, mask, [RowGroup((0, 1), 2)])
    with pytest.raises(ValueError, match="each of the 2 rows once"):
        share_rows(ids, mask, [RowGroup((0,), 3)])
    with pytest.raises(ValueError, match="row 0 has 3 tokens"):
        share_rows(ids, mask, [RowGroup((0, 1), 4)])
