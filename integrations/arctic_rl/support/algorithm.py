"""``trainer.algorithm``: advantages on the driver are SkyRL's own code, losses run on the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .entries import (
    Entry,
    Honoured,
    Idle,
    Refused,
    first_of,
    one_of,
    ours,
    refusal,
    shown,
    skyrls,
    under,
    without_critic,
)

_TRAINER = "skyrl.train.trainer:RayPPOTrainer"
_ADVANTAGES = f"{_TRAINER}.compute_advantages_and_returns"
_FELT = "tests/arctic_rl/test_own_trainer.py::test_what_each_setting_changes_is_felt"
_LOSS_FUNCTIONS = "skyrl.backends.skyrl_train.utils.ppo_utils"

_SKYRLS_LOSSES = (
    "regular",
    "dual_clip",
    "gspo",
    "sapo",
    "cispo",
    "clip_cov",
    "kl_cov",
    "rollout_is",
    "dppo",
    "importance_sampling",
    "cross_entropy",
)


_SKYRLS_ESTIMATORS = ("grpo", "rloo", "reinforce++", "maxrl", "gae")


def _own_loss(cfg: Any) -> bool:
    """Whether the policy loss is the user's own, which is handed all of ``trainer.algorithm``."""
    return cfg.trainer.arctic_rl.loss_fn is not None or cfg.trainer.algorithm.policy_loss_type not in _SKYRLS_LOSSES


def _own_function(cfg: Any) -> bool:
    """Whether the user's own loss or advantage estimator is handed all of ``trainer.algorithm`` as its ``config``."""
    own_estimator = cfg.trainer.algorithm.advantage_estimator not in _SKYRLS_ESTIMATORS
    return _own_loss(cfg) or (own_estimator and _without_returns(cfg) is None)


def _without_advantages(cfg: Any) -> str | None:
    unread = not _own_loss(cfg) and cfg.trainer.algorithm.policy_loss_type == "cross_entropy"
    return "trainer.algorithm.policy_loss_type=cross_entropy reads no advantages" if unread else None


def _without_terms(cfg: Any) -> str | None:
    added = _own_loss(cfg) or cfg.trainer.algorithm.policy_loss_type != "cross_entropy"
    return None if added else "SkyRL adds no such term to trainer.algorithm.policy_loss_type=cross_entropy"


def _without_returns(cfg: Any) -> str | None:
    """Idle where neither the policy loss reads advantages nor a critic learns returns."""
    return None if cfg.trainer.critic.model.path else _without_advantages(cfg)


def _old_name(cfg: Any) -> str | None:
    return "trainer.algorithm.use_tis=true" if cfg.trainer.algorithm.use_tis else None


def _unless_own(entry: Entry) -> Entry:
    """An entry that a policy loss or an estimator of the user's own may read, whatever else is idle."""
    if not isinstance(entry, Honoured) or entry.idle is None:
        return entry
    idle = entry.idle
    return dataclasses.replace(entry, idle=lambda cfg: None if _own_function(cfg) else idle(cfg))


def _read_by(*losses: str) -> Idle:
    """Idle with the policy losses of SkyRL that do not read the setting; a loss of the user's own may."""

    def idle(cfg: Any) -> str | None:
        name = cfg.trainer.algorithm.policy_loss_type
        if _own_loss(cfg) or name in losses:
            return None
        return f"not read with trainer.algorithm.policy_loss_type={name}"

    return idle


def _unless(name: str, *values: Any) -> Idle:
    """Idle unless an algorithm setting has one of the values."""

    def idle(cfg: Any) -> str | None:
        section = cfg.trainer.algorithm
        for part in name.split("."):
            section = vars(section)[part]
        return None if section in values else f"trainer.algorithm.{name}={shown(section)}"

    return idle


