"""Rows of a batch without their padding, and back.

B rows, P prompt width, R response width, S = P + R; N tokens in all rows, K of them in responses. What a row's padding
holds follows from the lengths, so it stays behind; masks travel as bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ArcticError

Tensors = dict[str, torch.Tensor]

PROMPT_LENGTHS, RESPONSE_LENGTHS, TOKENS = "prompt_lengths", "response_lengths", "tokens"
_KINDS = ("derived", "whole", "response", "response_bits", "token", "token_bits")
_LAYOUT = ("input_ids", "attention_mask")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
MAX_CELLS = 2**28
"""Default limit of a batch's B * S, so that a few bytes cannot announce a batch that fills the memory."""


class WireError(ArcticError, ValueError):
    """A payload that is damaged, or that contradicts itself."""


@dataclass(frozen=True)
class _Rows:
    """Where the tokens of a batch are."""

    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    prompt_width: int
    response_width: int

    @property
    def mask(self) -> torch.Tensor:
        """[B, S], True at a token."""
        column = torch.arange(self.prompt_width + self.response_width)
        start = (self.prompt_width - self.prompt_lengths.long())[:, None]
        end = (self.prompt_width + self.response_lengths.long())[:, None]
        return (column >= start) & (column < end)


def pack_rows(batch: Mapping[str, torch.Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """Take the padding out of a batch in the layout of ``layout.repack_to_verl``; without loss.

    A tensor that does not follow from the masks, or holds something outside them, travels as it is.

    Args:
        batch: ``input_ids``, ``attention_mask`` [B, S] and ``responses`` [B, R]; any other tensors with B rows.

    Returns:
        Tensors to send, each with one axis but for those that travel as they are, and plain values that
        ``unpack_rows`` needs beside them.
    """
    missing = [name for name in (*_LAYOUT, "responses") if name not in batch]
    if missing or batch["input_ids"].ndim != 2 or batch["input_ids"].shape != batch["attention_mask"].shape:
        return dict(batch), {"rows": None}
    rows = _find_rows(batch["attention_mask"], batch["responses"].shape[-1])
    if rows is None or not _fits_int32(batch["input_ids"]):
        return dict(batch), {"rows": None}
    mask = rows.mask
    pad = _pad_token_id(batch["input_ids"], mask)
    if pad is None:
        return dict(batch), {"rows": None}

    tensors = {
        PROMPT_LENGTHS: rows.prompt_lengths,
        RESPONSE_LENGTHS: rows.response_lengths,
        TOKENS: batch["input_ids"][mask].int(),
    }
    derived = _derived(batch["input_ids"], mask, rows.prompt_width)
    forms: dict[str, list[str]] = {}
    for name, value in batch.items():
        form, flat = _form(name, value, rows, mask, derived)
        forms[name] = [form, _dtype_name(value)]
        if flat is not None:
            tensors[f"batch.{name}"] = flat
    return tensors, {"rows": [rows.prompt_width, rows.response_width, pad], "forms": forms}


def unpack_rows(
    tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], *, max_cells: int = MAX_CELLS
) -> Tensors:
    """What ``pack_rows`` was given.

    Args:
        tensors: as they were sent.
        info: the plain values beside them.
        max_cells: the most that B * S may be.

    Raises:
        WireError: the tensors and the values beside them contradict each other, or the batch is too large.
    """
    if info.get("rows") is None:
        return dict(tensors)
    prompt_width, response_width, pad = _whole_numbers(info["rows"], "rows", 3)
    rows = _Rows(
        _lengths(tensors, PROMPT_LENGTHS, prompt_width),
        _lengths(tensors, RESPONSE_LENGTHS, response_width),
        prompt_width,
        response_width,
    )
    num_rows = len(rows.prompt_lengths)
    if len(rows.response_lengths) != num_rows:
        raise WireError(f"{num_rows} prompts and {len(rows.response_lengths)} responses are no batch")
    if num_rows * (prompt_width + response_width) > max_cells:
        raise WireError(f"{num_rows} rows of {prompt_width + response_width} tokens are above {max_cells} cells")
    mask = rows.mask
    ids = torch.full(mask.shape, pad, dtype=torch.int64)
    ids[mask] = _flat(tensors, TOKENS, torch.int32, int(mask.sum())).long()
    derived = _derived(ids, mask, prompt_width)
    return {name: _read(name, form, tensors, rows, mask, derived) for name, form in _forms(info).items()}


def pack_outputs(
    outputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> tuple[Tensors, dict[str, Any]]:
    """What a pass returned for a batch that the receiver has, without what is zero outside its rows.

    Args:
        outputs: tensors with B rows, usually [B, S].
        batch: ``attention_mask`` [B, S], ``responses`` [B, R].

    Returns:
        As ``pack_rows``; ``unpack_outputs`` takes it.
    """
    mask = batch["attention_mask"] != 0
    width = mask.shape[1] - batch["responses"].shape[1]
    tensors: Tensors = {}
    forms: dict[str, list[str]] = {}
    for name, value in outputs.items():
        inside, form = mask, "token"
        if value.shape == mask.shape and not bool((value[:, :width] != 0).any()):
            inside, form = mask.clone(), "response_of_row"
            inside[:, :width] = False
        if value.shape != mask.shape or bool((value[~inside] != 0).any()):
            form, flat = "whole", value.contiguous()
        else:
            flat = value[inside]
        forms[name] = [form, _dtype_name(value)]
        tensors[name] = flat
    return tensors, {"forms": forms}


def unpack_outputs(
    tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], batch: Mapping[str, torch.Tensor]
) -> Tensors:
    """What ``pack_outputs`` was given for the batch.

    Raises:
        WireError: the tensors do not fit the batch.
    """
    mask = batch["attention_mask"] != 0
    responses = mask.clone()
    responses[:, : mask.shape[1] - batch["responses"].shape[1]] = False
    result = {}
    for name, (kind, dtype) in _forms(info, ("whole", "token", "response_of_row")).items():
        if kind == "whole":
            result[name] = _whole(tensors.get(name), name, dtype, len(mask))
            continue
        inside = mask if kind == "token" else responses
        result[name] = torch.zeros(mask.shape, dtype=dtype)
        result[name][inside] = _flat(tensors, name, dtype, int(inside.sum()))
    return result


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the tensors themselves."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def _find_rows(attention_mask: torch.Tensor, response_width: int) -> _Rows | None:
    mask = attention_mask != 0
    if not torch.equal(mask.to(attention_mask.dtype), attention_mask):
        return None
    prompt_width = mask.shape[1] - response_width
    prompts, responses = mask[:, :prompt_width], mask[:, prompt_width:]
    rows = _Rows(prompts.sum(dim=1).int(), responses.sum(dim=1).int(), prompt_width, response_width)
    return rows if torch.equal(rows.mask, mask) else None


def _fits_int32(values: torch.Tensor) -> bool:
    if values.dtype.is_floating_point or values.numel() == 0:
        return not values.dtype.is_floating_point
    limits = torch.iinfo(torch.int32)
    return int(values.min()) >= limits.min and int(values.max()) <= limits.max


def _pad_token_id(input_ids: torch.Tensor, mask: torch.Tensor) -> int | None:
    """The one id outside the rows; 0 where there is no outside, None where there are several."""
    outside = input_ids[~mask]
    if outside.numel() == 0:
        return 0
    return int(outside[0]) if bool((outside == outside[0]).all()) else None


def _derived(input_ids: torch.Tensor, mask: torch.Tensor, prompt_width: int) -> Tensors:
    """Tensors that follow from the tokens and lengths, int64 or bool."""
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp_(min=0),
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "response_mask": mask[:, prompt_width:],
    }


