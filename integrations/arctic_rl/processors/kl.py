"""Per-token estimates of KL(policy || reference) from the log-probs of the sampled tokens.

Schulman, http://joschu.net/blog/kl-approx.html; names and the clamps of k3 as in verl's ``kl_penalty`` and SkyRL's
``compute_approx_kl``.
"""

import torch

from ..errors import UnsupportedError
from .registry import nearest_name

__all__ = ["KL_TYPES", "kl_estimate"]

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_ESTIMATORS = ("k1", "abs", "k2", "k3")

KL_TYPES = tuple(name + plus for name in (*_ESTIMATORS, *_ALIASES) for plus in ("", "+"))
"""Accepted names. With "+", the value is the estimator's and the gradient that of k2, which is unbiased."""


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimate of every token, of the inputs' shape.

    With d = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1 with d kept within 20 and
    the result within 10.

    Raises:
        UnsupportedError: ``kl_type`` is none of :data:`KL_TYPES`.
    """
    if kl_type not in KL_TYPES:
        raise UnsupportedError(
            f"kl_loss_type={kl_type!r} is unknown{nearest_name(kl_type, KL_TYPES)}; known: {', '.join(KL_TYPES)}"
        )
    name = kl_type.removesuffix("+")
    value = _estimate(logprobs, ref_logprobs, _ALIASES.get(name, name))
    if not kl_type.endswith("+"):
        return value
    unbiased = _estimate(logprobs, ref_logprobs, "k2")
    return unbiased - unbiased.detach() + value.detach()


def _estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, name: str) -> torch.Tensor:
    difference = logprobs - ref_logprobs
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return 0.5 * difference.square()
    bounded = (-difference).clamp(-20, 20)
    return (bounded.exp() - bounded - 1).clamp(-10, 10)
