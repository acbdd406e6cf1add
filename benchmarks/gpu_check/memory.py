"""Memory of a training rank on its device: what loading takes, and what is left when it gives it away."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.report import print_line, print_skipped
from integrations.arctic_rl.server.specs import TrainingSpec

LOADING_BOUND = 1.3
"""Most bytes on the device while a model is sharded over one rank, over those of its weights in bfloat16."""
ASLEEP_BOUND = 0.05
"""Bytes that stay on the device of a rank that sleeps, over those before."""


def measure_memory(model: Any, spec: TrainingSpec) -> list[bool]:
    """Load a model that is on the host, take one step, sleep, and wake with the same bits.

    Args:
        model: in float32, and is changed.
        spec: of ZeRO stage 3; what is measured is in bfloat16.
    """
    from integrations.arctic_rl.server.deepspeed_config import deepspeed_config
    from integrations.arctic_rl.server.engine import initialize_engine
    from integrations.arctic_rl.server.model_device import partition
    from integrations.arctic_rl.server.offload import PARTS, OffloadedStates

    spec = dataclasses.replace(spec, dtype="bfloat16")
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    vocabulary, on_gpu = model.config.vocab_size, spec.device == "cuda"
    held = []
    start = _restart_peak(on_gpu)
    partition(model, deepspeed_config(spec), dtype=spec.dtype, device=spec.device)
    if on_gpu:
        ratio = (torch.cuda.max_memory_allocated() - start) / weights
        held.append(print_line("gpu_check/loading", ratio, LOADING_BOUND, "max", weights_mib=weights >> 20))
    else:
        print_skipped("gpu_check/loading", "PyTorch counts the memory of GPUs alone")
    engine, optimizer = initialize_engine(model, spec)
    rows = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(1)).to(spec.device)
    engine.backward(engine(input_ids=rows, labels=rows, use_cache=False).loss, scale_wrt_gas=False)
    engine.step()
    before, taken = _bits(engine, optimizer), _allocated(on_gpu) - start
    states = OffloadedStates(engine, spec.zero_stage, spec.device)
    states.release(PARTS)
    asleep = _allocated(on_gpu) - start
    if on_gpu:
        held.append(print_line("gpu_check/asleep", asleep / taken, ASLEEP_BOUND, "max", taken_mib=taken >> 20))
    states.restore(PARTS)
    after = _bits(engine, optimizer)
    changed = sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True)) / len(before)
    held.append(print_line("gpu_check/awake_again", changed, 0.0, "max", tensors=len(before)))
    engine.destroy()
    return held


def _bits(engine: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies, on the host, of what ZeRO stage 3 trains and steps."""
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)]
    kept = [*(parameter.ds_tensor for parameter in engine.module.parameters()), *engine.module.buffers(), *state]
    return [value.detach().to("cpu", copy=True) for value in kept]


def _restart_peak(on_gpu: bool) -> int:
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return _allocated(on_gpu)


def _allocated(on_gpu: bool) -> int:
    return torch.cuda.memory_allocated() if on_gpu else 0
