import asyncio

import httpx
import pytest

from integrations.arctic_rl.backends import prompt_streams
from integrations.arctic_rl.backends.prompt_streams import PromptStreams
from integrations.arctic_rl.errors import ArcticError, RequestError


class Server:
    """Answers prompts, numbers, with their doubles; ``bad`` ones are refused with all that come with them."""

    def __init__(self, bad=(), failing=(), breaks=0, forgets=0):
        self.bad, self.failing, self.breaks, self.forgets = set(bad), set(failing), breaks, forgets
        self.requests, self.under_way = [], 0

    async def send(self, prompts, deliver):
        self.requests.append(prompts)
        if self.bad & set(prompts):
            raise RequestError("refused")
        self.under_way += 1
        try:
            for place, prompt in reversed(list(enumerate(prompts))[self.forgets :]):
                await asyncio.sleep(0)
                deliver(place, ArcticError(f"{prompt} failed") if prompt in self.failing else 2 * prompt)
                if self.breaks and place == len(prompts) // 2:
                    self.breaks -= 1
                    raise httpx.ReadError("broken")
        finally:
            self.under_way -= 1


async def retried(attempt):
    while True:
        try:
            return await attempt()
        except httpx.TransportError:
            pass


def outcomes(server, calls):
    async def run():
        streams = PromptStreams(server.send, retried)
        return await asyncio.gather(*(streams.ask(call) for call in calls), return_exceptions=True)

    return asyncio.run(run())


def test_calls_share_requests_and_get_their_own_results(monkeypatch):
    monkeypatch.setattr(prompt_streams, "MOST_PROMPTS", 10)
    server = Server()
    calls = [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(9)] + [list(range(100, 115)), []]
    assert outcomes(server, calls) == [[2 * prompt for prompt in call] for call in calls]
    assert [len(request) for request in server.requests] == [9, 9, 9, 15]


def test_ten_thousand_calls_share_few_requests_and_none_is_lost():
    server = Server()
    assert outcomes(server, [[number, -number] for number in range(10_000)]) == [
        [2 * number, -2 * number] for number in range(10_000)
    ]
    assert sum(map(len, server.requests)) == 20_000 and len(server.requests) == 20


def test_prompts_that_keep_coming_share_ever_more():
    """One every millisecond, none answered before the last has come."""

    async def run():
        open_now, asked = [], asyncio.Event()

        async def send(prompts, deliver):
            open_now.append(len(prompts))
            await asked.wait()
            for place, _ in enumerate(prompts):
                deliver(place, {})

        streams = PromptStreams(send, retried)
        calls = []
        for number in range(1000):
            calls.append(asyncio.ensure_future(streams.ask([number])))
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        asked.set()
        assert await asyncio.gather(*calls) == [[{}]] * 1000
        assert sum(open_now) == 1000
        assert len(open_now) < 100

    asyncio.run(run())


def test_a_broken_connection_costs_what_had_not_come():
    server = Server(breaks=2)
    assert outcomes(server, [[number] for number in range(8)]) == [[2 * number] for number in range(8)]
    assert server.requests == [list(range(8)), [0, 1, 2, 3], [0, 1]]


def test_one_call_that_is_refused_does_not_harm_the_others():
    server = Server(bad=[5])
    found = outcomes(server, [[4], [5, 6], [7]])
    assert [found[0], found[2]] == [[8], [14]]
    assert isinstance(found[1], RequestError)


def test_one_response_that_fails_ends_its_own_call():
    found = outcomes(Server(failing=[5]), [[4], [5, 6], [7]])
    assert [found[0], found[2]] == [[8], [14]]
    assert str(found[1]) == "5 failed"


def test_an_answer_that_is_too_short_is_an_error():
    found = outcomes(Server(forgets=2), [[1], [2], [3]])
    assert found[2] == [6]
    assert [str(error) for error in found[:2]] == ["the server ended its answer 2 responses too early"] * 2


def test_a_request_that_nobody_waits_for_is_given_up():
    async def run():
        server, never = Server(), asyncio.Event()

        async def send(prompts, deliver):
            server.under_way += 1
            try:
                deliver(0, {})
                await never.wait()
            finally:
                server.under_way -= 1

        streams = PromptStreams(send, retried)
        calls = [asyncio.ensure_future(streams.ask([number])) for number in range(3)]
        await asyncio.sleep(0.05)
        calls[1].cancel()
        await asyncio.sleep(0.05)
        assert (calls[0].done(), server.under_way) == (True, 1)
        calls[2].cancel()
        await asyncio.sleep(0.05)
        assert server.under_way == 0
        last = asyncio.ensure_future(streams.ask([1, 2]))
        await asyncio.sleep(0.05)
        streams.close()
        with pytest.raises(asyncio.CancelledError):
            await last
        assert server.under_way == 0

    asyncio.run(run())
