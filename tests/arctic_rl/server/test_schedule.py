"""Learning rates that optimizer steps used, as logged, against formulas written out here, for 50 steps."""

import asyncio
import dataclasses
import json
import math

import pytest
import torch

from integrations.arctic_rl.checks import setting_problems
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.server.schedule import SCHEDULES, build_scheduler, schedule_problems, warmup_steps
from integrations.arctic_rl.server.specs import OptimizerSpec
from integrations.arctic_rl.server.training_worker import TrainingWorker
from integrations.arctic_rl.server_config import optimizer_spec, server_config
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.step_log import StepLog

PEAK, HORIZON = 3e-4, 50
SPEC = OptimizerSpec(
    lr=PEAK, betas=(0.9, 0.999), weight_decay=0.01, max_grad_norm=1.0, scheduler="constant", num_warmup_steps=0
)


def up(step, warmup):
    """Linear warm-up from 0."""
    return step / warmup


def after(step, warmup):
    """Share of the steps after the warm-up."""
    return (step - warmup) / (HORIZON - warmup)


def decaying(factor):
    """A schedule that rises linearly and then is ``factor`` of the share of the steps after the warm-up."""
    return lambda step, warmup, end: up(step, warmup) if step < warmup else factor(after(step, warmup), end)


def half_cosine(share):
    return (1 + math.cos(math.pi * share)) / 2


def to_an_end(value, end):
    return end + (1 - end) * value


def inverse_sqrt(step, warmup, end):
    scale = warmup or 10_000
    return up(step, warmup) if step < warmup else math.sqrt(scale / (step - warmup + scale))


def cosine_a_step_ahead(step, warmup, end):
    if step < warmup:
        return (step + 1) / warmup
    return to_an_end(half_cosine((step + 1 - warmup) / (HORIZON - warmup)), end)


FORMULAS = {
    "constant": lambda step, warmup, end: 1.0,
    "constant_with_warmup": decaying(lambda share, end: 1.0),
    "linear": decaying(lambda share, end: 1 - share),
    "cosine": decaying(lambda share, end: half_cosine(share)),
    "cosine_with_restarts": decaying(lambda share, end: half_cosine(share)),
    "cosine_with_min_lr": decaying(lambda share, end: to_an_end(half_cosine(share), end)),
    "cosine_warmup_with_min_lr": cosine_a_step_ahead,
    "polynomial": decaying(lambda share, end: to_an_end(1 - share, 1e-7 / PEAK if end is None else end)),
    "inverse_sqrt": inverse_sqrt,
}
"""Share of the peak rate, as a function of the steps taken before, the warm-up and ``min_lr_ratio``."""


class PlainEngine:
    """What a training worker calls of a DeepSpeed engine, with PyTorch's own optimizer in it."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def step(self):
        self._optimizer.step()

    def get_global_grad_norm(self):
        return torch.tensor(1.0)


def worker(spec):
    """A training worker around one weight whose gradient is always 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    result = object.__new__(TrainingWorker)
    result._asleep, result._snapshots = set(), None
    result._optimizer = torch.optim.SGD([weight], lr=spec.lr)
    result._engine = PlainEngine(result._optimizer)
    result._scheduler = build_scheduler(result._optimizer, spec, HORIZON)
    return result, weight


def logged_rates(spec, folder):
    """Rates in the step log, and those that really moved the weight."""
    trained, weight = worker(spec)
    log = StepLog(folder / "optimizer_steps.jsonl")
    moved = []
    for _ in range(HORIZON):
        before = weight.item()
        log.optimizer_step(trained.step())
        moved.append(before - weight.item())
    lines = [json.loads(line) for line in (folder / "optimizer_steps.jsonl").read_text().splitlines()]
    return [line["lr"] for line in lines], moved


@pytest.mark.parametrize("warmup", [0, 4, 13])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_each_of_50_steps(name, warmup, tmp_path):
    ends = {"cosine_with_min_lr": (0.1,), "cosine_warmup_with_min_lr": (0.1,), "polynomial": (None, 0.2)}
    for end in ends.get(name, (None,)):
        folder = tmp_path / str(end)
        spec = dataclasses.replace(SPEC, scheduler=name, num_warmup_steps=warmup, min_lr_ratio=end)
        rates, moved = logged_rates(spec, folder)
        expected = [PEAK * FORMULAS[name](step, warmup, end) for step in range(HORIZON)]
        assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert moved == pytest.approx(expected, rel=1e-3, abs=1e-8)


