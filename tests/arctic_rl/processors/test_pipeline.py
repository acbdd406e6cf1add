"""run_pipeline against a row-by-row float64 reference: whatever the packing, the padding or the split."""

import itertools
import shutil

import numpy as np
import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors import model as model_module
from integrations.arctic_rl.processors.metrics import Maximum
from integrations.arctic_rl.processors.pipeline import register_loss_fn, register_post_processor, run_pipeline
from tests.arctic_rl.processors.helpers import (
    FakeEngine,
    assert_gradients_agree,
    gradients,
    ragged_batch,
    reference_logprobs,
    reference_model,
    tiny_model,
    wide,
)

AGG_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]
MODES = ["none", "compute", "memory"]


def forward(model, batch, meta=None, **kwargs):
    arguments = {"backward": False, "return_tensors": True, "max_tokens_per_mb": 40} | kwargs
    processing = {"post": ["compute_entropy_and_logprobs"]}
    return run_pipeline(
        FakeEngine(model), (), batch, {"temperature": 1.0} | (meta or {}), processing, "cpu", **arguments
    )


def train(model, batch, config=None, meta=None, loss_fn="grpo", **kwargs):
    model.zero_grad()
    engine = FakeEngine(model)
    processing = {"loss_fn": loss_fn, "config": config or {}}
    result = run_pipeline(engine, (), batch, {"temperature": 1.0} | (meta or {}), processing, "cpu", **kwargs)
    return result, engine


def reference_grpo(model, batch, *, mode="token-mean", temperature=1.0, entropy_coeff=0.0, kl_coef=0.0, scale=None):
    """(loss, the same of the absolute token terms) in float64, straight from the formulas."""
    logprobs, entropy = reference_logprobs(model, batch, temperature)
    mask = wide(batch, "loss_mask" if "loss_mask" in batch else "response_mask")
    advantages, old, ref = (wide(batch, name) for name in ("advantages", "old_log_probs", "ref_log_prob"))
    log_ratio = torch.clamp(logprobs - old, -20, 20)
    ratio = torch.exp(log_ratio)
    terms = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))
    terms = torch.where(advantages < 0, torch.minimum(terms, -advantages * 3.0), terms)
    terms = terms * wide(batch, "rollout_is_weights")
    d = torch.clamp(ref - logprobs, -20, 20)
    kl = torch.clamp(torch.exp(d) - d - 1, -10, 10)
    terms = (terms - entropy_coeff * entropy + kl_coef * kl) * mask
    sizes = mask.sum(1)
    rows = (sizes > 0).sum().clamp(min=1)
    response_len = batch["input_ids"].shape[1] - (batch["prompts"].shape[1] if "prompts" in batch else 0)

    def reduced(values: torch.Tensor) -> torch.Tensor:
        return {
            "token-mean": lambda: values.sum() / mask.sum().clamp(min=1),
            "seq-mean-token-sum": lambda: values.sum() / rows,
            "seq-mean-token-mean": lambda: (values.sum(1) / sizes.clamp(min=1)).sum() / rows,
            "seq-mean-token-sum-norm": lambda: values.sum() / rows / (scale or response_len),
            "sum": lambda: values.sum(),
        }[mode]()

    return reduced(terms), reduced(terms.detach().abs()).item()


@pytest.fixture(scope="module")
def qwen():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def qwen_reference(qwen):
    return reference_model(qwen)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
