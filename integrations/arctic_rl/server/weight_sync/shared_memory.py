"""All weights at once through one file in shared memory, which stays until the next sync."""

from __future__ import annotations

from pathlib import Path

from ..weights import MANIFEST_NAME, read_manifest
from .run import SyncRun


async def send(run: SyncRun) -> None:
    """Write the policy's weights and let the receivers load them.

    They compare the manifest's names, which are those of the sender's model, before the first tensor is applied.
    """
    async with run.writing:
        await run.call(run.senders, "export_weights", run.folder, run.version, run.dtype)
    await send_again(run)


async def send_again(run: SyncRun) -> None:
    """Let receivers load what the last ``send`` wrote."""
    run.check_versions(await run.call(run.receivers, "sync_weights", run.folder, run.version, run.keep_cache))


def kept_version(folder: str) -> int:
    """The version that the last ``send`` into a folder wrote; 0 = there was none."""
    return read_manifest(folder).version if (Path(folder) / MANIFEST_NAME).exists() else 0
