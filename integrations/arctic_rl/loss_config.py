"""SkyRL's algorithm settings as the pipeline's ``actor_config``, and the pipeline's metrics under SkyRL's names."""

from __future__ import annotations

from typing import Any


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
        "loss_metrics/clip_ratio": metrics["pg_clipfrac"],
        "loss_metrics/clip_ratio_lower": metrics["pg_clipfrac_lower"],
        "loss_metrics/ppo_kl": metrics["ppo_kl"],
        "loss_metrics/ratio_deviation_max": metrics["ratio_max_deviation"],
    }
    if cfg.trainer.algorithm.use_kl_loss:
        named["policy_kl"] = metrics["kl_loss"]
    return named
