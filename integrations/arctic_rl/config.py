"""The ``trainer.arctic_rl.*`` settings and the checks that need nothing but themselves."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_origin

from .errors import ConfigError
from .value_types import describe, matches

PREFIX = "trainer.arctic_rl"


@dataclass
class ArcticRLConfig:
    """Settings of the Arctic RL backend; every one is optional.

    What SkyRL's own config says (learning rate, clip range, batch sizes, placement, sampling) is read from there.

    Raises:
        ConfigError: when a value has the wrong type, is outside its choices or outside its range.
    """

    backend: str = "builtin"
    """Name of the registered remote backend that trains and samples, or the dotted path of one of your own."""
    comm_protocol: Literal["ray", "http"] = "ray"
    """How the backend is reached: ray = workers of this run on the Ray cluster; http = a server that is up already."""
    server_url: str | None = None
    """URL of that server (``python -m integrations.arctic_rl.server`` prints it); with comm_protocol=http only."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage of the policy and the critic: 0 replicates everything, 1 shards the optimizer, 2 gradients
    too, 3 weights too."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """More of DeepSpeed's own config for the policy and the critic: offloading, bucket sizes, communication_data_type,
    its logs. A key that another setting rules must agree with it, one that would be lost is refused."""
    device: Literal["cpu", "cuda"] | None = None
    """Where models run: cpu = each "GPU" of the recipe is a process on the first node; cuda = GPUs that Ray gives;
    None = cuda where the Ray cluster has GPUs (in a dry run: cluster_gpus, this machine, or a cluster that is up),
    else cpu."""
    cluster_gpus: list[int] | None = None
    """GPUs of each node of the cluster that a dry run and the doctor plan for, such as [8,8,4]; None = in a dry run as
    many nodes as the recipe's own counts need, for the doctor this machine."""
    gpu_timeout_s: float = 180.0
    """Seconds to wait for GPUs that other jobs on the Ray cluster hold."""
    max_cpu_workers: int = 4
    """On CPUs, the most worker processes (training ranks, the critic's too, reference ranks and engines) one run
    may start."""
    cpu_threads: int | None = None
    """Compute threads of each CPU worker; None = the machine's cores for a training rank (on GPUs, shared by the ranks
    of a node), 1 for an engine."""
    cpu_kv_cache_gib: float = 0.25
    """Key-value cache of each vLLM engine on a CPU, in GiB."""
    weight_sync: Literal["shared_memory", "low_memory", "nccl", "ipc"] | None = None
    """How weights reach the engines: shared_memory = one file on their node; low_memory = a bucket at a time; nccl =
    broadcast between GPUs; ipc = GPU memory that colocated jobs share. None = the fastest that the placement allows;
    the log says which (docs/weight_sync.md)."""
    weight_sync_bucket_mb: int = 256
    """MiB of a bucket of weight_sync=low_memory, nccl or ipc; a tensor that is larger makes a bucket of its own."""
    env_modules: list[str] = field(default_factory=list)
    """Modules that register gym environments; imported in every process that makes or runs environments."""
    processor_modules: list[str] = field(default_factory=list)
    """Modules that register post-processors, losses or a backend here, or policy losses or advantage estimators with
    SkyRL; imported before the recipe is checked, and in every training worker."""
    loss_fn: str | None = None
    """Name or dotted path of a loss of your own, run in place of trainer.algorithm.policy_loss_type; the KL and
    entropy terms stay those of trainer.algorithm. None = the recipe's policy loss."""
    loss_config: dict[str, Any] = field(default_factory=dict)
    """Handed to that loss as its ``config``."""
    logits_optimization: Literal["none", "compute", "memory"] | None = None
    """How log-probs come from the last layer: none = all logits at once, compute = chunks of existing logits, memory =
    chunks of logits from hidden states; None = memory where the model has a linear LM head, else compute."""
    logits_optimization_peak_mem_size_in_gib: float | None = None
    """GiB that the buffers for logits may take; None = 1 on GPUs, 0.01 on CPUs."""
    logits_compute_in_fp32: bool = True
    """Softmax in float32 whatever the model's dtype; false = in the logits' dtype (bfloat16: off by up to 0.1 nat)."""
    logits_compute_from_fp32_inputs: bool = False
    """Multiply float32 copies of hidden states and LM head, so that logits are float32 too."""
    use_zorro: bool | None = None
    """Compute each prompt once for all rollouts of its group, in log-probs and updates: true = or refuse the run,
    naming what in the model stands against it; None = where the model allows it; false = never."""
    zorro_self_check: bool = True
    """Before prompts are first shared, compare log-probs of a small group with those of whole rows. Where they differ,
    use_zorro=None shares no prompts if it is seen when the model is loaded; else the run ends."""
    attention: str | None = None
    """Attention of models that share no prompts (with use_zorro=false), by its name in transformers: sdpa or eager
    anywhere, flash_attention_2 or flash_attention_3 on GPUs, arctic_varlen on CPUs; None = flash_attention_2 on GPUs,
    arctic_varlen on CPUs."""
    use_liger: bool = False
    """Liger's kernels in place of norms, MLPs and rotary embeddings; on GPUs only, and never its fused losses."""
    lr_warmup_ratio: float | None = None
    """Warm-up of the policy's schedule as a share of all its optimizer steps, rounded to whole steps; None =
    trainer.policy.optimizer_config.num_warmup_steps."""
    min_lr_ratio: float | None = None
    """Where the learning rate ends, as a share of its peak; for the schedules cosine_with_min_lr,
    cosine_warmup_with_min_lr, which need it, and polynomial, of the policy or the critic. None = the schedule's own
    end."""
    scoring_workers: int | None = None
    """Processes that run environment calls; None = the cores of the machine, at most 8."""
    scoring_time_limit_s: float = 30.0
    """Seconds after which one environment call is killed together with its process, which is then replaced. A step of
    an environment with a limit of its own (``max_step_s``, as bird has) is killed 5 s past that one instead."""
    scoring_memory_limit_mb: int = 512
    """Memory limit of one scoring process, in MiB."""
    max_scorer_failures: int = 0
    """Failures of the scorer itself (not of a model's answer) that a run survives; one more ends it."""
    dry_run: bool = False
    """Print what the run would do and what stands against it, and start nothing; needs no GPU, data set or model."""
    max_skipped_steps: int = 10
    """Optimizer steps in a row, of one model, that may be skipped because the gradient is not finite; one more ends
    the run."""
    max_engine_restarts: int = 8
    """Restarts of dead or hanging sampling engines that a run survives; one more ends it."""
    worker_timeout_s: float = 600.0
    """Seconds without a sign of life after which a worker process counts as dead. However long a call takes, a worker
    gives one between any two native operations."""
    startup_timeout_s: float = 600.0
    """Seconds that bringing up all workers may take, and later an engine that is started anew."""
    shutdown_timeout_s: float = 20.0
    """Seconds that workers get to stop by themselves before they are killed."""

    def __post_init__(self) -> None:
        problems = [*_type_problems(self), *_range_problems(self)]
        if problems:
            raise ConfigError("\n".join(problems))


