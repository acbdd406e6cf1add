"""Sampling workers in processes of their own, without Ray, for benchmarks that need vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from integrations.arctic_rl.server.sampling_spec import SamplingSpec
from integrations.arctic_rl.server.sampling_worker import SamplingWorker

START_LIMIT_S, CALL_LIMIT_S = 300.0, 120.0


class Peak:
    """The most memory that this process held at once since ``reset``, mapped files included."""

    def __init__(self) -> None:
        self._before = 0

    def reset(self) -> None:
        """Begin anew; what is held now is not counted."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def extra(self) -> int:
        """Bytes above what was held at ``reset``."""
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", text, flags=re.MULTILINE).group(1))


class EngineProcess:
    """A ``SamplingWorker`` and a ``Peak`` in another process; ``call`` runs their methods by name."""

    def __init__(self, spec: SamplingSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, theirs), daemon=False)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any, limit_s: float = CALL_LIMIT_S) -> Any:
        """The result of a method of the worker, or of ``Peak`` if its name begins with ``peak.``."""
        self.send(method, *arguments)
        return self.receive(limit_s)

    def send(self, method: str, *arguments: Any) -> None:
        """Begin a call."""
        self._connection.send((method, arguments))

    def receive(self, limit_s: float = CALL_LIMIT_S) -> Any:
        """The result of the call that was begun."""
        if not self._connection.poll(limit_s):
            raise TimeoutError(f"an engine did not answer within {limit_s} s")
        ok, answer = self._connection.recv()
        if not ok:
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, and the engine in it."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(CALL_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def engines(specs: list[SamplingSpec]) -> Iterator[list[EngineProcess]]:
    """Engines that are up; they are stopped behind the block."""
    started: list[EngineProcess] = []
    with tempfile.TemporaryDirectory(prefix="arctic-rl-") as scratch:
        try:
            for spec in specs:
                started.append(EngineProcess(dataclasses.replace(spec, scratch_directory=scratch)))
                started[-1].send("setup")
            for engine in started:
                engine.receive(START_LIMIT_S)
            yield started
        finally:
            for engine in started:
                engine.stop()


def tokenizer_for(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of single bytes: an engine needs one to start."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def engine_spec(model_path: Path, **changes: Any) -> SamplingSpec:
    """A small engine on CPUs, in float32."""
    fields = {
        "model_path": str(model_path),
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "device": "cpu",
        "cpu_kv_cache_gib": 0.25,
        "gpu_memory_utilization": 0.9,
        "seed": 0,
        "engine_kwargs": {"block_size": 32},
        "log_file": str(model_path / "engine.log"),
    }
    return SamplingSpec(**(fields | changes))


class CountingWorker(SamplingWorker):
    """Notes of each request how many tokens of its prompt the engine had cached, as vLLM says."""

    def __init__(self, spec: SamplingSpec) -> None:
        super().__init__(spec)
        self._prefills: list[tuple[int, int]] = []

    async def take_prefills(self) -> list[tuple[int, int]]:
        """(tokens of the prompt, how many of them were cached) of each request since the last call."""
        prefills, self._prefills = self._prefills, []
        return prefills

    async def setup(self) -> None:
        await super().setup()
        generate = self._engine.generate

        async def noted(*arguments: Any, **keywords: Any) -> Any:
            async for output in generate(*arguments, **keywords):
                if output.finished:
                    self._prefills.append((len(output.prompt_token_ids), output.num_cached_tokens))
                yield output

        self._engine.generate = noted


def _serve(spec: SamplingSpec, connection: Connection) -> None:
    async def serve() -> None:
        worker, peak = CountingWorker(spec), Peak()
        while (command := await asyncio.to_thread(connection.recv)) is not None:
            method, arguments = command
            try:
                if method.startswith("peak."):
                    answer = getattr(peak, method.removeprefix("peak."))(*arguments)
                else:
                    answer = await getattr(worker, method)(*arguments)
            except Exception as error:
                connection.send((False, error))
            else:
                connection.send((True, answer))

    asyncio.run(serve())
    os._exit(0)  # vLLM's own way out waits for its helper threads