@pytest.mark.parametrize("side", ["both", "left", "right"])
def test_logprobs_and_entropy(kind: str, attention: str | None, side: str):
    model = tiny_model(kind, attention)
    batch = ragged_batch(7, 3, side=side)
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(reference_model(model), batch, 0.7)
    for pack, mode in itertools.product([True, False], MODES):
        meta = {"temperature": 0.7, "logits_optimization": mode}
        out = forward(model, batch, meta, pack=pack)["batch"]
        assert out["logprobs"].dtype == torch.float32
        assert (out["logprobs"] - logprobs).abs().max() < 1e-5
        assert (out["entropy"] - entropy).abs().max() < 1e-5
        outside = batch["attention_mask"] == 0
        assert (out["logprobs"][outside] == 0).all()
        assert (out["entropy"][outside] == 0).all()


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("logits", MODES)
def test_loss_and_gradients_whatever_the_split(qwen, qwen_reference, mode: str, logits: str):
    batch = ragged_batch(6, 11)
    config = {"loss_agg_mode": mode, "entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.05}
    qwen_reference.zero_grad()
    loss, scale = reference_grpo(qwen_reference, batch, mode=mode, temperature=0.6, entropy_coeff=0.01, kl_coef=0.05)
    loss.backward()
    metrics = []
    for pack, budget in [(True, 18), (True, 40), (True, 1000), (False, 1)]:
        meta = {"temperature": 0.6, "logits_optimization": logits}
        result, engine = train(qwen, batch, config, meta, pack=pack, max_tokens_per_mb=budget)
        assert set(result) == {"avg_loss", "metrics"}
        assert abs(result["avg_loss"] - loss.item()) <= 1e-5 * scale
        assert_gradients_agree(qwen, qwen_reference)
        metrics.append(result["metrics"])
        if budget == 18:
            assert engine.backward_calls > 3
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("side", ["both", "left", "right"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_gradients_whatever_the_padding(kind: str, side: str):
    model = tiny_model(kind, seed=3)
    reference = reference_model(model)
    batch = ragged_batch(5, 5, side=side)
    loss, scale = reference_grpo(reference, batch)
    loss.backward()
    for pack in (True, False):
        result, _ = train(model, batch, pack=pack, max_tokens_per_mb=25)
        assert abs(result["avg_loss"] - loss.item()) <= 1e-5 * scale
        assert_gradients_agree(model, reference)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_and_budgets(qwen, qwen_reference, seed: int):
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(torch.randint(1, 12, (), generator=generator))
    batch = ragged_batch(num_rows, seed + 100, max_prompt=20, max_response=20)
    longest = int(batch["attention_mask"].sum(1).max())
    qwen_reference.zero_grad()
    loss, scale = reference_grpo(qwen_reference, batch, mode="seq-mean-token-mean")
    loss.backward()
    for budget in (longest, longest + 13, 10 * longest):
        result, _ = train(qwen, batch, {"loss_agg_mode": "seq-mean-token-mean"}, max_tokens_per_mb=budget)
        assert abs(result["avg_loss"] - loss.item()) <= 1e-5 * scale
        assert_gradients_agree(qwen, qwen_reference)


def test_wide_and_narrow_response_tensors_agree(qwen):
    narrow = ragged_batch(5, 2)
    names = ["response_mask", "loss_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"]
    broad = narrow | {name: wide(narrow, name).float() for name in names}
    first, _ = train(qwen, narrow)
    expected = gradients(qwen)
    second, _ = train(qwen, broad)
    assert first == second
    assert all(torch.equal(expected[name], gradient) for name, gradient in gradients(qwen).items())


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_a_row_does_not_see_its_packed_neighbours(attention: str | None):
    model = tiny_model("qwen3", attention)
    batch = ragged_batch(6, 4)
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][2] = (changed["input_ids"][2] + 17) % 128
    one, other = (forward(model, b, max_tokens_per_mb=1000)["batch"]["logprobs"] for b in (batch, changed))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(one[others], other[others])
    assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_not_by_a_single_bit(attention: str | None, dtype: torch.dtype):
    """Rows longer than the blocks of fused kernels, and shorter ones; every logits mode."""
    model = tiny_model("qwen3", attention, hidden_size=64, head_dim=16).to(dtype)
    lengths = [400, 3, 150, 1, 257, 32]
    place = torch.arange(410)
    starts = torch.tensor([5, 407, 0, 200, 100, 10])[:, None]
    mask = ((place >= starts) & (place < starts + torch.tensor(lengths)[:, None])).long()
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(0, 128, mask.shape, generator=generator), "attention_mask": mask}
    for mode in MODES:
        before = forward(model, batch, {"logits_optimization": mode}, max_tokens_per_mb=1000)["batch"]
        for row in (0, 2, 4):
            ids = batch["input_ids"].clone()
            ids[row] = torch.randint(0, 128, ids[row].shape, generator=generator)
            after = forward(model, batch | {"input_ids": ids}, {"logits_optimization": mode}, max_tokens_per_mb=1000)[
                "batch"
            ]
            others = [other for other in range(len(lengths)) if other != row]
            for name in ("logprobs", "entropy"):
                assert torch.equal(before[name][others], after[name][others])
                assert not torch.equal(before[name][row], after[name][row])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex_attention is compiled with g++")
def test_flex_attention_keeps_rows_apart():
    model = tiny_model("qwen3", "flex_attention", head_dim=16)
    batch = ragged_batch(6, 4)
    one = forward(model, batch, max_tokens_per_mb=1000)["batch"]["logprobs"]
    with torch.no_grad():
        expected, _ = reference_logprobs(reference_model(model), batch)
    assert (one - expected).abs().max() < 1e-5
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][2] = (changed["input_ids"][2] + 17) % 128
    other = forward(model, changed, max_tokens_per_mb=1000)["batch"]["logprobs"]
    others = [0, 1, 3, 4, 5]
    assert torch.equal(one[others], other[others])
    assert not torch.equal(one[2], other[2])


