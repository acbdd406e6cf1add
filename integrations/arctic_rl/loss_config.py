"""SkyRL's algorithm settings as the pipeline's ``actor_config``, and the pipeline's metrics under SkyRL's names."""

from __future__ import annotations

import dataclasses
from typing import Any

KL_AND_ENTROPY = (
    "entropy_coeff",
    "entropy_agg_mode",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "kl_loss_agg_mode",
)
"""Settings of ``actor_config`` that hold around any policy loss."""


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


def loss_request(cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pipeline's ``processing`` of an update, and what it adds to ``meta``.

    A loss of the user's (``trainer.arctic_rl.loss_fn``) is run inside ``regularized`` and finds the recipe's
    ``trainer.algorithm``, under SkyRL's names, in ``meta["algorithm"]``.
    """
    arctic = cfg.trainer.arctic_rl
    settings = actor_config(cfg)
    if arctic.loss_fn is None:
        return {"loss_fn": "grpo", "config": settings}, {}
    config = {name: settings[name] for name in KL_AND_ENTROPY}
    config |= {"policy_loss": arctic.loss_fn, "policy_loss_config": dict(arctic.loss_config)}
    return {"loss_fn": "regularized", "config": config}, {"algorithm": dataclasses.asdict(cfg.trainer.algorithm)}


def logits_meta(cfg: Any) -> dict[str, Any]:
    """The ``logits_*`` settings of every pass, as ``meta`` names them; unset ones are left out."""
    values = {item: value for item, value in vars(cfg.trainer.arctic_rl).items() if item.startswith("logits_")}
    return {item: value for item, value in values.items() if value is not None}


def skyrl_metrics(cfg: Any, result: dict[str, Any], *, response_length: int) -> dict[str, float]:
    """What SkyRL's policy worker reports for a mini-batch, from the pipeline's result.

    Args:
        cfg: the validated SkyRL config.
        result: ``run_pipeline``'s result with ``lr``, the learning rate that the next optimizer step uses.
        response_length: padded width of the responses, in tokens.
    """
    metrics = result["metrics"]
    named = {
        "final_loss": result["avg_loss"],
        "policy_loss": metrics["pg_loss"],
        "policy_entropy": metrics["entropy"],
        "policy_lr": result["lr"],
        "response_length": response_length,
    }
    of_loss = metrics.keys() - {"pg_loss", "entropy", "kl_loss"}
    named |= {f"loss_metrics/{_SKYRL_NAMES.get(name, name)}": metrics[name] for name in sorted(of_loss)}
    if cfg.trainer.algorithm.use_kl_loss:
        named["policy_kl"] = metrics["kl_loss"]
    return named


_SKYRL_NAMES = {
    "pg_clipfrac": "clip_ratio",
    "pg_clipfrac_lower": "clip_ratio_lower",
    "ratio_max_deviation": "ratio_deviation_max",
}
