"""Phases of a GPU against the turns that jobs really take there, with every part's bytes counted at every move."""

import asyncio
import itertools

import pytest

from integrations.arctic_rl.backends.turns import SAMPLING, Turns, sharing_jobs
from integrations.arctic_rl.doctor.phases import OPTIMIZER_PARTS, phases
from integrations.arctic_rl.server.offload import OPTIMIZER, WEIGHTS

TRAINED = {"weights": 10, "float32 weights": 20, "optimizer": 43, "gradients": 7, "activations": 300, "logits": 1}
SIZES = [
    {"policy": TRAINED, "critic": TRAINED | {"optimizer": 50}, "ref": {"weights": 80}},
    {"policy": TRAINED | {"activations": 0}, "critic": {"weights": 5, "activations": 1}, "ref": {"weights": 200}},
    {"policy": {"weights": 400, "optimizer": 3}, "ref": {"weights": 300}},
    {"policy": {"weights": 9, "activations": 8}},
]
ENGINE = 35


def most_held(jobs, sharing, on_gpu, keep, *, follows):
    """Bytes of training on a GPU at its fullest, and of engines' weights while they are sent, over a step of a run."""
    held, most = {}, 0

    def count(extra=0):
        nonlocal most
        if "kv_cache" not in held.get(SAMPLING, ()):
            sizes = [bytes_of(job, part) for job, parts in held.items() for part in parts]
            most = max(most, sum(sizes) + extra)

    def bytes_of(job, part):
        if job == SAMPLING:
            return ENGINE if part == WEIGHTS else 0
        names = ("weights",) if part == WEIGHTS else OPTIMIZER_PARTS
        return sum(on_gpu[job].get(name, 0) for name in names)

    async def sleep(job, parts):
        held[job] -= set(parts)

    async def wake(job, parts):
        held[job] |= set(parts)
        count()

    async def step():
        whole = {job: {WEIGHTS} if job == "ref" else {WEIGHTS, OPTIMIZER} for job in jobs if job != SAMPLING}
        for job, parts in whole.items():
            asleep = SAMPLING in sharing and job in sharing
            held[job] = parts & {OPTIMIZER} if asleep and job in keep else set() if asleep else parts
        held[SAMPLING] = set()
        turns = Turns(sharing, sleep, wake, awake=SAMPLING not in sharing, keep_optimizer=frozenset(keep))
        count()
        async with turns.transfer():
            count()
        for job in on_gpu:
            extra = on_gpu[job].get("activations", 0) + on_gpu[job].get("logits", 0)
            others = [on_gpu[other] for other in on_gpu if other != job and other not in sharing]
            beside = sum(parts.get(name, 0) for parts in others for name in ("activations", "logits"))
            async with turns.turn(job):
                count(extra + beside if job in sharing else 0)
        if follows:
            async with turns.weights_of("policy", "ref"):
                count()

    asyncio.run(step())
    return most


@pytest.mark.parametrize(
    ("number", "keep", "follows"), [*itertools.product(range(4), [(), ("policy",)], [False, True])]
)
@pytest.mark.parametrize("everything", [True, False])
def test_the_largest_phase_is_the_most_that_turns_bring_about(number, keep, follows, everything):
    on_gpu = SIZES[number]
    follows = follows and "ref" in on_gpu
    jobs = [*on_gpu, SAMPLING] if everything else [job for job in on_gpu if job != "critic"]
    here = {job: on_gpu[job] for job in jobs if job != SAMPLING}
    sharing = sharing_jobs(jobs=[*on_gpu, SAMPLING], colocate_all=everything, colocate_policy_ref=True)
    found = phases(jobs, sharing, here, engine_weights=ENGINE, optimizers_that_stay=keep, reference_follows=follows)
    if sharing:
        assert max(phase.held for phase in found) == most_held(jobs, sharing, here, keep, follows=follows)
    else:
        assert [phase.held for phase in found] == [sum(here["policy"].values())]
