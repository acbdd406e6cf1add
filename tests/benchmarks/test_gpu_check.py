"""The checks for GPUs: skipped with a reason where there is none, and their code runs on CPUs at a small size."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_says_that_it_was_skipped(capsys):
    assert gpu_check.main([]) == 2
    assert lines(capsys) == [
        {"name": f"gpu_check/{part}", "skipped": "there is no GPU"}
        for part in ("attention", "sharing", "liger", "logprobs", "zero", "ipc")
    ]


def test_all_parts_together_end_within_eight_minutes():
    assert sum(gpu_check.LIMITS.values()) <= 470
    script = (gpu_check.__file__.split("benchmarks")[0]) + "scripts/gpu_check.sh"
    with open(script, encoding="utf-8") as file:
        assert "timeout 480" in file.read()


def test_a_missing_package_skips_its_part_alone(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name == "liger_kernel" else object())
    monkeypatch.setattr(gpu_check, "run_part", lambda part, device, *, small: (True, False))
    assert gpu_check.main(["--device", "cpu", "--parts", "ipc", "liger"]) == 2
    assert lines(capsys) == [{"name": "gpu_check/liger", "skipped": "there is no module liger_kernel"}]
    assert gpu_check.main(["--device", "cpu", "--parts", "ipc"]) == 0


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("import time; time.sleep(60)", "it took more than 3 s"),
        ("import os; os.abort()", "it ended with status -6"),
        ("raise SystemExit(1)", None),
    ],
)
def test_a_part_that_hangs_dies_or_is_out_of_bounds_ends_the_check_with_1(capsys, monkeypatch, code, last):
    printed = 'print(\'{"name": "first", "ok": true}\', flush=True); print("chatter", flush=True);'
    real = subprocess.Popen

    def start(command, **keywords):
        return real([sys.executable, "-c", printed + code], **keywords)

    monkeypatch.setattr(gpu_check, "LIMITS", {"ipc": 3 if "sleep" in code else 60})
    monkeypatch.setattr(
        gpu_check.subprocess,
        "Popen",
        lambda command, **keywords: real([sys.executable, "-c", printed + code], **keywords),
    )
    assert gpu_check.main(["--device", "cpu", "--parts", "ipc"]) == 1
    first, *rest = lines(capsys)
    assert first == {"name": "first", "ok": True}
    assert rest == ([] if last is None else [{"name": "gpu_check/ipc", "ok": False, "failed": last}])


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in gpu_check.LIMITS if part != "sharing"])
def test_every_part_runs_on_cpus_at_a_small_size(capsys, monkeypatch, part):
    if gpu_check.missing(part) is not None:
        pytest.skip(gpu_check.missing(part))
    monkeypatch.setattr(gpu_check, "LIMITS", dict.fromkeys(gpu_check.LIMITS, 300))
    status = gpu_check.main(["--device", "cpu", "--small", "--parts", part])
    found = lines(capsys)
    assert found and status in (0, 2), found
    assert all("skipped" in line or line["ok"] for line in found)
    assert any("ratio" in line and line["bound"] is not None for line in found)
