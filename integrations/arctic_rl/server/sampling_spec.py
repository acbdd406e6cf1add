"""What a vLLM engine is built from: its settings, and the arguments and environment that follow from them."""

from __future__ import annotations

import copy
import difflib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import UnsupportedError
from .allocator import environment_with_segments
from .speculation import SETTING as SPECULATION
from .speculation import speculation_problems
from .weight_extension import WeightExtension

_PLACED = (
    "the plan places an engine's processes; write tensor_parallel_size or num_engines of generator.inference_engine"
)

PROTECTED_ENGINE_ARGS = {
    "model": "it is trainer.policy.model.path",
    "tokenizer": "it is trainer.policy.model.path",
    "worker_extension_cls": "the weight sync needs its own",
    "logprobs_mode": "log-probs are those of the distribution that is sampled, or they would not match the trainer's",
    "generation_config": "sampling parameters come from the recipe only",
    "override_generation_config": "sampling parameters come from the recipe only; write generator.sampling_params",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "kv_cache_memory_bytes": "write trainer.arctic_rl.cpu_kv_cache_gib",
    "weight_transfer_config": "write trainer.arctic_rl.weight_sync",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), f"write {SPECULATION}"),
    "enable_sleep_mode": "engines sleep where they share GPUs; write trainer.placement.colocate_all",
    **dict.fromkeys(
        (
            "data_parallel_address",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_rank",
            "data_parallel_rpc_port",
            "data_parallel_size_local",
            "data_parallel_start_rank",
            "device_ids",
            "enable_elastic_ep",
            "master_addr",
            "master_port",
            "nnodes",
            "node_rank",
            "prefill_context_parallel_size",
        ),
        _PLACED,
    ),
}


