"""A batch of rows, the masks and counts of it, and its micro-batches.

B rows, S = P + R width, b rows of one micro-batch. Response tensors may come [B, R]; processors always see [b, S].
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from ..errors import UnsupportedError
from ..zorro.groups import RowGroup, find_groups
from ..zorro.layout import share_rows
from ..zorro.plan import local_groups, plan_shared_micro_batches
from .outputs import number_of
from .packing import PackedRows, pack_rows, plan_micro_batches, row_lengths, rows_of_packed
from .places import ModelRows, PaddedRows

__all__ = ["MicroBatch", "RowBatch", "RowPlan", "join_rows", "with_counts"]

_IMMUTABLE = (str, bytes, bool, int, float, type(None))
_TENSORS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "advantages"}
    | {"old_log_probs", "ref_log_prob", "rollout_is_weights", "rollout_logprobs", "micro_batch_ids"}
)
_OF_RESPONSES = frozenset(
    {"response_mask", "loss_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"}
    | {"rollout_logprobs"}
)
_KEPT_AS_GIVEN = ("prompts", "responses")
_COUNTS = ("batch_num_tokens", "global_batch_size")


@dataclass(frozen=True)
class RowPlan:
    """Which rows go together into a micro-batch."""

    rows: list[int]
    """Row numbers in the batch, ascending."""
    groups: list[RowGroup] | None = None
    """Which of them share prefixes, rows counted among ``rows``; None = prompts are not shared."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the engine together; None instead of row numbers = a stand-in that carries no loss."""

    rows: list[int] | None
    """Row numbers in the batch, ascending."""
    model_rows: ModelRows
    """What the model sees."""
    batch: dict[str, Any]
    """The rows' own entries and the shared ones; tensors [b, S] where they were [B, S] or [B, R]."""
    meta: dict[str, Any]
    """The same of ``meta``."""
    num_tokens: float
    """Sum of the effective mask."""


