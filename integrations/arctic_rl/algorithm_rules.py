"""What of a recipe's algorithm settings cannot be done, or would be ignored by the policy loss it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import UnsupportedError
from .loss_config import (
    CLIPPED_SURROGATES,
    CORRECTED_LOSSES,
    LOSS_WITHOUT_TERMS,
    TOKEN_LOSSES,
    correction_enabled,
    loss_request,
    reads_rollout_logprobs,
    token_loss_config,
)

_CORRECTION = "trainer.algorithm.off_policy_correction"
_COVARIANCE_LOSSES = ("clip_cov", "kl_cov")


def loss_problems(cfg: Any) -> Iterator[str]:
    """Settings of the policy loss and its KL and entropy terms that cannot work, a line each."""
    from .processors import policy_losses
    from .processors.losses import GrpoConfig
    from .processors.regularizers import RegularizedConfig

    try:
        processing = loss_request(cfg).processing
        (GrpoConfig if processing["loss_fn"] == "grpo" else RegularizedConfig)(**processing["config"])
    except UnsupportedError as error:
        yield f"trainer.algorithm: {error}"
        return
    configs = {
        "gspo": policy_losses.ClipRangeConfig,
        "rollout_is": policy_losses.ClipRangeConfig,
        "sapo": policy_losses.SapoConfig,
        "cispo": policy_losses.CispoConfig,
        "dppo": policy_losses.DppoConfig,
    }
    name = processing["config"].get("policy_loss")
    if name in configs:
        try:
            configs[name](**token_loss_config(cfg))
        except UnsupportedError as error:
            yield f"trainer.algorithm: {error}"


def correction_refusals(cfg: Any) -> Iterator[str]:
    """Off-policy corrections that would have no effect, or none to work on, a line each."""
    algorithm = cfg.trainer.algorithm
    correction, name = algorithm.off_policy_correction, algorithm.policy_loss_type
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


def algorithm_without_effect(cfg: Any) -> Iterator[str]:
    """Algorithm settings that SkyRL's own policy worker leaves out with the recipe's loss, a line each."""
    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type != LOSS_WITHOUT_TERMS or cfg.trainer.arctic_rl.loss_fn is not None:
        return
    for name in ("use_kl_loss", "use_entropy_loss"):
        if vars(algorithm)[name]:
            yield f"trainer.algorithm.{name}: SkyRL adds no such term to policy_loss_type={LOSS_WITHOUT_TERMS}"
