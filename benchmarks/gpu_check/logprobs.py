"""Log-probs in tiles from hidden states against full ones at Qwen's vocabulary: agreement, time and peak memory."""

from __future__ import annotations

import time

import torch

from benchmarks.logprobs import AGREEMENT, PEAK_BOUND, TIME_BOUND, Case, run_once, tensors_of
from benchmarks.report import print_line, print_skipped

NEEDS = ()
REPEATS = 3


def measure(device: str, *, small: bool) -> list[bool]:
    """In float32; hidden states [T, H] and LM head [V, H]."""
    tokens, vocab, hidden = (64, 500, 16) if small else (8192, 151_936, 1024)
    case = Case(tokens=tokens, vocab=vocab, hidden=hidden, threads=1, repeats=REPEATS, peak_gib=1.0)
    states, head, targets, gradient = tensors_of(case, tokens)
    states, head = (value.detach().to(device).requires_grad_() for value in (states, head))
    tensors = (states, head, targets.to(device), gradient.to(device))
    seconds: dict[str, list[float]] = {"none": [], "memory": []}
    peaks, results = {}, {}
    for repeat in range(REPEATS + 1):
        for mode in seconds:
            states.grad = head.grad = None
            before = _start(device)
            start = time.perf_counter()
            values = run_once(case, mode, tensors)
            _synchronize(device)
            if repeat:
                seconds[mode].append(time.perf_counter() - start)
            peaks[mode] = _peak(device) - before - 4 * (states.numel() + head.numel())
            results[mode] = [value.clone() for value in values]
            del values
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(results["memory"], results["none"], strict=True)]
    shape = {"tokens": tokens, "vocab": vocab, "hidden": hidden}
    name = "gpu_check/logprobs"
    held = [print_line(f"{name}_agreement", max(errors) / AGREEMENT, 1.0, "max", **shape)]
    if device == "cpu":
        print_skipped(f"{name}_time", "it is benchmarks.logprobs that measures CPUs")
        return held
    ours, full = min(seconds["memory"]), min(seconds["none"])
    times = {"seconds": round(ours, 4), "full_seconds": round(full, 4)}
    held.append(print_line(f"{name}_time", ours / full, TIME_BOUND, "max", **times, **shape))
    gib = {f"{mode}_gib": round(peak / 2**30, 3) for mode, peak in peaks.items()}
    held.append(print_line(f"{name}_peak", peaks["memory"] / 2**30, PEAK_BOUND, "max", **gib, **shape))
    return held


def _start(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
