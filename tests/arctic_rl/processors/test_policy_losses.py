"""The losses of SkyRL's names against SkyRL's own functions, each with and without every off-policy correction."""

import dataclasses
import itertools

import pytest
import torch

from integrations.arctic_rl.algorithm_rules import correction_refusals, loss_problems
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.loss_config import CORRECTED_LOSSES, TOKEN_LOSSES, loss_request
from integrations.arctic_rl.off_policy import correction_weights
from integrations.arctic_rl.processors.metrics import MetricTable, merge
from integrations.arctic_rl.processors.policy_losses import gspo_loss
from integrations.arctic_rl.processors.registry import get_loss_fn
from integrations.arctic_rl.skyrl_config import parse_config

SHAPE = (6, 9)
LOSSES = {
    "regular": (),
    "dual_clip": ("clip_ratio_c=1.5",),
    "gspo": ("eps_clip_low=0.05", "eps_clip_high=0.1"),
    "sapo": ("sapo.tau_pos=1.3", "sapo.tau_neg=2.1"),
    "cispo": ("cispo.cispo_eps_clip_low=0.3", "cispo.cispo_eps_clip_high=0.6"),
    "cispo, rollout": ("cispo.cispo_anchor=rollout", "cispo.cispo_eps_clip_high=0.6"),
    "rollout_is": ("eps_clip_high=0.4",),
    "dppo": ("dppo.delta_low=0.01", "dppo.delta_high=0.02"),
    "dppo, kl": ("dppo.dppo_type=binary_kl", "dppo.delta_low=0.002", "dppo.delta_high=0.001"),
    "importance_sampling": (),
    "cross_entropy": (),
}
CORRECTIONS = {
    "none": (),
    "token": ("tis_ratio_type=token", "token_tis_ratio_clip_high=1.2"),
    "sequence": ("tis_ratio_type=sequence", "sequence_tis_ratio_clip_high=1.5"),
    "geometric": ("sequence_mask_metric=geometric", "geo_mask_low=0.8", "geo_mask_high=1.1"),
    "product": ("sequence_mask_metric=product", "product_mask_low=0.3", "product_mask_high=1.8"),
    "outliers": ("outlier_token_is_threshold_low=0.4", "outlier_token_is_threshold_high=2.2"),
    "outliers above": ("outlier_token_is_threshold_high=2.0",),
    "tokens": ("token_mask_is_threshold_low=0.6", "token_mask_is_threshold_high=1.6"),
    "all": (
        "tis_ratio_type=token",
        "token_tis_ratio_clip_high=1.5",
        "sequence_mask_metric=geometric",
        "geo_mask_low=0.7",
        "geo_mask_high=1.3",
        "outlier_token_is_threshold_high=3.0",
        "token_mask_is_threshold_low=0.5",
        "token_mask_is_threshold_high=1.8",
    ),
}
CASES = [
    (loss, correction)
    for loss, correction in itertools.product(LOSSES, CORRECTIONS)
    if correction == "none"
    or (
        loss.split(",")[0] in CORRECTED_LOSSES
        and not (loss == "cispo, rollout" and "tis" in str(CORRECTIONS[correction]))
    )
]


def config(loss="regular", correction="none", *more):
    settings = [f"trainer.algorithm.{item}" for item in (f"policy_loss_type={loss.split(',')[0]}", *LOSSES[loss])]
    settings += [f"trainer.algorithm.off_policy_correction.{item}" for item in CORRECTIONS[correction]]
    return parse_config(["trainer.logger=console", "trainer.algorithm.use_kl_loss=false", *settings, *more])


