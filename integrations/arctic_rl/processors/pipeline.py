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
import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ..errors import UnsupportedError
from .batching import MicroBatch, RowBatch, RowPlan, join_rows, with_counts
from .distributed import gather, world_size
from .isolation import check_model, check_row_lengths
from .metrics import MetricTable, merge
from .model import ModelCall, run_model, vocabulary_size
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

_calls = itertools.count()
_PROCESSING_KEYS = ("post", "loss_fn", "config")
_RESPONSES_ONLY = "response_logprobs_only"
_META_KEYS = (
    "temperature",
    "batch_num_tokens",
    "global_batch_size",
    "dp_size",
    "calculate_entropy",
    "actor_config",
    "policy_loss_config",
    "zorro_train_enable",
    _RESPONSES_ONLY,
)
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
            ``backward(loss)``, which gets ``scale_wrt_gas=False`` if it takes that, by name or as any keyword: the
            loss is normalised already.
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
        max_tokens_per_mb: token budget of a packed micro-batch; what came packed, or with ``micro_batch_ids``, stays
            together whatever it holds.
        return_tensors: leave tensors in ``batch`` of the result; False = NumPy arrays, or lists.

    Returns:
        ``batch``, what the post-processors returned, [B, S] in the order given and exactly 0 outside the attention
        mask, if any ran or there is no loss, empty on a rank without rows; with shared prompts, and with
        ``response_logprobs_only``, log-probs and entropy are 0 at the columns of ``prompts`` as well. ``metrics``,
        Python numbers; with a loss ``avg_loss``, that of the whole mini-batch over all ranks; with "loss_only" also
        ``loss_tensor``, this rank's.

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
    device = torch.device(device)
    number = next(_calls)

    def prepare() -> tuple[_Request, Sharing | None, RowBatch, list[RowPlan]]:
        request = _request(engine, args, meta, processing, backward)
        share = shares_prompts(engine, meta, pack=pack, training=backward is not False)
        responses_only = _flag(meta, _RESPONSES_ONLY)
        rows = RowBatch(batch, meta, pack=pack, share=share is not None, responses_only=responses_only)
        if share is not None:
            share.check_lengths(rows.lengths)
        check_row_lengths(request.call.module, rows.lengths)
        rows.check_token_ids(vocabulary_size(request.call.module))
        return request, share, rows, rows.plan(max_tokens_per_mb)

    (request, share, rows, plan), ranks = _announced(prepare, number)
    call, posts, loss_fn, config = request.call, request.posts, request.loss_fn, request.config
    counts = {}
    if loss_fn is not None:
        counts = with_counts(rows, meta, [rank.token_counts for rank in ranks], [rank.width for rank in ranks])
    counts |= {"calculate_entropy": call.entropy}

    if share is not None:
        check_first_use(call, meta, device, training=backward is not False)
    check_model(call, device, packed=pack or rows.packed_input is not None)
    run = _Run(call, posts, loss_fn, config, device, backward, number)
    with profiled(), torch.set_grad_enabled(backward is not False):
        (engine.eval if backward is False else engine.train)()
        micro_batches = max(rank.micro_batches for rank in ranks)
        for index in range(micro_batches):
            micro = rows.micro_batch(plan[index], counts, device) if index < len(plan) else rows.stand_in(device)
            run.step(micro, last=index == micro_batches - 1)
    return run.result(rows, return_tensors), len(plan)


@dataclass(frozen=True)
class _Request:
    """What a call asks for, looked up and checked."""

    call: ModelCall
    posts: list[tuple[str, Any]]
    loss_fn: Any
    config: dict[str, Any]


@dataclass(frozen=True)
class _Rank:
    """What every rank knows of each."""

    micro_batches: int
    token_counts: tuple[float, int]
    width: int


def _request(
    engine: Any, args: tuple, meta: Mapping[str, Any], processing: Mapping[str, Any], backward: Any
) -> _Request:
    _check_request(processing, backward)
    _check_meta_names(meta)
    posts = [(name, get_post_processor(name)) for name in processing.get("post") or ()]
    loss_name = processing.get("loss_fn")
    loss_fn = None if loss_name is None else get_loss_fn(loss_name)
    config = copy.deepcopy(dict(processing.get("config") or {}))
    return _Request(_model_call(engine, args, meta, config, posts, loss_fn is not None), posts, loss_fn, config)


def _announced(prepare: Callable[[], tuple], number: int) -> tuple[tuple, list[_Rank]]:
    """What ``prepare`` returns, and every rank's part of it.

    A rank that cannot run says so to the others, which would wait for it in their next collective call.
    """
    failure = own = prepared = None
    try:
        prepared = prepare()
        *_, rows, plan = prepared
        own = _Rank(len(plan), rows.token_counts(), rows.response_len)
    except Exception as error:
        failure = error
    message = None if failure is None else str(failure) or type(failure).__name__
    ranks = gather((own, message), ("the start", number))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(ranks):
        if message is not None:
            raise ValueError(f"rank {rank} cannot run its rows: {message}")
    return prepared, [info for info, _ in ranks]


