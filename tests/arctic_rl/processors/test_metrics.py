"""Reduction of metrics over micro-batches and ranks."""

import numpy as np
import pytest
import torch

from integrations.arctic_rl.processors.metrics import LossShare, Maximum, MetricTable, Minimum, merge


def table(*micro_batches: tuple[dict, float]) -> dict:
    result = MetricTable()
    for metrics, num_tokens in micro_batches:
        result.add(metrics, num_tokens)
    return result.totals()


def test_every_kind():
    first = table(
        ({"n": 1.0, "p": (6.0, 2), "l": LossShare(1.0), "m": Maximum(3.0)}, 1), ({"n": torch.tensor(5.0)}, 3)
    )
    second = table(({"n": np.float32(2.0), "p": (0.0, 4), "l": LossShare(torch.ones(1)), "m": Maximum(-1)}, 4))
    merged = merge([first, second])
    assert merged == {"n": (1.0 + 15.0 + 8.0) / 8, "p": 1.0, "l": 1.0, "m": 3.0}
    assert all(type(value) is float for value in merged.values())


def test_no_weight_gives_zero_and_no_metrics_give_none():
    assert merge([table(({"n": 3.0, "p": (0.0, 0)}, 0))]) == {"n": 0.0, "p": 0.0}
    assert merge([table(), table()]) == {}
    assert merge([table(({"n": 3.0}, 2)), table()]) == {"n": 3.0}


@pytest.mark.parametrize("value", ["x", None, [1.0], torch.ones(2), (1.0, 2.0, 3.0), (1.0, "x")])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="metric 'name'"):
        table(({"name": value}, 1))


def test_a_kind_does_not_change():
    with pytest.raises(ValueError, match="'n' was a mean in one micro-batch and is a maximum in another"):
        table(({"n": 1.0}, 1), ({"n": Maximum(1.0)}, 1))
    with pytest.raises(ValueError, match="'n' is a mean on one rank and a maximum on another"):
        merge([table(({"n": 1.0}, 1)), table(({"n": Maximum(1.0)}, 1))])


def test_the_smallest_of_all_and_of_nothing():
    ranks = [table(({"m": Minimum(3.0)}, 1), ({"m": Minimum(torch.inf)}, 1)), table(({"m": Minimum(2.0)}, 1))]
    assert merge(ranks) == {"m": 2.0}
    assert merge([table(({"m": Minimum(torch.inf)}, 1))]) == {"m": 0.0}
