"""How the built-in backend starts its workers, on a stand-in for Ray."""

import asyncio
import re
from types import SimpleNamespace

import pytest
import ray

from integrations.arctic_rl.backends.builtin import BuiltinBackend, weights
from integrations.arctic_rl.errors import ArcticError, RequestError
from integrations.arctic_rl.placement import WorkerPlacement
from integrations.arctic_rl.server.weight_sync import SENDERS, SyncPlan
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


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_update_that_is_scaled_for_other_ranks_is_refused(tmp_path, ranks):
    """Its gradient would be a multiple of the right one, without a word."""
    backend = BuiltinBackend.from_config(server_config(config(tmp_path), run_id="the-run", env_vars={}))
    backend._workers.actors = {"policy-0": None, "policy-1": None}
    meta = {"max_token_len_per_gpu": 9, "dp_size": ranks, "batch_num_tokens": 4, "global_batch_size": 2}
    with pytest.raises(RequestError, match=rf"dp_size'\]={ranks}, but the job 'policy' has 2 ranks"):
        asyncio.run(backend.fwd_bwd({}, meta, {"loss_fn": "grpo", "config": {}}))


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
    backend._workers.run_dir, backend._workers.sync_plan = str(tmp_path), SyncPlan("shared_memory", True)
    backend._workers.start_actor(WorkerPlacement(job=job, rank=0, node_id="n", device="cpu"), 1)
    assert (given["num_cpus"], given["num_gpus"], given["max_restarts"]) == (0, 0, 0)
    assert given["enable_task_events"] is False
    assert given["runtime_env"] == {"env_vars": {"A": "b", "ARCTIC_RL_RUN_ID": "the-run"}}


class TestWeights:
    """What the backend hands to a strategy, and how it brings a restarted engine to the same weights."""

    ENGINES = ("sampling-0", "sampling-1")

    @pytest.fixture
    def backend(self, tmp_path, monkeypatch):
        config = SimpleNamespace(
            sampling=SimpleNamespace(gpus=2),
            policy=SimpleNamespace(device="cpu"),
            critic=None,
            reference=None,
            colocate_all=False,
            colocate_policy_ref=False,
            optimizers_that_stay=(),
            sync_dtype="bfloat16",
            weight_sync_bucket_mb=3,
        )
        backend = BuiltinBackend(config)
        names = ("policy-0", "policy-1", "ref-0", *self.ENGINES)
        backend._workers.actors = {name: f"actor of {name}" for name in names}
        backend._workers.run_dir = str(tmp_path)
        backend._engines.started()
        backend.sent, backend.held, backend.refused = [], dict.fromkeys(self.ENGINES, 0), []

        async def call_all(names, method, *arguments):
            if method == "refuse":
                backend.refused.append((names, *arguments))
            return [backend.held[name] for name in names] if method == "weight_version" else [{} for _ in names]

        async def send(run):
            backend.sent.append(run)
            backend.held |= dict.fromkeys(run.receivers, run.version)

        monkeypatch.setattr(backend._calls, "call_all", call_all)
        for name in SENDERS:
            monkeypatch.setitem(SENDERS, name, send)
        monkeypatch.setattr(weights, "send_again", send)
        monkeypatch.setattr(weights, "kept_version", lambda folder: max(backend.held.values()))
        return backend

    def test_a_sync_names_all_ranks_and_engines(self, backend, tmp_path):
        backend._workers.sync_plan = SyncPlan("nccl", False)
        assert asyncio.run(backend.sync_weights(keep_cache=True)) == 1
        (run,) = backend.sent
        assert (run.senders, run.receivers) == (("policy-0", "policy-1"), self.ENGINES)
        assert run.handles == ("actor of sampling-0", "actor of sampling-1")
        assert (run.processes, run.version, run.dtype, run.bucket_bytes) == (2, 1, "bfloat16", 3 * 2**20)
        assert (run.one_node, run.keep_cache, run.folder) == (False, True, str(tmp_path / "weights"))

    def test_after_a_sync_sessions_are_spread_anew(self, backend):
        backend._workers.sync_plan = SyncPlan("shared_memory", True)
        assert backend._engines.choice.assign([1], 5, "a").engine == "sampling-0"
        asyncio.run(backend.sync_weights())
        assert backend._engines.choice.assign([1], 5, "a").engine == "sampling-1"

    @pytest.mark.parametrize("strategy", SENDERS)
    def test_a_restarted_engine_gets_the_weights_of_the_last_sync(self, backend, strategy):
        """Alone: the others hold them already."""
        backend._workers.sync_plan = SyncPlan(strategy, True)
        assert asyncio.run(backend._weights.load_current("sampling-0")) == 0
        assert not backend.sent
        for version in (1, 2):
            asyncio.run(backend.step())
            assert asyncio.run(backend.sync_weights()) == version
        backend.held["sampling-0"] = 0
        assert asyncio.run(backend._weights.load_current("sampling-0")) == 2
        assert backend.held == {"sampling-0": 2, "sampling-1": 2}
        again = backend.sent[-1]
        assert again.receivers == ("sampling-0",)
        assert again.version == 2 and len(backend.sent) == 3

    def test_a_sync_during_which_an_engine_was_restarted_begins_anew(self, backend, monkeypatch):
        """A restart meanwhile sends nothing of its own; an error without one stays an error."""
        backend._workers.sync_plan = SyncPlan("low_memory", True)
        backend._calls.supervisor = SimpleNamespace(restarts=0)
        send = SENDERS["low_memory"]

        async def interrupted(run):
            if backend._calls.supervisor.restarts == 0:
                backend._calls.supervisor.restarts = 1
                assert await backend._weights.load_current("sampling-0") == 0
                raise ArcticError("a part of the weights came to an engine that no update was opened on")
            if backend._calls.supervisor.restarts == 2:
                raise ArcticError("the weights do not fit")
            await send(run)

        monkeypatch.setitem(SENDERS, "low_memory", interrupted)
        assert asyncio.run(backend.sync_weights()) == 1
        assert [run.version for run in backend.sent] == [1]
        backend._calls.supervisor.restarts = 2
        with pytest.raises(ArcticError, match="do not fit"):
            asyncio.run(backend.sync_weights())

    def test_the_only_engine_gets_the_weights_that_it_had(self, backend):
        """A fresh engine says that it holds version 0."""
        backend._workers.sync_plan = SyncPlan("low_memory", True)
        asyncio.run(backend.sync_weights())
        backend.held |= dict.fromkeys(self.ENGINES, 0)
        assert asyncio.run(backend._weights.load_current("sampling-0")) == 1

    @pytest.mark.parametrize("strategy", SENDERS)
    def test_weights_that_are_gone_are_not_replaced_by_newer_ones(self, backend, strategy):
        backend._workers.sync_plan = SyncPlan(strategy, True)
        asyncio.run(backend.sync_weights())
        asyncio.run(backend.step())
        if strategy == "shared_memory":
            assert asyncio.run(backend._weights.load_current("sampling-1")) == 1
            return
        assert asyncio.run(backend._weights.load_current("sampling-1")) == 0
        ((names, reason),) = backend.refused
        assert names == ["sampling-1"] and len(backend.sent) == 1
        assert re.search(rf"weights of version 1 any more.*weight_sync={strategy} keeps no copy", reason)
