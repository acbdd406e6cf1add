"""Which way the weights go, from the placement alone."""

import pytest

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.placement import ClusterDescription, Node, PlacementRequest, plan_placement
from integrations.arctic_rl.server.weight_sync.choice import STRATEGIES, SyncPlan, plan_sync


def plan(nodes, gpus, *, policy, engines, engine_gpus=1, policy_nodes=1, colocate_all=False, device="cuda"):
    cluster = ClusterDescription(tuple(Node(f"n{i}", 8, gpus) for i in range(nodes)))
    request = PlacementRequest(
        policy_ranks=policy,
        policy_nodes=policy_nodes,
        ref_ranks=0,
        engines=engines,
        engine_gpus=engine_gpus,
        max_cpu_workers=64,
        colocate_all=colocate_all,
        device=device,
    )
    return plan_placement(request, cluster)


CPU = plan(1, 0, policy=2, engines=2, device="cpu")
COLOCATED = plan(1, 8, policy=8, engines=4, engine_gpus=2, colocate_all=True)
SEPARATE = plan(1, 8, policy=4, engines=2, engine_gpus=2)
COLOCATED_NODES = plan(4, 8, policy=32, policy_nodes=4, engines=16, engine_gpus=2, colocate_all=True)
SEPARATE_NODES = plan(4, 8, policy=16, policy_nodes=2, engines=8, engine_gpus=2)

CASES = [
    (CPU, "n0", "shared_memory", True, ["shared_memory", "low_memory"]),
    (CPU, "head", "low_memory", False, ["low_memory"]),
    (COLOCATED, "n0", "ipc", True, ["shared_memory", "low_memory", "ipc"]),
    (SEPARATE, "n0", "nccl", True, ["shared_memory", "low_memory", "nccl"]),
    (COLOCATED_NODES, "n0", "ipc", False, ["low_memory", "ipc"]),
    (SEPARATE_NODES, "n0", "nccl", False, ["low_memory", "nccl"]),
    (SEPARATE_NODES, "head", "nccl", False, ["low_memory", "nccl"]),
]


@pytest.mark.parametrize(("placed", "here", "chosen", "one_node", "possible"), CASES)
def test_the_placement_chooses_and_a_setting_forces(placed, here, chosen, one_node, possible):
    assert plan_sync(placed, None, here=here) == SyncPlan(chosen, one_node)
    for name in STRATEGIES:
        if name in possible:
            assert plan_sync(placed, name, here=here) == SyncPlan(name, one_node)
            continue
        with pytest.raises(UnsupportedError) as refused:
            plan_sync(placed, name, here=here)
        message = str(refused.value)
        assert message.startswith(f"trainer.arctic_rl.weight_sync={name!r}: ")
        assert message.endswith(f"; write {' or '.join(possible)}, or leave it out")


@pytest.mark.parametrize(
    ("placed", "here", "wanted", "words"),
    [
        (
            CPU,
            "head",
            "shared_memory",
            "policy-0, sampling-0, sampling-1 would not be on the node of the server's own",
        ),
        (CPU, "n0", "nccl", "must be on GPUs"),
        (COLOCATED, "n0", "nccl", "NCCL takes a GPU once"),
        (SEPARATE, "n0", "ipc", "4 of the engines' 4 GPUs have no training rank"),
    ],
)
def test_a_refusal_names_the_reason(placed, here, wanted, words):
    with pytest.raises(UnsupportedError, match=words):
        plan_sync(placed, wanted, here=here)


def test_vllm_is_built_with_the_transfer_engine_that_is_used():
    assert [SyncPlan(name, True).vllm_backend for name in STRATEGIES] == [None, None, "nccl", "ipc"]
