"""run_pipeline with shared prompts against the same call without: whatever the loss, mode, budget and rows."""

import itertools

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError, UnsupportedError
from integrations.arctic_rl.processors.attention import register_attention
from integrations.arctic_rl.processors.pipeline import register_loss_fn, register_post_processor, run_pipeline
from integrations.arctic_rl.processors.registry import get_loss_fn, known_loss_fns
from integrations.arctic_rl.server.lora import add_adapters, model_weights
from integrations.arctic_rl.server.specs import LoraSpec
from tests.arctic_rl.processors.helpers import FakeEngine, assert_gradients_agree, gradients, wide
from tests.arctic_rl.zorro.families import (
    family_model,
    random_model,
    reference_of,
    response_mask_of,
    rollouts,
    row_logprobs,
)

MODES = ["none", "compute", "memory"]
AGG_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]
SHARED = {"zorro_train_enable": True}
RESPONSE_TENSORS = ("response_mask", "loss_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights")


def training_batch(counts: list[int], seed: int, *, side: str = "both", holes: bool = True, **kwargs) -> dict:
    """A batch of an update; response tensors [B, R] with pads on both sides, else [B, S]."""
    batch = rollouts(counts, seed, side=side, **kwargs)
    generator = torch.Generator().manual_seed(seed + 1000)
    shape = batch["input_ids"].shape
    response_mask = response_mask_of(batch)
    batch["response_mask"] = response_mask.long()
    batch["loss_mask"] = response_mask.float()
    if holes:
        batch["loss_mask"] *= torch.randint(0, 4, shape, generator=generator) > 0

    def values(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    batch |= {
        "advantages": values(1.0),
        "old_log_probs": -values(1.0).abs() - 4,
        "ref_log_prob": -values(1.0).abs() - 4,
        "rollout_is_weights": values(0.3).exp(),
    }
    del batch["prompt_lengths"]
    if side == "both":
        width = batch["prompts"].shape[1]
        batch |= {name: batch[name][:, width:].contiguous() for name in RESPONSE_TENSORS}
        batch["responses"] = batch["input_ids"][:, width:]
    return batch


def update(model, batch, meta, processing, **kwargs):
    model.zero_grad()
    engine = FakeEngine(model)
    arguments = {"max_tokens_per_mb": 60, "return_tensors": True} | kwargs
    result = run_pipeline(engine, (), batch, {"temperature": 0.7} | meta, processing, "cpu", **arguments)
    return result, engine


def both_ways(model, batch, processing, meta=None, **kwargs):
    """Results, gradients and engines with sharing and without."""
    sharing, alone = (update(model, batch, flag | (meta or {}), processing, **kwargs) for flag in (SHARED, {}))
    return sharing, alone


def assert_same_update(model, batch, processing, meta=None, **kwargs):
    result, engine = update(model, batch, SHARED | (meta or {}), processing, **kwargs)
    ours = gradients(model)
    expected, plain = update(model, batch, meta or {}, processing, **kwargs)
    assert result["avg_loss"] == pytest.approx(expected["avg_loss"], rel=1e-5, abs=1e-6)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)
    for name, gradient in gradients(model).items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    return engine, plain


def tokens_of(engine) -> int:
    return sum(shape[0] * shape[1] for shape in engine.forward_shapes)


@pytest.fixture(scope="module")
def qwen():
    model = family_model("qwen3")
    update(model, training_batch([2, 2], 0), SHARED, {"loss_fn": "sft"})
    return model


@pytest.mark.parametrize("logits", MODES)
@pytest.mark.parametrize("mode", AGG_MODES)
def test_every_aggregation_and_logits_mode(qwen, mode: str, logits: str):
    batch = training_batch([3, 1, 4, 2], 3)
    config = {"loss_agg_mode": mode, "entropy_coeff": 0.02, "use_kl_loss": True, "kl_loss_coef": 0.1}
    meta = {"logits_optimization": logits, "calculate_entropy": True}
    for budget in (60, 1000):
        processing = {"loss_fn": "grpo", "config": config}
        shared, plain = assert_same_update(qwen, batch, processing, meta, max_tokens_per_mb=budget)
        assert tokens_of(shared) < tokens_of(plain)


