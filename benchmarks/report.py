"""The one line format of all benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, Literal


def at_least(least: int) -> Callable[[str], int]:
    """The ``type`` of an ``argparse`` argument that is a whole number from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
        return value

    return number


def print_line(name: str, ratio: float, bound: float | None, kind: Literal["min", "max", "none"], **more: Any) -> bool:
    """Print one measurement and say whether it holds.

    Args:
        name: what was measured.
        ratio: the figure.
        bound: its limit; None where the figure is only reported.
        kind: whether ``bound`` is the least or the greatest value allowed.
        more: further fields of the line.
    """
    ok = {"min": lambda: ratio >= bound, "max": lambda: ratio <= bound, "none": lambda: True}[kind]()
    line = {"name": name, "ratio": round(ratio, 4), "bound": bound, "ok": ok, **more}
    print(json.dumps(line), flush=True)
    return ok


def print_skipped(name: str, reason: str, **more: Any) -> None:
    """Print that something was not measured, and why."""
    print(json.dumps({"name": name, "skipped": reason, **more}), flush=True)
