"""``trainer.policy.torch_profiler_config``: SkyRL's hooks through our dispatch, and what a worker writes."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from skyrl.train.config.config import TorchProfilerConfig

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.server.profiling import build_profiler
from tests.arctic_rl.in_process_backend import InProcessBackend
from tests.arctic_rl.resume_runs import Rollouts, config, run

PREFIX = "trainer.policy.torch_profiler_config"


def profiled(folder, steps=8, rank=0, **changes):
    """Names and texts of what a rank writes in so many steps, by name."""
    settings = {"enable": True, "save_path": str(folder), "skip_first": 0, "wait": 0, "warmup": 0} | changes
    profiler = build_profiler(asdict(TorchProfilerConfig(**settings)), rank)
    if profiler is None:
        return None
    profiler.start()
    for step in range(steps):
        with torch.profiler.record_function(f"step {step}"):
            torch.nn.functional.linear(torch.ones(7, 5), torch.ones(3, 5)).sum()
        profiler.step()
    profiler.stop()
    return {
        path.name: gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()
        for path in sorted(Path(folder).iterdir())
    }


def steps_in(text):
    """The numbers of the steps that a trace holds."""
    names = {event["name"] for event in json.loads(text)["traceEvents"] if "name" in event}
    return sorted(int(name.split()[1]) for name in names if name.startswith("step "))


class TestWorkersProfiler:
    def test_a_trace_a_window(self, tmp_path):
        traces = profiled(tmp_path, skip_first=1, wait=1, warmup=1, active=2, repeat=1)
        assert list(traces) == ["rank0_w0.pt.trace.json"]
        assert steps_in(traces["rank0_w0.pt.trace.json"]) == [3, 4]

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"skip_first": 2}, [[2]]),
            ({"wait": 1}, [[1]]),
            ({"warmup": 2}, [[2]]),
            ({"active": 3}, [[0, 1, 2]]),
            ({"repeat": 2}, [[0], [1]]),
        ],
        ids=str,
    )
    def test_the_schedule(self, tmp_path, change, expected):
        assert [steps_in(text) for text in profiled(tmp_path, **change).values()] == expected

    def test_other_ranks_are_not_profiled(self, tmp_path):
        assert profiled(tmp_path, rank=1) is None
        assert list(profiled(tmp_path, rank=1, ranks=[0, 1])) == ["rank1_w0.pt.trace.json"]

    def test_compressed_traces(self, tmp_path):
        traces = profiled(tmp_path, use_gzip=True)
        assert list(traces) == ["rank0_w0.pt.trace.json.gz"]
        assert steps_in(traces["rank0_w0.pt.trace.json.gz"]) == [0]

    @pytest.mark.parametrize(
        ("name", "seen"),
        [
            ("record_shapes", '"Input Dims"'),
            ("profile_memory", '"[memory]"'),
            ("with_stack", "test_profiling.py"),
            ("with_flops", '"with_flops": 1'),
            ("with_modules", '"with_modules": 1'),
        ],
    )
    def test_what_is_recorded(self, tmp_path, name, seen):
        others = {"record_shapes": False, "with_stack": False}
        with_it, without = (
            "".join(profiled(tmp_path / str(value), **others | {name: value}).values()) for value in (True, False)
        )
        assert seen in with_it and seen not in without

    def test_stacks(self, tmp_path):
        (stacks,) = profiled(tmp_path, export_type="stacks", activities=["cpu"]).items()
        assert stacks[0] == "rank0_w0_stacks.txt"

    def test_cuda_alone_without_a_gpu_is_the_cpu(self, tmp_path):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        (trace,) = profiled(tmp_path, activities=["cuda"]).values()
        assert steps_in(trace) == [0]


class TestHooks:
    def settings(self, tmp_path):
        return (f"{PREFIX}.enable=true", f"{PREFIX}.save_path={tmp_path}/traces", f"{PREFIX}.ranks=[0,1]")

    def test_a_run_starts_steps_and_stops_the_profilers(self, tmp_path, loop):
        backend = InProcessBackend()
        cfg = config(tmp_path, *self.settings(tmp_path), "trainer.ckpt_interval=-1")
        run(cfg, backend, loop, Rollouts({}))
        names = [name for name in backend.names() if "profile" in name]
        assert names == ["start_profile", *["profile_step"] * 6, "stop_profile"]
        (settings,) = backend.arguments("start_profile")[0]
        assert settings == asdict(cfg.trainer.policy.torch_profiler_config)
        assert (settings["ranks"], settings["save_path"]) == ([0, 1], f"{tmp_path}/traces")

    def test_a_failing_run_is_told_with_its_own_error(self, tmp_path, loop):
        class Dead(InProcessBackend):
            async def stop_profile(self):
                raise ArcticError("the worker is gone")

        backend = Dead(failing=("step",))
        cfg = config(tmp_path, *self.settings(tmp_path), "trainer.ckpt_interval=-1")
        with pytest.raises(RuntimeError, match="step was told to fail"):
            run(cfg, backend, loop, Rollouts({}))

    def test_without_the_setting_nothing_is_profiled(self, tmp_path, loop):
        backend = InProcessBackend()
        run(config(tmp_path, "trainer.ckpt_interval=-1"), backend, loop, Rollouts({}))
        assert not [name for name in backend.names() if "profile" in name]
