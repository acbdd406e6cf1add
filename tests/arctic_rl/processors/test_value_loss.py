"""Values and the value loss in the pipeline: against SkyRL's loss in float64, however rows are laid out."""

import dataclasses

import pytest
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_critic_loss
from skyrl.train.config.config import AlgorithmConfig

from integrations.arctic_rl.errors import ArcticError, UnsupportedError
from integrations.arctic_rl.processors.pipeline import run_pipeline
from integrations.arctic_rl.zorro.attention import register_shared_attention
from tests.arctic_rl.processors.helpers import FakeEngine, gradients, ragged_batch
from tests.arctic_rl.skyrl_critic import value_model

CLIP = 0.3


def values_batch(num_rows=6, seed=0, **changes):
    batch = ragged_batch(num_rows, seed, **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("values", "returns"):
        batch[name] = torch.randn(batch["advantages"].shape, generator=generator)
    return batch


def wide(batch, name):
    values = batch[name].double()
    return torch.nn.functional.pad(values, (batch["input_ids"].shape[1] - values.shape[1], 0))


def reference(model, batch, value_clip):
    """Loss, gradients and values [B, S] of a float64 copy, row by row without padding."""
    twin = value_model().double()
    twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    twin.set_attn_implementation("eager")
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        places = mask.nonzero().squeeze(1)
        row = torch.zeros(len(ids), dtype=torch.float64)
        if len(places) > 1:
            values = twin(input_ids=ids[places][None], use_cache=False).logits[0, :-1, 0]
            row = row.index_put((places[1:],), values)
        rows.append(row)
    values = torch.stack(rows)
    algorithm = AlgorithmConfig()
    algorithm.value_clip = value_clip
    old, returns, mask = (wide(batch, name) for name in ("values", "returns", "loss_mask"))
    loss, clipfrac = ppo_critic_loss(values, old, returns, algorithm, loss_mask=mask)
    loss.backward()
    return loss.item(), clipfrac, gradients(twin), values.detach()


def run(model, batch, *, value_clip=CLIP, meta=None, **keywords):
    model.zero_grad()
    given = {"temperature": 1.0, "batch_num_tokens": 1.0, "global_batch_size": len(batch["input_ids"]), "dp_size": 1}
    processing = {"loss_fn": "value", "config": {"value_clip": value_clip}, "post": ["compute_values"]}
    keywords = {"max_tokens_per_mb": 40} | keywords
    return run_pipeline(
        FakeEngine(model), (), batch, given | (meta or {}), processing, "cpu", return_tensors=True, **keywords
    )


@pytest.mark.parametrize("value_clip", [CLIP, None])
@pytest.mark.parametrize("layout", [{"pack": False}, {"max_tokens_per_mb": 18}, {"max_tokens_per_mb": 1000}])
def test_loss_values_and_gradients(layout, value_clip):
    model, batch = value_model(), values_batch()
    batch["loss_mask"][2] = 0
    loss, clipfrac, expected, values = reference(model, batch, value_clip)
    result = run(model, batch, value_clip=value_clip, **layout)
    assert result["avg_loss"] == pytest.approx(loss, rel=1e-5)
    there = values != 0
    assert (result["batch"]["values"] - values)[there].abs().max() < 1e-5
    for name, value in gradients(model).items():
        assert (value - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    mask = wide(batch, "loss_mask")
    assert result["metrics"]["values_mean"] == pytest.approx(((values * mask).sum() / mask.sum()).item(), rel=1e-4)
    if value_clip is not None:
        assert result["metrics"]["values_clipfrac"] == pytest.approx(clipfrac)
        assert 0.2 < clipfrac < 1


def test_shared_prompts_change_nothing():
    model, batch = value_model(), values_batch(6, 3)
    width = batch["prompts"].shape[1]
    for name in ("input_ids", "attention_mask", "position_ids", "prompts"):
        if name in batch:
            batch[name][1:4, :width] = batch[name][:1, :width]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    loss, _, expected, values = reference(model, batch, CLIP)
    model.set_attn_implementation(register_shared_attention())
    result = run(model, batch, meta={"zorro_train_enable": True}, max_tokens_per_mb=1000)
    assert result["avg_loss"] == pytest.approx(loss, rel=1e-5)
    responses = batch["response_mask"].bool()
    assert (result["batch"]["values"] - values)[:, width:][responses].abs().max() < 1e-5
    for name, value in gradients(model).items():
        assert (value - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_row_weights_stand_in_for_equal_ones():
    model, batch = value_model(), values_batch(4, 5)
    plain = run(model, batch)
    weighted = run(model, batch | {"row_weights": torch.full((4,), 0.25)})
    assert weighted["avg_loss"] == pytest.approx(plain["avg_loss"], rel=1e-6)
    first = run(model, batch | {"row_weights": torch.tensor([1.0, 0.0, 0.0, 0.0])})
    alone = run(model, {name: value[:1] for name, value in batch.items()})
    assert first["avg_loss"] == pytest.approx(alone["avg_loss"], rel=1e-6)


def test_a_fresh_heads_small_values_do_not_hide_a_wrong_attention(monkeypatch):
    """The comparison before prompts are first shared is in units of the values' own deviation."""
    from integrations.arctic_rl.processors import prompt_sharing

    model, batch = value_model(head_std=1e-6), values_batch(4, 6)
    model.set_attn_implementation(register_shared_attention())
    seen = []
    check_once = prompt_sharing.check_once

    def off_by_a_tenth(module, numbers, vocab_size, device, **more):
        def wrong(rows):
            values = numbers(rows)
            seen.append(values.double().std().item())
            return values * (1.1 if len(seen) == 1 else 1)

        return check_once(module, wrong, vocab_size, device, **more)

    monkeypatch.setattr(prompt_sharing, "check_once", off_by_a_tenth)
    with pytest.raises(ArcticError, match="where prompts are shared"):
        run(model, batch, meta={"zorro_train_enable": True})
    assert min(seen) > 0.3


def test_what_a_value_model_has_not():
    model, batch = value_model(), values_batch(2, 7)
    for name in ("compute_logprobs", "compute_entropy"):
        with pytest.raises(KeyError, match="CriticModel is a value model"):
            run_pipeline(FakeEngine(model), (), batch, {"temperature": 1.0}, {"post": [name]}, "cpu", backward=False)
    with pytest.raises(UnsupportedError, match="needs a model with a plain linear LM head"):
        run(model, batch, meta={"logits_optimization": "memory"})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"returns": None}, ValueError, "the value loss needs 'returns'"),
        ({"values": None}, ValueError, "the value loss needs 'values'"),
        ({"loss_mask": None, "response_mask": None}, ValueError, "the value loss needs 'loss_mask'"),
    ],
)
def test_a_missing_tensor_is_named(changes, error, said):
    batch = {name: value for name, value in (values_batch(2, 8) | changes).items() if value is not None}
    with pytest.raises(error, match=said):
        run(value_model(), batch)


def test_a_negative_clip_is_refused():
    with pytest.raises(UnsupportedError, match=r"value_clip=-0\.1 must be at least 0"):
        run(value_model(), values_batch(2, 9), value_clip=-0.1)


def test_the_settings_are_skyrls():
    from integrations.arctic_rl.processors.value_loss import ValueLossConfig

    ours = {field.name for field in dataclasses.fields(ValueLossConfig)}
    assert ours <= {field.name for field in dataclasses.fields(AlgorithmConfig)}
