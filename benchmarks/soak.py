"""Does a long run leak? ``python -m benchmarks.soak [--steps 150] [--plot FILE] [--cache_dir C]``

The quickstart's own job for 150 steps, with a checkpoint every ten. After each step every process of the run is looked
at: its private and its proportional memory (USS and PSS), and its open files; and Ray's object store and the run's
folder in shared memory. The first 20 steps are warm-up. Bounds:

memory: the least-squares slope of each process, of USS and of PSS, is below 1 MiB a step.
open files, processes, objects, object store, shared memory: what is always there does not grow: the least over the
last third of the steps is no more than the least over the first third (for bytes: within 1 MiB).

A run with less warm-up (``--steps`` below 60) only reports: the engine still touches its cache for the first time.
About five minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import print_line
from examples import quickstart
from examples.report import REWARD, read_json_lines

MIB = 2**20
WARM_UP = 20
MAX_SLOPE_MIB = 1.0
MAX_GROWTH_MIB = 1.0
POLL_S = 0.1
FIRST_STEP_LIMIT_S, STEP_LIMIT_S = 900.0, 300.0
SHARED_MEMORY = Path("/dev/shm")
MAX_MISSED = 3
"""Steps without a sample: the run ends while its last one is looked at."""


@dataclass
class ProcessSeries:
    """What one process held after each step that it saw."""

    role: str
    steps: list[int] = field(default_factory=list)
    uss_mib: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)


@dataclass
class Series:
    """What a run held after each step."""

    processes: dict[int, ProcessSeries] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    totals: dict[str, list[float]] = field(default_factory=dict)

    def look(self, step: int, root: psutil.Process) -> None:
        """Add a sample of ``root``, its descendants, and the Ray node among them; none of a run that is ending."""
        family = [root, *root.children(recursive=True)]
        held = [found for process in family if (found := look_at(process)) is not None]
        totals = {
            "processes": len(held),
            "open_files": sum(found.open_files for found in held),
            "uss_mib": sum(found.uss_mib for found in held),
            "pss_mib": sum(found.pss_mib for found in held),
            "shared_memory_mib": shared_memory_mib(family),
            **object_store(family),
        }
        if self.totals.keys() - totals.keys():
            return
        for found in held:
            series = self.processes.setdefault(found.pid, ProcessSeries(found.role))
            series.role = found.role if series.role == IDLE else series.role
            series.steps.append(step)
            series.uss_mib.append(found.uss_mib)
            series.pss_mib.append(found.pss_mib)
            series.open_files.append(found.open_files)
        self.steps.append(step)
        for name, value in totals.items():
            self.totals.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Held:
    """What a process holds now."""

    pid: int
    role: str
    uss_mib: float
    pss_mib: float
    open_files: int


def look_at(process: psutil.Process) -> Held | None:
    """What a process holds; None for one that is ending."""
    try:
        memory = process.memory_full_info()
        held = Held(process.pid, role_of(process), memory.uss / MIB, memory.pss / MIB, process.num_fds())
    except psutil.Error:
        return None
    return held if memory.rss else None


IDLE = "idle Ray worker"


def role_of(process: psutil.Process) -> str:
    """What a process is, from its title: a Ray actor or task, a module that was run, or its name."""
    line, name = " ".join(process.cmdline()).strip(), process.name()
    if name in ("raylet", "gcs_server"):
        return name
    if match := re.match(r"ray::(\w+)", line):
        return IDLE if match[1] == "IDLE" else match[1]
    if match := re.search(r"-m ([\w.]+)", line):
        return match[1].rpartition(".")[2]
    for part in (
        "resource_tracker",
        "forkserver",
        "spawn_main",
        "dashboard/agent",
        "runtime_env/agent",
        "log_monitor",
    ):
        if part in line:
            return part
    if match := re.search(r"(\w+)\.py\b", line):
        return match[1]
    return line if line.startswith("VLLM::") else name


def object_store(family: Iterable[psutil.Process]) -> dict[str, float]:
    """Objects in the store of the Ray node among these processes, and their MiB; nothing where there is none."""
    import grpc
    from ray._private.internal_api import node_stats
    from ray._raylet import GcsClient
    from ray.exceptions import RpcError

    raylet = next((process for process in family if process.name() == "raylet"), None)
    if raylet is None:
        return {}
    try:
        address = next(part for part in raylet.cmdline() if part.startswith("--gcs-address=")).partition("=")[2]
        (node,) = GcsClient(address=address).get_all_node_info().values()
        stats = node_stats(node.node_manager_address, node.node_manager_port, include_memory_info=False).store_stats
    except (psutil.Error, grpc.RpcError, RpcError):
        return {}
    return {"objects": stats.num_local_objects, "object_store_mib": stats.object_store_bytes_used / MIB}


def shared_memory_mib(family: Iterable[psutil.Process]) -> float:
    """MiB of the files in shared memory that one of these processes made."""
    run_ids = set()
    for process in family:
        try:
            run_ids.add(process.environ().get("ARCTIC_RL_RUN_ID"))
        except psutil.Error:
            continue
    files = (
        file
        for run_id in run_ids - {None}
        for folder in SHARED_MEMORY.glob(f"*{run_id}*")
        for file in [folder, *folder.rglob("*")]
    )
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total / MIB


def slope(steps: list[int], values: list[float]) -> float:
    """Least-squares slope, in units of ``values`` a step."""
    count = len(steps)
    mean_step, mean_value = sum(steps) / count, sum(values) / count
    spread = sum((step - mean_step) ** 2 for step in steps)
    return sum((step - mean_step) * (value - mean_value) for step, value in zip(steps, values, strict=True)) / spread


def growth(values: list[float]) -> float:
    """How far the least of the last third is above the least of the first third."""
    third = max(len(values) // 3, 1)
    return min(values[-third:]) - min(values[:third])


def after(warm_up: int, steps: list[int], values: list[Any]) -> tuple[list[int], list[Any]]:
    """The part of a series behind the warm-up."""
    kept = [index for index, step in enumerate(steps) if step > warm_up]
    return [steps[index] for index in kept], [values[index] for index in kept]


def judge(series: Series, warm_up: int, *, bounded: bool = True) -> bool:
    """Print a line for each process that lived through the steps behind the warm-up, and for what the run holds.

    Args:
        series: the samples.
        warm_up: steps that are left out.
        bounded: False = figures are only reported.

    Returns:
        Whether every bound holds.
    """
    ok = True
    last = series.steps[-1]
    for pid, process in sorted(series.processes.items(), key=lambda item: item[1].role):
        steps, uss = after(warm_up, process.steps, process.uss_mib)
        if len(steps) < (last - warm_up) / 2 or len(steps) < 3:
            continue
        pss = after(warm_up, process.steps, process.pss_mib)[1]
        slopes = {"uss": slope(steps, uss), "pss": slope(steps, pss)}
        ok &= print_line(
            "soak/memory_mib_a_step",
            max(slopes.values()),
            MAX_SLOPE_MIB if bounded else None,
            "max" if bounded else "none",
            process=f"{process.role} {pid}",
            steps=len(steps),
            **{f"{name}_slope": round(value, 4) for name, value in slopes.items()},
            uss_mib=[round(uss[0], 1), round(uss[-1], 1)],
            open_files_growth=growth(after(warm_up, process.steps, process.open_files)[1]),
        )
    for name, values in series.totals.items():
        kept = after(warm_up, series.steps, values)[1]
        more = {"first": round(kept[0], 2), "last": round(kept[-1], 2)}
        if name in ("uss_mib", "pss_mib"):
            print_line(f"soak/total_{name}_a_step", slope(series.steps[-len(kept) :], kept), None, "none", **more)
        else:
            bound = MAX_GROWTH_MIB if name.endswith("_mib") else 0
            kind = "max" if bounded else "none"
            ok &= print_line(f"soak/growth_of_{name}", growth(kept), bound if bounded else None, kind, **more)
    return ok


def follow(process: subprocess.Popen, metrics: Path, look: Callable[[int], None]) -> None:
    """Call ``look`` after each step that a run logs, until the run ends.

    Raises:
        RuntimeError: when the run fails.
        TimeoutError: when a step takes too long.
    """
    seen, deadline = 0, time.monotonic() + FIRST_STEP_LIMIT_S
    while process.poll() is None:
        steps = (
            [line["global_step"] for line in read_json_lines(metrics) if REWARD in line] if metrics.exists() else []
        )
        if len(steps) > seen:
            seen, deadline = len(steps), time.monotonic() + STEP_LIMIT_S
            try:
                look(steps[-1])
            except psutil.NoSuchProcess:
                break
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step after step {steps[-1] if steps else 0} in time")
        time.sleep(POLL_S)
    if process.wait() != 0:
        raise RuntimeError(f"the run ended with status {process.returncode}")


def run(output_dir: Path, steps: int, cache_dir: Path) -> Series:
    """Train and watch."""
    data, model = quickstart.make_inputs(cache_dir, seed=0)
    run_dir = output_dir / "run"
    run_dir.mkdir(parents=True)
    overrides = [
        *quickstart.recipe(data, model, run_dir, seed=0),
        f"trainer.max_training_steps={steps}",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=10",
        "trainer.max_ckpts_to_keep=1",
        "trainer.print_example_interval=-1",
    ]
    series = Series()
    with (run_dir / "output.log").open("w") as log:
        process = quickstart.start(overrides, run_dir, output=log)
        try:
            root = psutil.Process(process.pid)
            follow(process, run_dir / "logs" / "metrics.jsonl", lambda step: series.look(step, root))
        except RuntimeError as error:
            raise RuntimeError(f"{error}:\n{(run_dir / 'output.log').read_text()[-4000:]}") from None
        finally:
            process.terminate()
            process.wait()
    if len(series.steps) < steps - MAX_MISSED:
        raise RuntimeError(f"{len(series.steps)} of {steps} steps were seen: they are too fast to be looked at")
    return series


def plot(series: Series, warm_up: int, path: Path) -> None:
    """Memory of each process by step, and what the run holds altogether."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    largest = sorted(series.processes.values(), key=lambda process: -max(process.uss_mib))
    for process in largest[:8]:
        left.plot(process.steps, process.uss_mib, label=process.role, linewidth=1.2)
    left.set(title="Private memory (USS) of the largest processes", xlabel="step", ylabel="MiB", ylim=(0, None))
    for name, values in series.totals.items():
        if name not in ("uss_mib", "pss_mib"):
            first = next(
                (value for step, value in zip(series.steps, values, strict=True) if step > warm_up), values[-1]
            )
            unit = " MiB" if name.endswith("_mib") else ""
            label = f"{name.removesuffix('_mib').replace('_', ' ')}: {first:.4g}{unit}"
            right.plot(series.steps, [value / (first or 1) for value in values], label=label, linewidth=1.2)
    right.set(title=f"The run altogether, relative to step {warm_up + 1}", xlabel="step", ylim=(0, 2))
    for axes in (left, right):
        axes.axvspan(0, warm_up, color="0.93", zorder=0)
        axes.legend(fontsize=7, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps of the run")
    parser.add_argument("--warm_up", type=int, help="steps that are not judged; default: 20, or a third of --steps")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--samples", type=Path, help="JSON file to write all samples to")
    parser.add_argument("--output_dir", type=Path, help="where the run is kept; default: a temporary folder")
    parser.add_argument("--cache_dir", type=Path, help="where the quickstart keeps its inputs; default: made anew")
    arguments = parser.parse_args(argv)
    warm_up = min(WARM_UP, arguments.steps // 3) if arguments.warm_up is None else arguments.warm_up
    if arguments.steps - warm_up < 6:
        parser.error(
            f"--steps={arguments.steps} leaves {arguments.steps - warm_up} steps behind the warm-up: 6 or more"
        )
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        output_dir = (arguments.output_dir or Path(temporary)).resolve()
        cache_dir = (arguments.cache_dir or output_dir / "cache").resolve()
        series = run(output_dir, arguments.steps, cache_dir)
    if arguments.samples:
        samples = {"totals": series.totals, "steps": series.steps}
        samples["processes"] = {pid: vars(process) for pid, process in series.processes.items()}
        arguments.samples.write_text(json.dumps(samples), encoding="utf-8")
    if arguments.plot:
        plot(series, warm_up, arguments.plot)
    return 0 if judge(series, warm_up, bounded=warm_up >= WARM_UP) else 1


if __name__ == "__main__":
    sys.exit(main())
