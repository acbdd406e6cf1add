"""What goes wrong between a client and a server, and what each then does."""

import asyncio
import contextlib
import http.client
import json
import math
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from integrations.arctic_rl.backends import http_connection
from integrations.arctic_rl.backends.contract import STEPS, UPDATE, Served, batch, meta, write_model
from integrations.arctic_rl.client import ClientConfig, create_arctic_rl_client, make_meta
from integrations.arctic_rl.errors import ArcticError, ConfigError, RequestError, WorkerDiedError
from integrations.arctic_rl.sampling_params import to_vllm_kwargs
from integrations.arctic_rl.wire.body import CONTENT_TYPE, encode
from tests.arctic_rl.backends import model_backend
from tests.arctic_rl.backends.fake_cluster import fake_backend
from tests.arctic_rl.server.http.serving import serving
from tests.arctic_rl.server.http.test_http import Breaking

VERSION = {"x-arctic-rl-version": "1"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(model_path, loop, monkeypatch):
    """Makes clients of a URL, not initialised; all are let go of at the end."""
    monkeypatch.setattr("integrations.arctic_rl.backends.http.FIRST_PAUSE_S", 0.01)
    made = []

    def make(url, **settings):
        config = ClientConfig(**{"model_path": str(model_path), "server_url": url, "lr": 1e-2, **settings})
        made.append(create_arctic_rl_client(config))
        return Served(made[-1], loop, config)

    yield make
    for backend in made:
        loop.run(backend.destroy())


def job_url(url, served):
    return f"{url}/v1/jobs/{served.backend.reconnect_handle().job_ids['server']}"


def error_of(answer):
    return answer.json()["error"]


def test_a_start_whose_answer_is_lost_is_carried_out_once(client, tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        served, other = client(url), client(url)
        transport = Breaking({"jobs": 1})
        served.backend._client = httpx.AsyncClient(transport=transport, timeout=None)

        async def start():
            first = asyncio.ensure_future(served.backend.initialize(STEPS))
            while not transport.sent:
                await asyncio.sleep(0.001)
            with pytest.raises(ArcticError, match="one at a time"):
                await other.backend.initialize(STEPS)
            await first

        served.loop.run(start())
        assert [name for name, _ in transport.sent] == ["jobs", "jobs"]
        assert served.run("weight_norm", "policy") > 0


def test_a_server_that_was_started_anew_is_noticed(client, tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        served.run("fwd_bwd", batch(), meta(served), UPDATE)
    with serving(storage_root=str(tmp_path)) as other:
        served.backend._url = other
        for call in (lambda: served.run("step"), lambda: served.generate([[5]])):
            with pytest.raises(ArcticError, match=r"there is no job .*: none runs") as caught:
                call()
            assert "\n" not in str(caught.value)


def test_numbers_that_are_not_finite_arrive_as_they_are(client, tmp_path, monkeypatch):
    async def step(self, job="policy"):
        return {"lr": 1.0, "grad_norm": math.inf}

    monkeypatch.setattr(model_backend.ModelBackend, "step", step)
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        assert served.run("step") == {"lr": 1.0, "grad_norm": math.inf}


def test_what_failed_and_was_mended_is_told_once(client, tmp_path, monkeypatch):
    news = [
        {"generate/engine_restarts": 1.0},
        {},
        {"generate/engine_restarts": 2.0, "generate/requests_run_again": 5.0},
    ]
    monkeypatch.setattr(model_backend.ModelBackend, "take_fault_metrics", lambda self: news.pop(0) if news else {})
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        assert served.backend.take_fault_metrics() == {}
        told = []
        for call, arguments in (
            ("weight_norm", ["policy"]),
            ("fwd_bwd", [batch(), meta(served), UPDATE]),
            ("step", []),
        ):
            served.run(call, *arguments)
            told.append(served.backend.take_fault_metrics())
        assert told == [
            {"generate/engine_restarts": 1.0},
            {},
            {"generate/engine_restarts": 2.0, "generate/requests_run_again": 5.0},
        ]
        served.run("sync_weights")
        assert served.backend.take_fault_metrics() == {}


def test_restarts_of_engines_reach_the_trainer_once_each(client, tmp_path, monkeypatch):
    """The built-in backend behind the server, whose first engine dies with requests under way."""
    _, cluster = fake_backend(monkeypatch, tmp_path)
    params = to_vllm_kwargs({"max_tokens": 4, "seed": 7})
    asked = [{"prompt_token_ids": [number], "params": params, "cache_salt": None} for number in range(1, 13)]
    with serving(storage_root=str(tmp_path), backend="builtin") as url:
        served = client(url, engines=2)
        served.run("initialize", STEPS)
        cluster.hurt("sampling-0", lambda method, keywords: method == "generate", "killed")
        assert len(served.run("generate", asked)) == 12
        engines = [*cluster.actors["sampling-0"], *cluster.actors["sampling-1"]]
        again = sum(engine._worker.requests for engine in engines) - 12
        assert len(engines) == 3 and again > 0
        served.run("update_weights")
        counts = {"generate/engine_restarts": 1.0, "generate/requests_run_again": float(again)}
        assert served.backend.take_fault_metrics() == counts
        served.run("reset_prefix_cache")
        assert served.backend.take_fault_metrics() == {}


def test_answers_that_overtake_each_other_tell_nothing_twice(client):
    """A slow call's answer is older than that of a quick one which began after it."""

    async def answer(request):
        name = request.url.path.rsplit("/", 1)[-1]
        await asyncio.sleep(0.1 if name == "step" else 0.0)
        told = {"x-arctic-rl-faults": json.dumps({"a": 1.0 if name == "step" else 3.0, "b": 1.0})}
        return httpx.Response(200, json={"value": 1.0}, headers=told)

    async def ask():
        slow = asyncio.ensure_future(backend.step())
        await backend.reset_prefix_cache()
        news = [backend.take_fault_metrics()]
        await slow
        for _ in range(2):
            news.append(backend.take_fault_metrics())
            await backend.reset_prefix_cache()
        return news

    served = client("http://127.0.0.1:9")
    backend = served.backend
    backend._job_id = "a-job"
    backend._client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    assert served.loop.run(ask()) == [{"a": 3.0, "b": 1.0}, {}, {}]


def test_many_prompts_at_once_share_connections_and_come_back_to_their_callers(client, tmp_path, monkeypatch):
    async def echo(self, requests):
        (request,) = requests
        (number,) = request["prompt_token_ids"]
        await asyncio.sleep(0.3 if number % 2 else 0.0)
        if number == 77:
            raise ArcticError("no 77")
        return [{"token_ids": [number], "logprobs": [0.0], "stop_reason": "stop"}]

    monkeypatch.setattr(model_backend.ModelBackend, "generate", echo)
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        transport = Breaking({})
        served.backend._client = httpx.AsyncClient(transport=transport, timeout=None)
        params = to_vllm_kwargs({"max_tokens": 2})

        async def ask(number):
            await asyncio.sleep(0.001 * (number % 50))
            prompt = {"prompt_token_ids": [number], "params": params, "cache_salt": None, "session_id": None}
            (result,) = await served.backend.generate([prompt])
            return result["token_ids"]

        async def ask_all():
            return await asyncio.gather(*map(ask, range(400)), return_exceptions=True)

        found = served.loop.run(ask_all())
        assert [number for number in range(400) if found[number] != [number]] == [77]
        assert "no 77" in str(found[77])
        assert sum(name == "generate" for name, _ in transport.sent) < 60


def test_an_update_says_how_many_ranks_it_was_scaled_for(client, tmp_path):
    """With a count and no dp_size a gradient would be 1/dp_size of the right one, without a word."""
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        rows, scalars = batch(), make_meta(batch(), dp_size=1)
        wrong = [
            ({name: value for name, value in scalars.items() if name != "dp_size"}, "meta has no dp_size"),
            ({name: value for name, value in scalars.items() if name != "batch_num_tokens"}, "no batch_num_tokens"),
            (scalars | {"dp_size": 4}, r"meta\['dp_size'\]=4, but the job 'policy' has 1 ranks"),
        ]
        for given, reason in wrong:
            with pytest.raises(RequestError, match=reason):
                served.run("fwd_bwd", rows, given, UPDATE)
        served.run("fwd_bwd", rows, scalars, UPDATE)
        assert served.run("step")["grad_norm"] > 0


def test_old_log_probs_are_neither_missing_nor_misspelt_nor_made_up(client, tmp_path):
    """Rows in two mini-batches at a learning rate of 0.1: the second one's ratios have moved away from 1."""
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url, lr=0.1)
        served.run("initialize", STEPS)
        without = {name: value for name, value in batch().items() if name != "old_log_probs"}
        for rows in (without, without | {"old_log_prob": batch()["old_log_probs"]}):
            with pytest.raises(ArcticError, match="old_log_probs"):
                served.run("fwd_bwd", rows, meta(served), UPDATE)
        old = served.log_probs()
        before, deviations = old.clone(), []
        for half in (slice(0, 2), slice(2, 4)):
            rows = {name: value[half] for name, value in (batch() | {"old_log_probs": old}).items()}
            result = served.run("fwd_bwd", rows, make_meta(rows, dp_size=1), UPDATE)
            deviations.append(result["metrics"]["ratio_max_deviation"])
            served.run("step")
        assert old.equal(before)
        assert deviations[0] < 1e-5
        assert deviations[1] > 1e-3


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "must begin with http"),
        ("ftp://host", "must begin with http"),
        ("http://[::1", "Invalid IPv6"),
        ("http://host:99999", "Port out of range"),
        ("http://user:secret@host", "a token belongs into ARCTIC_RL_TOKEN"),
        (None, "must begin with http"),
    ],
)
def test_an_address_that_is_none_is_refused(url, reason):
    config = ClientConfig(model_path="m", backend="http", server_url=url)
    with pytest.raises(ConfigError, match=reason) as caught:
        create_arctic_rl_client(config)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_reached_or_sent_is_one_clear_line(client, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(WorkerDiedError, match="cannot be reached") as caught:
            client(url).run("initialize", STEPS)
        assert "\n" not in str(caught.value)
        for token in ("short", "sixteen characters or more\n", "sixteen characters or moré"):
            monkeypatch.setenv("ARCTIC_RL_TOKEN", token)
            with pytest.raises(ConfigError, match="the token in ARCTIC_RL_TOKEN") as caught:
                client(url).run("initialize", STEPS)
            assert "\n" not in str(caught.value)
            assert token.strip() not in str(caught.value)


def test_a_silent_server_is_not_asked_for_ever():
    error = httpx.ReadTimeout("late")
    assert http_connection.is_final(error)
    assert "gave no answer in time" in str(http_connection.connection_error(error, "http://x"))


def test_a_body_that_stops_or_is_too_long_is_refused_with_the_reason(client, tmp_path):
    with serving(storage_root=str(tmp_path), body_timeout_s=0.3, max_body_mb=1) as url:
        served = client(url)
        served.run("initialize", STEPS)
        job = job_url(url, served)

        def endless():
            for _ in range(40):
                yield b"x" * 2**16

        headers = {**VERSION, "x-request-id": "long"}
        for call, kind in (("fwd_bwd", CONTENT_TYPE), ("step", "application/json")):
            answer = httpx.post(f"{job}/{call}", content=endless(), headers={**headers, "content-type": kind})
            assert answer.status_code == 413, call
            assert "max_body_mb=1" in error_of(answer)["message"]

        address = urlsplit(url)
        for call in ("fwd_bwd", "step"):
            with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
                head = f"POST {urlsplit(job).path}/{call} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
                head += "x-arctic-rl-version: 1\r\nx-request-id: slow\r\ncontent-type: application/json\r\n\r\n{"
                connection.sendall(head.encode())
                start = time.monotonic()
                text = connection.recv(4096).decode()
                if "\r\n\r\n{" not in text:
                    text += connection.recv(4096).decode()
            assert text.startswith("HTTP/1.1 408"), call
            assert "the body stopped after 1 bytes" in text
            assert time.monotonic() - start < 5
        assert served.run("weight_norm", "policy") > 0


def test_a_connection_outlives_a_failed_call(client, tmp_path, monkeypatch):
    async def failing(self, job="policy"):
        raise OSError("the disk is gone")

    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        monkeypatch.setattr(model_backend.ModelBackend, "step", failing)
        address = urlsplit(url)
        with contextlib.closing(http.client.HTTPConnection(address.hostname, address.port, timeout=10)) as connection:
            connection.connect()
            held = connection.sock
            for number in range(3):
                headers = {**VERSION, "x-request-id": f"step-{number}", "content-type": "application/json"}
                connection.request("POST", f"{urlsplit(job_url(url, served)).path}/step", b"{}", headers)
                answer = connection.getresponse()
                assert answer.status == 500
                assert json.loads(answer.read())["error"]["message"] == "the disk is gone"
                assert connection.sock is held


def test_errors_carry_their_kind_and_the_request(client, tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        served = client(url)
        served.run("initialize", STEPS)
        job = job_url(url, served)
        values = {"job": "nobody", "meta": meta(served), "processing": UPDATE}
        headers = {**VERSION, "x-request-id": "mine", "content-type": CONTENT_TYPE}
        answer = httpx.post(f"{job}/fwd_bwd", content=encode(values, batch()), headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        assert error_of(answer) == {
            "type": "HttpError",
            "message": "job 'nobody' is not served: known are policy",
            "request_id": "mine",
        }
        with pytest.raises(RequestError, match="job 'nobody' is not served"):
            served.run("weight_norm", "nobody")
        assert json.loads(httpx.get(f"{url}/healthz").text)["job_running"] is True
