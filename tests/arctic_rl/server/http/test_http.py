import asyncio
import contextlib
import dataclasses
import json
import time

import httpx
import pytest

from integrations.arctic_rl.backends.contract import PROMPTS, STEPS, UPDATE, Served, batch, meta, write_model
from integrations.arctic_rl.client import ClientConfig, create_arctic_rl_client
from integrations.arctic_rl.errors import ArcticError, ConfigError, WorkerDiedError
from integrations.arctic_rl.sampling_params import to_vllm_kwargs
from integrations.arctic_rl.server.http import settings as http_settings
from integrations.arctic_rl.server.http.checks import check_config
from integrations.arctic_rl.server.http.errors import HttpError
from integrations.arctic_rl.server.http.replay import Replays
from integrations.arctic_rl.server.http.serve import address, serve
from integrations.arctic_rl.server.http.settings import HttpSettings, read_settings
from integrations.arctic_rl.server.plain import from_plain, to_plain
from integrations.arctic_rl.server.specs import ServerConfig
from integrations.arctic_rl.server_url import url_problem
from tests.arctic_rl.backends import model_backend
from tests.arctic_rl.server.http.serving import serving

TOKEN = "sixteen characters or more"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def connect(model_path, loop):
    """Makes an initialised client of a URL; all are let go of at the end."""
    clients = []

    def make(url):
        config = ClientConfig(model_path=str(model_path), server_url=url, lr=1e-2)
        backend = create_arctic_rl_client(config)
        clients.append(backend)
        loop.run(backend.initialize(STEPS))
        return Served(backend, loop, config)

    yield make
    for backend in clients:
        loop.run(backend.destroy())


class Breaking(httpx.AsyncHTTPTransport):
    """Carries requests out, and loses the answers to the first ones of some paths."""

    def __init__(self, lose):
        super().__init__()
        self.lose = dict(lose)
        self.sent = []

    async def handle_async_request(self, request):
        name = request.url.path.rsplit("/", 1)[-1]
        self.sent.append((name, request.headers.get("x-request-id")))
        answer = await super().handle_async_request(request)
        if self.lose.get(name, 0) > 0:
            self.lose[name] -= 1
            await answer.aread()
            raise httpx.ReadError("the connection broke")
        return answer


def break_connection(served, monkeypatch, **lose):
    """Loses as many answers of each call as are given."""
    monkeypatch.setattr("integrations.arctic_rl.backends.http.FIRST_PAUSE_S", 0.01)
    transport = Breaking(lose)
    served.backend._client = httpx.AsyncClient(transport=transport, timeout=None)
    return transport


def test_a_repeated_backward_or_step_is_carried_out_once(connect, tmp_path, monkeypatch):
    with serving(storage_root=str(tmp_path)) as url:
        plain = connect(url)
        plain.run("fwd_bwd", batch(), meta(plain), UPDATE)
        expected = plain.run("step"), plain.run("weight_norm", "policy")
        plain.loop.run(plain.backend.destroy())

        served = connect(url)
        transport = break_connection(served, monkeypatch, fwd_bwd=2, step=1)
        served.run("fwd_bwd", batch(), meta(served), UPDATE)
        step = served.run("step")
        assert (step, served.run("weight_norm", "policy")) == expected
        for name, times in (("fwd_bwd", 3), ("step", 2)):
            ids = [request_id for sent, request_id in transport.sent if sent == name]
            assert len(ids) == times and len(set(ids)) == 1


def test_rollouts_that_a_broken_connection_took_are_asked_for_again(connect, tmp_path, monkeypatch):
    with serving(storage_root=str(tmp_path)) as url:
        served = connect(url)
        expected = served.generate(PROMPTS, temperature=0.0)
        break_connection(served, monkeypatch, generate=1)
        assert served.generate(PROMPTS, temperature=0.0) == expected


