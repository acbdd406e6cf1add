"""Brings a loaded model from the host to its device, which never holds more of it than it keeps there."""

from __future__ import annotations

from typing import Any

import torch


def cast_parameters(model: torch.nn.Module, dtype: str) -> None:
    """Bring floating-point parameters to a dtype where they are, one after the other; tied ones stay tied.

    Buffers keep theirs, rotary frequencies among them, which 16 bits would change: so does DeepSpeed 0.19.8
    (``_cast_module_mixed_precision``), which makes the optimizer's float32 weights of parameters that it has cast.
    """
    wanted = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)


def partition(model: torch.nn.Module, config: dict[str, Any], *, dtype: str, device: str) -> None:
    """Shard a model on the host for ZeRO stage 3: a parameter goes to the device, and its shard stays there, before
    the next one goes.

    An engine that is given a model without shards moves all of it first. Buffers go as they are, which DeepSpeed
    leaves where it finds them in a model that is sharded already. Every rank must call it.

    Args:
        model: is changed in place.
        config: DeepSpeed's, of the engine that is built next.
        dtype: that the engine computes in.
        device: type of the device.
    """
    import deepspeed

    cast_parameters(model, dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
