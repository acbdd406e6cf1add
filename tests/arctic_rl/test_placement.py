import dataclasses

import pytest

from integrations.arctic_rl.errors import PlacementError
from integrations.arctic_rl.placement import ClusterDescription, Node, PlacementRequest, plan_placement

LAPTOP = ClusterDescription((Node("a", 2, 0),))


def request(policy=1, ref=0, engines=1, most=4):
    return PlacementRequest(policy_ranks=policy, ref_ranks=ref, engines=engines, max_cpu_workers=most)


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


def test_a_cluster_with_gpus_is_refused_until_it_is_served():
    with pytest.raises(PlacementError, match="CUDA_VISIBLE_DEVICES"):
        plan_placement(request(), ClusterDescription((Node("a", 8, 1),)))


def test_the_plan_depends_on_nothing_but_its_arguments():
    assert plan_placement(request(2, 1, 1), LAPTOP) == plan_placement(request(2, 1, 1), LAPTOP)
