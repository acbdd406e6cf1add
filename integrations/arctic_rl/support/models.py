"""``trainer.policy``, ``trainer.ref`` and ``trainer.critic``, Megatron's settings apart."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from ..server.specs import INIT_METHODS
from .entries import (
    EFFECT_TESTS,
    Entry,
    Idle,
    NoEffect,
    PartOf,
    Refused,
    base_is_reference,
    first_of,
    on_cpus,
    ours,
    refusal,
    shown,
    under,
    without_critic,
    without_critic_lora,
    without_lora,
    without_megatron,
    without_reference,
)

_SHARDED = NoEffect("DeepSpeed ZeRO holds the model, see trainer.arctic_rl.zero_stage")
_OFFLOADED = NoEffect(
    "DeepSpeed ZeRO holds the model; write offload_optimizer or offload_param of "
    "trainer.arctic_rl.deepspeed.zero_optimization"
)

_WHOLE_ROWS = "a row is computed by one GPU here, with more memory than the recipe reckons with (on CPUs: no effect)"
_ONE_GPU_A_ROW = (
    "write 1; where a long row is too much for a GPU, trainer.gradient_checkpointing=true, "
    "trainer.arctic_rl.zero_stage=3, or offload_optimizer and offload_param of "
    "trainer.arctic_rl.deepspeed.zero_optimization help"
)
_REPLICATED = NoEffect(
    "each rank of a reference model holds all of it, on the host while others compute on GPUs that it shares"
)

_MERGED = NoEffect("adapters reach the engines merged into the weights")
_QUANTISED = PartOf("trainer.policy.model.fake_int4_qat.enabled", "no fake quantisation")

_LORA_DETAILS = (
    "alpha",
    "dropout",
    "lora_sync_path",
    "sync_mode",
    "target_modules",
    "exclude_modules",
    "init_method",
    "share_expert_adapters",
    "max_loras",
    "max_cpu_loras",
)
_INT4_DETAILS = ("group_size", "symmetric", "scale_divisor", "q_min", "bf16_base_path")
_PROFILING = "tests/arctic_rl/test_profiling.py::"
_WORKERS = "TestWorkersProfiler::test_"
_PROFILER_DETAILS = {
    "ranks": ("training ranks that are profiled", f"{_WORKERS}other_ranks_are_not_profiled"),
    "save_path": ("folder of the traces", "TestHooks::test_a_run_starts_steps_and_stops_the_profilers"),
    "skip_first": ("steps before the first cycle", f"{_WORKERS}the_schedule"),
    "wait": ("steps of a cycle that are not profiled", f"{_WORKERS}the_schedule"),
    "warmup": ("steps of a cycle that are profiled and not written", f"{_WORKERS}the_schedule"),
    "active": ("steps of a cycle that are written", f"{_WORKERS}the_schedule"),
    "repeat": ("cycles; 0 = all", f"{_WORKERS}the_schedule"),
    "activities": (
        "what is profiled; cuda on GPUs only",
        f"{_WORKERS}cuda_alone_without_a_gpu_is_the_cpu",
    ),
    "record_shapes": ("shapes of operands", f"{_WORKERS}what_is_recorded"),
    "profile_memory": ("allocations", f"{_WORKERS}what_is_recorded"),
    "with_stack": ("source lines", f"{_WORKERS}what_is_recorded"),
    "with_flops": ("operations of products", f"{_WORKERS}what_is_recorded"),
    "with_modules": ("modules", f"{_WORKERS}what_is_recorded"),
    "use_gzip": ("traces are compressed", f"{_WORKERS}compressed_traces"),
    "export_type": ("chrome_trace or stacks", f"{_WORKERS}stacks"),
}
_MEMORY = "tests/arctic_rl/server/test_gpu_memory.py::"
_TURNS = "tests/arctic_rl/test_colocated.py::"
_PRECISION_TEST = "tests/arctic_rl/test_support.py::test_the_compute_dtype_of_fsdp_agrees_with_bf16"
_INT4 = tuple(f"model.fake_int4_qat.{name}" for name in ("enabled", *_INT4_DETAILS))
_ADAPTERS = (*(f"model.lora.{name}" for name in ("rank", *_LORA_DETAILS)), *_INT4)


def _constant_rate(model: str) -> Idle:
    """Idle where the schedule of ``policy`` or ``critic`` has no warm-up."""

    def idle(cfg: Any) -> str | None:
        name = vars(cfg.trainer)[model].optimizer_config.scheduler
        return f"no warm-up with trainer.{model}.optimizer_config.scheduler={name}" if name == "constant" else None

    return idle


def _critic_alone(cfg: Any) -> str | None:
    return None if cfg.trainer.placement.colocate_all else "trainer.placement.colocate_all=false"


def _policy_alone(cfg: Any) -> str | None:
    placement = cfg.trainer.placement
    beside = placement.colocate_policy_ref and not (without_reference(cfg) or base_is_reference(cfg))
    return None if placement.colocate_all or beside else "the policy shares its GPUs with no other job"


def _no_critic_of_megatron(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value and cfg.trainer.strategy == "megatron":
        why = "SkyRL trains no critic with trainer.strategy=megatron"
        yield refusal(setting, value, why, "write trainer.strategy=fsdp, or leave it out")


def _whole_rows_on_gpus(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value > 1 and on_cpus(cfg) is None:
        yield refusal(setting, value, _WHOLE_ROWS, _ONE_GPU_A_ROW)


def _lora_scale(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value <= 0:
        yield refusal(setting, value, "adapters scaled by 0 or less are not trained", "write a whole number above 0")


def _lora_dropout(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if not 0 <= value < 1:
        yield refusal(setting, value, "no probability below 1", "write a number from 0 to below 1")


def _lora_layers(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if not value and setting.endswith("target_modules"):
        yield refusal(setting, value, "it names no layer", "write last parts of names of linear layers, or all-linear")
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            why = f"a text is a regular expression of whole names of layers, and this is none ({error})"
            yield refusal(setting, value, why, "write one, all-linear, or a list of last parts of names")


def _lora_rank(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value < 0:
        yield refusal(setting, value, "no rank", "write 0 to train all weights, or the rank of the adapters")


def _lora_init(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value not in INIT_METHODS:
        why = "the base model would not be the one of the model folder, or adapters are not initialised so by peft"
        yield refusal(setting, value, why, f"write one of {', '.join(INIT_METHODS)}")
    elif value == "orthogonal" and cfg.trainer.policy.model.lora.rank % 2:
        rank = cfg.trainer.policy.model.lora.rank
        yield refusal(setting, value, f"it needs an even trainer.policy.model.lora.rank, not {rank}", "write kaiming")


def _adapters(without: Idle) -> dict[str, Entry]:
    """What the policy's adapters and the critic's have in common; ``without`` tells recipes without any."""
    return {
        "model.lora.alpha": ours("adapters are scaled by alpha / rank", limit=_lora_scale, idle=without),
        "model.lora.dropout": ours(
            "of an adapter's inputs, in updates alone, as in SkyRL; prompts are not shared then",
            limit=_lora_dropout,
            idle=without,
        ),
        "model.lora.target_modules": ours("layers with an adapter, chosen by peft", limit=_lora_layers, idle=without),
        "model.lora.exclude_modules": ours("layers without one", limit=_lora_layers, idle=without),
    }


def _without_fsdp(cfg: Any) -> str | None:
    return "read with trainer.strategy=fsdp only" if cfg.trainer.strategy == "megatron" else None


def _without_profiler(cfg: Any) -> str | None:
    return None if cfg.trainer.policy.torch_profiler_config.enable else "no profiler"


def _profiled_ranks(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    placement = cfg.trainer.placement
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if any(not 0 <= rank < ranks for rank in value):
        yield refusal(setting, value, f"the policy has {ranks} ranks, counted from 0", "leave out those that are not")


def _trace_folder(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value and "://" not in value and not os.path.isabs(value):
        why = "a training worker would take it below a working folder of its own"
        yield refusal(setting, value, why, "write an absolute path")


_PROFILER_LIMITS = {"ranks": _profiled_ranks, "save_path": _trace_folder}


def _param_dtype(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    expected = "bf16" if cfg.trainer.bf16 else "fp32"
    if value != expected:
        yield refusal(
            setting, value, f"trainer.bf16={shown(cfg.trainer.bf16)} rules it", "write that alone, and leave this out"
        )


def _fsdp(idle: Idle, *, sharding: NoEffect = _SHARDED, offloading: NoEffect = _OFFLOADED) -> dict[str, Entry]:
    return {
        "fsdp_config.cpu_offload": offloading,
        "fsdp_config.reshard_after_forward": sharding,
        "fsdp_config.fsdp_size": sharding,
        "fsdp_config.mixed_precision.param_dtype": ours(
            "agrees with trainer.bf16, or is refused", _PRECISION_TEST, limit=_param_dtype, idle=idle
        ),
        "fsdp_config.mixed_precision.reduce_dtype": Refused(
            "gradients are reduced in float32", "leave it out", idle=idle
        ),
        "fsdp_config.mixed_precision.buffer_dtype": NoEffect("SkyRL itself does not read it"),
        "fsdp_config.wrap_policy": sharding,
    }


_RULED_ELSEWHERE = {
    "dtype": "write trainer.bf16",
    "torch_dtype": "write trainer.bf16",
    "attn_implementation": "the backend chooses an attention; leave it out",
    "use_cache": "training keeps no cache; leave it out",
}
"""Values of a model's config that something else rules, and what to do."""


