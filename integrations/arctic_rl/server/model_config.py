"""A model's own config with values that a recipe puts in place of those of its ``config.json``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_model_config(
    model_path: str, changes: Mapping[str, Any] | None = None, *, trust_remote_code: bool = True
) -> PretrainedConfig:
    """The config of a Hugging Face model, changed as ``AutoConfig.from_pretrained(model_path, **changes)`` does.

    Raises:
        UnsupportedError: a line for each name that the model's config does not have, which would change nothing.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    if not changes:
        return config
    unknown = unknown_names(config, changes)
    if unknown:
        raise UnsupportedError(
            "\n".join(
                f"{name}: the config of {model_path} ({type(config).__name__}) has no such value" for name in unknown
            )
        )
    return AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, **copy.deepcopy(dict(changes)))


def unknown_names(config: PretrainedConfig, changes: Mapping[str, Any]) -> list[str]:
    """Names of ``changes`` that a model's config does not have."""
    return [name for name in changes if not hasattr(config, name)]
