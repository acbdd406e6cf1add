"""SkyRL's batches, log-probs and policy update in one plain process, from SkyRL's own functions.

No packing, no micro-batches, no ranks: the padded forward pass of transformers on SkyRL's left-padded layout, SkyRL's
losses, ``torch.optim.AdamW``, ``clip_grad_norm_`` and a ``transformers`` schedule. Nothing of the project is used.
"""

from dataclasses import dataclass
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
    compute_approx_kl,
)
from skyrl.backends.skyrl_train.utils.torch_utils import (
    chunked_entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
)
from skyrl.backends.skyrl_train.workers.worker_utils import (
    compute_minibatch_rollout_logprob_diff_metrics,
    reduce_metrics,
)
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

PAD_ID = 0
GARBAGE = 7.5
"""Stands where a response tensor has no token: nothing may read it."""


def rollout_batch(
    num_rows: int,
    seed: int,
    *,
    vocab: int = 128,
    prompt_lengths: tuple[int, int] = (1, 9),
    max_response: int = 9,
    holes: bool = False,
) -> TrainingInputBatch:
    """Random ragged rollouts in SkyRL's layout: sequences and masks only.

    The pad id appears as a real token; with ``holes`` a quarter of the response tokens carries no loss.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(shortest: int, longest: int) -> list[list[int]]:
        lengths = torch.randint(shortest, longest + 1, (num_rows,), generator=generator).tolist()
        return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]

    prompts, responses = rows(*prompt_lengths), rows(1, max_response)
    responses[0] = responses[0][:1]
    keep = [(torch.rand(len(row), generator=generator) > (0.25 if holes else -1)).int().tolist() for row in responses]
    sequences, attention_mask, response_mask, rewards, loss_mask, *_ = convert_prompts_responses_to_batch_tensors(
        PAD_ID, prompts, responses, [[0.0] * len(row) for row in responses], keep
    )
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "rewards": rewards,
        }
    )
    batch.metadata = {"response_length": response_mask.shape[1], "uids": [str(row) for row in range(num_rows)]}
    return batch


def update_batch(
    batch: TrainingInputBatch,
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    *,
    temperature: float,
    seed: int,
    drift: float = 0.3,
    loss_reduction: str = "token_mean",
    micro_batch_size: int = 1,
    prompts: int = 1,
    rollout_drift: float | None = None,
) -> TrainingInputBatch:
    """A copy with what SkyRL's trainer adds: reduced advantages, the reference's log-probs, and the policy's old ones,
    which normal noise of standard deviation ``drift`` sets apart from its present ones.

    Args:
        micro_batch_size: of ``token_mean_legacy``.
        prompts: groups of equally many rows, of ``prompt_mean``.
        rollout_drift: noise between the sampler's log-probs and the old ones; None = the sampler gave none.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = batch["response_mask"]
    result = batch.select(list(batch))
    noise = torch.randn(mask.shape, generator=generator) * drift
    with torch.no_grad():
        old = action_log_probs(policy, batch, temperature)[0] + noise
        base = action_log_probs(reference, batch, temperature)[0]
    advantages = torch.randn(len(batch), 1, generator=generator) * mask
    size = len(batch) // prompts
    advantages = apply_loss_reduction_to_advantages_minibatch(
        advantages,
        batch["loss_mask"],
        loss_reduction,
        micro_batch_size=micro_batch_size,
        max_seq_len=32,
        prompt_boundaries=[(start, start + size) for start in range(0, len(batch), size)],
    )
    tensors = {"action_log_probs": old, "base_action_log_probs": base, "advantages": advantages}
    if rollout_drift is not None:
        tensors["rollout_logprobs"] = old + torch.randn(mask.shape, generator=generator) * rollout_drift
    for name, values in tensors.items():
        result[name] = torch.where(mask.bool(), values, GARBAGE)
    return result


@dataclass(frozen=True)
class MicroBatch:
    """Rows that the policy loss sees together."""

    rows: list[int]
    seed: int
    """Of the loss's random choices."""


def reordered(batch: TrainingInputBatch, order: list[int]) -> TrainingInputBatch:
    """The rows in another order."""
    result = TrainingInputBatch({name: values[order] for name, values in batch.items()})
    result.metadata = batch.metadata | {"uids": [batch.metadata["uids"][row] for row in order]}
    return result


def action_log_probs(
    model: torch.nn.Module, batch: TrainingInputBatch, temperature: float, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of the last ``response_length`` columns, [B, response_length], right-aligned."""
    mask = batch["attention_mask"]
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits = model(input_ids=batch["sequences"], attention_mask=mask, position_ids=positions, use_cache=False).logits
    logits = logits / temperature
    log_probs = logprobs_from_logits(logits, batch["sequences"].roll(-1, dims=1), inplace_backward=False)
    entropies = chunked_entropy_from_logits(logits, requires_grad=entropy, attention_mask=mask)
    window = slice(-batch.metadata["response_length"] - 1, -1)
    return log_probs[:, window], entropies[:, window]


def with_adapters(model: torch.nn.Module, lora: Any, seed: int) -> torch.nn.Module:
    """``peft``'s own model, as SkyRL's FSDP worker builds it right after seeding.

    Args:
        lora: has the fields of a ``LoraSpec``.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        lora_dropout=lora.dropout,
        bias="none",
        init_lora_weights=True if lora.init_method == "kaiming" else lora.init_method,
    )
    return get_peft_model(model, config)


