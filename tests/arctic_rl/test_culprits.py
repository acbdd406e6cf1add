import random

import pytest

from integrations.arctic_rl.culprits import culprits


@pytest.mark.parametrize("seed", range(20))
def test_the_arguments_that_fail_together_are_found_in_their_order(seed):
    chance = random.Random(seed)
    arguments = [f"a{number}" for number in range(chance.randint(1, 60))]
    guilty = sorted(chance.sample(range(len(arguments)), chance.randint(1, min(4, len(arguments)))))
    together = {arguments[number] for number in guilty}
    calls = []

    def fails(part):
        calls.append(part)
        return together <= set(part)

    assert culprits(arguments, fails) == [arguments[number] for number in guilty]
    assert len(calls) <= (len(guilty) + 1) * 8


def test_one_of_two_that_fail_alike_is_enough():
    assert culprits(["a", "b", "c"], lambda part: "a" in part or "c" in part) == ["a"]


def test_nothing_is_to_blame_for_what_fails_by_itself():
    assert culprits(["a", "b"], lambda part: True) == []


def test_what_others_mend_still_gives_a_part_that_fails():
    def fails(part):
        return "bad" in part and ("mend" not in part or "break" in part)

    found = culprits(["bad", "x", "mend", "break"], fails)
    assert fails(found)
