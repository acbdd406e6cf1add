"""``trainer.policy.megatron_config`` and ``trainer.ref.megatron_config``.

Megatron itself is never run: what only lays out ranks and memory has no effect, what would change the model or its
update is refused. SkyRL reads none of it with another ``trainer.strategy``.
"""

from __future__ import annotations

from .entries import (
    Entry,
    Idle,
    NoEffect,
    PartOf,
    Refused,
    RefusedKeys,
    first_of,
    under,
    without_lora,
    without_megatron,
    without_reference,
)

_LAYOUT = NoEffect("every rank is data-parallel here; trainer.arctic_rl.zero_stage=3 splits a model over the GPUs")
_KERNELS = NoEffect("how Megatron moves and multiplies, not what")
_FILES = NoEffect("how Megatron writes checkpoints and exports")

_OPTIMIZER_MEMORY = frozenset(
    {
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_distributed_optimizer",
        "use_precision_aware_optimizer",
        "use_torch_optimizer_for_cpu_offload",
    }
)
"""Keys of Megatron's optimizer config that say where and when, not what, is computed."""

_MODEL_MEMORY = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "apply_rope_fusion",
        "attention_backend",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cross_entropy_loss_fusion",
        "deallocate_pipeline_outputs",
        "distribute_saved_activations",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "moe_enable_deepep",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_token_dispatcher_type",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "overlap_p2p_comm",
        "pipeline_model_parallel_layout",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "sequence_parallel",
        "tp_comm_overlap",
        "virtual_pipeline_model_parallel_size",
    }
)
"""Keys of Megatron's transformer config that lay out ranks, memory and kernels."""

_FP8_FIELDS = ("fp8", "fp8_recipe", "fp8_param", "fp8_amax_compute_algo")


def _megatron(idle: Idle) -> dict[str, Entry]:
    changes_model = Refused("it would change the model", "leave it out", idle=idle)
    fp8 = Refused("training in fp8 is not there", "leave it out", idle=idle)
    frozen = Refused("parameters cannot be frozen yet", "write false", idle=idle)
    heads = PartOf("trainer.mtp.enabled", "heads are built with trainer.mtp.enabled only")
    adapters = Refused("experts get no adapters of their own", "leave it out", idle=first_of(idle, without_lora))
    return {
        "tensor_model_parallel_size": _LAYOUT,
        "pipeline_model_parallel_size": _LAYOUT,
        "context_parallel_size": _LAYOUT,
        "expert_model_parallel_size": _LAYOUT,
        "expert_tensor_parallel_size": _LAYOUT,
        "moe_token_dispatcher_type": _KERNELS,
        "moe_router_load_balancing_type": Refused(
            "auxiliary losses that balance experts are not there", "write none", idle=idle
        ),
        "moe_aux_loss_coeff": Refused("auxiliary losses that balance experts are not there", "write 0", idle=idle),
        "moe_grouped_gemm": _KERNELS,
        "moe_router_score_function": changes_model,
        "moe_router_enable_expert_bias": changes_model,
        "moe_enable_routing_replay": Refused("router replay is not there", "write false", idle=idle),
        "moe_per_layer_logging": NoEffect("there is no auxiliary loss to log"),
        "moe_router_dtype": Refused("routers compute in the model's dtype", "leave it out", idle=idle),
        "ddp_config.grad_reduce_in_fp32": NoEffect("ZeRO 2 and 3 always reduce gradients in float32"),
        "ddp_config.overlap_grad_reduce": _KERNELS,
        "ddp_config.overlap_param_gather": _KERNELS,
        "ddp_config.fp8_param_gather": fp8,
        "ddp_config.average_in_collective": _KERNELS,
        "hf_export_config.distributed_save": _FILES,
        "hf_export_config.save_every_n_ranks": _FILES,
        "lora_config.lora_type": NoEffect("adapters are peft's, one a linear layer, as in SkyRL's fsdp"),
        "lora_config.merge_lora": NoEffect("adapters always reach the engines merged into the weights"),
        "lora_config.experts_shared_outer_loras": adapters,
        "lora_config.normalize_moe_lora": adapters,
        "optimizer_config_kwargs": RefusedKeys(
            "Megatron's optimizer is not run, and this would change the update",
            "write trainer.policy.optimizer_config instead",
            _OPTIMIZER_MEMORY,
            "Megatron keeps its optimizer there, and is not run; write offload_optimizer of "
            "trainer.arctic_rl.deepspeed.zero_optimization",
            (),
            idle,
        ),
        **dict.fromkeys(_FP8_FIELDS, fp8),
        "transformer_config_kwargs": RefusedKeys(
            "it may change the model",
            "leave it out, or put the value into the model folder's config.json",
            _MODEL_MEMORY,
            "Megatron lays out layers, kernels and recomputation so, and is not run; write "
            "trainer.gradient_checkpointing and trainer.arctic_rl.zero_stage",
            _FP8_FIELDS,
            idle,
        ),
        "empty_cuda_cache": NoEffect("when Megatron gives cached GPU memory back, not what it computes"),
        "model_config_kwargs": changes_model,
        "dist_ckpt_optim_fully_reshardable": _FILES,
        "freeze_moe_router": frozen,
        "freeze_dsa_indexer": frozen,
        "mtp_num_layers": heads,
        "mtp_loss_weight": heads,
        "mtp_loss_chunk_size": heads,
        "mtp_loss_topk": heads,
        "async_dist_ckpt_save": _FILES,
        "async_save_prestage_to_cpu": _FILES,
    }


_NOT_TRAINED = NoEffect("a reference model is not trained")

MEGATRON: dict[str, Entry] = under("trainer.policy.megatron_config", _megatron(without_megatron))
REFERENCE_MEGATRON: dict[str, Entry] = under(
    "trainer.ref.megatron_config",
    _megatron(first_of(without_reference, without_megatron))
    | dict.fromkeys(
        (
            "moe_aux_loss_coeff",
            "ddp_config.grad_reduce_in_fp32",
            "ddp_config.overlap_grad_reduce",
            "ddp_config.overlap_param_gather",
            "ddp_config.average_in_collective",
            "ddp_config.fp8_param_gather",
            "lora_config.lora_type",
            "lora_config.merge_lora",
            "lora_config.experts_shared_outer_loras",
            "lora_config.normalize_moe_lora",
            "optimizer_config_kwargs",
            "freeze_moe_router",
            "freeze_dsa_indexer",
        ),
        _NOT_TRAINED,
    ),
)
