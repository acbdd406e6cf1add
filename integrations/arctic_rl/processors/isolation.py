"""Whether a model keeps packed rows apart, and reads log-probs at its LM head: seen in a few tokens at its first use.

A model says nowhere that it uses the positions and borders that it accepts. So three short rows go through it packed:
changing the middle one must leave the other two as they are, and the last one must be what it is alone. Exceptions are
layers of experts: they multiply tokens of all rows together, in an order that depends on where each token is routed,
so a row's log-probs move by rounding (2e-6 in float32 on small models) when its neighbours change.
"""

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import PackingError, UnsupportedError
from ..zorro.support import longest_exact_row
from .attention import VARLEN_ATTENTION, attention_implementation
from .model import ModelCall, run_model
from .outputs import LogitsSettings, ModelOutputs
from .packing import PackedRows, pack_rows
from .places import ModelRows, PaddedRows

__all__ = ["Direct", "check_model", "check_packing", "check_row_lengths"]

_CHECKED: weakref.WeakKeyDictionary[nn.Module, set] = weakref.WeakKeyDictionary()

_LENGTHS = (5, 7, 6)
_CHANGED = 1
"""The longest, and odd, so that swapping two tokens changes how many there are of each."""

_EXPERTS = re.compile(r"expert|moe|router", re.IGNORECASE)

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of logits over their standard deviation, by the model's dtype."""


@dataclass(frozen=True)
class Direct:
    """A module as an engine of its own, past an engine that may count or record its calls."""

    module: nn.Module

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.module(*args, **inputs)


def check_packing(module: nn.Module, device: torch.device | str) -> None:
    """:func:`check_model` of packed rows, for a model without an engine yet."""
    settings = LogitsSettings(logits_optimization="none")
    call = ModelCall(Direct(module), (), settings, 1.0, entropy=False, entropy_has_grad=False, late_entropy=False)
    check_model(call, torch.device(device), packed=True)


def check_model(call: ModelCall, device: torch.device, *, packed: bool) -> None:
    """Refuse a model that mixes packed rows, or whose logits are not those of its LM head in mode memory.

    The first call for a module and an attention runs three tiny forward passes (one if rows are not packed), without
    gradient and dropout; random states and train or eval mode stay as they were. Every rank calls this at the same
    point, as a forward pass may hold collective calls. What is not an ``nn.Module``, or is no
    language model of transformers' kind and cannot run the tiny rows, is not looked into.

    Raises:
        UnsupportedError: with what to write instead.
    """
    module = call.module
    if not isinstance(module, nn.Module) or not (packed or call.mode == "memory"):
        return
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    done = _CHECKED.setdefault(module, set())
    wanted = {("packed", implementation)} if packed else set()
    wanted |= {("head", implementation)} if call.mode == "memory" else set()
    if wanted <= done:
        return
    direct = not isinstance(call.engine, nn.Module) and not call.args
    probe = replace(
        call,
        engine=Direct(module) if direct else call.engine,
        settings=replace(call.settings, logits_optimization="none"),
        temperature=1.0,
        entropy=False,
    )
    with _undisturbed(probe.engine if isinstance(probe.engine, nn.Module) else module, device):
        ids, mask = _rows(_num_tokens(module, call.head), device)
        first = pack_rows(ids, mask) if packed else _alone(ids, mask)
        try:
            plain, outputs = _head_is_last(probe, first)
        except Exception as error:
            if not hasattr(module, "get_output_embeddings"):
                done |= wanted
                return
            if not packed or not isinstance(error, AttributeError | TypeError):
                raise
            raise PackingError(
                f"{type(module).__name__} cannot run packed rows, which come without an attention mask "
                f"({type(error).__name__}: {error})",
                _advice(module, device),
            ) from error
        if call.mode == "memory" and not plain:
            raise UnsupportedError(
                f"meta['logits_optimization']='memory': {type(module).__name__} changes its logits after the LM head "
                "(soft-capping, scaling, masking or slicing); write 'compute'"
            )
        if packed and ("packed", implementation) not in done:
            _check_isolation(probe, outputs["logits"], ids, mask, implementation, device)
    done |= wanted


