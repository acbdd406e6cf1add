"""What it costs to bring weights to the engines: ``python -m benchmarks.weight_sync``.

A Qwen3 of 208 MiB in float32, on CPUs. Bounds:

moving the bytes, from the trainer's parameters until a receiver in another process has them mapped: at most 3 times a
plain copy of the same tensors, both in processor time of one thread and over memory that has been used before (the
first sync, which takes fresh memory, is reported beside it). For shared memory, and for buckets of 16 MiB.

memory with buckets: what the sender holds at most besides the model, with the bucket that both sides map, is a bucket
and 4 MiB. With ZeRO-3, where the sender holds a share of the model, the most that DeepSpeed itself takes to gather one
parameter comes on top, measured here too: for a moment twice its size.

What an engine takes to load the weights (vLLM's own loader, which repacks them) and what memory it takes meanwhile is
reported apart; ``--no-engine`` leaves it out. About a minute on 2 idle cores.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import EngineProcess, Peak, engine_spec, engines, tokenizer_for
from benchmarks.packing import small_model
from benchmarks.report import at_least, print_line
from integrations.arctic_rl.client import ClientConfig
from integrations.arctic_rl.server.weight_sync.buckets import plan_buckets
from integrations.arctic_rl.server.weight_sync.sender import WeightSender
from integrations.arctic_rl.server.weights import iter_weights, segment_at, weights_root

MIB = 2**20
SIZE = {"hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096, "width": 2048}
BUCKET = 16 * MIB
SLACK = 4 * MIB
MOVE_BOUND = 3.0
DTYPE = "float32"


class PlainEngine:
    """What holds the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def timed(function: Callable[[], Any]) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def receive(connection: Connection, folder: str) -> None:
    """Another process that maps what was written, checks it, and says how long the mapping took."""
    torch.set_num_threads(1)
    segment = segment_at(folder)
    while (path := connection.recv()) is not None:
        views: list[tuple[str, torch.Tensor]] = []
        seconds = timed(lambda path=path, views=views: views.extend(iter_weights(path, segment=segment)))
        connection.send((seconds, {name: float(view.double().sum()) for name, view in views}))


class Receiver:
    """``receive`` in another process."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs, str(folder)))
        self._process.start()

    def map(self, path: str, expected: dict[str, float]) -> float:
        """Seconds to map a written manifest.

        Raises:
            RuntimeError: other values arrived.
        """
        self._connection.send(path)
        if not self._connection.poll(120):
            raise TimeoutError("the receiver does not answer")
        seconds, sums = self._connection.recv()
        if any(sums[name] != expected[name] for name in sums):
            raise RuntimeError("other values arrived than were sent")
        return seconds

    def stop(self) -> None:
        self._connection.send(None)
        self._process.join(60)


def measure_moving(module: torch.nn.Module, root: Path, repeats: int) -> bool:
    """Print the cost of both strategies over a plain copy's."""
    sums = {name: float(value.detach().double().sum()) for name, value in module.named_parameters()}
    targets = [torch.empty_like(value) for value in module.parameters()]

    def copy() -> None:
        for target, value in zip(targets, module.parameters(), strict=True):
            target.copy_(value.detach())

    copy()
    sender = WeightSender(PlainEngine(module), 0, 0)
    specs = sender.declare(DTYPE)
    names = [[spec.name for spec in bucket] for bucket in plan_buckets(specs, BUCKET)]
    ok = True
    for strategy in ("shared_memory", "low_memory"):
        folder = root / strategy
        folder.mkdir()
        receiver = Receiver(folder)
        parts: list[list[str] | None] = [None] if strategy == "shared_memory" else list(names)

        def move(parts: list[list[str] | None] = parts, folder: Path = folder, receiver: Receiver = receiver) -> float:
            seconds = 0.0
            for part in parts:
                written: list[str] = []
                if part is None:
                    seconds += timed(lambda written=written: written.append(sender.export(str(folder), 1, DTYPE)))
                else:
                    seconds += timed(
                        lambda written=written, part=part: written.append(
                            sender.export_bucket(part, str(folder), 1, DTYPE)
                        )
                    )
                seconds += receiver.map(written[0], sums)
            return seconds

        try:
            first = move()
            pairs = [(timed(copy), move()) for _ in range(repeats)]
        finally:
            receiver.stop()
        copied, moved = median([pair[0] for pair in pairs]), median([pair[1] for pair in pairs])
        more = {
            "mib": round(sum(spec.nbytes for spec in specs) / MIB, 1),
            "parts": len(parts),
            "copy_ms": round(1e3 * copied, 1),
            "move_ms": round(1e3 * moved, 1),
            "first_ms": round(1e3 * first, 1),
        }
        ratio = median([pair[1] / pair[0] for pair in pairs])
        ok = print_line(f"weight_sync/move_{strategy}", ratio, MOVE_BOUND, "max", **more) and ok
    return ok


def measure_memory(module: torch.nn.Module, root: Path) -> bool:
    """Print the most that the sender holds besides its model."""
    _return_freed_memory()
    sender = WeightSender(PlainEngine(module), 0, 0)
    return _print_memory("low_memory_peak", sender, root / "memory", 0)


