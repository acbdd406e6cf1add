"""What sharing prompts saves: ``python -m benchmarks.zorro``.

Updates (forward, log-probs, loss, backward through ``run_pipeline``) of groups of n rollouts of R tokens to prompts of
P tokens, with each prompt computed once for its group and, in turn, with rows packed end to end. Both ways have the
same token budget, that of the shared rows, and take log-probs of the responses alone, so the LM head does the same.

- speed-up over the ratio of floating-point operations (linear layers, attention and head, counted for both ways): at
  least 0.93 where prompts are long; where they are short, and where nothing can be shared, the speed-up itself at
  least 0.95. The ratio of token counts is printed beside it;
- peak memory of an update beyond weights and gradients, in one micro-batch, each way in a process of its own: its
  ratio at least 0.8 of the ratio of token counts;
- time against n at fixed P and R, against a + b (P + nR); ``--plot FILE`` draws it;
- the speed-up of four layers of Qwen3-0.6B's shape with its vocabulary, once, reported.

Times are processor times of one thread, unless ``--threads`` says otherwise (then of the wall clock), medians of
ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.packing import Engine
from benchmarks.report import at_least, print_line
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.processors.pipeline import run_pipeline
from integrations.arctic_rl.zorro.attention import register_shared_attention
from integrations.arctic_rl.zorro.cost import cost_model, group_cost
from integrations.arctic_rl.zorro.groups import RowGroup, own_groups
from integrations.arctic_rl.zorro.layout import num_shared_tokens

LONG_BOUND, SHORT_BOUND, MEMORY_BOUND = 0.93, 0.95, 0.8
SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 8192, "intermediate_size": 1536}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True}
QWEN = {"hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 151936, "intermediate_size": 3072}
QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """Groups of equal size."""

    prompt: int
    """P, tokens."""
    response: int
    """R, tokens."""
    rollouts: int
    """n."""
    prompts: int = 1
    """Groups."""

    @property
    def groups(self) -> list[RowGroup]:
        rows = np.arange(self.prompts * self.rollouts).reshape(self.prompts, -1).tolist()
        shared = self.prompt + (self.response if self.rollouts == 1 else 0)
        return [RowGroup(tuple(members), shared) for members in rows]

    @property
    def lengths(self) -> list[int]:
        return [self.prompt + self.response] * (self.prompts * self.rollouts)

    @property
    def shared_tokens(self) -> int:
        return sum(num_shared_tokens(group, self.lengths) for group in self.groups)

    @property
    def token_ratio(self) -> float:
        return sum(self.lengths) / self.shared_tokens

    def flop_ratio(self, model: torch.nn.Module) -> float:
        """Operations of an update without sharing over those with it."""
        cost = cost_model(model.config)
        scored = [self.response] * len(self.lengths)
        apart, together = (
            sum(group_cost(cost, group, self.lengths, scored) for group in groups)
            for groups in (own_groups(self.lengths), self.groups)
        )
        return apart / together

    def named(self) -> dict[str, int]:
        return {"P": self.prompt, "R": self.response, "n": self.rollouts, "prompts": self.prompts}


LONG = (Case(1024, 64, 8), Case(2048, 128, 16))
SHORT = (Case(32, 512, 4, prompts=2), Case(512, 128, 1, prompts=8))
CURVE = tuple(Case(512, 64, n) for n in (1, 2, 4, 8, 16, 32))


def small_model(shape: dict[str, Any]) -> torch.nn.Module:
    """A random Qwen3 in float32."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=8192)
    return AutoModelForCausalLM.from_config(config, attn_implementation=register_shared_attention())