@dataclass(frozen=True)
class SamplingSpec:
    """Everything one vLLM engine is built from."""

    model_path: str
    """Folder or hub name of a Hugging Face causal language model with its tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Dtype of the weights, the activations and the KV cache."""
    tensor_parallel_size: int
    """Processes that share every layer of one engine; 1 on CPUs."""
    max_model_len: int | None
    """Longest prompt and response together, in tokens; None = the model's own limit."""
    max_num_seqs: int
    """Most sequences in one engine step."""
    max_num_batched_tokens: int
    """Most tokens in one engine step."""
    enable_prefix_caching: bool
    """Keep the KV blocks of prompts for later requests with the same beginning."""
    enforce_eager: bool
    """Run without CUDA graphs and compilation; CPUs always do."""
    device: Literal["cpu", "cuda"]
    """Where the model lives."""
    cpu_kv_cache_gib: float
    """KV cache of an engine on CPUs, in GiB, taken at start; unused on GPUs."""
    gpu_memory_utilization: float
    """Share of a GPU's memory for the engine; unused on CPUs."""
    seed: int
    """The engine's own seed, for requests without one."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine by name; they win over the fields above."""
    log_file: str | None = None
    """File that gets the stdout and stderr of the engine's processes; None = those of the parent."""
    scratch_directory: str | None = None
    """Folder (a short path) for the sockets and files that the engine's processes leave behind; None, or one that this
    node does not have = a temporary one, which ``shutdown`` removes but a killed worker does not."""
    threads: int = 1
    """Compute threads of the engine on CPUs."""
    expandable_segments: bool = False
    """Whether memory is taken in segments that grow, that of what sleeps apart; False on CPUs."""
    enable_sleep_mode: bool = False
    """Let ``sleep`` free GPU memory; unused on CPUs, where sleeping frees nothing."""
    pipeline_parallel_size: int = 1
    """Groups of such processes that have a part of the layers each; 1 on CPUs."""
    visible_devices: str | None = None
    """The engine's GPUs, as ``CUDA_VISIBLE_DEVICES`` names them; None = those that the process sees."""
    weight_transfer: Literal["nccl", "ipc"] | None = None
    """vLLM's transfer engine that weights come by; None = they come in files and parts."""
    speculative_config: dict[str, Any] | None = None
    """Speculative decoding by n-grams, as vLLM's argument of that name (``speculation``); None = none."""

    @property
    def gpus(self) -> int:
        """GPUs of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise UnsupportedError(f"sampling {name}={getattr(self, name)}: must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UnsupportedError(f"sampling max_model_len={self.max_model_len}: must hold a prompt and a response")
        if self.device == "cpu" and self.cpu_kv_cache_gib <= 0:
            raise UnsupportedError(f"sampling cpu_kv_cache_gib={self.cpu_kv_cache_gib}: must be above 0")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.device == "cpu" and getattr(self, name) > 1:
                raise UnsupportedError(
                    f"generator.inference_engine.{name}={getattr(self, name)} on CPUs: an engine is one process "
                    "there; write 1 and raise generator.inference_engine.num_engines"
                )
        if self.speculative_config is not None:
            problems = speculation_problems(self.speculative_config, self.device)
            if problems:
                raise UnsupportedError("\n".join(map(str, problems)))
        for name in self.engine_kwargs:
            if name in PROTECTED_ENGINE_ARGS:
                raise UnsupportedError(
                    f"generator.inference_engine.engine_init_kwargs.{name}: cannot be set, "
                    f"{PROTECTED_ENGINE_ARGS[name]}; leave it out"
                )


ONEDNN_KERNELS = "64"
"""Kernels that oneDNN keeps compiled in an engine on CPUs; a step takes less than ten."""


def engine_environment(spec: SamplingSpec) -> dict[str, str | None]:
    """Environment variables that an engine needs before vLLM is imported; None = must not be set.

    On CPUs the model runs inside the engine's process (one process fewer, and none that polls while idle), which
    vLLM allows only with its multiprocessing switched off; the OpenMP runtime then reads its threads from here. Eager
    engines still compile two sampling functions at their first request, which takes a compiler and 2 to 20 s.
    oneDNN keeps a kernel for every number of tokens it has met, 1,024 unless told otherwise, of some 0.4 MiB each.
    """
    variables: dict[str, str | None] = {"VLLM_NO_USAGE_STATS": "1"}
    if os.path.isdir(spec.model_path):
        variables["HF_HUB_OFFLINE"] = "1"
    if spec.scratch_directory is not None:
        variables |= {"VLLM_RPC_BASE_PATH": spec.scratch_directory, "TMPDIR": spec.scratch_directory}
    if spec.device == "cuda" and spec.scratch_directory is not None:
        # Compiled kernels would go with the run, and shared memory is often mounted without leave to run code.
        kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", kept)
    if spec.expandable_segments:
        variables |= environment_with_segments()
    if spec.visible_devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    if spec.weight_transfer == "ipc":
        # The handles of shared GPU memory reach the engine's processes as pickled text.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if spec.device == "cpu":
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": None,
            "OMP_NUM_THREADS": str(spec.threads),
            "OMP_WAIT_POLICY": "passive",
            "TORCHDYNAMO_DISABLE": "1",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ONEDNN_KERNELS,
        }
    return variables


def engine_arguments(spec: SamplingSpec, known: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs``.

    Args:
        spec: the engine's settings.
        known: names that ``AsyncEngineArgs`` accepts.

    Raises:
        UnsupportedError: for a name in ``engine_kwargs`` that vLLM does not know, with the nearest that it does.
    """
    known = set(known)
    for name in spec.engine_kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UnsupportedError(
                f"generator.inference_engine.engine_init_kwargs.{name}: vLLM has no such engine argument{hint}"
            )
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "trust_remote_code": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": f"{WeightExtension.__module__}.{WeightExtension.__qualname__}",
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if spec.device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": int(spec.cpu_kv_cache_gib * 2**30),
        }
    else:
        arguments |= {
            "pipeline_parallel_size": spec.pipeline_parallel_size,
            "distributed_executor_backend": "mp" if spec.gpus > 1 else "uni",
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "enable_sleep_mode": spec.enable_sleep_mode,
        }
    if spec.weight_transfer is not None:
        arguments["weight_transfer_config"] = {"backend": spec.weight_transfer}
    if spec.speculative_config is not None:
        arguments["speculative_config"] = copy.deepcopy(spec.speculative_config)
    return arguments | spec.engine_kwargs


def end_token_ids(model_path: str) -> list[int]:
    """Every end-of-sequence id that the model's ``generation_config.json`` and ``config.json`` declare."""
    from transformers.utils import cached_file

    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        if path is None:
            continue
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        for section in (config, config.get("text_config", {})):
            value = section.get("eos_token_id")
            found += [] if value is None else [value] if isinstance(value, int) else value
    return list(dict.fromkeys(found))
