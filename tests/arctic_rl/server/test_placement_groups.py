"""Plans reserved in a real Ray cluster of two nodes whose GPUs are numbers alone, by actors that say what they got."""

import os
import subprocess
import sys
import time

import pytest

from integrations.arctic_rl.backends.builtin import describe_cluster
from integrations.arctic_rl.errors import PlacementError
from integrations.arctic_rl.placement import PlacementRequest, plan_placement
from integrations.arctic_rl.server.placement_groups import release, reserve

pytestmark = pytest.mark.slow

GPUS = 4


@pytest.fixture(scope="module")
def two_nodes():
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "num_gpus": GPUS, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, num_gpus=GPUS)
        ray.init(address=cluster.address, log_to_driver=False)
        yield describe_cluster()
    finally:
        ray.shutdown()
        cluster.shutdown()


def request(**settings):
    return PlacementRequest(**({"ref_ranks": 0, "max_cpu_workers": 4, "device": "cuda"} | settings))


def seen_by_actors(reservation):
    """By (job, rank): the node of its actor and what Ray shows it, once all of them are up."""
    import ray

    class Seeing:
        def see(self):
            import os

            return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    actors = {
        (worker.job, worker.rank): ray.remote(num_cpus=0)(Seeing).options(**reservation.actor_options(worker)).remote()
        for worker in reservation.plan.workers
    }
    return dict(zip(actors, ray.get([actor.see.remote() for actor in actors.values()], timeout=60), strict=True))


def free_gpus():
    import ray

    return ray.available_resources().get("GPU", 0)


def test_shared_gpus_are_those_of_the_plan_and_others_wait_for_them(two_nodes):
    shared = request(
        policy_ranks=4, policy_nodes=2, ref_ranks=4, ref_nodes=2, engines=2, engine_gpus=2, colocate_all=True
    )
    plan = plan_placement(shared, two_nodes)
    held = reserve(plan, timeout_s=60)
    seen = seen_by_actors(held)
    for worker in plan.workers:
        node, device = seen[worker.job, worker.rank]
        assert node == worker.node_id
        assert device == held.devices[worker.places[0]]
    assert len({seen["policy", rank] for rank in range(4)}) == 4
    assert [seen["ref", rank] for rank in range(4)] == [seen["policy", rank] for rank in range(4)]
    for engine, ranks in plan.policy_ranks_of_engines().items():
        of_engine = held.visible_devices(plan.of("sampling")[engine])
        assert of_engine == ",".join(seen["policy", rank][1] for rank in ranks)
    assert free_gpus() == 2 * GPUS - 4

    apart = request(policy_ranks=3, engines=2, engine_gpus=2)
    with pytest.raises(PlacementError) as caught:
        reserve(plan_placement(apart, two_nodes), timeout_s=1)
    assert "did not give 7 GPUs" in str(caught.value) and "4 of its 8 GPUs are free" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1

    release(held)
    held = reserve(plan_placement(apart, two_nodes), timeout_s=60)
    seen = seen_by_actors(held)
    devices = [(node, device) for (job, _), (node, device) in seen.items() if job == "policy"]
    for engine in held.plan.of("sampling"):
        assert seen["sampling", engine.rank][0] == engine.node_id
        devices += [(engine.node_id, device) for device in held.visible_devices(engine).split(",")]
    assert len(devices) == len(set(devices)) == 7
    release(held)
    deadline = time.monotonic() + 30
    while free_gpus() < 2 * GPUS and time.monotonic() < deadline:
        time.sleep(0.2)
    assert free_gpus() == 2 * GPUS


DEVICE = """
from integrations.arctic_rl.devices import device_here
from integrations.arctic_rl.skyrl_config import parse_config
import ray
print(device_here(parse_config(["trainer.logger=console"])), ray.is_initialized())
"""


def test_a_recipe_that_would_join_a_cluster_with_gpus_is_for_gpus(two_nodes):
    """Where it is typed there are none, as on the head of many clusters."""
    import ray

    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address}
    done = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["cuda False"], (done.stdout, done.stderr)
