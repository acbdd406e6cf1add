"""Bytes that the processes of a run take, as functions of sizes and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model_size import ModelSize

GIB = 2**30
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number."""
BUCKET = 500_000_000
"""Gradients that DeepSpeed reduces at once (``reduce_bucket_size``)."""
LIVE = 1_000_000_000
"""Weights that ZeRO stage 3 keeps gathered (``stage3_max_live_parameters``)."""

TRAINING_PROCESS = GIB // 2
"""What PyTorch, DeepSpeed and transformers take in a process of their own, as measured on CPUs."""
ENGINE_PROCESSES = 11 * GIB // 10
"""The same of vLLM, whose engine runs in two processes."""
TRAINER_PROCESSES = 3 * GIB // 2
"""The same of SkyRL, in the process that was started and in the one that trains."""


def training_memory(
    size: ModelSize,
    *,
    dtype: str,
    zero_stage: int,
    ranks: int,
    tokens: int,
    gradient_checkpointing: bool,
    logits: int,
    bucket: int = BUCKET,
    live: int = LIVE,
    whole_bucket: bool = False,
) -> dict[str, int]:
    """Bytes of one rank by what they are for; states that are offloaded count too, since they stay on the host.

    Adam's moments and what is stepped are float32, as gradients are once they are reduced. The first moment and the
    second take 8 bytes a weight together. ZeRO (https://arxiv.org/abs/1910.02054) stage 1 shards these over the
    ranks, stage 2 the gradients too, stage 3 the weights too.

    Args:
        size: of the model.
        tokens: of one micro-batch.
        logits: bytes that the buffers for logits may take.
        bucket: gradients that are reduced at once.
        live: weights that stage 3 keeps gathered.
        whole_bucket: whether a bucket takes its memory before it is filled, as on GPUs.
    """
    width = WIDTH[dtype]
    shards = ranks if zero_stage else 1
    filled = bucket if whole_bucket else min(size.trained, bucket)
    frozen = size.parameters if size.trained != size.parameters else 0
    # Adapters are float32 only until DeepSpeed casts the model.
    weights = width * (frozen + size.trained)
    masters = 4 * size.trained if zero_stage or dtype != "float32" else 0
    parts = {
        "weights": _share(weights, ranks if zero_stage == 3 else 1),
        "float32 weights": _share(masters, shards),
        "optimizer": _share(8 * size.trained, shards),
        "gradients": _share(4 * size.trained, shards if zero_stage > 1 else 1),
    }
    if zero_stage < 2 and dtype != "float32":
        parts["gradients before they are float32"] = width * size.trained
    elif zero_stage == 1:
        parts["gradients of the shard"] = _share(4 * size.trained, shards)
    if zero_stage == 2:
        parts["gradients being reduced"] = width * filled
    elif zero_stage == 3 or (zero_stage == 1 and dtype == "float32"):
        parts["gradients being reduced"] = 4 * filled
    if zero_stage == 3 and ranks > 1:
        parts["gathered weights"] = width * min(size.parameters, live)
    parts["activations"] = activations(size, width=width, tokens=tokens, gradient_checkpointing=gradient_checkpointing)
    parts["logits"] = logits
    return parts


def activations(size: ModelSize, *, width: int, tokens: int, gradient_checkpointing: bool) -> int:
    """Bytes kept for the backward pass of a micro-batch; an estimate.

    A layer keeps the inputs and outputs of its two norms, queries, keys and values with rotated copies, attention's
    output, and four tensors of the MLP's width. With checkpointing, layers keep their inputs, and one is whole.
    """
    layer = 4 * size.hidden + 3 * size.query + 3 * size.key + 4 * size.mlp
    kept = size.layers * size.hidden + layer if gradient_checkpointing else size.layers * layer
    return width * tokens * kept


def loading_memory(size: ModelSize) -> int:
    """Bytes of a training process while it loads: the model in float32."""
    return 4 * size.parameters


def kv_bytes_per_token(size: ModelSize, dtype: str) -> int:
    """Bytes of keys and values of one token in all layers."""
    return 2 * size.layers * size.key * WIDTH[dtype]


def engine_memory(size: ModelSize, *, dtype: str, kv_cache: int, tensor_parallel_size: int = 1) -> dict[str, int]:
    """Bytes of one rank of a vLLM engine, ``kv_cache`` of them for its cache."""
    return {"weights": _share(WIDTH[dtype] * size.parameters, tensor_parallel_size), "KV cache": kv_cache}


def checkpoint_bytes(size: ModelSize) -> int:
    """Bytes of a checkpoint of what is trained: float32 weights and two moments of each."""
    return 12 * size.trained


def _share(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)