def test_padding_content_has_no_effect(qwen):
    batch = ragged_batch(6, 4)
    outside = batch["attention_mask"] == 0
    response_outside = outside[:, batch["prompts"].shape[1] :]
    changed = batch | {"input_ids": batch["input_ids"].masked_fill(outside, 1)}
    for name, junk in [("advantages", 2.0), ("old_log_probs", float("nan")), ("rollout_is_weights", 1e30)]:
        changed[name] = batch[name].masked_fill(response_outside, junk)
    one, _ = train(qwen, batch)
    expected = gradients(qwen)
    other, _ = train(qwen, changed)
    assert one == other
    assert all(torch.equal(expected[name], gradient) for name, gradient in gradients(qwen).items())


def test_rows_come_back_in_order_with_their_own_tensors(qwen):
    """Row-coded values stay together in the loss, every row is seen once, and results are in the order sent."""
    lengths = [1, 9, 3, 1, 7, 2, 9, 5, 4, 8, 6, 1]
    rows = torch.arange(12)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    prompts = torch.full((12, 1), 3)
    batch = {
        "input_ids": torch.cat([prompts, (100 + rows)[:, None] * mask], dim=1),
        "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=1),
        "prompts": prompts,
        "responses": (100 + rows)[:, None] * mask,
        "response_mask": mask,
        "advantages": rows[:, None] * mask.float(),
        "old_log_probs": -rows[:, None] * mask.float(),
        "names": [f"row {i}" for i in range(12)],
        "shared": torch.arange(5),
    }
    seen = []

    def check(model_outputs, batch, meta, config, device):
        for i, mask in enumerate(batch["loss_mask"].bool()):
            number = meta["number"][i].item()
            assert set(batch["input_ids"][i][mask].tolist()) == {100 + number}
            assert set(batch["advantages"][i][mask].tolist()) == {float(number)}
            assert set(batch["old_log_probs"][i][mask].tolist()) == {-float(number)}
            assert batch["names"][i] == f"row {number}"
            seen.append(number)
        assert batch["shared"].tolist() == [0, 1, 2, 3, 4]
        return model_outputs["logprobs"].sum(), {}

    register_loss_fn("row_coded_check")(check)
    register_post_processor("row_numbers")(
        lambda model_outputs, batch, meta, device: {"number": meta["number"], "name": batch["names"]}
    )
    meta = {"temperature": 1.0, "number": rows}
    for budget in (10, 12, 23, 1000):
        seen.clear()
        processing = {"loss_fn": "row_coded_check", "post": ["row_numbers"]}
        result = run_pipeline(FakeEngine(qwen), (), batch, meta, processing, "cpu", max_tokens_per_mb=budget)
        assert sorted(seen) == list(range(12))
        assert result["batch"]["number"].tolist() == list(range(12))
        assert result["batch"]["name"] == batch["names"]


def test_packed_input_is_run_as_it_is(qwen, qwen_reference):
    """cu_seqlens in batch or meta: no second packing, sequence means per segment, outputs [1, T]."""
    batch = ragged_batch(5, 8, response_width=False)
    kept = batch["attention_mask"].bool()
    lengths = kept.sum(1)
    borders = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = {name: value[kept][None] for name, value in batch.items() if name != "attention_mask"}
    config = {"loss_agg_mode": "seq-mean-token-mean"}
    loss, scale = reference_grpo(qwen_reference, batch, mode="seq-mean-token-mean")
    qwen_reference.zero_grad()
    loss.backward()
    for where in ("batch", "meta"):
        given = packed | ({"cu_seqlens": borders} if where == "batch" else {})
        meta = {"cu_seqlens": borders} if where == "meta" else {}
        result, engine = train(qwen, given, config, meta, max_tokens_per_mb=10)
        assert engine.forward_shapes == [(1, int(lengths.sum()))]
        assert abs(result["avg_loss"] - loss.item()) <= 1e-5 * scale
        assert_gradients_agree(qwen, qwen_reference)
        logprobs = forward(qwen, given, meta)["batch"]["logprobs"]
        with torch.no_grad():
            expected, _ = reference_logprobs(qwen_reference, batch)
        assert logprobs.shape == (1, int(lengths.sum()))
        assert (logprobs[0] - expected[kept]).abs().max() < 1e-5


def test_packed_input_may_have_empty_segments(qwen):
    ids = torch.arange(9)[None]
    plain = forward(qwen, {"input_ids": ids, "cu_seqlens": torch.tensor([0, 4, 9])})["batch"]["logprobs"]
    with_empty = forward(qwen, {"input_ids": ids, "cu_seqlens": torch.tensor([0, 0, 4, 4, 9, 9])})["batch"]["logprobs"]
    assert torch.equal(with_empty, plain)
    nothing = forward(qwen, {"input_ids": ids[:, :0], "cu_seqlens": torch.tensor([0, 0])})["batch"]["logprobs"]
    assert nothing.shape == (1, 0)


