"""What stands in a trainer where SkyRL keeps the actors of a model's workers."""

from __future__ import annotations

from typing import NoReturn

from .errors import UnsupportedError


class ServedModel:
    """Says that a model is there; its workers are the backend's, and are reached through the trainer's dispatch.

    Args:
        attribute: the trainer's name for it, ``policy_model``, ``critic_model`` or ``ref_model``.
    """

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"the recipe asks its trainer's {self._attribute} for {name}, a group of worker actors that this backend "
            "does not have: use the methods of RayPPOTrainer, or those of its dispatch"
        )
