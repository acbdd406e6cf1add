"""Whether heavy modules can be imported, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

IMPORTED = {
    "vllm": "vllm.v1.engine.async_llm",
    "deepspeed": "deepspeed",
    "flash_attn": "flash_attn.flash_attn_interface",
    "liger_kernel": "liger_kernel.transformers",
}
"""What a worker imports of a package: a compiled part of another build of PyTorch shows there."""
TIMEOUT_S = 240.0


def import_errors(names: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """The last line of what each import that fails says; all are started at once.

    Args:
        names: of ``IMPORTED``.
        timeout_s: seconds that they may take together.
    """
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"import {IMPORTED[name]}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for name in names
    }
    found = {}
    for name, process in processes.items():
        try:
            _, output = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found[name] = f"it took more than {timeout_s:.0f} s"
            continue
        if process.returncode:
            lines = [line for line in output.splitlines() if line.strip()]
            found[name] = lines[-1].strip() if lines else f"the process ended with status {process.returncode}"
    return found
