"""What is on one GPU at once: jobs that share it take turns (``backends.turns``), and the largest turn counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..backends.turns import SAMPLING

WEIGHTS_PARTS = ("weights",)
OPTIMIZER_PARTS = (
    "float32 weights",
    "optimizer",
    "gradients",
    "gradients before they are float32",
    "gradients of the shard",
    "gradients being reduced",
)
"""Names of ``memory.training_memory`` for what ``server.offload`` calls ``optimizer``; what is in neither is there
while a micro-batch runs alone."""
STATES = (*WEIGHTS_PARTS, *OPTIMIZER_PARTS)

Parts = Mapping[str, int]


@dataclass(frozen=True)
class Phase:
    """A time at which a GPU holds more than before or after."""

    name: str
    held: int
    """Bytes, without the processes' own."""


def phases(
    jobs: Collection[str],
    shared: Collection[str],
    on_gpu: Mapping[str, Parts],
    *,
    engine_weights: int,
    optimizers_that_stay: Collection[str],
    reference_follows: bool,
) -> list[Phase]:
    """The phases of training on a GPU; engines while they sample are another matter (``gpu_needs``).

    Args:
        jobs: that have a rank on it.
        shared: jobs of the run that take turns.
        on_gpu: bytes of a rank of each training job that are not offloaded, by what they are for.
        engine_weights: bytes of an engine's weights on one of its GPUs.
        optimizers_that_stay: jobs whose optimizer does not leave.
        reference_follows: whether the reference model becomes a copy of the policy now and then.
    """
    training = [job for job in jobs if job in on_gpu]
    turning = [job for job in training if job in shared]
    whole = {job: sum(on_gpu[job].values()) for job in training}
    weights = {job: held(on_gpu[job], WEIGHTS_PARTS) for job in training}
    stays = {job: stays_of(job, on_gpu[job], shared, optimizers_that_stay) for job in training}
    always = sum(stays.values())
    found = []
    for job in turning:
        name = "log-probs of the reference model" if job == "ref" else f"an update of the {job}"
        found.append(Phase(name, always - stays[job] + whole[job]))
    if {"policy", "ref"} <= set(turning) and reference_follows:
        found.append(Phase("the reference model's update", always + weights["policy"] + weights["ref"]))
    if "policy" in turning and SAMPLING in jobs and SAMPLING in shared:
        found.append(Phase("a weight sync", always + weights["policy"] + engine_weights))
    if turning and SAMPLING not in shared:
        # They are set up at the same time.
        states = sum(held(on_gpu[job], STATES) for job in turning)
        found.append(Phase("the start", always - sum(stays[job] for job in turning) + states))
    return found or [Phase("all at once", always)]


def stays_of(job: str, parts: Parts, shared: Collection[str], optimizers_that_stay: Collection[str]) -> int:
    """Bytes of a rank that are on its GPU whoever computes."""
    if job not in shared:
        return sum(parts.values())
    return held(parts, OPTIMIZER_PARTS) if job in optimizers_that_stay else 0


def leaves_of(job: str, shared: Collection[str], optimizers_that_stay: Collection[str]) -> tuple[str, ...]:
    """Names of the parts of a rank that go to the host while others compute."""
    if job not in shared:
        return ()
    return WEIGHTS_PARTS if job in optimizers_that_stay else STATES


def held(parts: Parts, names: Collection[str]) -> int:
    """Bytes of some of the parts."""
    return sum(value for name, value in parts.items() if name in names)
