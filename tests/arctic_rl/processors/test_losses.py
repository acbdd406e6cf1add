"""The grpo and sft losses on fixtures with known answers, and the effect of every setting."""

import dataclasses
import math
import pickle

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.aggregation import LOSS_AGG_MODES
from integrations.arctic_rl.processors.kl import KL_TYPES, kl_estimate
from integrations.arctic_rl.processors.losses import GrpoConfig, grpo_loss, sft_loss
from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.helpers import FakeEngine


class TableModel(torch.nn.Module):
    """The same two logits at every position."""

    def __init__(self, first: float = 2.0):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([first, 0.0]))

    def forward(self, input_ids: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        return {"logits": self.logits.expand(*input_ids.shape, 2)}


def response_batch(tokens: list[list[int]], advantages: list[float], **extra: list[list[float]]) -> dict:
    """One-token prompts and the given responses, left-aligned; old log-probs are the table model's."""
    width = max(len(row) for row in tokens)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in tokens])
    responses = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
    prompts = torch.zeros(len(tokens), 1, dtype=torch.long)
    batch = {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=1),
        "prompts": prompts,
        "response_mask": mask,
        "advantages": torch.tensor(advantages)[:, None].expand(-1, width).clone(),
        "old_log_probs": torch.log_softmax(TableModel().logits.detach(), -1)[responses],
    }
    return batch | {name: torch.tensor(values) for name, values in extra.items()}


def run(batch, config=None, meta=None, model=None, budget=1000, loss_fn="grpo"):
    model = TableModel() if model is None else model
    model.zero_grad()
    processing = {"loss_fn": loss_fn, "config": config or {}, "post": ["compute_logprobs"]}
    meta = {"temperature": 1.0} | (meta or {})
    result = run_pipeline(
        FakeEngine(model), (), batch, meta, processing, "cpu", max_tokens_per_mb=budget, return_tensors=True
    )
    return result, model.logits.grad.clone()


TWO_SEQUENCES = ([[0], [0, 1, 0]], [1.0, -1.0])


def test_token_mean_does_not_depend_on_the_split():
    """A: 1 token, advantage +1; B: 3 tokens, advantage -1: (-1 + 3) / 4, never the mean of -1 and 1."""
    expected = None
    for order in ([0, 1], [1, 0]):
        tokens, advantages = ([TWO_SEQUENCES[k][i] for i in order] for k in (0, 1))
        for budget in (1000, 4):
            result, gradient = run(response_batch(tokens, advantages), budget=budget)
            assert result["avg_loss"] == pytest.approx(0.5, abs=1e-6)
            expected = gradient if expected is None else expected
            assert torch.allclose(gradient, expected, rtol=1e-5)


