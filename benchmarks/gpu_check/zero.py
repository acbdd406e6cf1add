"""ZeRO stages with optimizer and parameters in host memory on one device, against DeepSpeed without either."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from benchmarks.gpu_check.memory import measure_memory
from benchmarks.report import print_line
from integrations.arctic_rl.server.process import free_address
from integrations.arctic_rl.server.specs import OptimizerSpec, TrainingSpec

NEEDS = ("deepspeed",)
HOST = {"device": "cpu", "pin_memory": False}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (0, {}),
    "1": (1, {}),
    "2": (2, {}),
    "2 offload_optimizer": (2, {"offload_optimizer": HOST}),
    "3": (3, {}),
    "3 offload_optimizer offload_param": (3, {"offload_optimizer": HOST, "offload_param": HOST}),
}
"""ZeRO stage and ``zero_optimization`` of each engine."""
BOUND = 1e-3
"""Norm of the difference of an update over the norm of the plain one, in float32."""
UPDATES = 2


def measure(device: str, *, small: bool) -> list[bool]:
    """Updates in float32 on one rank: weights, seconds of an update, and memory that is taken between updates."""
    from integrations.arctic_rl.server.training_worker import _init_distributed

    address, port = free_address()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    _init_distributed(device)
    held, plain = [], None
    for name, (stage, block) in VARIANTS.items():
        start, weights, facts = _updates(device, stage, block, small=small)
        moved = {key: value - start[key] for key, value in weights.items()}
        if plain is None:
            plain = moved
            continue
        difference = sum(float((value - plain[key]).norm()) ** 2 for key, value in moved.items())
        distance = (difference / sum(float(value.norm()) ** 2 for value in plain.values())) ** 0.5
        facts["distance"] = float(f"{distance:.2e}")
        held.append(print_line("gpu_check/zero", distance, BOUND, "max", engine=name, **facts))
    held += measure_memory(_model("cpu", small=small), _spec(device, 3, {}))
    torch.distributed.destroy_process_group()
    return held


def _updates(
    device: str, stage: int, block: dict[str, Any], *, small: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Weights before and after, by name, and what it took."""
    from integrations.arctic_rl.server.engine import full_parameters, initialize_engine

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = _model(device, small=small)
    vocabulary = model.config.vocab_size
    start = {key: value.detach().cpu().clone() for key, value in model.named_parameters()}
    engine, _ = initialize_engine(model, _spec(device, stage, block))
    rows = torch.randint(0, vocabulary, (UPDATES, 2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    began = time.perf_counter()
    for update in rows:
        engine.backward(engine(input_ids=update, labels=update, use_cache=False).loss, scale_wrt_gas=False)
        engine.step()
    weights = {key: value.cpu().clone() for key, value in full_parameters(engine, stage)}
    facts: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 3)}
    if device == "cuda":
        facts["held_mib"] = torch.cuda.memory_allocated() >> 20
        facts["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    engine.destroy()
    return start, weights, facts


def _model(device: str, *, small: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 128, "head_dim": 8}
    if not small:
        sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 32_768, "head_dim": 128}
    config = Qwen3Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def _spec(device: str, stage: int, block: dict[str, Any]) -> TrainingSpec:
    return TrainingSpec(
        role="policy",
        model_path="random",
        dtype="float32",
        zero_stage=stage,
        optimizer=OptimizerSpec(1e-3, (0.9, 0.99), 0.1, 0.5, "constant", 0),
        gradient_checkpointing=False,
        gradient_checkpointing_use_reentrant=False,
        seed=1,
        device=device,
        threads=1,
        processor_modules=(),
        loss_fn=None,
        deepspeed={"zero_optimization": block} if block else {},
    )
