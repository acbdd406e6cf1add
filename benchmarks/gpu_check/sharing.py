"""What sharing prompts saves in bfloat16 (``benchmarks.zorro_gpu``)."""

from __future__ import annotations

from benchmarks import zorro_gpu

NEEDS = ()


def measure(device: str, *, small: bool) -> list[bool]:
    shape, repeats = ("tiny", "1") if small else ("0.6B", "2")
    return [zorro_gpu.main(["--device", device, "--shapes", shape, "--repeats", repeats]) == 0]
