import pytest
import torch

from integrations.arctic_rl.backends.sharding import join_rows, plan_ranks, split_rows
from integrations.arctic_rl.zorro.cost import CostModel

COST = CostModel(per_token=880.8e6, per_pair=0.229e6, per_scored=311.2e6)


def coded_batch(rows):
    index = torch.arange(rows)
    return {"ids": 100 + index[:, None].expand(rows, 3), "advantages": index.float(), "old": -index.double()}


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_every_tensor_travels_with_its_row_and_comes_back_in_order(parts):
    batch = coded_batch(12)
    shards = split_rows(batch, parts)
    for shard in shards:
        assert len({value.shape[0] for value in shard.values()}) == 1
        assert torch.equal(shard["ids"][:, 0].double() - 100, shard["advantages"].double())
        assert torch.equal(shard["old"], -shard["advantages"].double())
    joined = join_rows(shards)
    assert all(torch.equal(joined[key], batch[key]) for key in batch)


def test_rows_that_do_not_divide_and_unequal_tensors_are_refused():
    with pytest.raises(ValueError, match="12 rows cannot be shared equally by 5"):
        split_rows(coded_batch(12), 5)
    with pytest.raises(ValueError, match="differ in their number of rows"):
        split_rows({"a": torch.zeros(2), "b": torch.zeros(3)}, 1)


def rollouts_of(prompts: int, rollouts: int, seed: int) -> dict[str, torch.Tensor]:
    """Shuffled rows of very different lengths; id 100 + i in row i's response, advantage i, old log-prob -i."""
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * rollouts
    number = torch.arange(rows)
    prompt_of = torch.randperm(rows, generator=generator) % prompts
    lengths = torch.randint(1, 400, (rows, 1), generator=generator)
    mask = (torch.arange(400) < lengths).long()
    prompt_ids = prompt_of[:, None] * 1000 + torch.arange(300)
    response_ids = (100 + number)[:, None] * mask
    return {
        "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
        "attention_mask": torch.cat([torch.ones_like(prompt_ids), mask], dim=1),
        "prompts": prompt_ids,
        "responses": response_ids,
        "response_mask": mask,
        "advantages": number.float()[:, None] * mask,
        "old_log_probs": -number.double()[:, None] * mask,
    }


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_balanced_ranks_keep_every_tensor_with_its_row_and_give_back_the_order(parts: int, shared: bool):
    batch = rollouts_of(4, 3, 1)
    plan = plan_ranks(batch, parts, COST, shared=shared)
    assert sorted(row for rows in plan.rows for row in rows) == list(range(12))
    assert parts == 1 or plan.rows != [list(rows) for rows in torch.arange(12).tensor_split(parts)]
    shards = plan.split(batch)
    for shard in shards:
        for ids, advantages, old in zip(
            *(shard[key] for key in ("responses", "advantages", "old_log_probs")), strict=True
        ):
            assert ids[0] - 100 == advantages[0] == -old[0]
    joined = plan.join(shards)
    assert all(torch.equal(joined[key], batch[key]) for key in batch)


def test_ranks_have_about_as_much_to_compute_and_keep_groups_together():
    batch = rollouts_of(32, 4, 2)
    for shared in (True, False):
        plan = plan_ranks(batch, 4, COST, shared=shared)
        response_tokens = batch["attention_mask"].sum(1) - 300
        prompts = [{int(prompt[0]) for prompt in batch["prompts"][rows]} for rows in plan.rows]
        prompt_tokens = [
            300 * (len(firsts) if shared else len(rows)) for firsts, rows in zip(prompts, plan.rows, strict=True)
        ]
        tokens = [int(response_tokens[rows].sum()) + more for rows, more in zip(plan.rows, prompt_tokens, strict=True)]
        assert max(tokens) <= 1.1 * sum(tokens) / 4
        if shared:
            assert sum(map(len, prompts)) <= 32 + 6


def test_micro_batches_go_to_ranks_whole_and_equal_in_number():
    batch = rollouts_of(4, 3, 1) | {"micro_batch_ids": torch.arange(12) // 2}
    plan = plan_ranks(batch, 2, COST, shared=True)
    assert plan.rows == [list(range(6)), list(range(6, 12))]
    mixed = torch.tensor([2, 0, 1, 2, 0, 1, 3, 2, 4, 4, 3, 0])
    assert plan_ranks(batch | {"micro_batch_ids": mixed}, 2, COST, shared=True).rows == [
        [0, 1, 2, 3, 4, 5, 7, 11],
        [6, 8, 9, 10],
    ]
    few = plan_ranks(batch | {"micro_batch_ids": mixed.clamp(max=1)}, 4, COST, shared=True)
    assert few.rows == [[1, 4, 11], [0, 2, 3, 5, 6, 7, 8, 9, 10], [], []]
    assert [len(shard["advantages"]) for shard in few.split(batch)] == [3, 9, 0, 0]
    with pytest.raises(ValueError, match="differ in their number of rows"):
        plan_ranks(batch | {"advantages": torch.zeros(2)}, 2, COST, shared=True)
    with pytest.raises(ValueError, match="12 rows cannot be shared by 13 ranks"):
        plan_ranks(rollouts_of(4, 3, 1), 13, COST, shared=True)