def test_every_registered_loss(qwen):
    """Of a policy: a value model's is in ``test_value_loss``."""
    batch = training_batch([3, 1, 4, 2], 5)
    batch["rollout_logprobs"] = batch["old_log_probs"] + 0.1 * batch["advantages"]
    ours = [name for name in known_loss_fns() if get_loss_fn(name).__module__.startswith("integrations.")]
    names = set(ours) - {"skyrl_policy_loss", "regularized", "value"}
    assert {"grpo", "sft", "gspo", "cispo", "rollout_is"} <= names
    for name in sorted(names):
        assert_same_update(qwen, batch, {"loss_fn": name})
    terms = {"policy_loss": "sft", "entropy_coeff": 0.1, "use_kl_loss": True}
    assert_same_update(qwen, batch, {"loss_fn": "regularized", "config": terms})


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma", "phi3", "qwen3-moe", "mixtral"])
def test_families(family: str):
    assert_same_update(family_model(family), training_batch([3, 1, 4], 4), {"loss_fn": "grpo"})


@pytest.mark.parametrize("family", ["qwen3", "gemma", "qwen3-moe"])
def test_adapters_on_a_frozen_model(family: str):
    model = family_model(family)
    base = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    add_adapters(model, LoraSpec(4, 8, 0.0, "all-linear", None, "orthogonal"), seed=0)
    update(model, training_batch([2, 2], 0), SHARED, {"loss_fn": "sft"})
    batch = training_batch([3, 1, 4], 4)
    config = {"entropy_coeff": 0.02, "use_kl_loss": True, "kl_loss_coef": 0.1}
    shared, plain = assert_same_update(
        model, batch, {"loss_fn": "grpo", "config": config}, {"calculate_entropy": True}
    )
    assert tokens_of(shared) < tokens_of(plain)
    trained = [name for name, value in model.named_parameters() if value.grad is not None]
    assert trained == [name for name, value in model.named_parameters() if value.requires_grad]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} >= {"q_proj", "o_proj"}
    weights = {weight.name: weight for weight in model_weights(model)}
    assert weights.keys() == base.keys(), "experts, routers and embeddings included"
    for name, weight in weights.items():
        assert id(weight.parameters[0]) == base[name][0] and torch.equal(weight.parameters[0], base[name][1])


