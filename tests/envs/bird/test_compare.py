import random
import sqlite3

import pytest

from envs.bird.compare import RowDigester, equal_results, row_digest


def fingerprint(rows):
    digester = RowDigester()
    for row in rows:
        digester.add(row)
    return digester.fingerprint()


def equal(left, right, mode="set", **kwargs):
    return equal_results(fingerprint(left), fingerprint(right), mode, **kwargs)


APPLE, PEAR = ("apple",), ("pear",)


def test_set_mode_ignores_duplicates_and_order():
    assert equal([APPLE, APPLE, PEAR], [APPLE, PEAR])
    assert equal([PEAR, APPLE], [APPLE, PEAR])
    assert not equal([APPLE], [APPLE, PEAR])
    assert equal([], [])
    assert not equal([], [(None,)])


def test_columns_are_ordered():
    assert not equal([(1, 2)], [(2, 1)])
    assert not equal([(1,)], [(1, None)])


def test_values_compare_as_in_python():
    assert equal([(1,)], [(1.0,)])
    assert equal([(0.0,)], [(-0.0,)])
    assert not equal([("1",)], [(1,)])
    assert not equal([(0.1 + 0.2,)], [(0.3,)])
    assert equal([(None, b"\x00\xff")], [(None, b"\x00\xff")])
    assert not equal([("a",)], [(b"a",)])
    assert not equal([(2**53 + 1,)], [(float(2**53),)])
    assert equal([(-(2**63),)], [(-(2.0**63),)])
    assert not equal([(2**63 - 1,)], [(2.0**63,)])
    assert not equal([(-1,)], [(-2,)])
    assert not equal([("\udce9l",)], [("l",)])
    assert not equal([("a', 'b",)], [("a", "b")])


def test_multiset_mode_counts_duplicates_but_not_order():
    assert not equal([APPLE, APPLE, PEAR], [APPLE, PEAR], "multiset")
    assert equal([PEAR, APPLE, APPLE], [APPLE, PEAR, APPLE], "multiset")
    assert not equal([APPLE, APPLE, PEAR], [APPLE, PEAR, PEAR], "multiset")


def test_ordered_mode_counts_order_only_where_the_gold_orders():
    assert not equal([PEAR, APPLE], [APPLE, PEAR], "ordered", gold_orders_rows=True)
    assert equal([APPLE, PEAR], [APPLE, PEAR], "ordered", gold_orders_rows=True)
    assert equal([PEAR, APPLE], [APPLE, PEAR], "ordered", gold_orders_rows=False)
    assert not equal([APPLE, APPLE], [APPLE], "ordered", gold_orders_rows=True)


def test_long_cells_are_told_apart():
    long = "x" * 200_000
    assert equal([(long, 1)], [(long, 1)])
    assert not equal([(long, 1)], [(long[:-1] + "y", 1)])
    assert not equal([(long,)], [(long.encode(),)])
    assert not equal([("\udce9" + long,)], [("é" + long,)])


def test_a_value_that_sqlite_cannot_give_is_an_error():
    with pytest.raises(TypeError, match="no such value"):
        row_digest(([1],))


def random_value(rng):
    return rng.choice(
        [
            None, 0, 1, -1, 2, 1.0, 0.0, -0.0, 0.5, 2.0, 1e300, -1e300, float("inf"), 2**53, 2**53 + 1, float(2**53),
            2**63 - 1, 2.0**63, "", "0", "1", "1.0", "None", "a", "a'b", 'a"b', "a\\b", "\n", "é", "\udce9", "\\udce9",
            b"", b"0", b"a", b"\xe9", "b'a'", rng.random(), rng.randint(-(2**63), 2**63 - 1),
        ]
    )  # fmt: skip


def test_fuzzed_results_agree_with_sets_of_tuples():
    rng = random.Random(3)
    seen = {True: 0, False: 0}
    for _ in range(4000):
        width = rng.choice([1, 1, 2, 3])
        pool = [tuple(random_value(rng) for _ in range(width)) for _ in range(rng.randint(1, 4))]
        left = rng.choices(pool, k=rng.randint(0, 6))
        right = rng.choices(pool, k=rng.randint(0, 6)) if rng.random() < 0.7 else rng.sample(left, len(left))
        if right and rng.random() < 0.3:
            row = list(right[0])
            index = rng.randrange(width)
            row[index] = float(row[index]) if type(row[index]) is int else random_value(rng)
            right[0] = tuple(row)
        expected = set(left) == set(right)
        seen[expected] += 1
        assert equal(left, right) is expected, (left, right)
        assert equal(left, right, "multiset") is (bag(left) == bag(right)), (left, right)
        assert equal(left, right, "ordered", gold_orders_rows=True) is (left == right), (left, right)
    assert min(seen.values()) > 500


def bag(rows):
    counts = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return counts


def test_fuzzed_queries_agree_with_bird_evaluation(shop_db):
    """The evaluator's own way: fetchall on both sides, set == set."""
    connection = sqlite3.connect(f"file:{shop_db}?mode=ro", uri=True)
    rng = random.Random(8)
    columns = ["id % 3", "name", "speed_limit % 2", "speed_limit % 2 * 1.0", "CAST(speed_limit % 2 AS TEXT)", "NULL"]
    agreed = 0
    for _ in range(300):
        left, right = (
            f"SELECT {rng.choice(['', 'DISTINCT '])}{', '.join(rng.sample(columns, 2))} FROM t "
            f"WHERE id < {rng.choice([5, 50, 60])} ORDER BY {rng.choice(['id', '-id', '1'])}"
            for _ in range(2)
        )
        rows = [connection.execute(query).fetchall() for query in (left, right)]
        expected = set(rows[0]) == set(rows[1])
        agreed += expected
        assert equal(*rows) is expected
    connection.close()
    assert agreed > 5