def rollouts_of(case: Case, vocab_size: int) -> dict[str, torch.Tensor]:
    """An update's batch."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab_size, (case.prompts, case.prompt), generator=generator)
    prompts = prompts.repeat_interleave(case.rollouts, dim=0)
    responses = torch.randint(0, vocab_size, (len(prompts), case.response), generator=generator)
    return {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.ones(len(prompts), case.prompt + case.response, dtype=torch.int64),
        "prompts": prompts,
        "responses": responses,
        "response_mask": torch.ones_like(responses),
        "advantages": torch.randn(responses.shape, generator=generator),
    }


def update(engine: Engine, batch: dict[str, torch.Tensor], *, share: bool, budget: int, device: str = "cpu") -> float:
    """Forward and backward of a batch, gradients left on the model; its loss."""
    if device == "cpu":
        attention = register_shared_attention() if share else attention_implementation(device)
        engine.module.set_attn_implementation(attention)
    engine.module.zero_grad()
    meta = {
        "temperature": 1.0,
        "zorro_train_enable": share,
        "zorro_self_check": False,
        "response_logprobs_only": True,
        "batch_num_tokens": batch["response_mask"].numel(),
        "global_batch_size": len(batch["input_ids"]),
        "dp_size": 1,
    }
    processing = {"loss_fn": "benchmark_policy_gradient"}
    return run_pipeline(engine, (), batch, meta, processing, device, max_tokens_per_mb=budget)["avg_loss"]


def policy_gradient(
    model_outputs: Any, batch: dict, meta: dict, config: Any, device: Any
) -> tuple[torch.Tensor, dict]:
    """The plainest loss, which costs nothing beside the model."""
    terms = -model_outputs["logprobs"] * batch["advantages"] * batch["loss_mask"]
    return terms.sum() / meta["batch_num_tokens"], {}


def register_loss() -> None:
    from integrations.arctic_rl.processors.registry import register_loss_fn

    register_loss_fn("benchmark_policy_gradient")(policy_gradient)


def seconds_of(engine: Engine, batch: dict[str, torch.Tensor], *, share: bool, budget: int) -> tuple[float, float]:
    """Processor and wall-clock seconds of an update."""
    cpu, wall = time.process_time(), time.perf_counter()
    update(engine, batch, share=share, budget=budget)
    return time.process_time() - cpu, time.perf_counter() - wall


def speed_up(engine: Engine, case: Case, repeats: int, progress: tqdm) -> dict[str, Any]:
    """Time without sharing over time with it."""
    batch = rollouts_of(case, engine.module.config.vocab_size)
    budget = max(case.shared_tokens, case.lengths[0])
    shared, apart = [], []
    for _ in range(repeats):
        progress.set_description(f"P={case.prompt} R={case.response} n={case.rollouts}")
        shared.append(seconds_of(engine, batch, share=True, budget=budget))
        apart.append(seconds_of(engine, batch, share=False, budget=budget))
        progress.update()
    ratios = [[a / s for a, s in zip(*times, strict=True)] for times in zip(apart, shared, strict=True)]
    by_cpu, by_wall = (statistics.median(ratio[clock] for ratio in ratios) for clock in (0, 1))
    return {
        "speedup": by_cpu if torch.get_num_threads() == 1 else by_wall,
        "speedup_cpu": round(by_cpu, 3),
        "speedup_wall": round(by_wall, 3),
        "flop_ratio": round(case.flop_ratio(engine.module), 3),
        "token_ratio": round(case.token_ratio, 3),
        "shared_s": round(min(cpu for cpu, _ in shared), 3),
        "unshared_s": round(min(cpu for cpu, _ in apart), 3),
        "budget": budget,
    }


def same_update(engine: Engine, case: Case) -> None:
    """Both ways give the same loss and gradient, or an error."""
    batch = rollouts_of(case, engine.module.config.vocab_size)
    losses, gradients = [], []
    for share in (True, False):
        losses.append(update(engine, batch, share=share, budget=sum(case.lengths)))
        gradients.append(engine.module.model.embed_tokens.weight.grad)
    if abs(losses[0] - losses[1]) > 1e-5 * abs(losses[1]) + 1e-6:
        raise AssertionError(f"the losses differ: {losses}")
    if (gradients[0] - gradients[1]).norm() > 1e-5 * gradients[1].norm():
        raise AssertionError("the gradients differ")


def peak_bytes(shape: dict[str, Any], case: Case, share: bool) -> int:
    """Highest resident memory of an update in one micro-batch, above that before it, in a process of its own.

    The larger of two: a machine short of memory takes pages away meanwhile, never the other way round.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_bytes_here, (shape, case, share))


def _peak_bytes_here(shape: dict[str, Any], case: Case, share: bool) -> int:
    torch.set_num_threads(1)
    register_loss()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 1 << 16)
    engine = Engine(small_model(shape))
    vocab_size = shape["vocab_size"]
    update(engine, rollouts_of(Case(16, 16, 2), vocab_size), share=share, budget=1 << 40)
    batch = rollouts_of(case, vocab_size)
    engine.module.zero_grad = lambda: None
    peaks = []
    for _ in range(2):
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        update(engine, batch, share=share, budget=1 << 40)
        peaks.append(_status("VmHWM") - before)
    return max(peaks)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def curve(engine: Engine, repeats: int, progress: tqdm) -> dict[str, Any]:
    """Seconds with sharing by n, and the best line through them in the number of tokens."""
    best = dict.fromkeys(CURVE, float("inf"))
    for _ in range(repeats):
        for case in CURVE:
            progress.set_description(f"n={case.rollouts}")
            batch = rollouts_of(case, engine.module.config.vocab_size)
            budget = max(case.shared_tokens, case.lengths[0])
            best[case] = min(best[case], seconds_of(engine, batch, share=True, budget=budget)[0])
            progress.update()
    tokens = np.array([case.shared_tokens for case in CURVE], dtype=float)
    seconds = np.array([best[case] for case in CURVE])
    slope, start = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    line = start + slope * tokens
    apart = CURVE[3]
    batch = rollouts_of(apart, engine.module.config.vocab_size)
    alone = seconds_of(engine, batch, share=False, budget=apart.shared_tokens)[0]
    return {
        "n": [case.rollouts for case in CURVE],
        "seconds": seconds.round(4).tolist(),
        "tokens": tokens.astype(int).tolist(),
        "line": line.round(4).tolist(),
        "ms_per_token": round(1e3 * slope, 4),
        "largest_deviation": round(float(np.abs(seconds / line - 1).max()), 4),
        "unshared_seconds_per_rollout": round(alone / apart.rollouts, 4),
        "P": CURVE[0].prompt,
        "R": CURVE[0].response,
    }