@pytest.mark.parametrize("logits", ["none", "compute"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral-windowed"])
def test_soft_capping_and_windows_shorter_than_a_row(family: str, logits: str):
    """Against float64 row by row, and shared against packed."""
    model = family_model(family)
    reference = reference_of(model)
    batch = training_batch([3, 1, 4], 4, holes=False)
    meta = {"temperature": 1.0, "logits_optimization": logits}
    result, _ = update(model, batch, SHARED | meta, {"loss_fn": "sft", "post": ["compute_logprobs"]})
    expected = row_logprobs(reference, batch) * wide(batch, "response_mask")
    assert (result["batch"]["logprobs"] - expected).abs().max() < 1e-5
    (-(expected * wide(batch, "loss_mask")).sum() / wide(batch, "loss_mask").sum()).backward()
    assert_gradients_agree(model, reference)
    assert_same_update(model, batch, {"loss_fn": "sft"}, meta)


@pytest.mark.parametrize("side", ["both", "left", "right"])
@pytest.mark.parametrize("logits", MODES)
def test_forward(qwen, side: str, logits: str):
    """Log-probs and entropy of the responses; zeros at prompts where these are known."""
    batch = training_batch([3, 1, 4, 2], 6, side=side)
    processing = {"post": ["compute_entropy_and_logprobs"]}
    outputs = {}
    for name, flag in (("shared", SHARED), ("plain", {})):
        meta = flag | {"logits_optimization": logits}
        result, _ = update(qwen, batch, meta, processing, backward=False)
        outputs[name] = result["batch"]
    kept = wide(batch, "response_mask").bool() if side == "both" else batch["attention_mask"].bool()
    for key in ("logprobs", "entropy"):
        assert (outputs["shared"][key][kept] - outputs["plain"][key][kept]).abs().max() < 1e-5
        assert (outputs["shared"][key][~kept] == 0).all()


@pytest.mark.parametrize("logits", MODES)
def test_without_sharing_prompts_can_be_left_out_of_the_head(qwen, logits: str):
    batch = training_batch([3, 1, 4, 2], 6)
    only = {"response_logprobs_only": True, "logits_optimization": logits}
    processing = {"post": ["compute_entropy_and_logprobs"]}
    ours, theirs = (
        update(qwen, batch, meta, processing, backward=False)[0]["batch"]
        for meta in (only, {"logits_optimization": logits})
    )
    kept = wide(batch, "response_mask").bool()
    for key in ("logprobs", "entropy"):
        assert (ours[key] - theirs[key] * kept).abs().max() < 1e-6
        assert (ours[key][~kept] == 0).all()
        assert (theirs[key] * ~kept).abs().max() > 0
    config = {"entropy_coeff": 0.02, "use_kl_loss": True}
    result, _ = update(qwen, batch, only, {"loss_fn": "grpo", "config": config})
    grads = gradients(qwen)
    expected, _ = update(qwen, batch, {}, {"loss_fn": "grpo", "config": config})
    assert result["avg_loss"] == pytest.approx(expected["avg_loss"], rel=1e-5, abs=1e-6)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
    assert all((grads[name] - value).norm() <= 1e-5 * value.norm() for name, value in gradients(qwen).items())
    with pytest.raises(UnsupportedError, match=r"loss_mask is set within the prompt.*response_logprobs_only"):
        broad = {name: wide(batch, name).float() for name in RESPONSE_TENSORS} | {"loss_mask": batch["attention_mask"]}
        update(qwen, batch | broad, only, {"loss_fn": "sft"})
    with pytest.raises(UnsupportedError, match=r"response_logprobs_only'\]=1"):
        update(qwen, batch, {"response_logprobs_only": 1}, {"loss_fn": "sft"})


def test_a_window_that_holds_the_end_of_prompts(qwen):
    """As SkyRL's forward pass asks for: the same number of columns of every row, whatever its response's length."""
    batch = training_batch([4, 3, 4], 8)
    prompts, responses = batch["prompts"].shape[1], batch["input_ids"].shape[1] - batch["prompts"].shape[1]
    lengths = batch["attention_mask"].sum(1)
    width = int(lengths.max())
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.int64)
    shift = batch["attention_mask"][:, prompts:].sum(1)
    for row, kept in enumerate(batch["attention_mask"].bool()):
        start = width - responses - int(max(lengths[row] - responses, 0))
        ids[row, start : start + int(lengths[row])] = batch["input_ids"][row][kept]
        mask[row, start : start + int(lengths[row])] = 1
    assert shift.unique().numel() > 2
    window = {"input_ids": ids, "attention_mask": mask, "prompts": ids[:, : width - responses]}
    outputs = []
    for flag in (SHARED, {}):
        result, engine = update(
            qwen, window, flag, {"post": ["compute_logprobs"]}, backward=False, max_tokens_per_mb=900
        )
        outputs.append(result["batch"]["logprobs"][:, -responses:])
        if flag:
            assert tokens_of(engine) < int(mask.sum()) - 40
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5


def test_steps_of_trajectories_share_what_their_group_has_in_common(qwen):
    """Three rollouts of two steps: a later step's prompt is the first one's with its response and an observation."""
    generator = torch.Generator().manual_seed(4)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, 128, (length,), generator=generator).tolist()

    prompt, rows = tokens(30), []
    for rollout in range(3):
        first = prompt + tokens(4 + rollout)
        rows += [(prompt, first[30:]), (first + tokens(5), tokens(3))]
    prompts, responses = (max(len(part) for part in parts) for parts in zip(*rows, strict=True))
    ids, mask = torch.zeros(2, len(rows), prompts + responses, dtype=torch.int64)
    for place, (before, after) in enumerate(rows):
        span = slice(prompts - len(before), prompts + len(after))
        ids[place, span] = torch.tensor(before + after)
        mask[place, span] = 1
    batch = {"input_ids": ids, "attention_mask": mask, "prompts": ids[:, :prompts], "loss_mask": mask[:, prompts:]}
    shared, plain = assert_same_update(qwen, batch, {"loss_fn": "sft"}, max_tokens_per_mb=1000)
    assert tokens_of(plain) - tokens_of(shared) == 5 * 30


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_and_budgets(qwen, seed: int):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (5,), generator=generator).clamp(min=2).tolist()
    batch = training_batch(counts, seed + 50, max_prompt=40, max_response=25)
    longest = int(batch["attention_mask"].sum(1).max())
    for budget in (longest, longest + 17, 4 * longest):
        shared, plain = assert_same_update(qwen, batch, {"loss_fn": "grpo"}, max_tokens_per_mb=budget)
        assert max(shape[1] for shape in shared.forward_shapes) <= budget
        assert len(shared.forward_shapes) <= len(plain.forward_shapes)


