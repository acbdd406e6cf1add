"""How full packed micro-batches are, what planning costs and what packing saves: ``python -m benchmarks.packing``.

Three figures, over rows of log-normal lengths:

- micro-batches against the lower bound ceil(tokens / budget), no row above a quarter of the budget: within 2%, or one;
- planning 4,096 rows against the forward and backward pass of those rows, on a model small enough to make that short;
- the padded against the packed step, forward and backward through ``run_pipeline``, over the number of tokens that the
  padded step has more. Not all of a padded step's work grows with its padding: logits mode memory and the attention of
  CPUs leave padding out, so ``work_ratio`` says how many times the multiplications of the packed step it does.

Times are processor times, on one thread unless ``--threads`` says otherwise (then they are of the wall clock), so
that a busy machine does not change the ratios. ``--plot FILE`` draws the first and the last figure.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.report import print_line
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.processors.packing import plan_micro_batches, row_lengths
from integrations.arctic_rl.processors.pipeline import run_pipeline

PLAN_BOUND, PLANNING_BOUND, STEP_BOUND = 1.02, 0.01, 0.85
MEAN_SHARE = 0.3
LAYERS_OF_PLANNED = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1280}
SHAPE_OF_PLANNED = {"width": 256, "budget": 4096}


class Engine:
    """A model called as the pipeline calls a DeepSpeed engine."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.module(*args, **inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


def small_model(hidden_size: int, num_hidden_layers: int, vocab_size: int, width: int) -> torch.nn.Module:
    """A random Qwen3 with the proportions of its family: feed-forward three times as wide, two queries to a key."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    heads = max(2, hidden_size // 64)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden_size // heads,
        max_position_embeddings=width,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention_implementation("cpu"))


def log_normal_lengths(rows: int, width: int, mean_share: float, sigma: float, seed: int) -> np.ndarray:
    """Lengths in tokens, log-normal up to ``width``, which one row has; their mean is ``mean_share`` of it."""
    values = np.random.default_rng(seed).lognormal(0.0, sigma, rows)
    low, high = 0.0, width / values.min()
    for _ in range(60):
        scale = (low + high) / 2
        too_long = np.clip(values * scale, 1, width).mean() > mean_share * width
        low, high = (low, scale) if too_long else (scale, high)
    lengths = np.clip(values * low, 1, width).round().astype(np.int64)
    lengths[lengths.argmax()] = width
    return lengths


def ragged_batch(lengths: np.ndarray, width: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """An update's batch of right-padded rows; a row's first quarter is its prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths_B1 = torch.as_tensor(lengths)[:, None]
    place = torch.arange(width)
    shape = (len(lengths), width)
    attention_mask = (place < lengths_B1).long()
    return {
        "input_ids": torch.randint(0, vocab_size, shape, generator=generator) * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": attention_mask * (place >= (lengths_B1 // 4).clamp(min=1)),
        "advantages": torch.randn(shape, generator=generator),
        "old_log_probs": torch.randn(shape, generator=generator) * 0.1 - math.log(vocab_size),
    }