def check_row_lengths(module: Any, lengths: torch.Tensor) -> None:
    """Refuse rows [B] so long that their rotary frequencies depend on the rows beside them, packed or padded.

    Raises:
        UnsupportedError: with the longest row that the model is exact for.
    """
    if not isinstance(module, nn.Module) or not hasattr(getattr(module, "config", None), "get_text_config"):
        return
    longest = longest_exact_row(module)
    if longest is not None and len(lengths) and int(lengths.max()) > longest:
        raise UnsupportedError(
            f"row {int(lengths.argmax())} has {int(lengths.max())} tokens, and beyond {longest} the rotary "
            f"frequencies of {type(module).__name__} are those of the longest row of a forward pass (rope_type "
            "'dynamic' or 'longrope'), so a row's log-probs would depend on the rows beside it; make rows at most "
            f"{longest} tokens long"
        )


def _check_isolation(
    probe: ModelCall,
    before: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    implementation: str | None,
    device: torch.device,
) -> None:
    module = probe.module
    changed = ids.clone()
    # Other tokens, not the same in another order, which a sum over them would not show.
    changed[_CHANGED] = (ids[_CHANGED] + 1) % _num_tokens(module, probe.head)
    after = run_model(probe, pack_rows(changed, mask))["logits"]
    others = [row for row in range(len(ids)) if row != _CHANGED]
    one, other = before[others], after[others]
    experts = any(_EXPERTS.search(type(part).__name__) for part in module.modules())
    if not (_same(one, other) or (experts and _agree(one, other))):
        raise PackingError(
            f"{type(module).__name__} lets packed rows see each other{_loaded_with(implementation)}: changing one row "
            f"moved the logits of its neighbours by up to {_largest(one, other):.3g}",
            _advice(module, device),
        )
    last = slice(len(ids) - 1, None)
    alone = run_model(probe, pack_rows(ids[last], mask[last]))["logits"]
    if not _agree(alone, before[last]):
        raise PackingError(
            f"{type(module).__name__} gives a packed row other logits than the same row alone"
            f"{_loaded_with(implementation)}, by up to {_largest(alone, before[last]):.3g}: it does not use the "
            "restarting position_ids",
            _advice(module, device),
        )


def _head_is_last(probe: ModelCall, rows: ModelRows) -> tuple[bool, ModelOutputs]:
    """Whether a forward pass returned what its LM head did, and its outputs."""
    if probe.head is None:
        return False, run_model(probe, rows)
    seen: list[torch.Tensor] = []
    handle = probe.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.clone()))
    try:
        outputs = run_model(probe, rows)
    finally:
        handle.remove()
    logits = outputs["logits"]
    if not seen or seen[-1].shape[-1] != logits.shape[-1]:
        return False, outputs
    at_head = rows.unpack(seen[-1][0]) if isinstance(rows, PackedRows) else seen[-1]
    return _same(at_head.double(), logits.double()), outputs


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _same(one, other):
        return True
    values, rounding = one.double()[one.isfinite()], _ROUNDING.get(one.dtype, _ROUNDING[torch.float32])
    scale = values.std() + 1e-6 * values.abs().mean()
    return bool(_difference(one, other).mean() <= rounding * scale)


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return _difference(one, other).max().item()


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.double() - other.double()).abs().where(one != other, 0.0)


def _loaded_with(implementation: str | None) -> str:
    return "" if implementation is None else f" with attn_implementation={implementation!r}"


def _advice(module: nn.Module, device: torch.device) -> str:
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    ours = attention_implementation(device.type) if device.type in ("cpu", "cuda") else VARLEN_ATTENTION
    if implementation in ("eager", "sdpa") and getattr(module, "_supports_attention_backend", False):
        return f"pass pack=False, or load it with attn_implementation={ours!r} if its attention is supported there"
    return "models of this family cannot be packed: pass pack=False"


def _num_tokens(module: nn.Module, head: nn.Linear | None) -> int:
    """Ids to draw from; two where the vocabulary is not known."""
    config = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        return config.get_text_config().vocab_size
    return 2 if head is None else head.out_features


def _rows(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [3, 7] and mask, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, num_tokens, (len(_LENGTHS), max(_LENGTHS)), generator=generator)
    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    return ids.to(device), mask.long().to(device)


def _alone(ids: torch.Tensor, mask: torch.Tensor) -> PaddedRows:
    """The row that has no padding."""
    full = slice(_CHANGED, _CHANGED + 1)
    return PaddedRows(ids[full], mask[full], torch.arange(ids.shape[1], device=ids.device)[None])


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, no gradient; modes and random states as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            for part, _ in modes:
                part.training = False
            yield
        finally:
            for part, training in modes:
                part.training = training