@register_post_processor("sharing_test_everything")
def everything(model_outputs, batch, meta, device):
    hidden = model_outputs["hidden_states"]
    logits = model_outputs["lm_head"](hidden)
    return {
        "norms": hidden.norm(dim=-1),
        "of_logits": model_outputs["logits"].logsumexp(-1) if "logits" in model_outputs else hidden.norm(dim=-1),
        "again": logits.logsumexp(-1),
    }


@pytest.mark.parametrize("logits", MODES)
def test_processors_see_hidden_states_of_all_tokens_and_logits_before_scored_ones(qwen, logits: str):
    batch = training_batch([3, 1, 4], 9)
    meta = {"logits_optimization": logits}
    ours, theirs = (
        update(qwen, batch, flag | meta, {"post": ["sharing_test_everything"]}, backward=False)[0]["batch"]
        for flag in (SHARED, {})
    )
    kept = batch["attention_mask"].bool()
    for name in ("norms", "again"):
        assert (ours[name] - theirs[name])[kept].abs().max() < 1e-4
    if logits == "none":
        before = wide(batch, "response_mask").bool().roll(-1, 1)
        assert (ours["of_logits"] - theirs["of_logits"])[before].abs().max() < 1e-4


@register_loss_fn("sharing_test_rows")
def row_coded(model_outputs, batch, meta, config, device):
    mask = batch["loss_mask"].bool()
    seen = meta["seen"]
    for row in range(len(mask)):
        ids = batch["input_ids"][row][mask[row]].unique().tolist()
        advantages = batch["advantages"][row][mask[row]].unique().tolist()
        old = batch["old_log_probs"][row][mask[row]].unique().tolist()
        seen.append((*ids, *advantages, *old))
    return model_outputs["logprobs"].sum() * 0, {}


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 5, 12])
def test_every_tensor_travels_with_its_row(qwen, rows_per_micro_batch: int):
    """4 prompts x 3 rows of very different lengths, shuffled; response ids 100 + i, advantage i, old log-prob -i."""
    number = torch.arange(12)
    lengths = torch.tensor([1, 9, 3, 1, 7, 2, 9, 5, 4, 8, 6, 1])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    prompts = (torch.arange(4).repeat_interleave(3)[:, None] * 7 + torch.arange(6))[order]
    mask = (torch.arange(9) < lengths[:, None]).long()
    batch = {
        "input_ids": torch.cat([prompts, (100 + number)[:, None] * mask], 1),
        "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1),
        "prompts": prompts,
        "responses": (100 + number)[:, None] * mask,
        "response_mask": mask,
        "advantages": number[:, None] * mask.float(),
        "old_log_probs": -number[:, None] * mask.float(),
        "micro_batch_ids": number // rows_per_micro_batch,
    }
    for given in (batch, {name: value for name, value in batch.items() if name != "micro_batch_ids"}):
        seen = _Seen()
        processing = {"loss_fn": "sharing_test_rows", "post": ["compute_logprobs"]}
        meta = SHARED | {"seen": seen}
        budget = 15 * rows_per_micro_batch
        result, engine = update(qwen, given, meta, processing, max_tokens_per_mb=budget)
        assert sorted(seen) == [(100 + i, i, -i) for i in range(12)]
        plain, _ = update(qwen, batch, {}, {"post": ["compute_logprobs"]}, backward=False)
        expected = plain["batch"]["logprobs"] * torch.cat([torch.zeros_like(prompts), mask], 1)
        assert (result["batch"]["logprobs"] - expected).abs().max() < 1e-5
        if "micro_batch_ids" in given:
            assert len(engine.forward_shapes) == -(-12 // rows_per_micro_batch)


class _Seen(list):
    """A list that ``meta`` hands on as it is."""

    def __deepcopy__(self, memo):
        return self


def test_packed_input_is_shared_too(qwen):
    batch = rollouts([3, 1, 4], 10)
    kept = batch["attention_mask"].bool()
    lengths = kept.sum(1)
    packed = {
        "input_ids": batch["input_ids"][kept][None],
        "loss_mask": response_mask_of(batch)[kept][None].float(),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    }
    results = []
    for flag in (SHARED, {}):
        result, engine = update(qwen, packed, flag, {"loss_fn": "sft", "post": ["compute_logprobs"]})
        results.append((result["avg_loss"], result["batch"]["logprobs"], gradients(qwen), tokens_of(engine)))
    (loss, logprobs, grads, tokens), (expected_loss, expected, expected_grads, all_tokens) = results
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert (logprobs - expected).abs().max() < 1e-5
    assert all((grads[name] - value).norm() <= 1e-5 * value.norm() for name, value in expected_grads.items())
    assert tokens <= all_tokens


def test_counts_where_no_mask_is_given(qwen):
    batch = training_batch([3, 2], 11)
    bare = {name: batch[name] for name in ("input_ids", "attention_mask", "prompts", "responses")}

    @register_loss_fn("sharing_test_counts")
    def counts(model_outputs, batch, meta, config, device):
        loss = model_outputs["logprobs"].sum() / meta["batch_num_tokens"]
        return loss, {"tokens": meta["batch_num_tokens"] * 1.0}

    result, _ = update(qwen, bare, SHARED, {"loss_fn": "sharing_test_counts"})
    assert result["metrics"]["tokens"] == float(wide(batch, "response_mask").sum())


def test_gradient_checkpointing_and_loss_only(qwen):
    batch = training_batch([3, 1, 4], 12)
    processing = {"loss_fn": "grpo", "config": {"entropy_coeff": 0.01}}
    expected, _ = update(qwen, batch, {}, processing)
    grads = gradients(qwen)
    model = family_model("qwen3")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for backward in (True, "loss_only"):
        result, _ = update(model, batch, SHARED, processing, backward=backward)
        if backward == "loss_only":
            result["loss_tensor"].backward()
        assert result["avg_loss"] == pytest.approx(expected["avg_loss"], rel=1e-5, abs=1e-6)
        assert all((gradients(model)[name] - value).norm() <= 1e-5 * value.norm() for name, value in grads.items())


def test_masks_on_prompts_are_refused_and_served_without_prompts(qwen):
    batch = training_batch([3, 2], 13)
    broad = batch | {name: wide(batch, name).float() for name in RESPONSE_TENSORS}
    broad["loss_mask"] = batch["attention_mask"].float()
    with pytest.raises(UnsupportedError, match=r"loss_mask is set within the prompt.*zorro_train_enable"):
        update(qwen, broad, SHARED, {"loss_fn": "sft"})
    without = {name: value for name, value in broad.items() if name not in ("prompts", "responses")}
    assert_same_update(qwen, without, {"loss_fn": "sft"})


def test_models_that_cannot_are_refused_or_left_unshared(caplog):
    dropping = family_model("llama", attention_dropout=0.1)
    batch = training_batch([2, 2], 14)
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0.1.*use_zorro=false"):
        update(dropping, batch, SHARED, {"loss_fn": "sft"})
    update(dropping, batch, SHARED, {"post": ["compute_logprobs"]}, backward=False)
    register_attention()
    plain = family_model("llama", "arctic_varlen")
    with pytest.raises(UnsupportedError, match=r"'arctic_varlen' instead of 'arctic_zorro'"):
        update(plain, batch, SHARED, {"loss_fn": "sft"})
    meta = {"zorro_train_enable": "where_possible"}
    for _ in range(2):
        _, engine = update(plain, batch, meta, {"loss_fn": "sft"}, max_tokens_per_mb=900)
        assert tokens_of(engine) == int(batch["attention_mask"].sum())
    assert sum("prompts are not shared" in record.message for record in caplog.records) == 1
    _, engine = update(family_model("llama"), batch, meta, {"loss_fn": "sft"}, max_tokens_per_mb=900)
    assert engine.forward_shapes[-1][1] < int(batch["attention_mask"].sum())


def test_rows_longer_than_exact_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = family_model("llama", rope_parameters=rope, max_position_embeddings=20)
    meta = SHARED | {"zorro_self_check": False}
    with pytest.raises(UnsupportedError, match=r"beyond 20 .*rotary.*use_zorro=false"):
        update(model, training_batch([2, 2], 1, max_prompt=30), meta, {"loss_fn": "sft"})
    update(model, training_batch([2, 2], 1, max_prompt=5), meta, {"loss_fn": "sft"})


@pytest.mark.parametrize("value", [1, "yes", "auto"])
def test_unknown_values_are_refused(qwen, value):
    for name in ("zorro_train_enable", "zorro_self_check"):
        with pytest.raises(UnsupportedError, match=f"meta\\['{name}'\\]="):
            update(qwen, training_batch([2], 1), SHARED | {name: value}, {"loss_fn": "sft"})
    with pytest.raises(UnsupportedError, match="pass pack=True"):
        update(qwen, training_batch([2], 1), SHARED, {"loss_fn": "sft"}, pack=False)


def test_self_check_runs_once_and_stops_a_wrong_model():
    batch = training_batch([2, 2], 15)
    model = family_model("qwen3")
    calls = []
    for _ in range(2):
        _, engine = update(model, batch, SHARED, {"loss_fn": "sft"}, max_tokens_per_mb=900)
        calls.append(len(engine.forward_shapes))
        assert model.training
    assert calls == [5, 1]
    forward_only = family_model("qwen3")
    calls = []
    for backward in (False, False, True, True):
        _, engine = update(forward_only, batch, SHARED, {"loss_fn": "sft"}, backward=backward, max_tokens_per_mb=900)
        calls.append(len(engine.forward_shapes))
    assert calls == [3, 1, 3, 1]
    fresh = family_model("qwen3")
    _, engine = update(fresh, batch, SHARED | {"zorro_self_check": False}, {"loss_fn": "sft"}, max_tokens_per_mb=900)
    assert len(engine.forward_shapes) == 1

    wrong = family_model("qwen3", initializer_range=0.4)
    wrong.model.embed_tokens.register_forward_hook(lambda _module, _inputs, out: out + 0.3 * out.roll(1, dims=1))
    with pytest.raises(ArcticError, match=r"gives other log-probs where prompts are shared"):
        update(wrong, batch, SHARED, {"loss_fn": "sft"})


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_layers_that_drop_the_layout_are_refused_without_a_self_check(layers: list[int]):
    model = family_model("qwen3")
    for number in layers:
        attention = model.model.layers[number].self_attn
        forward = attention.forward
        attention.forward = lambda *args, forward=forward, **kwargs: forward(
            *args, **{name: value for name, value in kwargs.items() if name != "shared_segments"}
        )
    with pytest.raises(UnsupportedError, match=r"Qwen3Attention does not get.*use_zorro=false"):
        update(model, training_batch([2, 2], 15), SHARED | {"zorro_self_check": False}, {"loss_fn": "sft"})


def test_attention_that_never_asks_ours_is_refused_without_a_self_check():
    model = family_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedError, match=r"Qwen3ForCausalLM has attention of its own.*use_zorro=false"):
        update(model, training_batch([2, 2], 15), SHARED | {"zorro_self_check": False}, {"loss_fn": "sft"})


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(
    ("config_name", "settings"),
    [
        ("Qwen2MoeConfig", {"use_sliding_window": True, "max_window_layers": 1, "shared_expert_intermediate_size": 8}),
        ("PhimoeConfig", {"num_local_experts": 4, "router_jitter_noise": 0.0}),
    ],
)
def test_a_window_that_stands_in_the_mask_alone_is_refused(config_name: str, settings: dict, wanted: bool):
    """These families build a mask with a window, and do not hand the window to their attention."""
    settings = settings | {"num_experts_per_tok": 2, "sliding_window": 9}
    model = random_model(config_name, settings | {"initializer_range": 0.4})
    batch = training_batch([2, 2], 4, max_prompt=14)
    assert int(batch["attention_mask"].sum(1).max()) > 9
    meta = {"zorro_train_enable": wanted, "zorro_self_check": False}
    with pytest.raises(UnsupportedError, match=r"sliding window of 9 tokens in its mask only"):
        update(model, batch, meta, {"post": ["compute_logprobs"]}, backward=False)
    short = training_batch([2, 2], 4, max_prompt=3, max_response=5)
    assert int(short["attention_mask"].sum(1).max()) <= 9
    update(model, short, meta, {"post": ["compute_logprobs"]}, backward=False)