def _form(
    name: str, value: torch.Tensor, rows: _Rows, mask: torch.Tensor, derived: Tensors
) -> tuple[str, torch.Tensor | None]:
    """How a tensor travels, and what of it."""
    if name in derived and value.shape == derived[name].shape and _equals(value, derived[name]):
        return "derived", None
    for where, inside in (("response", mask[:, rows.prompt_width :]), ("token", mask)):
        if value.shape != inside.shape or bool((value[~inside] != 0).any()):
            continue
        flat = value[inside]
        if bool((((flat == 0) | (flat == 1)) & ~flat.signbit()).all()):
            return f"{where}_bits", torch.from_numpy(np.packbits(flat.bool().numpy()))
        return where, flat
    return "whole", value.contiguous()


def _equals(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return not value.dtype.is_floating_point and torch.equal(value.long(), expected.long())


def _dtype_name(value: torch.Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise WireError(f"a tensor of {value.dtype} does not travel: send one of {', '.join(_DTYPES)}")
    return name


def _read(
    name: str,
    form: tuple[str, torch.dtype],
    tensors: Mapping[str, torch.Tensor],
    rows: _Rows,
    mask: torch.Tensor,
    derived: Tensors,
) -> torch.Tensor:
    kind, dtype = form
    if kind == "derived":
        if name not in derived:
            raise WireError(f"{name!r} does not follow from the rows")
        return derived[name].to(dtype).contiguous()
    key = f"batch.{name}"
    if kind == "whole":
        return _whole(tensors.get(key), name, dtype, len(mask))
    inside = mask[:, rows.prompt_width :] if kind.startswith("response") else mask
    count = int(inside.sum())
    if kind.endswith("_bits"):
        bits = _flat(tensors, key, torch.uint8, (count + 7) // 8)
        flat = torch.from_numpy(np.unpackbits(bits.numpy(), count=count)).to(dtype)
    else:
        flat = _flat(tensors, key, dtype, count)
    value = torch.zeros(inside.shape, dtype=dtype)
    value[inside] = flat
    return value


def _whole(value: torch.Tensor | None, name: str, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
    if value is None or value.dtype != dtype or value.ndim == 0 or len(value) != num_rows:
        raise WireError(f"{name!r} is not a tensor of {dtype} with {num_rows} rows")
    return value


def _forms(info: Mapping[str, Any], kinds: tuple[str, ...] = _KINDS) -> dict[str, tuple[str, torch.dtype]]:
    forms = info.get("forms")
    if not isinstance(forms, Mapping):
        raise WireError("the batch names no tensors")
    result = {}
    for name, form in forms.items():
        known = isinstance(form, list | tuple) and len(form) == 2 and form[0] in kinds and form[1] in _DTYPES
        if not known:
            raise WireError(f"{name!r} travels in the unknown form {form!r}")
        result[name] = (form[0], _DTYPES[form[1]])
    return result


def _whole_numbers(values: Any, name: str, count: int) -> list[int]:
    whole = isinstance(values, list | tuple) and all(type(value) is int for value in values)
    if not whole or len(values) != count or any(not -(2**31) <= value < 2**31 for value in values):
        raise WireError(f"{name}={values!r} must be {count} whole numbers")
    if any(value < 0 for value in values[:2]):
        raise WireError(f"{name}={values!r} has a negative width")
    return list(values)


def _lengths(tensors: Mapping[str, torch.Tensor], name: str, width: int) -> torch.Tensor:
    lengths = tensors.get(name)
    if lengths is None or lengths.dtype != torch.int32 or lengths.ndim != 1:
        raise WireError(f"{name} must be an int32 tensor with one axis")
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise WireError(f"{name} holds lengths outside 0 to {width}")
    return lengths


def _flat(tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    value = tensors.get(name)
    if value is None or value.dtype != dtype or value.ndim != 1 or len(value) != count:
        found = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
        raise WireError(f"{name!r} is {found}; the rows need {dtype} [{count}]")
    return value
