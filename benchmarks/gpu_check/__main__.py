"""Every part in a process of its own with a time limit, one JSON line a figure: ``python -m benchmarks.gpu_check``.

A part or a figure that cannot be had here is a line ``{"name", "skipped"}`` with the reason. Exit status: 0 = every
figure was had and is within its bound, 1 = one is not, or a part failed, 2 = none of that, but something was skipped.
``--device cpu --small`` runs the same code on CPUs, at sizes that say nothing about speed or memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

from benchmarks.report import print_skipped

LIMITS = {"attention": 70, "sharing": 110, "liger": 90, "logprobs": 70, "zero": 90, "ipc": 40}
"""Seconds that a part may take; 470 together."""


def missing(part: str) -> str | None:
    """Why a part cannot run with what is installed; None = it can."""
    for module in import_module(f"benchmarks.gpu_check.{part}").NEEDS:
        if find_spec(module) is None:
            return f"there is no module {module}"
    return None


def run_part(part: str, device: str, *, small: bool) -> tuple[bool, bool]:
    """Start a part and print its lines; whether all is well, and whether something was skipped."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--measure", part, "--device", device]
    process = subprocess.Popen([*command, *(["--small"] if small else [])], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=LIMITS[part])
        problem = None if process.returncode in (0, 1) else f"it ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        problem = f"it took more than {LIMITS[part]} s"
    skipped, ok = False, process.returncode == 0
    for text in output.splitlines():
        if text.startswith("{"):
            print(text, flush=True)
            skipped = skipped or "skipped" in json.loads(text)
    if problem is not None:
        print(json.dumps({"name": f"gpu_check/{part}", "ok": False, "failed": problem}), flush=True)
    return ok, skipped


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: does it run?")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS), help="which ones")
    parser.add_argument("--measure", choices=LIMITS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.measure is not None:
        held = import_module(f"benchmarks.gpu_check.{args.measure}").measure(args.device, small=args.small)
        return 0 if all(held) else 1
    all_well, any_skipped = True, False
    without = "there is no GPU" if args.device == "cuda" and no_gpu() else None
    for part in args.parts:
        reason = without if without is not None else missing(part)
        if reason is not None:
            print_skipped(f"gpu_check/{part}", reason)
            any_skipped = True
            continue
        ok, skipped = run_part(part, args.device, small=args.small)
        all_well, any_skipped = all_well and ok, any_skipped or skipped
    return 1 if not all_well else 2 if any_skipped else 0


if __name__ == "__main__":
    sys.exit(main())
