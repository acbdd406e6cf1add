import dataclasses
import itertools
import random

import pytest

from integrations.arctic_rl.errors import PlacementError
from integrations.arctic_rl.placement import ClusterDescription, Node, PlacementRequest, plan_placement

LAPTOP = ClusterDescription((Node("a", 2, 0),))


def cluster(*gpus):
    return ClusterDescription(tuple(Node(f"n{number}", 64, count) for number, count in enumerate(gpus)))


def request(policy=1, ref=0, engines=1, most=4):
    return PlacementRequest(policy_ranks=policy, ref_ranks=ref, engines=engines, max_cpu_workers=most)


def on_gpus(policy=(1, 1), ref=None, critic=None, engines=(1, 1), **settings):
    """A request in the recipe's own terms: (nodes, GPUs of a node) of a job, (engines, GPUs of each)."""
    ref, critic = ref or (1, 0), critic or (1, 0)
    return PlacementRequest(
        policy_ranks=policy[0] * policy[1],
        policy_nodes=policy[0],
        ref_ranks=ref[0] * ref[1],
        ref_nodes=ref[0],
        critic_ranks=critic[0] * critic[1],
        critic_nodes=critic[0],
        engines=engines[0],
        engine_gpus=engines[1],
        max_cpu_workers=4,
        device="cuda",
        **settings,
    )


def where(plan, job):
    return [(worker.node_id, worker.gpus) for worker in plan.of(job)]


def test_processes_on_a_machine_without_gpus():
    plan = plan_placement(request(policy=2, engines=2), LAPTOP)
    assert [(w.job, w.rank, w.device) for w in plan.workers] == [
        ("policy", 0, "cpu"),
        ("policy", 1, "cpu"),
        ("sampling", 0, "cpu"),
        ("sampling", 1, "cpu"),
    ]
    assert {w.node_id for w in plan.workers} == {"a"}
    assert len(plan.table().splitlines()) == 5
    assert plan.gpus == () and plan.policy_ranks_of_engines() == {0: (), 1: ()}


def test_a_reference_model_counts():
    assert [w.job for w in plan_placement(request(ref=1), LAPTOP).workers] == ["policy", "ref", "sampling"]


@pytest.mark.parametrize(("policy", "ref", "engines"), [(3, 0, 2), (2, 2, 1), (1, 0, 4)])
def test_more_workers_than_fit_are_refused_naming_the_settings(policy, ref, engines):
    with pytest.raises(PlacementError) as caught:
        plan_placement(request(policy, ref, engines), LAPTOP)
    for name in ("max_cpu_workers=4", "policy_num_gpus_per_node", "num_engines", str(policy + ref + engines)):
        assert name in str(caught.value)


def test_a_critic_has_processes_of_its_own():
    asked = dataclasses.replace(request(ref=1, most=5), critic_ranks=2)
    assert [w.job for w in plan_placement(asked, LAPTOP).workers] == ["policy", "critic", "critic", "ref", "sampling"]
    with pytest.raises(PlacementError, match=r"2 ranks of the critic.*critic_num_gpus_per_node"):
        plan_placement(dataclasses.replace(asked, max_cpu_workers=4), LAPTOP)


def test_processes_on_cpus_take_no_gpu_of_a_cluster_that_has_some():
    plan = plan_placement(request(), cluster(8))
    assert {worker.device for worker in plan.workers} == {"cpu"} and plan.gpus == ()


def test_the_plan_depends_on_nothing_but_its_arguments():
    assert plan_placement(request(2, 1, 1), LAPTOP) == plan_placement(request(2, 1, 1), LAPTOP)


def test_one_gpu_is_shared_by_all_jobs():
    asked = on_gpus(ref=(1, 1), critic=(1, 1), colocate_all=True)
    plan = plan_placement(asked, cluster(1))
    assert [(w.job, w.node_id, w.gpus) for w in plan.workers] == [
        (job, "n0", (0,)) for job in ("policy", "critic", "ref", "sampling")
    ]
    assert plan.gpus == (("n0", 0),) and len(plan.tenants(("n0", 0))) == 4
    assert plan.policy_ranks_of_engines() == {0: (0,)}
    with pytest.raises(PlacementError, match=r"asks for 4 GPUs .* the cluster has 1: .*colocate_all=true") as caught:
        plan_placement(dataclasses.replace(asked, colocate_all=False), cluster(1))
    assert len(str(caught.value).splitlines()) == 1


def test_a_node_of_eight_shared_by_policy_and_tensor_parallel_engines():
    plan = plan_placement(on_gpus((1, 8), ref=(1, 8), engines=(4, 2), colocate_all=True), cluster(8))
    assert where(plan, "policy") == where(plan, "ref") == [("n0", (rank,)) for rank in range(8)]
    assert where(plan, "sampling") == [("n0", (2 * rank, 2 * rank + 1)) for rank in range(4)]
    assert plan.policy_ranks_of_engines() == {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}
    assert plan.table().splitlines()[0].split() == ["job", "rank", "node", "devices"]
    assert plan.table().splitlines()[-1].split() == ["sampling", "3", "n0", "cuda", "6,7"]


def test_a_node_of_eight_split_between_training_and_sampling():
    plan = plan_placement(on_gpus((1, 4), ref=(1, 4), engines=(2, 2), colocate_policy_ref=True), cluster(8))
    assert where(plan, "policy") == where(plan, "ref") == [("n0", (rank,)) for rank in range(4)]
    assert where(plan, "sampling") == [("n0", (4, 5)), ("n0", (6, 7))]
    assert plan.policy_ranks_of_engines() == {0: (), 1: ()}
    with pytest.raises(
        PlacementError, match=r"asks for 12 GPUs \(1 x 4 for the policy, 1 x 4 for the reference model"
    ):
        plan_placement(on_gpus((1, 4), ref=(1, 4), engines=(2, 2)), cluster(8))


