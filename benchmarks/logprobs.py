"""Log-probs in tiles from hidden states against full ones, forward and backward: ``python -m benchmarks.logprobs``.

``logits_optimization`` none holds the logits [T, V] in float32, and as large a log-softmax and gradient; compute reads
existing logits in chunks; memory multiplies tiles of logits, and once more in backward: four products to three. Two
shapes are timed. T=8,192 and V=151,936 is the full size, with a hidden width for which none fits 24 GiB; there the
large tensors' way through memory is much of the time. The wide shape has fewer tokens of a width of 1,024, so that the
products are.

Times are processor times of one thread unless ``--threads`` says otherwise (then they are of the wall clock), of ways
taken in turn, and the shortest counts. Peak memory is the growth of the resident set of a process of its own, less the
gradients, with entropy, at stated ``logits_optimization_peak_mem_size_in_gib``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import print_line
from integrations.arctic_rl.processors.logprobs import (
    chunk_rows,
    logprobs_and_entropy,
    logprobs_and_entropy_chunked,
    logprobs_and_entropy_from_hidden,
    tile_shape,
)
from integrations.arctic_rl.processors.outputs import LogitsSettings

TIME_BOUND, PEAK_BOUND, AGREEMENT = 1.4, 1.5, 1e-5
LOGITS_HELD_BY_NONE = 3.2


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    tokens: int
    vocab: int
    hidden: int
    threads: int
    repeats: int
    modes: tuple[str, ...] = ("none", "memory", "compute")
    """Timed in turn; with "none" the others are compared with it."""
    entropy: bool = False
    peak_gib: float | None = None
    """``logits_optimization_peak_mem_size_in_gib``; None = the default."""


def tensors_of(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [T, H], LM head [V, H], targets [T] and the gradient of the log-probs [T]; logits are around 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, case.hidden, generator=generator)
    weight = torch.empty(case.vocab, case.hidden).normal_(generator=generator).div_(case.hidden**0.5)
    targets = torch.randint(0, case.vocab, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(tokens, generator=generator)


def run_once(case: Case, mode: str, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Forward and backward; log-probs, and the gradients of hidden states and LM head."""
    hidden, weight, targets, gradient = tensors
    hidden.grad = weight.grad = None
    size = LogitsSettings(logits_optimization_peak_mem_size_in_gib=case.peak_gib).peak_gib(hidden.device.type)
    if mode == "memory":
        tile = tile_shape(len(targets), case.vocab, size)
        values = logprobs_and_entropy_from_hidden(hidden, weight, None, targets, 1.0, entropy=case.entropy, tile=tile)
    elif mode == "compute":
        chunk = chunk_rows(case.vocab, size)
        values = logprobs_and_entropy_chunked(hidden @ weight.T, targets, 1.0, entropy=case.entropy, chunk=chunk)
    else:
        values = logprobs_and_entropy(hidden @ weight.T, targets, 1.0, entropy=case.entropy)
    logprobs, entropy = values
    del values
    loss = logprobs @ gradient if entropy is None else logprobs @ gradient + entropy @ gradient
    loss.backward()
    return [logprobs.detach(), hidden.grad, weight.grad]


def measure(case: Case) -> dict[str, Any]:
    """Seconds of every mode, how far it is from mode none (log-probs in nats, gradients relative), and peak GiB."""
    torch.set_num_threads(case.threads)
    clock = time.process_time if case.threads == 1 else time.perf_counter
    small = tensors_of(case, 4)
    for mode in case.modes:
        run_once(case, mode, small)
    del small
    tensors = tensors_of(case, case.tokens)
    gradients_gib = 4 * (tensors[0].numel() + tensors[1].numel()) / 2**30
    seconds: dict[str, list[float]] = {mode: [] for mode in case.modes}
    errors: dict[str, list[float]] = {}
    exact = None
    before = resident_gib(reset_peak=True)
    for _ in range(case.repeats):
        for mode in case.modes:
            start = clock()
            values = run_once(case, mode, tensors)
            seconds[mode].append(clock() - start)
            if mode == "none":
                exact = values
            elif exact is not None:
                gradients = [float((a - b).norm() / b.norm()) for a, b in zip(values[1:], exact[1:], strict=True)]
                errors[mode] = [float((values[0] - exact[0]).abs().max()), *gradients]
            del values
    return {
        "seconds": {mode: min(times) for mode, times in seconds.items()},
        "errors": errors,
        "peak_gib": resident_gib(peak=True) - before - gradients_gib,
    }