def test_a_schedule_ends_after_the_last_step_of_the_horizon():
    """Half the peak after 10 of 20 steps and 0 after 20, not before."""
    spec = dataclasses.replace(SPEC, scheduler="cosine")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = build_scheduler(optimizer, spec, 20)
    rates = []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[10] == pytest.approx(PEAK / 2, rel=1e-12)
    assert rates[19] > 1e-6
    assert rates[20] == pytest.approx(0, abs=1e-18)


def test_the_stated_warm_up():
    """Warm-up of 4 to 1e-5: 0, 2.5e-6, 5e-6, 7.5e-6, 1e-5, 1e-5."""
    spec = dataclasses.replace(SPEC, lr=1e-5, scheduler="constant_with_warmup", num_warmup_steps=4)
    trained, _ = worker(spec)
    rates = [trained.step()["lr"] for _ in range(6)]
    assert rates == pytest.approx([0, 2.5e-6, 5e-6, 7.5e-6, 1e-5, 1e-5], rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "horizon", "steps"),
    [(0.1, 30, 3), (0.29, 100, 29), (0.05, 50, 3), (0.5, 5, 3), (0.0, 50, 0), (1.0, 50, 50), (0.001, 50, 0)],
)
def test_a_ratio_is_rounded_to_whole_steps(ratio, horizon, steps):
    spec = dataclasses.replace(SPEC, scheduler="linear", lr_warmup_ratio=ratio)
    assert warmup_steps(spec, horizon) == steps
    assert warmup_steps(dataclasses.replace(spec, num_warmup_steps=steps), horizon) == steps
    with pytest.raises(UnsupportedError, match="leave one of them out"):
        warmup_steps(dataclasses.replace(spec, num_warmup_steps=steps + 1), horizon)


def test_a_ratio_gives_the_rates_of_the_number_it_means(tmp_path):
    by_ratio = dataclasses.replace(SPEC, scheduler="cosine", lr_warmup_ratio=0.26)
    by_number = dataclasses.replace(SPEC, scheduler="cosine", num_warmup_steps=13)
    assert logged_rates(by_ratio, tmp_path / "a") == logged_rates(by_number, tmp_path / "b")


PREFIX = "trainer.policy.optimizer_config"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((f"{PREFIX}.scheduler=greedy",), "the optimizer's steps alone do not drive"),
        ((f"{PREFIX}.scheduler=reduce_lr_on_plateau",), "write one of constant,"),
        ((f"{PREFIX}.scheduler=warmup_stable_decay",), "the optimizer's steps alone do not drive"),
        ((f"{PREFIX}.scheduler=cosines",), "scheduler='cosines'"),
        ((f"{PREFIX}.scheduler=cosine_with_min_lr",), "write trainer.arctic_rl.min_lr_ratio=0.1"),
        ((f"{PREFIX}.scheduler=cosine", "trainer.arctic_rl.min_lr_ratio=0.1"), "has no such end"),
        ((f"{PREFIX}.scheduler=constant", "trainer.arctic_rl.lr_warmup_ratio=0.1"), "has no warm-up"),
        (("trainer.arctic_rl.lr_warmup_ratio=0", f"{PREFIX}.num_warmup_steps=3"), "leave one of them out"),
        ((f"{PREFIX}.scheduler=polynomial", f"{PREFIX}.lr=1e-8"), "ends at 1e-07"),
        ((f"{PREFIX}.scheduler=polynomial", "trainer.arctic_rl.min_lr_ratio=1"), "must be less"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_by_name(settings, said):
    cfg = parse_config(["trainer.logger=console", *settings])
    lines = [line for line in setting_problems(cfg) if said in line]
    assert len(lines) == 1
    with pytest.raises(UnsupportedError):
        build_scheduler(None, optimizer_spec(cfg), 50)


def test_every_schedule_of_transformers_is_served_or_refused():
    from transformers import SchedulerType

    names = {item.value for item in SchedulerType}
    assert set(SCHEDULES) <= names
    for name in names - set(SCHEDULES):
        assert any(schedule_problems(dataclasses.replace(SPEC, scheduler=name)))


def test_the_backend_reports_the_rate_that_a_step_used():
    from integrations.arctic_rl.backends.builtin import BuiltinBackend

    spec = dataclasses.replace(SPEC, scheduler="linear")
    trained, _ = worker(spec)
    backend = BuiltinBackend(server_config(parse_config([]), run_id="r", env_vars={}))
    backend._workers.actors["policy-0"] = None

    async def call_all(names, method, *arguments):
        return [getattr(trained, method)(*arguments) for _ in names]

    backend._calls.call_all = call_all
    rates = [asyncio.run(backend.step())["lr"] for _ in range(3)]
    assert rates == pytest.approx([PEAK, PEAK * 49 / 50, PEAK * 48 / 50], rel=1e-12)
