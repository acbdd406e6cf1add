"""Whoever dies or stands still, whenever: an engine is replaced and everything it was asked is answered; anything else
ends the run with its name. On the actors of ``fake_cluster``; ``benchmarks.faults`` has the same with real parts."""

import asyncio
import time
from contextvars import Context
from types import SimpleNamespace

import pytest

from benchmarks.faults import PHASES, ends_the_run
from integrations.arctic_rl.backends.builtin import calls
from integrations.arctic_rl.backends.builtin.workers import Workers
from integrations.arctic_rl.errors import ArcticError, WorkerDiedError
from integrations.arctic_rl.placement import WorkerPlacement
from integrations.arctic_rl.server.weight_sync import SyncPlan
from tests.arctic_rl.backends.fake_cluster import FakeEngine, FakeRank, expected_sample, fake_backend
from tests.arctic_rl.processors.helpers import ragged_batch

VICTIMS = ("policy-0", "policy-1", "critic-0", "ref-0", "sampling-0", "sampling-1")
CASES = [(victim, "killed") for victim in VICTIMS] + [(victim, "stopped") for victim in ("policy-1", "sampling-0")]
BEGINS = {
    "initialize": lambda method, keywords: method == "setup",
    "generate": lambda method, keywords: method == "generate",
    "forward": lambda method, keywords: method == "run_rows" and not keywords["backward"],
    "backward": lambda method, keywords: method == "run_rows" and keywords["backward"],
    "step": lambda method, keywords: method == "step",
    "sync": lambda method, keywords: method == "export_weights",
    "save": lambda method, keywords: method == "save_checkpoint",
}
META = {"max_token_len_per_gpu": 64, "zorro_train_enable": False}
LIMIT_S = 30.0
"""The issue's: from a death to the end of the run."""


def requests(count=12):
    return [
        {"prompt_token_ids": [index, 1], "params": {"seed": 100 + index, "max_tokens": 4}} for index in range(count)
    ]


def samples(count, version):
    return [expected_sample([index, 1], 100 + index, version) for index in range(count)]


async def one_step(backend, folder):
    """Everything that a step of a run asks of a backend; returns the rollouts."""
    batch = ragged_batch(6, 0)
    rollouts = await backend.generate(requests())
    for job in ("policy", "ref", "critic"):
        await backend.fwd_no_grad(job, batch, META, {})
    for job in ("policy", "critic"):
        await backend.fwd_bwd(batch, META, {}, job=job)
        await backend.step(job)
    await backend.update_weights()
    for job in ("policy", "critic"):
        await backend.save_checkpoint(job, str(folder / job))
    return [rollout["token_ids"] for rollout in rollouts]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("victim", "how"), CASES)
def test_every_worker_in_every_phase(tmp_path, monkeypatch, victim, phase, how):
    async def run():
        backend, cluster = fake_backend(monkeypatch, tmp_path, timeout_s=0.4 if how == "stopped" else 30.0)
        hurt = None
        try:
            if phase == "initialize":
                if how == "stopped":
                    backend._config = backend._config.__class__(**{**vars(backend._config), "startup_timeout_s": 0.3})
                cluster.hurt(victim, BEGINS[phase], how)
            hurt = time.monotonic()
            await backend.initialize(10, critic_training_steps=10)
            assert await one_step(backend, tmp_path / "first") == samples(12, 0)
            cluster.hurt(victim, BEGINS[phase], how)
            hurt = time.monotonic()
            assert await one_step(backend, tmp_path / "second") == samples(12, 1)
            assert await one_step(backend, tmp_path / "third") == samples(12, 2)
            counts = backend.take_fault_metrics()
        except ArcticError as error:
            await backend.shutdown()
            return str(error), time.monotonic() - hurt, cluster, None
        await backend.shutdown()
        return None, time.monotonic() - hurt, cluster, counts

    message, seconds, cluster, counts = asyncio.run(run())
    assert cluster.alive() == [], "nothing is left"
    assert seconds < LIMIT_S
    first = {path.relative_to(tmp_path / "first").as_posix() for path in (tmp_path / "first").rglob("rank-*")}
    assert first == (set() if phase == "initialize" else {"policy/rank-0", "policy/rank-1", "critic/rank-0"})
    if ends_the_run(victim.rsplit("-", 1)[0], phase):
        assert message is not None
        assert victim in message or how == "stopped", message
        assert "died" in message or "were not up" in message
        return
    assert message is None
    engines = cluster.actors[victim]
    assert counts["generate/engine_restarts"] == 1 and len(engines) == 2
    assert engines[1]._worker.version == 3
    again = counts.get("generate/requests_run_again", 0)
    assert again == (engines[0]._worker.requests - 6 if phase == "generate" else 0)
    other = cluster.actors["sampling-0" if victim == "sampling-1" else "sampling-1"]
    assert len(other) == 1


