"""``generator.inference_engine``: the vLLM engines."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..devices import device_here
from ..server.sampling_spec import PROTECTED_ENGINE_ARGS
from ..server.speculation import SETTING, speculation_problems
from .entries import EFFECT_TESTS, Entry, NoEffect, PartOf, Refused, on_cpus, ours, refusal, skyrls, under

_PROCESSES = NoEffect("an engine's processes are on one node, children of its actor")
_TRANSFER = NoEffect("trainer.arctic_rl.weight_sync says how weights reach the engines")
_ROUTER = NoEffect("there is no router")
_PREFILL = PartOf("generator.inference_engine.enable_pd", "generator.inference_engine.enable_pd=false")
_OTHER_PRECISION = "rollouts in another precision than training change the result"

_PRECISIONS = ("quantization", "quantization_config", "kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")

_TYPED = {
    "dtype": "generator.inference_engine.model_dtype",
    "seed": "trainer.seed",
    "max_num_seqs": "generator.inference_engine.max_num_seqs",
    "max_num_batched_tokens": "generator.inference_engine.max_num_batched_tokens",
    "enable_prefix_caching": "generator.inference_engine.enable_prefix_caching",
    "enable_chunked_prefill": "generator.inference_engine.enable_chunked_prefill",
    "enforce_eager": "generator.inference_engine.enforce_eager",
    "gpu_memory_utilization": "generator.inference_engine.gpu_memory_utilization",
    "distributed_executor_backend": "generator.inference_engine.distributed_executor_backend",
    "tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
    "pipeline_parallel_size": "generator.inference_engine.pipeline_parallel_size",
    "data_parallel_size": "generator.inference_engine.data_parallel_size",
    "enable_expert_parallel": "generator.inference_engine.expert_parallel_size",
    "enable_return_routed_experts": "generator.inference_engine.enable_return_routed_experts",
    "language_model_only": "generator.inference_engine.language_model_only",
    "served_model_name": "generator.inference_engine.served_model_name",
    "enable_lora": "trainer.policy.model.lora.rank",
}
"""Engine arguments that a setting of SkyRL's rules."""


