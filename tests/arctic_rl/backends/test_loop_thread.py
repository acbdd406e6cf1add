import asyncio
import threading

import pytest

from integrations.arctic_rl.backends.loop_thread import LoopThread


@pytest.fixture
def loop():
    thread = LoopThread("test-loop")
    yield thread
    thread.close()


async def where():
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail():
    raise ValueError("inside")


def test_blocking_and_awaited_calls_run_on_the_one_loop(loop):
    assert loop.run(where()) == "test-loop"
    assert asyncio.run(loop.wait(where())) == "test-loop"


def test_errors_reach_the_caller(loop):
    with pytest.raises(ValueError, match="inside"):
        loop.run(fail())
    with pytest.raises(ValueError, match="inside"):
        asyncio.run(loop.wait(fail()))


def test_the_waiting_loop_is_not_blocked(loop):
    async def main():
        release = asyncio.Event()

        async def held():
            while not done.is_set():
                await asyncio.sleep(0.001)
            return "held"

        done = threading.Event()
        waiting = asyncio.ensure_future(loop.wait(held()))
        await asyncio.sleep(0.01)
        release.set()
        done.set()
        return await waiting

    assert asyncio.run(main()) == "held"


def test_cancelling_the_waiter_cancels_the_coroutine(loop):
    cancelled = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.wait(forever()), 0.05)

    asyncio.run(main())
    assert cancelled.wait(5)
