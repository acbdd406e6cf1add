import pytest
import torch

from integrations.arctic_rl.backends.sharding import join_rows, split_rows


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
