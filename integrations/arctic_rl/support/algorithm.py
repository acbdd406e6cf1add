"""``trainer.algorithm``: advantages on the driver are SkyRL's own code, losses run on the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .entries import (
    Entry,
    Idle,
    PartOf,
    Refused,
    one_of,
    ours,
    refusal,
    shown,
    skyrls,
    under,
)

_TRAINER = "skyrl.train.trainer:RayPPOTrainer"
_ADVANTAGES = f"{_TRAINER}.compute_advantages_and_returns"
_LOSS_FUNCTIONS = "skyrl.backends.skyrl_train.utils.ppo_utils"

SUPPORTED_POLICY_LOSSES = ("regular", "dual_clip")


def _policy_loss(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value not in SUPPORTED_POLICY_LOSSES:
        instead = f"write one of {', '.join(SUPPORTED_POLICY_LOSSES)}"
        yield refusal(setting, value, "this policy loss is not there yet", instead)


def _off_policy(default: Any = None) -> Refused:
    return Refused("off-policy correction is not there yet", f"write {shown(default)}")


def _unless(name: str, *values: Any) -> Idle:
    """Idle unless an algorithm setting has one of the values."""

    def idle(cfg: Any) -> str | None:
        section = cfg.trainer.algorithm
        for part in name.split("."):
            section = vars(section)[part]
        return None if section in values else f"trainer.algorithm.{name}={shown(section)}"

    return idle


def _estimators(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

    known = sorted(str(name) for name in AdvantageEstimatorRegistry.list_available())
    if value not in known:
        why = "no such advantage estimator is registered"
        yield refusal(setting, value, why, f"write one of {', '.join(known)}, or import the module that registers it")


def _reward_kl(cfg: Any) -> str | None:
    return None if cfg.trainer.algorithm.use_kl_in_reward else "trainer.algorithm.use_kl_in_reward=false"


def _any_kl(cfg: Any) -> str | None:
    algorithm = cfg.trainer.algorithm
    return None if algorithm.use_kl_loss or algorithm.use_kl_in_reward else "no KL term"


def _resampling(cfg: Any) -> str | None:
    return None if cfg.trainer.algorithm.dynamic_sampling.type is not None else "no dynamic sampling"


_NO_CRITIC = PartOf("trainer.critic.model.path", "no critic")
_OTHER_LOSS = PartOf("trainer.algorithm.policy_loss_type", "read by another trainer.algorithm.policy_loss_type only")
_CORRECTION = PartOf(
    "trainer.algorithm.off_policy_correction.tis_ratio_type", "no off-policy correction that would read it"
)
_MASK = PartOf(
    "trainer.algorithm.off_policy_correction.sequence_mask_metric", "no off-policy correction that would read it"
)
_CLIPPING = _unless("policy_loss_type", "regular", "dual_clip", "gspo", "clip_cov", "rollout_is")

ALGORITHM: dict[str, Entry] = under(
    "trainer.algorithm",
    {
        "advantage_estimator": skyrls("SkyRL's estimators and registered ones", _ADVANTAGES, limit=_estimators),
        "kl_ctrl.type": skyrls(
            "the controller of the KL penalty in the reward",
            f"{_LOSS_FUNCTIONS}:get_kl_controller",
            limit=one_of("fixed", "adaptive"),
            idle=_reward_kl,
        ),
        "kl_ctrl.kl_target": skyrls(
            "target of the adaptive controller", f"{_LOSS_FUNCTIONS}:get_kl_controller", idle=_reward_kl
        ),
        "kl_ctrl.horizon": skyrls(
            "speed of the adaptive controller", f"{_LOSS_FUNCTIONS}:get_kl_controller", idle=_reward_kl
        ),
        "kl_estimator_type": ours(
            "estimator of the KL loss here, and of the KL reward in SkyRL's code",
            limit=one_of("k1", "k2", "k3", "abs"),
            idle=_any_kl,
        ),
        "use_kl_in_reward": skyrls("the KL penalty on rewards", f"{_TRAINER}.train"),
        "use_kl_loss": ours("the KL term of the loss, and the reference model that it needs"),
        "kl_loss_coef": ours("factor of the KL term", idle=_any_kl),
        "use_entropy_loss": ours("the entropy bonus: the mean over the mini-batch's tokens"),
        "entropy_loss_coef": ours("factor of the entropy bonus", idle=_unless("use_entropy_loss", True)),
        "temperature": ours("logits are divided by it in training; unset = the rollouts' temperature"),
        "advantage_batch_normalize": skyrls(
            "advantages normalised over the batch", f"{_TRAINER}._normalize_advantages"
        ),
        "value_head_prefix": _NO_CRITIC,
        "policy_loss_type": ours("the policy loss on the server", limit=_policy_loss),
        "loss_reduction": skyrls(
            "weights the advantages of each mini-batch, so that the loss on the server is a sum",
            f"{_TRAINER}._normalize_advantages",
            limit=one_of("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"),
        ),
        "grpo_norm_by_std": skyrls(
            "advantages divided by their group's standard deviation",
            _ADVANTAGES,
            idle=_unless("advantage_estimator", "grpo"),
        ),
        "zero_variance_filter": skyrls(
            "takes groups of equal rewards out of the loss", f"{_TRAINER}.postprocess_generator_output"
        ),
        "zero_variance_filter_tol": skyrls(
            "rewards this close count as equal",
            f"{_TRAINER}.postprocess_generator_output",
            idle=_unless("zero_variance_filter", True),
        ),
        "lambd": _NO_CRITIC,
        "gamma": skyrls(
            "the discount of reinforce++", _ADVANTAGES, idle=_unless("advantage_estimator", "reinforce++")
        ),
        "eps_clip_low": ours("clip range below 1", idle=_CLIPPING),
        "eps_clip_high": ours("clip range above 1", idle=_CLIPPING),
        "clip_ratio_c": ours("bound of the dual clip", idle=_unless("policy_loss_type", "dual_clip")),
        "tis_imp_ratio_cap": PartOf("trainer.algorithm.use_tis", "trainer.algorithm.use_tis=false"),
        "use_tis": _off_policy(False),
        "off_policy_correction.tis_ratio_type": _off_policy(),
        "off_policy_correction.token_tis_ratio_clip_high": _CORRECTION,
        "off_policy_correction.sequence_tis_ratio_clip_high": _CORRECTION,
        "off_policy_correction.sequence_mask_metric": _off_policy(),
        "off_policy_correction.geo_mask_high": _MASK,
        "off_policy_correction.geo_mask_low": _MASK,
        "off_policy_correction.product_mask_high": _MASK,
        "off_policy_correction.product_mask_low": _MASK,
        "off_policy_correction.outlier_token_is_threshold_low": _off_policy(),
        "off_policy_correction.outlier_token_is_threshold_high": _off_policy(),
        "off_policy_correction.token_mask_is_threshold_low": _off_policy(),
        "off_policy_correction.token_mask_is_threshold_high": _off_policy(),
        "enable_sample_support_replay": Refused("the sampler's support is not replayed", "write false"),
        "sapo.tau_pos": _OTHER_LOSS,
        "sapo.tau_neg": _OTHER_LOSS,
        "value_clip": _NO_CRITIC,
        "dynamic_sampling.type": skyrls(
            "prompts sampled again until groups differ", f"{_TRAINER}.train", limit=one_of(None, "filter", "replace")
        ),
        "dynamic_sampling.max_sample_batches": skyrls(
            "batches sampled at most", f"{_TRAINER}.handle_dynamic_sampling", idle=_resampling
        ),
        "dynamic_sampling.min_replace_ratio": skyrls(
            "share of good groups that replacing needs", f"{_TRAINER}.handle_dynamic_sampling", idle=_resampling
        ),
        "clip_cov.clip_ratio": _OTHER_LOSS,
        "clip_cov.clip_cov_lb": _OTHER_LOSS,
        "clip_cov.clip_cov_ub": _OTHER_LOSS,
        "kl_cov.kl_cov_frac": _OTHER_LOSS,
        "kl_cov.ppo_kl_coef": _OTHER_LOSS,
        "cispo.cispo_eps_clip_low": _OTHER_LOSS,
        "cispo.cispo_eps_clip_high": _OTHER_LOSS,
        "cispo.cispo_anchor": _OTHER_LOSS,
        "dppo.dppo_type": _OTHER_LOSS,
        "dppo.delta_low": _OTHER_LOSS,
        "dppo.delta_high": _OTHER_LOSS,
        "max_seq_len": skyrls(
            "the constant of loss_reduction=seq_mean_token_sum_norm",
            f"{_TRAINER}._normalize_advantages",
            idle=_unless("loss_reduction", "seq_mean_token_sum_norm"),
        ),
    },
)
