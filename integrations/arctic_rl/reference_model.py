"""Which model gives the log-probs of a KL term."""

from __future__ import annotations

from typing import Any


def reference_is_base(trainer: Any) -> bool:
    """Whether the policy without its adapters is the reference model, so that no second model is needed.

    It is where adapters are trained on the model that the reference is to be, and the reference stays that.

    Args:
        trainer: the ``trainer`` section of a SkyRL config.
    """
    return (
        trainer.policy.model.lora.rank > 0
        and trainer.ref.model.path in (None, trainer.policy.model.path)
        and trainer.ref.model_config_kwargs == trainer.policy.model_config_kwargs
        and not trainer.update_ref_every_epoch
    )
