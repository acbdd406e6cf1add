import pytest

from benchmarks.checkpoint_kills import measure


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_kills_in_the_middle_of_a_save_cost_nothing_but_that_save():
    counts = measure(kills=2, seed=3)
    assert {name: counts[name] for name in ("lost", "harmed", "left_over", "differences")} == dict.fromkeys(
        ("lost", "harmed", "left_over", "differences"), 0
    )