_RANGES: dict[str, tuple[float, float | None]] = {
    "max_cpu_workers": (2, 64),
    "cpu_threads": (1, 1024),
    "cpu_kv_cache_gib": (0.01, None),
    "weight_sync_bucket_mb": (1, None),
    "logits_optimization_peak_mem_size_in_gib": (1e-6, None),
    "lr_warmup_ratio": (0, 1),
    "min_lr_ratio": (0, 1),
    "scoring_workers": (1, 1024),
    "scoring_time_limit_s": (0.1, None),
    "scoring_memory_limit_mb": (256, None),
    "max_scorer_failures": (0, None),
    "gpu_timeout_s": (1, None),
    "max_skipped_steps": (0, None),
    "max_engine_restarts": (0, None),
    "worker_timeout_s": (5, None),
    "startup_timeout_s": (1, None),
    "shutdown_timeout_s": (0.1, None),
}


def _type_problems(config: ArcticRLConfig) -> Iterable[str]:
    hints = typing.get_type_hints(type(config))
    for item in fields(config):
        value = vars(config)[item.name]
        if not matches(value, hints[item.name]):
            yield f"{PREFIX}.{item.name}={value!r} is not {describe(hints[item.name])}"


def _range_problems(config: ArcticRLConfig) -> Iterable[str]:
    for name, (low, high) in _RANGES.items():
        value = vars(config)[name]
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            yield f"{PREFIX}.{name}={value!r} is out of range: write a value {limit}"
    nodes = config.cluster_gpus
    if matches(nodes, list[int]) and (not nodes or min(nodes) < 0):
        yield f"{PREFIX}.cluster_gpus={nodes!r} is out of range: write a number of at least 0 for each node, or null"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known name closest to ``name``, or listing all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(known)}"


def check_setting_names(overrides: Iterable[str]) -> None:
    """Refuse unknown names below ``trainer.arctic_rl`` in a list of ``key=value`` overrides.

    Raises:
        ConfigError: one line for each unknown name, with the nearest known one.
    """
    hints = typing.get_type_hints(ArcticRLConfig)
    known = set(hints)
    problems = []
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+")
        if not key.startswith(f"{PREFIX}."):
            continue
        name = key.removeprefix(f"{PREFIX}.")
        mapping, _, inner = name.partition(".")
        if name not in known and not (inner and get_origin(hints.get(mapping)) is dict):
            problems.append(f"{key} is not a setting of the Arctic RL backend: {nearest(name, known)}")
    if problems:
        raise ConfigError("\n".join(problems))
