"""Device memory of a training rank, given to others and taken back: what the rank holds stays as it is, bit for bit.

A rank holds two parts: ``weights`` (of the model, with its buffers) and ``optimizer`` (float32 weights, moments,
gradients and DeepSpeed's own buffers). DeepSpeed's ``offload_states`` moves one of them in the stages that have it:

- ZeRO 1 and 2, the optimizer's, unless they are on the host anyway (``offload_optimizer``): ``reload_states`` brings
  all to the device that is away, so weights cannot go through it too.
- ZeRO 3, the weights, unless some are frozen, at which it fails: its optimizer states are moved for DeepSpeed's own
  FusedAdam only, and its gradients are lost.
- ZeRO 0, and ZeRO 1 where it has DeepSpeed's ``BF16_Optimizer``, have no such function.

Whatever is still on the device then is moved storage by storage: the bytes are copied to the host and the storage is
emptied (as PyTorch's FSDP frees its flat parameters), so that every view, hook and reference stays valid. DeepSpeed's
buckets, in which gradients only stand while they are reduced, come back empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

WEIGHTS, OPTIMIZER = "weights", "optimizer"
PARTS = (WEIGHTS, OPTIMIZER)

DEEPSPEED_STATES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (OPTIMIZER, ("hp_params", "lp_grads", "optim_states")),
    2: (OPTIMIZER, ("hp_params", "lp_grads", "optim_states")),
    3: (WEIGHTS, ("lp_params",)),
}
"""By ZeRO stage, the part that DeepSpeed 0.19.8 moves itself with PyTorch's AdamW, and its names of what is in it."""


@dataclass(frozen=True)
class _Held:
    """A storage whose memory was given away."""

    storage: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor | None
    """Its bytes; None = nothing reads them again."""


class OffloadedStates:
    """Moves the parts of one engine between its device and the host.

    Args:
        engine: a DeepSpeed engine, or an ``InferenceEngine``, which has weights alone.
        zero_stage: of the engine; 0 for an ``InferenceEngine``.
        device: type of the device whose memory is given away, ``cuda``. With ``cpu`` everything happens on the host.
    """

    def __init__(self, engine: Any, zero_stage: int, device: str) -> None:
        self._engine = engine
        self._stage = zero_stage
        self._device = device
        self._away: dict[str, list[_Held]] = {}

    @property
    def away(self) -> set[str]:
        """The parts that are on the host."""
        return set(self._away)

    def release(self, parts: Iterable[str]) -> None:
        """Bring parts to the host and give their memory on the device back; parts that are there already stay."""
        for part in parts:
            if part in self._away:
                continue
            self._synchronize()
            if self._is_deepspeeds(part):
                _offload(self._engine, DEEPSPEED_STATES[self._stage][1], pin=self._device == "cuda")
            scratch = _storages(_buckets(self._engine)) if part == OPTIMIZER else {}
            self._away[part] = [
                _Held(
                    storage,
                    storage.nbytes(),
                    None if storage._cdata in scratch else _to_host(storage, pin=self._device == "cuda"),
                )
                for storage in self._storages(part)
            ]
            self._synchronize()
            for held in self._away[part]:
                held.storage.resize_(0)
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def restore(self, parts: Iterable[str]) -> None:
        """Bring parts back to the device; parts that are there already stay.

        The optimizer's comes back with the weights, which DeepSpeed links it to.
        """
        for part in PARTS if OPTIMIZER in parts else parts:
            if part not in self._away:
                continue
            back = self._away.pop(part)
            for held in back:
                held.storage.resize_(held.nbytes)
                if held.host is not None:
                    _bytes(held.storage).copy_(held.host, non_blocking=self._device == "cuda")
            self._synchronize()
            if self._is_deepspeeds(part):
                self._engine.reload_states()

    def _is_deepspeeds(self, part: str) -> bool:
        if self._stage not in DEEPSPEED_STATES or DEEPSPEED_STATES[self._stage][0] != part:
            return False
        if not hasattr(self._engine.optimizer, "offload_states"):
            return False
        if part == OPTIMIZER:
            # reload_states would bring to the device what the recipe keeps on the host.
            return not _is_on_host(self._engine.zero_offload_optimizer())
        all_trained = all(parameter.requires_grad for parameter in self._engine.module.parameters())
        return all_trained and not _is_on_host(self._engine.zero_offload_param())

    def _storages(self, part: str) -> Iterator[torch.UntypedStorage]:
        """What of a part is on the device, each storage once."""
        weights = _storages(_weights(self._engine.module))
        found = weights
        if part == OPTIMIZER:
            found = {key: value for key, value in _storages(_states(self._engine)).items() if key not in weights}
        for storage in found.values():
            if storage.device.type == self._device and storage.nbytes() and storage.resizable():
                yield storage

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _offload(engine: Any, names: Iterable[str], *, pin: bool) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine.offload_states(include=[OffloadStateTypeEnum(name) for name in names], pin_memory=pin)


def _is_on_host(config: Any) -> bool:
    """Whether DeepSpeed keeps on the host anyway what a config of its offloading is about."""
    return config is not None and config.device != "none"


def _weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor
    yield from module.buffers()


def _states(engine: Any) -> Iterator[torch.Tensor]:
    """Tensors of gradients and of what the engine's optimizer reaches, DeepSpeed's objects in it included."""
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    optimizer = engine.optimizer
    yield from _reachable([vars(optimizer), vars(vars(optimizer).get("optimizer", optimizer))], set())


def _buckets(engine: Any) -> Iterator[torch.Tensor]:
    """DeepSpeed's buffers of gradients that are being reduced, one or two a dtype."""
    for bucket in vars(engine.optimizer).get("ipg_buckets", {}).values():
        yield from bucket.buffer if isinstance(bucket.buffer, list) else filter(_is_there, [bucket.buffer])


def _is_there(value: Any) -> bool:
    return value is not None


def _reachable(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        for item in [*value.keys(), *value.values()]:
            yield from _reachable(item, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _reachable(item, seen)
    elif type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__"):
        yield from _reachable(vars(value), seen)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages of tensors, by where they are."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")
    return {storage._cdata: storage for storage in found}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage, *, pin: bool) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
    return host.copy_(_bytes(storage), non_blocking=pin)
