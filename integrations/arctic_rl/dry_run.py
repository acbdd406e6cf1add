"""``trainer.arctic_rl.dry_run=true``: what a run would do, and what stands against it, in text; nothing is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .described_placement import described_plan
from .horizon import horizon, horizon_problems
from .inspection import Findings, setting_of
from .prompt_dataset import check_data_files, make_prompt_dataset
from .server_config import server_config
from .support.entries import shown
from .type_checks import without_mistyped

_PER_RUN = ("run_id", "env_vars", "log_file", "scratch_directory")
"""Fields of the server's config that a run fills in; environment variables may hold keys, and are never printed."""


def report(cfg: Any, findings: Findings, prompts: int | str | None = None) -> str:
    """The dry run of a recipe as text.

    Args:
        cfg: the config that ``inspect_config`` was given.
        findings: what it found.
        prompts: what ``count_prompts`` returned; None = count them here.
    """
    cfg = without_mistyped(cfg)
    verdict = "this recipe is refused" if findings.refused else "nothing in this recipe is refused"
    parts = [
        f"Dry run, nothing was started: {verdict}.",
        _section("Refused; a run ends with these lines before it starts", _bullets(findings.refused)),
        _section("Not on this machine; a run needs it", _bullets(findings.missing)),
        _section("Without effect here", _bullets(findings.ignored)),
        _section("Server", _server(cfg)),
        _section("Placement on the cluster that the recipe describes", _placement(cfg)),
        _section("Schedule", _schedule(cfg, count_prompts(cfg) if prompts is None else prompts)),
    ]
    return "\n\n".join(part for part in parts if part)


def with_horizon(cfg: Any, findings: Findings, prompts: int | str) -> Findings:
    """The findings, and what the size of the data set adds to them where that is known."""
    if isinstance(prompts, str):
        return findings
    named = {setting_of(line) for line in findings.refused}
    added = [line for line in horizon_problems(without_mistyped(cfg), prompts) if setting_of(line) not in named]
    return dataclasses.replace(findings, refused=[*findings.refused, *added])


def exit_status(findings: Findings) -> int:
    """1 where the recipe is refused, else 0; what only this machine lacks is no refusal."""
    return 1 if findings.refused else 0


def _section(title: str, lines: Iterable[str]) -> str:
    lines = list(lines)
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _server(cfg: Any) -> list[str]:
    try:
        config = server_config(cfg, run_id="", env_vars={})
    except (ValueError, TypeError, IndexError) as error:
        return [f"cannot be resolved: {line}" for line in str(error).splitlines()]
    return [f"backend: {cfg.trainer.arctic_rl.backend}", *_fields(config)]


def _fields(section: Any) -> list[str]:
    """A dataclass as indented lines, its plain fields before its sections."""
    values = {item.name: vars(section)[item.name] for item in dataclasses.fields(section)}
    unused = (*_PER_RUN, "optimizer") if values.get("role") == "ref" else _PER_RUN
    plain = {name: value for name, value in values.items() if name not in unused}
    sections = {name: value for name, value in plain.items() if dataclasses.is_dataclass(value)}
    lines = [f"{name}: {_shown(value)}" for name, value in plain.items() if name not in sections]
    for name, value in sections.items():
        lines += [f"{name}:", *(f"  {line}" for line in _fields(value))]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, tuple):
        return str(list(value))
    return shown(value)


def _placement(cfg: Any) -> list[str]:
    try:
        plan = described_plan(cfg)
    except (TypeError, ZeroDivisionError, AttributeError) as error:
        return [f"cannot be planned: {error}"]
    size = f"{plan.nodes} x {plan.gpus_per_node} GPUs, {'shared by all jobs' if plan.colocated else 'not shared'}"
    return [
        size,
        *plan.table().splitlines(),
        "GPUs are not served yet: on a cluster without any, each process above runs on CPUs",
    ]


def _schedule(cfg: Any, counted: int | str) -> list[str]:
    try:
        run = horizon(cfg)
    except (TypeError, ZeroDivisionError) as error:
        return [f"cannot be told: {error}"]
    if isinstance(counted, int):
        steps = run.optimizer_steps(counted)
        return [f"horizon: {steps} optimizer steps = {run.formula()}, prompts = {counted}"]
    return [
        f"horizon: {run.formula()}",
        f"prompts is the data set's size without prompts that are too long: {counted}",
    ]


def count_prompts(cfg: Any) -> int | str:
    """The prompts that are trained on, or why they cannot be counted here."""
    cfg = without_mistyped(cfg)
    try:
        check_data_files(cfg.data.train_data)
    except ValueError:
        return "it cannot be read here"
    model = cfg.trainer.policy.model.path
    if not model or not Path(model).expanduser().is_dir():
        return f"the tokenizer of {model} is not here"
    from skyrl.utils.tok import get_tokenizer

    tokenizer = get_tokenizer(
        model, trust_remote_code=True, use_fast=not cfg.trainer.disable_fast_tokenizer, padding_side="left"
    )
    dataset = make_prompt_dataset(
        cfg.data.train_data,
        tokenizer=tokenizer,
        max_prompt_length=cfg.trainer.max_prompt_length,
        chat_template_kwargs=cfg.generator.chat_template_kwargs,
    )
    return len(dataset)
