"""Who may die, and when? ``python -m benchmarks.faults [--victims policy engine] [--phases sync] [--how killed]``

Small real runs: SkyRL's trainer on two DeepSpeed ranks of the policy, a critic, a reference model and a vLLM engine,
all processes of one Ray. One process of it is stopped at the beginning of a phase, once a checkpoint is there, so that
the phase cannot end, and killed half a second later; ``--how stopped`` leaves it standing still for good. What ends a
run has it to itself; up to six blows that an engine recovers from share one, each behind another checkpoint.

victims: ``policy``, ``critic``, ``ref``: a training rank; ``engine``: the actor of the engine; ``core``: vLLM's
process under it; ``trainer``: the process of SkyRL's trainer; ``driver``: the command that was typed; ``raylet`` and
``gcs``: of the Ray node. ``--cells policy:sync:killed gcs:save:killed`` names single entries of the matrix.

Bounds, a line each cell: a run that must end does so, with nothing left running, within 30 s of the kill (of the
time-out, where the process only stands still); one whose engine died goes on to its last step. Either way nothing is
left in shared memory, the last checkpoint is whole, the message names the victim, and a replaced engine samples
with the current weights.
About a minute a cell on 2 idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
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
NAMED = {
    "policy": "policy-1",
    "critic": "critic-0",
    "ref": "ref-0",
    "engine": "sampling-0",
    "core": "sampling-0",
    "trainer": "the run's own process",
    "raylet": "raylet",
    "gcs": "gcs_server",
}
"""What the message calls a victim; nobody is left to speak of the driver."""
CAN_STAND_STILL = ("policy", "critic", "ref", "engine", "core")
"""Victims whose standing still is noticed."""
END_LIMIT_S, TIMEOUT_S, RUN_LIMIT_S = 30.0, 20.0, 600.0
MOST_BLOWS = 6
"""That one run takes."""
MARK = "ARCTIC_RL_FAULTS_RUN"
"""Environment variable with a run's folder."""
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
    every = (Cell(victim, phase, how) for victim, how, phase in itertools.product(victims, hows, phases))
    return [
        cell
        for cell in every
        if cell.how == "killed" or (cell.victim in CAN_STAND_STILL and cell.phase != "initialize")
    ]


def runs(matrix: list[Cell]) -> list[list[Cell]]:
    """Which cells share a run: those of one victim that a run survives."""
    found: list[list[Cell]] = []
    for cell in matrix:
        last = found[-1] if found else []
        alone = not last or ends_the_run(cell.victim, cell.phase) or ends_the_run(last[0].victim, last[0].phase)
        if alone or (last[0].victim, last[0].how) != (cell.victim, cell.how) or len(last) == MOST_BLOWS:
            found.append([])
        found[-1].append(cell)
    return found


def steps(blows: int) -> int:
    """Of a run: one before the first blow, up to two a blow, and one with the last replacement's samples."""
    return 2 * blows + 2


def overrides(data: Path, model: Path, folder: Path, blows: int) -> list[str]:
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
        "trainer.max_training_steps": steps(blows),
        "trainer.max_ckpts_to_keep": 2,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": 1,
        "trainer.print_example_interval": -1,
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 32,
    }
    return [*quickstart.recipe(data, model, folder, seed=0), *(f"{key}={value}" for key, value in values.items())]


def processes(folder: Path) -> dict[int, Any]:
    """All of the run in a folder, by their ids: they inherit its mark."""
    import psutil

    return {each.pid: each for each in psutil.process_iter() if _mark(each) == str(folder)}


def _mark(process: Any) -> str | None:
    import psutil

    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None


def run(cells: list[Cell], inputs: tuple[Path, Path], folder: Path) -> bool:
    """One run, in which all the cells' blows fall; prints a line each and says whether everything held."""
    from examples import quickstart

    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("fault_injection.py"), folder)
    plan = {"blows": [vars(cell) for cell in cells], "checkpoints": str(folder / "checkpoints")}
    (folder / "plan.json").write_text(json.dumps(plan))
    must_end = ends_the_run(cells[0].victim, cells[0].phase)
    os.environ[MARK] = str(folder)
    with (folder / "output.log").open("w") as log:
        process = quickstart.start(overrides(*inputs, folder, len(cells)), folder, output=log)
    try:
        _until_hurt(process, folder)
        known = processes(folder)
        if not must_end:
            process.wait(timeout=RUN_LIMIT_S * len(cells))
        left, last = _wait_until_gone(process, known | processes(folder), END_LIMIT_S + TIMEOUT_S + 30)
        gone_at = time.time()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        held = [_print_cell(cell, None, [str(error)]) for cell in cells]
        return all(held)
    finally:
        process.kill()
        process.wait()
    output = (folder / "output.log").read_text()
    blows = _lines(folder / "blows.jsonl")
    problems = [*_problems(cells, folder, output, process.returncode), *left, *_left_in_memory(known)]
    ends = [gone_at] if must_end else [line["at"] for line in _lines(folder / "recoveries.jsonl")]
    seconds = [end - blow["at"] for blow, end in zip(blows, ends, strict=False)]
    if len(seconds) < len(cells):
        problems.append(f"{len(blows)} of {len(cells)} blows fell, and {len(ends)} were recovered from")
    more = {"status": process.returncode, "said": "".join(_told(output)[-1:])[:200], "last": last}
    held = [_print_cell(cell, taken, problems, **more) for cell, taken in itertools.zip_longest(cells, seconds)]
    return all(held)


