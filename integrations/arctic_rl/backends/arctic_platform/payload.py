"""Our payloads in the shape that ``arctic-platform``'s server reads, and its answers in ours.

B rows, P prompt and R response columns, as in ``layout``. The server (``run_pipeline`` and ``verl_grpo``, called by
its DeepSpeed worker) wants every tensor of the loss at the full width P + R, and flattens a micro-batch's rows into
one. It returns the log-prob of a token in the column of the token before it; ours stands in the token's own column.

What it would ignore, or compute otherwise than asked, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from ...errors import ArcticError, RequestError, UnsupportedError
from .returned_metrics import returned_metrics
from .rows import check_rows

__all__ = [
    "CLIP_RANGE",
    "DUAL_CLIP",
    "forward_payload",
    "forward_result",
    "loss_refusals",
    "update_payload",
    "update_result",
]

CLIP_RANGE = 0.2
"""Half-width of the server's clip range, below and above 1, whatever it is told."""
DUAL_CLIP = 3.0
"""The server's dual clip, which it always applies."""

_LOSSES = ("grpo", "verl_grpo")
_AGGREGATIONS = ("token-mean", "sum")
_KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
_DEFAULTS = {
    "clip_ratio": CLIP_RANGE,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "clip_ratio_c": DUAL_CLIP,
    "loss_agg_mode": "token-mean",
    "loss_scale_factor": None,
    "entropy_coeff": 0.0,
    "entropy_agg_mode": None,
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "kl_loss_type": "low_var_kl",
    "kl_loss_agg_mode": None,
}
"""Of ``processors.losses.GrpoConfig``."""

_POSTS = ("apply_temperature", "compute_entropy_and_logprobs")
"""Every pass of old and new log-probs has the same temperature."""
_METRICS = ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")
"""Means over tokens, under the same names on both sides but for a prefix."""


def update_payload(batch: Mapping[str, Any], meta: Mapping[str, Any], processing: Mapping[str, Any]) -> dict[str, Any]:
    """What the server's ``forward_backward`` takes for one mini-batch of all ranks.

    Its reductions divide by a number that it is told, so that ``sum``, SkyRL's, is ``token-mean`` over one token.

    Args:
        batch: an update as ``layout.repack_to_verl`` makes it; tensors of the loss [B, R] or [B, P+R].
        meta: see ``processors.pipeline.run_pipeline``.
        processing: with the ``grpo`` loss.

    Raises:
        UnsupportedError: for every setting that the server would ignore, a line each.
        RequestError: the batch lacks a tensor, or has one of another height or width, or ``meta`` names the tokens of
            the whole mini-batch and not the ranks that share them, or the other way round.
    """
    settings = _loss_settings(meta, processing)
    _check_scale(meta)
    problems = [*_call_refusals(meta, processing), *loss_refusals(settings)]
    if processing.get("loss_fn") not in _LOSSES:
        problems.insert(0, f"loss_fn={processing.get('loss_fn')!r}: this server has verl's clipped surrogate only")
    if processing.get("post"):
        problems.append(f"post={processing['post']!r}: this server returns nothing but metrics of an update")
    if problems:
        raise UnsupportedError("\n".join(problems))

    rows, mask = _rows(batch), _effective_mask(batch)
    names = ["old_log_probs", "advantages", *(["ref_log_prob"] if settings["use_kl_loss"] else [])]
    for name in names:
        if batch.get(name) is None:
            raise RequestError(f"an update needs {name!r} in the batch")
    if batch.get("rollout_is_weights") is not None:
        names.append("rollout_is_weights")
    tensors = {name: torch.where(mask.bool(), _full_width(batch, name), 0) for name in names}
    return {
        "batch": {**rows, "response_mask": mask, **tensors},
        "meta": {
            **_meta(meta),
            # Without an entropy_coeff, or the server would leave entropies out.
            **({"calculate_entropy": True, "return_fwd_batch": True} if meta.get("calculate_entropy") else {}),
            "batch_num_tokens": _denominator(settings, meta, mask),
            "global_batch_size": int(meta.get("global_batch_size", len(mask))),
            "actor_config": {
                "loss_agg_mode": "token-mean",
                "use_kl_loss": settings["use_kl_loss"],
                "kl_loss_coef": settings["kl_loss_coef"],
                "kl_loss_type": settings["kl_loss_type"],
            },
            "policy_loss_config": {},
        },
        "processing": {"post": list(_POSTS), "loss_fn": "verl_grpo"},
    }