@pytest.mark.parametrize("mode", AGG_MODES)
def test_edge_rows_equal_the_reference(qwen, qwen_reference, mode: str):
    """Fully masked rows, one-token responses, zero advantages, extreme ratios: finite, and the reference's."""
    batch = ragged_batch(7, 21, holes=False)
    batch["loss_mask"][1] = 0
    batch["advantages"][2] = 0
    batch["old_log_probs"][3] = -90.0
    batch["old_log_probs"][4] = 60.0
    batch["advantages"][5] = -batch["advantages"][5].abs()
    batch["old_log_probs"][5] = -90.0
    qwen_reference.zero_grad()
    loss, scale = reference_grpo(qwen_reference, batch, mode=mode)
    loss.backward()
    for pack, budget in [(True, 20), (False, 1)]:
        result, _ = train(qwen, batch, {"loss_agg_mode": mode}, pack=pack, max_tokens_per_mb=budget)
        assert np.isfinite(result["avg_loss"])
        assert abs(result["avg_loss"] - loss.item()) <= 1e-5 * scale
        assert_gradients_agree(qwen, qwen_reference)


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("pack", [True, False])
def test_an_all_masked_batch_gives_zero(qwen, mode: str, pack: bool):
    batch = ragged_batch(4, 9)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    result, _ = train(qwen, batch, {"loss_agg_mode": mode, "entropy_coeff": 0.1, "use_kl_loss": True}, pack=pack)
    assert result["avg_loss"] == 0
    assert all(value == 0 for value in result["metrics"].values())
    assert all((gradient == 0).all() for gradient in gradients(qwen).values())


def test_rows_without_tokens_and_batches_of_them(qwen):
    batch = ragged_batch(4, 9, holes=False)
    for name in ("attention_mask", "loss_mask", "response_mask"):
        batch[name][2] = 0
    result, _ = train(qwen, batch, max_tokens_per_mb=20)
    expected = gradients(qwen)
    rest = {name: value[[0, 1, 3]] for name, value in batch.items()}
    other, _ = train(qwen, rest, max_tokens_per_mb=20)
    assert result["avg_loss"] == pytest.approx(other["avg_loss"], rel=1e-6)
    for name, gradient in gradients(qwen).items():
        assert torch.allclose(expected[name], gradient, rtol=1e-5, atol=1e-8)
    for name in ("attention_mask", "loss_mask", "response_mask"):
        batch[name][:] = 0
    result, _ = train(qwen, batch)
    assert result["avg_loss"] == 0
    out = forward(qwen, batch)["batch"]
    assert out["logprobs"].shape == batch["input_ids"].shape
    assert (out["logprobs"] == 0).all()


def test_gradient_checkpointing_changes_nothing(qwen_reference):
    model = tiny_model("qwen3")
    batch = ragged_batch(6, 11)
    qwen_reference.zero_grad()
    loss, _ = reference_grpo(qwen_reference, batch)
    loss.backward()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        train(model, batch, max_tokens_per_mb=25)
        assert_gradients_agree(model, qwen_reference)


def test_the_engines_accumulation_setting_has_no_effect(qwen):
    """The same rows as 1, 2 and many micro-batches, through an engine that divides by its accumulation steps."""
    batch = ragged_batch(8, 1)
    norms = []
    for budget, gas in [(1000, 1), (90, 4), (20, 8)]:
        qwen.zero_grad()
        engine = FakeEngine(qwen, gradient_accumulation_steps=gas)
        run_pipeline(engine, (), batch, {"temperature": 1.0}, {"loss_fn": "grpo"}, "cpu", max_tokens_per_mb=budget)
        norms.append(torch.stack([g.norm() for g in gradients(qwen).values()]).norm())
    assert torch.stack(norms).allclose(norms[0], rtol=1e-5)


def test_an_engine_that_does_not_know_scale_wrt_gas(qwen):
    class Plain(FakeEngine):
        def backward(self, loss):
            loss.backward()

    qwen.zero_grad()
    batch = ragged_batch(4, 1)
    run_pipeline(Plain(qwen), (), batch, {"temperature": 1.0}, {"loss_fn": "grpo"}, "cpu")
    expected = gradients(qwen)
    train(qwen, batch)
    assert all(torch.equal(expected[name], gradient) for name, gradient in gradients(qwen).items())