def test_deaths_without_end_stop_the_run(tmp_path, monkeypatch):
    class CrashingEngine(FakeEngine):
        async def generate(self, prompt, *arguments):
            cluster.actors["sampling-0"][-1].die()

    async def run():
        await backend.initialize(10)
        await backend.generate(requests(3))

    backend, cluster = fake_backend(monkeypatch, tmp_path, engines=1, most=2)
    monkeypatch.setattr("tests.arctic_rl.backends.fake_cluster.FakeEngine", CrashingEngine)
    with pytest.raises(WorkerDiedError, match=r"sampling-0 died \(sampling-0 was killed\).*max_engine_restarts=2"):
        asyncio.run(run())
    assert len(cluster.actors["sampling-0"]) == 3


def test_an_engine_that_dies_unasked_is_up_before_it_is_asked(tmp_path, monkeypatch):
    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        cluster.actors["sampling-1"][0].die()
        await asyncio.sleep(0.1)
        assert cluster.actors["sampling-1"][1]._worker.version == 1
        await backend.sleep_sampling(1)
        cluster.actors["sampling-0"][0].die()
        await asyncio.sleep(0.1)
        assert len(cluster.actors["sampling-0"]) == 1, "memory that it gave away is not asked for"
        await backend.wake_sampling(None)
        assert len(cluster.actors["sampling-0"]) == 2
        answers = await backend.generate(requests(4))
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers]

    backend, cluster = fake_backend(monkeypatch, tmp_path)
    assert asyncio.run(run()) == samples(4, 1)


@pytest.mark.parametrize("strategy", ["low_memory", "shared_memory"])
@pytest.mark.parametrize("when", ["asleep", "wake_up", "export_bucket", "load_part", "export_weights", "sync_weights"])
def test_an_engine_on_shared_gpus_starts_anew_on_empty_ones(tmp_path, monkeypatch, strategy, when):
    """vLLM does not start where the memory that it may take is not free: the policy's weights leave for that time."""
    starts = []

    async def setup(self):
        ranks = [actor._worker for name, (actor, *_) in cluster.actors.items() if not name.startswith("sampling")]
        starts.append(set().union(*(rank.awake for rank in ranks)))

    async def run():
        await backend.initialize(10, critic_training_steps=10)
        await backend.update_weights()
        if when == "asleep":
            await backend.fwd_bwd(ragged_batch(6, 0), META, {})
            cluster.actors["sampling-0"][0].die()
            await asyncio.sleep(0.05)
            assert len(starts) == 2, "what the policy has is not asked for"
        else:
            cluster.hurt("sampling-0", lambda method, _: method == when, "killed")
            await backend.fwd_bwd(ragged_batch(6, 0), META, {})
        await backend.step()
        await backend.update_weights()
        answers = await backend.generate(requests(8))
        states = [actors[-1]._worker.asleep for name, actors in cluster.actors.items() if name.startswith("sampling")]
        awake = [actors[0]._worker.awake for name, actors in cluster.actors.items() if name.startswith("policy")]
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers], states, awake

    monkeypatch.setattr(FakeEngine, "setup", setup)
    backend, cluster = fake_backend(monkeypatch, tmp_path, colocate_all=True, weight_sync=strategy, startup_s=5.0)
    happens = when in ("asleep", "wake_up") or when in BEGUN_BY[strategy]
    answers, states, awake = asyncio.run(run())
    assert answers == samples(8, 2)
    assert states == [set(), set()] and awake == [set(), set()]
    assert starts[2:] == [set()] * happens, "nothing else was on the GPU"
    assert len(cluster.actors["sampling-0"]) == 1 + happens


