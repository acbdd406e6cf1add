"""The C compiler that GPUs need: Triton builds the start of every kernel with it, vLLM's and Liger's among them."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def compiler_problems() -> list[str]:
    """What Triton 3.7 (``triton.runtime.build``) would not find here, a line each.

    DeepSpeed compiles nothing: the optimizer is PyTorch's AdamW, on the host too.
    """
    problems = []
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        named = f"CC={os.environ['CC']} is none" if "CC" in os.environ else "neither gcc nor clang"
        problems.append(f"there is no C compiler ({named}), and engines on GPUs need one at their start: install gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        problems.append(
            f"there is no {header}, and engines on GPUs compile with it at their start: install Python's headers "
            "(python3.12-dev), or a Python of uv's (uv python install 3.12)"
        )
    return problems
