"""From the end of setting up on: signs of life of every worker, and another engine in the place of a dead one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable

from ...errors import ArcticError, WorkerDiedError
from ...server.specs import ServerConfig
from ..engine_supervisor import DEATH_GRACE_S, EngineSupervisor, first_line
from ..futures import awaited, failed
from ..heartbeat import watched
from .calls import Calls
from .workers import Workers

Restore = Callable[[str], Awaitable[None]]
"""Brings an engine that was just started into the state that the others are in."""


def supervise(
    config: ServerConfig,
    workers: Workers,
    calls: Calls,
    *,
    restore: Restore,
    may_restart_now: Callable[[], bool],
    one_by_one: bool,
) -> None:
    """From now on, look for signs of life, and restart engines; ``one_by_one`` where a restart moves what others have
    in memory."""
    turn = asyncio.Lock() if one_by_one else contextlib.nullcontext()

    def watch(name: str) -> asyncio.Future:
        ping = functools.partial(workers.beside, name, "ping")
        return asyncio.ensure_future(watched(workers.watch(name), ping, config.worker_timeout_s))

    async def replace(name: str) -> None:
        async with turn:
            await replace_engine(workers, restore, config.startup_timeout_s, name)

    calls.stop_watching()
    engines = workers.names("sampling")
    calls.watch({name: watch(name) for name in workers.actors if name not in engines})
    calls.supervisor = EngineSupervisor(
        workers.actors,
        watch=watch,
        replace=replace,
        last_words=workers.tail,
        most=config.max_engine_restarts,
        may_restart_now=may_restart_now,
    )
    calls.supervisor.watch(engines)


async def replace_engine(workers: Workers, restore: Restore, timeout_s: float, name: str) -> None:
    """Start an engine anew, with the current weights, in the state that the others are in.

    Raises:
        WorkerDiedError: it died too.
        ArcticError: it did not start.
    """
    await workers.start_again(name)
    death = asyncio.ensure_future(awaited(workers.watch(name)))
    try:
        await asyncio.wait_for(restore(name), timeout_s)
    except TimeoutError as error:
        raise ArcticError(
            f"worker {name} was not up again within trainer.arctic_rl.startup_timeout_s={timeout_s}\n"
            f"{workers.tail(name)}"
        ) from error
    except Exception as error:
        await asyncio.wait({death}, timeout=DEATH_GRACE_S)
        if failed(death):
            raise WorkerDiedError(f"while it was restarted: {first_line(death.exception())}") from error
        cause = getattr(error, "cause", None) or error
        raise ArcticError(f"worker {name} could not be restarted: {cause}\n{workers.tail(name)}") from error
    finally:
        death.cancel()
