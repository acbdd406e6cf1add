"""Bytes and time of an update on its way to a server: ``python -m benchmarks.wire``.

Bytes: 512 rows, prompts of 200 to 4,096 and responses of 16 to 1,024 tokens, both log-uniform, with what the GRPO loss
and its KL term read. Needed are int32 token ids without padding, two lengths a row, the loss mask as bits and three
float32 numbers a response token. Bound: 1.1 times that. The plain payload is every tensor padded.

Time: repacking, serialising, sending and receiving both ways of a smaller batch, over an update of a Qwen3 of hidden
size 256 on the same rows, to a Ray actor and to a server over HTTP whose backend computes nothing. Bound: 0.03.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.packing import small_model
from benchmarks.report import at_least, print_line
from integrations.arctic_rl.backends.base import RemoteBackend
from integrations.arctic_rl.backends.http import HttpBackend
from integrations.arctic_rl.backends.registry import RemoteBackendRegistry
from integrations.arctic_rl.client import ClientConfig, make_meta
from integrations.arctic_rl.layout import repack_to_verl
from integrations.arctic_rl.processors.pipeline import run_pipeline
from integrations.arctic_rl.wire.body import decode, decode_answer, encode, encode_answer

VOCABULARY = 8192
ROWS, PROMPTS, RESPONSES = 512, (200, 4096), (16, 1024)
TIMED_ROWS, TIMED_PROMPTS, TIMED_RESPONSES = 32, (100, 400), (16, 128)
BYTES_BOUND, TIME_BOUND = 1.1, 0.03
PROCESSING = {
    "loss_fn": "grpo",
    "config": {"clip_ratio": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.001, "loss_agg_mode": "token-mean"},
}


def skyrl_rows(rows: int, prompt_range: tuple[int, int], response_range: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A mini-batch as SkyRL's trainer holds it: prompts and responses of log-uniform lengths, padded on the left."""
    generator = torch.Generator().manual_seed(0)

    def lengths(limits: tuple[int, int]) -> torch.Tensor:
        low, high = (torch.tensor(float(limit)).log() for limit in limits)
        values = (low + (high - low) * torch.rand(rows, 1, generator=generator)).exp().long()
        values[0] = limits[1]
        return values

    prompts, responses = lengths(prompt_range), lengths(response_range)
    total = prompts + responses
    width, response_width = int(total.max()), int(responses.max())
    mask = (torch.arange(width) >= width - total).long()
    response_mask = (torch.arange(response_width) >= response_width - responses).long()
    numbers = {
        name: torch.randn(response_mask.shape, generator=generator) * response_mask
        for name in ("advantages", "old_log_probs", "ref_log_prob")
    }
    return {
        "sequences": torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask,
        "attention_mask": mask,
        "response_mask": response_mask,
        "loss_mask": response_mask.float(),
        **numbers,
    }


def measure_bytes() -> bool:
    """Print the size of an update's body."""
    batch = repack_to_verl(skyrl_rows(ROWS, PROMPTS, RESPONSES), 0)
    values = {"meta": make_meta(batch, dp_size=8), "processing": PROCESSING}
    sent = len(encode(values, batch))
    tokens, of_responses = int(batch["attention_mask"].sum()), int(batch["response_mask"].sum())
    needed = 4 * tokens + 2 * 4 * ROWS + of_responses / 8 + 3 * 4 * of_responses
    padded = sum(value.numel() * value.element_size() for value in batch.values())
    shape = {"rows": ROWS, "tokens": tokens, "response_tokens": of_responses, "mib": round(sent / 2**20, 2)}
    ok = print_line("wire/bytes_to_needed", sent / needed, BYTES_BOUND, "max", **shape)
    return print_line("wire/bytes_to_padded", sent / padded, None, "none", padded_mib=round(padded / 2**20, 1)) and ok