@dataclass
class Update:
    """What one optimizer step did, by parameter name where it says tensors."""

    metrics: dict[str, float]
    """Under the names of SkyRL's policy worker."""
    gradient: dict[str, torch.Tensor]
    """As the optimizer used it: after clipping."""
    change: dict[str, torch.Tensor]
    """Weights after minus before."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """The step's learning rate."""


class ReferenceTrainer:
    """SkyRL's policy worker without its workers: one mini-batch a step, in one micro-batch, on one rank.

    Args:
        model: a ``transformers`` model, or one of ``peft``'s whose adapters are trained; trained in place.
        algorithm: SkyRL's ``AlgorithmConfig`` may differ from step to step, the optimizer may not.
        autocast: run the forward pass under bfloat16 autocast, as SkyRL does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        scheduler: str,
        num_warmup_steps: int,
        num_training_steps: int,
        autocast: bool = False,
    ) -> None:
        from transformers import get_scheduler

        self.model = model.train()
        self._max_grad_norm = max_grad_norm
        self._autocast = autocast
        self._trained = {
            name.removeprefix("base_model.model."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        parameters = self._trained.values()
        self._optimizer = torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay)
        self._scheduler = get_scheduler(
            scheduler, self._optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps
        )

    def update(
        self, batch: TrainingInputBatch, algorithm: Any, micro_batches: list[MicroBatch] | None = None
    ) -> Update:
        """Backward over the whole mini-batch, clip, step."""
        before = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss, metrics = policy_loss(self.model, batch, algorithm, micro_batches)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._max_grad_norm or float("inf"))
        gradient = {name: parameter.grad.clone() for name, parameter in self._trained.items()}
        lr = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        change = {name: parameter.detach() - before[name] for name, parameter in self._trained.items()}
        return Update(metrics, gradient, change, float(norm), lr)


def policy_loss(
    model: torch.nn.Module,
    batch: TrainingInputBatch,
    algorithm: Any,
    micro_batches: list[MicroBatch] | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of one mini-batch and SkyRL's metrics of it: policy term, KL term, entropy bonus.

    The policy term is taken over the micro-batches where some are given; the other terms never are.
    """
    mask = batch["loss_mask"]
    log_probs, entropies = action_log_probs(model, batch, algorithm.temperature, entropy=algorithm.use_entropy_loss)
    parts = micro_batches or [MicroBatch(list(range(len(batch))), 0)]
    policy_term, loss_metrics = _policy_term(log_probs, batch, algorithm, parts)
    if algorithm.policy_loss_type == "cross_entropy":
        return policy_term, {"loss": policy_term.item()}
    entropy = masked_mean(entropies, mask)
    loss = policy_term
    metrics = {"policy_loss": policy_term.item(), "policy_entropy": entropy.item()} | loss_metrics
    metrics |= compute_minibatch_rollout_logprob_diff_metrics(log_probs, batch.get("rollout_logprobs"), mask)
    if algorithm.use_kl_loss:
        kl = compute_approx_kl(log_probs, batch["base_action_log_probs"], mask, algorithm.kl_estimator_type)
        kl = masked_mean(kl, mask, dim=-1).mean()
        metrics["policy_kl"] = kl.item()
        loss = loss + kl * algorithm.kl_loss_coef
    if algorithm.use_entropy_loss:
        loss = loss - entropy * algorithm.entropy_loss_coef
    return loss, metrics | {"final_loss": loss.item()}


def _policy_term(
    log_probs: torch.Tensor, batch: TrainingInputBatch, algorithm: Any, parts: list[MicroBatch]
) -> tuple[torch.Tensor, dict[str, float]]:
    loss_fn = PolicyLossRegistry.get(algorithm.policy_loss_type)
    old, rollout = batch.get("action_log_probs"), batch.get("rollout_logprobs")
    total: Any = 0
    metrics: dict[str, list[float]] = {}
    for part in parts:
        torch.manual_seed(part.seed)
        loss, of_part = loss_fn(
            log_probs[part.rows],
            None if old is None else old[part.rows],
            batch["advantages"][part.rows],
            config=algorithm,
            loss_mask=batch["loss_mask"][part.rows],
            rollout_logprobs=None if rollout is None else rollout[part.rows],
        )
        total = total + loss
        for name, value in of_part.items():
            metrics.setdefault(f"loss_metrics/{name}", []).append(value)
    return total, reduce_metrics(metrics, sum_loss_metrics=True)
