"""The receiving side of a model that is not an engine's: the reference model becomes a copy of the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import ArcticError
from ..weights import TensorSpec, compare_tensors, iter_weights
from .part import Part, fetch, unpack

if TYPE_CHECKING:
    import torch


class ModelReceiver:
    """Takes parts of an update into a model's parameters, in place."""

    def __init__(self, module: torch.nn.Module, dtype: str) -> None:
        self._parameters = dict(module.named_parameters())
        self._dtype = dtype
        self._version = 0
        self._missing: set[str] = set()

    def check(self, tensors: Iterable[TensorSpec], dtype: str) -> dict[str, str]:
        """Compare names and shapes with the model's; see ``SamplingWorker.check_tensors``.

        Raises:
            ArcticError: when a tensor is missing, unknown or of another shape.
        """
        expected = [TensorSpec(name, tuple(value.shape), self._dtype) for name, value in self._parameters.items()]
        problems = compare_tensors(tensors, dtype, expected, self._dtype)
        if problems:
            raise ArcticError("the policy's weights do not fit the reference model:\n" + "\n".join(problems))
        return {}

    def begin(self, version: int) -> None:
        self._version, self._missing = version, set(self._parameters)

    def load(self, part: Part) -> None:
        """Copy a part's tensors."""
        import torch

        part = fetch(part)
        values = iter_weights(part) if isinstance(part, str) else unpack(part)
        with torch.no_grad():
            for name, value in values:
                self._parameters[name].copy_(value)
                self._missing.discard(name)

    def end(self) -> int:
        """The version, now that all is there.

        Raises:
            ArcticError: something did not come.
        """
        if self._missing:
            raise ArcticError(f"the reference model got no {sorted(self._missing)[0]!r}")
        return self._version