def median_seconds(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


class _Engine:
    """What the pipeline calls."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


def update_seconds(batch: dict[str, torch.Tensor], meta: dict[str, Any], repeats: int) -> float:
    """Forward, loss and backward on the rows."""
    width = batch["input_ids"].shape[1]
    engine = _Engine(small_model(256, 4, VOCABULARY, width))
    meta = {name: value for name, value in meta.items() if name != "max_token_len_per_gpu"}

    def update() -> None:
        run_pipeline(engine, (), batch, meta, PROCESSING, "cpu", max_tokens_per_mb=4096, return_tensors=True)

    update()
    return median_seconds(update, repeats)


def ray_seconds(rows: dict[str, torch.Tensor], meta: dict[str, Any], repeats: int) -> float:
    """From SkyRL's tensors to a Ray worker's and back."""
    import ray

    @ray.remote(num_cpus=0)
    class Receiver:
        def receive(self, body: bytes, meta: dict, processing: dict) -> tuple[dict, bytes | None]:
            _, batch = decode(body, max_cells=sys.maxsize)
            return {"avg_loss": 0.0}, encode_answer({}, None, batch)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        receiver = Receiver.remote()

        def send() -> None:
            batch = repack_to_verl(rows, 0)
            _, answer = ray.get(receiver.receive.remote(encode({}, batch), meta, PROCESSING))
            decode_answer(answer, batch)

        send()
        return median_seconds(send, repeats)
    finally:
        ray.shutdown()


def _idle_backend() -> type:
    """A backend whose calls return at once."""

    async def call(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"avg_loss": 0.0, "metrics": {}, "lr": 0.0, "micro_batches": [1]}

    members: dict[str, Any] = dict.fromkeys(RemoteBackend.__abstractmethods__, call)
    members["from_config"] = classmethod(lambda cls, config, handle=None: cls())
    members["dp_size"] = lambda self, job: 1
    return type("IdleBackend", (RemoteBackend,), members)


def http_seconds(rows: dict[str, torch.Tensor], meta: dict[str, Any], repeats: int) -> float:
    """From SkyRL's tensors to a server over HTTP on the loopback address and back."""
    import uvicorn

    from integrations.arctic_rl.server.http.app import make_app
    from integrations.arctic_rl.server.http.settings import HttpSettings

    RemoteBackendRegistry.register("idle")(_idle_backend())
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(
            uvicorn.Config(make_app(HttpSettings(backend="idle", allowed_models=["none"])), log_level="warning")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        config = ClientConfig(model_path="none", server_url=f"http://127.0.0.1:{listening.getsockname()[1]}")
        backend = HttpBackend.from_config(dataclasses.replace(config.server_config()))

        async def run() -> float:
            await backend.initialize(1)
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                await backend.fwd_bwd(repack_to_verl(rows, 0), meta, PROCESSING)
                times.append(time.perf_counter() - start)
            await backend.destroy()
            return sorted(times[1:])[repeats // 2]

        try:
            return asyncio.run(run())
        finally:
            server.should_exit = True
            thread.join(timeout=20)


def measure_time(repeats: int) -> bool:
    """Print what sending adds to an update."""
    rows = skyrl_rows(TIMED_ROWS, TIMED_PROMPTS, TIMED_RESPONSES)
    batch = repack_to_verl(rows, 0)
    meta = make_meta(batch, dp_size=1)
    update = update_seconds(batch, meta, max(1, repeats // 3))
    ok = True
    for name, measured in (("ray", ray_seconds(rows, meta, repeats)), ("http", http_seconds(rows, meta, repeats))):
        more = {"seconds": round(measured, 4), "update_s": round(update, 3)}
        ok = print_line(f"wire/overhead_{name}", measured / update, TIME_BOUND, "max", **more) and ok
    return ok


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=15, help="timed repeats")
    given = parser.parse_args(arguments)
    return 0 if all([measure_bytes(), measure_time(given.repeats)]) else 1


if __name__ == "__main__":
    sys.exit(main())