@functools.cache
def engine_argument_names() -> frozenset[str] | None:
    """Names of vLLM's ``AsyncEngineArgs``, read from its source without importing it; None without vLLM."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return None
    tree = ast.parse((Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    fields = (item.target for node in classes for item in node.body if isinstance(item, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


def _engine_arguments(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    known = engine_argument_names()
    for key, argument in value.items():
        name = f"{setting}.{key}"
        if key in _PRECISIONS:
            yield refusal(name, argument, _OTHER_PRECISION, "leave it out")
        elif key in PROTECTED_ENGINE_ARGS:
            yield refusal(name, argument, f"it cannot be set, {PROTECTED_ENGINE_ARGS[key]}", "leave it out")
        elif key in _TYPED:
            yield refusal(name, argument, "another setting rules it", f"write {_TYPED[key]}")
        elif known is not None and key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            yield refusal(name, argument, "vLLM has no such engine argument", hint)


def _speculation(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value is None:
        return
    problems = speculation_problems(value, device_here(cfg))
    lines = [refusal(problem.name, problem.value, problem.why, problem.instead) for problem in problems]
    yield from lines or _sampled_with_drafts(cfg)


def _sampled_with_drafts(cfg: Any) -> Iterable[str]:
    """What vLLM does not take together with drafts, request by request."""
    names = ["sampling_params"] + (["eval_sampling_params"] if cfg.trainer.eval_interval > 0 else [])
    for name in names:
        section = vars(cfg.generator)[name]
        additional = {} if section.additional_kwargs is None else section.additional_kwargs
        given = {"min_p": section.min_p} | {f"additional_kwargs.{key}": item for key, item in additional.items()}
        for key, item in given.items():
            if key.rpartition(".")[2] in ("min_p", "logit_bias") and item:
                why = "vLLM does not take it together with speculative decoding"
                yield refusal(f"generator.{name}.{key}", item, why, f"leave it out, or write {SETTING}=null")


_DELTA = (
    "sync_dir",
    "local_checkpoint_dir",
    "publish_staging_dir",
    "max_file_size_in_gb",
    "cloud_download_workers",
    "publish_num_workers",
    "checkpoint_load_format",
    "multi_thread_safetensors_max_workers",
)

ENGINE: dict[str, Entry] = under(
    "generator.inference_engine",
    {
        "model_dtype": ours("dtype of the engines, and in which weights reach them"),
        "fp8_weight_sync_mode": Refused(_OTHER_PRECISION, "write null"),
        "run_engines_locally": Refused("external servers are not there", "write true"),
        "num_engines": ours("engines, each one process"),
        "backend": Refused("engines are vLLM's", "write vllm"),
        "weight_sync_backend": _TRANSFER,
        "weight_transfer_threshold_cuda_ipc_GB": _TRANSFER,
        **{f"delta_weight_sync.{name}": _TRANSFER for name in _DELTA},
        "tensor_parallel_size": ours("GPUs that share every layer of an engine, on one node", idle=on_cpus),
        "pipeline_parallel_size": ours("groups of GPUs with a part of an engine's layers each", idle=on_cpus),
        "expert_parallel_size": NoEffect("experts are split as other layers are, whatever is written"),
        "data_parallel_size": Refused(
            "an engine is not split into data-parallel ones", "write 1, and as many times num_engines", idle=on_cpus
        ),
        "vllm_v1_disable_multiproc": NoEffect("SkyRL itself does not read it"),
        "enable_prefix_caching": ours("prompts seen before are not computed again"),
        "enable_chunked_prefill": ours("prompts are computed in parts; SkyRL's own engines do not read it"),
        "enable_return_routed_experts": Refused("router replay is not there", "write false"),
        "enable_return_sample_support_set": Refused("the sampler's support is not returned", "write false"),
        "max_num_batched_tokens": ours("tokens of an engine step"),
        "enforce_eager": ours("no CUDA graphs and no compilation", idle=on_cpus),
        "fully_sharded_loras": NoEffect("adapters reach the engines merged into the weights"),
        "enable_ray_prometheus_stats": NoEffect("engines report nothing to Ray, so there are no vllm/ metrics"),
        "gpu_memory_utilization": ours("share of a GPU's memory for an engine", idle=on_cpus),
        "offload_kv_for_weight_sync": Refused(
            "engines on GPUs of their own keep their caches' memory in a weight sync", "write false", idle=on_cpus
        ),
        "use_expandable_segments": ours(
            "engines take GPU memory in segments that grow, except for what sleeps", idle=on_cpus
        ),
        "max_num_seqs": ours("sequences of an engine step"),
        "served_model_name": skyrls(
            "what requests call the policy",
            "skyrl.backends.skyrl_train.inference_servers.utils:resolve_policy_model_name",
        ),
        "distributed_executor_backend": _PROCESSES,
        "language_model_only": Refused("multimodal models are not there yet", "write false and use a text model"),
        "engine_init_kwargs": ours("further arguments of vLLM's engine, as they are", limit=_engine_arguments),
        "speculative_config": ours(
            "drafts by n-grams (method: ngram), which the policy checks: its own samples and log-probs, sooner; "
            "engines on CPUs, and drafts by another model, are refused",
            EFFECT_TESTS,
            "tests/arctic_rl/server/test_speculation.py::test_log_probs_with_drafts_are_those_of_the_policy",
            limit=_speculation,
        ),
        "external_proxy_url": Refused("external servers are not there", "write null"),
        "external_server_urls": Refused("external servers are not there", "write null"),
        "enable_pd": Refused("engines of prefill or decoding only are not there", "write false"),
        "num_prefill": _PREFILL,
        "prefill_init_kwargs": _PREFILL,
        "decode_init_kwargs": _PREFILL,
        "router_init_kwargs": _ROUTER,
    },
)
