"""The body of a request or an answer: tensors as safetensors, everything else as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .rows import MAX_CELLS, Tensors, WireError, pack_outputs, pack_rows, unpack_outputs, unpack_rows

VERSION = 1
"""Of the format; a server refuses another one."""
CONTENT_TYPE = "application/vnd.arctic-rl+safetensors"
_ENTRY = "arctic_rl"


def encode(values: Mapping[str, Any], batch: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """One body.

    Args:
        values: plain values: JSON types, and numbers that are not finite.
        batch: tensors with one row a sample, sent without padding.

    Raises:
        WireError: a value is not plain.
    """
    tensors, info = ({}, None) if batch is None else pack_rows(batch)
    return _save(values, tensors, info)


def decode(body: bytes, *, max_cells: int = MAX_CELLS) -> tuple[dict[str, Any], Tensors | None]:
    """The values and the batch of a body, which is not trusted: nothing in it is run.

    Args:
        body: of a request or an answer.
        max_cells: see ``unpack_rows``.

    Raises:
        WireError: it is not whole, contradicts itself, or is of another version.
    """
    values, tensors, info = _load(body)
    return values, None if info is None else unpack_rows(tensors, info, max_cells=max_cells)


def encode_answer(
    values: Mapping[str, Any], outputs: Mapping[str, torch.Tensor] | None, batch: Mapping[str, torch.Tensor]
) -> bytes:
    """The body of what a pass over ``batch`` returned: values, and tensors of its rows (``pack_outputs``).

    Raises:
        WireError: a value is not plain.
    """
    tensors, info = ({}, None) if outputs is None else pack_outputs(outputs, batch)
    return _save(values, tensors, info)


def decode_answer(body: bytes, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], Tensors | None]:
    """What ``encode_answer`` was given for the batch.

    Raises:
        WireError: it is not whole, or does not fit the batch.
    """
    values, tensors, info = _load(body)
    return values, None if info is None else unpack_outputs(tensors, info, batch)


def _save(values: Mapping[str, Any], tensors: Tensors, info: dict[str, Any] | None) -> bytes:
    from safetensors.torch import save

    try:
        header = json.dumps({"version": VERSION, "values": values, "batch": info})
    except (TypeError, ValueError) as error:
        raise WireError(f"a request holds a value that does not travel: {error}") from error
    return save({name: value.contiguous() for name, value in tensors.items()}, {_ENTRY: header})


def _load(body: bytes) -> tuple[dict[str, Any], Tensors, dict[str, Any] | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    header = _json_object(_metadata(body).get(_ENTRY), "its header")
    if header.get("version") != VERSION:
        raise WireError(f"the body is of version {header.get('version')!r}; this side speaks version {VERSION}")
    values, info = header.get("values"), header.get("batch")
    if not isinstance(values, dict) or not (info is None or isinstance(info, dict)):
        raise WireError("the body's header must hold values and batch")
    if info is None:
        return values, {}, None
    try:
        return values, load(body), info
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise WireError(f"the body's tensors cannot be read: {error}") from error


def _metadata(body: bytes) -> dict[str, Any]:
    if len(body) < 8:
        raise WireError(f"the body has {len(body)} bytes: it is not whole")
    length = int.from_bytes(body[:8], "little")
    if length > len(body) - 8:
        raise WireError(f"the body announces a header of {length} bytes and has {len(body) - 8}: it is not whole")
    entries = _json_object(body[8 : 8 + length], "its list of tensors").get("__metadata__")
    if not isinstance(entries, dict):
        raise WireError("the body has no header")
    return entries


def _json_object(text: Any, what: str) -> dict[str, Any]:
    if not isinstance(text, str | bytes):
        raise WireError(f"the body has no {what}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body cannot be read: {what} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise WireError(f"the body cannot be read: {what} is no JSON object")
    return value
