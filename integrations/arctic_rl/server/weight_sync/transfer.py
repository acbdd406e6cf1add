"""Both ends of vLLM's own transfer engines (``vllm.distributed.weight_transfer``) on top of our workers.

vLLM's trainer engine runs in every rank of the policy: it reads the weights from a ``WeightSource`` and drives the
engines through a client of four calls.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..weights import TensorSpec, checked
from .run import SyncRun, update

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import WeightSource


async def send_by_vllm(run: SyncRun, backend: str) -> None:
    """Let all ranks of the policy run vLLM's trainer engine ``backend``."""
    async with update(run) as (tensors, copies):
        await run.call(
            run.senders, "transfer_weights", backend, run.handles, run.processes, tensors, copies, run.bucket_bytes
        )


class EngineClient:
    """vLLM's ``VLLMWeightSyncClient`` over our sampling workers; each call is made on all of them at once."""

    def __init__(self, engines: Sequence[Any], processes: int) -> None:
        """Args: Ray actors of the sampling workers, and the GPU processes of each."""
        self._engines = engines
        self._processes = processes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from .nccl import of_engine

        infos = [of_engine(init_info, number, self._processes) for number in range(len(self._engines))]
        _wait(engine.transfer_init.remote(info) for engine, info in zip(self._engines, infos, strict=True))

    def start_weight_update(self) -> None:
        _wait(engine.transfer_start.remote() for engine in self._engines)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        plain = plain_update(update_info)
        _wait(engine.transfer_update.remote(plain) for engine in self._engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        _wait(engine.transfer_finish.remote() for engine in self._engines)


def plain_update(update_info: dict[str, Any]) -> dict[str, Any]:
    """An update without None, and with IPC handles, which vLLM's own processes cannot send, as pickled text."""
    plain = {name: value for name, value in update_info.items() if value is not None}
    handles = plain.pop("ipc_handles", None)
    if handles is not None:
        plain["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
    return plain


def weight_source(
    tensors: Sequence[TensorSpec],
    copies: Mapping[str, str],
    read: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    *,
    lasting: bool,
) -> WeightSource:
    """The policy's weights as vLLM's trainer engines read them, a fresh pass each time.

    Args:
        tensors: what is sent.
        copies: further names -> the tensor whose values they get, sent right after it.
        read: gives (name, whole tensor) pairs, each valid until the next one is asked for.
        lasting: whether they stay valid, so that nothing must be copied.
    """
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    more: dict[str, list[str]] = {}
    for name, source in copies.items():
        more.setdefault(source, []).append(name)

    class PolicyWeights(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, getattr(torch, spec.dtype), spec.shape)
                for spec in tensors
                for name in (spec.name, *more.get(spec.name, ()))
            ]

        def __iter__(self) -> Any:
            for spec, tensor in checked(tensors, read()):
                value = tensor.detach().to(getattr(torch, spec.dtype), copy=not lasting)
                for name in (spec.name, *more.get(spec.name, ())):
                    yield name, value

    return PolicyWeights()


def trainer_engine(backend: str, info: dict[str, Any], client: EngineClient, source: WeightSource) -> Any:
    """vLLM's trainer engine, met with the engines; every rank of the policy must call it."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    made = {"nccl": NCCLTrainerInitInfo, "ipc": IPCTrainerInitInfo}[backend](**info)
    return WeightTransferTrainerFactory.trainer_init(made, client=client, source=source)


def _wait(calls: Iterable[Any]) -> None:
    import ray

    ray.get(list(calls))