def draw(path: Path, measured: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Time against n, and speed-ups beside their limits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    n = np.array(measured["n"])
    left.plot(n, measured["seconds"], "o", label="shared, measured")
    left.plot(n, measured["line"], label="a + b (P + nR)")
    left.plot(n, n * measured["unshared_seconds_per_rollout"], "--", color="grey", label="unshared, from n = 8")
    left.set(xlabel="rollouts n of one prompt", ylabel="processor seconds of an update")
    left.set(title=f"P = {measured['P']}, R = {measured['R']}", yscale="log", xscale="log")
    left.set_xticks(n, [str(value) for value in n])
    left.legend()
    names = [f"P={r['P']}\nR={r['R']}\nn={r['n']}" for r in results]
    place = np.arange(len(results))
    for offset, key, label in (
        (-0.25, "speedup", "speed-up"),
        (0, "flop_ratio", "operations"),
        (0.25, "token_ratio", "tokens"),
    ):
        right.bar(place + offset, [result[key] for result in results], 0.25, label=label)
    right.set_xticks(place, names)
    right.set(ylabel="unshared / shared", title="Update, forward and backward")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zorro", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=at_least(1), default=3, help="timings of both ways, in turn")
    parser.add_argument(
        "--threads", type=at_least(1), default=1, help="threads of torch; 1 = processor time is measured"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--small", action="store_true", help="short rows, without bounds: does it run?")
    parser.add_argument("--plot", type=Path, help="draw the figures to this file")
    return parser.parse_args(argv)


PARTS = ("speed", "memory", "curve", "qwen")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    register_loss()
    try:
        return run(args)
    finally:
        torch.set_num_threads(before)


def run(args: argparse.Namespace) -> int:
    long, short = ((Case(48, 8, 3),), (Case(8, 16, 2),)) if args.small else (LONG, SHORT)
    shape = SMALL | ({"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256} if args.small else {})
    engine = Engine(small_model(shape))
    same_update(engine, Case(40, 8, 3, prompts=2))
    ok: list[bool] = []
    results: list[dict[str, Any]] = []
    measured: dict[str, Any] | None = None

    def bounded(name: str, ratio: float, bound: float, **more: Any) -> None:
        small = args.small
        ok.append(print_line(name, ratio, None if small else bound, "none" if small else "min", **more))

    with tqdm(file=sys.stderr) as progress:
        if "speed" in args.parts:
            for case in (*long, *short):
                result = speed_up(engine, case, args.repeats, progress)
                results.append(case.named() | result)
                speed = result.pop("speedup")
                if case in long:
                    bounded(
                        "zorro/speedup_over_flop_ratio",
                        speed / result["flop_ratio"],
                        LONG_BOUND,
                        **case.named(),
                        **result,
                    )
                else:
                    bounded("zorro/speed_where_little_is_shared", speed, SHORT_BOUND, **case.named(), **result)
        if "memory" in args.parts:
            for case in long:
                progress.set_description("memory")
                apart, together = (peak_bytes(shape, case, share) for share in (False, True))
                more = {
                    "shared_mib": together >> 20,
                    "unshared_mib": apart >> 20,
                    "token_ratio": round(case.token_ratio, 3),
                }
                memory_ratio = apart / together
                more["memory_ratio"] = round(memory_ratio, 3)
                bounded(
                    "zorro/memory_over_token_ratio",
                    memory_ratio / case.token_ratio,
                    MEMORY_BOUND,
                    **case.named(),
                    **more,
                )
        if "curve" in args.parts and not args.small:
            measured = curve(engine, args.repeats, progress)
            print_line("zorro/curve", measured["largest_deviation"], None, "none", **measured)
        if "qwen" in args.parts and not args.small:
            qwen = Engine(small_model(QWEN))
            result = speed_up(qwen, Case(1024, 64, 8), 1, progress)
            speed = result.pop("speedup")
            print_line("zorro/qwen3_layers", speed / result["flop_ratio"], None, "none", model=QWEN, **result)
    if args.plot is not None and measured is not None and results:
        draw(args.plot, measured, results)
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