class _Run:
    """The micro-batches of one call, one after the other."""

    def __init__(
        self,
        call: ModelCall,
        posts: list,
        loss_fn: Any,
        config: dict,
        device: torch.device,
        backward: Any,
        number: int,
    ):
        self._number = number
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
                outputs[self._call.reads]
        see_memory_usage("after forward", self._device)
        if micro.rows is None:
            loss = None if self._loss_fn is None else outputs[self._call.reads].sum() * 0
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
            ranks = gather((total.detach().item(), self._table.totals()), ("the results", self._number))
            result["avg_loss"] = sum(loss for loss, _ in ranks) / len(ranks)
            result["metrics"] = merge([totals for _, totals in ranks]) | result["metrics"]
            if self._backward == "loss_only":
                result["loss_tensor"] = (
                    torch.stack(self._losses).sum() if self._losses else torch.zeros((), requires_grad=True)
                )
        return result

    def _post_process(self, micro: MicroBatch, outputs: ModelOutputs) -> None:
        for name, function in self._posts:
            new = function(outputs, dict(micro.batch), dict(micro.meta), self._device)
            new = _checked_new(name, new, outputs, micro)
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
    if not isinstance(backward, bool) and not (isinstance(backward, str) and backward == "loss_only"):
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


def _check_meta_names(meta: Mapping[str, Any]) -> None:
    """Refuse what is meant for the pipeline and misspelt; processors may read anything else."""
    for name in meta:
        near = [] if name in _META_KEYS else difflib.get_close_matches(str(name), _META_KEYS, n=1, cutoff=0.9)
        if near:
            raise UnsupportedError(f"meta[{name!r}] is unknown; did you mean {near[0]!r}?")


def _flag(meta: Mapping[str, Any], name: str) -> bool:
    wanted = meta.get(name)
    if wanted is not None and not isinstance(wanted, bool):
        raise UnsupportedError(f"meta[{name!r}]={wanted!r} must be True or False")
    return bool(wanted)


def _model_call(
    engine: Any, args: tuple, meta: Mapping[str, Any], config: dict, posts: list, has_loss: bool
) -> ModelCall:
    given = {
        source: values["entropy_coeff"]
        for source, values in (("config", config), ("actor_config", meta.get("actor_config") or {}))
        if "entropy_coeff" in values
    }
    if len(set(given.values())) > 1:
        raise UnsupportedError(
            f"entropy_coeff is {given['config']!r} in config and {given['actor_config']!r} in actor_config; give one"
        )
    coefficients = list(given.values())
    of_entropy = [get_post_processor(name) for name in ENTROPY_POST_PROCESSORS]
    asked = any(function in of_entropy for _, function in posts) or any(value != 0 for value in coefficients)
    return ModelCall(
        engine=engine,
        args=tuple(args),
        settings=LogitsSettings.from_meta(meta),
        temperature=temperature_of(meta) if has_loss or meta.get("temperature") is not None else None,
        entropy=_flag(meta, "calculate_entropy") or asked,
        entropy_has_grad=not coefficients or any(value != 0 for value in coefficients),
        late_entropy=world_size() == 1 or not _is_partitioned(engine),
    )


def _is_partitioned(engine: Any) -> bool:
    """Whether weights lie in parts on the ranks (ZeRO stage 3), which a pass of its own would gather."""
    module = getattr(engine, "module", engine)
    return isinstance(module, torch.nn.Module) and any(hasattr(weight, "ds_id") for weight in module.parameters())


def _checked_new(name: str, new: Any, outputs: ModelOutputs, micro: MicroBatch) -> dict[str, Any]:
    """A post-processor's entries, arrays as tensors."""
    if isinstance(new, ModelOutputs) or not isinstance(new, Mapping):
        what = "the model outputs themselves" if isinstance(new, ModelOutputs) else f"a {type(new).__name__}"
        raise UnsupportedError(f"post-processor {name!r} returned {what}; return a dict of its new entries only")
    checked = {}
    for key, value in new.items():
        if key in _NEVER_RETURNED:
            raise UnsupportedError(
                f"post-processor {name!r} returned {key!r}; results stay small, return what is computed from it"
            )
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(np.ascontiguousarray(value)) if value.dtype.kind in "biufc" else value.tolist()
        if not isinstance(value, torch.Tensor | list | tuple) or len(micro.rows) != _num_entries(value):
            raise UnsupportedError(
                f"post-processor {name!r} returned {key!r} without one entry for each of the {len(micro.rows)} rows"
            )
        if _num_elements(value) > _most_elements(outputs, micro):
            raise UnsupportedError(
                f"post-processor {name!r} returned {key!r}, as large as logits; results stay small, return what is "
                "computed from them"
            )
        checked[key] = value
    return checked


def _most_elements(outputs: ModelOutputs, micro: MicroBatch) -> float:
    """Half of what the logits of the micro-batch's rows hold, where their size is known."""
    if "logits" in outputs:
        vocab_size = outputs["logits"].shape[-1]
    elif "lm_head" in outputs:
        vocab_size = outputs["lm_head"].out_features
    else:
        return math.inf
    return micro.batch["attention_mask"].numel() * vocab_size / 2


def _num_elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(_num_elements(item) for item in value) if isinstance(value, list | tuple) else 1


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


def _backward_kwargs(engine: Any) -> dict[str, Any]:
    parameters = inspect.signature(engine.backward).parameters
    forwards_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"scale_wrt_gas": False} if forwards_any or "scale_wrt_gas" in parameters else {}


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
