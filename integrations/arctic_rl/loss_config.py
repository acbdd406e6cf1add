"""SkyRL's algorithm settings as the pipeline's loss, and the pipeline's metrics under SkyRL's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import UnsupportedError
from .zorro import WHERE_POSSIBLE

KL_AND_ENTROPY = (
    "entropy_coeff",
    "entropy_agg_mode",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "kl_loss_agg_mode",
)
"""Settings of ``actor_config`` that hold around any policy loss."""

CLIPPED_SURROGATES = ("regular", "dual_clip")
"""SkyRL's names of what the ``grpo`` loss computes."""

TOKEN_LOSSES = ("gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling", "cross_entropy")
"""SkyRL's other losses whose token terms depend on their own row only; ``processors.policy_losses`` has them."""

CORRECTED_LOSSES = (*CLIPPED_SURROGATES, "gspo", "sapo", "cispo", "rollout_is", "dppo")
"""SkyRL's losses that apply ``trainer.algorithm.off_policy_correction``."""

LOSS_WITHOUT_TERMS = "cross_entropy"
"""SkyRL's policy worker adds neither the KL nor the entropy term to this loss."""


@dataclass(frozen=True)
class LossRequest:
    """What an update asks of the server."""

    processing: dict[str, Any]
    """The pipeline's ``processing``."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What is added to ``meta``."""
    corrected: bool = False
    """The policy term is weighted by ``off_policy_correction``."""
    reads_reference: bool = True
    """The loss may read the reference model's log-probs, which are not sent otherwise."""
    own_micro_batches: bool = False
    """The loss may look beyond a row: it gets SkyRL's micro-batches and each row's whole window of tokens."""


def actor_config(cfg: Any) -> dict[str, Any]:
    """Settings of the ``grpo`` loss for a SkyRL recipe.

    SkyRL rescales the advantages of each mini-batch (``apply_loss_reduction_to_advantages_minibatch``), so that the
    policy term is a plain sum over tokens; its KL term is the mean over rows of each row's token mean. Its entropy is
    the mean over the tokens of a micro-batch, which depends on the split; here it is that of the whole mini-batch.

    Args:
        cfg: the validated SkyRL config; ``policy_loss_type`` is ``regular`` or ``dual_clip``.
    """
    algorithm = cfg.trainer.algorithm
    return {
        "clip_ratio": algorithm.eps_clip_low,
        "clip_ratio_low": algorithm.eps_clip_low,
        "clip_ratio_high": algorithm.eps_clip_high,
        "clip_ratio_c": algorithm.clip_ratio_c if algorithm.policy_loss_type == "dual_clip" else None,
        "loss_agg_mode": "sum",
        "entropy_coeff": algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        "entropy_agg_mode": "token-mean",
        "use_kl_loss": algorithm.use_kl_loss,
        "kl_loss_coef": algorithm.kl_loss_coef,
        "kl_loss_type": algorithm.kl_estimator_type,
        "kl_loss_agg_mode": "seq-mean-token-mean",
    }


def token_loss_config(cfg: Any) -> dict[str, Any]:
    """Settings of the recipe's loss where that is one of :data:`TOKEN_LOSSES`, under SkyRL's names."""
    algorithm = cfg.trainer.algorithm
    name = algorithm.policy_loss_type
    if name in ("gspo", "rollout_is"):
        return {"eps_clip_low": algorithm.eps_clip_low, "eps_clip_high": algorithm.eps_clip_high}
    if name in ("sapo", "cispo", "dppo"):
        return dict(vars(vars(algorithm)[name]))
    return {}


def registered_policy_loss(name: str) -> tuple[Callable[..., Any], bool]:
    """The function that SkyRL's registry holds under a name, and whether it is SkyRL's own.

    Raises:
        UnsupportedError: for a name that is not registered.
    """
    from skyrl.backends.skyrl_train.utils import ppo_utils

    try:
        function = ppo_utils.PolicyLossRegistry.get(name)
    except ValueError as error:
        raise UnsupportedError(f"trainer.algorithm.policy_loss_type={name!r} is not registered: {error}") from error
    return function, function.__module__ == ppo_utils.__name__


