"""Who may die, and when? ``python -m benchmarks.faults [--victims policy engine] [--phases sync] [--how killed]``

One small real run a cell: SkyRL's trainer on two DeepSpeed ranks of the policy, a critic, a reference model and a vLLM
engine, all processes of one Ray. One process of it is stopped at the beginning of a phase, once a checkpoint is there,
so that the phase cannot end, and killed half a second later; ``--how stopped`` leaves it standing still for good.

victims: ``policy``, ``critic``, ``ref``: a training rank; ``engine``: the actor of the engine; ``core``: vLLM's
process under it; ``trainer``: the process of SkyRL's trainer; ``driver``: the command that was typed; ``raylet`` and
``gcs``: of the Ray node.

Bounds, a line each cell: a run that must end does so, with nothing left running, within 30 s of the kill (of the
time-out, where the process only stands still); one whose engine died goes on to its last step. Either way the
last checkpoint is whole, the message names the victim, and engines that were replaced sample with the current weights.
About a minute a cell on 2 idle cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import print_line

PHASES = ("initialize", "generate", "forward", "backward", "step", "sync", "save")
HOW = ("killed", "stopped")
VICTIMS = ("policy", "critic", "ref", "engine", "core", "trainer", "driver", "raylet", "gcs")
ENGINES = ("engine", "core", "sampling")
CAN_STAND_STILL = ("policy", "critic", "ref", "engine", "core")
"""Victims whose standing still is noticed."""
END_LIMIT_S, TIMEOUT_S, RUN_LIMIT_S = 30.0, 20.0, 600.0
STEPS = 3
SAME_WEIGHTS = 1e-4
"""Greatest mean difference of the engine's and the trainer's log-probs where both have the same weights."""


def ends_the_run(victim: str, phase: str) -> bool:
    """Whether a run cannot go on without the victim: all but engines, which are replaced once they were up."""
    return phase == "initialize" or victim not in ENGINES


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix."""

    victim: str
    phase: str
    how: str


def cells(victims: list[str], phases: list[str], hows: list[str]) -> list[Cell]:
    """The matrix, without those that nobody can notice standing still, nor before anybody looks."""
    every = (Cell(*parts) for parts in itertools.product(victims, phases, hows))
    return [
        cell
        for cell in every
        if cell.how == "killed" or (cell.victim in CAN_STAND_STILL and cell.phase != "initialize")
    ]


def overrides(data: Path, model: Path, folder: Path) -> list[str]:
    from examples import quickstart

    values = {
        "trainer.arctic_rl.env_modules": "[fault_injection]",
        "trainer.arctic_rl.worker_timeout_s": TIMEOUT_S,
        "trainer.arctic_rl.max_cpu_workers": 5,
        "trainer.arctic_rl.cpu_threads": 1,
        "trainer.arctic_rl.scoring_workers": 1,
        "trainer.placement.colocate_all": "false",
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.critic_num_gpus_per_node": 1,
        "trainer.placement.ref_num_gpus_per_node": 1,
        "trainer.placement.colocate_policy_ref": "false",
        "trainer.critic.model.path": model,
        "trainer.critic_mini_batch_size": 4,
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.algorithm.use_kl_loss": "true",
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "trainer.max_training_steps": STEPS,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": 1,
        "trainer.print_example_interval": -1,
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 32,
    }
    return [*quickstart.recipe(data, model, folder, seed=0), *(f"{key}={value}" for key, value in values.items())]


def family(root: Any) -> dict[int, Any]:
    """The processes of a run: descendants of its command, and whatever carries its id."""
    import psutil

    found = {root.pid: root, **{child.pid: child for child in root.children(recursive=True)}}
    run_ids = {run_id for process in found.values() if (run_id := _run_id(process))}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _run_id(process) in run_ids:
            found[process.pid] = process
    return found


def _run_id(process: Any) -> str | None:
    import psutil

    try:
        return process.environ().get("ARCTIC_RL_RUN_ID")
    except psutil.Error:
        return None