def update_result(
    answer: Mapping[str, Any], batch: Mapping[str, Any], meta: Mapping[str, Any], processing: Mapping[str, Any]
) -> dict[str, Any]:
    """The server's answer to :func:`update_payload` as ``run_pipeline`` would give it.

    Its losses are means over tokens; ours are what was minimised. Its own entropy metric is one token off the mask;
    ours is taken from the entropies that it returns.

    Args:
        answer: rows behind those of ``batch`` are left out.
        batch: what was sent, without rows that only pad it.

    Returns:
        ``avg_loss`` and ``metrics``: pg_loss, ppo_kl, pg_clipfrac, pg_clipfrac_lower, kl_loss where it is used, and
        where ``meta`` asks for entropies those of ``returned_metrics``.

    Raises:
        ArcticError: the answer holds no entropies although they were asked for.
    """
    settings, mask = _loss_settings(meta, processing), _effective_mask(batch)
    share = float(mask.sum()) / _denominator(settings, meta, mask)
    theirs = answer["metrics"]
    metrics = {name: theirs[f"actor/{name}"] for name in _METRICS} | {"pg_loss": theirs["actor/pg_loss"] * share}
    if settings["use_kl_loss"]:
        metrics["kl_loss"] = theirs["kl_loss"] * share
    if meta.get("calculate_entropy"):
        metrics |= _returned(answer, batch, mask)
    return {"avg_loss": theirs["loss"] * share, "metrics": metrics}


def forward_payload(
    batch: Mapping[str, Any], meta: Mapping[str, Any], processing: Mapping[str, Any]
) -> dict[str, Any]:
    """What the server's ``forward`` takes for log-probs.

    Raises:
        UnsupportedError: anything but log-probs is asked for, or a setting would be ignored.
    """
    problems = list(_call_refusals(meta, processing))
    if processing.get("loss_fn") is not None or list(processing.get("post") or ()) != ["compute_logprobs"]:
        problems.insert(0, f"processing={dict(processing)!r}: this server's forward pass gives log-probs only")
    if problems:
        raise UnsupportedError("\n".join(problems))
    return {
        "batch": _rows(batch),
        "meta": _meta(meta),
        "processing": {"post": list(_POSTS), "loss_fn": None},
    }


