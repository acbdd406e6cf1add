"""Installed packages against the versions that this project names, and where its own packages come from."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTION = "skyrl-arctic-rl"
ALIAS = "skyrl_arctic_rl"
MODULES = {"vllm": True, "deepspeed": True, "flash_attn": False, "liger_kernel": False}
"""Modules that are looked for, and whether every run needs them."""
_OPTIONAL = [name.replace("_", "-") for name, always in MODULES.items() if not always]
"""Their distributions, whose absence ``module_lines`` tells where a recipe needs them."""
_WITHOUT = {
    "flash_attn": "which GPUs need with trainer.arctic_rl.use_zorro=false alone",
    "liger_kernel": "which GPUs need with trainer.arctic_rl.use_liger=true alone",
}


def installed_version(name: str) -> str | None:
    """The version of a distribution; None = it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_requirements() -> list[str] | None:
    """What this project's installed distribution asks for; None = it is not installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_lines(
    requirements: Iterable[str] | None, version_of: Callable[[str], str | None], *, extra: str
) -> tuple[list[str], list[str]]:
    """Versions found, and what does not fit.

    Args:
        requirements: as in a distribution's metadata.
        version_of: the installed version of a distribution, None without one.
        extra: the extra whose packages are needed too, ``cpu`` or ``arctic-rl``.

    Returns:
        A line each for what was found, and for every problem.
    """
    if requirements is None:
        return [], [f"{DISTRIBUTION} is not installed: run uv sync --extra {extra} in its folder"]
    found, problems = [], []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        version = version_of(requirement.name)
        found.append(f"{requirement.name} {'is missing' if version is None else version}")
        if version is None:
            if requirement.name in _OPTIONAL:
                continue
            problems.append(f"{requirement.name} is missing: install {requirement.name}{requirement.specifier}")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} {version} is installed, and {requirement.specifier} is what is tested: install "
                f"{requirement.name}{requirement.specifier}"
            )
    return found, problems


def module_lines(
    has: Callable[[str], bool], errors: Mapping[str, str], *, gpus: bool, asked: Container[str] = ()
) -> tuple[list[str], list[str]]:
    """Which of ``MODULES`` are there and can be imported.

    Args:
        has: whether there is a module of a name.
        errors: what importing those that fail says.
        gpus: whether processes run on GPUs.
        asked: modules that a setting of the recipe needs.
    """
    extra = "arctic-rl" if gpus else "cpu"
    found, problems = [], []
    for name, always in MODULES.items():
        needed = always or name in asked
        if not has(name):
            found.append(f"{name}: not found{'' if needed else f', {_WITHOUT[name]}'}")
            if needed:
                problems.append(f"there is no module {name}: run uv sync --extra {extra}")
        elif name in errors:
            found.append(f"{name}: cannot be imported ({errors[name]})")
            if gpus or needed:
                problems.append(f"{name} cannot be imported ({errors[name]}): run uv sync --extra {extra} --reinstall")
        else:
            found.append(f"{name}: found, and can be imported")
    return found, problems


def locate(name: str, path: Sequence[str]) -> Path | None:
    """The folder that a dotted package name is imported from with a search path; runs no code of it."""
    where: Sequence[str] | None = path
    folder = None
    for count in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:count]), where)
        if spec is None or spec.submodule_search_locations is None:
            return None
        where = list(spec.submodule_search_locations)
        folder = Path(where[0]).resolve()
    return folder


def own_package_lines(root: Path, path: Sequence[str]) -> tuple[list[str], list[str]]:
    """Where ``integrations.arctic_rl`` and ``envs`` are imported from, and which of them are not this project's.

    Args:
        root: the folder that holds this project's packages.
        path: the search path, ``sys.path``.
    """
    ours = {"integrations.arctic_rl": root / "integrations" / "arctic_rl", "envs": root / "envs"}
    instead = {
        "integrations.arctic_rl": f"write trainer.override_entrypoint={ALIAS}.entrypoint",
        "envs": f"write trainer.override_entrypoint={ALIAS}.entrypoint, and import {ALIAS}.envs",
    }
    found, problems = [], []
    for name, expected in ours.items():
        folder = locate(name, path)
        found.append(f"{name}: {folder or 'not found'}")
        if folder != expected.resolve():
            problems.append(
                f"{name} is imported from {folder or 'nowhere'} here, not from {expected}: {instead[name]}, or start "
                "the run in another folder"
            )
    return found, problems
