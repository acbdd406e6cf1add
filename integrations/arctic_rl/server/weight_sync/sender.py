"""The sending side: what a rank of the policy does for each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..engine import full_parameters, whole_shape
from ..lora import Weight, model_weights
from ..weights import Segment, TensorSpec, dtype_name, segment_at, write_weights
from .part import PackedPart, pack

if TYPE_CHECKING:
    import torch


class WeightSender:
    """The weights of one rank's engine; every rank must make the same calls, for they gather together."""

    def __init__(self, engine: Any, zero_stage: int, rank: int) -> None:
        self._engine = engine
        self._zero_stage = zero_stage
        self._rank = rank
        self._segments: dict[str, Segment] = {}
        self._transfer: tuple[Any, Any] | None = None
        self._declared: dict[str, tuple[Weight, TensorSpec]] = {}

    def declare(self, dtype: str) -> list[TensorSpec]:
        """All tensors, whole, in the order of sending; nothing is gathered.

        Args:
            dtype: that floating-point tensors are sent in.
        """
        self._declared = {}
        for weight in model_weights(self._engine.module):
            parameter = weight.parameters[0]
            sent = dtype if parameter.is_floating_point() else dtype_name(parameter.dtype)
            self._declared[weight.name] = weight, TensorSpec(weight.name, whole_shape(parameter), sent)
        return [spec for _, spec in self._declared.values()]

    def export(self, directory: str, version: int, dtype: str) -> str | None:
        """Write all weights to a folder; returns the manifest's path on rank 0, None elsewhere."""
        specs = self.declare(dtype)
        return self._write(specs, full_parameters(self._engine, self._zero_stage), directory, version, dtype)

    def export_bucket(
        self, names: Sequence[str], directory: str | None, version: int, dtype: str
    ) -> str | PackedPart | None:
        """Write some of the weights, each gathered alone.

        Args:
            names: of tensors of the last ``declare``, which was for ``dtype``.
            directory: as in ``export``; None = give the bytes.

        Returns:
            On rank 0 the manifest's path, or the bytes; None elsewhere.
        """
        if any(name not in self._declared for name in names):
            self.declare(dtype)
        weights = [self._declared[name][0] for name in names]
        bucket = [self._declared[name][1] for name in names]
        values = full_parameters(self._engine, self._zero_stage, weights=weights, gather_bytes=0)
        if directory is not None or self._rank != 0:
            return self._write(bucket, values, directory, version, dtype)
        return pack(bucket, values, version, dtype)

    def transfer(
        self,
        backend: str,
        engines: Sequence[Any],
        processes: int,
        tensors: Sequence[TensorSpec],
        copies: Mapping[str, str],
        bucket_bytes: int,
    ) -> None:
        """Send all weights by vLLM's transfer engine, which is made anew for other engines than last time.

        Args:
            backend: ``nccl`` or ``ipc``.
            engines: Ray actors of the sampling workers.
            processes: GPU processes of each.
            tensors: ``declare`` in the sampler's dtype.
            copies: further names that the engines keep -> the tensor whose values they get.
            bucket_bytes: of a packed buffer.
        """
        import torch

        from . import ipc, nccl
        from .transfer import EngineClient, trainer_engine, weight_source

        key = (backend, tuple(engines), tuple(tensors), tuple(sorted(copies.items())))
        if self._transfer is None or self._transfer[0] != key:
            lasting = backend == "ipc" and self._are_lasting(tensors)
            if backend == "ipc":
                info = ipc.init_info(rank=self._rank, tensors=tensors, lasting=lasting, bucket_bytes=bucket_bytes)
            else:
                info = nccl.init_info(
                    rank=self._rank,
                    address=self._free_address() if self._rank == 0 else None,
                    processes=len(engines) * processes,
                    bucket_bytes=bucket_bytes,
                )
            source = weight_source(tensors, copies, self._read, lasting=lasting)
            self._transfer = key, trainer_engine(backend, info, EngineClient(engines, processes), source)
        if torch.cuda.is_available():
            # vLLM packs on streams of its own, which do not wait for the step that made these weights.
            torch.cuda.synchronize()
        self._transfer[1].send_weights()

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return full_parameters(self._engine, self._zero_stage, gather_bytes=0)

    def _are_lasting(self, tensors: Sequence[TensorSpec]) -> bool:
        """Whether the model's own parameters are what is sent."""
        weights = model_weights(self._engine.module)
        return self._zero_stage != 3 and all(
            len(weight.parameters) == 1 and dtype_name(weight.parameters[0].dtype) == spec.dtype
            for weight, spec in zip(weights, tensors, strict=True)
        )

    @staticmethod
    def _free_address() -> tuple[str, int]:
        from ..process import free_address

        return free_address()

    def _write(
        self,
        specs: Sequence[TensorSpec],
        values: Iterator[tuple[str, torch.Tensor]],
        directory: str | None,
        version: int,
        dtype: str,
    ) -> str | None:
        if self._rank != 0:
            for _ in values:
                pass
            return None
        segment = self._segments.setdefault(directory, segment_at(directory))
        return str(write_weights(specs, values, directory, version, dtype, segment=segment))
