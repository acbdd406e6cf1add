"""The log-prob benchmark at tiny sizes: its lines, and that wrong values and too much memory show in them."""

import json

import pytest
import torch

from benchmarks import logprobs

TINY = [
    *("--tokens", "64", "--hidden", "8", "--wide-tokens", "16", "--wide-hidden", "32"),
    *("--vocab", "300", "--repeats", "1", "--peaks", "1.0"),
]


@pytest.fixture
def in_this_process(monkeypatch):
    """No process of its own for every figure: starting one costs seconds."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(logprobs, "in_a_process", logprobs.measure)
    yield
    torch.set_num_threads(threads)


def lines(capsys) -> tuple[int, list[dict]]:
    status = logprobs.main(TINY)
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines(capsys, in_this_process):
    status, printed = lines(capsys)
    assert status == (0 if all(line["ok"] for line in printed) else 1)
    assert [line["name"] for line in printed] == ["logprobs/time", "logprobs/agreement"] * 4 + ["logprobs/peak"]
    for time, agreement in zip(printed[:8:2], printed[1:8:2], strict=True):
        assert time["bound"] == (1.4 if time["logits_optimization"] == "memory" else None)
        assert 0 < time["ratio"] < 100
        assert agreement["ok"]
        assert 0 < max(agreement[name] for name in ("logprobs", "hidden_gradient", "head_gradient")) < 1e-5
    assert {(line["tokens"], line["hidden"]) for line in printed} == {(64, 8), (16, 32)}


def test_a_wrong_gradient_fails(capsys, monkeypatch, in_this_process):
    right = logprobs.logprobs_and_entropy_from_hidden

    def wrong(hidden, *args, **kwargs):
        return right(hidden * 1.0 + 1e-4 * hidden.detach(), *args, **kwargs)

    monkeypatch.setattr(logprobs, "logprobs_and_entropy_from_hidden", wrong)
    status, printed = lines(capsys)
    assert status == 1
    assert [line["ok"] for line in printed if line["name"] == "logprobs/agreement"] == [False, True] * 2


def test_a_process_of_its_own_measures_memory():
    """Full log-probs of 2,048 x 4,000 hold two float32 tensors of 31 MiB at least; tiles of 4 MiB none."""
    common = {"tokens": 2048, "vocab": 4000, "hidden": 8, "threads": 1, "repeats": 1}
    full, tiles = (
        logprobs.in_a_process(logprobs.Case(modes=(mode,), peak_gib=4 / 1024, **common)) for mode in ("none", "memory")
    )
    assert full["seconds"].keys() == {"none"}
    assert full["peak_gib"] * 1024 > 62
    assert tiles["peak_gib"] * 1024 < 1.5 * 4 + 2


def test_too_little_memory_is_said_before_it_is_used():
    with pytest.raises(SystemExit, match=r"need about .* GiB"):
        logprobs.main(["--tokens", "100000000"])