def test_an_id_belongs_to_one_request(connect, tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        served = connect(url)
        job = f"{url}/v1/jobs/{served.backend.reconnect_handle().job_ids['server']}"
        headers = {"x-arctic-rl-version": "1", "x-request-id": "one"}
        assert httpx.post(f"{job}/sync_weights", json={}, headers=headers).json() == {"value": 1}
        assert httpx.post(f"{job}/sync_weights", json={}, headers=headers).json() == {"value": 1}
        assert httpx.post(f"{job}/reset_prefix_cache", json={}, headers=headers).status_code == 409
        del headers["x-request-id"]
        refused = httpx.post(f"{job}/step", json={}, headers=headers)
        assert refused.status_code == 400
        assert "x-request-id" in refused.json()["error"]["message"]
        assert httpx.post(f"{job}/weight_norm", json={"job": "policy"}, headers=headers).status_code == 200


def test_responses_come_as_each_is_done(connect, tmp_path, monkeypatch):
    async def by_length(self, requests):
        (request,) = requests
        await asyncio.sleep(0.1 * len(request["prompt_token_ids"]))
        return [{"token_ids": [1], "logprobs": [0.0], "stop_reason": "stop"}]

    monkeypatch.setattr(model_backend.ModelBackend, "generate", by_length)
    with serving(storage_root=str(tmp_path)) as url:
        served = connect(url)
        job = f"{url}/v1/jobs/{served.backend.reconnect_handle().job_ids['server']}"
        params = to_vllm_kwargs({"max_tokens": 2})
        asked = {"requests": [{"prompt_token_ids": [5] * length, "params": params} for length in (6, 1, 3)]}
        headers = {"x-arctic-rl-version": "1"}
        with httpx.stream("POST", f"{job}/generate", json=asked, headers=headers, timeout=20) as answer:
            lines = [json.loads(line)["index"] for line in answer.iter_lines()]
        assert lines == [1, 2, 0]


def test_a_call_that_takes_too_long_is_answered_and_goes_on(connect, tmp_path, monkeypatch):
    done = []

    async def slow(self):
        await asyncio.sleep(0.6)
        done.append(1)
        return {"lr": 1.0, "grad_norm": 2.0}

    monkeypatch.setattr(model_backend.ModelBackend, "step", slow)
    with serving(storage_root=str(tmp_path), request_timeout_s=0.2) as url:
        served = connect(url)
        job = f"{url}/v1/jobs/{served.backend.reconnect_handle().job_ids['server']}"
        headers = {"x-arctic-rl-version": "1", "x-request-id": "slow"}
        late = httpx.post(f"{job}/step", json={}, headers=headers)
        assert late.status_code == 504
        assert "request_timeout_s=0.2" in late.json()["error"]["message"]
        time.sleep(0.6)
        again = httpx.post(f"{job}/step", json={}, headers=headers)
        assert again.json() == {"value": {"lr": 1.0, "grad_norm": 2.0}}
        assert done == [1]


def test_a_job_whose_client_is_silent_is_stopped(connect, tmp_path):
    with serving(storage_root=str(tmp_path), lease_s=0.4) as url:
        served = connect(url)
        served.run("weight_norm", "policy")
        time.sleep(1.0)
        assert served.run("weight_norm", "policy") > 0, "the client gives signs of life by itself"
        served.loop._loop.call_soon_threadsafe(served.backend._signs.cancel)
        time.sleep(1.2)
        assert httpx.get(f"{url}/healthz").json()["job_running"] is False
        with pytest.raises(ArcticError, match="there is no job"):
            served.run("weight_norm", "policy")


def test_a_server_that_is_gone_ends_a_call(connect, tmp_path, monkeypatch):
    monkeypatch.setattr("integrations.arctic_rl.backends.http.FIRST_PAUSE_S", 0.01)
    with serving(storage_root=str(tmp_path), lease_s=0.5) as url:
        served = connect(url)
    with pytest.raises(WorkerDiedError, match="cannot be reached"):
        served.run("step")


def test_one_job_at_a_time(connect, tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        connect(url)
        with pytest.raises(ArcticError, match="one at a time"):
            connect(url)


@pytest.mark.parametrize("token", [None, "another token of some length"])
def test_a_wrong_token_is_one_clear_line(connect, tmp_path, monkeypatch, token):
    with serving(storage_root=str(tmp_path), token=TOKEN) as url:
        if token is not None:
            monkeypatch.setenv("ARCTIC_RL_TOKEN", token)
        with pytest.raises(ArcticError, match="bearer token is missing or wrong") as caught:
            connect(url)
        assert "\n" not in str(caught.value)
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        monkeypatch.setenv("ARCTIC_RL_TOKEN", TOKEN)
        assert connect(url).run("weight_norm", "policy") > 0


def test_another_version_is_one_clear_line(connect, tmp_path, monkeypatch):
    monkeypatch.setattr("integrations.arctic_rl.backends.http.VERSION", 7)
    with serving(storage_root=str(tmp_path)) as url, pytest.raises(ArcticError, match="speaks version 1") as caught:
        connect(url)
    assert "\n" not in str(caught.value)


def test_a_url_that_is_no_server_of_ours(connect, tmp_path):
    with serving(storage_root=str(tmp_path)) as url, pytest.raises(ArcticError, match="v1/jobs"):
        connect(f"{url}/elsewhere")
    with pytest.raises(ConfigError, match="must begin with http"):
        connect("localhost:8642")


def test_an_open_api_names_every_call(tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for name in ("step", "fwd_bwd", "fwd_no_grad", "generate", "save_checkpoint", "sleep_training"):
        assert f"/v1/jobs/{{job_id}}/{name}" in paths


def test_modules_and_models_are_those_that_the_server_allows(model_path, loop, tmp_path):
    allowed = {"allowed_modules": ["tests.arctic_rl.processors"], "allowed_models": [str(model_path.parent)]}
    cases = [
        ({"processor_modules": ("os",)}, r"module of the policy's processor_modules, 'os' is code.*allowed_modules"),
        ({"model_path": "/somewhere/else"}, "allowed_models"),
        ({}, None),
        ({"processor_modules": ("tests.arctic_rl.processors.user_module",)}, None),
    ]
    with serving(storage_root=str(tmp_path), **allowed) as url:
        for changes, reason in cases:
            config = ClientConfig(**{"model_path": str(model_path), "server_url": url, **changes})
            backend = create_arctic_rl_client(config)
            if reason is None:
                loop.run(backend.initialize(STEPS))
            else:
                with pytest.raises(ArcticError, match=reason):
                    loop.run(backend.initialize(STEPS))
            loop.run(backend.destroy())


@pytest.mark.parametrize("name", ["worker_cls", "scheduler_cls", "logits_processors", "io_processor_plugin"])
def test_engine_arguments_that_name_code_are_those_that_the_server_allows(model_path, name):
    config = ClientConfig(model_path=str(model_path)).server_config()
    sampling = dataclasses.replace(config.sampling, engine_kwargs={name: ["mine.Class"]})
    config = dataclasses.replace(config, sampling=sampling)
    with pytest.raises(HttpError, match=r"engine argument .* 'mine.Class' is code that this server would have to"):
        check_config(config, HttpSettings())
    check_config(config, HttpSettings(allowed_modules=["mine"]))


def test_engine_arguments_that_could_name_files_are_those_that_the_server_allows(model_path):
    def config(**arguments):
        made = ClientConfig(model_path=str(model_path)).server_config()
        return dataclasses.replace(made, sampling=dataclasses.replace(made.sampling, engine_kwargs=arguments))

    check_config(config(max_model_len=64, enable_chunked_prefill=False, seed=None), HttpSettings())
    for name, value in [("download_dir", "/etc"), ("hf_overrides", {"a": 1}), ("kv_transfer_config", {})]:
        with pytest.raises(HttpError, match=rf"engine argument {name}=.*allowed_engine_args"):
            check_config(config(**{name: value}), HttpSettings())
        check_config(config(**{name: value}), HttpSettings(allowed_engine_args=[name]))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_model_that_brings_code_is_loaded_where_it_is_allowed_by_name(tmp_path, file):
    for name, content in [("code", {"auto_map": {"AutoConfig": "mine.Config"}}), ("plain", {})]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / file).write_text(json.dumps(content))
    for field in ("model_path", "reference_path"):
        given = {"model_path": str(tmp_path / "plain"), field: str(tmp_path / "code")}
        config = ClientConfig(**given).server_config()
        with pytest.raises(HttpError, match=r"code' brings code of its own"):
            check_config(config, HttpSettings())
        check_config(config, HttpSettings(allowed_models=[str(tmp_path)]))


def test_a_model_that_the_server_does_not_have_is_refused_by_name(tmp_path):
    missing = str(tmp_path / "elsewhere")
    for allowed in ([], [str(tmp_path)]):
        with pytest.raises(HttpError, match=f"the model '{missing}' is no folder of the server's") as caught:
            check_config(ClientConfig(model_path=missing).server_config(), HttpSettings(allowed_models=allowed))
        assert caught.value.status == 400


def test_snapshots_of_memory_are_written_below_the_servers_root(tmp_path):
    config = ClientConfig(model_path="m", reference_path="m").server_config()
    for job in ("policy", "reference"):
        for folder, allowed in ((tmp_path / "run" / "memory_snapshots", True), (tmp_path.parent, False)):
            spec = dataclasses.replace(vars(config)[job], memory_snapshots=str(folder))
            with contextlib.nullcontext() if allowed else pytest.raises(HttpError, match="not below"):
                check_config(dataclasses.replace(config, **{job: spec}), HttpSettings(storage_root=str(tmp_path)))


def test_a_job_has_no_more_workers_than_the_server_allows(model_path):
    config = ClientConfig(model_path=str(model_path), policy_ranks=3, engines=2).server_config()
    check_config(config, HttpSettings(max_workers=5))
    with pytest.raises(HttpError, match="5 workers; the server's max_workers=4"):
        check_config(config, HttpSettings(max_workers=4))


def test_a_config_goes_to_plain_values_and_back():
    config = ClientConfig(model_path="m", reference_path="r", betas=(0.8, 0.9)).server_config()
    values = json.loads(json.dumps(to_plain(config)))
    assert from_plain(ServerConfig, values) == config


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v: v.update(polcy=1), "config.polcy is unknown: did you mean 'policy'"),
        (lambda v: v.pop("policy_ranks"), "config.policy_ranks is missing"),
        (lambda v: v["policy"].update(zero_stage="2"), "config.policy.zero_stage='2' is not a whole number"),
        (lambda v: v["policy"]["optimizer"].update(betas=[0.9]), "config.policy.optimizer.betas"),
        (lambda v: v["policy"].update(policy_loss="cGlja2xl"), "config.policy.policy_loss"),
        (lambda v: v["sampling"].update(threads=0), "threads=0"),
        (lambda v: v["sampling"].update(engine_kwargs={"generation_config": "auto"}), "generation_config"),
        (lambda v: v.update(env_vars={"PATH": 3}), "config.env_vars"),
        (lambda v: v.update(policy=None), "config.policy must be a mapping"),
    ],
)
def test_a_plain_config_that_is_wrong_is_refused_by_name(change, reason):
    values = to_plain(ClientConfig(model_path="m").server_config())
    change(values)
    with pytest.raises(ConfigError) as caught:
        from_plain(ServerConfig, values)
    assert reason in str(caught.value)


