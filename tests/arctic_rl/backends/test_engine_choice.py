"""Which engine a request goes to: tokens to come are balanced, what an engine has cached is used."""

import random

import pytest

from integrations.arctic_rl.backends.engine_choice import GROUP_LIMIT, EngineChoice

ENGINES = ("a", "b", "c")


@pytest.fixture
def choice():
    return EngineChoice(ENGINES)


def test_tokens_are_balanced_and_not_requests(choice):
    """One long request weighs as much as four short ones: the next short ones go elsewhere."""
    assert choice.assign(range(100), 900).engine == "a"
    engines = [choice.assign([n], 249).engine for n in range(8)]
    assert engines == ["b", "c"] * 4
    assert choice.load == {"a": 1000, "b": 1000, "c": 1000}


def test_a_group_shares_an_engine_and_pays_its_prompt_once(choice):
    assert {choice.assign([7] * 500, 16).engine for _ in range(8)} == {"a"}
    assert choice.load["a"] == 500 + 8 * 16
    assert {choice.assign([8] * 500, 16).engine for _ in range(8)} == {"b"}


def test_loads_return_to_zero_in_any_order(choice):
    rng = random.Random(0)
    under_way = []
    for step in range(500):
        if rng.random() < 0.05:
            choice.clear()
        if under_way and rng.random() < 0.45:
            choice.finish(under_way.pop(rng.randrange(len(under_way))))
        prompt = [rng.randrange(20)] * rng.randrange(1, 50)
        session = rng.choice([None, f"session {rng.randrange(10)}"])
        under_way.append(choice.assign(prompt, rng.randrange(1, 100), session))
        loads = dict.fromkeys(ENGINES, 0)
        for assignment in under_way:
            loads[assignment.engine] += assignment.tokens
        assert choice.load == loads, step
        assert not choice.idle
    for assignment in under_way:
        choice.finish(assignment)
    assert choice.load == dict.fromkeys(ENGINES, 0) and choice.idle


def test_groups_of_random_sizes_are_spread_evenly(choice):
    """Whole groups are placed, so that engines differ by no more than the largest group."""
    rng = random.Random(1)
    largest = 0
    for group in range(200):
        length, new, rollouts = rng.randrange(10, 400), rng.randrange(1, 300), rng.randrange(1, 16)
        engines = {choice.assign([group] * length, new).engine for _ in range(rollouts)}
        assert len(engines) == 1
        largest = max(largest, length + rollouts * new)
    loads = choice.load.values()
    assert max(loads) - min(loads) <= largest


def test_a_huge_group_takes_another_engine(choice):
    """A group above the limit is computed on one more engine each, and comes home again as its requests end."""
    group = [choice.assign([1, 2], 10) for _ in range(2 * GROUP_LIMIT + 5)]
    counts = [sum(a.engine == name for a in group) for name in ENGINES]
    assert counts == [GROUP_LIMIT, GROUP_LIMIT, 5]
    for assignment in group:
        if assignment.engine == "b":
            choice.finish(assignment)
    assert choice.assign([1, 2], 10).engine == "b", "has the prompt and nothing to do"


def test_a_session_stays_where_it_began(choice):
    first = {name: choice.assign([len(name)], 10, name).engine for name in ("x", "yy", "zzz")}
    assert len(set(first.values())) == 3
    for turn in range(1, 4):
        for name, engine in first.items():
            assert choice.assign([len(name)] * (1 + 20 * turn), 10, name).engine == engine


def test_a_turn_pays_what_is_new_in_its_prompt(choice):
    assert choice.assign([1] * 100, 10, "s").tokens == 110
    assert choice.assign([1] * 130, 10, "s").tokens == 40
    assert choice.assign([1] * 90, 10, "s").tokens == 10, "a turn that was cut repeats nothing new"


def test_a_cleared_cache_spreads_sessions_and_prompts_anew(choice):
    of_session, of_prompt = choice.assign([1], 50, "s"), choice.assign([2], 10)
    assert (of_session.engine, of_prompt.engine) == ("a", "b")
    choice.clear()
    assert choice.assign([1], 1, "s").engine == "c", "engine a still has the most to do"
    assert choice.assign([2], 50).engine == "c"
    choice.finish(of_session)
    choice.finish(of_prompt)
    assert choice.load == {"a": 0, "b": 0, "c": 53}


def test_an_engine_that_is_another_process_has_nothing_cached(choice):
    choice.assign([1], 50, "s")
    choice.assign([2], 10)
    choice.forget("a")
    assert choice.assign([1], 10, "s").engine == "c"
    assert choice.assign([2], 10).engine == "b"
