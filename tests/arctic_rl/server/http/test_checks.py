"""Batches of every wrong kind at the server's own checks, which no error but a refusal may leave."""

import random

import pytest
import torch

from integrations.arctic_rl.backends.contract import batch
from integrations.arctic_rl.client import make_meta
from integrations.arctic_rl.server.http.checks import check_batch
from integrations.arctic_rl.server.http.errors import HttpError, status_of

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
OPTIONAL = ("ref_log_prob", "rollout_is_weights", "rollout_logprobs", "micro_batch_ids", "row_weights", "values")


def mutated(rng: random.Random) -> tuple[str, dict[str, torch.Tensor]]:
    """A good batch with one tensor of another dtype, shape or content; what was done is said beside it."""
    rows = batch()
    name = rng.choice([*rows, *OPTIONAL, "surprise"])
    shape = rng.choice(
        [
            [],
            [0],
            [4],
            [0, 9],
            [4, 0],
            [3, 9],
            [4, 4],
            [4, 9],
            [4, 5],
            [4, 8],
            [1, 9],
            [4, 9, 1],
            list(rows["input_ids"].shape),
        ]
    )
    dtype = rng.choice(DTYPES)
    value = (torch.rand(shape, generator=torch.Generator().manual_seed(rng.randrange(99))) * 200 - 60).to(dtype)
    if rng.random() < 0.2:
        value = torch.zeros_like(value)
    if rng.random() < 0.1 and name in rows:
        del rows[name]
        return f"no {name}", rows
    return f"{name} of {dtype} {shape}", rows | {name: value}


@pytest.mark.parametrize("updates", [False, True])
def test_a_wrong_tensor_is_refused_and_never_an_error_of_the_server(updates):
    rng, refused = random.Random(7), 0
    for _ in range(1500):
        what, rows = mutated(rng)
        scalars = make_meta(batch(), dp_size=1)
        try:
            check_batch(rows, scalars, updates=updates)
        except Exception as error:
            assert status_of(error) == 400 and str(error), (what, error)
            refused += 1
    assert refused > 1000


def test_tensors_of_a_batch_are_as_high_as_each_other():
    rows = batch()
    for name, value, reason in [
        ("attention_mask", rows["attention_mask"][:0], "attention_mask has 0 rows, input_ids 4"),
        ("advantages", rows["advantages"][:3], "advantages has 3 rows, input_ids 4"),
        ("attention_mask", rows["attention_mask"][:, 0], "attention_mask has 1 axes; it needs 2"),
        ("input_ids", rows["input_ids"].flatten(), "input_ids has 1 axes; it needs 2"),
    ]:
        with pytest.raises(HttpError, match=reason):
            check_batch(rows | {name: value}, make_meta(rows, dp_size=1), updates=True)
