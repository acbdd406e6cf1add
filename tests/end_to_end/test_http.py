"""A recipe on a server over HTTP, and the same recipe on workers of its own."""

import os
import subprocess
import sys

import httpx
import psutil
import pytest
from recipes import left_over, read_lines, settings, start, write_inputs

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


def test_a_recipe_over_http_has_the_metrics_of_one_over_ray(tmp_path, monkeypatch):
    monkeypatch.setenv("ARCTIC_RL_TOKEN", TOKEN)
    folders = {name: tmp_path / name for name in ("http", "ray")}
    for folder in folders.values():
        folder.mkdir()
        write_inputs(folder)
    command = [sys.executable, "-m", "integrations.arctic_rl.server", "--port", "0", "--storage_root", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        url = server.stdout.readline().split()[-1]
        assert httpx.get(f"{url}/metrics").status_code == 401
        changes = {"trainer.arctic_rl.comm_protocol": "http", "trainer.arctic_rl.server_url": url}
        run = start(folders["http"], settings(folders["http"], CHANGES | changes))
        assert run.wait(timeout=400) == 0, (folders["http"] / "output.log").read_text()[-4000:]
        assert httpx.get(f"{url}/healthz").json()["job_running"] is False
        counted = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
        assert 'arctic_rl_requests_total{call="fwd_bwd",status="200"} 4.0' in counted
        assert (folders["http"] / "checkpoints" / "global_step_2" / "policy").is_dir()
        family = psutil.Process(server.pid).children(recursive=True)
    finally:
        server.terminate()
    assert server.wait(timeout=60) == 0
    assert left_over(family) == []

    run = start(folders["ray"], settings(folders["ray"], CHANGES))
    assert run.wait(timeout=400) == 0, (folders["ray"] / "output.log").read_text()[-4000:]
    over_http, over_ray = metrics(folders["http"]), metrics(folders["ray"])
    assert len(over_ray) == 2
    assert over_http == over_ray
