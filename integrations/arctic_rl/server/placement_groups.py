"""The GPUs of a placement plan, reserved in Ray: a placement group with a bundle a GPU, on the node of the plan.

Workers that share a GPU are put into its bundle with an equal fraction of it each. An engine on several GPUs is put
into the bundle of its first, and is told all of its devices by name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PlacementError
from ..placement import PlacementPlan, WorkerPlacement

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Place = tuple[str, int]
"""(Ray id of a node, number of a GPU of the plan there)."""

NODE_LABEL = "ray.io/node-id"
"""Label that Ray itself gives each node."""
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reservation:
    """GPUs that are held for a plan until ``release``."""

    plan: PlacementPlan
    group: PlacementGroup
    bundles: dict[Place, int]
    """Number of the bundle of each GPU."""
    devices: dict[Place, str]
    """What Ray calls each GPU, as ``CUDA_VISIBLE_DEVICES`` would."""

    def actor_options(self, worker: WorkerPlacement) -> dict[str, Any]:
        """Options of the worker's Ray actor: where it runs, and its share of its (first) GPU."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles[worker.places[0]],
            placement_group_capture_child_tasks=False,
        )
        return {"num_gpus": gpu_share(self.plan, worker.places[0]), "scheduling_strategy": strategy}

    def visible_devices(self, worker: WorkerPlacement) -> str:
        """The worker's GPUs, as ``CUDA_VISIBLE_DEVICES`` names them."""
        return ",".join(self.devices[place] for place in worker.places)


def bundle_places(plan: PlacementPlan) -> list[Place]:
    """The GPU of each bundle: those of a node together, in its order."""
    return sorted(plan.gpus, key=lambda place: ([node for node, _ in plan.gpus].index(place[0]), place[1]))


def gpu_share(plan: PlacementPlan, place: Place) -> float:
    """What each worker on a GPU asks Ray for: an equal fraction, in Ray's steps of 0.0001."""
    return int(10_000 / len(plan.tenants(place))) / 10_000


def reserve(plan: PlacementPlan, timeout_s: float) -> Reservation:
    """Take a plan's GPUs, all at once, and learn which devices they are.

    Args:
        plan: has workers on GPUs; its nodes are named by their Ray ids.
        timeout_s: seconds to wait for GPUs that others hold.

    Raises:
        PlacementError: the cluster did not give them; nothing is held then.
    """
    from ray.util.placement_group import placement_group

    places = bundle_places(plan)
    group = placement_group(
        [{"GPU": 1}] * len(places),
        strategy="PACK",
        bundle_label_selector=[{NODE_LABEL: node} for node, _ in places],
    )
    try:
        if not group.wait(timeout_seconds=timeout_s):
            raise PlacementError(_not_given(places, timeout_s))
        bundles = {place: number for number, place in enumerate(places)}
        return Reservation(plan, group, bundles, _devices(group, places))
    except BaseException:
        remove(group)
        raise


def release(reservation: Reservation) -> None:
    """Give the GPUs back; workers that still run on them are killed by Ray."""
    remove(reservation.group)


def remove(group: PlacementGroup) -> None:
    """Remove a placement group, if Ray is still there."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():
        remove_placement_group(group)


def _devices(group: PlacementGroup, places: list[Place]) -> dict[Place, str]:
    """Which device each bundle holds, asked for inside of it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ask = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_own_device)
    asked = {
        place: ask.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            )
        ).remote()
        for number, place in enumerate(places)
    }
    answers = _answers(asked, _PROBE_TIMEOUT_S)
    for (node, gpu), (found, device) in answers.items():
        if found != node:
            raise PlacementError(f"Ray put GPU {gpu} of node {node} on node {found} (device {device})")
    return {place: device for place, (_, device) in answers.items()}


def _answers(asked: dict[Place, Any], timeout_s: float) -> dict[Place, tuple[str, str]]:
    """What the processes on GPUs answered.

    Raises:
        PlacementError: a process did not start in time, or failed.
    """
    import ray

    _, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    if late:
        where = ", ".join(_named([place for place, ref in asked.items() if ref in late]))
        raise PlacementError(
            f"no Ray worker process was up on {where} within {timeout_s:g} s of its reservation, to tell which device "
            "it has: on that node look at raylet.out and the newest worker-*.err in /tmp/ray/session_latest/logs (a "
            "full disk or memory, another Python or Ray, a GPU that its driver does not see)"
        )
    answers = {}
    for place, ref in asked.items():
        try:
            answers[place] = ray.get(ref)
        except ray.exceptions.RayError as error:
            first = next(iter(str(getattr(error, "cause", None) or error).strip().splitlines()), "")
            raise PlacementError(
                f"the Ray worker process on {_named([place])[0]} could not tell which device it has "
                f"({type(error).__name__}: {first}): on that node look at nvidia-smi and the newest worker-*.err in "
                "/tmp/ray/session_latest/logs"
            ) from error
    return answers


def _named(places: list[Place]) -> list[str]:
    addresses = _addresses()
    return [f"GPU {gpu} of node {addresses.get(node, node)}" for node, gpu in places]


def _addresses() -> dict[str, str]:
    """Addresses of nodes, by their Ray ids."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _own_device() -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def _not_given(places: list[Place], timeout_s: float) -> str:
    import ray

    names = _addresses()
    wanted = Counter(names.get(node, node) for node, _ in places)
    where = ", ".join(f"{count} on {node}" for node, count in wanted.items())
    free, total = (resources.get("GPU", 0) for resources in (ray.available_resources(), ray.cluster_resources()))
    return (
        f"the cluster did not give {len(places)} GPUs ({where}) within trainer.arctic_rl.gpu_timeout_s={timeout_s:g}: "
        f"{free:g} of its {total:g} GPUs are free, another job holds the rest; wait for it or stop it, ask for fewer "
        "(trainer.placement, generator.inference_engine.num_engines), or raise the time limit"
    )