def _print_memory(name: str, sender: WeightSender, folder: Path, gathered: int) -> bool:
    folder.mkdir()
    specs = sender.declare(DTYPE)
    buckets = plan_buckets(specs, BUCKET)
    bound = max(BUCKET, *(spec.nbytes for spec in specs)) + gathered + SLACK
    smallest = min(specs, key=lambda spec: spec.nbytes)
    sender.export_bucket([smallest.name], str(folder), 1, DTYPE)  # what is imported and started once
    peak = Peak()
    peak.reset()
    for bucket in buckets:
        sender.export_bucket([spec.name for spec in bucket], str(folder), 1, DTYPE)
    extra = peak.extra()
    file = (folder / "weights.bin").stat().st_size
    more = {
        "extra_mib": round(extra / MIB, 1),
        "bound_mib": round(bound / MIB, 1),
        "bucket_mib": BUCKET / MIB,
        "file_mib": round(file / MIB, 1),
        "gathered_mib": round(gathered / MIB, 1),
        "model_mib": round(sum(spec.nbytes for spec in specs) / MIB, 1),
    }
    return print_line(f"weight_sync/{name}", extra / bound, 1.0, "max", **more)


def zero3_memory(model_path: str, root: str) -> bool:
    """``measure_memory`` of a DeepSpeed ZeRO-3 engine, in a process of its own."""
    from integrations.arctic_rl.server.engine import initialize_engine, load_model
    from integrations.arctic_rl.server.training_worker import _init_distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    _return_freed_memory()
    _init_distributed("cpu")
    spec = ClientConfig(model_path, dtype=DTYPE, zero_stage=3, use_zorro=False).server_config().policy
    engine, _ = initialize_engine(load_model(spec), spec)
    return _print_memory(
        "low_memory_peak_zero3", WeightSender(engine, 3, 0), Path(root) / "zero3", gather_peak(engine)
    )


def gather_peak(engine: Any) -> int:
    """The most memory that DeepSpeed takes to gather one parameter of a ZeRO-3 engine."""
    import deepspeed

    peak, most = Peak(), 0
    for parameter in engine.module.parameters():
        peak.reset()
        with deepspeed.zero.GatheredParameters([parameter]):
            pass
        most = max(most, peak.extra())
    return most


def _return_freed_memory() -> None:
    """Let the allocator give freed blocks of 64 KiB and more back: it would keep up to 32 MiB of them."""
    m_mmap_threshold = -3
    if not ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 * 1024):
        raise OSError("mallopt refused a threshold")


def _in_process(function: Callable[..., bool], *arguments: Any) -> bool:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(timeout=300)


def measure_engine(module: torch.nn.Module, model_path: Path, root: Path, copied_s: float, repeats: int) -> bool:
    """Print what vLLM takes to load the weights, in wall time over a plain copy's."""
    sender = WeightSender(PlainEngine(module), 0, 0)
    specs = sender.declare(DTYPE)
    names = [[spec.name for spec in bucket] for bucket in plan_buckets(specs, BUCKET)]
    shared, buckets = root / "engine", root / "engine-buckets"
    shared.mkdir()
    buckets.mkdir()

    def sync(engine: EngineProcess, version: int) -> float:
        path = sender.export(str(shared), version, DTYPE)
        start = time.perf_counter()
        engine.call("sync_weights", path, version)
        return time.perf_counter() - start

    def sync_buckets(engine: EngineProcess, version: int) -> float:
        seconds = 0.0
        engine.call("check_tensors", specs, DTYPE)
        engine.call("begin_update", version)
        for part in names:
            path = sender.export_bucket(part, str(buckets), version, DTYPE)
            start = time.perf_counter()
            engine.call("load_part", path)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        engine.call("end_update")
        return seconds + time.perf_counter() - start

    with engines([engine_spec(model_path)]) as (engine,):
        version = 0
        for name, way in (("shared_memory", sync), ("low_memory", sync_buckets)):
            times, extra = [], 0
            for _ in range(repeats + 1):
                version += 1
                engine.call("peak.reset")
                times.append(way(engine, version))
                extra = max(extra, engine.call("peak.extra"))
            seconds = median(times[1:])
            more = {
                "seconds": round(seconds, 3),
                "first_s": round(times[0], 3),
                "engine_extra_mib": round(extra / MIB, 1),
                "clock": "wall",
            }
            print_line(f"weight_sync/engine_reload_{name}", seconds / copied_s, None, "none", **more)
    return True


def plain_copy_seconds(module: torch.nn.Module, repeats: int) -> float:
    """Wall seconds of a copy of all parameters into memory that has been used before."""
    targets = [torch.empty_like(value) for value in module.parameters()]
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for target, value in zip(targets, module.parameters(), strict=True):
            target.copy_(value.detach())
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=9, help="timed repeats")
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM's own reload out")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    module = small_model(**SIZE)
    with tempfile.TemporaryDirectory(prefix="arctic-rl-bench-", dir=weights_root(2**30)) as folder:
        root = Path(folder)
        ok = measure_moving(module, root, given.repeats)
        ok = measure_memory(module, root) and ok
        model_path = root / "model"
        module.save_pretrained(model_path)
        ok = _in_process(zero3_memory, str(model_path), folder) and ok
        if not given.no_engine:
            tokenizer_for(model_path, SIZE["vocab_size"])
            copied = plain_copy_seconds(module, given.repeats)
            measure_engine(module, model_path, root, copied, max(1, given.repeats // 3))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