def test_settings_of_the_server(tmp_path, monkeypatch):
    monkeypatch.delenv(http_settings.TOKEN_VARIABLE, raising=False)
    file = tmp_path / "server.yaml"
    file.write_text("port: 9000\nmax_body_mb: 5\n")
    assert read_settings(str(file), port=None) == HttpSettings(port=9000, max_body_mb=5)
    assert read_settings(str(file), port=9001).port == 9001
    for text, reason in [
        ("prt: 9000", "prt is unknown: did you mean 'port'"),
        ("token: secret", "token does not belong into a file"),
        ("[1]", "must be a mapping"),
        ("port: many", "port='many' is not a whole number"),
        ("host: 0.0.0.0", "set ARCTIC_RL_TOKEN"),
        ("tls_key: none.pem", "go together"),
        ("lease_s: 0", "must be above 0"),
        ("{", "cannot be read"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_settings(str(file))
        assert reason in str(caught.value)
    monkeypatch.setenv(http_settings.TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_settings(None)
    monkeypatch.setenv(http_settings.TOKEN_VARIABLE, TOKEN)
    settings = read_settings(None, host="0.0.0.0")
    assert settings.token == TOKEN
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("bultin", "^backend='bultin' is not registered: did you mean 'builtin'"),
        (f"{model_backend.__name__}.NoSuchBackend", "^backend='.*has no 'NoSuchBackend'"),
        ("http", "the client of this server"),
    ],
)
def test_a_server_whose_backend_is_none_does_not_start(backend, reason):
    with pytest.raises(ConfigError, match=reason):
        serve(HttpSettings(port=0, backend=backend))


def test_the_address_that_is_printed_is_one_that_a_client_takes():
    for host in ("127.0.0.1", "localhost", "::1"):
        url = address(HttpSettings(host=host), 8642)
        assert url_problem(url) is None
        assert (httpx.URL(url).host, httpx.URL(url).port) == (host, 8642)


def test_a_call_without_its_content_type_says_which_it_needs(connect, tmp_path):
    with serving(storage_root=str(tmp_path)) as url:
        headers = {"x-arctic-rl-version": "1", "x-request-id": "typed"}
        for kind, shown in ((None, "none"), ("application/x-www-form-urlencoded",) * 2):
            sent = headers | ({} if kind is None else {"content-type": kind})
            answer = httpx.post(f"{url}/v1/jobs", content=b"{}", headers=sent)
            assert answer.status_code == 415
            assert answer.json()["error"]["message"] == f"the content-type is {shown}: send application/json"
        sent = headers | {"content-type": "application/json; charset=utf-8"}
        assert httpx.post(f"{url}/v1/jobs", content=b"{}", headers=sent).status_code == 422


def test_outcomes_are_remembered_failures_too():
    async def run():
        replays, calls = Replays(kept=2), []

        async def fail():
            calls.append(1)
            raise ArcticError("it failed")

        for _ in range(2):
            with pytest.raises(ArcticError, match="it failed"):
                await replays.once("a", "x", fail)
        assert calls == [1]
        with pytest.raises(HttpError, match="another request"):
            await replays.once("a", "y", fail)
        for name in "bcd":
            with pytest.raises(ArcticError):
                await replays.once(name, "x", fail)
        assert len(replays._tasks) == 2

    asyncio.run(run())