def _values(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    for name in value:
        if name in _RULED_ELSEWHERE:
            yield refusal(f"{setting}.{name}", value[name], "another setting rules it", _RULED_ELSEWHERE[name])


def _values_of_the_policy(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    """SkyRL gives these to its training workers alone; engines take theirs from ``hf_overrides``."""
    yield from _values(setting, value, cfg)
    overrides = cfg.generator.inference_engine.engine_init_kwargs.get("hf_overrides")
    overrides = overrides if isinstance(overrides, dict) else {}
    for name, own in value.items():
        if name not in _RULED_ELSEWHERE and (name not in overrides or overrides[name] != own):
            engines = f"generator.inference_engine.engine_init_kwargs.hf_overrides.{name}"
            yield refusal(
                f"{setting}.{name}", own, "engines would sample from a model of another config", f"write {engines} too"
            )


_CONFIG_TEST = "tests/arctic_rl/server/test_load_model.py::test_values_of_a_models_config_are_those_of_the_recipe"


def _text_part(idle: Idle | None = None) -> Refused:
    return Refused("multimodal models are not there yet", "write false and use a text model", idle=idle)


POLICY: dict[str, Entry] = under(
    "trainer.policy",
    {
        "model.path": ours("loaded by every training worker and engine"),
        "model.lora.rank": ours("rank of peft's adapters, which alone are trained; 0 = all weights", limit=_lora_rank),
        **_adapters(without_lora),
        "model.lora.init_method": ours("initial values of adapters, by peft", limit=_lora_init, idle=without_lora),
        "model.lora.share_expert_adapters": Refused(
            "experts get no adapters of their own", "leave it out", idle=first_of(without_lora, without_megatron)
        ),
        **{f"model.lora.{name}": _MERGED for name in ("lora_sync_path", "sync_mode", "max_loras", "max_cpu_loras")},
        "model.fake_int4_qat.enabled": Refused("fake quantisation is not there", "write false"),
        **{f"model.fake_int4_qat.{name}": _QUANTISED for name in _INT4_DETAILS},
        "optimizer_config.lr": ours("AdamW's learning rate at the top of the schedule"),
        "optimizer_config.adam_betas": ours("AdamW"),
        "optimizer_config.weight_decay": ours("AdamW, on every parameter"),
        "optimizer_config.max_grad_norm": ours("clipping by L2 norm; 0 = none"),
        "optimizer_config.num_warmup_steps": ours("warm-up, in optimizer steps", idle=_constant_rate("policy")),
        "optimizer_config.scheduler": ours("the schedule of that name in transformers"),
        "optimizer_config.offload_after_step": ours(
            "false = the optimizer keeps its memory while jobs on the same GPUs take their turns",
            EFFECT_TESTS,
            f"{_TURNS}test_an_optimizer_that_is_not_to_leave_stays_on_the_gpu",
            idle=_policy_alone,
        ),
        **_fsdp(_without_fsdp),
        "sequence_parallel_size": Refused(_WHOLE_ROWS, _ONE_GPU_A_ROW, idle=on_cpus),
        "use_torch_compile": NoEffect("entropy is taken in chunks that are not compiled"),
        "record_memory": ours(
            "what is in a training rank's GPU memory, written to ckpt_path/memory_snapshots after each backward pass "
            "and step",
            EFFECT_TESTS,
            f"{_MEMORY}test_snapshots_are_written_where_skyrls_workers_write_them",
            idle=on_cpus,
        ),
        "torch_profiler_config.enable": ours(
            "torch.profiler in the policy's training ranks",
            f"{_PROFILING}TestHooks::test_a_run_starts_steps_and_stops_the_profilers",
        ),
        **{
            f"torch_profiler_config.{name}": ours(
                what, f"{_PROFILING}{test}", limit=_PROFILER_LIMITS.get(name), idle=_without_profiler
            )
            for name, (what, test) in _PROFILER_DETAILS.items()
        },
        "model_config_kwargs": ours(
            "values in place of those of the model's config.json; engines take theirs from engine_init_kwargs."
            "hf_overrides, which must agree",
            _CONFIG_TEST,
            limit=_values_of_the_policy,
            idle=_without_fsdp,
        ),
        "language_model_only": _text_part(),
        "inference_only_init": Refused("this backend trains", "write false"),
    },
)

REFERENCE: dict[str, Entry] = under(
    "trainer.ref",
    {
        "model.path": ours("the reference model of a KL term; unset = the policy's", idle=without_reference),
        **dict.fromkeys(_ADAPTERS, NoEffect("SkyRL does not read it: a reference model has no adapter")),
        "sequence_parallel_size": Refused(_WHOLE_ROWS, _ONE_GPU_A_ROW, idle=first_of(without_reference, on_cpus)),
        **_fsdp(first_of(without_reference, _without_fsdp), sharding=_REPLICATED, offloading=_REPLICATED),
        "model_config_kwargs": ours(
            "as the policy's, for the reference model",
            _CONFIG_TEST,
            limit=_values,
            idle=first_of(without_reference, _without_fsdp),
        ),
        "language_model_only": _text_part(without_reference),
    },
)

CRITIC: dict[str, Entry] = under(
    "trainer.critic",
    {
        "model.path": ours("the value model, trained by ranks of its own; unset = none", limit=_no_critic_of_megatron),
        "model.lora.rank": ours(
            "rank of its adapters, which the value head has too; 0 = all weights are trained",
            limit=_lora_rank,
            idle=without_critic,
        ),
        **_adapters(without_critic_lora),
        **{
            f"model.lora.{name}": NoEffect("SkyRL does not read it of a critic")
            for name in _LORA_DETAILS
            if name not in ("alpha", "dropout", "target_modules", "exclude_modules")
        },
        **dict.fromkeys(_INT4, NoEffect("SkyRL does not read it of a critic")),
        "optimizer_config.lr": ours("AdamW's learning rate at the top of the critic's schedule", idle=without_critic),
        "optimizer_config.adam_betas": ours("AdamW", idle=without_critic),
        "optimizer_config.weight_decay": ours("AdamW, on every parameter", idle=without_critic),
        "optimizer_config.max_grad_norm": ours("clipping by L2 norm; 0 = none", idle=without_critic),
        "optimizer_config.num_warmup_steps": ours(
            "warm-up, in optimizer steps of the critic", idle=first_of(without_critic, _constant_rate("critic"))
        ),
        "optimizer_config.scheduler": ours("the schedule of that name in transformers", idle=without_critic),
        "optimizer_config.offload_after_step": ours(
            "as the policy's, with trainer.placement.colocate_all", idle=first_of(without_critic, _critic_alone)
        ),
        **_fsdp(first_of(without_critic, _without_fsdp)),
        "sequence_parallel_size": ours(
            "rows of an uneven mini-batch weigh what SkyRL's ranks would give them; above 1 it is refused on GPUs",
            limit=_whole_rows_on_gpus,
            idle=without_critic,
        ),
        "model_config_kwargs": ours(
            "values in place of those of its config.json",
            "tests/arctic_rl/server/test_critic.py::test_values_of_its_config_are_those_of_the_recipe",
            limit=_values,
            idle=first_of(without_critic, _without_fsdp),
        ),
    },
)
