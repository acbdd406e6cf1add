"""run_pipeline: forward, post-processors, loss and backward over a batch, with processors looked up by name.

A loss in ten lines, as a user registers it::

    from integrations.arctic_rl.processors.pipeline import register_loss_fn

    @register_loss_fn("reinforce")
    def reinforce(model_outputs, batch, meta, config, device):
        mask = batch["loss_mask"]
        terms = -model_outputs["logprobs"] * batch["advantages"] * mask
        loss = terms.sum() / meta["batch_num_tokens"] * meta["dp_size"]
        return loss, {"advantage": ((batch["advantages"] * mask).sum(), mask.sum())}
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..errors import UnsupportedError
from .batching import MicroBatch, RowBatch, RowPlan, join_rows, with_counts
from .distributed import gather
from .isolation import check_model, check_row_lengths
from .metrics import MetricTable, merge
from .model import ModelCall, run_model
from .observe import PhaseTimers, profiled, see_memory_usage
from .outputs import LogitsSettings, ModelOutputs, temperature_of
from .post import ENTROPY_POST_PROCESSORS
from .prompt_sharing import Sharing, check_first_use, shares_prompts
from .registry import (
    get_loss_fn,
    get_post_processor,
    nearest_name,
    register_loss_fn,
    register_post_processor,
)

__all__ = ["register_loss_fn", "register_post_processor", "run_counted", "run_pipeline"]

_PROCESSING_KEYS = ("post", "loss_fn", "config")
_NEVER_RETURNED = ("logits", "hidden_states", "lm_head")


def run_pipeline(
    engine: Any,
    args: tuple,
    batch: Mapping[str, Any],
    meta: Mapping[str, Any],
    processing: Mapping[str, Any],
    device: str | torch.device,
    *,
    backward: bool | Literal["loss_only"] = True,
    pack: bool = True,
    max_tokens_per_mb: int = 4096,
    return_tensors: bool = False,
) -> dict[str, Any]:
    """Run a batch through the model in micro-batches, then processors on their rows, and backward.

    B rows, S = P + R width. Processors see rows [b, S] of one micro-batch whatever it was packed to; results do not
    depend on how rows were split, packed or padded, except by rounding in layers of experts (:mod:`.isolation`). With
    torch.distributed, every rank calls this together.

    Args:
        engine: called as ``engine(*args, **inputs)``; has ``module``, ``train()``, ``eval()`` and, for backward=True,
            ``backward(loss)``, which gets ``scale_wrt_gas=False`` if it takes that: the loss is normalised already.
        args: positional arguments of the engine.
        batch: ``input_ids``, ``attention_mask`` [B, S], no holes in a row; usually ``prompts`` [B, P], and response
            tensors [B, S] or, left-aligned, [B, R]. ``loss_mask``, else ``response_mask``, is the effective mask. Or
            packed already: ``input_ids`` [1, T] and ``cu_seqlens`` (here or in ``meta``), token tensors [1, T].
        meta: ``temperature`` (required for log-probs), ``batch_num_tokens``, ``global_batch_size`` and ``dp_size`` of
            the whole mini-batch over all ranks (all given, or counted), ``calculate_entropy``, ``actor_config``,
            ``policy_loss_config``, ``logits_*`` (:class:`LogitsSettings`), ``zorro_*`` (:mod:`.prompt_sharing`),
            ``response_logprobs_only`` (True: packed prompts get no log-probs, which saves their share of the LM head),
            and whatever processors read.
        processing: ``post``, a list of names; ``loss_fn``, a name, required unless backward is False; ``config``,
            handed to the loss.
        device: where micro-batches go.
        backward: True = ``engine.backward`` after every micro-batch; False = no gradients; "loss_only" = gradients,
            and the loss is returned instead.
        pack: lay rows end to end in micro-batches of at most ``max_tokens_per_mb`` tokens; False = one padded
            micro-batch.
        max_tokens_per_mb: token budget of a packed micro-batch.
        return_tensors: leave tensors in ``batch`` of the result; False = NumPy arrays, or lists.

    Returns:
        ``batch``, what the post-processors returned, [B, S] in the order given and exactly 0 outside the attention
        mask, if any ran or there is no loss; with shared prompts, and with ``response_logprobs_only``, log-probs and
        entropy are 0 at the columns of ``prompts`` as well. ``metrics``, Python numbers; with a loss ``avg_loss``,
        that of the whole mini-batch over all ranks; with "loss_only" also ``loss_tensor``, this rank's.

    Raises:
        ValueError: the batch or meta lacks something, or contradicts itself.
        UnsupportedError: a name or setting is unknown, or the model cannot do what is asked.
    """
    result, _ = run_counted(
        engine,
        args,
        batch,
        meta,
        processing,
        device,
        backward=backward,
        pack=pack,
        max_tokens_per_mb=max_tokens_per_mb,
        return_tensors=return_tensors,
    )
    return result


def run_counted(
    engine: Any,
    args: tuple,
    batch: Mapping[str, Any],
    meta: Mapping[str, Any],
    processing: Mapping[str, Any],
    device: str | torch.device,
    *,
    backward: bool | Literal["loss_only"],
    pack: bool,
    max_tokens_per_mb: int,
    return_tensors: bool,
) -> tuple[dict[str, Any], int]:
    """:func:`run_pipeline`'s result, and how many micro-batches this rank's rows took."""
    _check_request(processing, backward)
    device = torch.device(device)
    posts = [(name, get_post_processor(name)) for name in processing.get("post") or ()]
    loss_name = processing.get("loss_fn")
    loss_fn = None if loss_name is None else get_loss_fn(loss_name)
    config = copy.deepcopy(dict(processing.get("config") or {}))
    share = shares_prompts(engine, meta, pack=pack, training=backward is not False)
    rows, plan, ranks = _planned(getattr(engine, "module", engine), batch, meta, pack, share, max_tokens_per_mb)
    counts = {} if loss_fn is None else with_counts(rows, meta, [counts for _, counts in ranks])
    call = _model_call(engine, args, meta, config, posts, loss_fn is not None, len(ranks))
    counts |= {"calculate_entropy": call.entropy}

    if share is not None:
        check_first_use(call, meta, device)
    check_model(call, device, packed=pack or rows.packed_input is not None)
    run = _Run(call, posts, loss_fn, config, device, backward)
    with profiled(), torch.set_grad_enabled(backward is not False):
        (engine.eval if backward is False else engine.train)()
        micro_batches = max(number for number, _ in ranks)
        for number in range(micro_batches):
            micro = rows.micro_batch(plan[number], counts, device) if number < len(plan) else rows.stand_in(device)
            run.step(micro, last=number == micro_batches - 1)
    return run.result(rows, return_tensors), len(plan)


def _planned(
    module: Any,
    batch: Mapping[str, Any],
    meta: Mapping[str, Any],
    pack: bool,
    share: Sharing | None,
    max_tokens_per_mb: int,
) -> tuple[RowBatch, list[RowPlan], list[tuple[int, tuple[float, int]]]]:
    """This rank's rows and their micro-batches, and every rank's number of micro-batches and token counts.

    A rank that cannot plan says so to the others, which would wait for it in their next collective call.
    """
    failure = own = None
    try:
        rows = RowBatch(batch, meta, pack=pack, share=share is not None, responses_only=_responses_only(meta))
        if share is not None:
            share.check_lengths(rows.lengths)
        check_row_lengths(module, rows.lengths)
        plan = rows.plan(max_tokens_per_mb)
        own = (len(plan), rows.token_counts())
    except Exception as error:
        failure = error
    ranks = gather((own, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(ranks):
        if message is not None:
            raise ValueError(f"rank {rank} cannot run its rows: {message}")
    return rows, plan, [info for info, _ in ranks]


class _Run:
    """The micro-batches of one call, one after the other."""

    def __init__(self, call: ModelCall, posts: list, loss_fn: Any, config: dict, device: torch.device, backward: Any):
        self._call = call
        self._posts = posts
        self._loss_fn = loss_fn
        self._config = config
        self._device = device
        self._backward = backward
        self._timers = PhaseTimers(device)
        self._table = MetricTable()
        self._losses: list[torch.Tensor] = []
        self._pieces: dict[str, list[tuple[list[int], Any]]] = {}
        self._backward_kwargs = _backward_kwargs(call.engine) if backward is True else {}

    def step(self, micro: MicroBatch, *, last: bool) -> None:
        see_memory_usage("before forward", self._device)
        with self._timers.phase("forward"):
            outputs = run_model(self._call, micro.model_rows)
            if self._loss_fn is not None:
                outputs["logprobs"]
        see_memory_usage("after forward", self._device)
        if micro.rows is None:
            loss = None if self._loss_fn is None else outputs["logprobs"].sum() * 0
        else:
            see_memory_usage("before post-processing", self._device)
            with self._timers.phase("post_forward"):
                self._post_process(micro, outputs)
            see_memory_usage("after post-processing", self._device)
            with self._timers.phase("loss"):
                loss = self._loss(micro, outputs)
        if loss is None:
            return
        self._losses.append(loss if self._backward == "loss_only" else loss.detach())
        if self._backward is True:
            del outputs
            see_memory_usage("before backward", self._device)
            with self._timers.phase("backward"):
                _set_boundary(self._call.engine, last)
                self._call.engine.backward(loss, **self._backward_kwargs)
            see_memory_usage("after backward", self._device)

    def result(self, rows: RowBatch, return_tensors: bool) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self._posts or self._loss_fn is None:
            joined = {name: join_rows(pieces, rows.num_rows) for name, pieces in self._pieces.items()}
            result["batch"] = {name: _outgoing(rows, value, return_tensors) for name, value in joined.items()}
        result["metrics"] = self._timers.metrics()
        if self._loss_fn is not None:
            total = torch.stack([loss.double() for loss in self._losses]).sum() if self._losses else torch.zeros(())
            ranks = gather((total.detach().item(), self._table.totals()))
            result["avg_loss"] = sum(loss for loss, _ in ranks) / len(ranks)
            result["metrics"] = merge([totals for _, totals in ranks]) | result["metrics"]
            if self._backward == "loss_only":
                result["loss_tensor"] = torch.stack(self._losses).sum()
        return result

    def _post_process(self, micro: MicroBatch, outputs: ModelOutputs) -> None:
        for name, function in self._posts:
            new = function(outputs, dict(micro.batch), dict(micro.meta), self._device)
            _check_new(name, new, outputs, micro)
            outputs.add(new)
            for key, value in new.items():
                pieces = self._pieces.setdefault(key, [])
                if pieces and pieces[-1][0] is micro.rows:
                    pieces.pop()
                pieces.append((micro.rows, _zero_outside(value, micro.batch["attention_mask"])))

    def _loss(self, micro: MicroBatch, outputs: ModelOutputs) -> torch.Tensor | None:
        if self._loss_fn is None:
            return None
        returned = self._loss_fn(outputs, dict(micro.batch), dict(micro.meta), dict(self._config), self._device)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise ValueError(f"loss function {self._loss_fn.__name__} must return (loss, metrics), got {returned!r}")
        loss, metrics = returned
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(
                f"loss function {self._loss_fn.__name__} must return one number as a tensor, got {loss!r}"
            )
        if self._backward is not False and not loss.requires_grad:
            raise ValueError(
                f"loss function {self._loss_fn.__name__} returned a loss without gradient; build it from model_outputs"
            )
        self._table.add(metrics, micro.num_tokens)
        return loss.reshape(())


def _check_request(processing: Mapping[str, Any], backward: Any) -> None:
    if backward not in (True, False, "loss_only"):
        raise UnsupportedError(f"backward={backward!r} must be True, False or 'loss_only'")
    for name in processing:
        if name not in _PROCESSING_KEYS:
            raise UnsupportedError(
                f"processing[{name!r}] is unknown{nearest_name(name, _PROCESSING_KEYS)}; known: "
                f"{', '.join(_PROCESSING_KEYS)}"
            )
    if isinstance(processing.get("post"), str):
        raise UnsupportedError(f"processing['post']={processing['post']!r} must be a list of names")
    if processing.get("loss_fn") is None and backward is not False:
        raise UnsupportedError(f"backward={backward!r} needs processing['loss_fn']; name one, or pass backward=False")


def _responses_only(meta: Mapping[str, Any]) -> bool:
    wanted = meta.get("response_logprobs_only", False)
    if not isinstance(wanted, bool):
        raise UnsupportedError(f"meta['response_logprobs_only']={wanted!r} must be True or False")
    return wanted


def _model_call(
    engine: Any, args: tuple, meta: Mapping[str, Any], config: dict, posts: list, has_loss: bool, num_ranks: int
) -> ModelCall:
    coefficients = [
        source["entropy_coeff"] for source in (config, meta.get("actor_config") or {}) if "entropy_coeff" in source
    ]
    asked = any(name in ENTROPY_POST_PROCESSORS for name, _ in posts) or any(value != 0 for value in coefficients)
    return ModelCall(
        engine=engine,
        args=tuple(args),
        settings=LogitsSettings.from_meta(meta),
        temperature=temperature_of(meta) if has_loss or meta.get("temperature") is not None else None,
        entropy=asked or bool(meta.get("calculate_entropy")),
        entropy_has_grad=not coefficients or any(value != 0 for value in coefficients),
        late_entropy=num_ranks == 1,
    )


def _check_new(name: str, new: Any, outputs: ModelOutputs, micro: MicroBatch) -> None:
    if isinstance(new, ModelOutputs) or not isinstance(new, Mapping):
        what = "the model outputs themselves" if isinstance(new, ModelOutputs) else f"a {type(new).__name__}"
        raise UnsupportedError(f"post-processor {name!r} returned {what}; return a dict of its new entries only")
    for key, value in new.items():
        if key in _NEVER_RETURNED:
            raise UnsupportedError(
                f"post-processor {name!r} returned {key!r}; results stay small, return what is computed from it"
            )
        if not isinstance(value, torch.Tensor | list | tuple) or len(micro.rows) != _num_entries(value):
            raise UnsupportedError(
                f"post-processor {name!r} returned {key!r} without one entry for each of the {len(micro.rows)} rows"
            )
        if isinstance(value, torch.Tensor) and value.ndim > 2 and "logits" in outputs and _is_logits(value, outputs):
            raise UnsupportedError(f"post-processor {name!r} returned logits as {key!r}; results stay small")


def _zero_outside(value: Any, attention_mask: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.shape[:2] != attention_mask.shape:
        return value
    mask = attention_mask.bool().view(*attention_mask.shape, *(1,) * (value.ndim - 2))
    return torch.where(mask, value, value.new_zeros(()))


def _num_entries(value: Any) -> int:
    return -1 if isinstance(value, torch.Tensor) and value.ndim == 0 else len(value)


def _is_logits(value: torch.Tensor, outputs: ModelOutputs) -> bool:
    return value.shape == outputs["logits"].shape


def _backward_kwargs(engine: Any) -> dict[str, Any]:
    parameters = inspect.signature(engine.backward).parameters
    return {"scale_wrt_gas": False} if "scale_wrt_gas" in parameters else {}


def _set_boundary(engine: Any, last: bool) -> None:
    """Mark the last micro-batch where the engine counts them itself; DeepSpeed refuses that in unmanaged mode."""
    set_boundary = getattr(engine, "set_gradient_accumulation_boundary", None)
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if set_boundary is not None and (managed is None or managed()):
        set_boundary(last)


def _outgoing(rows: RowBatch, value: Any, return_tensors: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = rows.to_input_layout(value)
    if return_tensors:
        return value
    value = value.float() if value.dtype == torch.bfloat16 else value
    return value.cpu().numpy()
