"""The soak's own judgement: slopes, growth, and samples of processes that leak on purpose."""

import json
import subprocess
import sys

import numpy as np
import psutil
import pytest

from benchmarks.soak import IDLE, ProcessSeries, Series, after, follow, growth, judge, role_of, slope

GROWING = """
import sys
held = []
for line in sys.stdin:
    held.append((bytearray(b"x" * 3 * 2**20), open(__file__ if "__file__" in globals() else "/dev/null")))
    print("step", flush=True)
"""


def test_slope_is_least_squares():
    draw = np.random.default_rng(0)
    steps = sorted(draw.choice(200, 50, replace=False).tolist())
    values = draw.normal(size=50).tolist()
    assert slope(steps, values) == pytest.approx(np.polyfit(steps, values, 1)[0])


def test_growth_is_that_of_what_is_always_there():
    assert growth([5, 9, 5, 8, 5, 7, 30, 5, 40]) == 0
    assert growth([5, 9, 5, 8, 6, 7, 30, 7, 40]) == 2
    assert growth([3.0]) == 0
    assert after(2, [1, 2, 3, 5], ["a", "b", "c", "d"]) == ([3, 5], ["c", "d"])


def test_a_process_that_leaks_memory_and_files_is_seen(capsys):
    process = subprocess.Popen(
        [sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    series = Series()
    try:
        for step in range(1, 13):
            print("go", file=process.stdin, flush=True)
            assert process.stdout.readline() == "step\n"
            series.look(step, psutil.Process(process.pid))
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()
    assert not judge(series, warm_up=3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    memory = next(line for line in lines if line["name"] == "soak/memory_mib_a_step")
    assert memory["ratio"] > 2.5 and memory["uss_slope"] > 2.5 and not memory["ok"]
    files = next(line for line in lines if line["name"] == "soak/growth_of_open_files")
    assert files["ratio"] == 6 and not files["ok"]
    assert next(line for line in lines if line["name"] == "soak/growth_of_processes")["ok"]
    assert judge(series, warm_up=3, bounded=False)
    reported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert reported[0]["ratio"] == memory["ratio"] and reported[0]["ok"], "a short run only reports"


def test_a_flat_run_passes_and_short_lived_processes_are_not_judged(capsys):
    steps = list(range(1, 31))
    flat = ProcessSeries("trainer", steps, [100.0 + step % 3 for step in steps], [90.0] * 30, [7] * 30)
    brief = ProcessSeries(IDLE, [21, 22, 23], [1.0, 50.0, 99.0], [1.0] * 3, [1] * 3)
    assert judge(Series({1: flat, 2: brief}, steps, {"processes": [2.0] * 30}), warm_up=20)
    assert "idle" not in capsys.readouterr().out


class Finished:
    """A run that has ended."""

    args = returncode = 3

    def poll(self):
        return 3

    def wait(self):
        return 3


def test_a_failing_run_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="status 3"):
        follow(Finished(), tmp_path / "none", lambda step: None)


def test_roles_are_stable_names():
    assert role_of(psutil.Process()) not in ("", IDLE)
