"""Does the quickstart learn? ``python -m benchmarks.learning [--seeds 0 1 2] [--output_dir D]``

Runs the quickstart's own job, with its exact settings, once a seed, and once more at learning rate 0. Greedy execution
accuracy (score 1.0) on held-out questions must start between 0.15 and 0.5, rise by at least 0.15 with every seed, and
move by less than 0.05 at learning rate 0. Questions on databases that training never saw are reported, unbounded. The
starting model is warm-started on demonstrations of mixed quality (see ``envs.bird.synthetic.questions``), so that most
of the rise is the undoing of plausible wrong queries, not SQL learned from nothing. A few minutes a run on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import print_line
from examples import quickstart

RISE, STILL = 0.15, 0.05
START = (0.15, 0.5)


def run(output_dir: Path, seed: int, name: str, overrides: list[str]) -> dict[str, Any]:
    """One quickstart run; its summary."""
    return quickstart.run(output_dir / "cache", output_dir / name, seed=seed, overrides=overrides)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of data, model and training")
    parser.add_argument("--output_dir", type=Path, help="where runs are kept; default: a temporary folder")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        output_dir = (arguments.output_dir or Path(temporary)).resolve()
        output_dir.mkdir(parents=True, exist_ok=True)
        return measure(output_dir, arguments.seeds)


def measure(output_dir: Path, seeds: list[int]) -> int:
    """Run everything and print a line a figure; 0 when every bound holds."""
    ok = True
    for seed in seeds:
        summary = run(output_dir, seed, f"seed-{seed}", [])
        before, after = summary["eval_before"], summary["eval_after"]
        ok &= print_line("learning/start_at_least", before, START[0], "min", seed=seed)
        ok &= print_line("learning/start_at_most", before, START[1], "max", seed=seed)
        ok &= print_line("learning/rise", after - before, RISE, "min", seed=seed, before=before, after=after)
        unseen = summary["eval"][quickstart.HELD_OUT]
        rise = unseen["after"] - unseen["before"]
        print_line("learning/rise_on_unseen_databases", rise, None, "none", seed=seed, **unseen)
    still = run(output_dir, seeds[0], "still", ["trainer.policy.optimizer_config.lr=0.0"])
    moved = abs(still["eval_after"] - still["eval_before"])
    ok &= print_line("learning/moved_at_learning_rate_0", moved, STILL, "max", seed=seeds[0])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
