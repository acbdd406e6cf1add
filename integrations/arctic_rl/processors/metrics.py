"""Metrics of a loss function, reduced over micro-batches and ranks to one Python number each.

A loss returns, per name, one of
    a number               mean over the mini-batch, weighted by the tokens of the effective mask
    (sum, weight)          total sum / total weight
    ``LossShare(value)``   summed over micro-batches and averaged over ranks, as the loss itself is
    ``Maximum(value)``     largest value
    ``Minimum(value)``     smallest value; 0 if every one is infinite, which stands for a minimum over nothing
Values may be Python numbers, or tensors of one element.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LossShare", "Maximum", "MetricTable", "Minimum", "merge"]


@dataclass(frozen=True)
class LossShare:
    """A part of the loss, scaled as the loss is."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Maximum:
    """A value of which the largest counts."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Minimum:
    """A value of which the smallest counts; infinity stands for a minimum over nothing."""

    value: float | torch.Tensor


class MetricTable:
    """Metrics of one rank, added up over its micro-batches."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[str, Any, Any]] = {}

    def add(self, metrics: Mapping[str, Any], num_tokens: float) -> None:
        """Add one micro-batch's metrics.

        Raises:
            ValueError: a metric is none of the kinds, or changed its kind between micro-batches.
        """
        for name, metric in metrics.items():
            kind, value, weight = _kind(name, metric, num_tokens)
            if name not in self._totals:
                self._totals[name] = (kind, value, weight)
                continue
            seen, total, total_weight = self._totals[name]
            if seen != kind:
                raise ValueError(f"metric {name!r} was a {seen} in one micro-batch and is a {kind} in another")
            if kind in _EXTREMES:
                self._totals[name] = (kind, _EXTREMES[kind](total, value), weight)
            else:
                self._totals[name] = (kind, total + value, total_weight + weight)

    def totals(self) -> dict[str, tuple[str, float, float]]:
        """(kind, total, weight) a name, as Python numbers."""
        if not self._totals:
            return {}
        names = list(self._totals)
        numbers = torch.stack([torch.stack([value, weight]) for _, value, weight in self._totals.values()]).tolist()
        return {
            name: (self._totals[name][0], value, weight) for name, (value, weight) in zip(names, numbers, strict=True)
        }


def merge(ranks: list[dict[str, tuple[str, float, float]]]) -> dict[str, float]:
    """One number a name from the totals of every rank; a mean over no weight is 0."""
    merged: dict[str, tuple[str, list[float], list[float]]] = {}
    for totals in ranks:
        for name, (kind, value, weight) in totals.items():
            seen, values, weights = merged.setdefault(name, (kind, [], []))
            if seen != kind:
                raise ValueError(f"metric {name!r} is a {seen} on one rank and a {kind} on another")
            values.append(value)
            weights.append(weight)
    result = {}
    for name, (kind, values, weights) in merged.items():
        if kind == "maximum":
            result[name] = max(values)
        elif kind == "minimum":
            result[name] = 0.0 if min(values) == math.inf else min(values)
        elif kind == "loss share":
            result[name] = sum(values) / len(ranks)
        else:
            result[name] = sum(values) / sum(weights) if sum(weights) else 0.0
    return result


_KINDS = {"LossShare": "loss share", "Maximum": "maximum", "Minimum": "minimum"}
_EXTREMES = {"maximum": torch.maximum, "minimum": torch.minimum}


def _kind(name: str, metric: Any, num_tokens: float) -> tuple[str, torch.Tensor, torch.Tensor]:
    # By name: a loss may have taken the class from this file under its other package name.
    kind = _KINDS.get(type(metric).__name__)
    if kind is not None:
        return kind, _scalar(name, metric.value), _scalar(name, 1.0)
    if isinstance(metric, tuple):
        if len(metric) != 2:
            raise ValueError(f"metric {name!r} is a tuple of {len(metric)}; a pair is (sum, weight)")
        return "mean", _scalar(name, metric[0]), _scalar(name, metric[1])
    value = _scalar(name, metric)
    return "mean", value * num_tokens, _scalar(name, num_tokens)


def _scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().double().reshape(()).cpu()
    if isinstance(value, bool | int | float) or (hasattr(value, "__float__") and getattr(value, "ndim", 1) == 0):
        return torch.tensor(float(value), dtype=torch.float64)
    raise ValueError(
        f"metric {name!r} is {value!r}; a metric is a number, a pair (sum, weight), LossShare, Maximum or Minimum"
    )
