"""How the built-in backend starts its workers, on a stand-in for Ray."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from integrations.arctic_rl.backends.builtin import BuiltinBackend
from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.placement import WorkerPlacement
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
