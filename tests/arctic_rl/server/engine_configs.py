"""What vLLM makes of a spec's arguments, in a process of its own; no engine is started."""

import dataclasses
import multiprocessing
import os
from typing import Any

from integrations.arctic_rl.server.sampling_spec import SamplingSpec, engine_arguments, engine_environment


def built_configs(specs: list[SamplingSpec]) -> list[dict[str, Any]]:
    """Values of the config that ``AsyncLLM`` is built from, for each spec."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_built, (specs,))


def _built(specs: list[SamplingSpec]) -> list[dict[str, Any]]:
    found = []
    for spec in specs:
        for name, value in engine_environment(spec).items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = {argument.name for argument in dataclasses.fields(AsyncEngineArgs)}
        config = AsyncEngineArgs(**engine_arguments(spec, known)).create_engine_config()
        found.append(
            {
                "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
                "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
                "max_model_len": config.model_config.max_model_len,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "enable_prefix_caching": config.cache_config.enable_prefix_caching,
                "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
                "enforce_eager": config.model_config.enforce_eager,
                "block_size": config.cache_config.block_size,
                "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
                "rms_norm_eps": config.model_config.hf_config.rms_norm_eps,
                "drafts": _drafts(config.speculative_config),
            }
        )
    return found


def _drafts(speculative: Any) -> dict[str, Any] | None:
    names = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "rejection_sample_method")
    return None if speculative is None else {name: vars(speculative)[name] for name in names}