def test_each_rank_has_its_share_of_the_loss():
    """One sequence a rank: -0.5 and 1.5, whose mean is the loss and whose gradients' mean is the gradient."""
    _, whole = run(response_batch(*TWO_SEQUENCES))
    counts = {"batch_num_tokens": 4, "global_batch_size": 2, "dp_size": 2}
    losses, shares = [], []
    for rank in (0, 1):
        batch = response_batch(TWO_SEQUENCES[0][rank : rank + 1], TWO_SEQUENCES[1][rank : rank + 1])
        result, gradient = run(batch, meta=counts)
        losses.append(result["avg_loss"])
        shares.append(gradient)
    assert losses == pytest.approx([-0.5, 1.5], abs=1e-6)
    assert torch.allclose(torch.stack(shares).mean(0), whole, rtol=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ranks_shares_average_to_the_whole_in_every_mode(mode: str):
    config = {"loss_agg_mode": mode} | ({"loss_scale_factor": 7.0} if mode == "seq-mean-token-sum-norm" else {})
    whole, expected = run(response_batch(*TWO_SEQUENCES), config)
    counts = {"batch_num_tokens": 4, "global_batch_size": 2, "dp_size": 2}
    parts = [
        run(response_batch(TWO_SEQUENCES[0][rank : rank + 1], TWO_SEQUENCES[1][rank : rank + 1]), config, counts)
        for rank in (0, 1)
    ]
    assert sum(result["avg_loss"] for result, _ in parts) / 2 == pytest.approx(whole["avg_loss"], rel=1e-6)
    assert torch.allclose(torch.stack([gradient for _, gradient in parts]).mean(0), expected, rtol=1e-5)


@pytest.mark.parametrize("counts", [{"batch_num_tokens": 4}, {"global_batch_size": 2}, {"dp_size": 2}])
def test_counts_and_dp_size_come_together(counts: dict):
    with pytest.raises(ValueError, match="without"):
        run(response_batch(*TWO_SEQUENCES), meta=counts)


@pytest.mark.parametrize("name", ["batch_num_tokens", "global_batch_size"])
def test_a_count_of_0_is_taken_for_a_mask_of_zeros_alone(name: str):
    """It would be a loss that is a multiple of the right one: its sum."""
    counts = {"batch_num_tokens": 4, "global_batch_size": 2, "dp_size": 1, name: 0}
    with pytest.raises(ValueError, match=rf"meta\['{name}'\]=0, but the loss mask of this call has tokens in 2 rows"):
        run(response_batch(*TWO_SEQUENCES), meta=counts)
    nothing = response_batch(*TWO_SEQUENCES)
    nothing["loss_mask"] = torch.zeros_like(nothing["response_mask"], dtype=torch.float32)
    result, gradient = run(nothing, meta=counts)
    assert result["avg_loss"] == 0 and not gradient.any()


def test_loss_mask_wins_over_response_mask():
    """Two observation tokens in a response of five: three tokens count, the others have no gradient."""
    batch = response_batch([[0, 0, 1, 1, 0]], [1.0], loss_mask=[[1.0, 1.0, 0.0, 0.0, 1.0]])

    class PerPosition(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([2.0, 0.0]).repeat(6, 1))

        def forward(self, input_ids, position_ids, attention_mask=None):
            return {"logits": self.logits[position_ids]}

    result, gradient = run(batch, model=PerPosition())
    assert result["avg_loss"] == pytest.approx(-1.0, abs=1e-6)
    assert (gradient[[2, 3, 5]] == 0).all()
    assert (gradient[[0, 1, 4]] != 0).all()


def test_a_masked_group_changes_nothing():
    """Zero-variance filtering by mask equals leaving the group out: loss, gradient, metrics."""
    tokens, advantages = [[0, 1], [1, 1, 0], [0], [1, 0, 1, 1]], [0.5, -1.0, 3.0, -2.0]
    masks = [[1.0, 1.0, 0, 0], [1.0, 1.0, 1.0, 0], [0.0] * 4, [0.0] * 4]
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum"):
        config = {"loss_agg_mode": mode}
        filtered, gradient = run(response_batch(tokens, advantages, loss_mask=masks), config)
        alone, expected = run(response_batch(tokens[:2], advantages[:2]), config)
        assert filtered["avg_loss"] == pytest.approx(alone["avg_loss"], rel=1e-6)
        assert filtered["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
        assert torch.allclose(gradient, expected, rtol=1e-6)


def test_truncated_rows_leave_numerator_and_denominator():
    """Row A: 4 tokens, advantage +1; row B: 4 tokens, all masked: -1 over 4 tokens, not -0.5 over 8."""
    tokens, advantages = [[0, 1, 0, 1], [1, 1, 0, 0]], [1.0, 1e6]
    masked = response_batch(tokens, advantages, loss_mask=[[1.0] * 4, [0.0] * 4])
    for budget in (1000, 5):
        result, _ = run(masked, budget=budget, meta={"calculate_entropy": True})
        assert result["avg_loss"] == pytest.approx(-1.0, abs=1e-6)
    masked["old_log_probs"][1] = 1e6
    other, _ = run(masked, meta={"calculate_entropy": True})
    assert other["metrics"] == pytest.approx(result["metrics"], rel=1e-6)
    half = response_batch(tokens, [1.0, 1.0], loss_mask=[[1.0] * 4, [1.0, 1.0, 0.0, 0.0]])
    half["advantages"][1, 2:] = 1e6
    result, _ = run(half, {"loss_agg_mode": "sum"})
    assert result["avg_loss"] == pytest.approx(-6.0, abs=1e-5)
    assert run(half)[0]["avg_loss"] == pytest.approx(-1.0, abs=1e-6)


def test_an_all_zero_mask_gives_no_gradient():
    result, gradient = run(response_batch([[0, 1]], [1.0], loss_mask=[[0.0, 0.0]]))
    assert result["avg_loss"] == 0
    assert (gradient == 0).all()


def test_temperature_applies_to_old_and_new_alike():
    """At T=0.5 the table model's log-probs are -0.01815 and -4.01815; the first ratio is 1."""
    batch = response_batch([[0, 1]], [1.0])
    meta = {"temperature": 0.5}
    processing = {"post": ["compute_logprobs"]}
    out = run_pipeline(FakeEngine(TableModel()), (), batch, meta, processing, "cpu", backward=False)
    old = torch.from_numpy(out["batch"]["logprobs"])[:, 1:]
    assert old[0].tolist() == pytest.approx([-0.01815, -4.01815], abs=1e-5)
    result, _ = run(batch | {"old_log_probs": old}, meta=meta)
    assert result["batch"]["logprobs"][0, 1:].tolist() == pytest.approx([-0.01815, -4.01815], abs=1e-5)
    assert result["metrics"]["ratio_max_deviation"] < 1e-6
    assert result["metrics"]["pg_clipfrac"] == 0
    assert abs(result["metrics"]["ppo_kl"]) < 1e-6
    unscaled, _ = run(batch, meta=meta)
    assert unscaled["metrics"]["ratio_max_deviation"] == pytest.approx(1 - 0.1509, abs=1e-4)


def test_listing_apply_temperature_does_not_apply_it_twice():
    batch = response_batch([[0, 1]], [1.0])
    outs = [
        run_pipeline(
            FakeEngine(TableModel()), (), batch, {"temperature": 0.5}, {"post": posts}, "cpu", backward=False
        )["batch"]["logprobs"].tolist()
        for posts in (["compute_logprobs"], ["apply_temperature", "compute_logprobs"])
    ]
    assert outs[0] == outs[1]


@pytest.mark.parametrize("key", ["old_log_probs", "advantages"])
def test_missing_tensors_are_errors_that_name_them(key: str):
    batch = response_batch([[0, 1]], [1.0])
    value = batch.pop(key)
    misspelt = {"old_log_probs": "old_logprobs", "advantages": "advantage"}[key]
    with pytest.raises(ValueError, match=f"needs '{key}' in the batch; did you mean '{misspelt}'"):
        run(batch | {misspelt: value})
    batch = response_batch([[0, 1]], [1.0])
    del batch["response_mask"]
    with pytest.raises(ValueError, match="needs 'loss_mask' or 'response_mask'"):
        run(batch)
    with pytest.raises(ValueError, match="use_kl_loss loss needs 'ref_log_prob'"):
        run(response_batch([[0, 1]], [1.0]), {"use_kl_loss": True})


def test_old_log_probs_are_used_as_given():
    """After an update the ratio is not 1: nothing re-derives old log-probs from the new model."""
    result, _ = run(response_batch([[0, 1, 1]], [1.0]), model=TableModel(first=1.5))
    assert result["metrics"]["ratio_max_deviation"] > 1e-3


def test_surrogate_by_hand():
    """Ratios 1.5 and 0.5 with positive and negative advantages, clip 0.2 / 0.3: every branch of the clip."""
    model = TableModel()
    logp = torch.log_softmax(model.logits.detach(), -1)
    batch = response_batch([[0, 0, 0, 0]], [1.0])
    batch["advantages"] = torch.tensor([[1.0, -1.0, 1.0, -3.0]])
    batch["old_log_probs"] = logp[0] - torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    config = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": None}
    result, _ = run(batch, config)
    assert result["avg_loss"] == pytest.approx((-1.3 + 1.5 - 0.5 + 2.4) / 4, abs=1e-6)
    assert result["metrics"]["pg_clipfrac"] == pytest.approx(0.5)
    assert result["metrics"]["pg_clipfrac_lower"] == 0
    assert result["metrics"]["ratio_max_deviation"] == pytest.approx(0.5, abs=1e-6)
    result, _ = run(batch, config | {"clip_ratio_c": 1.2})
    assert result["avg_loss"] == pytest.approx((-1.3 + 1.2 - 0.5 + 2.4) / 4, abs=1e-6)
    assert result["metrics"]["pg_clipfrac_lower"] == pytest.approx(0.25)


def test_log_ratios_are_bounded_before_exp():
    """Without dual clip nothing else bounds a ratio of exp(88); SkyRL and verl stop at exp(20)."""
    batch = response_batch([[0]], [-1.0])
    batch["old_log_probs"] = torch.tensor([[-88.0]])
    result, gradient = run(batch, {"clip_ratio_c": None})
    assert result["avg_loss"] == pytest.approx(math.exp(20), rel=1e-6)
    assert result["metrics"]["ppo_kl"] == -20
    assert (gradient == 0).all()


def test_rollout_weights_multiply_the_surrogate():
    batch = response_batch([[0, 1]], [1.0], rollout_is_weights=[[0.5, 2.0]])
    assert run(batch)[0]["avg_loss"] == pytest.approx(-1.25, abs=1e-6)


CHANGES = {
    "clip_ratio": 0.01,
    "clip_ratio_low": 0.01,
    "clip_ratio_high": 0.01,
    "clip_ratio_c": 1.1,
    "loss_agg_mode": "seq-mean-token-mean",
    "loss_scale_factor": 17.0,
    "entropy_coeff": 0.3,
    "entropy_agg_mode": "sum",
    "use_kl_loss": False,
    "kl_loss_coef": 0.7,
    "kl_loss_type": "k1",
    "kl_loss_agg_mode": "sum",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GrpoConfig)])
