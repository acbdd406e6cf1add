"""Triton's interpreter, in which its kernels run on CPUs, made to take Liger's."""

from __future__ import annotations

import os


def use_interpreter() -> None:
    """Let Triton kernels run on CPUs in this process, which must not have imported Triton.

    The interpreter of Triton 3.7 hands floats to a kernel as Python's, which have no ``to``, and cannot call CUDA's
    rsqrt.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import liger_kernel.ops.rms_norm
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_floats_too
    liger_kernel.ops.rms_norm.rsqrt = lambda value: tl.rsqrt(value)
