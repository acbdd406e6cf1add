"""SkyRL's data-parallel sizes, and its own micro-batches for losses whose value depends on which rows stand together.

A recipe's model-parallel sizes make SkyRL's data-parallel size smaller than the number of GPUs, which is that of our
ranks. What a batch is cut into follows SkyRL's; who computes it follows ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["lcm_dp_size", "micro_batch_counts", "skyrl_dp_size", "skyrl_micro_batch_ids"]


def skyrl_dp_size(trainer: Any, model: str) -> int:
    """The data-parallel size of a model's workers in SkyRL, the one that its ``validate_batch_sizes`` reckons with.

    Args:
        trainer: the recipe's validated ``trainer`` section.
        model: ``policy``, ``critic`` or ``ref``; of strategy megatron SkyRL has no critic.
    """
    placement, settings = vars(trainer.placement), vars(trainer)[model]
    gpus = placement[f"{model}_num_nodes"] * placement[f"{model}_num_gpus_per_node"]
    if trainer.strategy != "megatron":
        return gpus // settings.sequence_parallel_size
    megatron = settings.megatron_config
    sizes = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    return gpus // math.prod(sizes)


def lcm_dp_size(trainer: Any) -> int:
    """The number that SkyRL makes the rows of a batch a multiple of: it divides by the size of every model in use."""
    uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
    used = {"policy": True, "critic": bool(trainer.critic.model.path), "ref": uses_reference}
    return math.lcm(*(skyrl_dp_size(trainer, model) for model, is_used in used.items() if is_used))


def skyrl_micro_batch_ids(attention_mask: torch.Tensor, *, trainer: Any, model: str = "policy") -> torch.Tensor:
    """The number of each row's micro-batch, as SkyRL's workers of a model cut them.

    Each of SkyRL's data-parallel workers takes a run of rows, and cuts it into runs of
    ``micro_train_batch_size_per_gpu`` rows, or with ``max_tokens_per_microbatch`` above 0 by the balanced packing of
    SkyRL's ``TokenBasedBatchIterator``, whose limit a single longer row may exceed.

    Args:
        attention_mask: [B, S]; B is a multiple of ``skyrl_dp_size``.
        trainer: the recipe's validated ``trainer`` section.
        model: see ``skyrl_dp_size``.

    Returns:
        [B], int64, counting from 0 over the workers, one worker's after another's.
    """
    workers = skyrl_dp_size(trainer, model)
    rows = len(attention_mask) // workers
    budget = trainer.max_tokens_per_microbatch
    if budget <= 0:
        size = trainer.micro_train_batch_size_per_gpu
        ids = torch.arange(rows) // size + torch.arange(workers)[:, None] * math.ceil(rows / size)
        return ids.view(-1)

    from skyrl.train.dataset.bin_packing import make_seq_packer

    ids = torch.empty(workers, rows, dtype=torch.int64)
    lengths = attention_mask.sum(dim=1).view(workers, rows).tolist()
    packer = make_seq_packer("balanced", bin_capacity=budget)
    micro_batches = [(worker, members) for worker in range(workers) for members in packer.pack(lengths[worker])]
    for number, (worker, members) in enumerate(micro_batches):
        ids[worker, members] = number
    return ids.view(-1)


def micro_batch_counts(per_rank: list[int]) -> dict[str, float]:
    """SkyRL's metrics of token-based micro-batches: how many each rank runs, and how many of them are fillers."""
    most = max(per_rank)
    return {
        "num_microbatches": float(most),
        "num_padding_microbatches": sum(most - number for number in per_rank) / len(per_rank),
    }
