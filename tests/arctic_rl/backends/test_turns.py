"""Which job is awake when, recorded by jobs that refuse to be touched while they sleep."""

import asyncio

import pytest

from integrations.arctic_rl.backends.turns import Turns, sharing_jobs

JOBS = ("policy", "critic", "ref", "sampling")
WEIGHTS, OPTIMIZER, CACHE = "weights", "optimizer", "kv_cache"


class Machine:
    """GPUs on which parts of jobs are or are not."""

    def __init__(self, *, awake=False, keep=(), **shared):
        shared = sharing_jobs(jobs=JOBS, **({"colocate_all": True, "colocate_policy_ref": False} | shared))
        self.there = {job: set() for job in JOBS}
        if awake:
            whole = {"ref": {WEIGHTS}, "sampling": {WEIGHTS, CACHE}}
            self.there = {job: set(whole.get(job, {WEIGHTS, OPTIMIZER})) for job in JOBS}
        self.moves = []
        self.turns = Turns(shared, self._sleep, self._wake, awake=awake, keep_optimizer=frozenset(keep))
        for job in keep:
            self.there[job].add(OPTIMIZER)

    async def _sleep(self, job, parts):
        assert self.there[job] >= set(parts), "only what is awake is put to sleep"
        self.there[job] -= set(parts)
        self.moves.append(f"{job} sleeps: {' '.join(parts)}")

    async def _wake(self, job, parts):
        assert not self.there[job] & set(parts), "only what sleeps is woken"
        self.there[job] |= set(parts)
        self.moves.append(f"{job} wakes: {' '.join(parts)}")

    def awake(self):
        return {job: parts for job, parts in self.there.items() if parts}


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize(
    ("everything", "policy_ref", "expected"),
    [
        (True, True, set(JOBS)),
        (True, False, set(JOBS)),
        (False, True, {"policy", "ref"}),
        (False, False, set()),
    ],
)
def test_who_shares(everything, policy_ref, expected):
    assert sharing_jobs(jobs=JOBS, colocate_all=everything, colocate_policy_ref=policy_ref) == expected
    without = [job for job in JOBS if job != "ref"]
    alone = sharing_jobs(jobs=without, colocate_all=everything, colocate_policy_ref=policy_ref)
    assert alone == (set(without) if everything else set())


def test_a_step_of_training():
    async def step():
        machine = Machine()
        async with machine.turns.transfer():
            assert machine.awake() == {"policy": {WEIGHTS}, "sampling": {WEIGHTS}}
        assert machine.awake() == {"sampling": {WEIGHTS, CACHE}}
        for job in ("ref", "critic", "policy"):
            async with machine.turns.turn(job, [WEIGHTS]):
                assert machine.awake() == {job: {WEIGHTS}}
        for job in ("critic", "policy"):
            for _ in ("backward", "step"):
                async with machine.turns.turn(job):
                    assert machine.awake() == {job: {WEIGHTS, OPTIMIZER}}
        async with machine.turns.transfer():
            assert machine.awake() == {"policy": {WEIGHTS}, "sampling": {WEIGHTS}}
        assert machine.awake() == {"sampling": {WEIGHTS, CACHE}}
        return machine.moves

    assert run(step()) == [
        "policy wakes: weights",
        "sampling wakes: weights",
        "policy sleeps: weights",
        "sampling wakes: kv_cache",
        "sampling sleeps: weights kv_cache",
        "ref wakes: weights",
        "ref sleeps: weights",
        "critic wakes: weights",
        "critic sleeps: weights",
        "policy wakes: weights",
        "policy sleeps: weights",
        "critic wakes: weights optimizer",
        "critic sleeps: weights optimizer",
        "policy wakes: weights optimizer",
        "policy sleeps: optimizer",
        "sampling wakes: weights",
        "policy sleeps: weights",
        "sampling wakes: kv_cache",
    ]


def test_an_optimizer_that_stays_is_there_whoever_computes():
    async def step():
        machine = Machine(keep=["policy"])
        there = {"policy": {OPTIMIZER}}
        assert machine.turns.parts_to_sleep("policy") == [WEIGHTS]
        assert machine.turns.parts_to_sleep("critic") == [WEIGHTS, OPTIMIZER]
        async with machine.turns.transfer():
            assert machine.awake() == {"policy": {WEIGHTS, OPTIMIZER}, "sampling": {WEIGHTS}}
        assert machine.awake() == there | {"sampling": {WEIGHTS, CACHE}}
        async with machine.turns.turn("critic"):
            assert machine.awake() == there | {"critic": {WEIGHTS, OPTIMIZER}}
        async with machine.turns.turn("policy"):
            assert machine.awake() == {"policy": {WEIGHTS, OPTIMIZER}}
        async with machine.turns.cleared_for("sampling"):
            assert machine.awake() == {}, "a new engine needs all of the GPU at its start"
        assert machine.awake() == {"policy": {WEIGHTS, OPTIMIZER}}

    run(step())


