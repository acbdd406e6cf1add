import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_worker_outlives_its_module():
    """Scoring without a pool starts worker processes that are kept; the next module's tests find none."""
    yield
    for package in ("envs", "skyrl_arctic_rl.envs"):
        workers = sys.modules.get(f"{package}.bird.workers")
        if workers is not None:
            workers.stop_workers()