def resident_gib(*, reset_peak: bool = False, peak: bool = False) -> float:
    """This process's resident set now, or at its highest since the last reset (Linux)."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 2**20


def in_a_process(case: Case) -> dict[str, Any]:
    run = [sys.executable, "-m", "benchmarks.logprobs", "--measure", json.dumps(asdict(case))]
    result = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout)


def check_memory(tokens: int, vocab: int) -> None:
    """Raises SystemExit where mode none would not fit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) / 2**20
    needed = LOGITS_HELD_BY_NONE * tokens * vocab * 4 / 2**30
    if needed > free:
        raise SystemExit(
            f"full log-probs of {tokens} tokens need about {needed:.1f} GiB, but {free:.1f} GiB are free; pass fewer "
            "--tokens"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprobs", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="positions of the full-size shape")
    parser.add_argument("--hidden", type=int, default=64, help="its hidden width")
    parser.add_argument("--wide-tokens", type=int, default=1024, help="positions of the wide shape")
    parser.add_argument("--wide-hidden", type=int, default=1024, help="its hidden width")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary of both")
    parser.add_argument("--peaks", type=float, nargs="+", default=[0.25, 1.0], help="GiB allowed, measured one by one")
    parser.add_argument("--repeats", type=int, default=2, help="timings of every way; the shortest counts")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; 1 = processor time is measured")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def time_lines(case: Case, measured: dict[str, Any]) -> list[bool]:
    seconds, ok = measured["seconds"], []
    shape = {"tokens": case.tokens, "vocab": case.vocab, "hidden": case.hidden, "threads": case.threads}
    for mode in ("memory", "compute"):
        bound = TIME_BOUND if mode == "memory" else None
        ok.append(
            print_line(
                "logprobs/time",
                seconds[mode] / seconds["none"],
                bound,
                "none" if bound is None else "max",
                logits_optimization=mode,
                seconds=round(seconds[mode], 3),
                full_seconds=round(seconds["none"], 3),
                **shape,
            )
        )
        names = ("logprobs", "hidden_gradient", "head_gradient")
        errors = dict(zip(names, measured["errors"][mode], strict=True))
        worst = max(errors.values()) / AGREEMENT
        more = {name: float(f"{value:.1e}") for name, value in errors.items()}
        ok.append(print_line("logprobs/agreement", worst, 1.0, "max", logits_optimization=mode, **more, **shape))
    return ok


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.measure is not None:
        given = json.loads(args.measure)
        print(json.dumps(measure(Case(**given | {"modes": tuple(given["modes"])}))))
        return 0
    check_memory(max(args.tokens, args.wide_tokens), args.vocab)
    common = {"vocab": args.vocab, "threads": args.threads}
    timed = [
        Case(tokens=args.tokens, hidden=args.hidden, repeats=args.repeats, **common),
        Case(tokens=args.wide_tokens, hidden=args.wide_hidden, repeats=args.repeats, **common),
    ]
    ok: list[bool] = []
    with tqdm(total=len(timed) + len(args.peaks), file=sys.stderr) as progress:
        for case in timed:
            progress.set_description(f"times, {case.tokens} tokens of width {case.hidden}")
            ok += time_lines(case, in_a_process(case))
            progress.update()
        for size in args.peaks:
            progress.set_description(f"peak memory, {size} GiB allowed")
            shape = {"tokens": args.tokens, "hidden": args.hidden}
            case = Case(**shape, **common, repeats=1, modes=("memory",), entropy=True, peak_gib=size)
            peak = in_a_process(case)["peak_gib"]
            more = {"peak_gib": round(peak, 3), "allowed_gib": size, "vocab": args.vocab, **shape}
            ok.append(print_line("logprobs/peak", peak / size, PEAK_BOUND, "max", **more))
            progress.update()
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