def test_others_leave_in_the_middle_of_a_turn_and_come_back():
    async def step():
        machine, inside = Machine(), []

        async def start():
            async with machine.turns.cleared_for("sampling"):
                inside.append(1)
                assert "policy" not in machine.awake() and len(inside) == 1
                await asyncio.sleep(0)
                inside.pop()

        async with machine.turns.transfer():
            assert machine.turns.asleep("sampling") == {CACHE}
            await asyncio.gather(start(), start())
            assert machine.awake() == {"policy": {WEIGHTS}, "sampling": {WEIGHTS}}
            with pytest.raises(RuntimeError):
                async with machine.turns.cleared_for("sampling"):
                    raise RuntimeError
            assert machine.awake() == {"policy": {WEIGHTS}, "sampling": {WEIGHTS}}
        apart = Machine(colocate_all=False, awake=True)
        async with apart.turns.cleared_for("sampling"):
            assert apart.moves == [] and apart.turns.asleep("sampling") == set()

    run(step())


def test_jobs_that_share_nothing_are_left_alone():
    async def step():
        machine = Machine(colocate_all=False, awake=True)
        async with machine.turns.turn("policy"), machine.turns.turn("ref"), machine.turns.transfer():
            pass
        await machine.turns.make_room()
        return machine.moves

    assert run(step()) == []


def test_policy_and_reference_model_take_turns_beside_engines_that_stay():
    async def step():
        machine = Machine(colocate_all=False, colocate_policy_ref=True, awake=True)
        async with machine.turns.turn("ref", [WEIGHTS]):
            assert machine.there["policy"] == set()
        async with machine.turns.turn("critic"):
            assert machine.there["ref"] == {WEIGHTS}
        async with machine.turns.transfer():
            assert machine.there["policy"] == {WEIGHTS} and machine.there["ref"] == set()
        async with machine.turns.weights_of("policy", "ref"):
            assert machine.there["policy"] == machine.there["ref"] == {WEIGHTS}
        assert machine.there["sampling"] == {WEIGHTS, CACHE}
        assert machine.there["critic"] == {WEIGHTS, OPTIMIZER}
        return machine.moves

    assert run(step()) == [
        "policy sleeps: weights optimizer",
        "ref sleeps: weights",
        "policy wakes: weights",
        "ref wakes: weights",
    ]


def test_weights_may_be_asked_for_in_the_turn_of_the_engines():
    async def step():
        machine = Machine()
        await machine.turns.wake("sampling", [WEIGHTS, CACHE])
        async with machine.turns.beside("policy", [WEIGHTS]):
            assert machine.awake() == {"policy": {WEIGHTS}, "sampling": {WEIGHTS, CACHE}}
        assert machine.awake() == {"sampling": {WEIGHTS, CACHE}}
        async with machine.turns.transfer():
            async with machine.turns.beside("policy", [WEIGHTS]):
                pass
            assert machine.awake() == {"policy": {WEIGHTS}, "sampling": {WEIGHTS}}

    run(step())


def test_a_failed_transfer_leaves_what_is_known_true():
    async def step():
        machine = Machine()
        with pytest.raises(RuntimeError):
            async with machine.turns.transfer():
                raise RuntimeError
        async with machine.turns.turn("policy"):
            assert machine.awake() == {"policy": {WEIGHTS, OPTIMIZER}}
        async with machine.turns.transfer():
            pass
        assert machine.awake() == {"sampling": {WEIGHTS, CACHE}}

    run(step())


def test_calls_at_the_same_time_wait_for_their_turn():
    async def step():
        machine, order = Machine(), []

        async def call(job):
            async with machine.turns.turn(job, [WEIGHTS]):
                order.append(job)
                await asyncio.sleep(0)
                assert machine.awake() == {job: {WEIGHTS}}
                order.append(job)

        await asyncio.gather(*(call(job) for job in ("ref", "policy", "critic")))
        assert order == ["ref", "ref", "policy", "policy", "critic", "critic"]

    run(step())


def test_what_others_may_have_moved_is_said_again():
    async def step():
        moves = []

        async def move(job, parts):
            moves.append(job)

        shared = sharing_jobs(jobs=JOBS, colocate_all=True, colocate_policy_ref=False)
        turns = Turns(shared, move, move, awake=True, alone=False)
        for _ in range(2):
            async with turns.turn("policy"):
                pass
        return moves

    assert run(step()) == ["critic", "ref", "sampling", "policy"] * 2