def run(cell: Cell, inputs: tuple[Path, Path], folder: Path) -> bool:
    """One run; prints its line and says whether everything held."""
    import psutil

    from examples import quickstart

    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("fault_injection.py"), folder)
    plan = {**vars(cell), "checkpoints": str(folder / "checkpoints")}
    (folder / "plan.json").write_text(json.dumps(plan))
    started = time.monotonic()
    with (folder / "output.log").open("w") as log:
        process = quickstart.start(overrides(*inputs, folder), folder, output=log)
    try:
        root = psutil.Process(process.pid)
        known = _until_hurt(process, root, folder, started)
        must_end = ends_the_run(cell.victim, cell.phase)
        if not must_end:
            process.wait(timeout=RUN_LIMIT_S)
        left = _wait_until_gone(process, known, RUN_LIMIT_S if not must_end else END_LIMIT_S + TIMEOUT_S + 30)
    finally:
        process.kill()
        process.wait()
    at = json.loads((folder / "hurt.json").read_text())["at"]
    seconds = time.time() - at - (TIMEOUT_S if cell.how == "stopped" else 0.0)
    output = (folder / "output.log").read_text()
    problems = [*_problems(cell, folder, output, process.returncode), *(f"left running: {name}" for name in left)]
    bound = END_LIMIT_S if must_end else RUN_LIMIT_S
    return print_line(
        f"faults/{cell.victim}_{cell.how}_in_{cell.phase}",
        seconds if not problems else float("inf"),
        bound,
        "max",
        outcome="the run ended" if must_end else "the engine was replaced",
        seconds=round(seconds, 1),
        status=process.returncode,
        problems=problems,
        said=_said(output),
    )


def _until_hurt(process: subprocess.Popen, root: Any, folder: Path, started: float) -> dict[int, Any]:
    """Wait for the blow; returns the run's processes."""
    while not (folder / "hurt.json").exists():
        if process.poll() is not None or time.monotonic() > started + RUN_LIMIT_S:
            raise RuntimeError(f"nobody was hurt:\n{(folder / 'output.log').read_text()[-4000:]}")
        time.sleep(0.1)
    return family(root)


def _wait_until_gone(process: subprocess.Popen, known: dict[int, Any], limit_s: float) -> list[str]:
    """Which of the run's processes, and of those that join it, are there after the limit."""
    import psutil

    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        process.poll()
        for each in list(known.values()):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                try:
                    known |= {child.pid: child for child in each.children(recursive=True)}
                except psutil.Error:
                    continue
        alive = [each for each in known.values() if _alive(each)]
        if not alive:
            return []
        time.sleep(0.1)
    names = [f"{each.pid} {' '.join(each.cmdline())[:80]}" for each in known.values() if _alive(each)]
    for each in known.values():
        if _alive(each):
            each.kill()
    return names


def _alive(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _problems(cell: Cell, folder: Path, output: str, status: int) -> list[str]:
    """What does not hold beside the time."""
    from examples.report import read_json_lines
    from integrations.arctic_rl.checkpoint import latest, verify
    from integrations.arctic_rl.errors import CheckpointError

    found = []
    names = {"policy": "policy-", "critic": "critic-", "ref": "ref-", "engine": "sampling-0", "core": "sampling-0"}
    if cell.victim in names and names[cell.victim] not in output:
        found.append("the message does not name the victim")
    metrics = folder / "logs" / "metrics.jsonl"
    lines = [line for line in read_json_lines(metrics) if "policy/final_loss" in line] if metrics.exists() else []
    if ends_the_run(cell.victim, cell.phase):
        if status == 0:
            found.append("the run ended as if nothing had been")
        if cell.victim != "driver" and "error:" not in output:
            found.append("no cause was given")
    else:
        if status != 0:
            found.append("the run did not go on")
        if len(lines) != STEPS:
            found.append(f"{len(lines)} of {STEPS} steps were logged")
        if sum(line.get("generate/engine_restarts", 0) for line in lines) != 1 and cell.phase != "save":
            found.append("the restart was not counted")
    if any(line["policy/rollout_train_logprobs_abs_diff_mean"] > SAME_WEIGHTS for line in lines):
        found.append("an engine sampled with other weights than the trainer had")
    if cell.phase != "initialize":
        last = latest(folder / "checkpoints")
        try:
            verify(last) if last is not None else found.append("no checkpoint is left")
        except CheckpointError as error:
            found.append(f"the last checkpoint is damaged: {error}")
    return found


def _said(output: str) -> str:
    """The line that says why the run ended, or that an engine was restarted."""
    lines = [line for line in output.splitlines() if line.startswith("error:") or "is restarted" in line]
    return lines[-1][:200] if lines else ""


def main(argv: list[str] | None = None) -> int:
    from tqdm import tqdm

    from examples import quickstart

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--cache_dir", type=Path, help="where the quickstart's data and model are, or are made")
    parser.add_argument("--output_dir", type=Path, help="keeps each run's folder; default: a temporary one")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        output_dir = (options.output_dir or Path(temporary)).resolve()
        inputs = quickstart.make_inputs((options.cache_dir or output_dir / "cache").resolve(), seed=0)
        held = [
            run(cell, inputs, output_dir / f"{cell.victim}_{cell.how}_{cell.phase}")
            for cell in tqdm(cells(options.victims, options.phases, options.how), unit="run")
        ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