def test_the_last_micro_batch_is_the_boundary_of_a_managed_engine(qwen):
    class Managed(FakeEngine):
        boundaries: list[bool] = []  # noqa: RUF012

        def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
            self.boundaries.append(is_boundary)

    class Unmanaged(Managed):
        def managed_gradient_accumulation(self) -> bool:
            return False

        def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
            raise AssertionError("DeepSpeed refuses this when it does not manage accumulation")

    batch = ragged_batch(5, 1)
    arguments = (batch, {"temperature": 1.0}, {"loss_fn": "grpo"}, "cpu")
    engine = Managed(qwen)
    run_pipeline(engine, (), *arguments, max_tokens_per_mb=20)
    assert engine.boundaries == [False] * (len(engine.boundaries) - 1) + [True]
    assert len(engine.boundaries) > 1
    run_pipeline(Unmanaged(qwen), (), *arguments)


def test_loss_only_returns_a_tensor_to_differentiate(qwen):
    batch = ragged_batch(5, 6)
    result, _ = train(qwen, batch, max_tokens_per_mb=20)
    expected = gradients(qwen)
    other, engine = train(qwen, batch, max_tokens_per_mb=20, backward="loss_only")
    assert engine.backward_calls == 0
    assert set(other) == {"avg_loss", "metrics", "loss_tensor"}
    assert other["loss_tensor"].requires_grad
    assert other["loss_tensor"].item() == pytest.approx(result["avg_loss"], rel=1e-6)
    assert other["avg_loss"] == result["avg_loss"]
    other["loss_tensor"].backward()
    for name, gradient in gradients(qwen).items():
        assert torch.allclose(expected[name], gradient, rtol=1e-5, atol=1e-8)


def test_results_hold_what_was_asked_for(qwen):
    batch = ragged_batch(3, 6)
    meta = {"temperature": 1.0}
    engine = FakeEngine(qwen)
    result = run_pipeline(engine, (), batch, meta, {"post": ["compute_logprobs"]}, "cpu", backward=False)
    assert set(result) == {"batch", "metrics"}
    assert result["metrics"] == {}
    assert set(result["batch"]) == {"logprobs"}
    assert isinstance(result["batch"]["logprobs"], np.ndarray)
    assert not qwen.training
    nothing = run_pipeline(engine, (), batch, {}, {"post": ["identity"]}, "cpu", backward=False)
    assert nothing == {"batch": {}, "metrics": {}}
    both = run_pipeline(engine, (), batch, meta, {"post": ["compute_entropy"], "loss_fn": "grpo"}, "cpu")
    assert set(both) == {"batch", "metrics", "avg_loss"}
    assert set(both["batch"]) == {"entropy"}
    assert all(type(value) is float for value in both["metrics"].values())
    assert qwen.training
    evaluated = run_pipeline(engine, (), batch, meta, {"loss_fn": "grpo"}, "cpu", backward=False)
    assert evaluated["avg_loss"] == pytest.approx(both["avg_loss"], rel=1e-6)


def test_batch_and_meta_are_not_changed(qwen):
    batch = ragged_batch(5, 6)
    batch["names"] = list("abcde")
    meta = {"temperature": 0.9, "weights": torch.ones(5), "actor_config": {"clip_ratio": 0.1}, "shared": torch.ones(3)}
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in batch.items()}

    @register_loss_fn("in_place_test_loss")
    def rude(model_outputs, batch, meta, config, device):
        batch["advantages"].zero_()
        meta["weights"].zero_()
        meta["shared"].zero_()
        meta["actor_config"]["clip_ratio"] = 9
        meta["temperature"] = config["x"] = 7
        batch.pop("loss_mask")
        return model_outputs["logprobs"].sum(), {}

    config = {"x": 1}
    run_pipeline(FakeEngine(qwen), (), batch, meta, {"loss_fn": "in_place_test_loss", "config": config}, "cpu")
    assert batch.keys() == copies.keys()
    for name, value in copies.items():
        same = torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
        assert same, name
    assert meta.keys() == {"temperature", "weights", "actor_config", "shared"}
    assert meta["weights"].tolist() == [1.0] * 5
    assert meta["shared"].tolist() == [1.0] * 3
    assert meta["actor_config"] == {"clip_ratio": 0.1}
    assert meta["temperature"] == 0.9
    assert config == {"x": 1}


def test_numpy_batches_and_numbers(qwen):
    batch = ragged_batch(4, 6)
    arrays = {name: value.numpy() for name, value in batch.items()}
    num_tokens = float(batch["loss_mask"].sum())
    counts = [
        {"batch_num_tokens": num_tokens, "global_batch_size": 4, "dp_size": 1},
        {"batch_num_tokens": torch.tensor(num_tokens), "global_batch_size": np.int64(4), "dp_size": np.int32(1)},
    ]
    assert train(qwen, batch, meta=counts[0])[0] == train(qwen, arrays, meta=counts[1])[0]