@pytest.mark.parametrize("where", ["config", "actor_config"])
def test_every_setting_changes_the_result(name: str, where: str):
    base = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}
    if name == "loss_scale_factor":
        base["loss_agg_mode"] = "seq-mean-token-sum-norm"
    batch = response_batch([[0, 1, 0, 1], [1, 0]], [1.0, -2.0], ref_log_prob=[[-1.0, -2.0, -3.0, -0.5]] * 2)
    batch["old_log_probs"] = batch["old_log_probs"] + torch.tensor([[0.5, -0.5, 0.3, -0.3], [-1.0, 0.4, 0, 0]])

    def loss(settings: dict) -> float:
        given = ({}, {"actor_config": settings}) if where == "actor_config" else (settings, {})
        return run(batch, *given)[0]["avg_loss"]

    assert abs(loss(base | {name: CHANGES[name]}) - loss(base)) > 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_ration": 0.2}, "config.clip_ration=0.2: the grpo loss has no such setting; did you mean 'clip_ratio'"),
        ({"clip_ratio": "0.2"}, "config.clip_ratio='0.2' must be of type float"),
        ({"clip_ratio": None}, "config.clip_ratio=None: give a value"),
        ({"clip_ratio": -0.1}, "clip_ratio=-0.1 must be at least 0"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c=1.0 must be above 1"),
        ({"use_kl_loss": 1}, "config.use_kl_loss=1 must be of type bool"),
        ({"loss_agg_mode": "token_mean"}, "loss_agg_mode='token_mean' is unknown; did you mean 'token-mean'"),
        ({"kl_loss_agg_mode": "mean"}, "kl_loss_agg_mode='mean' is unknown"),
        ({"kl_loss_type": "k4"}, "kl_loss_type='k4' is unknown; did you mean"),
        ({"loss_scale_factor": 0.0}, "loss_scale_factor=0.0 must be above 0"),
        ({"entropy_coeff": float("nan")}, "entropy_coeff=nan must be finite"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str):
    with pytest.raises(UnsupportedError, match=message) as caught:
        run(response_batch([[0, 1]], [1.0]), settings)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_two_sources_of_settings_must_agree():
    batch = response_batch([[0, 1]], [1.0])
    run(batch, {"clip_ratio": 0.1}, {"actor_config": {"clip_ratio": 0.1}})
    with pytest.raises(UnsupportedError, match=r"clip_ratio is 0\.1 in config and 0\.2 in actor_config"):
        run(batch, {"clip_ratio": 0.1}, {"actor_config": {"clip_ratio": 0.2}})
    with pytest.raises(UnsupportedError, match=r"actor_config\.ppo_epochs"):
        run(batch, meta={"actor_config": {"ppo_epochs": 1}})
    run(batch, meta={"policy_loss_config": {"loss_mode": "vanilla"}})
    with pytest.raises(UnsupportedError, match="loss_mode='gspo'"):
        run(batch, meta={"policy_loss_config": {"loss_mode": "gspo"}})
    with pytest.raises(UnsupportedError, match=r"policy_loss_config\.clip_cov_ratio"):
        run(batch, meta={"policy_loss_config": {"clip_cov_ratio": 0.1}})


def test_counts_that_a_mode_needs():
    batch = response_batch([[0, 1]], [1.0])
    with pytest.raises(ValueError, match=r"needs meta\['global_batch_size'\]"):
        run(batch, {"loss_agg_mode": "seq-mean-token-mean"}, {"batch_num_tokens": 9, "dp_size": 4})
    with pytest.raises(ValueError, match=r"needs meta\['batch_num_tokens'\]"):
        run(batch, meta={"global_batch_size": 9, "dp_size": 4})


KL_VALUES = {
    "k1": lambda d: d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: ((-d).clamp(-20, 20).exp() + d.clamp(-20, 20) - 1).clamp(-10, 10),
}


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_kl_estimators(kl_type: str):
    logprobs = torch.tensor([-1.0, -2.0, -0.1, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.1, -1.0], dtype=torch.float64)
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    name = kl_type.removesuffix("+")
    name = names.get(name, name)
    value = kl_estimate(logprobs, reference, kl_type)
    assert torch.allclose(value, KL_VALUES[name](logprobs - reference), atol=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    of = KL_VALUES["k2" if kl_type.endswith("+") else name]
    (expected,) = torch.autograd.grad(of(logprobs - reference).sum(), logprobs)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_sft_is_cross_entropy():
    tokens = [[0, 1, 1], [1], [0, 0]]
    batch = response_batch(tokens, [0.0] * 3)
    batch = {name: batch[name] for name in ("input_ids", "attention_mask", "prompts", "response_mask")}
    model = TableModel()
    flat = torch.tensor([token for row in tokens for token in row])
    expected = torch.nn.functional.cross_entropy(model.logits.expand(len(flat), 2), flat)
    (gradient,) = torch.autograd.grad(expected, model.logits)
    for budget in (4, 5, 1000):
        result, ours = run(batch, loss_fn="sft", budget=budget)
        assert result["avg_loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert result["metrics"] == pytest.approx({"nll": expected.item()}, rel=1e-6)
        assert torch.allclose(ours, gradient, rtol=1e-5)
    rows, _ = run(batch, {"loss_agg_mode": "seq-mean-token-mean"}, loss_fn="sft")
    assert rows["avg_loss"] != pytest.approx(expected.item(), rel=1e-3)
    with pytest.raises(UnsupportedError, match="the sft loss has no such setting"):
        run(batch, {"clip_ratio": 0.1}, loss_fn="sft")


def test_losses_see_rows_not_packs():
    """Called by hand with rows, the losses give what the pipeline gives."""
    batch = response_batch([[0, 1, 0], [1]], [1.0, -1.0])
    result, _ = run(batch, {"loss_agg_mode": "seq-mean-token-mean"})
    meta = {"batch_num_tokens": 4, "global_batch_size": 2, "dp_size": 1, "response_len": 3}
    rows = {name: batch[name] for name in ("advantages", "old_log_probs")} | {
        "loss_mask": batch["response_mask"].float()
    }
    outputs = {"logprobs": result["batch"]["logprobs"][:, 1:]}
    loss, metrics = grpo_loss(outputs, rows, meta, {"loss_agg_mode": "seq-mean-token-mean"}, "cpu")
    assert loss.item() == pytest.approx(result["avg_loss"], rel=1e-6)
    assert set(metrics) == {"pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "ratio_max_deviation"}
    loss, _ = sft_loss(outputs, rows, meta, {"loss_agg_mode": "sum"}, "cpu")
    assert loss.item() == pytest.approx(-outputs["logprobs"].sum().item(), rel=1e-6)
