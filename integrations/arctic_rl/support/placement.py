"""``trainer.placement`` and what else lays out training over devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .entries import (
    EFFECT_TESTS,
    Entry,
    NoEffect,
    base_is_reference,
    first_of,
    on_cpus,
    ours,
    refusal,
    under,
    without_critic,
    without_reference,
)

_CHUNKS = NoEffect(
    "log-probs are taken in chunks; write trainer.arctic_rl.logits_optimization_peak_mem_size_in_gib for their size"
)
_MEGATRON_HEAD = NoEffect("how Megatron's LM head is computed, not what")
_NO_RANKS = first_of(without_reference, base_is_reference)
_TURNS = "tests/arctic_rl/test_colocated.py::"
_MEMORY = "tests/arctic_rl/server/test_gpu_memory.py::"


def _not_alone(cfg: Any) -> str | None:
    return "trainer.placement.colocate_all=true rules it" if cfg.trainer.placement.colocate_all else _NO_RANKS(cfg)


def _flash(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    attention = cfg.trainer.arctic_rl.attention
    if not value and attention is not None and attention.startswith("flash_attention"):
        yield refusal(
            setting, value, f"trainer.arctic_rl.attention={attention} says otherwise", "leave one of them out"
        )


def _without_checkpointing(cfg: Any) -> str | None:
    return None if cfg.trainer.gradient_checkpointing else "trainer.gradient_checkpointing=false"


def _budget_of_tokens(cfg: Any) -> str | None:
    budget = cfg.trainer.max_tokens_per_microbatch
    return f"trainer.max_tokens_per_microbatch={budget} rules it" if budget > 0 else None


PLACEMENT: dict[str, Entry] = under(
    "trainer",
    {
        **under(
            "placement",
            {
                "colocate_all": ours(
                    "all jobs share the policy's GPUs and take turns on them; on CPUs they take turns too",
                    f"{_TURNS}test_a_recipe_with_all_models_takes_turns_on_one_gpu",
                ),
                "colocate_policy_ref": ours(
                    "the reference model shares the policy's GPUs, and they take turns",
                    f"{_TURNS}test_a_policy_and_its_reference_model_take_turns_beside_engines",
                    idle=_not_alone,
                ),
                "policy_num_nodes": ours("nodes x GPUs of a node = data-parallel training ranks"),
                "policy_num_gpus_per_node": ours("see policy_num_nodes"),
                "critic_num_nodes": ours("nodes x GPUs of a node = ranks of the critic", idle=without_critic),
                "critic_num_gpus_per_node": ours("see critic_num_nodes", idle=without_critic),
                "ref_num_nodes": ours("nodes x GPUs of a node = ranks of the reference model", idle=_NO_RANKS),
                "ref_num_gpus_per_node": ours("see ref_num_nodes", idle=_NO_RANKS),
            },
        ),
        "strategy": NoEffect("DeepSpeed ZeRO trains, with the optimizer of SkyRL's fsdp, whichever is named"),
        "sequence_parallel_backend": NoEffect("a row is computed by one process here"),
        "use_expandable_segments": ours(
            "training ranks take GPU memory in segments that grow; weights in the usual one, which CUDA IPC can share",
            EFFECT_TESTS,
            f"{_MEMORY}test_weights_are_taken_from_memory_that_can_be_shared",
            idle=on_cpus,
        ),
        "gradient_checkpointing": ours("activations are computed again in the backward pass"),
        "gradient_checkpointing_use_reentrant": ours(
            "which of PyTorch's two implementations", idle=_without_checkpointing
        ),
        "bf16": ours("bfloat16 with float32 master weights; false = float32"),
        "micro_train_batch_size_per_gpu": ours(
            "rows of a micro-batch, as a budget of tokens: that many of the longest row", idle=_budget_of_tokens
        ),
        "micro_forward_batch_size_per_gpu": ours(
            "as micro_train_batch_size_per_gpu, for log-probs", idle=_budget_of_tokens
        ),
        "max_tokens_per_microbatch": ours("tokens of a micro-batch, in place of both row counts"),
        "remove_microbatch_padding": NoEffect("rows are always packed, and nothing depends on it"),
        "flash_attn": ours(
            "false = rows that share no prompts are attended to by sdpa; shared prompts have kernels of their own, "
            "which take flash-attn where it is installed",
            limit=_flash,
            idle=on_cpus,
        ),
        "logprobs_chunk_size": _CHUNKS,
        "vocab_entropy_chunk_size": _CHUNKS,
        "vocab_entropy_chunk_memory_mb": _CHUNKS,
        "fused_lm_head_logprob": _MEGATRON_HEAD,
        "fused_lm_head_logprob_backend": _MEGATRON_HEAD,
    },
)