def test_positional_arguments_reach_the_engine(qwen):
    class Recorder(FakeEngine):
        def __call__(self, *args, **inputs):
            assert args == ("x",)
            return super().__call__(**inputs)

    processing = {"post": ["compute_logprobs"]}
    run_pipeline(Recorder(qwen), ("x",), ragged_batch(2, 1), {"temperature": 1.0}, processing, "cpu", backward=False)


def test_entropy_costs_nothing_unless_asked_for(qwen):
    batch = ragged_batch(5, 6)
    assert "entropy" not in train(qwen, batch)[0]["metrics"]
    without = gradients(qwen)
    with_metric, _ = train(qwen, batch, meta={"calculate_entropy": True, "actor_config": {"entropy_coeff": 0.0}})
    assert with_metric["metrics"]["entropy"] > 0
    assert all(torch.equal(without[name], gradient) for name, gradient in gradients(qwen).items())

    @register_loss_fn("entropy_grad_test_loss")
    def loss(model_outputs, batch, meta, config, device):
        return model_outputs["logprobs"].sum() + model_outputs["entropy"].sum(), {
            "carries": float(model_outputs["entropy"].requires_grad)
        }

    for coefficient, carries in [(0.0, 0.0), (0.1, 1.0)]:
        meta = {"calculate_entropy": True, "actor_config": {"entropy_coeff": coefficient}}
        for mode in MODES:
            result, _ = train(qwen, batch, meta=meta | {"logits_optimization": mode}, loss_fn="entropy_grad_test_loss")
            assert result["metrics"]["carries"] == carries
    for mode in MODES:
        result, _ = train(qwen, batch, meta={"logits_optimization": mode}, loss_fn="entropy_grad_test_loss")
        assert result["metrics"]["carries"] == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_entropy_is_part_of_the_one_pass(qwen, monkeypatch, mode: str):
    """One reading of the logits a micro-batch, with entropy exactly where something asks for it."""
    asked = []
    for name in ("logprobs_and_entropy", "logprobs_and_entropy_chunked", "logprobs_and_entropy_from_hidden"):
        function = getattr(model_module, name)

        def spy(*args, function=function, **kwargs):
            asked.append(kwargs["entropy"])
            return function(*args, **kwargs)

        monkeypatch.setattr(model_module, name, spy)
    batch = ragged_batch(5, 6)
    cases = [
        ({}, {}, False),
        ({"entropy_coeff": 0.0}, {}, False),
        ({"entropy_coeff": 0.0}, {"calculate_entropy": False}, False),
        ({"entropy_coeff": 0.0}, {"calculate_entropy": True}, True),
        ({"entropy_coeff": 0.01}, {}, True),
    ]
    for config, meta, wanted in cases:
        asked.clear()
        result, engine = train(qwen, batch, config, meta | {"logits_optimization": mode}, max_tokens_per_mb=20)
        assert asked == [wanted] * engine.backward_calls
        assert ("entropy" in result["metrics"]) == wanted
    for post, wanted in [
        ("compute_logprobs", False),
        ("compute_entropy", True),
        ("compute_entropy_and_logprobs", True),
    ]:
        asked.clear()
        meta = {"temperature": 1.0, "logits_optimization": mode}
        run_pipeline(FakeEngine(qwen), (), batch, meta, {"post": [post]}, "cpu", backward=False)
        assert asked == [wanted]


@pytest.mark.parametrize("mode", MODES)
def test_hidden_states_and_head_are_there(qwen, mode: str):
    batch = ragged_batch(4, 3)
    names = []

    @register_post_processor(f"hidden_test_{mode}")
    def post(model_outputs, batch, meta, device):
        logits = model_outputs["lm_head"](model_outputs["hidden_states"])
        logp = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
        names.append("logits" in model_outputs)
        return {"by_hand": torch.nn.functional.pad(logp, (1, 0))}

    processing = {"post": ["compute_logprobs", f"hidden_test_{mode}"]}
    meta = {"temperature": 1.0, "logits_optimization": mode}
    out = run_pipeline(
        FakeEngine(qwen), (), batch, meta, processing, "cpu", backward=False, return_tensors=True, max_tokens_per_mb=30
    )["batch"]
    has_logprob = (out["logprobs"] != 0) & (batch["attention_mask"] == 1)
    assert (out["by_hand"] - out["logprobs"])[has_logprob].abs().max() < 1e-5
    assert (out["by_hand"][batch["attention_mask"] == 0] == 0).all()
    assert set(names) == {mode == "none"}


