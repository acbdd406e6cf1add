"""``torch.profiler`` in a training worker, as ``trainer.policy.torch_profiler_config`` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import profile

_SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat")
_RECORDING = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


def build_profiler(settings: Mapping[str, Any], rank: int) -> profile | None:
    """A profiler that is not started; None for a rank that is not to be profiled.

    Each window of active steps is written below ``save_path``, named after the rank and the window's number:
    ``rank0_w0.pt.trace.json`` (with ``.gz`` where asked for) or ``rank0_w0_stacks.txt``, as SkyRL's workers name
    them. The activity ``cuda`` is left out where there is no GPU, and stacks then give CPU time.

    Args:
        settings: the fields of SkyRL's ``TorchProfilerConfig``.
        rank: this rank.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    if rank not in settings["ranks"]:
        return None
    known = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
    activities = {
        known[name.lower()] for name in settings["activities"] if name.lower() == "cpu" or torch.cuda.is_available()
    }
    window = 0

    def write(profiler: profile) -> None:
        nonlocal window
        folder = Path(settings["save_path"])
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{rank}_w{window}"
        window += 1
        if settings["export_type"] == "stacks":
            time = "cuda" if ProfilerActivity.CUDA in activities else "cpu"
            profiler.export_stacks(str(folder / f"{name}_stacks.txt"), f"self_{time}_time_total")
        else:
            profiler.export_chrome_trace(str(folder / f"{name}.pt.trace.json{'.gz' if settings['use_gzip'] else ''}"))

    return profile(
        activities=activities or {ProfilerActivity.CPU},
        schedule=schedule(**{name: settings[name] for name in _SCHEDULE}),
        on_trace_ready=write,
        **{name: settings[name] for name in _RECORDING},
    )