class RowBatch:
    """A checked batch: contiguous rows, tensors of one row count, and one effective loss mask."""

    def __init__(
        self,
        batch: Mapping[str, Any],
        meta: Mapping[str, Any],
        *,
        pack: bool,
        share: bool = False,
        responses_only: bool = False,
    ):
        """Read a batch of the wire format.

        Args:
            batch: ``input_ids`` and ``attention_mask`` [B, S], and anything else; or, already packed, ``input_ids``
                [1, T] with ``cu_seqlens`` here or in ``meta`` and token tensors [1, T]. ``micro_batch_ids`` [B] says
                which rows go together instead of the token budget.
            meta: tensors of B rows are split with them, everything else is shared.
            pack: lay rows end to end, by token budget; else one micro-batch as it is.
            share: give the model what several rows of a micro-batch begin with once; needs ``pack``.
            responses_only: packed tokens of prompts get no log-prob; those of shared prompts never do.

        Raises:
            ValueError: a tensor is missing, or contradicts the others.
            UnsupportedError: tokens of prompts get no log-prob, and the effective mask holds some.
        """
        self._batch = {name: _as_tensor(name, value) for name, value in batch.items()}
        self._meta = {name: _as_tensor(name, value) for name, value in meta.items()}
        if self._batch.get("input_ids") is None:
            raise ValueError("the batch has no 'input_ids'")
        borders = self._batch.pop("cu_seqlens", None)
        borders = self._meta.pop("cu_seqlens", None) if borders is None else borders
        self.packed_input = None if borders is None else rows_of_packed(self._batch["input_ids"], borders)
        if self.packed_input is not None:
            self._take_packed(self.packed_input)
        if self._batch.get("attention_mask") is None:
            raise ValueError("the batch has no 'attention_mask'; rows cannot be told from padding without it")
        self._pack = pack or self.packed_input is not None
        self._share = share
        self._responses_only = share or (responses_only and self._pack)

        ids = self._batch["input_ids"]
        mask = self._batch["attention_mask"]
        if ids.ndim != 2 or mask.shape != ids.shape:
            raise ValueError(f"input_ids {list(ids.shape)} and attention_mask {list(mask.shape)} must both be [B, S]")
        self.num_rows, self.width = ids.shape
        self.lengths = row_lengths(mask)
        prompts = self._batch.get("prompts")
        if prompts is not None and (
            prompts.ndim != 2 or len(prompts) != self.num_rows or prompts.shape[1] > self.width
        ):
            raise ValueError(
                f"prompts {list(prompts.shape)} must be [B, P] with P <= S of {[self.num_rows, self.width]}"
            )
        self.response_len = self.width if prompts is None else self.width - prompts.shape[1]
        self._check_widths()
        self._check_position_ids()
        self.loss_mask = self._effective_mask()
        self._batch = {name: self._own(value) for name, value in self._batch.items()}
        self._meta = {name: self._own(value) for name, value in self._meta.items()}

    def _check_widths(self) -> None:
        """Refuse tensors of the responses that are as wide as neither rows nor responses."""
        responses = self._batch.get("responses")
        expected = [self.num_rows, self.response_len]
        if isinstance(responses, torch.Tensor) and self.packed_input is None and list(responses.shape) != expected:
            raise ValueError(
                f"responses {list(responses.shape)} must be [B, R], the columns behind prompts: {expected}"
            )
        widths = {self.width, self.response_len}
        for name in sorted(_OF_RESPONSES & self._batch.keys()):
            value = self._batch[name]
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.ndim != 2 or len(value) != self.num_rows:
                shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"{name} {shape} must be [B, S] or [B, R] with B={self.num_rows}")
            if value.shape[1] not in widths:
                raise ValueError(
                    f"{name} {list(value.shape)} must be as wide as the rows, S={self.width}, or the responses, "
                    f"R={self.response_len}"
                )

    def check_token_ids(self, vocabulary_size: int | None) -> None:
        """Refuse ids that a model has no embedding of; None = it does not say how many it has.

        Raises:
            ValueError: with the row and the id.
        """
        if vocabulary_size is None or not self.num_rows:
            return
        ids = self._batch["input_ids"].where(self._batch["attention_mask"] != 0, 0)
        wrong = (ids < 0) | (ids >= vocabulary_size)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"row {row} of the batch holds the token id {int(ids[row, column])}; the model has "
                f"{vocabulary_size} tokens"
            )

    def token_counts(self) -> tuple[float, int]:
        """(sum of the effective mask, rows with a token of it); without masks every token with a log-prob counts."""
        if self.loss_mask is None:
            scored = self._scored_tokens()
            return float(scored.sum()), int((scored > 0).sum())
        return float(self.loss_mask.double().sum()), int((self.loss_mask != 0).any(dim=1).sum())

    def plan(self, max_tokens: int) -> list[RowPlan]:
        """The micro-batches."""
        if not self.num_rows:
            return []
        given = None
        if self.packed_input is not None or not self._pack:
            given = [list(range(self.num_rows))]
        elif self._batch.get("micro_batch_ids") is not None:
            given = self._given_plan(self._batch["micro_batch_ids"])
        if not self._share:
            plan = plan_micro_batches(self.lengths.cpu(), max_tokens) if given is None else given
            return [RowPlan(rows) for rows in plan]
        if given is not None:
            return [RowPlan(rows, self._groups(rows)) for rows in given]
        plan = plan_shared_micro_batches(self._groups(range(self.num_rows)), self.lengths.tolist(), max_tokens)
        return [RowPlan(*local_groups(groups)) for groups in plan]

    def _groups(self, rows: Sequence[int]) -> list[RowGroup]:
        index = torch.tensor(rows)
        ids, mask = self._batch["input_ids"].cpu()[index], self._batch["attention_mask"].cpu()[index]
        has_prompts = self._batch.get("prompts") is not None
        return find_groups(ids, mask, mask[:, : self._prompt_width].sum(dim=1) if has_prompts else None)

    @property
    def _prompt_width(self) -> int:
        return self.width - self.response_len

    def _scored_tokens(self) -> torch.Tensor:
        """[B]: tokens of each row that have a log-prob."""
        mask = self._batch["attention_mask"].bool()
        return (mask & (mask.cumsum(dim=1) > 1) & self._scored_columns(mask)).sum(dim=1)

    def _scored_columns(self, mask: torch.Tensor) -> torch.Tensor:
        """[S], bool: the columns that get log-probs."""
        first = self._prompt_width if self._responses_only else 0
        return torch.arange(mask.shape[1], device=mask.device) >= first

    def _given_plan(self, ids: Any) -> list[list[int]]:
        """Rows of equal number in ``micro_batch_ids``, by rising number."""
        if not isinstance(ids, torch.Tensor) or ids.shape != (self.num_rows,) or ids.is_floating_point():
            raise ValueError(f"micro_batch_ids must be whole numbers [B] of the {self.num_rows} rows")
        numbers, counts = ids.unique(return_counts=True)
        if numbers[0] < 0:
            raise ValueError(f"micro_batch_ids must count from 0, got {numbers.tolist()}")
        return [rows.tolist() for rows in ids.argsort(stable=True).split(counts.tolist())]

    def micro_batch(self, plan: RowPlan, meta: Mapping[str, Any], device: Any) -> MicroBatch:
        """The planned rows on ``device``; ``meta`` is added to the batch's own."""
        rows = plan.rows
        index = torch.tensor(rows)
        batch = {name: self._of_rows(name, value, index, device) for name, value in self._batch.items()}
        own_meta = {name: self._of_rows(name, value, index, device) for name, value in self._meta.items()} | meta
        num_tokens = float(self._scored_tokens()[index].sum())
        if self.loss_mask is not None:
            num_tokens = float(self.loss_mask[index].double().sum())
            batch["loss_mask"] = self._of_rows("loss_mask", self.loss_mask, index, device)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return MicroBatch(rows, self._model_rows(plan, ids, mask), batch, own_meta, num_tokens)

    def _model_rows(self, plan: RowPlan, ids: torch.Tensor, mask: torch.Tensor) -> ModelRows:
        if plan.groups is not None:
            return share_rows(ids, mask, plan.groups, self._prompt_width)
        if not self._pack:
            return PaddedRows(ids, mask, _positions(mask))
        packed = self.packed_input
        packed = packed.to(ids.device) if packed is not None and len(packed.flat_index) else pack_rows(ids, mask)
        if self._responses_only and len(packed.flat_index):
            scored = self._scored_columns(mask).expand(packed.shape)
            packed = dataclasses.replace(packed, scored=packed.pack(scored))
        return packed

    def stand_in(self, device: Any) -> MicroBatch:
        """A micro-batch that keeps a rank's collective calls in step and carries no loss."""
        return MicroBatch(None, _stand_in(device, self._pack), {}, {}, 0.0)

    def to_input_layout(self, values: torch.Tensor) -> torch.Tensor:
        """Rows [B, S, ...] as the caller gave them: [1, T, ...] if the input was packed."""
        packed = self.packed_input
        if packed is None or values.ndim < 2 or values.shape[:2] != packed.shape:
            return values
        return packed.to(values.device).pack(values)[None]

    def _own(self, value: Any) -> Any:
        """Shared entries are copied, so that no processor can change the caller's; rows are when they are taken."""
        if isinstance(value, torch.Tensor):
            return value if value.ndim and len(value) == self.num_rows else value.clone()
        return value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)

    def _of_rows(self, name: str, value: Any, index: torch.Tensor, device: Any) -> Any:
        """The entry's part that belongs to some rows; response tensors become as wide as the rows."""
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == self.num_rows:
            part = value.index_select(0, index.to(value.device)).to(device)
            if part.ndim > 1 and part.shape[1] == self.response_len < self.width and name not in _KEPT_AS_GIVEN:
                trailing = (0, 0) * (part.ndim - 2)
                part = pad(part, (*trailing, self.width - self.response_len, 0))
            return part
        if isinstance(value, list | tuple) and len(value) == self.num_rows and name in self._batch:
            return [value[row] for row in index.tolist()]
        return value.to(device) if isinstance(value, torch.Tensor) else value

    def _take_packed(self, packed: PackedRows) -> None:
        """Turn token tensors of a packed batch into rows."""
        num_tokens = packed.input_ids.shape[1]

        def to_rows(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.ndim >= 2 and value.shape[:2] == (1, num_tokens):
                return packed.unpack(value[0])
            return packed.unpack(value) if value.ndim == 1 and len(value) == num_tokens else value

        self._batch = {name: to_rows(value) for name, value in self._batch.items()}
        self._batch["attention_mask"] = packed.unpack(torch.ones_like(packed.input_ids[0]))
        self._meta = {name: to_rows(value) for name, value in self._meta.items()}

    def _check_position_ids(self) -> None:
        given = self._batch.get("position_ids")
        if given is None:
            return
        mask = self._batch["attention_mask"].bool()
        if given.shape != mask.shape or ((given != _positions(mask)) & mask).any():
            raise ValueError(
                "position_ids must count every row's tokens from 0 ([B, S], cumulative sum of attention_mask minus "
                "one); leave them out to have them made"
            )

    def _effective_mask(self) -> torch.Tensor | None:
        """[B, S] float32: loss_mask if given, else response_mask."""
        name = next((name for name in ("loss_mask", "response_mask") if self._batch.get(name) is not None), None)
        if name is None:
            return None
        mask = self._batch[name]
        if mask.ndim != 2 or len(mask) != self.num_rows or mask.shape[1] not in (self.width, self.response_len):
            raise ValueError(
                f"{name} {list(mask.shape)} must be [B, S] = {[self.num_rows, self.width]} or [B, R] = "
                f"{[self.num_rows, self.response_len]}"
            )
        mask = pad(mask.float(), (self.width - mask.shape[1], 0))
        outside = ((mask != 0) & ~self._batch["attention_mask"].bool()).any(dim=1)
        if outside.any():
            raise ValueError(f"{name} is set outside attention_mask in row {int(outside.int().argmax())}")
        of_prompts = (mask[:, : self._prompt_width] != 0).any(dim=1)
        if self._responses_only and of_prompts.any():
            key = "zorro_train_enable" if self._share else "response_logprobs_only"
            raise UnsupportedError(
                f"{name} is set within the prompt of row {int(of_prompts.int().argmax())}, and with meta[{key!r}] "
                "prompts have no log-probs: leave that out, or leave 'prompts' out of the batch"
            )
        return mask


def with_counts(
    rows: RowBatch, meta: Mapping[str, Any], everywhere: Sequence[tuple[float, int]], widths: Sequence[int]
) -> dict[str, Any]:
    """The denominators of the mini-batch over all ranks: given all together, or counted here.

    Args:
        everywhere: :meth:`RowBatch.token_counts` of every rank.
        widths: response width R of every rank's rows.

    Returns:
        ``batch_num_tokens``, ``global_batch_size``, ``dp_size``, ``response_len``, the largest width, and
        ``own_response_len``, this rank's; a count is missing where it was not given and ``dp_size`` says that there
        are ranks which take no part in this call.

    Raises:
        ValueError: counts came without ``dp_size`` or the reverse, or contradict the ranks or the rows there are.
    """
    given = {name: number_of(meta, name) for name in (*_COUNTS, "dp_size") if meta.get(name) is not None}
    counts = [name for name in _COUNTS if name in given]
    if bool(counts) != ("dp_size" in given):
        raise ValueError(
            f"meta has {', '.join(given)} without {'dp_size' if counts else 'a count of the mini-batch'}; give "
            "batch_num_tokens and global_batch_size of the whole mini-batch over all ranks together with dp_size, or "
            "none of them to have them counted"
        )
    for name, value in given.items():
        least = 1 if name == "dp_size" else 0
        if value < least:
            raise ValueError(f"meta[{name!r}]={value!r} must be at least {least}")
        trained = sum(count for _, count in everywhere)
        if value == 0 and trained:
            raise ValueError(
                f"meta[{name!r}]=0, but the loss mask of this call has tokens in {trained} rows: send the count of "
                "the whole mini-batch over all ranks; 0 is right only where the mask is zero everywhere"
            )
    ranks = len(everywhere)
    if ranks > 1 and given.get("dp_size", ranks) != ranks:
        raise ValueError(f"meta['dp_size']={given['dp_size']} but {ranks} ranks take part in this call")
    counted = {
        "batch_num_tokens": sum(tokens for tokens, _ in everywhere),
        "global_batch_size": sum(count for _, count in everywhere),
        "dp_size": ranks,
    }
    if given and given["dp_size"] != ranks:
        counted = {}
    return counted | given | {"response_len": max(widths), "own_response_len": rows.response_len}


def _stand_in(device: Any, pack: bool) -> PackedRows | PaddedRows:
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    ones = torch.ones_like(ids)
    return pack_rows(ids, ones) if pack else PaddedRows(ids, ones, _positions(ones))


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _as_tensor(name: str, value: Any) -> Any:
    """Numbers as a tensor, an array of anything else as a list."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(np.ascontiguousarray(value)) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, list | tuple) and name in _TENSORS:
        try:
            return torch.as_tensor(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name} is a list that is no tensor: {error}") from error
    return value


def join_rows(pieces: Sequence[tuple[list[int], Any]], num_rows: int) -> Any:
    """Micro-batches' entries in the batch's row order; tensors stay tensors, lists stay lists."""
    order = [row for rows, _ in pieces for row in rows]
    values = [value for _, value in pieces]
    if isinstance(values[0], torch.Tensor):
        joined = torch.cat(values)
        if order == list(range(num_rows)):
            return joined
        result = joined.new_zeros((num_rows, *joined.shape[1:]))
        return result.index_copy_(0, torch.tensor(order, device=joined.device), joined)
    result = [None] * num_rows
    for rows, part in pieces:
        for row, value in zip(rows, part, strict=True):
            result[row] = value
    return result
