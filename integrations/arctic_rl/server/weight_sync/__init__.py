"""How weights reach the engines: one module a strategy, each with ``send``, and ``choice`` among them.

``shared_memory``: one packed file, mapped by the trainer and by engines on its node; it stays until the next sync.
``low_memory``: one bucket at a time, through shared memory on one node and through Ray's object store beyond it.
``nccl``: vLLM's own broadcast from the first training rank to every process of every engine.
``ipc``: vLLM's own CUDA IPC, where every engine's GPUs are training ranks' too.

Whatever the way, engines first compare the names and shapes that are declared with their own model's, and nothing is
applied before they agree; then no request runs until all is loaded and the prefix cache is empty.
"""

from collections.abc import Awaitable, Callable

from . import ipc, low_memory, nccl, shared_memory
from .choice import STRATEGIES, SyncPlan, plan_sync
from .run import SyncRun

SENDERS: dict[str, Callable[[SyncRun], Awaitable[None]]] = {
    "shared_memory": shared_memory.send,
    "low_memory": low_memory.send,
    "nccl": nccl.send,
    "ipc": ipc.send,
}

__all__ = ["SENDERS", "STRATEGIES", "SyncPlan", "SyncRun", "ipc", "low_memory", "nccl", "plan_sync", "shared_memory"]