BEGUN_BY = {"low_memory": ("export_bucket", "load_part"), "shared_memory": ("export_weights", "sync_weights")}


def test_requests_that_are_kept_over_a_sync_go_on_on_the_next_engine(tmp_path, monkeypatch):
    """In fully asynchronous training: a frozen engine dies, its successor is frozen until the sync is over."""

    async def run():
        await backend.initialize(10)
        under_way = asyncio.ensure_future(backend.generate(requests(4)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cluster.hurt("sampling-0", BEGINS["sync"], "killed")
        await backend.update_weights(in_flight="keep")
        answers = await under_way
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers]

    backend, cluster = fake_backend(monkeypatch, tmp_path)
    answered = asyncio.run(run())
    assert [tokens[:2] for tokens in answered] == [tokens[:2] for tokens in samples(4, 0)]
    assert {tokens[2] for tokens in answered} <= {0, 1}
    assert len(cluster.actors["sampling-0"]) == 2


@pytest.mark.parametrize("engines", [2, 3])
def test_all_engines_die_at_once_and_no_copy_of_the_weights_is_kept(tmp_path, monkeypatch, engines):
    """Each restart sends the weights to the engines that are up; none waits for another one."""

    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        for actors in list(cluster.actors.values()):
            if actors[0]._name.startswith("sampling"):
                actors[0].die()
        answers = await backend.generate(requests(8))
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers]

    backend, cluster = fake_backend(
        monkeypatch, tmp_path, engines=engines, weight_sync="low_memory", weight_sync_bucket_mb=1, startup_s=5.0
    )
    assert asyncio.run(run()) == samples(8, 1)
    assert [len(cluster.actors[f"sampling-{number}"]) for number in range(engines)] == [2] * engines


@pytest.mark.parametrize("method", ["check_tensors", "begin_update", "load_part", "end_update"])
def test_another_engine_dies_while_one_gets_its_weights_back(tmp_path, monkeypatch, method):
    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        cluster.hurt("sampling-1", lambda called, keywords: called == method, "killed")
        cluster.actors["sampling-0"][0].die()
        first = await backend.generate(requests(8))
        answers = [*first, *await backend.generate(requests(8))]
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers]

    backend, cluster = fake_backend(monkeypatch, tmp_path, weight_sync="low_memory", startup_s=5.0)
    assert asyncio.run(run()) == samples(8, 1) * 2
    assert [len(cluster.actors[f"sampling-{number}"]) for number in range(2)] == [2, 2]


def test_an_engine_gets_no_mix_of_two_steps(tmp_path, monkeypatch):
    """Where the policy trains while engines sample, it steps between two buckets for an engine that is restarted."""

    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        stepped = []

        def step(called, keywords):
            if called == "export_bucket":
                stepped.append(asyncio.ensure_future(backend.step()))
            return False

        cluster.hurt("sampling-1", step, "killed")
        cluster.actors["sampling-0"][0].die()
        answers = await backend.generate(requests(8))
        await asyncio.gather(*stepped)
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers], len(stepped)

    monkeypatch.setattr(
        "integrations.arctic_rl.server.weight_sync.low_memory.plan_buckets",
        lambda specs, size: [[spec] for spec in specs],
    )
    backend, cluster = fake_backend(monkeypatch, tmp_path, weight_sync="low_memory", startup_s=5.0)
    answers, steps = asyncio.run(run())
    assert answers == samples(8, 1) and steps >= 2