def _print_cell(cell: Cell, seconds: float | None, problems: list[str], **more: Any) -> bool:
    must_end = ends_the_run(cell.victim, cell.phase)
    if seconds is not None and cell.how == "stopped":
        seconds -= TIMEOUT_S
    return print_line(
        f"faults/{cell.victim}_{cell.how}_in_{cell.phase}",
        float("inf") if problems or seconds is None else seconds,
        END_LIMIT_S if must_end else RUN_LIMIT_S,
        "max",
        outcome="the run ended" if must_end else "the engine was replaced",
        seconds=None if seconds is None else round(seconds, 1),
        problems=problems,
        **more,
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    from examples.report import read_json_lines

    return read_json_lines(file) if file.exists() else []


def _until_hurt(process: subprocess.Popen, folder: Path) -> None:
    """Wait for the first blow.

    Raises:
        RuntimeError: there was none.
    """
    deadline = time.monotonic() + RUN_LIMIT_S
    while not (folder / "blows.jsonl").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"nobody was hurt:\n{(folder / 'output.log').read_text()[-4000:]}")
        time.sleep(0.1)


def _wait_until_gone(process: subprocess.Popen, known: dict[int, Any], limit_s: float) -> tuple[list[str], list[str]]:
    """Which of the run's processes, and of those that join it, are there after the limit; and which were the last."""
    import psutil

    deadline, last = time.monotonic() + limit_s, []
    while time.monotonic() < deadline:
        process.poll()
        for each in list(known.values()):
            with contextlib.suppress(psutil.Error):
                known |= {child.pid: child for child in each.children(recursive=True)}
        if not (alive := [name for each in known.values() if (name := _alive(each))]):
            return [], last
        last = alive
        time.sleep(0.1)
    for each in known.values():
        if _alive(each):
            each.kill()
    return [f"left running: {name}" for name in last], last


def _left_in_memory(known: dict[int, Any]) -> list[str]:
    from integrations.arctic_rl.server.run_directory import run_directories

    return [f"left in shared memory: {folder}" for folder, owner, _ in run_directories() if owner in known]


def _alive(process: Any) -> str:
    """A process that is there, by its id and title; empty where it is gone."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.pid} {' '.join(process.cmdline()).strip()[:80]}"
    return ""


def _problems(cells: list[Cell], folder: Path, output: str, status: int) -> list[str]:
    """What does not hold of a run, beside the time."""
    found = []
    victim, phase = cells[0].victim, cells[0].phase
    told = _told(output)
    lines = [line for line in _lines(folder / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    if ends_the_run(victim, phase):
        told = [line for line in told if line.startswith("error:")]
        if status == 0:
            found.append("the run ended as if nothing had been")
        if victim != "driver" and not told:
            found.append("no cause was given")
        elif victim in NAMED and not any(NAMED[victim] in line for line in told):
            found.append("the message does not name the victim")
    else:
        if status != 0:
            found.append("the run did not go on")
        if sum(NAMED[victim] in line for line in told) < len(cells):
            found.append("the message does not name the victim")
        if len(lines) != steps(len(cells)):
            found.append(f"{len(lines)} of {steps(len(cells))} steps were logged")
        if (restarts := sum(line.get("generate/engine_restarts", 0) for line in lines)) != len(cells):
            found.append(f"{restarts} restarts were counted")
    if any(line["policy/rollout_train_logprobs_abs_diff_mean"] > SAME_WEIGHTS for line in lines):
        found.append("an engine sampled with other weights than the trainer had")
    if phase != "initialize":
        found += _damage(folder / "checkpoints")
    return found


def _damage(checkpoints: Path) -> list[str]:
    """What a run that resumes would find wrong with the last checkpoint, all of its bytes read."""
    from integrations.arctic_rl.checkpoint import latest, verify
    from integrations.arctic_rl.errors import CheckpointError
    from integrations.arctic_rl.server.checkpoint import digest_problems

    last = latest(checkpoints)
    if last is None:
        return ["no checkpoint is left"]
    try:
        parts = verify(last).parts
        return [problem for part in parts for problem in digest_problems(last / part, rank=0, world_size=1)]
    except CheckpointError as error:
        return [f"the last checkpoint is damaged: {error}"]


def _told(output: str) -> list[str]:
    """The line that says why the run ended, and each that says that an engine is restarted, from its name on."""
    lines = output.splitlines()
    restarts = [line[line.index("worker ") :] for line in lines if "is restarted" in line]
    return restarts + [line for line in lines if line.startswith("error:")]


def _cell(text: str) -> Cell:
    """The entry that an argument names."""
    every = {f"{cell.victim}:{cell.phase}:{cell.how}": cell for cell in cells(list(VICTIMS), list(PHASES), list(HOW))}
    if text not in every:
        raise argparse.ArgumentTypeError(f"{text!r} is none of the matrix, which has {', '.join(every)}")
    return every[text]


def main(argv: list[str] | None = None) -> int:
    from tqdm import tqdm

    from examples import quickstart

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--cells", nargs="+", type=_cell, help="single entries, VICTIM:PHASE:HOW")
    parser.add_argument("--cache_dir", type=Path, help="where the quickstart's data and model are, or are made")
    parser.add_argument("--output_dir", type=Path, help="keeps each run's folder; default: a temporary one")
    options = parser.parse_args(argv)
    matrix = options.cells or cells(options.victims, options.phases, options.how)
    with tempfile.TemporaryDirectory() as temporary:
        output_dir = (options.output_dir or Path(temporary)).resolve()
        inputs = quickstart.make_inputs((options.cache_dir or output_dir / "cache").resolve(), seed=0)
        held = [
            run(together, inputs, output_dir / f"{together[0].victim}_{together[0].how}_{together[0].phase}")
            for together in tqdm(runs(matrix), unit="run")
        ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
