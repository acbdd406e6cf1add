"""What workers are told in tests, where nothing is said about it."""

from typing import Any

from integrations.arctic_rl.server.sampling_spec import SamplingSpec
from integrations.arctic_rl.server.specs import OptimizerSpec, TrainingSpec

OPTIMIZER = OptimizerSpec(
    lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0, scheduler="constant", num_warmup_steps=0
)


def training_spec(model_path: Any = "tiny", **changes: Any) -> TrainingSpec:
    """A policy in float32 on a CPU, with ZeRO stage 0 and without checkpointing."""
    fields = {
        "role": "policy",
        "model_path": str(model_path),
        "dtype": "float32",
        "zero_stage": 0,
        "optimizer": OPTIMIZER,
        "gradient_checkpointing": False,
        "gradient_checkpointing_use_reentrant": False,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
        "processor_modules": (),
        "loss_fn": None,
    }
    return TrainingSpec(**(fields | changes))


def sampling_spec(model_path: Any = "tiny", **changes: Any) -> SamplingSpec:
    """A small engine in float32 on CPUs."""
    fields = {
        "model_path": str(model_path),
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": None,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "device": "cpu",
        "cpu_kv_cache_gib": 0.1,
        "gpu_memory_utilization": 0.8,
        "seed": 0,
    }
    return SamplingSpec(**(fields | changes))
