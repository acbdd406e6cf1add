"""How the built-in backend starts its workers, on a stand-in for Ray."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
import torch

from integrations.arctic_rl.backends.builtin import BuiltinBackend
from integrations.arctic_rl.backends.engine_choice import EngineChoice
from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.placement import WorkerPlacement
from integrations.arctic_rl.server.weights import read_manifest, write_weights
from integrations.arctic_rl.server_config import server_config
from tests.arctic_rl.resume_runs import config


def test_workers_that_are_asked_before_they_are_started_are_told(tmp_path):
    backend = BuiltinBackend.from_config(server_config(config(tmp_path), run_id="the-run", env_vars={}))
    for call, method in (
        (backend.wake_sampling(None), "wake_up"),
        (backend.generate([{"prompt_token_ids": [1], "params": {}}]), "generate"),
        (backend.step(), "step"),
    ):
        with pytest.raises(ArcticError, match=rf"no workers are up that could do '{method}'.*trainer is built"):
            asyncio.run(call)


@pytest.mark.parametrize("job", ["policy", "ref", "sampling"])
def test_workers_reserve_nothing_and_leave_no_record_of_their_calls(tmp_path, monkeypatch, job):
    given = {}

    class Actor:
        def options(self, **options):
            given.update(options)
            return self

        def remote(self, *arguments):
            return SimpleNamespace(arguments=arguments)

    def remote(*cls, **options):
        given.update(options)
        return Actor() if cls else lambda _: Actor()

    monkeypatch.setattr(ray, "remote", remote)
    cfg = config(tmp_path, "trainer.algorithm.use_kl_loss=true")
    backend = BuiltinBackend.from_config(server_config(cfg, run_id="the-run", env_vars={"A": "b"}))
    backend._run_dir = str(tmp_path)
    backend._start_actor(WorkerPlacement(job=job, rank=0, node_id="n", device="cpu"), 1)
    assert (given["num_cpus"], given["num_gpus"], given["max_restarts"]) == (0, 0, 0)
    assert given["enable_task_events"] is False
    assert given["runtime_env"] == {"env_vars": {"A": "b", "ARCTIC_RL_RUN_ID": "the-run"}}


class TestWeights:
    """The order of a sync's calls, on workers that only write weights down."""

    @pytest.fixture
    def backend(self, tmp_path, monkeypatch):
        backend = BuiltinBackend.from_config(server_config(config(tmp_path), run_id="the-run", env_vars={}))
        backend._actors = {"policy-0": None, "sampling-0": None, "sampling-1": None}
        backend._choice = EngineChoice(["sampling-0", "sampling-1"])
        backend._run_dir = str(tmp_path)
        (tmp_path / "weights").mkdir()
        backend.held = {"sampling-0": 0, "sampling-1": 0}

        async def call_all(names, method, *arguments):
            return [getattr(self, method)(backend, name, *arguments) for name in names]

        monkeypatch.setattr(backend, "_call_all", call_all)
        return backend

    def weight_version(self, backend, name):
        return backend.held[name]

    def export_weights(self, backend, name, folder, version, dtype):
        return str(write_weights([("w", torch.full((2,), float(version)))], folder, version, dtype))

    def sync_weights(self, backend, name, path, version, keep_cache=False):
        assert read_manifest(path).version == version
        backend.held[name] = version
        return version

    def test_a_restarted_engine_gets_the_weights_of_the_last_sync(self, backend):
        assert asyncio.run(backend.load_current_weights("sampling-0")) == 0
        for version in (1, 2):
            assert asyncio.run(backend.sync_weights()) == version
        backend.held["sampling-0"] = 0
        assert asyncio.run(backend.load_current_weights("sampling-0")) == 2
        assert backend.held == {"sampling-0": 2, "sampling-1": 2}

    def test_after_a_sync_sessions_are_spread_anew(self, backend):
        assert backend._choice.assign([1], 5, "a").engine == "sampling-0"
        asyncio.run(backend.sync_weights())
        assert backend._choice.assign([1], 5, "a").engine == "sampling-1"
