"""Liger on and off: an update's gradients and log-probs, with shared prompts and log-probs from hidden states."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu_check.models import gradients, log_probs, qwen3, relative_distance
from benchmarks.packing import Engine
from benchmarks.report import print_line
from benchmarks.zorro import Case, register_loss, rollouts_of, update
from integrations.arctic_rl.server.liger import apply_liger
from integrations.arctic_rl.zorro.attention import register_shared_attention

NEEDS = ("liger_kernel", "triton")
BOUND = 2.0
"""Distance from float32 over that of the model without Liger."""
CPU_BOUND = 1e-4
"""In the interpreter both are float32, and the distance itself is bound."""
REPEATS = 3


def measure(device: str, *, small: bool) -> list[bool]:
    """On CPUs in Triton's interpreter."""
    if device == "cpu":
        from benchmarks.gpu_check.interpreter import use_interpreter

        use_interpreter()
    shape = "tiny" if small else "0.6B"
    case = Case(12, 4, 2, prompts=2) if small else Case(1024, 128, 8)
    register_loss()
    plain = qwen3(shape, device, torch.float32, register_shared_attention())
    batch = rollouts_of(case, plain.config.vocab_size)
    exact = _run(plain, case, batch, device, 0)
    narrow = torch.bfloat16 if device == "cuda" else torch.float32
    ours = copy.deepcopy(plain)
    off = _run(plain.to(narrow), case, batch, device, REPEATS)
    del plain
    apply_liger(ours, device)
    on = _run(ours.to(narrow), case, batch, device, REPEATS)
    held = []
    for name in ("gradients", "log_probs"):
        distances = [relative_distance(result[name], exact[name]) for result in (on, off)]
        ratio, bound = (distances[0], CPU_BOUND) if device == "cpu" else (distances[0] / distances[1], BOUND)
        more = {"distance": float(f"{distances[0]:.2e}"), "distance_off": float(f"{distances[1]:.2e}")}
        held.append(print_line(f"gpu_check/liger_{name}", ratio, bound, "max", model=f"Qwen3-{shape}", **more))
    more = {f"{key}_{name}": result[key] for name, result in (("on", on), ("off", off)) for key in ("seconds", "mib")}
    print_line("gpu_check/liger_speedup", off["seconds"] / on["seconds"], None, "none", **case.named(), **more)
    return held


def _run(model: torch.nn.Module, case: Case, batch: dict[str, torch.Tensor], device: str, repeats: int) -> dict:
    """Gradients, log-probs, median seconds of an update after an untimed one, and its peak of memory."""
    engine, seconds, mib = Engine(model), [], 0
    for repeat in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        update(engine, batch, share=True, budget=max(case.shared_tokens, case.lengths[0]), device=device)
        if device == "cuda":
            torch.cuda.synchronize()
            mib = torch.cuda.max_memory_allocated() >> 20
        if repeat or not repeats:
            seconds.append(time.perf_counter() - start)
    result: dict[str, Any] = {
        "gradients": gradients(model),
        "seconds": round(statistics.median(seconds), 4),
        "mib": mib,
    }
    model.zero_grad()
    return result | {"log_probs": {"log_probs": log_probs(model, batch, device, pack=True).cpu()}}
