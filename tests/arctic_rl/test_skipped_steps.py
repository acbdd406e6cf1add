"""Steps that are skipped because the gradient is not finite: logged, counted, and not for ever."""

import json
import math

import pytest

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.skipped_steps import SkippedSteps
from integrations.arctic_rl.step_log import StepLog


def step(norm):
    return {"lr": 1e-3, "grad_norm": norm}


def test_a_row_of_them_ends_the_run_and_a_step_between_two_does_not():
    skipped = SkippedSteps(2)
    for norm in (math.nan, math.inf, 1.0, math.nan, None, math.nan, -math.inf):
        skipped.note("policy", step(norm))
    skipped.note("critic", step(math.nan))
    with pytest.raises(ArcticError, match=r"3 optimizer steps of policy in a row .* nan: .*max_skipped_steps=2"):
        skipped.note("policy", step(math.nan))


def test_they_are_metrics_of_the_batch():
    skipped = SkippedSteps(10)
    for model, norm in (("policy", math.nan), ("policy", 1.0), ("policy", math.inf), ("critic", math.nan)):
        skipped.note(model, step(norm))
    assert skipped.take_metrics() == {"policy/skipped_steps": 2.0, "critic/skipped_steps": 1.0}
    skipped.note("policy", step(1.0))
    assert skipped.take_metrics() == {}


def test_none_is_allowed_where_none_is_to_be():
    with pytest.raises(ArcticError, match="1 optimizer steps of critic"):
        SkippedSteps(0).note("critic", step(math.inf))


def test_the_log_counts_steps_that_were_taken(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    for norm in (1.0, math.nan, 2.0):
        log.optimizer_step(step(norm))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == [1, 1, 2]
