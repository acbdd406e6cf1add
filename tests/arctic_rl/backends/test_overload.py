"""Ten thousand calls at once: every one is answered, and those that wait cost little beside their prompts."""

import asyncio
import gc
import tracemalloc
import weakref

from integrations.arctic_rl.backends.builtin import sampling
from tests.arctic_rl.backends.fake_cluster import expected_sample, fake_backend

CALLS, PROMPT, IN_FLIGHT = 10_000, 512, 100
OF_A_CALL = 7 * 1024
"""Bytes of a waiting call at most, beside its request: its tasks and its place in the queue, but no copy of its prompt
(4 KiB)."""


class Request(dict):
    """One that can be looked for when its call is over."""


def requests():
    """Long prompts, no two of them equal."""
    return [
        Request(
            prompt_token_ids=[index % 250, index // 250] + [7] * (PROMPT - 2),
            params={"seed": index, "max_tokens": 4},
        )
        for index in range(CALLS)
    ]


def test_ten_thousand_calls_queue_without_loss_and_with_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_IN_FLIGHT", IN_FLIGHT)

    async def run():
        backend, cluster = fake_backend(monkeypatch, tmp_path, engines=2)
        cluster.loop = asyncio.get_running_loop()
        await backend.initialize(10, critic_training_steps=10)
        await backend.update_weights()
        engines = [cluster.actors[f"sampling-{index}"][0]._worker for index in range(2)]
        asked, tasks = requests(), len(asyncio.all_tasks())
        expected = [expected_sample(request["prompt_token_ids"], number, 1) for number, request in enumerate(asked)]
        for engine in engines:
            await engine.freeze()
        tracemalloc.start()
        try:
            calls = [asyncio.ensure_future(backend.generate([request])) for request in asked]
            while sum(engine.requests for engine in engines) < 2 * IN_FLIGHT:
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            waiting, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert [engine.requests for engine in engines] == [IN_FLIGHT, IN_FLIGHT], "all others wait"
        assert len(asyncio.all_tasks()) - tasks > 2 * CALLS
        assert 0 < waiting <= peak < CALLS * OF_A_CALL
        for engine in engines:
            await engine.thaw()
        answers = [answer["token_ids"] for (answer,) in await asyncio.gather(*calls)]
        assert answers == expected
        assert sum(engine.requests for engine in engines) == CALLS
        kept = [weakref.ref(request) for request in asked]
        del calls, asked
        await asyncio.sleep(0)
        gc.collect()
        assert [each for each in kept if each() is not None] == [] and len(asyncio.all_tasks()) == tasks
        await backend.shutdown()

    asyncio.run(run())