def test_an_engine_that_dies_behind_its_part_of_a_sync_gets_the_weights_too(tmp_path, monkeypatch):
    """It has said that it holds them, another engine has not: its successor begins with the checkpoint's own."""

    async def end_update(self, keep_cache=False):
        first = cluster.actors["sampling-0"]
        if self is first[0]._worker:
            asyncio.get_running_loop().call_later(0.01, first[0].die)
        elif len(first) == 1:
            await asyncio.sleep(0.2)
        self.version, self.update = self.update, None
        return self.version

    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        answers = await backend.generate(requests(8))
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers]

    monkeypatch.setattr(FakeEngine, "end_update", end_update)
    backend, cluster = fake_backend(monkeypatch, tmp_path, weight_sync="low_memory", startup_s=5.0)
    assert asyncio.run(run()) == samples(8, 1)


@pytest.mark.parametrize("method", ["setup", "check_tensors", "begin_update", "load_part", "end_update"])
def test_an_engine_dies_again_while_it_gets_its_weights_back(tmp_path, monkeypatch, method):
    """Its second successor has them, the other engine goes on with its requests and is sent nothing."""

    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        received = len(cluster.actors["sampling-1"][0]._worker.parts)
        cluster.hurt("sampling-0", lambda called, keywords: called == method, "killed")
        cluster.actors["sampling-0"][0].die()
        answers = await backend.generate(requests(8))
        assert len(cluster.actors["sampling-1"][0]._worker.parts) == received
        counts = backend.take_fault_metrics()
        await backend.update_weights()
        answers += await backend.generate(requests(8))
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers], counts["generate/engine_restarts"]

    monkeypatch.setattr(calls, "DEATH_GRACE_S", 0.1)
    backend, cluster = fake_backend(monkeypatch, tmp_path, weight_sync="low_memory", startup_s=5.0)
    assert asyncio.run(run()) == (samples(8, 1) + samples(8, 2), 2.0)
    assert [len(cluster.actors[f"sampling-{number}"]) for number in range(2)] == [3, 1]


@pytest.mark.parametrize("strategy", ["shared_memory", "low_memory"])
def test_an_engine_that_dies_behind_a_step_gets_the_weights_of_the_next_sync(tmp_path, monkeypatch, strategy):
    """Those of the last one are gone where no copy is kept; nothing is sampled with others meanwhile."""

    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        await backend.step()
        cluster.actors["sampling-0"][0].die()
        await asyncio.sleep(0.1)
        successor = cluster.actors["sampling-0"][1]._worker
        assert successor.version == (1 if strategy == "shared_memory" else 0)
        if strategy == "low_memory":
            with pytest.raises(ArcticError, match=r"weights of version 1 any more.*low_memory keeps no copy"):
                await backend.generate(requests(8))
        await backend.update_weights()
        answers = await backend.generate(requests(8))
        await backend.shutdown()
        return [answer["token_ids"] for answer in answers]

    backend, cluster = fake_backend(monkeypatch, tmp_path, weight_sync=strategy, startup_s=5.0)
    assert asyncio.run(run()) == samples(8, 2)
    assert len(cluster.actors["sampling-0"]) == 2


