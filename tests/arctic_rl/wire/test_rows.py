import pytest
import torch

from integrations.arctic_rl.wire.rows import (
    PROMPT_LENGTHS,
    RESPONSE_LENGTHS,
    TOKENS,
    WireError,
    num_bytes,
    pack_outputs,
    pack_rows,
    unpack_outputs,
    unpack_rows,
)
from tests.arctic_rl.wire.batches import assert_equal, skyrl_batch


@pytest.mark.parametrize("seed", range(8))
def test_rows_come_back_as_they_were(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, prompt_len, response_len = torch.randint(1, 20, (3,), generator=generator).tolist()
    batch = skyrl_batch(generator, rows, prompt_len, response_len, pad=seed)
    batch["micro_batch_ids"] = torch.arange(rows)
    batch["entropy"] = torch.rand(batch["input_ids"].shape, generator=generator) * batch["attention_mask"]
    tensors, info = pack_rows(batch)
    assert_equal(unpack_rows(tensors, info), batch)
    assert all(value.ndim == 1 for value in tensors.values())


@pytest.mark.parametrize(
    "change",
    {
        "a mask with a hole": lambda b: b["attention_mask"].__setitem__((0, b["prompts"].shape[1]), 0),
        "two ids in the padding": lambda b: b["input_ids"].__setitem__((0, 0), 7),
        "an id beyond 32 bits": lambda b: b["input_ids"].__setitem__((1, 4), 2**40),
        "values outside the rows": lambda b: b["advantages"].__setitem__((0, -1), 3.0),
        "positions of another kind": lambda b: b["position_ids"].add_(5),
        "a response mask with a hole": lambda b: b["response_mask"].__setitem__((1, 0), 0),
        "a mask of other numbers": lambda b: b["attention_mask"].mul_(2),
        "zeros with a sign": lambda b: b["old_log_probs"].masked_fill_(b["response_mask"] == 1, -0.0),
        "not a number": lambda b: b["old_log_probs"].__setitem__((1, 0), float("nan")),
        "doubles": lambda b: b.update(advantages=b["advantages"].double()),
        "bfloat16": lambda b: b.update(advantages=b["advantages"].bfloat16()),
        "no responses": lambda b: b.pop("responses"),
        "another mask dtype": lambda b: b.update(attention_mask=b["attention_mask"].int()),
        "a mask of booleans": lambda b: b.update(loss_mask=b["loss_mask"].bool()),
    }.items(),
    ids=lambda change: change[0],
)
def test_what_does_not_follow_from_the_rows_travels_as_it_is(change):
    batch = skyrl_batch(torch.Generator().manual_seed(3), 4, 6, 5)
    batch = {name: value.clone() for name, value in batch.items()}
    change[1](batch)
    found = unpack_rows(*pack_rows(batch))
    assert found.keys() == batch.keys()
    for name, value in batch.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].nan_to_num(nan=123), value.nan_to_num(nan=123)), name
        if value.dtype.is_floating_point:
            assert torch.equal(found[name].signbit(), value.signbit()), name


def test_an_update_takes_what_the_loss_reads_and_little_more():
    generator = torch.Generator().manual_seed(0)
    batch = skyrl_batch(generator, 64, 400, 100, vocabulary=150_000)
    lengths, tokens = 2 * 4 * 64, 4 * int(batch["attention_mask"].sum())
    in_responses = int(batch["response_mask"].sum())
    needed = lengths + tokens + in_responses / 8 + 2 * 4 * in_responses
    assert needed <= num_bytes(pack_rows(batch)[0]) <= needed + 8


@pytest.mark.parametrize("prompts_too", [False, True])
def test_outputs_come_back_as_they_were(prompts_too):
    generator = torch.Generator().manual_seed(5)
    batch = skyrl_batch(generator, 7, 9, 6)
    inside = batch["attention_mask"].clone()
    if not prompts_too:
        inside[:, : batch["prompts"].shape[1]] = 0
    outputs = {
        "logprobs": -torch.rand(inside.shape, generator=generator) * inside,
        "scores": torch.rand(7, generator=generator),
        "everywhere": torch.rand(inside.shape, generator=generator),
    }
    tensors, info = pack_outputs(outputs, batch)
    assert_equal(unpack_outputs(tensors, info, batch), outputs)
    assert tensors["logprobs"].shape == (int(inside.sum()),)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, i: t.pop(TOKENS), "missing"),
        (lambda t, i: t.update({TOKENS: t[TOKENS].long()}), "int64"),
        (lambda t, i: t.update({TOKENS: t[TOKENS][1:]}), "the rows need"),
        (lambda t, i: t[PROMPT_LENGTHS].add_(1000), "lengths outside"),
        (lambda t, i: t[PROMPT_LENGTHS].sub_(1000), "lengths outside"),
        (lambda t, i: t.update({RESPONSE_LENGTHS: t[RESPONSE_LENGTHS][:-1]}), "are no batch"),
        (lambda t, i: t.update({RESPONSE_LENGTHS: t[RESPONSE_LENGTHS].float()}), "must be an int32"),
        (lambda t, i: i.update(rows=[2**31 - 1, 2**31 - 1, 0]), "cells"),
        (lambda t, i: i.update(rows=[10**12, 5, 0]), "whole numbers"),
        (lambda t, i: i.update(rows=[-5, 5, 0]), "negative"),
        (lambda t, i: i.update(rows="many"), "whole numbers"),
        (lambda t, i: i.update(forms=None), "names no tensors"),
        (lambda t, i: i["forms"].update(advantages=["pickled", "float32"]), "unknown form"),
        (lambda t, i: i["forms"].update(advantages=["response", "object"]), "unknown form"),
        (lambda t, i: i["forms"].update(advantages=["response", "float64"]), "the rows need"),
        (lambda t, i: i["forms"].update(surprise=["derived", "int64"]), "does not follow"),
        (lambda t, i: i["forms"].update(surprise=["whole", "int64"]), "is not a tensor"),
    ],
)
def test_a_damaged_payload_is_refused(change, reason):
    tensors, info = pack_rows(skyrl_batch(torch.Generator().manual_seed(1), 5, 6, 7))
    change(tensors, info)
    with pytest.raises(WireError, match=reason):
        unpack_rows(tensors, info)