def test_a_model_that_draws_at_random_in_training_is_refused_there():
    """Whatever its config says."""
    model = family_model("qwen3")
    model.model.embed_tokens.register_forward_hook(
        lambda module, _inputs, out: out + 0.01 * torch.randn_like(out) if module.training else out
    )
    batch = training_batch([2, 2], 4)
    state = torch.get_rng_state()
    update(model, batch, SHARED, {"post": ["compute_logprobs"]}, backward=False)
    with pytest.raises(ArcticError, match=r"Qwen3ForCausalLM draws at random in training.*use_zorro=false"):
        update(model, batch, SHARED, {"loss_fn": "sft"})
    assert torch.equal(torch.get_rng_state(), state)


def test_same_numbers_in_the_first_update_of_a_batch(qwen):
    """Old log-probs of a forward pass with another window than the update's: the ratio is 1."""
    batch = training_batch([3, 1, 4], 16, holes=False)
    result, _ = update(qwen, batch, SHARED, {"post": ["compute_logprobs"]}, backward=False)
    width = batch["prompts"].shape[1]
    batch["old_log_probs"] = result["batch"]["logprobs"][:, width:]
    for budget in itertools.chain((60, 1000)):
        updated, _ = update(qwen, batch, SHARED, {"loss_fn": "grpo"}, max_tokens_per_mb=budget)
        assert updated["metrics"]["ratio_max_deviation"] < 1e-5
