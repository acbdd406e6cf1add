"""What of a recipe's algorithm settings cannot be done, or would be ignored by the policy loss it names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedError
from .loss_config import (
    CLIPPED_SURROGATES,
    CORRECTED_LOSSES,
    TOKEN_LOSSES,
    correction_enabled,
    loss_request,
    reads_rollout_logprobs,
)
from .support.leaves import value_of
from .support.table import is_set

_ALGORITHM = "trainer.algorithm"
_OFF_POLICY = "off_policy_correction"
_CORRECTION = "trainer.algorithm.off_policy_correction"
_COVARIANCE_LOSSES = ("clip_cov", "kl_cov")


@dataclass(frozen=True)
class _Range:
    """Where a number may lie, and in which recipes it is read."""

    read: Callable[[Any], bool]
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    unbounded: bool = False
    """Infinity is a value: no bound."""

    def problem(self, value: float) -> str | None:
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        fits = (
            not math.isnan(value)
            and (self.unbounded or math.isfinite(value))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )
        if fits:
            return None
        limits = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)
        return f"must be a {'' if self.unbounded else 'finite '}number {limits}".rstrip()


def _with_loss(*losses: str) -> Callable[[Any], bool]:
    return lambda cfg: cfg.trainer.arctic_rl.loss_fn is None and cfg.trainer.algorithm.policy_loss_type in losses


def _with_flag(name: str) -> Callable[[Any], bool]:
    return lambda cfg: vars(cfg.trainer.algorithm)[name]


def _with_correction(setting: str, *values: str) -> Callable[[Any], bool]:
    return lambda cfg: vars(cfg.trainer.algorithm.off_policy_correction)[setting] in values


def _always(cfg: Any) -> bool:
    return True


def _with_adaptive_kl(cfg: Any) -> bool:
    return cfg.trainer.algorithm.use_kl_in_reward and cfg.trainer.algorithm.kl_ctrl.type == "adaptive"


_CLIPPED = _with_loss(*CLIPPED_SURROGATES, "gspo", "rollout_is", "clip_cov")
_RANGES: dict[str, _Range] = {
    "eps_clip_low": _Range(_CLIPPED, at_least=0),
    "eps_clip_high": _Range(_CLIPPED, at_least=0),
    "clip_ratio_c": _Range(_with_loss("dual_clip"), above=1),
    "kl_loss_coef": _Range(_with_flag("use_kl_loss")),
    "entropy_loss_coef": _Range(_with_flag("use_entropy_loss")),
    "zero_variance_filter_tol": _Range(_with_flag("zero_variance_filter"), at_least=0),
    "kl_ctrl.kl_target": _Range(_with_adaptive_kl, above=0),
    "kl_ctrl.horizon": _Range(_with_adaptive_kl, at_least=1),
    "sapo.tau_pos": _Range(_with_loss("sapo"), above=0),
    "sapo.tau_neg": _Range(_with_loss("sapo"), above=0),
    "cispo.cispo_eps_clip_low": _Range(_with_loss("cispo"), at_least=0),
    "cispo.cispo_eps_clip_high": _Range(_with_loss("cispo"), at_least=0),
    "dppo.delta_low": _Range(_with_loss("dppo"), at_least=0),
    "dppo.delta_high": _Range(_with_loss("dppo"), at_least=0),
    "clip_cov.clip_ratio": _Range(_with_loss("clip_cov"), at_least=0, at_most=1),
    "kl_cov.kl_cov_frac": _Range(_with_loss("kl_cov"), at_least=0, at_most=1),
    "kl_cov.ppo_kl_coef": _Range(_with_loss("kl_cov")),
    "dynamic_sampling.min_replace_ratio": _Range(
        lambda cfg: cfg.trainer.algorithm.dynamic_sampling.type == "replace", at_least=0, at_most=1
    ),
    "value_clip": _Range(lambda cfg: bool(cfg.trainer.critic.model.path), at_least=0),
    "max_seq_len": _Range(lambda cfg: cfg.trainer.algorithm.loss_reduction == "seq_mean_token_sum_norm", at_least=1),
    "tis_imp_ratio_cap": _Range(_with_flag("use_tis"), unbounded=True),
    f"{_OFF_POLICY}.token_tis_ratio_clip_high": _Range(
        _with_correction("tis_ratio_type", "token"), above=0, unbounded=True
    ),
    f"{_OFF_POLICY}.sequence_tis_ratio_clip_high": _Range(
        _with_correction("tis_ratio_type", "sequence"), above=0, unbounded=True
    ),
    **{
        f"{_OFF_POLICY}.{metric}_mask_{end}": _Range(
            _with_correction("sequence_mask_metric", kind), at_least=0, unbounded=True
        )
        for metric, kind in (("geo", "geometric"), ("product", "product"))
        for end in ("low", "high")
    },
    **{
        f"{_OFF_POLICY}.{part}_is_threshold_{end}": _Range(_always, at_least=0, unbounded=True)
        for part in ("outlier_token", "token_mask")
        for end in ("low", "high")
    },
}
"""Numbers below ``trainer.algorithm``; a loss of the user's own reads them as it likes."""

_CHOICES = {
    "cispo.cispo_anchor": (_with_loss("cispo"), ("old", "rollout")),
    "kl_estimator_type": (_with_flag("use_kl_loss"), ("k1", "k2", "k3", "abs")),
    "dppo.dppo_type": (_with_loss("dppo"), ("binary_tv", "binary_kl")),
}

