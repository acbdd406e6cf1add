"""The contract on a run of ``arctic-platform``'s own server app (``platform_server``), through its own client."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from integrations.arctic_rl.backends.contract import PROMPTS, UPDATE, BackendContract, batch, meta
from integrations.arctic_rl.client import create_arctic_rl_client
from integrations.arctic_rl.errors import ArcticError, UnsupportedError

pytestmark = pytest.mark.slow


@contextmanager
def serving(log):
    """The URL of a server process."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "tests.arctic_rl.backends.platform_server", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ARL_DEBUG": "0"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                assert httpx.get(f"{url}/health").json() == {"status": "OK"}
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


class TestArcticPlatform(BackendContract):
    backend = "arctic-platform"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory):
        pytest.importorskip("arctic_platform", reason="the extra arctic-platform is not installed")
        with serving(tmp_path_factory.mktemp("server") / "log") as url:
            cls.settings = {"server_url": url, "dtype": "bfloat16", "mini_batch_rows": 4, "micro_batch_rows": 1}
            yield url
            assert httpx.get(f"{url}/status").json()["jobs"] == {}

    def test_gradients_add_up_until_the_step(self, served, tmp_path):
        """They would not: its engine counts micro-batches, and would step in the midst of the second call."""
        served.run("fwd_bwd", batch(), meta(served), UPDATE)
        with pytest.raises(UnsupportedError, match="twice before a step"):
            served.run("fwd_bwd", batch(), meta(served), UPDATE)
        served.run("step")
        with pytest.raises(ArcticError, match="without a gradient"):
            served.run("step")

    def test_the_reference_becomes_a_copy_of_the_policy(self, served):
        with pytest.raises(UnsupportedError, match="update_reference"):
            served.run("update_reference")

    def test_another_process_attaches_with_the_handle(self, served):
        other = create_arctic_rl_client(served.config, served.backend.reconnect_handle())
        try:
            found = served.loop.run(other.log_probs("policy", batch(), meta(served)))
            assert (found - served.log_probs()).abs().max() < 1e-6
            with pytest.raises(UnsupportedError, match="counts weight versions"):
                served.loop.run(other.update_weights())
        finally:
            served.loop.run(other.destroy())
        served.log_probs()

    def test_a_second_run_is_told_that_the_server_is_taken(self, served):
        other = create_arctic_rl_client(served.config)
        with pytest.raises(ArcticError, match="jobs of another run"):
            served.loop.run(other.initialize(1))
        assert len(served.generate(PROMPTS, temperature=0.0)) == len(PROMPTS)
