"""``trainer.arctic_rl.dry_run=true``: what a run would do, and what stands against it, in text; nothing is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .backends.registry import backend_name
from .described_placement import described_plan, gpu_plan, planned_cluster
from .devices import device_here
from .horizon import has_two_warmups, horizon
from .inspection import Findings
from .prompt_count import count_prompts
from .resolved import rollout_lines, update_lines
from .server_config import server_config
from .support.entries import shown
from .type_checks import without_mistyped

_PER_RUN = ("run_id", "env_vars", "log_file", "scratch_directory", "visible_devices")
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
        _section("Updates", update_lines(cfg)),
        _section("Rollouts", rollout_lines(cfg)),
        _section("Placement on the cluster that the recipe describes", _placement(cfg)),
        _section("Schedule", _schedule(cfg, count_prompts(cfg) if prompts is None else prompts)),
    ]
    return "\n\n".join(part for part in parts if part)


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
        config = server_config(cfg, run_id="", env_vars={}, device=device_here(cfg))
    except (ValueError, TypeError, IndexError) as error:
        return [f"cannot be resolved: {line}" for line in str(error).splitlines()]
    return [f"backend: {backend_name(cfg)}", *_fields(config)]


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
        size = f"{plan.nodes} x {plan.gpus_per_node} GPUs, {'shared by all jobs' if plan.colocated else 'not shared'}"
    except (TypeError, ZeroDivisionError, AttributeError) as error:
        return [f"cannot be planned: {error}"]
    lines = [size, *plan.table().splitlines()]
    try:
        placed = gpu_plan(cfg)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        lines.append(f"no GPUs can be given for it: {error}")
    else:
        nodes = [node.gpus for node in planned_cluster(cfg).nodes]
        given = cfg.trainer.arctic_rl.cluster_gpus is not None
        lines += (
            [f"on nodes with {nodes} GPUs:", *placed.table().splitlines()]
            if given or set(nodes) != {plan.gpus_per_node}
            else ["each engine stays within a node"]
        )
    return [*lines, "on a cluster without GPUs, each process above runs on CPUs"]


def _schedule(cfg: Any, counted: int | str) -> list[str]:
    names = {"policy": "horizon"}
    if cfg.trainer.critic.model.path:
        names["critic"] = "horizon of the critic"
    lines = []
    for model, name in names.items():
        try:
            run = horizon(cfg, model)
        except (TypeError, ZeroDivisionError) as error:
            lines.append(f"{name} cannot be told: {error}")
            continue
        if isinstance(counted, int):
            steps = run.optimizer_steps(counted)
            lines.append(f"{name}: {steps} optimizer steps = {run.formula()}, prompts = {counted}")
        else:
            lines.append(f"{name}: {run.formula()}")
    if isinstance(counted, int):
        return lines
    lines.append(f"prompts is the data set's size without prompts that are too long: {counted}")
    if has_two_warmups(cfg):
        lines.append(
            f"warm-up: trainer.arctic_rl.lr_warmup_ratio={cfg.trainer.arctic_rl.lr_warmup_ratio} of it must be "
            f"num_warmup_steps={cfg.trainer.policy.optimizer_config.num_warmup_steps}, or the run will be refused"
        )
    return lines
