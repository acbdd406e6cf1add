"""The benchmark of prompt sharing runs, and counts what it says it counts."""

import json

import pytest
import torch

from benchmarks import zorro, zorro_gpu, zorro_run
from integrations.arctic_rl.zorro.groups import RowGroup


def test_small_run_prints_a_line_a_figure(capsys):
    assert zorro.main(["--small", "--repeats", "1", "--parts", "speed"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["zorro/speedup_over_flop_ratio", "zorro/speed_where_little_is_shared"]
    assert all(line["ratio"] > 0 and line["bound"] is None for line in lines)


def test_without_arguments_every_part_is_measured():
    assert zorro.parse([]).parts == ["speed", "memory", "curve", "qwen"]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(zorro, ["--repeats", "0"]), (zorro_gpu, ["--repeats", "0"]), (zorro_run, ["--steps", "1"])],
)
def test_numbers_that_leave_nothing_to_measure_are_refused(module, arguments: list[str], capsys):
    with pytest.raises(SystemExit):
        module.main(arguments)
    assert "must be at least" in capsys.readouterr().err


def test_counts_of_a_case():
    case = zorro.Case(prompt=100, response=10, rollouts=4, prompts=2)
    assert case.groups == [RowGroup((0, 1, 2, 3), 100), RowGroup((4, 5, 6, 7), 100)]
    assert case.shared_tokens == 280
    assert case.token_ratio == pytest.approx(880 / 280)
    alone = zorro.Case(prompt=100, response=10, rollouts=1, prompts=3)
    assert (alone.shared_tokens, alone.token_ratio) == (330, 1.0)


def test_operations_are_counted_for_both_ways():
    with torch.device("meta"):
        model = zorro.small_model(zorro.SMALL)
    hidden, heads, layers = 512, 8 * 64, 4
    weights = hidden * (2 * heads + heads) + 3 * hidden * 1536
    per_token, per_pair, head = 2 * weights * layers, 4 * heads * layers, 2 * hidden * 8192

    def pairs(length: int) -> float:
        return length * (length + 1) / 2

    apart = 8 * (1088 * per_token + pairs(1088) * per_pair + 64 * head)
    together = 1024 * per_token + pairs(1024) * per_pair
    together += 8 * (64 * per_token + (64 * 1024 + pairs(64)) * per_pair + 64 * head)
    assert zorro.Case(1024, 64, 8).flop_ratio(model) == pytest.approx(apart / together)
    assert zorro.Case(512, 128, 1, prompts=8).flop_ratio(model) == pytest.approx(1.0)


def test_the_script_for_gpus_runs_on_a_tiny_model(capsys):
    assert zorro_gpu.main(["--device", "cpu", "--shapes", "tiny", "--repeats", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["zorro_gpu/back_end"] * 2 + ["zorro_gpu/speedup"]
    assert all(line["ratio"] < 1e-2 for line in lines[:2])
    assert lines[2]["shared_utilisation"] is None
    if not torch.cuda.is_available():
        assert zorro_gpu.main([]) == 2


@pytest.mark.parametrize(("shape", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("4B", 4.02), ("8B", 8.19)])
def test_shapes_have_the_published_number_of_parameters(shape: str, billions: float):
    model = zorro_gpu.model_of(shape, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=0.01)
