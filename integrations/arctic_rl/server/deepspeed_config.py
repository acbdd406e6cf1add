"""DeepSpeed's config of an engine: what a recipe's own settings say, and ``trainer.arctic_rl.deepspeed`` under it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..config import nearest
from ..errors import ConfigError
from ..value_types import describe, matches

if TYPE_CHECKING:
    from .specs import TrainingSpec

SETTING = "trainer.arctic_rl.deepspeed"
"""Where a recipe writes the block, for messages."""

Bool, Count, Host = bool, int, Literal["cpu", "none"]
DType = Literal["fp32", "fp16", "bf16"]
_OFFLOAD = {"device": Host, "pin_memory": Bool}

PASSED: dict[str, Any] = {
    "communication_data_type": DType,
    "steps_per_print": Count,
    "wall_clock_breakdown": Bool,
    "memory_breakdown": Bool,
    "dump_state": Bool,
    "disable_python_gc": Bool,
    "log_level": Literal["debug", "info", "warning", "error", "critical"],
}
"""Top-level keys that are handed on, and their types; ``zero_optimization`` is the other one."""

ZERO_PASSED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "overlap_comm": (Bool, (2, 3)),
    "contiguous_gradients": (Bool, (1, 2, 3)),
    "reduce_scatter": (Bool, (1, 2, 3)),
    "reduce_bucket_size": (Count, (1, 2, 3)),
    "use_multi_rank_bucket_allreduce": (Bool, (1, 2)),
    "allgather_bucket_size": (Count, (1, 2)),
    "offload_optimizer": (_OFFLOAD, (1, 2, 3)),
    "offload_param": (_OFFLOAD, (3,)),
    "sub_group_size": (Count, (3,)),
    "stage3_prefetch_bucket_size": (Count, (3,)),
    "stage3_param_persistence_threshold": (Count, (3,)),
    "stage3_model_persistence_threshold": (Count, (3,)),
    "stage3_max_live_parameters": (Count, (3,)),
    "stage3_max_reuse_distance": (Count, (3,)),
    "stage3_use_all_reduce_for_fetch_params": (Bool, (3,)),
    "stage3_allgather_sequential": (Bool, (3,)),
    "log_trace_cache_warnings": (Bool, (3,)),
}
"""Keys of ``zero_optimization`` that are handed on, with their types and the ZeRO stages whose engine reads them."""

_ADAMW = "the optimizer is PyTorch's AdamW; write {section}"
_BATCHES = "micro-batches are cut here; write trainer.micro_train_batch_size_per_gpu or max_tokens_per_microbatch"
_MINI = "optimizer steps are counted in SkyRL's mini-batches; write trainer.policy_mini_batch_size"
_BF16 = "the recipe says which dtype is used; write trainer.bf16"
_LOSS_SCALE = "losses are summed and averaged over ranks here; leave it out"
_TRACKER = "metrics go to the recipe's tracker; write trainer.logger"
_PROFILER = "the recipe's own profiler is used; write trainer.policy.torch_profiler_config"
_CHECKPOINT = "DeepSpeed's checkpoints are not used; write trainer.ckpt_path and trainer.ckpt_interval"
_SCHEDULE = "the recipe's schedule is used; write {section}.scheduler"
_CHECKPOINTING = "the model's own checkpointing is used; write trainer.gradient_checkpointing"
_PARALLEL = "every rank is data-parallel here; leave it out"
_REPLICATED_BF16 = (
    "ZeRO stage 0 accumulates gradients in the dtype of trainer.bf16; write trainer.arctic_rl.zero_stage=1 to 3"
)
_COMPRESSED = "what is trained is the model as it is; leave it out"
_UNREAD = "nothing here reads it; leave it out"

_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "managed_gradient_accumulation"), _BATCHES
    ),
    "train_batch_size": _MINI,
    "gradient_clipping": "it is computed; write {section}.max_grad_norm",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast"), _BF16),
    "data_types": "gradients are accumulated in float32 and weights have the dtype of trainer.bf16; leave it out",
    **dict.fromkeys(("optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), _ADAMW),
    "scheduler": _SCHEDULE,
    **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"), _LOSS_SCALE),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), _TRACKER),
    "flops_profiler": _PROFILER,
    **dict.fromkeys(("checkpoint", "datastates_ckpt", "nebula"), _CHECKPOINT),
    "activation_checkpointing": _CHECKPOINTING,
    **dict.fromkeys(
        (
            "tensor_parallel",
            "expert_parallel",
            "pipeline",
            "seq_parallel_communication_data_type",
            "use_data_before_expert_parallelism",
            "elasticity",
        ),
        _PARALLEL,
    ),
    **dict.fromkeys(
        (
            "compression_training",
            "quantize_training",
            "weight_quantization",
            "sparse_attention",
            "sparse_gradients",
            "progressive_layer_drop",
            "hybrid_engine",
        ),
        _COMPRESSED,
    ),
    **dict.fromkeys(
        (
            "aio",
            "autotuning",
            "comms_logger",
            "compile",
            "curriculum_learning",
            "data_efficiency",
            "dataloader_drop_last",
            "disable_allgather",
            "eigenvalue",
            "graph_harvesting",
            "timers",
            "vocabulary_size",
        ),
        _UNREAD,
    ),
}

_READ_BY_INITIALIZE = dict.fromkeys(("sequence_parallel_size", "data_parallel_size"), _PARALLEL)
"""Keys that ``deepspeed.initialize`` reads past its config class."""

_LOSSY = "it changes or quantises what is communicated; leave it out"
_ZERO_REFUSED: dict[str, str] = {
    "stage": "it is computed; write trainer.arctic_rl.zero_stage",
    **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"), _LOSSY
    ),
    "round_robin_gradients": "DeepSpeed then mixes up which weight is where, and checkpoints with it; leave it out",
    "compute_grad_norm": "the gradient norm is a metric of every step; leave it out",
    **dict.fromkeys(("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"), _CHECKPOINT),
    **dict.fromkeys(
        ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"), _CHECKPOINT
    ),
    **dict.fromkeys(("cpu_offload", "cpu_offload_use_pin_memory"), "DeepSpeed took it away; write offload_optimizer"),
    "cpu_offload_param": "DeepSpeed took it away; write offload_param",
    "zero_hpz_partition_size": "weights are sharded over all ranks; leave it out",
    **dict.fromkeys(
        (
            "enable_sanity_checks",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
            "memory_efficient_linear",
            "override_module_apply",
            "parameter_alignment",
            "save_muon_momentum_buffer_in_memory",
            "stage3_module_granularity_threshold",
            "zenflow",
            "allgather_partitions",
        ),
        "the engines here are not tried with it; leave it out",
    ),
}


def deepspeed_config(spec: TrainingSpec) -> dict[str, Any]:
    """DeepSpeed's config of the policy, or of the critic.

    ``managed_gradient_accumulation`` is off: ``backward`` accumulates and ``step`` is the boundary, so that the number
    of micro-batches may differ from step to step and no boundary flag can be left in the wrong state. In bfloat16,
    gradients are reduced and accumulated in float32, as SkyRL's FSDP does; ZeRO stage 0 can only do so in bfloat16.
    """
    return _merged(_computed(spec), spec.deepspeed)


def check_deepspeed(spec: TrainingSpec) -> None:
    """Refuse keys of ``spec.deepspeed`` that would be lost, or would change what the recipe says elsewhere.

    Raises:
        ConfigError: a line for each key, with what to write instead.
    """
    problems = list(_problems(spec))
    if problems:
        raise ConfigError("\n".join(problems))


def built_settings(engine: Any) -> dict[str, Any]:
    """What a built engine says of the keys that are handed on or computed, in JSON types, by DeepSpeed's names."""
    config = engine._config
    zero = config.zero_config.model_dump(mode="json", by_alias=True)
    model_dtype, grad_accum_dtype = engine.get_data_types()
    values = {name: vars(config)[name] for name in (*PASSED, "gradient_clipping", "gradient_accumulation_steps")}
    values["communication_data_type"] = str(engine.communication_data_type)
    values |= {"bf16": str(model_dtype) == "torch.bfloat16", "torch_autocast": engine.torch_autocast_enabled()}
    values["data_types"] = {"grad_accum_dtype": str(grad_accum_dtype)}
    values["sequence_parallel_size"] = engine.sequence_parallel_size
    return values | {"zero_optimization": {name: zero[name] for name in ("stage", *ZERO_PASSED)}}