_PAIRS = (
    ("clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub", _with_loss("clip_cov")),
    *(
        (f"{_OFF_POLICY}.{part}_is_threshold_low", f"{_OFF_POLICY}.{part}_is_threshold_high", _always)
        for part in ("outlier_token", "token_mask")
    ),
    *(
        (
            f"{_OFF_POLICY}.{metric}_mask_low",
            f"{_OFF_POLICY}.{metric}_mask_high",
            _with_correction("sequence_mask_metric", kind),
        )
        for metric, kind in (("geo", "geometric"), ("product", "product"))
    ),
)
"""Lower and upper ends of one range, and where it is read."""


def loss_problems(cfg: Any) -> Iterator[str]:
    """Algorithm settings that cannot work, a line each."""
    for name, limits in _RANGES.items():
        value = value_of(cfg, f"{_ALGORITHM}.{name}")
        problem = limits.problem(value) if value is not None and limits.read(cfg) else None
        if problem is not None:
            yield f"{_ALGORITHM}.{name}={value}: {problem}"
    for name, (read, choices) in _CHOICES.items():
        value = value_of(cfg, f"{_ALGORITHM}.{name}")
        if read(cfg) and value not in choices:
            yield f"{_ALGORITHM}.{name}={value}: no such choice; write {' or '.join(choices)}"
    for low, high, read in _PAIRS:
        least, most = (value_of(cfg, f"{_ALGORITHM}.{name}") for name in (low, high))
        if read(cfg) and least is not None and most is not None and least > most:
            yield f"{_ALGORITHM}.{low}={least}: it is above {_ALGORITHM}.{high}={most}; write less"
    try:
        loss_request(cfg)
    except UnsupportedError as error:
        message = " ".join(str(error).split())
        setting = f"{_ALGORITHM}.policy_loss_type"
        yield (
            message
            if message.startswith(setting)
            else f"{setting}={cfg.trainer.algorithm.policy_loss_type}: {message}"
        )


def _old_names(cfg: Any) -> Iterator[str]:
    """``use_tis`` and its cap beside what SkyRL's ``validate_cfg`` overwrites with them."""
    algorithm = cfg.trainer.algorithm
    correction = algorithm.off_policy_correction
    if not algorithm.use_tis:
        return
    kind, cap = correction.tis_ratio_type, correction.token_tis_ratio_clip_high
    if kind not in (None, "token"):
        yield (
            f"{_CORRECTION}.tis_ratio_type={kind}: {_ALGORITHM}.use_tis=true is the old name of token; leave use_tis "
            "and tis_imp_ratio_cap out"
        )
    elif cap != algorithm.tis_imp_ratio_cap and is_set(f"{_CORRECTION}.token_tis_ratio_clip_high", cfg):
        yield (
            f"{_CORRECTION}.token_tis_ratio_clip_high={cap}: with {_ALGORITHM}.use_tis=true the cap is "
            f"{_ALGORITHM}.tis_imp_ratio_cap={algorithm.tis_imp_ratio_cap}; leave use_tis and tis_imp_ratio_cap "
            f"out and write {_CORRECTION}.tis_ratio_type=token"
        )


def correction_refusals(cfg: Any) -> Iterator[str]:
    """Off-policy corrections that would have no effect, or none to work on, a line each."""
    algorithm = cfg.trainer.algorithm
    correction, name = algorithm.off_policy_correction, algorithm.policy_loss_type
    yield from _old_names(cfg)
    bounds = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
    given = [bound for bound in bounds if vars(correction)[bound] is not None]
    if len(given) == 1:
        (missing,) = set(bounds) - set(given)
        yield (
            f"{_CORRECTION}.{given[0]}={vars(correction)[given[0]]}: tokens are masked outside a range of two bounds; "
            f"write {_CORRECTION}.{missing} too"
        )
    # SkyRL's validate_cfg turns the deprecated use_tis into this kind.
    tis = "token" if algorithm.use_tis else correction.tis_ratio_type
    enabled = correction_enabled(cfg) or tis is not None
    if enabled and cfg.trainer.arctic_rl.loss_fn is not None:
        yield (
            f"{_CORRECTION}: trainer.arctic_rl.loss_fn={cfg.trainer.arctic_rl.loss_fn} is not corrected for you; "
            "leave the correction out and use rollout_logprobs of the batch in your loss"
        )
    elif enabled and name in (*CLIPPED_SURROGATES, *TOKEN_LOSSES, *_COVARIANCE_LOSSES):
        if name not in CORRECTED_LOSSES:
            yield (
                f"{_CORRECTION}: SkyRL's policy loss {name} does not apply it; write "
                f"trainer.algorithm.policy_loss_type as one of {', '.join(CORRECTED_LOSSES)}, or leave it out"
            )
        if name == "cispo" and algorithm.cispo.cispo_anchor == "rollout" and tis is not None:
            yield (
                f"{_CORRECTION}.tis_ratio_type={tis}: "
                "trainer.algorithm.cispo.cispo_anchor=rollout corrects already; write one of the two"
            )
    for setting, allowed in (("tis_ratio_type", ("token", "sequence")), ("sequence_mask_metric", _SEQUENCE_METRICS)):
        value = vars(correction)[setting]
        if value is not None and value not in allowed:
            yield f"{_CORRECTION}.{setting}={value}: there is no such kind; write null, {' or '.join(allowed)}"
    # SkyRL's validate_cfg asks the engines for log-probs itself where these two are set.
    asked_by_skyrl = tis is not None or correction.sequence_mask_metric is not None
    if reads_rollout_logprobs(cfg) and not asked_by_skyrl and cfg.generator.sampling_params.logprobs is None:
        yield (
            f"generator.sampling_params.logprobs=null: the policy loss {name} needs the sampler's log-probs here; "
            "write 1"
        )


_SEQUENCE_METRICS = ("product", "geometric")
