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


def poisoned(monkeypatch, norms):
    """Optimizer steps report these norms, one after the other, and their own ones then."""
    from tests.arctic_rl.in_process_backend import InProcessBackend

    own = InProcessBackend.step

    async def reported(self, job="policy"):
        result = await own(self, job)
        return result | {"grad_norm": norms.pop(0) if norms else result["grad_norm"]}

    monkeypatch.setattr(InProcessBackend, "step", reported)


def test_a_run_goes_on_behind_a_skipped_step_and_says_so(monkeypatch, tmp_path, loop):
    from tests.arctic_rl.test_own_trainer import config, train

    poisoned(monkeypatch, [math.nan])
    done = train(config(tmp_path, "trainer.epochs=2"), loop)
    (first,) = [log for log in done.logs if log.get("policy/skipped_steps")]
    logs = [log for log in done.logs if "policy/final_loss" in log]
    assert [log["trainer/global_step"] for log in logs] == [1, 2] and logs[0] is first
    assert first["policy/skipped_steps"] == 1.0 and math.isnan(first["policy/grad_norm"])
    assert "policy/skipped_steps" not in logs[1] and logs[1]["policy/grad_norm"] > 0
    lines = [json.loads(line) for line in (tmp_path / "optimizer_steps.jsonl").read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == [0, 1, 2, 3]


def test_a_run_ends_where_nothing_but_skipped_steps_is_left(monkeypatch, tmp_path, loop):
    from tests.arctic_rl.test_own_trainer import config, train

    poisoned(monkeypatch, [math.inf] * 4)
    with pytest.raises(ArcticError, match="3 optimizer steps of policy in a row"):
        train(config(tmp_path, "trainer.epochs=2", "trainer.arctic_rl.max_skipped_steps=2"), loop)
