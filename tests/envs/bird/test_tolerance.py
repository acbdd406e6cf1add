import itertools
import math
import random

import pytest

from envs.bird.compare import RowDigester, equal_results
from envs.bird.tolerance import ComparisonTimeout, Tolerance, equal_within


def cells_equal(left, right, tolerance):
    if left == right:
        return True
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return False
    if isinstance(left, int) and isinstance(right, int):
        return False
    if math.isinf(left) or math.isinf(right):
        return False
    return abs(left - right) <= max(tolerance.rtol * max(abs(left), abs(right)), tolerance.atol)


def rows_equal(left, right, tolerance):
    return len(left) == len(right) and all(cells_equal(a, b, tolerance) for a, b in zip(left, right, strict=True))


def oracle(predicted, gold, tolerance, mode, gold_orders_rows):
    """The definition, by trying every pairing."""
    if mode == "set":
        return all(any(rows_equal(a, b, tolerance) for b in gold) for a in predicted) and all(
            any(rows_equal(a, b, tolerance) for a in predicted) for b in gold
        )
    if len(predicted) != len(gold):
        return False
    orders = [gold] if mode == "ordered" and gold_orders_rows else itertools.permutations(gold)
    return any(all(rows_equal(a, b, tolerance) for a, b in zip(predicted, order, strict=True)) for order in orders)


def near(value, rng, tolerance):
    if isinstance(value, int | float) and rng.random() < 0.8:
        reach = max(abs(value) * tolerance.rtol, tolerance.atol)
        moved = value + rng.choice([-1.5, -0.9, -0.5, 0.0, 0.5, 0.9, 1.5]) * reach
        return int(moved) if rng.random() < 0.1 and math.isfinite(moved) else moved
    return value


@pytest.mark.parametrize("tolerance", [Tolerance(atol=0.1), Tolerance(rtol=0.05), Tolerance(0.3, 0.2)], ids=str)
@pytest.mark.parametrize("mode", ["set", "multiset", "ordered"])
def test_fuzzed_results_agree_with_the_definition(tolerance, mode):
    rng = random.Random(5)
    values = [None, "a", b"a", 0, 1, -1, 2, 0.0, 0.1, 0.15, 0.2, 1.0, 1.05, -2.5, 1e300, float("inf"), 10**17]
    seen = {True: 0, False: 0}
    for _ in range(1200):
        width = rng.choice([1, 1, 2, 3])
        gold = [tuple(rng.choice(values) for _ in range(width)) for _ in range(rng.randint(0, 5))]
        predicted = [tuple(near(value, rng, tolerance) for value in row) for row in gold]
        if mode == "set" and predicted and rng.random() < 0.5:
            predicted.append(rng.choice(predicted))
        if rng.random() < 0.5:
            rng.shuffle(predicted)
        ordered = rng.random() < 0.7
        expected = oracle(predicted, gold, tolerance, mode, ordered)
        seen[expected] += 1
        assert equal_within(predicted, gold, tolerance, mode, gold_orders_rows=ordered) is expected, (predicted, gold)
        assert equal_within(gold, predicted, tolerance, mode, gold_orders_rows=ordered) is expected, (predicted, gold)
    assert min(seen.values()) > 150


def test_without_a_tolerance_it_agrees_with_the_digests():
    rng = random.Random(7)
    values = [None, "1", 1, 1.0, 2, 0.5, b"1", 2**53, 2**53 + 1, float(2**53)]

    def fingerprint(rows):
        digester = RowDigester()
        for row in rows:
            digester.add(row)
        return digester.fingerprint()

    agreed = 0
    for _ in range(2000):
        left, right = ([(rng.choice(values),) for _ in range(rng.randint(0, 3))] for _ in range(2))
        for mode in ("set", "multiset", "ordered"):
            expected = equal_results(fingerprint(left), fingerprint(right), mode, gold_orders_rows=True)
            agreed += expected
            assert equal_within(left, right, Tolerance(), mode, gold_orders_rows=True) is expected, (left, right)
    assert agreed > 300


def test_rows_near_a_rounding_step_do_not_fall_apart():
    tolerance = Tolerance(atol=1e-4)
    for step in (0.5, 0.1, 2.5, 1e6 + 0.5):
        below, above = step - 1e-5, step + 1e-5
        assert equal_within([(below,)], [(above,)], tolerance)
        assert not equal_within([(below,)], [(above + 1e-3,)], tolerance)


def test_a_pairing_is_found_where_the_nearest_row_is_taken():
    """0.0 and 0.1 must take 0.05 and 0.15: taking the first equal row leaves one over."""
    tolerance = Tolerance(atol=0.06)
    assert equal_within([(0.1,), (0.0,)], [(0.05,), (0.15,)], tolerance, "multiset")
    assert not equal_within([(0.1,), (0.1,)], [(0.05,), (0.0,)], tolerance, "multiset")


def test_thousands_of_rows_are_quick_and_endless_comparisons_stop():
    rng = random.Random(2)
    gold = [(rng.random() * 100, f"n{i % 7}", i) for i in range(5000)]
    predicted = [(x + 1e-9, name, i) for x, name, i in gold]
    rng.shuffle(predicted)
    for mode in ("set", "multiset"):
        assert equal_within(predicted, gold, Tolerance(atol=1e-6), mode, timeout_s=60)
    dense = [(rng.random(), rng.random()) for _ in range(5000)]
    with pytest.raises(ComparisonTimeout):
        equal_within(dense, [(x, 1 - y) for x, y in dense], Tolerance(atol=0.5), "multiset", timeout_s=0.2)
