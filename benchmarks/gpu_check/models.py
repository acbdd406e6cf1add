"""Random Qwen3 models, and their log-probs and updates through the pipeline."""

from __future__ import annotations

import torch

from benchmarks.packing import Engine
from benchmarks.zorro_gpu import SHAPES
from integrations.arctic_rl.processors.pipeline import run_pipeline


def qwen3(shape: str, device: str, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    """A model of one of ``benchmarks.zorro_gpu``'s shapes."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=8192)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor], device: str, *, pack: bool) -> torch.Tensor:
    """Log-probs of the responses, [B, P+R] in float32, each row with a prompt of its own."""
    meta = {"temperature": 1.0, "zorro_train_enable": False}
    processing = {"post": ["compute_logprobs"]}
    budget = 4 * batch["input_ids"].shape[1]
    result = run_pipeline(
        Engine(model), (), batch, meta, processing, device, backward=False, pack=pack, max_tokens_per_mb=budget
    )
    return torch.as_tensor(result["batch"]["logprobs"]).float()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies in float32 on the CPU, by name."""
    return {name: value.grad.float().cpu() for name, value in model.named_parameters()}


def relative_distance(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of what is exact, over all tensors together."""
    difference = sum(float((ours[name] - value).norm()) ** 2 for name, value in exact.items())
    return (difference / sum(float(value.norm()) ** 2 for value in exact.values())) ** 0.5
