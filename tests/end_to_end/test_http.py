"""One server over HTTPS: a recipe on it and on workers of its own, and the contract suite, all on the real workers."""

import ssl
import subprocess
import sys

import httpx
import psutil
import pytest
from recipes import left_over, read_lines, settings, start, write_inputs

from integrations.arctic_rl.backends.contract import BackendContract
from integrations.arctic_rl.backends.http_connection import CA_VARIABLE
from tests.arctic_rl.backends.attaching import attach_elsewhere
from tests.arctic_rl.server.http.test_tls import write_certificate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKEN = "a token of more than sixteen characters"
CHANGES = {"generator.sampling_params.additional_kwargs.seed": 7, "trainer.ckpt_interval": 2}
TIMED = (
    "timing/",
    "generate/scoring_",
    "generate/trajectory_time_",
    "trainer/tokens_per_second",
    "environment/process_id",
)
"""Metrics that no two runs have in common."""


def metrics(folder):
    lines = read_lines(folder / "logs" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of a server, what it takes to ask it, and the folder that it may write to."""
    folder = tmp_path_factory.getbasetemp()
    files = write_certificate(folder / "tls", "127.0.0.1")
    lines = [f"{name}: {value}" for name, value in (files | {"storage_root": str(folder)}).items()]
    (folder / "server.yaml").write_text("\n".join(lines))
    command = ["-m", "integrations.arctic_rl.server", "--config", str(folder / "server.yaml"), "--port", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCTIC_RL_TOKEN", TOKEN)
        patch.setenv(CA_VARIABLE, files["tls_certificate"])
        patch.setenv("HF_HUB_OFFLINE", "1")
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        try:
            url = process.stdout.readline().split()[-1]
            assert url.startswith("https://")
            yield url, ssl.create_default_context(cafile=files["tls_certificate"])
            family = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.terminate()
            status = process.wait(timeout=60)
    assert status == 0
    assert left_over(family) == []


def test_a_recipe_over_http_has_the_metrics_of_one_over_ray(server, tmp_path_factory):
    url, trusted = server
    folders = {name: tmp_path_factory.mktemp(name) for name in ("http", "ray")}
    for folder in folders.values():
        write_inputs(folder)
    assert httpx.get(f"{url}/metrics", verify=trusted).status_code == 401
    changes = {"trainer.arctic_rl.comm_protocol": "http", "trainer.arctic_rl.server_url": url}
    run = start(folders["http"], settings(folders["http"], CHANGES | changes))
    assert run.wait(timeout=400) == 0, (folders["http"] / "output.log").read_text()[-4000:]
    assert httpx.get(f"{url}/healthz", verify=trusted).json()["job_running"] is False
    counted = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, verify=trusted).text
    assert 'arctic_rl_requests_total{call="fwd_bwd",status="200"} 4.0' in counted
    assert (folders["http"] / "checkpoints" / "global_step_2" / "policy").is_dir()

    run = start(folders["ray"], settings(folders["ray"], CHANGES))
    assert run.wait(timeout=400) == 0, (folders["ray"] / "output.log").read_text()[-4000:]
    over_http, over_ray = metrics(folders["http"]), metrics(folders["ray"])
    assert len(over_ray) == 2
    assert over_http == over_ray


class TestBuiltinOverHttp(BackendContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def two_ranks_there(cls, server):
        cls.settings = {"server_url": server[0], "policy_ranks": 2}

    def test_a_process_that_imports_nothing_of_the_drivers_attaches(self, served):
        found = attach_elsewhere(served.backend.reconnect_handle(), served.config)
        assert found == {"weight_norm": served.run("weight_norm", "policy"), "dp_size": 2, "modules": []}
