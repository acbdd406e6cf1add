"""2,000 malformed and hostile requests at a server in a process of its own."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from integrations.arctic_rl.backends.contract import PROMPTS, STEPS, batch, meta, write_model
from integrations.arctic_rl.backends.contract import Served as Client
from integrations.arctic_rl.backends.loop_thread import LoopThread
from integrations.arctic_rl.client import ClientConfig, create_arctic_rl_client
from tests.arctic_rl.backends import model_backend
from tests.arctic_rl.server.http.hostile import KINDS, hostile_requests, send_raw

pytestmark = pytest.mark.slow

COUNT, WARM_UP = 2_000, 10
GROWTH_LIMIT = 20 * 2**20

SERVER = """
import sys
from integrations.arctic_rl.server.http.serve import serve
from integrations.arctic_rl.server.http.settings import HttpSettings
serve(HttpSettings(port=0, backend=sys.argv[1], storage_root=sys.argv[2], max_body_mb=8, max_cells=100_000))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("storage")
    (root / "link").symlink_to("/")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, model_backend.PATH, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving on "), process.stderr.read()
        yield line.split()[-1], process.pid, root
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    url, _, _ = server
    model = write_model(tmp_path_factory.mktemp("model"))
    config = ClientConfig(model_path=str(model), server_url=url, lr=1e-2)
    loop = LoopThread("abuse")
    backend = create_arctic_rl_client(config)
    loop.run(backend.initialize(STEPS))
    yield Client(backend, loop, config)
    loop.run(backend.destroy())
    loop.close()


def send(connection, url, request):
    """Status and body of an answer."""
    if request.raw is not None:
        return send_raw(url, request.raw), None
    content = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
    answer = connection.request(request.method, url + request.path, content=content, headers=request.headers)
    return answer.status_code, answer.text


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if "link" not in path.parts)


def test_each_is_refused_and_nothing_is_harmed(server, client):
    url, process_id, root = server
    job_id = client.backend.reconnect_handle().job_ids["server"]
    before = client.run("weight_norm", "policy"), client.log_probs(), client.generate(PROMPTS, temperature=0.0)
    files = files_below(root)
    process = psutil.Process(process_id)
    statuses: Counter = Counter()
    with httpx.Client(timeout=20, headers={"content-type": "application/json"}) as connection:
        for request in hostile_requests(job_id, WARM_UP * len(KINDS), seed=1):
            send(connection, url, request)
        memory = process.memory_info().rss
        for request in hostile_requests(job_id, COUNT, seed=2):
            status, text = send(connection, url, request)
            assert 400 <= status < 500, (request.what, status, text)
            statuses[status] += 1
            if text is not None and request.raw is None:
                error = json.loads(text)["error"]
                assert error["message"] and error["request_id"], request.what
        growth = process.memory_info().rss - memory
    assert sum(statuses.values()) == COUNT
    assert growth < GROWTH_LIMIT, f"{growth / 2**20:.1f} MiB, {statuses}"
    assert files_below(root) == files
    assert client.run("weight_norm", "policy") == before[0]
    assert client.log_probs().equal(before[1])
    assert client.generate(PROMPTS, temperature=0.0) == before[2]
    assert client.run("fwd_bwd", batch(), meta(client), {"loss_fn": "grpo", "config": {}})["avg_loss"] is not None