@pytest.mark.parametrize("export_s", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("in_flight", ["finish", "keep"])
def test_an_engine_that_dies_while_its_weights_are_being_written(tmp_path, monkeypatch, export_s, in_flight):
    """Its successor never reads a file that is half of one version; every sample says the version that it is of."""
    export, load, writing = FakeRank.export_weights, FakeEngine.sync_weights, []

    async def export_weights(self, directory, version, dtype):
        if self.rank == 0 and version == 2:
            cluster.actors["sampling-0"][0].die()
            await asyncio.sleep(0.03)  # the call is queued while another one is carried out
            writing.append(version)
            await asyncio.sleep(export_s)
            writing.clear()
        return await export(self, directory, version, dtype)

    async def sync_weights(self, path, version, keep_cache=False):
        await asyncio.sleep(0.02)
        assert not writing
        return await load(self, path, version, keep_cache)

    async def run():
        await backend.initialize(10)
        await backend.update_weights()
        under_way = asyncio.ensure_future(backend.generate(requests(8)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await backend.update_weights(in_flight=in_flight)
        answers = [*await under_way, *await backend.generate(requests(8))]
        await backend.shutdown()
        return answers

    monkeypatch.setattr(FakeRank, "export_weights", export_weights)
    monkeypatch.setattr(FakeEngine, "sync_weights", sync_weights)
    backend, cluster = fake_backend(monkeypatch, tmp_path, startup_s=5.0)
    answers = asyncio.run(run())
    assert all(answer["token_ids"][2] == answer["weight_version"] for answer in answers)
    assert {answer["weight_version"] for answer in answers[:8]} <= ({1} if in_flight == "finish" else {1, 2})
    assert [answer["token_ids"] for answer in answers[8:]] == samples(8, 2)
    assert len(cluster.actors["sampling-0"]) == 2


class TestSharedGpus:
    """With ``colocate_all`` an engine's weights come back without the policy beside anybody's caches."""

    @pytest.fixture
    def cluster_of(self, tmp_path, monkeypatch):
        backend, cluster = fake_backend(
            monkeypatch, tmp_path, engines=3, weight_sync="low_memory", startup_s=5.0, colocate_all=True
        )
        setup, export = FakeEngine.setup, FakeRank.export_bucket

        def ranks():
            return [actor._worker for actor in cluster.alive() if isinstance(actor._worker, FakeRank)]

        def engines():
            return [actor._worker for actor in cluster.alive() if isinstance(actor._worker, FakeEngine)]

        async def set_up(self):
            assert not cluster.checked or not any(rank.awake for rank in ranks()), "memory is taken on an empty GPU"
            await setup(self)

        async def export_bucket(self, *arguments):
            assert all("kv_cache" in engine.asleep for engine in engines()), "the policy beside caches"
            if cluster.checked and self.rank == 0 and not backend._engines.asleep_at:
                asked = asyncio.create_task(backend.generate(requests(8)), context=Context())
                cluster.asked_meanwhile.append(asked)
            return await export(self, *arguments)

        cluster.checked, cluster.asked_meanwhile = False, []
        monkeypatch.setattr(FakeEngine, "setup", set_up)
        monkeypatch.setattr(FakeRank, "export_bucket", export_bucket)
        return backend, cluster

    def test_an_engine_dies_while_others_sample(self, cluster_of):
        backend, cluster = cluster_of

        async def run():
            await backend.initialize(10)
            await backend.update_weights()
            cluster.checked = True
            cluster.hurt("sampling-0", BEGINS["generate"], "killed")
            answers = await backend.generate(requests(8))
            (meanwhile,) = cluster.asked_meanwhile
            answers = [*answers, *await meanwhile, *await backend.generate(requests(8))]
            await backend.shutdown()
            return [answer["token_ids"] for answer in answers]

        assert asyncio.run(run()) == samples(8, 1) * 3
        assert len(cluster.actors["sampling-0"]) == 2

    @pytest.mark.parametrize("method", ["sleep", "wake_up", "export_bucket", "load_part", "end_update"])
    @pytest.mark.parametrize("second", ["sampling-0", "sampling-1", "sampling-2"])
    def test_a_second_death_meanwhile(self, cluster_of, monkeypatch, second, method):
        """Whoever it is, the policy leaves before caches come back, and requests made meanwhile are answered."""
        backend, cluster = cluster_of

        async def run():
            await backend.initialize(10)
            await backend.update_weights()
            cluster.hurt(second, lambda called, keywords: called == method, "killed")
            cluster.checked = True
            cluster.actors["sampling-0"][0].die()
            answers = []
            for _ in range(5):
                answers += await backend.generate(requests(8))
                await asyncio.sleep(0.02)
            for meanwhile in cluster.asked_meanwhile:
                answers += await meanwhile
            ranks = [actors[0]._worker for name, actors in cluster.actors.items() if name.startswith("policy")]
            awake = [rank.awake for rank in ranks]
            await backend.shutdown()
            return [answer["token_ids"] for answer in answers], awake

        monkeypatch.setattr(calls, "DEATH_GRACE_S", 0.05)
        answers, awake = asyncio.run(run())
        assert answers == samples(8, 1) * (len(answers) // 8) and len(answers) >= 40
        assert awake == [set(), set()]
        assert len(cluster.actors["sampling-0"]) == 2 + (second == "sampling-0")

    @pytest.mark.parametrize("steps", [0, 1])
    def test_an_engine_dies_in_its_sleep(self, cluster_of, tmp_path, steps):
        backend, cluster = cluster_of

        async def run():
            await backend.initialize(10)
            await backend.update_weights()
            cluster.checked = True
            await backend.sleep_sampling(2)
            cluster.actors["sampling-0"][0].die()
            for _ in range(steps):
                await backend.step()
            await asyncio.sleep(0.05)
            assert len(cluster.actors["sampling-0"]) == 1, "training has the memory"
            await backend.save_checkpoint("policy", str(tmp_path / "checkpoint"))
            assert len(cluster.actors["sampling-0"]) == 2
            cluster.checked = False
            await backend.update_weights()
            answers = await backend.generate(requests(8))
            await backend.shutdown()
            return [answer["token_ids"] for answer in answers]

        assert asyncio.run(run()) == samples(8, 2)
        assert len(cluster.actors["sampling-0"]) == 2


def test_ranks_that_meet_the_engines_do_not_wait_for_a_dead_one(tmp_path, monkeypatch):
    """Nobody calls them back from a broadcast: the run ends."""

    async def run():
        await backend.initialize(10)
        backend._workers.sync_plan = SyncPlan("nccl", one_node=True)
        cluster.hurt("sampling-0", lambda called, keywords: called == "transfer_weights", "killed")
        begun = time.monotonic()
        with pytest.raises(WorkerDiedError, match=r"weight_sync=nccl.*write low_memory"):
            await backend.update_weights()
        seconds = time.monotonic() - begun
        await backend.shutdown()
        return seconds

    monkeypatch.setattr(calls, "DEATH_GRACE_S", 0.2)
    backend, cluster = fake_backend(monkeypatch, tmp_path)
    assert asyncio.run(asyncio.wait_for(run(), 20)) < LIMIT_S
    assert cluster.alive() == []


def test_no_two_engines_draw_the_same_noise(tmp_path, monkeypatch):
    """Not even one and its successor; two runs of one seed do."""
    import ray

    start = Workers.start_actor
    told = []
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda spec: told.append(spec.seed)))
    monkeypatch.setattr(ray, "remote", lambda cls: actor)
    for _ in range(2):
        backend, _ = fake_backend(monkeypatch, tmp_path, engines=3)
        backend._workers.run_dir = str(tmp_path)
        backend._workers.sync_plan = SyncPlan("shared_memory", one_node=True)
        for _ in range(3):
            for rank in range(3):
                start(backend._workers, WorkerPlacement("sampling", rank, "here", "cpu"), 3)
        monkeypatch.setattr(Workers, "start_actor", start)
    assert told[:9] == told[9:] and len(set(told)) == 9


def test_a_call_may_take_longer_than_the_time_out(tmp_path, monkeypatch):
    """Signs of life come beside a call, however long it takes."""

    async def slow(self):
        await asyncio.sleep(0.5)
        return {"lr": 1e-3, "grad_norm": 1.0}

    async def run():
        await backend.initialize(10)
        assert (await backend.step())["grad_norm"] == 1.0
        await backend.shutdown()

    monkeypatch.setattr("tests.arctic_rl.backends.fake_cluster.FakeRank.step", slow)
    backend, _ = fake_backend(monkeypatch, tmp_path, timeout_s=0.1)
    asyncio.run(run())


def test_ten_thousand_requests_at_once(tmp_path, monkeypatch):
    """None is lost, each has its own answer, and what is kept of them is gone when they are answered."""

    async def run():
        await backend.initialize(10)
        cluster.hurt("sampling-1", lambda method, keywords: method == "generate", "killed")
        groups = [requests(100) for _ in range(100)]
        answers = await asyncio.gather(*(backend.generate(group) for group in groups))
        outstanding = backend._engines.choice.load
        await backend.shutdown()
        return [[answer["token_ids"] for answer in group] for group in answers], outstanding

    backend, cluster = fake_backend(monkeypatch, tmp_path)
    answers, outstanding = asyncio.run(run())
    assert answers == [samples(100, 0)] * 100
    assert outstanding == {"sampling-0": 0, "sampling-1": 0}