def loss_request(cfg: Any) -> LossRequest:
    """The loss of a recipe.

    A loss of the user's own (``trainer.arctic_rl.loss_fn``) is run inside ``regularized`` and finds the recipe's
    ``trainer.algorithm``, under SkyRL's names, in ``meta["algorithm"]``. One that the user registered with SkyRL
    travels with the request, so that a worker needs to know nothing of it.

    Args:
        cfg: the validated SkyRL config.

    Raises:
        UnsupportedError: for a policy loss that is not registered, or that cannot be sent to another process.
    """
    arctic, algorithm = cfg.trainer.arctic_rl, cfg.trainer.algorithm
    settings = actor_config(cfg)
    terms = {name: settings[name] for name in KL_AND_ENTROPY}
    if arctic.loss_fn is not None:
        config = terms | {"policy_loss": arctic.loss_fn, "policy_loss_config": dict(arctic.loss_config)}
        meta = {"algorithm": dataclasses.asdict(algorithm)}
        return LossRequest({"loss_fn": "regularized", "config": config}, meta)

    name = algorithm.policy_loss_type
    if name == LOSS_WITHOUT_TERMS:
        terms |= {"use_kl_loss": False, "entropy_coeff": 0.0}
    function, is_skyrls = registered_policy_loss(name)
    if is_skyrls and name in CLIPPED_SURROGATES:
        return LossRequest(
            {"loss_fn": "grpo", "config": settings},
            corrected=correction_enabled(cfg),
            reads_reference=algorithm.use_kl_loss,
        )
    if is_skyrls and name in TOKEN_LOSSES:
        config = terms | {"policy_loss": name, "policy_loss_config": token_loss_config(cfg)}
        corrected = name in CORRECTED_LOSSES and correction_enabled(cfg)
        return LossRequest(
            {"loss_fn": "regularized", "config": config}, corrected=corrected, reads_reference=terms["use_kl_loss"]
        )

    from .processors.skyrl_losses import pack_policy_loss

    packed = pack_policy_loss(function, algorithm)
    config = terms | {"policy_loss": "skyrl_policy_loss", "policy_loss_config": {"packed": packed}}
    return LossRequest(
        {"loss_fn": "regularized", "config": config}, reads_reference=terms["use_kl_loss"], own_micro_batches=True
    )


def packed_policy_loss(cfg: Any) -> bytes | None:
    """What the workers load when they start: the policy loss that travels with the requests, if it does."""
    config = loss_request(cfg).processing["config"]
    return config["policy_loss_config"]["packed"] if config.get("policy_loss") == "skyrl_policy_loss" else None


def correction_enabled(cfg: Any) -> bool:
    """Whether ``trainer.algorithm.off_policy_correction`` asks for anything."""
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled

    return off_policy_correction_enabled(cfg.trainer.algorithm.off_policy_correction)


def reads_old_logprobs(cfg: Any) -> bool:
    """Whether an update needs log-probs of the policy at the batch's start.

    SkyRL does not compute them for a loss that takes the sampler's instead (``RayPPOTrainer._skip_policy_forward``).
    """
    algorithm = cfg.trainer.algorithm
    if cfg.trainer.arctic_rl.loss_fn is not None or correction_enabled(cfg) or algorithm.use_kl_in_reward:
        return True
    if algorithm.policy_loss_type == "cispo":
        return algorithm.cispo.cispo_anchor == "old"
    return algorithm.policy_loss_type not in ("rollout_is", "dppo")


def reads_rollout_logprobs(cfg: Any) -> bool:
    """Whether the recipe's policy term cannot be computed without the sampler's log-probs."""
    algorithm = cfg.trainer.algorithm
    if cfg.trainer.arctic_rl.loss_fn is not None:
        return False
    anchored = algorithm.policy_loss_type == "cispo" and algorithm.cispo.cispo_anchor == "rollout"
    corrected = algorithm.policy_loss_type in CORRECTED_LOSSES and correction_enabled(cfg)
    return corrected or anchored or algorithm.policy_loss_type == "rollout_is"


def logits_meta(cfg: Any) -> dict[str, Any]:
    """The ``logits_*`` settings of every pass, as ``meta`` names them; unset ones are left out."""
    values = {item: value for item, value in vars(cfg.trainer.arctic_rl).items() if item.startswith("logits_")}
    return {item: value for item, value in values.items() if value is not None}


def sharing_meta(cfg: Any) -> dict[str, Any]:
    """The ``zorro_*`` settings of every pass, as ``meta`` names them."""
    arctic = cfg.trainer.arctic_rl
    return {
        "zorro_train_enable": WHERE_POSSIBLE if arctic.use_zorro is None else arctic.use_zorro,
        "zorro_self_check": arctic.zorro_self_check,
    }


def skyrl_metrics(cfg: Any, result: dict[str, Any], *, response_length: int) -> dict[str, float]:
    """What SkyRL's policy worker reports for a mini-batch, from the pipeline's result.

    Args:
        cfg: the validated SkyRL config.
        result: ``run_pipeline``'s result with ``lr``, the learning rate that the next optimizer step uses.
        response_length: padded width of the responses, in tokens.
    """
    from .processors.regularizers import DRIFT
    from .processors.skyrl_losses import LOSS_METRICS

    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type == LOSS_WITHOUT_TERMS and cfg.trainer.arctic_rl.loss_fn is None:
        return {"loss": result["avg_loss"], "lr": result["lr"], "response_length": response_length}
    metrics = result["metrics"]
    named = {
        "final_loss": result["avg_loss"],
        "policy_loss": metrics["pg_loss"],
        "policy_entropy": metrics["entropy"],
        "policy_lr": result["lr"],
        "response_length": response_length,
    }
    for name in sorted(metrics.keys() - {"pg_loss", "entropy", "kl_loss"}):
        own = name.startswith((DRIFT, LOSS_METRICS))
        named[name if own else f"{LOSS_METRICS}{_SKYRL_NAMES.get(name, name)}"] = metrics[name]
    if algorithm.use_kl_loss:
        named["policy_kl"] = metrics["kl_loss"]
    return named


_SKYRL_NAMES = {
    "pg_clipfrac": "clip_ratio",
    "pg_clipfrac_lower": "clip_ratio_lower",
    "ratio_max_deviation": "ratio_deviation_max",
}
