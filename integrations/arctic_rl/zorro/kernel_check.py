"""An attention back end of a library against ours in float32, once before it is used.

What the whole model's log-probs show of it in 16 bits is blurred by every layer's rounding.
"""

import functools

import torch

from ..errors import UnsupportedError
from .groups import RowGroup
from .kernels import KERNELS, Kernel, ScoreSettings, choose_kernel
from .layout import share_rows

__all__ = ["KERNEL_BOUND", "checked_kernel", "kernel_error"]

KERNEL_BOUND = 2e-2
"""Norm of a difference over the norm of the right result: several times what rounding to bfloat16 explains."""

_LENGTHS = (700, 513, 640, 301, 1)
_GROUPS = (RowGroup((0, 1, 2), 512), RowGroup((3,), 301), RowGroup((4,), 1))
_HEADS = (8, 2, 2, 8)
"""Of queries, keys, values and the output's gradient."""


@functools.cache
def checked_kernel(
    device_type: str, dtype: torch.dtype, settings: ScoreSettings, *, head_dims: tuple[int, int]
) -> Kernel:
    """:func:`choose_kernel`, whose choice is compared with the plain softmax where it is not our own code.

    Raises:
        UnsupportedError: it cannot be imported, or its output or gradients are not those of the softmax.
    """
    kernel = choose_kernel(device_type, dtype, settings, head_dims=head_dims)
    if not kernel.looping:
        try:
            error = kernel_error(kernel, dtype, settings, head_dims, device_type)
        except ImportError as failed:
            raise UnsupportedError(
                f"attention back end {kernel.name!r} is installed and cannot be imported ({failed}): install its "
                "package for this PyTorch, or remove it, and PyTorch's own takes its place"
            ) from failed
        if not error <= KERNEL_BOUND:
            raise UnsupportedError(
                f"attention back end {kernel.name!r} is off by {error:.2g} of its results' norm here (allowed: "
                f"{KERNEL_BOUND}): install its package for this PyTorch and this GPU, or remove it; or write "
                "trainer.arctic_rl.use_zorro=false"
            )
    return kernel


def kernel_error(
    kernel: Kernel, dtype: torch.dtype, settings: ScoreSettings, head_dims: tuple[int, int], device: str
) -> float:
    """Largest relative distance of a back end's output and gradients from the plain softmax's in float32, over random
    rows of which some share a prefix."""
    from .attention import shared_attention

    generator = torch.Generator().manual_seed(0)
    widths = (head_dims[0], *head_dims, head_dims[1])
    results = []
    with torch.inference_mode(False), torch.enable_grad():
        ids = torch.arange(max(_LENGTHS)).repeat(len(_LENGTHS), 1)
        mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
        segments = share_rows(ids.to(device), mask.to(device), _GROUPS).segments
        values = [
            torch.randn(segments.num_tokens, heads, width, generator=generator).to(dtype)
            for heads, width in zip(_HEADS, widths, strict=True)
        ]
        for back_end, as_dtype in ((kernel, dtype), (KERNELS["math"], torch.float32)):
            *inputs, gradient = (value.to(device, as_dtype) for value in values)
            inputs = [value.requires_grad_() for value in inputs]
            out = shared_attention(*inputs, segments, settings, back_end)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, gradient)])
    distances = [(ours.float() - exact).norm() / exact.norm() for ours, exact in zip(*results, strict=True)]
    return float(torch.stack(distances).max())
