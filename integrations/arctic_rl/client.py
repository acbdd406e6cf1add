"""A backend for scripts that drive a server without SkyRL: its config, and batches from lists of token ids."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .backends.handle import BackendHandle
from .backends.registry import RemoteBackendRegistry, over_http
from .config import nearest
from .errors import ConfigError
from .server.sampling_spec import SamplingSpec
from .server.specs import OptimizerSpec, ServerConfig, TrainingSpec
from .zorro import WHERE_POSSIBLE

if TYPE_CHECKING:
    import torch

    from .backends.base import RemoteBackend

__all__ = ["ClientConfig", "create_arctic_rl_client", "make_batch", "make_meta"]


@dataclass(frozen=True)
class ClientConfig:
    """What a script asks of a server; everything but the model has a default."""

    model_path: str
    """Folder or hub name of a Hugging Face causal language model with its tokenizer."""
    backend: str = "builtin"
    """Registered name or dotted path of a backend; with ``server_url`` the one over HTTP is taken, or
    ``arctic-platform``, which has a server of its own."""
    server_url: str | None = None
    """URL of a server that is up already; None = workers are started on Ray from here."""
    mini_batch_rows: int | None = None
    """Rows of one optimizer step, which ``arctic-platform`` is told at its start; None = each step is one micro-batch
    there. The other backends need not know."""
    micro_batch_rows: int | None = None
    """Most rows of a micro-batch of a rank, likewise; None = all rows of a call."""
    reference_path: str | None = None
    """Model of the ``ref`` job; None = none is served."""
    policy_ranks: int = 1
    """Data-parallel training processes."""
    engines: int = 1
    """Sampling engines."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of training and sampling."""
    zero_stage: int = 2
    """DeepSpeed ZeRO stage: 0, 2 or 3."""
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Clipping norm; 0 = none."""
    scheduler: str = "constant_with_warmup"
    """Name of a ``transformers`` learning-rate schedule."""
    num_warmup_steps: int = 0
    """Warm-up, in optimizer steps."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    use_zorro: bool | None = None
    """See ``trainer.arctic_rl.use_zorro``."""
    processor_modules: tuple[str, ...] = ()
    """See ``trainer.arctic_rl.processor_modules``."""
    max_model_len: int | None = None
    """Longest prompt and response together; None = the model's own limit."""
    max_num_seqs: int = 64
    """Most sequences in one engine step."""
    max_num_batched_tokens: int = 8192
    """Most tokens in one engine step."""
    cpu_kv_cache_gib: float = 0.25
    """KV cache of each engine on CPUs."""
    seed: int = 0
    """Of every worker."""
    log_dir: str = "runs/logs"
    """Folder of one log file a worker; a server over HTTP has its own."""
    startup_timeout_s: float = 600.0
    """Seconds that bringing up all workers may take."""

    def server_config(self) -> ServerConfig:
        """The server's own config."""
        threads = os.cpu_count() or 1
        policy = TrainingSpec(
            role="policy",
            model_path=self.model_path,
            dtype=self.dtype,
            zero_stage=self.zero_stage,
            optimizer=OptimizerSpec(
                lr=self.lr,
                betas=self.betas,
                weight_decay=self.weight_decay,
                max_grad_norm=self.max_grad_norm,
                scheduler=self.scheduler,
                num_warmup_steps=self.num_warmup_steps,
            ),
            gradient_checkpointing=self.gradient_checkpointing,
            gradient_checkpointing_use_reentrant=False,
            seed=self.seed,
            device="cpu",
            threads=threads,
            processor_modules=tuple(self.processor_modules),
            loss_fn=None,
            use_zorro=self.use_zorro,
        )
        reference = None
        if self.reference_path is not None:
            reference = dataclasses.replace(policy, role="ref", model_path=self.reference_path)
        sampling = SamplingSpec(
            model_path=self.model_path,
            dtype=self.dtype,
            tensor_parallel_size=1,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=True,
            enforce_eager=True,
            device="cpu",
            cpu_kv_cache_gib=self.cpu_kv_cache_gib,
            gpu_memory_utilization=0.8,
            seed=self.seed,
        )
        return ServerConfig(
            policy=policy,
            reference=reference,
            sampling=sampling,
            policy_ranks=self.policy_ranks,
            ref_ranks=0 if reference is None else 1,
            engines=self.engines,
            max_cpu_workers=self.policy_ranks + self.engines + (reference is not None),
            sync_dtype=self.dtype,
            log_dir=os.path.abspath(self.log_dir),
            run_id=uuid.uuid4().hex[:12],
            startup_timeout_s=self.startup_timeout_s,
            shutdown_timeout_s=20.0,
            server_url=self.server_url,
            mini_batch_rows=self.mini_batch_rows,
            micro_batch_rows=self.micro_batch_rows,
        )