def test_what_post_processors_may_not_return(qwen):
    refused = {
        "returns_logits": lambda o, b, m, d: {"logits": o["logits"]},
        "returns_renamed_logits": lambda o, b, m, d: {"scores": o["logits"]},
        "returns_everything": lambda o, b, m, d: o,
        "returns_a_copy_of_everything": lambda o, b, m, d: dict(o),
        "returns_a_number": lambda o, b, m, d: {"x": 1.0},
        "returns_a_scalar": lambda o, b, m, d: {"x": o["logprobs"].sum()},
        "returns_packed": lambda o, b, m, d: {"x": o["logprobs"][:1]},
        "returns_nothing": lambda o, b, m, d: None,
    }
    batch = ragged_batch(3, 3)
    meta = {"temperature": 1.0, "logits_optimization": "none"}
    for name, function in refused.items():
        register_post_processor(name)(function)
        with pytest.raises(UnsupportedError, match=f"post-processor '{name}' returned"):
            run_pipeline(FakeEngine(qwen), (), batch, meta, {"post": [name]}, "cpu", backward=False)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda o: o["logprobs"].sum(), r"must return \(loss, metrics\)"),
        (lambda o: (o["logprobs"], {}), "must return one number as a tensor"),
        (lambda o: (torch.zeros(()), {}), "without gradient"),
        (lambda o: (o["logprobs"].sum(), {"x": "high"}), "metric 'x' is 'high'"),
        (lambda o: (o["logprobs"].sum(), {"x": torch.ones(3)}), "metric 'x' is"),
    ],
)
def test_what_losses_may_not_return(qwen, returned, message: str):
    function = lambda o, b, m, c, d: returned(o)  # noqa: E731
    function.__code__ = function.__code__.replace(co_qualname=f"refused {message}")
    register_loss_fn(f"refused {message}")(function)
    with pytest.raises(ValueError, match=message):
        train(qwen, ragged_batch(3, 3), loss_fn=f"refused {message}")


def test_metrics_of_all_kinds(qwen):
    """Numbers weigh as many tokens as their micro-batch has; pairs, maxima and the loss do not depend on the split."""

    @register_loss_fn("metric_kinds_test_loss")
    def loss(model_outputs, batch, meta, config, device):
        mask = batch["loss_mask"]
        assert meta["batch_num_tokens"] == config["tokens"]
        return model_outputs["logprobs"].sum(), {
            "number": (batch["advantages"] * mask).sum() / mask.sum().clamp(min=1),
            "pair": (batch["advantages"].sum().item(), batch["advantages"].numel()),
            "largest": Maximum(batch["advantages"].max()),
        }

    batch = ragged_batch(9, 3)
    batch["advantages"] = batch["advantages"] * (batch["response_mask"] > 0)
    mask = batch["loss_mask"].double()
    expected = {
        "number": float((batch["advantages"] * mask).sum() / mask.sum()),
        "pair": float(batch["advantages"].sum() / (9 * batch["input_ids"].shape[1])),
        "largest": float(batch["advantages"].max()),
    }
    for budget in (20, 50, 1000):
        config = {"tokens": float(mask.sum())}
        result, _ = train(qwen, batch, config, loss_fn="metric_kinds_test_loss", max_tokens_per_mb=budget)
        assert result["metrics"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "meta", "kwargs", "message"),
    [
        ({"attention_mask": None}, {}, {}, "no 'attention_mask'"),
        ({"input_ids": None}, {}, {}, "no 'input_ids'"),
        ({}, {"temperature": None}, {}, r"meta\['temperature'\] is required"),
        ({}, {"temperature": 0.0}, {}, "must be a number above 0"),
        ({}, {}, {"max_tokens_per_mb": 5}, r"row \d has \d+ tokens, more than max_tokens_per_mb=5"),
        ({}, {"batch_num_tokens": 4}, {}, "batch_num_tokens without dp_size"),
        ({}, {"global_batch_size": 4}, {}, "global_batch_size without dp_size"),
        ({}, {"dp_size": 2}, {}, "dp_size without a count"),
        ({}, {"dp_size": 0, "batch_num_tokens": 3}, {}, "must be at least 1"),
        ({}, {"dp_size": 1, "batch_num_tokens": "3"}, {}, "must be a finite number"),
        ({}, {"temperature": True}, {}, "must be a finite number"),
        ({"prompts": torch.ones(4, 99)}, {}, {}, "must be .B, P. with P <= S"),
        ({"loss_mask": torch.ones(4, 3)}, {}, {}, "loss_mask .4, 3. must be"),
        ({"old_log_probs": None}, {}, {}, "the grpo loss needs 'old_log_probs'"),
        ({}, {"logits_optimisation": "none"}, {}, "did you mean 'logits_optimization'"),
        ({}, {"logits_optimization": "memmory"}, {}, "did you mean 'memory'"),
        ({}, {"logits_optimization_peak_mem_size_in_gib": 0}, {}, "must be a number above 0"),
        ({}, {"logits_optimization_peak_mem_size_in_gib": float("inf")}, {}, "must be a number above 0"),
        ({}, {"logits_optimization_peak_mem_size_in_gib": True}, {}, "must be a number above 0"),
        ({}, {"logits_compute_in_fp32": "yes"}, {}, "must be True or False"),
        ({}, {"zorro_train_enable": True}, {}, "zorro_train_enable"),
        ({}, {}, {"backward": "yes"}, "backward='yes'"),
    ],
)
def test_contradictions_are_refused(qwen, change: dict, meta: dict, kwargs: dict, message: str):
    batch = ragged_batch(4, 3) | change
    with pytest.raises(ValueError, match=message):
        train(qwen, batch, meta=meta, **kwargs)


