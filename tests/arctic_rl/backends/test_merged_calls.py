import asyncio

import pytest

from integrations.arctic_rl.backends.merged_calls import MergedCalls
from integrations.arctic_rl.errors import ArcticError


class Server:
    """Doubles numbers, and counts the calls that are under way."""

    def __init__(self, fails=None):
        self.sizes, self.running, self.most, self.fails = [], 0, 0, fails

    async def call(self, requests, arrived):
        self.sizes.append(len(requests))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        for index in reversed(range(len(requests))):
            if requests[index] == self.fails:
                self.running -= 1
                raise ValueError("refused")
            arrived(index, 2 * requests[index])
        self.running -= 1


def test_ten_thousand_askers_share_few_calls_and_none_is_lost():
    async def run():
        merged = MergedCalls(server.call, most=8, largest=500)
        return await asyncio.gather(*(merged.ask([number, -number]) for number in range(10_000)))

    server = Server()
    assert asyncio.run(run()) == [[2 * number, -2 * number] for number in range(10_000)]
    assert server.most <= 8
    assert sum(server.sizes) == 20_000 and max(server.sizes) <= 500 and len(server.sizes) < 60


def test_what_a_call_leaves_out_is_told():
    async def call(requests, arrived):
        arrived(0, "an answer")

    with pytest.raises(ArcticError, match="before all of its requests"):
        asyncio.run(MergedCalls(call, most=1, largest=1).ask([1, 2]))


def test_below_the_limit_every_asker_has_a_call_of_its_own():
    async def run():
        merged = MergedCalls(server.call, most=8, largest=500)
        assert await merged.ask([]) == []
        return await asyncio.gather(*(merged.ask([number]) for number in range(8)))

    server = Server()
    assert asyncio.run(run()) == [[2 * number] for number in range(8)]
    assert server.sizes == [1] * 8


def test_a_failure_is_that_of_its_call_and_one_who_gave_up_is_left_out():
    async def run():
        merged = MergedCalls(server.call, most=1, largest=2)
        asks = [asyncio.ensure_future(merged.ask([number])) for number in range(6)]
        await asyncio.sleep(0)
        asks[5].cancel()
        return await asyncio.gather(*asks, return_exceptions=True)

    server = Server(fails=3)
    answers = asyncio.run(run())
    assert answers[0] == [0]
    assert [answers[1], answers[2]] == [[2], [4]]
    with pytest.raises(ValueError, match="refused"):
        raise answers[3]
    assert isinstance(answers[5], asyncio.CancelledError)
    assert server.sizes == [1, 2, 2]
