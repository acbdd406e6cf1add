"""The KL and entropy terms around any loss give what grpo with the same settings gives."""

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.pipeline import register_loss_fn
from tests.arctic_rl.processors.test_losses import TWO_SEQUENCES, response_batch, run

TERMS = {
    "entropy_coeff": 0.3,
    "entropy_agg_mode": "token-mean",
    "use_kl_loss": True,
    "kl_loss_coef": 0.7,
    "kl_loss_type": "k2",
    "kl_loss_agg_mode": "seq-mean-token-mean",
}


def batch_with_reference():
    batch = response_batch(*TWO_SEQUENCES)
    return batch | {"ref_log_prob": batch["old_log_probs"] - 0.5}


@register_loss_fn("returns_a_taken_metric")
def returns_a_taken_metric(model_outputs, batch, meta, config, device):
    return model_outputs["logprobs"].sum(), {"entropy": 1.0}


@pytest.mark.parametrize("budget", [1000, 4])
@pytest.mark.parametrize("changed", [{}, {"use_kl_loss": False}, {"entropy_coeff": 0.0}])
def test_terms_around_a_loss_equal_those_inside_grpo(changed, budget):
    batch, terms = batch_with_reference(), TERMS | changed
    whole, expected_grad = run(batch, {"loss_agg_mode": "sum", "clip_ratio": 0.1} | terms, budget=budget)
    inner = {"policy_loss": "grpo", "policy_loss_config": {"loss_agg_mode": "sum", "clip_ratio": 0.1}}
    split, grad = run(
        batch, inner | terms, budget=budget, loss_fn="tests.arctic_rl.processors.test_regularizers.outer"
    )
    assert split["avg_loss"] == pytest.approx(whole["avg_loss"], abs=1e-6)
    assert torch.allclose(grad, expected_grad, atol=1e-6)
    assert split["metrics"] == pytest.approx(whole["metrics"], abs=1e-6)


def outer(model_outputs, batch, meta, config, device):
    """``regularized`` with the metrics that grpo reports itself taken out of the inner loss."""
    from integrations.arctic_rl.processors.registry import get_loss_fn
    from integrations.arctic_rl.processors.regularizers import regularized_loss

    def inner(*arguments):
        loss, metrics = get_loss_fn("grpo")(*arguments)
        return loss, {name: metrics[name] for name in metrics if name not in ("pg_loss", "entropy")}

    globals()["inner"] = inner
    return regularized_loss(model_outputs, batch, meta, dict(config, policy_loss=f"{__name__}.inner"), device)


def test_a_metric_that_is_the_whole_losss_is_refused():
    with pytest.raises(UnsupportedError, match="metric entropy"):
        run(
            batch_with_reference(),
            {"policy_loss": "returns_a_taken_metric"},
            {"calculate_entropy": True},
            loss_fn="regularized",
        )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "policy_loss is empty"),
        ({"policy_loss": "grpoo"}, "did you mean"),
        ({"policy_loss": "grpo", "kl_loss_koef": 1.0}, "kl_loss_koef"),
        ({"policy_loss": "grpo", "policy_loss_config": [1]}, "policy_loss_config"),
    ],
)
def test_what_is_wrong_is_named(config, said):
    with pytest.raises(UnsupportedError, match=said):
        run(batch_with_reference(), config, loss_fn="regularized")


@pytest.mark.parametrize("budget", [1000, 4])
def test_how_far_the_samplers_log_probs_are(budget):
    """Differences 1, 2 and 4 of three trained tokens; positions without loss are 0 in the extremes, as in SkyRL."""
    batch = response_batch([[0, 1, 0], [1, 0]], [1.0, 1.0], loss_mask=[[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    batch["rollout_logprobs"] = batch["old_log_probs"] - torch.tensor([[1.0, -2.0, 1e6], [4.0, 1e6, torch.nan]])
    expected = {
        "minibatch_rollout_logprobs_abs_diff_mean": 7 / 3,
        "minibatch_rollout_logprobs_abs_diff_sq_mean": 21 / 3,
        "minibatch_rollout_logprobs_abs_diff_max": 4.0,
        "minibatch_rollout_logprobs_abs_diff_min": 0.0,
    }
    for loss_fn, config in (("grpo", {}), ("regularized", {"policy_loss": "importance_sampling"})):
        result, _ = run(batch, config, budget=budget, loss_fn=loss_fn)
        for name, value in expected.items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-6), name
    full = response_batch([[0, 1], [1, 0]], [1.0, 1.0])
    full["rollout_logprobs"] = full["old_log_probs"] - torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    result, _ = run(full, {}, budget=budget)
    assert result["metrics"]["minibatch_rollout_logprobs_abs_diff_min"] == pytest.approx(0.5, rel=1e-6)


def test_settings_in_two_places_are_refused():
    with pytest.raises(UnsupportedError, match="actor_config"):
        run(
            batch_with_reference(),
            {"policy_loss": "gspo"},
            {"actor_config": {"kl_loss_coef": 0.5}},
            loss_fn="regularized",
        )