def forward_result(answer: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The server's answer to :func:`forward_payload`, moved to the columns of the tokens.

    Returns:
        ``batch`` with ``logprobs`` [B, P+R], float32, 0 outside the responses; ``metrics``, empty.
    """
    of_token = _of_token(answer["batch"]["logprobs"])
    kept = batch["attention_mask"].bool().clone()
    kept[:, : batch["prompts"].shape[1]] = False
    return {"batch": {"logprobs": torch.where(kept, of_token, 0)}, "metrics": {}}


def _of_token(values: Any) -> torch.Tensor:
    """Numbers that the server gives in the column of the token before, in the token's own, [B, P+R], float32."""
    return pad(torch.as_tensor(values, dtype=torch.float32).detach()[:, :-1], (1, 0))


def _returned(answer: Mapping[str, Any], batch: Mapping[str, Any], mask: torch.Tensor) -> dict[str, float]:
    found = answer.get("batch") or {}
    if found.get("entropy") is None:
        raise ArcticError("arctic-platform's server returned no entropies: it is another release than 0.1.4")
    width = mask.shape[1] - batch["prompts"].shape[1]

    def of_responses(values: torch.Tensor) -> torch.Tensor:
        return values[:, -width:]

    outputs = (of_responses(_of_token(found[name])[: len(mask)]) for name in ("logprobs", "entropy"))
    names = [name for name in ("old_log_probs", "rollout_logprobs") if batch.get(name) is not None]
    given = {name: of_responses(_full_width(batch, name)) for name in names}
    return returned_metrics(*outputs, given, of_responses(mask))


def loss_refusals(settings: Mapping[str, Any]) -> Iterator[str]:
    """What of the ``grpo`` loss's settings the server would not do, a line each.

    Args:
        settings: fields of ``processors.losses.GrpoConfig``; those left out have its defaults.
    """
    values = {**_DEFAULTS, **settings}
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        if values[name] not in (None, CLIP_RANGE):
            yield f"{name}={values[name]!r}: this server clips at {CLIP_RANGE} whatever it is told: write {CLIP_RANGE}"
    if values["clip_ratio_c"] != DUAL_CLIP:
        yield (
            f"clip_ratio_c={values['clip_ratio_c']!r}: this server always bounds the loss of tokens with a negative "
            f"advantage at {DUAL_CLIP} times it: write {DUAL_CLIP}"
        )
    mode = values["loss_agg_mode"]
    if mode not in _AGGREGATIONS:
        yield (
            f"loss_agg_mode={mode!r}: this server takes all rows of a packed micro-batch for one sequence: write "
            f"{' or '.join(_AGGREGATIONS)}"
        )
    if values["entropy_coeff"] != 0:
        yield (
            f"entropy_coeff={values['entropy_coeff']!r}: this server's entropies are one token off their mask: write 0"
        )
    if not values["use_kl_loss"]:
        return
    of_kl = mode if values["kl_loss_agg_mode"] is None else values["kl_loss_agg_mode"]
    if of_kl != mode:
        yield (
            f"kl_loss_agg_mode={of_kl!r}: this server reduces the KL term as it does the policy's, here {mode!r}: "
            "write use_kl_loss=False"
        )
    if values["kl_loss_type"] not in _KL_TYPES:
        yield f"kl_loss_type={values['kl_loss_type']!r}: this server knows {', '.join(_KL_TYPES)}"


def _loss_settings(meta: Mapping[str, Any], processing: Mapping[str, Any]) -> dict[str, Any]:
    given = {**(meta.get("actor_config") or {}), **(processing.get("config") or {})}
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise UnsupportedError(
                f"{name}={value!r}: the grpo loss has no such setting; known: {', '.join(_DEFAULTS)}"
            )
    return {**_DEFAULTS, **given}


def _check_scale(meta: Mapping[str, Any]) -> None:
    """The server multiplies by its ranks what it divides by the tokens of all of them."""
    names = ("batch_num_tokens", "global_batch_size", "dp_size")
    given = [meta.get(name) is not None for name in names]
    if any(given) and not given[-1]:
        raise RequestError("meta has batch_num_tokens or global_batch_size and no dp_size: give all or none")
    if given[-1] and not all(given):
        raise RequestError("meta has dp_size, and not both batch_num_tokens and global_batch_size: give all or none")


def _call_refusals(meta: Mapping[str, Any], processing: Mapping[str, Any]) -> Iterator[str]:
    if meta.get("zorro_train_enable") is True:
        yield (
            "zorro_train_enable=True: this server reuses the mask of its first micro-batch for others of its size: "
            "leave it out, or write False"
        )
    if meta.get("logits_optimization") == "memory":
        yield "logits_optimization='memory': this server has it with shared prompts only: write 'compute' or 'none'"
    if meta.get("logits_compute_from_fp32_inputs"):
        yield "logits_compute_from_fp32_inputs=True: this server has it with shared prompts only: write False"
    temperature = meta.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        yield f"temperature={temperature!r}: this server takes one number for all rows"


def _meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    logits = ("logits_optimization", "logits_optimization_peak_mem_size_in_gib", "logits_compute_in_fp32")
    return {
        "temperature": float(meta["temperature"]),
        # The server fills the columns outside the rows of its answers with this.
        "pad_token_id": 0,
        "calculate_entropy": False,
        "drop_position_ids": True,
        "load_balancer": False,
        "zorro_train_enable": False,
        **{name: meta[name] for name in logits if meta.get(name) is not None},
    }


def _rows(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    check_rows(batch)
    # The server makes position ids of the mask.
    return {name: batch[name].contiguous() for name in ("input_ids", "attention_mask", "prompts")}


def _effective_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """``loss_mask``, else ``response_mask``, [B, P+R], int64; the server asks only whether a weight is there."""
    name = "response_mask" if batch.get("loss_mask") is None else "loss_mask"
    if batch.get(name) is None:
        raise RequestError("an update needs 'loss_mask' or 'response_mask' in the batch")
    mask = _full_width(batch, name)
    if not ((mask == 0) | (mask == 1)).all():
        raise UnsupportedError(f"{name} holds weights between 0 and 1, which this server takes for 1")
    return mask.long()


def _full_width(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    values, width = batch[name], batch["input_ids"].shape[1]
    response_width = width - batch["prompts"].shape[1]
    if values.ndim != 2 or values.shape[1] not in (response_width, width):
        raise RequestError(f"{name} {list(values.shape)} must be [B, {response_width}] or [B, {width}]")
    return pad(values, (width - values.shape[1], 0))


def _denominator(settings: Mapping[str, Any], meta: Mapping[str, Any], mask: torch.Tensor) -> int:
    if settings["loss_agg_mode"] == "sum":
        return 1
    tokens, here = meta.get("batch_num_tokens"), int(mask.sum())
    if tokens == 0 and here:
        raise RequestError(f"meta['batch_num_tokens']=0, but the loss mask has {here} tokens: send their number")
    return max(here if tokens is None else int(tokens), 1)
