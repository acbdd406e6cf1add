"""What a forward pass leaves for post-processors and losses, and the settings that decide how it is computed."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch

from ..errors import UnsupportedError
from .registry import nearest_name

__all__ = ["TEMPERATURE_REQUIRED", "LogitsSettings", "ModelOutputs", "number_of", "temperature_of"]

TEMPERATURE_REQUIRED = (
    "meta['temperature'] is required: log-probs are those of the distribution that the tokens were sampled from"
)

_DEFAULT_PEAK_GIB = {"cpu": 0.01}
"""What stays in a processor's caches; 1 on other devices."""

LogitsMode = Literal["none", "compute", "memory"]


@dataclass(frozen=True)
class LogitsSettings:
    """How log-probs come from the model's last layer; from ``meta["logits_*"]``."""

    logits_optimization: LogitsMode | None = None
    """none = softmax over all logits at once, and processors may read them; compute = in chunks over existing logits;
    memory = chunks of logits from hidden states, forward and backward; None = memory where the model has a linear LM
    head, else compute."""
    logits_optimization_peak_mem_size_in_gib: float | None = None
    """GiB that the buffers for logits may take; None = 1 on GPUs, 0.01 on CPUs, which is faster than more there."""
    logits_compute_in_fp32: bool = True
    """Softmax in float32 whatever the model's dtype; False = in the logits' dtype (bf16 is off by up to 0.1 nat)."""
    logits_compute_from_fp32_inputs: bool = False
    """Multiply float32 copies of hidden states and LM head, so that logits are float32 too."""

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "LogitsSettings":
        """The settings of a call; an unknown ``logits_*`` key is refused."""
        known = tuple(cls.__dataclass_fields__)
        given = {name: value for name, value in meta.items() if name.startswith("logits_")}
        for name, value in given.items():
            if name not in known:
                raise UnsupportedError(
                    f"meta[{name!r}]={value!r}: no such setting{nearest_name(name, known)}; known: {', '.join(known)}"
                )
        return cls(**given)

    def __post_init__(self) -> None:
        modes = get_args(LogitsMode)
        if self.logits_optimization is not None and self.logits_optimization not in modes:
            raise UnsupportedError(
                f"meta['logits_optimization']={self.logits_optimization!r} is unknown"
                f"{nearest_name(str(self.logits_optimization), modes)}; known: {', '.join(modes)}"
            )
        size = self.logits_optimization_peak_mem_size_in_gib
        if size is not None and (isinstance(size, bool) or not isinstance(size, Real) or not 0 < size < math.inf):
            raise UnsupportedError(
                f"meta['logits_optimization_peak_mem_size_in_gib']={size!r} must be a number above 0, in GiB"
            )
        for name in ("logits_compute_in_fp32", "logits_compute_from_fp32_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"meta[{name!r}]={getattr(self, name)!r} must be True or False")

    def peak_gib(self, device_type: str) -> float:
        """GiB of the temporaries, on a device type."""
        size = self.logits_optimization_peak_mem_size_in_gib
        return _DEFAULT_PEAK_GIB.get(device_type, 1.0) if size is None else size


class ModelOutputs(Mapping[str, Any]):
    """Outputs of one micro-batch by name: rows [b, S], aligned to tokens, exactly 0 outside the attention mask.

    ``logprobs`` and ``entropy`` are float32 (float64 if the logits are); ``hidden_states`` [b, S, H] and ``lm_head``
    (the module) where the model has a linear LM head; ``logits`` [b, S, V] in logits mode none, raw: entry i predicts
    token i + 1. What post-processors returned is there too. An entry is made when it is first asked for.
    """

    def __init__(self, lazy: Mapping[str, Callable[[], Any]], advice: Mapping[str, str]):
        self._values: dict[str, Any] = {}
        self._lazy = dict(lazy)
        self._advice = advice

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            if name not in self._lazy:
                raise KeyError(f"{name!r} is not among the model outputs: {self._advice.get(name, ', '.join(self))}")
            self._values[name] = self._lazy[name]()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lazy | self._values)

    def __len__(self) -> int:
        return len(self._lazy | self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._lazy

    def add(self, values: Mapping[str, Any]) -> None:
        """Take what a post-processor returned."""
        self._values.update(values)


def temperature_of(meta: Mapping[str, Any]) -> float:
    """The sampling temperature that divides the logits.

    Raises:
        ValueError: it is missing, or not above 0.
    """
    if meta.get("temperature") is None:
        raise ValueError(TEMPERATURE_REQUIRED)
    temperature = number_of(meta, "temperature")
    if not temperature > 0:
        raise ValueError(f"meta['temperature']={temperature!r} must be a number above 0")
    return float(temperature)


def number_of(meta: Mapping[str, Any], name: str) -> float:
    """A Python, NumPy or one-element tensor number of ``meta`` as a Python number.

    Raises:
        ValueError: it is something else, or not finite.
    """
    value = meta[name]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"meta[{name!r}]={value!r} must be a finite number")
    return int(value) if isinstance(value, Integral) else float(value)
