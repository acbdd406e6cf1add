"""What a finished run did, from its files: a table, ``summary.json`` and the reward curve as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PHASES = {
    "generate": "timing/generate",
    "scoring_busy": "generate/scoring_busy_s",
    "scoring_exposed": "generate/scoring_exposed_s",
    "old_log_probs": "timing/fwd_logprobs_values_reward",
    "update": "timing/policy_train",
    "weight_sync": "timing/sync_weights",
}
REWARD = "reward/avg_raw_reward"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def execution_accuracy(export_dir: Path, step: int) -> dict[str, float]:
    """Share of evaluation responses with score 1.0 after ``step`` by split, from the rows that SkyRL dumped.

    Raises:
        FileNotFoundError: when that evaluation was not dumped.
    """
    folder = export_dir / "dumped_evals" / f"global_step_{step}_evals"
    files = [file for file in sorted(folder.glob("*.jsonl")) if file.name != "aggregated_results.jsonl"]
    if not files:
        raise FileNotFoundError(f"there is no evaluation of step {step} in {folder}")
    scores: dict[str, list[float]] = {}
    for row in (row for file in files for row in read_json_lines(file)):
        score = sum(row["score"]) if isinstance(row["score"], list) else row["score"]
        scores.setdefault(row["env_extras"]["extra_info"]["split"], []).append(score)
    return {split: sum(score >= 1.0 for score in values) / len(values) for split, values in scores.items()}


def summarize(run_dir: Path, *, split: str, seconds_total: float) -> dict[str, Any]:
    """Collect a run's figures.

    Args:
        run_dir: folder with ``logs/metrics.jsonl``, ``exports/`` and ``checkpoints/``.
        split: the evaluation split of ``eval_before`` and ``eval_after``.
        seconds_total: wall time of the whole run.

    Returns:
        The content of ``summary.json``: accuracies and rewards in [0, 1], times in seconds.
    """
    log = [line for line in read_json_lines(run_dir / "logs" / "metrics.jsonl") if REWARD in line]
    steps = int(log[-1]["trainer/global_step"])
    before = execution_accuracy(run_dir / "exports", 0)
    after = execution_accuracy(run_dir / "exports", steps)
    plot = draw_rewards(log, before[split], after[split], run_dir / "reward_curve.png")
    return {
        "steps": steps,
        "eval_before": before[split],
        "eval_after": after[split],
        "eval": {name: {"before": before[name], "after": after[name]} for name in before},
        "reward_first": log[0][REWARD],
        "reward_last": log[-1][REWARD],
        "seconds_per_phase": {name: round(sum(line[key] for line in log), 2) for name, key in PHASES.items()},
        "seconds_total": round(seconds_total, 1),
        "checkpoint": str(run_dir / "checkpoints" / f"global_step_{steps}"),
        "metrics": str(run_dir / "logs" / "metrics.jsonl"),
        "plot": str(plot),
    }


def draw_rewards(log: list[dict[str, Any]], before: float, after: float, path: Path) -> Path:
    """Draw the mean training reward of each step and the accuracy before and after as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [line["trainer/global_step"] for line in log]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(steps, [line[REWARD] for line in log], marker=".", label="mean training reward")
    axes.plot([0, steps[-1]], [before, after], "s--", label="held-out accuracy, greedy")
    axes.set(xlabel="training step", ylabel="reward, accuracy", ylim=(0, 1), title="GRPO on text-to-SQL")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def table(summary: dict[str, Any]) -> str:
    """The summary as a short text table."""
    rows = [
        ("steps", summary["steps"]),
        ("reward, first step", f"{summary['reward_first']:.3f}"),
        ("reward, last step", f"{summary['reward_last']:.3f}"),
    ]
    for name, values in summary["eval"].items():
        rows.append((f"accuracy on {name}", f"{values['before']:.3f} before, {values['after']:.3f} after"))
    rows += [(f"seconds: {name.replace('_', ' ')}", value) for name, value in summary["seconds_per_phase"].items()]
    rows += [("seconds in all", summary["seconds_total"])]
    rows += [(name, summary[name]) for name in ("checkpoint", "metrics", "plot")]
    width = max(len(str(name)) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
