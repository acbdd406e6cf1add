"""The packing benchmark at tiny sizes: its lines, and that a worse planner or a slower step shows in them."""

import json
import math

import numpy as np
import pytest

from benchmarks import packing

TINY = [
    *("--rows", "40", "--seeds", "1", "--planned-rows", "24", "--repeats", "1"),
    *("--step-rows", "6", "--width", "40", "--budget", "80", "--hidden", "64", "--layers", "1", "--vocab", "96"),
]


def lines(capsys, *more: str) -> tuple[int, list[dict]]:
    status = packing.main([*TINY, *more])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines(capsys, tmp_path):
    plot = tmp_path / "packing.png"
    status, printed = lines(capsys, "--plot", str(plot))
    assert [line["name"] for line in printed] == ["packing/micro_batches", "packing/planning"] + ["packing/step"] * 3
    assert status == (0 if all(line["ok"] for line in printed) else 1)
    counts, planning, *steps = printed
    assert (counts["rows"], counts["bound"], counts["cases"]) == (40, 1.0, 6)
    assert counts["ok"] and counts["count_over_lower_bound"] >= 1
    assert planning["bound"] == 0.01
    assert planning["ratio"] == pytest.approx(planning["plan_ms"] / 1e3 / planning["step_s"], rel=0.5)
    assert [(step["logits_optimization"], step["padded_as"], step["bound"]) for step in steps] == [
        ("memory", "padded", 0.85),
        ("memory", "padded parts", None),
        ("compute", "padded", 0.85),
    ]
    for step in steps:
        assert step["speedup"] == pytest.approx(step["padded_s"] / step["packed_s"], rel=0.2)
        assert step["ratio"] == pytest.approx(step["speedup"] / step["token_ratio"], rel=0.01)
        assert 1 < step["work_ratio"] < step["token_ratio"]
    assert steps[2]["work_ratio"] > steps[0]["work_ratio"]
    assert plot.stat().st_size > 1000


def test_a_bad_plan_fails(capsys, monkeypatch):
    monkeypatch.setattr(packing, "plan_micro_batches", lambda lengths, budget: [[row] for row in range(len(lengths))])
    status, printed = lines(capsys)
    assert status == 1
    assert printed[0]["ratio"] > 1
    assert not printed[0]["ok"]


def test_a_step_that_computes_something_else_is_no_step(monkeypatch):
    update = packing.update
    monkeypatch.setattr(
        packing,
        "update",
        lambda engine, batch, mode, budget, pack: update(engine, batch, mode, budget, pack) + len(pack),
    )
    with pytest.raises(AssertionError, match="losses differ"):
        packing.main(TINY)


@pytest.mark.parametrize("sigma", [0.4, 1.2])
@pytest.mark.parametrize("rows", [32, 500])
def test_lengths(rows: int, sigma: float):
    lengths = packing.log_normal_lengths(rows, 1024, 0.3, sigma, seed=3)
    assert lengths.max() == 1024
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(0.3 * 1024, rel=0.08)
    assert np.log(np.sort(lengths)[: rows // 2]).std() > 0.1 * sigma


def test_work_counts_multiplications():
    model = packing.small_model(64, 1, 96, 40)
    per_token = 3 * sum(p.numel() for p in model.model.layers.parameters())
    lengths = np.array([3, 5])
    attention = 3.5 * 64 * 2 * (9 + 25) / 2
    total = packing.work(model, lengths, in_layers=8, in_head=6)
    assert math.isclose(total, 8 * per_token + attention + 4 * 96 * 64 * 6)