def random_rows(seed=0, dtype=torch.float64):
    """[6, 9] tensors in SkyRL's names: holes in the mask, an empty row, a row of one token, extreme log-ratios."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype) * scale

    mask = (torch.rand(SHAPE, generator=generator) < 0.8).to(dtype)
    mask[2] = 0
    mask[3, 1:] = 0
    log_probs = -normal(1.0).abs() - 0.1
    rows = {
        "log_probs": log_probs,
        "old_log_probs": log_probs + normal(0.3),
        "advantages": normal(1.0) / 10,
        "loss_mask": mask,
    }
    rows["rollout_logprobs"] = rows["old_log_probs"] + normal(0.3) * (torch.arange(SHAPE[0]) % 3)[:, None]
    rows["old_log_probs"][0, :2] = torch.tensor([-60.0, 45.0])
    rows["rollout_logprobs"][0, :2] = torch.tensor([-60.0, 45.0])
    return rows


def ours(cfg, rows, splits=((0, 6),)):
    """Value, gradient of the log-probs and metrics of our loss, row ranges one after the other."""
    request = loss_request(cfg)
    name = request.processing["config"].get("policy_loss", request.processing["loss_fn"])
    settings = request.processing["config"].get("policy_loss_config", request.processing["config"])
    log_probs = rows["log_probs"].clone().requires_grad_()
    batch = {name: rows[name] for name in ("old_log_probs", "advantages", "loss_mask", "rollout_logprobs")}
    weighting = {}
    if request.corrected:
        named = rows | {"action_log_probs": rows["old_log_probs"]}
        weights, weighting = correction_weights(named, cfg.trainer.algorithm.off_policy_correction)
        batch["rollout_is_weights"] = weights
    table, total = MetricTable(), 0.0
    for start, end in splits:
        part = {key: values[start:end] for key, values in batch.items()}
        meta = {"dp_size": 1, "response_len": SHAPE[1]}
        loss, metrics = get_loss_fn(name)({"logprobs": log_probs[start:end]}, part, meta, settings, "cpu")
        loss.backward()
        total += loss.item()
        table.add(metrics, float(part["loss_mask"].sum()))
    return total, log_probs.grad, merge([table.totals()]) | weighting


def skyrls(cfg, rows):
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    algorithm = cfg.trainer.algorithm
    log_probs = rows["log_probs"].clone().requires_grad_()
    loss, metrics = PolicyLossRegistry.get(algorithm.policy_loss_type)(
        log_probs,
        rows["old_log_probs"],
        rows["advantages"],
        config=algorithm,
        loss_mask=rows["loss_mask"],
        rollout_logprobs=rows["rollout_logprobs"],
    )
    loss.backward()
    return loss.item(), log_probs.grad, metrics


def close(one, other, tolerance):
    return float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.parametrize(("loss", "correction"), CASES)
def test_loss_gradient_and_metrics_equal_skyrls(loss, correction):
    """In float64, but for ratios: SkyRL takes their exponential in float32."""
    cfg, rows = config(loss, correction), random_rows()
    value, gradient, metrics = ours(cfg, rows)
    expected, expected_gradient, expected_metrics = skyrls(cfg, rows)
    assert expected_gradient.any()
    scale = float((rows["advantages"] * rows["loss_mask"]).abs().sum())
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-7 * scale)
    assert close(gradient, expected_gradient, 1e-6)
    metrics["clip_ratio"] = metrics.pop("pg_clipfrac", metrics.get("clip_ratio"))
    for name, number in expected_metrics.items():
        assert metrics[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("loss", "correction"), CASES)
def test_nothing_depends_on_the_split(loss, correction):
    cfg, rows = config(loss, correction), random_rows(1)
    value, gradient, metrics = ours(cfg, rows)
    for splits in ([(0, 2), (2, 6)], [(row, row + 1) for row in range(6)]):
        split_value, split_gradient, split_metrics = ours(cfg, rows, splits)
        assert split_value == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert close(split_gradient, gradient, 1e-9)
        assert split_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_masked_has_no_effect_whatever_it_is(loss):
    cfg, rows = config(loss, "tokens" if loss.split(",")[0] in CORRECTED_LOSSES else "none"), random_rows(2)
    expected = ours(cfg, rows)
    masked = rows["loss_mask"] == 0
    for name, values in rows.items():
        if name != "loss_mask":
            rows[name] = torch.where(masked, torch.nan if name != "log_probs" else 1e6, values)
    value, gradient, metrics = ours(cfg, rows)
    assert value == expected[0]
    assert torch.equal(gradient, expected[1])
    assert metrics == expected[2]


@pytest.mark.parametrize("loss", [name for name in LOSSES if LOSSES[name]])
def test_every_setting_of_a_loss_is_felt(loss):
    batches = [random_rows(seed) for seed in range(6)]
    gradients = [ours(config(loss), rows)[1] for rows in batches]
    for setting in LOSSES[loss]:
        others = [other for other in LOSSES[loss] if other != setting]
        cfg = parse_config(
            ["trainer.logger=console", "trainer.algorithm.use_kl_loss=false"]
            + [f"trainer.algorithm.{item}" for item in (f"policy_loss_type={loss.split(',')[0]}", *others)]
        )
        without = [ours(cfg, rows)[1] for rows in batches]
        assert any(not torch.equal(*pair) for pair in zip(without, gradients, strict=True)), setting


def test_all_masked_rows_give_zero_and_finite_metrics():
    rows = random_rows(4)
    rows["loss_mask"] = torch.zeros(SHAPE, dtype=torch.float64)
    for loss in LOSSES:
        value, gradient, metrics = ours(config(loss), rows)
        assert value == 0
        assert not gradient.any()
        assert all(abs(number) < 1e9 for number in metrics.values()), metrics


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policy_loss_type=gspo", "eps_clip_low=-1"), "eps_clip_low=-1"),
        (("policy_loss_type=sapo", "sapo.tau_neg=0"), "tau_neg=0"),
        (("policy_loss_type=cispo", "cispo.cispo_eps_clip_high=-2"), "cispo_eps_clip_high=-2"),
        (("policy_loss_type=dppo", "dppo.delta_low=-1"), "delta_low=-1"),
        (("policy_loss_type=gspoo",), "gspoo"),
    ],
)
def test_a_setting_out_of_range_is_named(overrides, said):
    cfg = parse_config(["trainer.logger=console", *(f"trainer.algorithm.{item}" for item in overrides)])
    (line,) = loss_problems(cfg)
    assert said in line


TOKEN = "off_policy_correction.tis_ratio_type=token"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((TOKEN, "policy_loss_type=importance_sampling"), "importance_sampling does not apply it"),
        ((TOKEN, "policy_loss_type=cross_entropy"), "cross_entropy does not apply it"),
        (("off_policy_correction.outlier_token_is_threshold_low=0.1", "policy_loss_type=kl_cov"), "kl_cov does not"),
        (("use_tis=true", "policy_loss_type=clip_cov"), "clip_cov does not apply it"),
        ((TOKEN, "policy_loss_type=cispo", "cispo.cispo_anchor=rollout"), "corrects already"),
        (("off_policy_correction.token_mask_is_threshold_low=0.1",), "token_mask_is_threshold_high too"),
        (("off_policy_correction.token_mask_is_threshold_high=2",), "token_mask_is_threshold_low too"),
        (("off_policy_correction.tis_ratio_type=tokens",), "no such kind"),
        (("off_policy_correction.sequence_mask_metric=mean",), "no such kind"),
    ],
)
def test_a_correction_without_effect_is_refused(overrides, said):
    cfg = parse_config(["trainer.logger=console", *(f"trainer.algorithm.{item}" for item in overrides)])
    (line,) = correction_refusals(cfg)
    assert said in line


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (("policy_loss_type=rollout_is",), True),
        (("policy_loss_type=cispo", "cispo.cispo_anchor=rollout"), True),
        (("off_policy_correction.outlier_token_is_threshold_high=2",), True),
        ((TOKEN,), False),
        (("policy_loss_type=dppo",), False),
        (("policy_loss_type=cispo",), False),
    ],
)
def test_log_probs_of_the_sampler_are_asked_for_where_they_are_needed(overrides, refused):
    """SkyRL itself asks for them with tis_ratio_type, and dppo takes the old ones without."""
    settings = [f"trainer.algorithm.{item}" for item in overrides]
    cfg = parse_config(["trainer.logger=console", *settings, "generator.sampling_params.logprobs=null"])
    lines = list(correction_refusals(cfg))
    assert [("logprobs=null" in line) for line in lines] == [True] * refused


def test_missing_tensors_and_unknown_settings_are_named():
    rows = random_rows(5)
    batch = {"advantages": rows["advantages"], "loss_mask": rows["loss_mask"]}
    for loss, missing in (("gspo", "old_log_probs"), ("rollout_is", "rollout_logprobs"), ("dppo", "old_log_probs")):
        with pytest.raises(ValueError, match=missing):
            get_loss_fn(loss)({"logprobs": rows["log_probs"]}, batch, {"dp_size": 1}, {}, "cpu")
    with pytest.raises(UnsupportedError, match="tau"):
        gspo_loss({"logprobs": rows["log_probs"]}, batch, {"dp_size": 1}, {"tau": 1.0}, "cpu")
    with pytest.raises(UnsupportedError, match="logprobs=1"):
        correction_weights(rows | {"rollout_logprobs": None}, config().trainer.algorithm.off_policy_correction)


def test_every_name_of_skyrls_registry_is_served():
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossType

    names = {str(name) for name in PolicyLossType}
    own = {name for name in names if not loss_request(config_of(name)).own_micro_batches}
    assert own == names - {"clip_cov", "kl_cov"}
    assert set(TOKEN_LOSSES) == own - {"regular", "dual_clip"}


def config_of(name):
    return parse_config(["trainer.logger=console", f"trainer.algorithm.policy_loss_type={name}"])


def test_the_losses_defaults_are_skyrls():
    for name in TOKEN_LOSSES:
        request = loss_request(config_of(name)).processing["config"]
        kinds = {"gspo": "ClipRangeConfig", "rollout_is": "ClipRangeConfig"}
        kind = kinds.get(name, f"{name.capitalize()}Config")
        from integrations.arctic_rl.processors import policy_losses

        if kind in policy_losses.__all__:
            assert dataclasses.asdict(vars(policy_losses)[kind]()) == request["policy_loss_config"]
        else:
            assert request["policy_loss_config"] == {}