def test_masks_and_positions_that_contradict_are_refused(qwen):
    batch = ragged_batch(4, 3)
    holes = batch | {"attention_mask": batch["attention_mask"].clone()}
    holes["attention_mask"][1, batch["prompts"].shape[1]] = 0
    with pytest.raises(ValueError, match="row 1 has a hole"):
        train(qwen, holes)
    with pytest.raises(ValueError, match="loss_mask is set outside attention_mask in row"):
        train(qwen, batch | {"loss_mask": torch.ones_like(batch["loss_mask"])})
    positions = torch.arange(batch["input_ids"].shape[1]).expand(4, -1)
    with pytest.raises(ValueError, match="position_ids must count"):
        train(qwen, batch | {"position_ids": positions})
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert train(qwen, batch | {"position_ids": positions})[0] == train(qwen, batch)[0]


@pytest.mark.parametrize(
    ("processing", "message"),
    [
        ({}, r"needs processing\['loss_fn'\]"),
        ({"loss_fn": "grop"}, "did you mean 'grpo'"),
        ({"loss_fn": "grpo", "posts": []}, "did you mean 'post'"),
        ({"loss_fn": "grpo", "post": "compute_logprobs"}, "must be a list"),
        ({"loss_fn": "grpo", "post": ["compute_logprob"]}, "did you mean 'compute_logprobs'"),
    ],
)
def test_unknown_processing_is_refused(qwen, processing: dict, message: str):
    with pytest.raises(UnsupportedError, match=message):
        run_pipeline(FakeEngine(qwen), (), ragged_batch(2, 1), {"temperature": 1.0}, processing, "cpu")


class TestGivenMicroBatches:
    """``micro_batch_ids`` in place of the token budget."""

    def test_rows_go_together_as_said(self, qwen):
        batch = ragged_batch(6, 3)
        seen = []

        @register_loss_fn("notes_its_rows")
        def notes_its_rows(model_outputs, batch, meta, config, device):
            seen.append((batch["micro_batch_ids"].tolist(), batch["number"].tolist()))
            return model_outputs["logprobs"].sum(), {}

        extra = {"micro_batch_ids": torch.tensor([1, 0, 1, 2, 0, 1]), "number": torch.arange(6)}
        _, engine = train(qwen, batch | extra, loss_fn="notes_its_rows", max_tokens_per_mb=1)
        assert seen == [([0, 0], [1, 4]), ([1, 1, 1], [0, 2, 5]), ([2], [3])]
        assert engine.backward_calls == 3

    def test_the_result_is_that_of_any_other_split(self, qwen):
        batch = ragged_batch(6, 3)
        whole, _ = train(qwen, batch)
        expected = gradients(qwen)
        split, _ = train(qwen, batch | {"micro_batch_ids": torch.tensor([2, 2, 0, 1, 0, 1])})
        assert split["avg_loss"] == pytest.approx(whole["avg_loss"], rel=1e-5)
        for name, values in expected.items():
            assert (gradients(qwen)[name] - values).norm() <= 1e-5 * values.norm(), name

    def test_a_rank_may_have_any_of_the_mini_batchs_numbers(self, qwen):
        batch = ragged_batch(3, 3)
        expected, _ = train(qwen, batch | {"micro_batch_ids": torch.tensor([1, 0, 1])})
        result, engine = train(qwen, batch | {"micro_batch_ids": torch.tensor([7, 4, 7])})
        assert (result["avg_loss"], engine.backward_calls) == (expected["avg_loss"], 2)

    @pytest.mark.parametrize("ids", [[-1, 0, 1], [0.0, 1.0, 2.0], [0, 1], [[0, 1, 2]]])
    def test_ids_that_do_not_count_are_refused(self, qwen, ids):
        with pytest.raises(ValueError, match="micro_batch_ids"):
            train(qwen, ragged_batch(3, 3) | {"micro_batch_ids": torch.tensor(ids)})
