"""Models of every family with shared prompts against themselves row by row: log-probs and every gradient."""

import copy

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.attention import register_attention, varlen_kwargs
from integrations.arctic_rl.processors.packing import pack_rows
from integrations.arctic_rl.zorro.attention import SHARED_ATTENTION
from integrations.arctic_rl.zorro.groups import find_groups
from integrations.arctic_rl.zorro.layout import SharedRows, share_rows
from integrations.arctic_rl.zorro.plan import local_groups, plan_shared_micro_batches
from tests.arctic_rl.zorro.families import (
    FAMILIES,
    assert_same_gradients,
    family_model,
    reference_of,
    response_mask_of,
    rollouts,
    row_logprobs,
)


def laid_out(batch: dict) -> SharedRows:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return share_rows(ids, mask, find_groups(ids, mask, batch["prompt_lengths"]))


def shared_logprobs(model: torch.nn.Module, rows: SharedRows) -> torch.Tensor:
    logits = model(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        shared_segments=rows.segments,
        logits_to_keep=rows.predictors,
        use_cache=False,
    ).logits[0]
    return rows.to_rows(logits.float().log_softmax(-1).gather(1, rows.targets[:, None]).squeeze(1))


def packed_logprobs(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The unshared way: rows end to end."""
    rows = pack_rows(batch["input_ids"], batch["attention_mask"])
    logits = model(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        use_cache=False,
        **varlen_kwargs(rows.cu_seqlens, rows.max_length),
    ).logits[0, :-1]
    values = logits.float().log_softmax(-1).gather(1, rows.input_ids[0, 1:, None]).squeeze(1)
    continues = rows.position_ids[0, 1:] != 0
    return rows.unpack(torch.cat([values.new_zeros(1), values.where(continues, 0)]))


def weights_for(batch: dict, seed: int = 7) -> torch.Tensor:
    """Random weights of the response tokens, [B, S]."""
    weights = torch.randn(batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    return weights * response_mask_of(batch)


@pytest.mark.parametrize("side", ["both", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_each_row_alone(family: str, side: str):
    model = family_model(family)
    reference = reference_of(model)
    batch = rollouts([3, 1, 4], 11, side=side)
    rows = laid_out(batch)
    weights = weights_for(batch)
    logprobs, expected = shared_logprobs(model, rows), row_logprobs(reference, batch)
    assert (logprobs - expected).abs().max() < 1e-5
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma2", "gemma3", "mistral-windowed")])
def test_equals_packed_rows_without_sharing(family: str):
    model = family_model(family)
    unshared = copy.deepcopy(model)
    register_attention()
    unshared.set_attn_implementation("arctic_varlen")
    batch = rollouts([3, 1, 4, 2], 12)
    weights = weights_for(batch)
    logprobs, expected = shared_logprobs(model, laid_out(batch)), packed_logprobs(unshared, batch)
    assert (logprobs - expected).abs().max() < 1e-5
    assert (packed_logprobs(model, batch) - expected).abs().max() == 0
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_same_gradients(model, unshared)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral-windowed"])
def test_packed_rows_with_windows_and_soft_capping(family: str):
    """Without sharing: what the attention of packed rows refuses is done here."""
    model = family_model(family)
    reference = reference_of(model)
    batch = rollouts([3, 1, 4], 12)
    weights = weights_for(batch)
    logprobs, expected = packed_logprobs(model, batch), row_logprobs(reference, batch)
    assert (logprobs - expected).abs().max() < 1e-5
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mixtral"])
def test_gradient_checkpointing(family: str, reentrant: bool):
    model = family_model(family).train()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = rollouts([3, 1, 4], 13)
    for each in (model, plain):
        (shared_logprobs(each, laid_out(batch)) * weights_for(batch)).sum().backward()
    assert_same_gradients(model, plain, 1e-6)


@pytest.mark.parametrize("budget", [34, 40, 1000])
def test_groups_over_several_micro_batches(budget: int):
    """Of equal and of different sizes, one after the other on the same model."""
    model = family_model("qwen3")
    reference = reference_of(model)
    batch = rollouts([4, 1, 3, 5], 14)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    weights = weights_for(batch)
    groups = find_groups(ids, mask, batch["prompt_lengths"])
    plan = plan_shared_micro_batches(groups, mask.sum(1).tolist(), budget)
    assert (len(plan) > 1) == (budget < 1000)
    logprobs = torch.zeros(ids.shape)
    for parts in plan:
        numbers, local = local_groups(parts)
        rows = share_rows(ids[numbers], mask[numbers], local)
        assert rows.input_ids.shape[1] <= budget
        part = shared_logprobs(model, rows)
        (part * weights[numbers]).sum().backward()
        logprobs[numbers] = part.detach()
    expected = row_logprobs(reference, batch)
    (expected * weights).sum().backward()
    assert (logprobs - expected).abs().max() < 1e-5
    assert_same_gradients(model, reference)


def test_bfloat16_is_no_further_from_the_truth():
    """Distance to float64 of log-probs (root mean square over tokens) and gradients (over tensors, relative to their
    norm), pooled over families and batches, against that of unshared bfloat16: one batch alone scatters by 5%."""
    squares = {"shared": [], "unshared": []}
    gradient_squares = {"shared": [], "unshared": []}
    for family in ("qwen3", "llama", "gemma", "phi3"):
        model = family_model(family)
        reference = reference_of(model)
        halves = {name: copy.deepcopy(model).bfloat16() for name in squares}
        for seed in range(8):
            batch = rollouts([3, 4, 5], seed, max_prompt=40)
            weights, kept = weights_for(batch), response_mask_of(batch)
            expected = row_logprobs(reference, batch)
            logprobs = {
                "shared": shared_logprobs(halves["shared"], laid_out(batch)),
                "unshared": packed_logprobs(halves["unshared"], batch),
            }
            reference.zero_grad()
            (expected * weights).sum().backward()
            for name, half in halves.items():
                half.zero_grad()
                (logprobs[name] * weights).sum().backward()
                squares[name].append((logprobs[name] - expected).detach()[kept].square())
                for ours, exact in zip(half.parameters(), reference.parameters(), strict=True):
                    error = (ours.grad.double() - exact.grad).norm() / exact.grad.norm()
                    gradient_squares[name].append(error.square()[None])
    for pooled in (squares, gradient_squares):
        assert torch.cat(pooled["shared"]).mean() <= torch.cat(pooled["unshared"]).mean()


def test_what_it_cannot_do_is_refused_by_name():
    model = family_model("llama")
    rows = laid_out(rollouts([2, 2], 1))
    inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "shared_segments": rows.segments}
    with pytest.raises(UnsupportedError, match=r"dropout=0.5.*use_zorro=false"):
        family_model("llama", attention_dropout=0.5).train()(**inputs, use_cache=False)
    with pytest.raises(UnsupportedError, match=r"position_bias=.*use_zorro=false"):
        model(**inputs, use_cache=False, position_bias=3)
    with pytest.raises(UnsupportedError, match=r"is_causal=False.*use_zorro=false"):
        model(**inputs, use_cache=False, is_causal=False)
    with pytest.raises(ValueError, match=r"lay out .* tokens without a mask"):
        model(**inputs | {"input_ids": rows.input_ids[:, :-1], "position_ids": rows.position_ids[:, :-1]})


def test_without_a_layout_it_is_the_packed_attention():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert SHARED_ATTENTION in ALL_MASK_ATTENTION_FUNCTIONS
    model = family_model("llama")
    batch = rollouts([2, 2], 1, side="left")
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        alone = model(input_ids=batch["input_ids"][:1][batch["attention_mask"][:1].bool()][None]).logits
    assert torch.allclose(logits[0][batch["attention_mask"][0].bool()], alone[0], atol=1e-5)
