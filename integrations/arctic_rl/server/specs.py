"""What the server is told when a run starts: plain frozen values, built from the recipe, sent to every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW and its learning-rate schedule; the horizon is passed when training is initialised."""

    lr: float
    """Peak learning rate."""
    betas: tuple[float, float]
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float
    """Decoupled weight decay, on every parameter."""
    max_grad_norm: float
    """The gradient is scaled down to this L2 norm; 0 = no clipping."""
    scheduler: str
    """Name of a ``transformers`` learning-rate schedule."""
    num_warmup_steps: int
    """Warm-up, in optimizer steps."""
    lr_warmup_ratio: float | None = None
    """Warm-up as a share of the horizon; None = ``num_warmup_steps``."""
    min_lr_ratio: float | None = None
    """Rate at the end over the peak rate, where the schedule has such an end; None = the schedule's own."""
    section: str = "trainer.policy.optimizer_config"
    """Where a recipe writes these settings, for messages."""


INIT_METHODS = ("kaiming", "gaussian", "orthogonal")
"""How adapters begin: those of ``peft`` with B A = 0 that leave the base model as it is. The first is its default."""


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters, trained in place of the model's own weights."""

    rank: int
    """Rank of every adapter."""
    alpha: float
    """An adapter is scaled by alpha / rank."""
    dropout: float
    """Probability with which an adapter's inputs are dropped in training."""
    target_modules: str | tuple[str, ...]
    """``all-linear``, a regular expression of whole names of layers, or last parts of their names."""
    exclude_modules: str | tuple[str, ...] | None
    """Layers without an adapter, a regular expression or last parts of names; None = none."""
    init_method: str
    """Initial values, one of ``INIT_METHODS``."""
    setting: str = "trainer.policy.model.lora"
    """Where the recipe says so, for messages."""
    causal_lm: bool = True
    """Whether the model is a language model, whose LM head ``all-linear`` leaves out."""


@dataclass(frozen=True)
class TrainingSpec:
    """The process group of one model."""

    role: Literal["policy", "critic", "ref"]
    """``policy`` and ``critic``, a value model, are trained, ``ref`` only computes log-probs."""
    model_path: str
    """Folder or hub name of a Hugging Face causal language model."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of the forward and backward pass; the optimizer's master weights are float32 either way."""
    zero_stage: int
    """DeepSpeed ZeRO stage of what is trained; a reference model is replicated."""
    optimizer: OptimizerSpec
    """Unused for a reference model."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""
    gradient_checkpointing_use_reentrant: bool
    """Which of PyTorch's two checkpointing implementations is used."""
    seed: int
    """Seed of Python, NumPy and PyTorch in every rank."""
    device: Literal["cpu", "cuda"]
    """Where the model lives."""
    threads: int
    """Compute threads of one process on a CPU."""
    processor_modules: tuple[str, ...]
    """Modules to import that register post-processors or losses."""
    loss_fn: str | None
    """A loss of the user's that updates will name; looked up at start-up, so that a wrong name ends the run there."""
    use_zorro: bool | None = None
    """Whether prompts are shared between rollouts: True = the model must allow it, None = if it does."""
    zorro_self_check: bool = True
    """Whether a few tokens are run with and without shared prompts before the model may share any."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Values in place of those of the model's ``config.json``, by name."""
    policy_loss: bytes | None = field(default=None, repr=False)
    """A loss that updates will carry (``processors.skyrl_losses``), loaded at start-up for the same reason."""
    value_head: str | None = None
    """Of a critic: name of the module that gives its values."""
    fresh_value_head: bool = False
    """Of a critic: draw the value head afresh even where ``model_path`` holds one."""
    lora: LoraSpec | None = None
    """Adapters that are trained; None = all weights are."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """More of DeepSpeed's config, below what the other settings say; empty for a reference model."""
    attention: str | None = None
    """Attention by its name in ``transformers``, of a model that shares no prompts; None = the device's usual one."""
    flash_attention: bool = True
    """Whether that usual one is flash attention on GPUs, or else ``sdpa``."""
    use_liger: bool = False
    """Liger's kernels in place of norms, MLPs and rotary embeddings."""
    expandable_segments: bool = False
    """Whether memory of the rank's GPU is taken in segments that grow; False on CPUs."""
    memory_snapshots: str | None = None
    """Folder for what is in GPU memory after each backward pass and step; None = not recorded, as on CPUs."""

    visible_devices: str | None = None
    """The rank's GPU, as ``CUDA_VISIBLE_DEVICES`` names it; None = what the process sees."""

    def __post_init__(self) -> None:
        from .deepspeed_config import check_deepspeed
        from .kernel_settings import check_kernels

        check_deepspeed(self)
        check_kernels(self)


@dataclass(frozen=True)
class ServerConfig:
    """Everything a remote backend needs to bring up a run."""

    policy: TrainingSpec
    """The model that is trained."""
    reference: TrainingSpec | None
    """The reference model of a KL term; None = the recipe uses none, or the policy without its adapters is the one."""
    sampling: Any
    """The ``SamplingSpec`` of every engine."""
    policy_ranks: int
    """Data-parallel training processes."""
    ref_ranks: int
    """Processes of the reference model; 0 without one of its own."""
    engines: int
    """Sampling engines."""
    max_cpu_workers: int
    """See ``trainer.arctic_rl.max_cpu_workers``."""
    sync_dtype: str
    """Dtype in which weights reach the engines."""
    log_dir: str
    """Folder of one log file a worker."""
    run_id: str
    """Marks every process of this run (environment variable ``ARCTIC_RL_RUN_ID``)."""
    startup_timeout_s: float
    """Seconds that bringing up all workers may take."""
    shutdown_timeout_s: float
    """Seconds that workers get to stop by themselves."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of every worker."""
    max_engine_restarts: int = 8
    """See ``trainer.arctic_rl.max_engine_restarts``."""
    worker_timeout_s: float = 600.0
    """See ``trainer.arctic_rl.worker_timeout_s``."""
    server_url: str | None = None
    """Where a server over HTTP is; None = the backend starts workers of its own."""
    mini_batch_rows: int | None = None
    """Rows of one optimizer step of the policy, for a backend that is told so at its start; None = not told."""
    micro_batch_rows: int | None = None
    """Most rows of a micro-batch of a rank, for such a backend; None = not told."""
    critic: TrainingSpec | None = None
    """The value model of PPO; None = the recipe uses none."""
    critic_ranks: int = 0
    """Data-parallel processes of the critic; 0 without one."""
    policy_nodes: int = 1
    """On GPUs, the different nodes of the policy's ranks, as many ranks on each."""
    ref_nodes: int = 1
    """The same of the reference model."""
    critic_nodes: int = 1
    """The same of the critic."""
    colocate_all: bool = False
    """Whether training, log-probs and sampling share GPUs and take turns on them."""
    colocate_policy_ref: bool = False
    """Whether the policy and the reference model share GPUs and take turns on them."""
    optimizers_that_stay: tuple[str, ...] = ()
    """Jobs whose optimizer keeps its memory while jobs compute that they share GPUs with."""
    gpu_timeout_s: float = 180.0
    """Seconds to wait for GPUs that other jobs hold."""
    weight_sync: Literal["shared_memory", "low_memory", "nccl", "ipc"] | None = None
    """See ``trainer.arctic_rl.weight_sync``."""
    weight_sync_bucket_mb: int = 256
    """See ``trainer.arctic_rl.weight_sync_bucket_mb``."""
