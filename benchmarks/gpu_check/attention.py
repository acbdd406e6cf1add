"""Packed rows in bfloat16: attention back ends against PyTorch's SDPA row by row, and models by attention name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.models import log_probs, qwen3
from benchmarks.report import print_line, print_skipped
from benchmarks.zorro import Case, rollouts_of
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.attention import register_attention
from integrations.arctic_rl.server.kernel_settings import ATTENTIONS, check_attention_package
from integrations.arctic_rl.zorro.attention import shared_attention
from integrations.arctic_rl.zorro.groups import own_groups
from integrations.arctic_rl.zorro.kernels import KERNELS, ScoreSettings
from integrations.arctic_rl.zorro.layout import share_rows

NEEDS = ()
BACK_ENDS = {
    "cuda": {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface", "torch_varlen": "torch"},
    "cpu": {"cpu_flash": "torch", "math": "torch"},
}
"""Back ends of a device, with the module that each needs."""
BACK_END_BOUND = 2e-2
"""Relative distance that rounding to bfloat16 explains."""
MODEL_BOUND = 2.0
"""Distance from float32 over that of SDPA in bfloat16, row by row."""


def measure(device: str, *, small: bool) -> list[bool]:
    held = []
    for name, module in BACK_ENDS[device].items():
        if find_spec(module) is None:
            print_skipped("gpu_check/attention", f"there is no module {module}", back_end=name)
            continue
        error = back_end_error(name, device, lengths=(40, 7, 1, 25) if small else (2048, 777, 1, 1301))
        held.append(print_line("gpu_check/attention", error, BACK_END_BOUND, "max", back_end=name))
    return held + models(device, small=small)


def back_end_error(name: str, device: str, *, lengths: tuple[int, ...]) -> float:
    """Largest relative distance of output and gradients of packed bfloat16 rows from SDPA in float32, row by row."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 100, mask.shape, generator=generator)
    segments = share_rows(ids.to(device), mask.to(device), own_groups(list(lengths))).segments
    heads, key_heads, width = 8, 2, 128
    shapes = [(sum(lengths), count, width) for count in (heads, key_heads, key_heads, heads)]
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        *inputs, gradient = (value.to(device, dtype) for value in values)
        inputs = [x.requires_grad_() for x in inputs]
        if dtype == torch.bfloat16:
            out = shared_attention(*inputs, segments, ScoreSettings(width**-0.5), KERNELS[name])
        else:
            out = torch.cat([_causal(*row) for row in zip(*(x.split(lengths) for x in inputs), strict=True)])
        results.append([out.detach(), *torch.autograd.grad(out, inputs, gradient.to(out.dtype))])
    return max(float((ours.float() - exact).norm() / exact.norm()) for ours, exact in zip(*results, strict=True))


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One row, [T, heads, width]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def models(device: str, *, small: bool) -> list[bool]:
    """Log-probs of a model by every attention that a recipe may name, rows packed."""
    case = Case(12, 8, 2, prompts=2) if small else Case(512, 256, 4, prompts=2)
    register_attention()
    shape = "tiny" if small else "0.6B"
    model = qwen3(shape, device, torch.float32, "sdpa")
    batch = rollouts_of(case, model.config.vocab_size)
    exact = log_probs(model, batch, device, pack=False)
    model.bfloat16()
    usual = _distance(log_probs(model, batch, device, pack=False), exact)
    held = []
    for name in ATTENTIONS[device]:
        more: dict[str, Any] = {"attention": name, "model": f"Qwen3-{shape}"}
        try:
            check_attention_package(name)
        except UnsupportedError as error:
            print_skipped("gpu_check/attention_by_name", str(error).split(";")[0], **more)
            continue
        model.set_attn_implementation(name)
        distance = _distance(log_probs(model, batch, device, pack=True), exact)
        more |= {"distance": round(distance, 6), "sdpa_distance": round(usual, 6)}
        held.append(print_line("gpu_check/attention_by_name", distance / usual, MODEL_BOUND, "max", **more))
    return held


def _distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean, in nats."""
    return float((ours - exact).abs().mean())
