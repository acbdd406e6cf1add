"""What sharing prompts saves in a whole run: ``python -m benchmarks.zorro_run [--cache_dir C]``.

The quickstart's training, its prompts made long by the schemas and questions of other rows, with
``trainer.arctic_rl.use_zorro`` true and false: seconds of the update, of the old log-probs and of a step, means over
all steps but the first. Reported, unbounded: what a step saves depends on how long generation takes beside it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import at_least, print_line
from examples import quickstart
from examples.report import read_json_lines

PHASES = {
    "update": "timing/policy_train",
    "old_log_probs": "timing/fwd_logprobs_values_reward",
    "generate": "timing/generate",
    "step": "timing/step",
}
SETTINGS = {
    "trainer.train_batch_size": "8",
    "trainer.policy_mini_batch_size": "4",
    "trainer.eval_interval": "-1",
    "trainer.eval_before_train": "false",
    "trainer.max_tokens_per_microbatch": "8192",
    "generator.sampling_params.max_generate_length": "48",
}
TOKENS_LEFT_FREE = 64


def long_prompts(source: Path, target: Path, tokenizer: Any, tokens: int) -> int:
    """Write a train split whose prompts have about ``tokens`` tokens; returns the mean.

    What other rows ask comes before the question, drawn anew for every row, so that prompts differ from the start.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    rows = table.to_pylist()
    texts = [row["prompt"][-1]["content"] for row in rows]
    sizes = [len(ids) for ids in tokenizer(texts).input_ids]
    generator = random.Random(0)
    total = 0
    for row, size in zip(rows, list(sizes), strict=True):
        system = row["prompt"][0]
        before, used = [], size + TOKENS_LEFT_FREE
        while True:
            other = generator.randrange(len(texts))
            if used + sizes[other] > tokens:
                break
            before.append(texts[other])
            used += sizes[other]
        user = "\n\n".join([*before, row["prompt"][-1]["content"]])
        row["prompt"] = [system, {"role": "user", "content": user}]
        total += used
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), target)
    return total // len(rows)


def step_seconds(run_dir: Path) -> dict[str, float]:
    """Mean seconds of each phase over the steps but the first."""
    lines = [line for line in read_json_lines(run_dir / "logs" / "metrics.jsonl") if PHASES["update"] in line]
    return {name: sum(line[key] for line in lines[1:]) / len(lines[1:]) for name, key in PHASES.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zorro_run", description=__doc__.splitlines()[0])
    parser.add_argument("--cache_dir", type=Path, help="where the quickstart keeps its inputs; default: made anew")
    parser.add_argument("--prompt_tokens", type=at_least(1), default=1000, help="length of the prompts")
    parser.add_argument("--steps", type=at_least(2), default=4, help="training steps of each run")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="zorro-run-") as temporary:
        folder = Path(temporary)
        cache = (arguments.cache_dir or folder / "cache").resolve()
        data, model = quickstart.make_inputs(cache, 0)
        return measure(folder, data, model, arguments.prompt_tokens, arguments.steps)


def measure(folder: Path, data: Path, model: Path, prompt_tokens: int, steps: int) -> int:
    """Both runs, and a line for each phase."""
    from transformers import AutoTokenizer

    train = folder / "train.parquet"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = long_prompts(data / "train.parquet", train, tokenizer, prompt_tokens)
    seconds = {}
    for use_zorro in ("true", "false"):
        run_dir = folder / f"zorro-{use_zorro}"
        changes = SETTINGS | {
            "data.train_data": f"['{train}']",
            "trainer.max_prompt_length": str(prompt_tokens + TOKENS_LEFT_FREE),
            "trainer.max_training_steps": str(steps),
            "trainer.arctic_rl.use_zorro": use_zorro,
        }
        overrides = [f"{name}={value}" for name, value in changes.items()]
        quickstart.train([*quickstart.recipe(data, model, run_dir, 0), *overrides], run_dir)
        seconds[use_zorro] = step_seconds(run_dir)
    for name in PHASES:
        with_sharing, without = seconds["true"][name], seconds["false"][name]
        more = {"shared_s": round(with_sharing, 3), "unshared_s": round(without, 3), "prompt_tokens": tokens}
        print_line(f"zorro_run/{name}", without / with_sharing, None, "none", **more, rollouts=8, steps=steps - 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