def _computed(spec: TrainingSpec) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": spec.optimizer.max_grad_norm,
        "bf16": {"enabled": spec.dtype == "bfloat16"},
        "zero_optimization": {"stage": spec.zero_stage, "overlap_comm": False, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if spec.dtype == "bfloat16" and spec.zero_stage > 0:
        config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return config


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        result[name] = _merged(result.get(name, {}), value) if isinstance(value, Mapping) else _plain(value)
    return copy.deepcopy(result)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _problems(spec: TrainingSpec) -> Iterator[str]:
    computed, section = _computed(spec), spec.optimizer.section
    for name, value in spec.deepspeed.items():
        if name == "zero_optimization":
            yield from _zero_problems(value, spec.zero_stage)
        elif name in PASSED:
            yield from _type_problem(f"{SETTING}.{name}", value, PASSED[name])
            if name == "communication_data_type" and spec.zero_stage == 0:
                yield _line(name, value, "it is for ZeRO stages 1, 2 and 3; write trainer.arctic_rl.zero_stage too")
        elif name in _READ_BY_INITIALIZE:
            yield _line(name, value, _READ_BY_INITIALIZE[name])
        elif name not in _REFUSED:
            yield f"{SETTING}.{name}={value} is not a key of DeepSpeed's: {nearest(name, _top_level())}"
        elif name == "data_types" and spec.zero_stage == 0 and spec.dtype == "bfloat16":
            yield _line(name, value, _REPLICATED_BF16)
        elif name not in computed or not _same(value, computed[name]):
            yield _line(name, value, _REFUSED[name].format(section=section))


def _zero_problems(block: Any, stage: int) -> Iterator[str]:
    if not isinstance(block, Mapping):
        yield _line("zero_optimization", block, "must be a mapping of names to values")
        return
    for key, value in block.items():
        name = f"zero_optimization.{key}"
        if key == "stage" and _same(value, stage):
            continue
        if key in _ZERO_REFUSED:
            yield _line(name, value, _ZERO_REFUSED[key])
        elif key not in ZERO_PASSED:
            known = ZERO_PASSED.keys() | _ZERO_REFUSED.keys()
            yield f"{SETTING}.{name}={value} is not a key of DeepSpeed's: {nearest(str(key), known)}"
        elif stage not in ZERO_PASSED[key][1]:
            right = " or ".join(map(str, ZERO_PASSED[key][1]))
            why = f"ZeRO stage {stage} does not read it"
            yield _line(name, value, f"{why}; write trainer.arctic_rl.zero_stage={right}")
        elif isinstance(ZERO_PASSED[key][0], dict):
            yield from _offload_problems(name, value)
        else:
            yield from _type_problem(f"{SETTING}.{name}", value, ZERO_PASSED[key][0])


def _offload_problems(name: str, block: Any) -> Iterator[str]:
    if not isinstance(block, Mapping) or "device" not in block:
        yield _line(name, block, f"must be a mapping; write {SETTING}.{name}.device=cpu")
        return
    for key, value in block.items():
        if key not in _OFFLOAD:
            yield _line(f"{name}.{key}", value, f"only offloading to host memory is served: {nearest(key, _OFFLOAD)}")
        else:
            yield from _type_problem(f"{SETTING}.{name}.{key}", value, _OFFLOAD[key])


def _type_problem(setting: str, value: Any, hint: Any) -> Iterator[str]:
    if hint is Count:
        if not matches(_plain(value), int) or _plain(value) < 1:
            yield f"{setting}={value}: must be a whole number of at least 1"
    elif not matches(value, hint):
        yield f"{setting}={value} is not {describe(hint)}"


def _same(value: Any, computed: Any) -> bool:
    """Whether a block says what is computed anyway; it may say less."""
    if isinstance(value, Mapping) and isinstance(computed, Mapping):
        return all(name in computed and _same(item, computed[name]) for name, item in value.items())
    return isinstance(value, bool) == isinstance(computed, bool) and value == computed


def _line(name: str, value: Any, why: str) -> str:
    return f"{SETTING}.{name}={value}: {why}"


def _top_level() -> set[str]:
    return {"zero_optimization", *PASSED, *_REFUSED, *_READ_BY_INITIALIZE}
