"""Adapters that a recipe asks for, held against its models before any of them is loaded."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UnsupportedError


def adapter_problems(cfg: Any) -> Iterator[str]:
    """Layers that cannot have the adapters asked for, a line a role.

    The models are built without weights, from the ``config.json`` of their folders; one that has no folder here, or
    cannot be built, is left to the workers and to other checks.
    """
    for role in ("policy", "critic"):
        model = vars(cfg.trainer)[role].model
        if not model.path or model.lora.rank <= 0 or not (Path(model.path).expanduser() / "config.json").is_file():
            continue
        try:
            _put_in(cfg, role, str(Path(model.path).expanduser()))
        except UnsupportedError as error:
            yield str(error)
        except (OSError, ValueError, ImportError, re.error):
            continue


def _put_in(cfg: Any, role: str, path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from .server.critic import value_model_class
    from .server.lora import add_adapters
    from .server.model_config import load_model_config
    from .server_config import adapters

    config = load_model_config(path)
    with torch.device("meta"):
        if role == "critic":
            model = value_model_class(type(config), cfg.trainer.algorithm.value_head_prefix)(config)
        else:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    # Which layers have some does not depend on how they begin.
    add_adapters(model, dataclasses.replace(adapters(cfg, role), init_method="kaiming", dropout=0.0), seed=0)
