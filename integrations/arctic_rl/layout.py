"""SkyRL's batch layout to verl's, and response values back again.

B rows, S SkyRL's sequence width, P prompt width, R response width; p and r are one row's prompt and response lengths.
SkyRL pads on the left only, and right-aligns tensors that hold response tokens; verl lines rows up at column P, where
every response starts, and left-aligns response tensors::

    SkyRL                                      verl
    sequences_BS          response_mask_BR     input_ids_B(P+R)         response_mask_BR
    | 11 12 21 22 23 |    | 1 1 1 |            |  0 11 12 21 22 23 |    | 1 1 1 |
    |  0 13 14 15 24 |    | 0 0 1 |            | 13 14 15 24  0  0 |    | 1 0 0 |

Masks alone say where a row's tokens are: a pad id may be a real token.
"""

from collections.abc import Mapping

import torch

__all__ = ["repack_to_verl", "response_to_skyrl"]

_LAYOUT_KEYS = ("sequences", "attention_mask", "response_mask")


def repack_to_verl(
    batch: Mapping[str, torch.Tensor | None], pad_token_id: int, *, response_len: int | None = None
) -> dict[str, torch.Tensor]:
    """Move a SkyRL batch into verl's [PAD|prompt|response|PAD] layout.

    Args:
        batch: ``sequences`` and ``attention_mask`` [B, S], ``response_mask`` [B, Rs] right-aligned, and any number of
            response tensors [B, Rs] (``loss_mask``, ``advantages``, ``action_log_probs``, ...). Entries that are None
            are left out. The layout is the one of SkyRL's ``convert_prompts_responses_to_batch_tensors``. A row's
            ``response_mask`` covers its whole response; holes belong in ``loss_mask``.
        pad_token_id: id written to ``input_ids``, ``prompts`` and ``responses`` outside the attention mask.
        response_len: width R of the result; None = Rs. Any width that holds the longest response.

    Returns:
        ``input_ids``, ``attention_mask``, ``position_ids`` [B, P+R]; ``prompts`` [B, P]; ``responses``,
        ``response_mask`` and every other response tensor under its own name [B, R], left-aligned, 0 outside
        ``response_mask``. Every entry keeps its dtype and is a contiguous copy. P is the longest prompt.

    Raises:
        ValueError: a required tensor is missing, shapes contradict each other, a mask is not SkyRL's, an entry is not
            a [B, Rs] tensor, or ``response_len`` is too narrow.
    """
    missing = [key for key in _LAYOUT_KEYS if batch.get(key) is None]
    if missing:
        raise ValueError(f"repack_to_verl: the batch has no {', '.join(missing)}; it needs {', '.join(_LAYOUT_KEYS)}")
    sequences_BS, attention_mask_BS, response_mask_BR = (batch.get(key) for key in _LAYOUT_KEYS)
    if sequences_BS.ndim != 2 or attention_mask_BS.shape != sequences_BS.shape:
        raise ValueError(
            f"repack_to_verl: sequences {_shape(sequences_BS)} and attention_mask {_shape(attention_mask_BS)} must "
            "both be [B, S]"
        )
    num_rows, seq_width = sequences_BS.shape
    if response_mask_BR.ndim != 2 or len(response_mask_BR) != num_rows:
        raise ValueError(f"repack_to_verl: response_mask {_shape(response_mask_BR)} must be [B, Rs] with B={num_rows}")

    total_B1 = _right_aligned_lengths(attention_mask_BS, "attention_mask")
    response_B1 = _right_aligned_lengths(response_mask_BR, "response_mask")
    prompt_B1 = total_B1 - response_B1
    if (prompt_B1 < 0).any():
        row = int(prompt_B1.argmin())
        raise ValueError(
            f"repack_to_verl: row {row} has {int(response_B1[row])} response tokens in response_mask but only "
            f"{int(total_B1[row])} tokens in attention_mask"
        )
    source_width = response_mask_BR.shape[1]
    longest_response = int(response_B1.max()) if num_rows else 0
    response_width = source_width if response_len is None else response_len
    if response_width < longest_response:
        raise ValueError(
            f"repack_to_verl: response_len={response_len} is narrower than the longest response of {longest_response} "
            "tokens; give at least that, or None"
        )
    prompt_width = int(prompt_B1.max()) if num_rows else 0

    device = sequences_BS.device
    column = torch.arange(prompt_width + response_width, device=device)
    row_start_B1 = prompt_width - prompt_B1
    valid = (column >= row_start_B1) & (column < prompt_width + response_B1)
    # Prompt and response lie side by side on both sides, so a row moves as one piece.
    input_ids = _take(
        sequences_BS, _row_index(valid, (seq_width - prompt_width) - response_B1, seq_width), pad_token_id
    )
    result = {
        "input_ids": input_ids,
        "attention_mask": valid.to(attention_mask_BS.dtype),
        "position_ids": (column - row_start_B1).clamp_(min=0).minimum((total_B1 - 1).clamp_(min=0)),
        "prompts": input_ids[:, :prompt_width].contiguous(),
        "responses": input_ids[:, prompt_width:].contiguous(),
        "response_mask": valid[:, prompt_width:].to(response_mask_BR.dtype),
    }

    response_index = _row_index(valid[:, prompt_width:], source_width - response_B1, source_width)
    for key in batch:
        values = batch.get(key)
        if key in _LAYOUT_KEYS or values is None:
            continue
        if key in result:
            raise ValueError(f"repack_to_verl: {key!r} is a name of the result; the batch must not hold it")
        if not isinstance(values, torch.Tensor) or values.shape != response_mask_BR.shape:
            raise ValueError(
                f"repack_to_verl: {key!r} is {_describe(values)}, not a response tensor of response_mask's shape "
                f"{_shape(response_mask_BR)}; leave it out of the batch"
            )
        result[key] = _take(values, response_index, 0)
    return result


