"""A real rank that stands still, of two under Ray that meet by gloo: the other one waits for it, and the run ends."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from integrations.arctic_rl.backends.builtin import BuiltinBackend, workers
from integrations.arctic_rl.errors import WorkerDiedError
from integrations.arctic_rl.server.specs import ServerConfig
from tests.arctic_rl.backends.test_faults import LIMIT_S
from tests.arctic_rl.processors.helpers import ragged_batch, tiny_model
from tests.arctic_rl.specs import sampling_spec, training_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_S = 3.0
META = {"temperature": 1.0, "max_token_len_per_gpu": 64, "zorro_train_enable": False}
PROCESSING = {"loss_fn": "grpo", "config": {}}


@pytest.fixture
def backend(tmp_path, monkeypatch):
    """Real training workers; the engine is an actor that is there, and no more."""
    import ray

    class Engine:
        def __init__(self, spec): ...

        async def setup(self): ...

        async def ping(self): ...

        async def watch(self):
            await asyncio.Event().wait()

        async def process_ids(self):
            return [os.getpid()]

        async def random_state(self):
            return ["{}"]

        async def shutdown(self): ...

    tiny_model().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(workers, "SamplingWorker", Engine)
    config = ServerConfig(
        policy=training_spec(tmp_path / "model", zero_stage=2),
        critic=None,
        reference=None,
        sampling=sampling_spec(),
        policy_ranks=2,
        critic_ranks=0,
        ref_ranks=0,
        engines=1,
        max_cpu_workers=3,
        sync_dtype="float32",
        log_dir=str(tmp_path / "logs"),
        run_id="stopped-rank",
        startup_timeout_s=200.0,
        shutdown_timeout_s=5.0,
        max_engine_restarts=0,
        worker_timeout_s=TIMEOUT_S,
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield BuiltinBackend(config)
    finally:
        ray.shutdown()


def test_a_rank_that_stands_still_ends_the_run(backend, tmp_path):
    async def run():
        await backend.initialize(10)
        await backend.fwd_bwd(batch, META, PROCESSING)
        await backend.step()
        await backend.save_checkpoint("policy", str(tmp_path / "saved"))
        ranks = [backend._workers.process_ids[f"policy-{rank}"][0] for rank in range(2)]
        os.kill(ranks[1], signal.SIGSTOP)
        begun = time.monotonic()
        try:
            with pytest.raises(
                WorkerDiedError, match=r"worker policy-1 died \(policy-1: no sign of life .*worker_timeout_s=3.0"
            ):
                await backend.fwd_bwd(batch, META, PROCESSING)
            await backend.shutdown()
        finally:
            seconds = time.monotonic() - begun
            left = [rank for rank in map(_process, ranks) if rank is not None]
            for process in left:
                process.kill()
        return seconds, left

    batch = ragged_batch(6, 0)
    seconds, left = asyncio.run(run())
    assert left == []
    assert TIMEOUT_S <= seconds < TIMEOUT_S + LIMIT_S
    assert {file.name for file in (tmp_path / "saved").iterdir()} >= {"engines.json"}


def _process(process_id):
    """A process that is there after a moment in which it may end."""
    try:
        process = psutil.Process(process_id)
        process.wait(timeout=5)
    except psutil.NoSuchProcess:
        return None
    except psutil.TimeoutExpired:
        return process
    return None