def micro_batch_counts(rows: int, seeds: int) -> dict[str, Any]:
    """The worst plan of ``rows`` rows over seeds, spreads and budgets."""
    worst, over_bound, cases = 0.0, 0.0, 0
    for budget in (4096, 16384):
        for sigma in (0.4, 0.8, 1.2):
            for seed in range(seeds):
                lengths = log_normal_lengths(rows, budget // 4, MEAN_SHARE, sigma, seed)
                count = len(plan_micro_batches(lengths, budget))
                bound = math.ceil(int(lengths.sum()) / budget)
                worst = max(worst, count / max(bound + 1, PLAN_BOUND * bound))
                over_bound = max(over_bound, count / bound)
                cases += 1
    return {"rows": rows, "worst": worst, "count_over_lower_bound": round(over_bound, 4), "cases": cases}


def seconds_of(function: Callable[[], object]) -> float:
    """Processor time on one thread, else time of the wall clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def update(engine: Engine, batch: dict[str, torch.Tensor], mode: str | None, budget: int, pack: str) -> float:
    """Forward and backward of a batch, gradients left on the model; its loss.

    Args:
        pack: "packed"; "padded" = one padded micro-batch; "padded parts" = as many rows at once as fit the budget.
    """
    engine.module.zero_grad()
    meta = {
        "temperature": 1.0,
        "logits_optimization": mode,
        "batch_num_tokens": int(batch["response_mask"].sum()),
        "global_batch_size": len(batch["input_ids"]),
        "dp_size": 1,
    }
    rows, width = batch["input_ids"].shape
    rows_at_once = max(1, budget // width) if pack == "padded parts" else rows
    loss = 0.0
    for start in range(0, rows, rows_at_once):
        part = {name: values[start : start + rows_at_once] for name, values in batch.items()}
        result = run_pipeline(
            engine, (), part, meta, {"loss_fn": "grpo"}, "cpu", pack=pack == "packed", max_tokens_per_mb=budget
        )
        loss += result["avg_loss"]
    return loss


def planning(rows: int, repeats: int) -> dict[str, Any]:
    """Seconds of planning some rows, and of the step of those very rows."""
    width, budget = SHAPE_OF_PLANNED["width"], SHAPE_OF_PLANNED["budget"]
    lengths = log_normal_lengths(rows, width, MEAN_SHARE, 0.8, seed=0)
    batch = ragged_batch(lengths, width, LAYERS_OF_PLANNED["vocab_size"])
    engine = Engine(small_model(**LAYERS_OF_PLANNED, width=width))

    def plan() -> list[list[int]]:
        return plan_micro_batches(row_lengths(batch["attention_mask"]), budget)

    few = {name: values[:64] for name, values in batch.items()}
    update(engine, few, None, budget, "packed")
    return {
        "plan_s": min(seconds_of(plan) for _ in range(max(3, repeats))),
        "step_s": seconds_of(lambda: update(engine, batch, None, budget, "packed")),
        "tokens": int(lengths.sum()),
        "micro_batches": len(plan()),
    }


def work(model: torch.nn.Module, lengths: np.ndarray, *, in_layers: int, in_head: int) -> float:
    """Multiplications of a step in the model's layers, the attention of the rows as long as they are, and the LM head.

    Args:
        in_layers: positions that go through the linear layers, forward and backward (three products).
        in_head: positions that go through the LM head; mode memory repeats their product.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    layers = sum(p.numel() for p in model.model.layers.parameters())
    pairs = float((lengths.astype(np.float64) ** 2).sum()) / 2
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * 2 * pairs
    return 3 * layers * in_layers + 3.5 * attention + 4 * head * in_head


def steps(args: argparse.Namespace, progress: tqdm) -> list[dict[str, Any]]:
    """Packed and padded steps of one batch, taken in turn; every pair's losses and gradients agree."""
    lengths = log_normal_lengths(args.step_rows, args.width, MEAN_SHARE, 0.6, seed=0)
    batch = ragged_batch(lengths, args.width, args.vocab)
    engine = Engine(small_model(args.hidden, args.layers, args.vocab, args.width))
    few = {name: values[:4] for name, values in batch.items()}
    update(engine, few, None, args.budget, "packed")
    tokens, padded = int(lengths.sum()), args.step_rows * args.width
    predicted = tokens - args.step_rows
    packed_work = work(engine.module, lengths, in_layers=tokens, in_head=predicted)
    cases = [(None, "padded"), (None, "padded parts"), ("compute", "padded")]
    results = []
    for mode, against in cases:
        in_head = padded if mode == "compute" else predicted
        seconds: dict[str, list[float]] = {"packed": [], against: []}
        losses: dict[str, float] = {}
        gradients: dict[str, torch.Tensor] = {}

        def step(pack: str, mode: str | None = mode, losses: dict[str, float] = losses) -> None:
            losses[pack] = update(engine, batch, mode, args.budget, pack)

        for _ in range(args.repeats):
            for pack in (against, "packed"):
                progress.set_description(f"{mode or 'memory'}, {pack}")
                seconds[pack].append(seconds_of(lambda pack=pack, step=step: step(pack)))
                gradients[pack] = engine.module.model.embed_tokens.weight.grad
                progress.update()
        if not math.isclose(losses["packed"], losses[against], rel_tol=1e-4, abs_tol=1e-5):
            raise AssertionError(f"the losses differ: {losses}")
        if (gradients["packed"] - gradients[against]).norm() > 1e-4 * gradients["packed"].norm():
            raise AssertionError(f"the gradients of packed and {against} rows differ")
        padded_work = work(engine.module, lengths, in_layers=padded, in_head=in_head)
        results.append(
            {
                "logits_optimization": mode or "memory",
                "padded_as": against,
                "packed_s": round(min(seconds["packed"]), 3),
                "padded_s": round(min(seconds[against]), 3),
                "speedup": round(min(seconds[against]) / min(seconds["packed"]), 3),
                "token_ratio": round(padded / tokens, 3),
                "work_ratio": round(padded_work / packed_work, 3),
            }
        )
    return results


def draw(path: Path, plans: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """Micro-batches over the lower bound by rows, and speed-ups beside the token ratio."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot([plan["rows"] for plan in plans], [plan["count_over_lower_bound"] for plan in plans], marker="o")
    left.axhline(PLAN_BOUND, linestyle="--", color="grey", label=f"{PLAN_BOUND} (or one micro-batch)")
    left.set(xlabel="rows", ylabel="micro-batches / lower bound, worst case", title="First-fit decreasing")
    left.legend()
    names = [f"{result['logits_optimization']}\n{result['padded_as']}" for result in results]
    right.bar(names, [result["speedup"] for result in results], label="padded / packed time")
    token_ratio = results[0]["token_ratio"]
    right.axhline(token_ratio, color="black", label="padded / real tokens")
    right.axhline(STEP_BOUND * token_ratio, linestyle="--", color="grey", label=f"{STEP_BOUND} of it")
    right.set(ylabel="times", title="Step, forward and backward")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[500, 1000, 2000, 4096], help="rows of the plans")
    parser.add_argument("--seeds", type=int, default=5, help="plans of each kind")
    parser.add_argument("--planned-rows", type=int, default=4096, help="rows planned and then run")
    parser.add_argument("--step-rows", type=int, default=32, help="rows of the packed and the padded step")
    parser.add_argument("--width", type=int, default=256, help="tokens of the longest of them")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of one of their micro-batches")
    parser.add_argument("--hidden", type=int, default=512, help="width of their model")
    parser.add_argument("--layers", type=int, default=4, help="layers of their model")
    parser.add_argument("--vocab", type=int, default=2048, help="its vocabulary: LM head and layers as in a 7B model")
    parser.add_argument("--repeats", type=int, default=3, help="timings of every kind; the shortest counts")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; 1 = processor time is measured")
    parser.add_argument("--plot", type=Path, help="draw the figures to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        return run(args)
    finally:
        torch.set_num_threads(before)


def run(args: argparse.Namespace) -> int:
    total = len(args.rows) + 1 + 3 * 2 * args.repeats
    ok, plans = [], []
    with tqdm(total=total, file=sys.stderr) as progress:
        for rows in args.rows:
            progress.set_description(f"plans of {rows} rows")
            plan = micro_batch_counts(rows, args.seeds)
            plans.append(plan)
            more = {name: value for name, value in plan.items() if name != "worst"}
            ok.append(print_line("packing/micro_batches", plan["worst"], 1.0, "max", **more))
            progress.update()
        progress.set_description(f"step of {args.planned_rows} planned rows")
        planned = planning(args.planned_rows, args.repeats)
        progress.update()
        ok.append(
            print_line(
                "packing/planning",
                planned["plan_s"] / planned["step_s"],
                PLANNING_BOUND,
                "max",
                rows=args.planned_rows,
                tokens=planned["tokens"],
                micro_batches=planned["micro_batches"],
                plan_ms=round(1e3 * planned["plan_s"], 2),
                step_s=round(planned["step_s"], 2),
                model=LAYERS_OF_PLANNED,
            )
        )
        results = steps(args, progress)
    model = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "vocab_size": args.vocab}
    for result in results:
        bound = None if result["padded_as"] == "padded parts" else STEP_BOUND
        ok.append(
            print_line(
                "packing/step",
                result["speedup"] / result["token_ratio"],
                bound,
                "none" if bound is None else "min",
                **result,
                rows=args.step_rows,
                width=args.width,
                budget=args.budget,
                model=model,
                threads=args.threads,
            )
        )
    if args.plot is not None:
        draw(args.plot, plans, results)
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