def response_to_skyrl(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Right-align response values as SkyRL keeps them: the way back of :func:`repack_to_verl`.

    Args:
        values: [B, R], left-aligned, any dtype.
        response_mask: [B, Rs], SkyRL's right-aligned mask.

    Returns:
        [B, Rs] of ``values``' dtype: row i's last r_i columns hold its first r_i values, everything else is 0.

    Raises:
        ValueError: shapes do not fit, or ``response_mask`` is not right-aligned.
    """
    if values.ndim != 2 or response_mask.ndim != 2 or len(values) != len(response_mask):
        raise ValueError(
            f"response_to_skyrl: values {_shape(values)} must be [B, R] and response_mask {_shape(response_mask)} "
            "[B, Rs], with one B"
        )
    response_B1 = _right_aligned_lengths(response_mask, "response_mask").to(values.device)
    if len(values) and int(response_B1.max()) > values.shape[1]:
        raise ValueError(
            f"response_to_skyrl: values are {values.shape[1]} wide, but row {int(response_B1.argmax())} has "
            f"{int(response_B1.max())} response tokens"
        )
    width = response_mask.shape[1]
    shift_B1 = response_B1 - width
    valid = torch.arange(width, device=values.device) + shift_B1 >= 0
    return _take(values, _row_index(valid, shift_B1, values.shape[1]), 0)


def _row_index(valid: torch.Tensor, shift_B1: torch.Tensor, source_width: int) -> torch.Tensor:
    """Flat index [B, W] of column ``j + shift`` of each row of a [B, source_width] tensor; B * source_width = fill."""
    num_rows, width = valid.shape
    fill = num_rows * source_width
    dtype = torch.int32 if max(fill, valid.numel()) < torch.iinfo(torch.int32).max - width else torch.int64
    column = torch.arange(width, device=valid.device, dtype=dtype)
    row_start_B1 = torch.arange(num_rows, device=valid.device, dtype=dtype)[:, None] * source_width
    return torch.where(valid, column + (row_start_B1 + shift_B1.to(dtype)), fill)


def _take(values: torch.Tensor, flat_index: torch.Tensor, fill: int) -> torch.Tensor:
    """Values [B, W] at an index of :func:`_row_index`; the fill value is looked up like any other."""
    # Cheaper than a gather and a masked fill: one pass over the result, and one index for all tensors of a width.
    table = torch.cat([values.reshape(-1), values.new_full((1,), fill)])
    return table.index_select(0, flat_index.view(-1)).view(flat_index.shape)


def _right_aligned_lengths(mask: torch.Tensor, name: str) -> torch.Tensor:
    """Lengths [B, 1] of the rows of a mask whose ones are each row's last columns."""
    width = mask.shape[1]
    kept = mask.bool()
    length_B1 = kept.sum(dim=1, keepdim=True)
    wrong = (kept != (torch.arange(width, device=mask.device) >= width - length_B1)).any(dim=1)
    if wrong.any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"{name}: the ones of row {row} are not its last {int(length_B1[row])} columns; SkyRL pads on the left "
            "and leaves no holes"
        )
    return length_B1


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _describe(value: object) -> str:
    return f"{_shape(value)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