def test_four_nodes_of_eight():
    plan = plan_placement(on_gpus((2, 8), ref=(1, 8), engines=(2, 4)), cluster(8, 8, 8, 8))
    assert where(plan, "policy") == [(f"n{node}", (gpu,)) for node in (0, 1) for gpu in range(8)]
    assert {node for node, _ in where(plan, "ref")} == {"n2"}
    assert where(plan, "sampling") == [("n3", (0, 1, 2, 3)), ("n3", (4, 5, 6, 7))]
    together = plan_placement(on_gpus((4, 8), ref=(4, 8), engines=(4, 8), colocate_all=True), cluster(8, 8, 8, 8))
    assert where(together, "sampling") == [(f"n{node}", tuple(range(8))) for node in range(4)]
    assert len(together.gpus) == 32


def test_the_counts_of_nodes_are_kept():
    plan = plan_placement(on_gpus((2, 4), engines=(2, 4)), cluster(8, 8))
    assert [node for node, _ in where(plan, "policy")] == ["n0"] * 4 + ["n1"] * 4
    assert where(plan, "sampling") == [("n0", (4, 5, 6, 7)), ("n1", (4, 5, 6, 7))]
    with pytest.raises(PlacementError, match="the policy asks for 2 nodes with 4 GPUs each, and the cluster has 16"):
        plan_placement(on_gpus((2, 4), engines=(2, 4)), cluster(16))


def test_uneven_nodes_keep_room_for_the_larger_engine():
    plan = plan_placement(on_gpus((1, 4), engines=(1, 8)), cluster(8, 4))
    assert {node for node, _ in where(plan, "policy")} == {"n1"}
    assert where(plan, "sampling") == [("n0", tuple(range(8)))]


def test_an_engine_does_not_cross_nodes():
    with pytest.raises(PlacementError, match=r"2 engines of 4 GPUs each .* within a node.*9, 6 \+ 3 on 2 nodes"):
        plan_placement(on_gpus((1, 1), engines=(2, 4)), cluster(6, 3))
    with pytest.raises(PlacementError, match=r"an engine of 16 GPUs .* the largest of which has 8"):
        plan_placement(on_gpus((1, 1), engines=(1, 16)), cluster(8, 8, 8))
    with pytest.raises(PlacementError, match=r"an engine of 4 GPUs .* cannot stay within a node.*6 on each"):
        plan_placement(on_gpus((2, 6), engines=(3, 4), colocate_all=True), cluster(6, 6))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (on_gpus((1, 4), engines=(2, 1), colocate_all=True), "num_engines=2"),
        (on_gpus((1, 4), ref=(1, 2), engines=(4, 1), colocate_all=True), "ref_num_nodes"),
        (on_gpus((1, 4), critic=(2, 2), engines=(4, 1), colocate_all=True), "critic_num_nodes"),
        (on_gpus((1, 4), ref=(1, 2), engines=(1, 1), colocate_policy_ref=True), "colocate_policy_ref=false"),
    ],
)
def test_jobs_that_share_gpus_have_as_many(asked, said):
    with pytest.raises(PlacementError, match=said) as caught:
        plan_placement(asked, cluster(8, 8))
    assert len(str(caught.value).splitlines()) == 1


def test_a_cluster_without_gpus_cannot_give_any():
    with pytest.raises(PlacementError, match=r"asks for 2 GPUs .* and the cluster has 0"):
        plan_placement(on_gpus(), LAPTOP)


def _fits(asked, counts):
    """Whether any way of choosing nodes works: all of them are tried."""
    jobs = [(asked.policy_nodes, asked.policy_ranks), (asked.critic_nodes, asked.critic_ranks)]
    jobs = [(nodes, ranks // nodes) for nodes, ranks in jobs if ranks]
    choices = [list(itertools.combinations(range(len(counts)), nodes)) for nodes, _ in jobs]
    for chosen in itertools.product(*choices):
        left = list(counts)
        for (_, gpus), nodes in zip(jobs, chosen, strict=True):
            for node in nodes:
                left[node] -= gpus
        if min(left) >= 0 and sum(gpus // asked.engine_gpus for gpus in left) >= asked.engines:
            return True
    return False


def test_a_plan_is_found_exactly_where_there_is_one():
    drawn = random.Random(5)
    outcomes = set()
    for _ in range(400):
        counts = [drawn.randint(0, 8) for _ in range(drawn.randint(1, 4))]
        asked = on_gpus(
            (drawn.randint(1, 2), drawn.randint(1, 4)),
            critic=drawn.choice([None, (1, 2), (2, 1)]),
            engines=(drawn.randint(1, 3), drawn.choice([1, 2, 4])),
        )
        fits = _fits(asked, counts)
        outcomes.add(fits)
        if not fits:
            with pytest.raises(PlacementError) as caught:
                plan_placement(asked, cluster(*counts))
            assert len(str(caught.value).splitlines()) == 1
            continue
        plan = plan_placement(asked, cluster(*counts))
        taken = [place for worker in plan.workers for place in worker.places]
        assert (
            len(taken)
            == len(set(taken))
            == asked.policy_ranks + asked.critic_ranks + len(plan.of("sampling")) * asked.engine_gpus
        )
        assert all(gpu < counts[int(node[1:])] for node, gpu in taken)
        for job, nodes in (("policy", asked.policy_nodes), ("critic", asked.critic_nodes)):
            if plan.of(job):
                assert len({worker.node_id for worker in plan.of(job)}) == nodes
        assert len(plan.of("sampling")) == asked.engines
    assert outcomes == {True, False}