def create_arctic_rl_client(
    config: ClientConfig | Mapping[str, Any], server_state: BackendHandle | None = None
) -> RemoteBackend:
    """A client of a server: the calls of ``RemoteBackend``, all of them coroutines of one event loop.

    Args:
        config: what the run asks for, or a mapping of ``ClientConfig``'s fields.
        server_state: of a server that is up, from ``reconnect_handle``; None = ``initialize`` brings one up.

    Raises:
        ConfigError: a setting or the backend is unknown.
    """
    if isinstance(config, Mapping):
        known = [item.name for item in dataclasses.fields(ClientConfig)]
        problems = [
            f"{name} is not a setting of a client: {nearest(str(name), known)}" for name in config if name not in known
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        config = ClientConfig(**config)
    if server_state is not None:
        return RemoteBackendRegistry.attach(server_state, config.server_config())
    name = config.backend if config.server_url is None else over_http(config.backend)
    return RemoteBackendRegistry.get(name).from_config(config.server_config())


def make_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    **values: Sequence[Sequence[float]],
) -> dict[str, torch.Tensor]:
    """A batch in the server's layout (``layout.repack_to_verl``).

    Args:
        prompts: token ids of B prompts.
        responses: token ids of their B responses.
        pad_token_id: fills what lies outside a row.
        values: numbers of the responses' tokens by name, such as ``advantages`` and ``old_log_probs``. ``loss_mask``
            is 1 at every token unless it is given.

    Raises:
        ValueError: lengths do not fit.
    """
    import torch

    from .layout import repack_to_verl

    def right_aligned(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: torch.dtype) -> torch.Tensor:
        padded = [[fill] * (width - len(row)) + list(row) for row in rows]
        return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)

    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses")
    width = max(map(len, responses))
    for name, rows in values.items():
        if [len(row) for row in rows] != [len(row) for row in responses]:
            raise ValueError(f"{name} must hold one number for each token of each response")
    values = {"loss_mask": [[1.0] * len(row) for row in responses], **values}
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, sequences))
    source = {
        "sequences": right_aligned(sequences, longest, pad_token_id, torch.int64),
        "attention_mask": right_aligned([[1] * len(row) for row in sequences], longest, 0, torch.int64),
        "response_mask": right_aligned([[1] * len(row) for row in responses], width, 0, torch.int64),
        **{name: right_aligned(rows, width, 0.0, torch.float32) for name, rows in values.items()},
    }
    return repack_to_verl(source, pad_token_id)


def make_meta(
    batch: Mapping[str, torch.Tensor],
    *,
    dp_size: int,
    temperature: float = 1.0,
    max_tokens_per_micro_batch: int = 4096,
    rollout_n: int = 1,
) -> dict[str, Any]:
    """The scalars that go with a batch.

    Args:
        batch: the whole mini-batch.
        dp_size: ``dp_size`` of the job that runs it.
        temperature: that the responses were sampled at.
        max_tokens_per_micro_batch: token budget; raised to the longest row.
        rollout_n: responses of each prompt.
    """
    width = batch["responses"].shape[1]
    longest = int(batch["attention_mask"].sum(dim=1).max())
    return {
        "temperature": temperature,
        "rollout_n": rollout_n,
        "max_prompt_len": batch["input_ids"].shape[1] - width,
        "max_response_len": width,
        "max_token_len_per_gpu": max(max_tokens_per_micro_batch, longest),
        "batch_num_tokens": int(batch["loss_mask"].sum()),
        "global_batch_size": len(batch["input_ids"]),
        "dp_size": dp_size,
        "calculate_entropy": True,
        "response_logprobs_only": True,
        "zorro_train_enable": WHERE_POSSIBLE,
        "zorro_self_check": True,
    }
