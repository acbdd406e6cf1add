"""One bucket of weights at a time, so that no more than a bucket is held besides both models.

Each ZeRO-3 parameter is gathered once, alone, and freed when it has been copied into the bucket. Receivers on the
sender's node map the bucket's file; others get it through Ray's object store.
"""

from __future__ import annotations

from .buckets import plan_buckets
from .run import SyncRun, update


async def send(run: SyncRun) -> None:
    """Send bucket after bucket: the next one is filled when all receivers have loaded the one before."""
    folder = run.folder if run.one_node else None
    async with update(run) as (tensors, _):
        for bucket in plan_buckets(tensors, run.bucket_bytes):
            names = [spec.name for spec in bucket]
            part, *_ = await run.call(run.senders, "export_bucket", names, folder, run.version, run.dtype)
            await run.call(run.receivers, "load_part", part)