def _head_name(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if not str(value).isidentifier():
        yield refusal(setting, value, "a module's name is one word of letters, digits and _", "write value_head")


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


def _parameter(loss: str) -> Entry:
    return ours(f"a parameter of policy_loss_type={loss}", idle=_read_by(loss))


def _correction_cap(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if cfg.trainer.algorithm.use_tis and value <= 0:
        instead = "write a cap above 1, or off_policy_correction.tis_ratio_type=token in place of use_tis"
        yield refusal(setting, value, "SkyRL would cap every weight there", instead)


_EQUAL_REWARDS_TESTS = "tests/arctic_rl/test_equal_rewards.py::"
_DYNAMIC_SAMPLING_TESTS = "tests/arctic_rl/test_dynamic_sampling.py::"


_OWN = "tests/arctic_rl/test_support_algorithm.py::"
_CRITIC = "tests/arctic_rl/test_ppo.py::"
_ADAPTIVE = first_of(_without_returns, _reward_kl, _unless("kl_ctrl.type", "adaptive"))
_VALIDATE = "skyrl.train.utils.utils:validate_cfg"
_CORRECTION = "off_policy_correction"
_SEQUENCE_WEIGHTS = first_of(_old_name, _unless(f"{_CORRECTION}.tis_ratio_type", "sequence"))


def _token_weights(cfg: Any) -> str | None:
    return None if _old_name(cfg) else _unless(f"{_CORRECTION}.tis_ratio_type", "token")(cfg)


_GEOMETRIC = _unless(f"{_CORRECTION}.sequence_mask_metric", "geometric")
_PRODUCT = _unless(f"{_CORRECTION}.sequence_mask_metric", "product")
_CLIPPING = _read_by("regular", "dual_clip", "gspo", "clip_cov", "rollout_is")

_ENTRIES: dict[str, Entry] = under(
    "trainer.algorithm",
    {
        "advantage_estimator": skyrls(
            "SkyRL's estimators and registered ones", _ADVANTAGES, _FELT, limit=_estimators, idle=_without_returns
        ),
        "kl_ctrl.type": skyrls(
            "the controller of the KL penalty in the reward",
            f"{_LOSS_FUNCTIONS}:get_kl_controller",
            limit=one_of("fixed", "adaptive"),
            idle=first_of(_without_returns, _reward_kl),
        ),
        "kl_ctrl.kl_target": skyrls(
            "target of the adaptive controller", f"{_LOSS_FUNCTIONS}:get_kl_controller", idle=_ADAPTIVE
        ),
        "kl_ctrl.horizon": skyrls(
            "speed of the adaptive controller", f"{_LOSS_FUNCTIONS}:get_kl_controller", idle=_ADAPTIVE
        ),
        "kl_estimator_type": ours(
            "estimator of the KL loss here, and of the KL reward in SkyRL's code",
            limit=one_of("k1", "k2", "k3", "abs"),
            idle=_any_kl,
        ),
        "use_kl_in_reward": skyrls("the KL penalty on rewards", f"{_TRAINER}.train", _FELT, idle=_without_returns),
        "use_kl_loss": ours("the KL term of the loss, and the reference model that it needs", idle=_without_terms),
        "kl_loss_coef": ours("factor of the KL term", idle=first_of(_without_terms, _unless("use_kl_loss", True))),
        "use_entropy_loss": ours("the entropy bonus: the mean over the mini-batch's tokens", idle=_without_terms),
        "entropy_loss_coef": ours(
            "factor of the entropy bonus", idle=first_of(_without_terms, _unless("use_entropy_loss", True))
        ),
        "temperature": ours("logits are divided by it in training; unset = the rollouts' temperature"),
        "advantage_batch_normalize": skyrls(
            "advantages normalised over the batch",
            f"{_TRAINER}._normalize_advantages",
            _FELT,
            idle=_without_advantages,
        ),
        "value_head_prefix": ours(
            "name of the critic's head among its weights", limit=_head_name, idle=without_critic
        ),
        "policy_loss_type": ours("the policy loss on the server: each of SkyRL's, and registered ones"),
        "loss_reduction": skyrls(
            "weights the advantages of each mini-batch, so that the loss on the server is a sum",
            f"{_TRAINER}._normalize_advantages",
            _FELT,
            limit=one_of("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"),
            idle=_without_advantages,
        ),
        "grpo_norm_by_std": skyrls(
            "advantages divided by their group's standard deviation",
            _ADVANTAGES,
            _FELT,
            idle=first_of(_without_returns, _unless("advantage_estimator", "grpo")),
        ),
        "zero_variance_filter": ours(
            "takes groups of equal rewards out of the loss, also where rewards are given per token",
            f"{_EQUAL_REWARDS_TESTS}test_the_filter_sees_rewards_of_tokens_as_it_sees_those_of_responses",
        ),
        "zero_variance_filter_tol": ours(
            "rewards this close count as equal",
            f"{_EQUAL_REWARDS_TESTS}test_the_filters_tolerance_and_what_is_masked_already",
            idle=_unless("zero_variance_filter", True),
        ),
        "lambd": skyrls(
            "the lambda of gae",
            _ADVANTAGES,
            f"{_CRITIC}test_advantages_are_skyrls_of_the_critics_values",
            f"{_OWN}test_an_estimator_is_handed_the_recipes_values",
            idle=first_of(_without_returns, _unless("advantage_estimator", "gae")),
        ),
        "gamma": skyrls(
            "the discount of reinforce++ and gae",
            _ADVANTAGES,
            _FELT,
            f"{_CRITIC}test_advantages_are_skyrls_of_the_critics_values",
            idle=first_of(_without_returns, _unless("advantage_estimator", "reinforce++", "gae")),
        ),
        "eps_clip_low": ours("clip range below 1", idle=_CLIPPING),
        "eps_clip_high": ours("clip range above 1", idle=_CLIPPING),
        "clip_ratio_c": ours("bound of the dual clip", idle=_read_by("dual_clip")),
        "tis_imp_ratio_cap": skyrls(
            "the old name of off_policy_correction.token_tis_ratio_clip_high",
            _VALIDATE,
            limit=_correction_cap,
            idle=_unless("use_tis", True),
        ),
        "use_tis": skyrls("the old name of off_policy_correction.tis_ratio_type=token", _VALIDATE),
        f"{_CORRECTION}.tis_ratio_type": ours("weights of tokens or sequences against the sampler's policy"),
        f"{_CORRECTION}.token_tis_ratio_clip_high": ours("cap of a token's weight", idle=_token_weights),
        f"{_CORRECTION}.sequence_tis_ratio_clip_high": ours("cap of a sequence's weight", idle=_SEQUENCE_WEIGHTS),
        f"{_CORRECTION}.sequence_mask_metric": ours("sequences far from the sampler's policy leave the policy term"),
        f"{_CORRECTION}.geo_mask_high": ours("bound of sequence_mask_metric=geometric", idle=_GEOMETRIC),
        f"{_CORRECTION}.geo_mask_low": ours("bound of sequence_mask_metric=geometric", idle=_GEOMETRIC),
        f"{_CORRECTION}.product_mask_high": ours("bound of sequence_mask_metric=product", idle=_PRODUCT),
        f"{_CORRECTION}.product_mask_low": ours("bound of sequence_mask_metric=product", idle=_PRODUCT),
        f"{_CORRECTION}.outlier_token_is_threshold_low": ours("a sequence with a lower token ratio is masked"),
        f"{_CORRECTION}.outlier_token_is_threshold_high": ours("a sequence with a higher token ratio is masked"),
        f"{_CORRECTION}.token_mask_is_threshold_low": ours("a token with a lower ratio is masked"),
        f"{_CORRECTION}.token_mask_is_threshold_high": ours("a token with a higher ratio is masked"),
        "enable_sample_support_replay": Refused("the sampler's support is not replayed", "write false"),
        "value_clip": ours("how far a value may move from the old one before that stops paying", idle=without_critic),
        "dynamic_sampling.type": skyrls(
            "prompts sampled again until groups differ",
            f"{_TRAINER}.train",
            f"{_DYNAMIC_SAMPLING_TESTS}test_filtering_collects_groups_that_differ",
            f"{_DYNAMIC_SAMPLING_TESTS}test_replacing_takes_the_place_of_groups_that_do_not_differ",
            limit=one_of(None, "filter", "replace"),
        ),
        "dynamic_sampling.max_sample_batches": skyrls(
            "batches sampled at most", f"{_TRAINER}.handle_dynamic_sampling", idle=_resampling
        ),
        "dynamic_sampling.min_replace_ratio": skyrls(
            "share of good groups that replacing needs",
            f"{_TRAINER}.handle_dynamic_sampling",
            idle=first_of(_resampling, _unless("dynamic_sampling.type", "replace")),
        ),
        **{f"sapo.{name}": _parameter("sapo") for name in ("tau_pos", "tau_neg")},
        **{f"clip_cov.{name}": _parameter("clip_cov") for name in ("clip_ratio", "clip_cov_lb", "clip_cov_ub")},
        **{f"kl_cov.{name}": _parameter("kl_cov") for name in ("kl_cov_frac", "ppo_kl_coef")},
        **{
            f"cispo.{name}": _parameter("cispo")
            for name in ("cispo_eps_clip_low", "cispo_eps_clip_high", "cispo_anchor")
        },
        **{f"dppo.{name}": _parameter("dppo") for name in ("dppo_type", "delta_low", "delta_high")},
        "max_seq_len": skyrls(
            "the constant of loss_reduction=seq_mean_token_sum_norm",
            f"{_TRAINER}._normalize_advantages",
            _FELT,
            idle=first_of(_without_advantages, _unless("loss_reduction", "seq_mean_token_sum_norm")),
        ),
    },
)

ALGORITHM = {name: _unless_own(entry) for name, entry in _ENTRIES.items()}
