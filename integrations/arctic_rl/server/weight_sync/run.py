"""What every strategy is handed, and the part that most of them share: names first, then weights, then the cache."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from ...errors import ArcticError, WorkerDiedError
from ..weights import TensorSpec


@dataclass(frozen=True)
class SyncRun:
    """One sync: who sends, who receives, and how workers are called."""

    call: Callable[..., Awaitable[list[Any]]]
    """``await call(names, method, *arguments)``: the answers of those workers, in their order."""
    senders: tuple[str, ...]
    """All ranks of the policy; they gather together, and the first one sends."""
    receivers: tuple[str, ...]
    """Workers that take the weights."""
    handles: tuple[Any, ...]
    """Ray actors of the receivers."""
    processes: int
    """GPU processes of each receiver."""
    folder: str
    """Folder on the first sender's node for what is mapped."""
    version: int
    """The version that the receivers hold afterwards."""
    dtype: str
    """Dtype in which weights are sent."""
    bucket_bytes: int
    """Bound of a bucket, of the strategies that have buckets."""
    one_node: bool
    """Whether all receivers can map the sender's files."""
    keep_cache: bool = False
    """Whether receivers keep the keys and values that older weights computed."""
    writing: AbstractAsyncContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """Entered while a file that stays is written, which nobody may read meanwhile."""

    def check_versions(self, held: list[int]) -> None:
        """Refuse receivers that do not hold this version."""
        if any(version != self.version for version in held):
            raise ArcticError(f"weight sync {self.version} left the receivers at versions {held}")


@contextlib.asynccontextmanager
async def update(run: SyncRun) -> AsyncIterator[tuple[list[TensorSpec], dict[str, str]]]:
    """Compare names, open an update on all receivers, and close it.

    Yields:
        All that the senders have, whole, in the order of sending; and names that receivers keep apart although the
        model ties them -> the name whose values they get.

    Raises:
        ArcticError: where names, shapes or the dtype differ: nothing has been sent then, and no request was held up.
            Or for what failed inside: receivers then hold weights of two versions, and refuse to work.
    """
    tensors = (await run.call(run.senders[:1], "declare_weights", run.dtype))[0]
    copies = await run.call(run.receivers, "check_tensors", tensors, run.dtype)
    if any(other != copies[0] for other in copies):
        raise ArcticError(f"weight sync {run.version}: receivers keep other tied tensors than each other: {copies}")
    try:
        await run.call(run.receivers, "begin_update", run.version)
        yield tensors, copies[0]
        run.check_versions(await run.call(run.receivers, "end_update", run.keep_cache))
    except WorkerDiedError:
        # The run ends, and an engine that is being restarted is not waited for.
        raise
    except BaseException:
        # The first failure is the cause; a receiver that is gone too cannot be told.
        with contextlib.suppress(ArcticError):
            await run.call(run.receivers, "abort_update")
        raise
