"""Rows of one micro-batch laid out with every group's common prefix once, and the way back.

b rows, S width of the padded rows, T tokens laid out. All prefixes come first, those that several rows or a suffix
need before the others, then the suffixes group by group; a suffix's positions continue where its prefix ends::

    rows                     input_ids_1T     | 7  8  9 | 4  5  1 | 1 | 1  3 |
    7 8 9 | 1                position_ids_1T  | 0  1  2 | 0  1  2 | 3 | 3  4 |
    4 5   | 1                                   prefix    a row's   suffixes of
    7 8 9 | 1 3                                 of two    whole     the first two

Attention then is two passes: causal inside every segment, and every suffix over the whole of its prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from .groups import RowGroup
from .passes import AttentionPass, self_pass

__all__ = ["SharedRows", "SharedSegments", "num_shared_tokens", "share_rows"]

_FILLER_TOKENS = 2
"""Tokens given to the model for rows that have none."""


@dataclass(frozen=True)
class SharedSegments:
    """Where the segments of a layout lie: plain numbers for back ends that loop, tensors for those that do not."""

    borders: tuple[int, ...]
    """[segments + 1]: where each segment starts, and T."""
    prefix_borders: tuple[int, ...]
    """[prefixes with suffixes + 1]: where those prefixes start, from 0."""
    suffix_borders: tuple[int, ...]
    """[prefixes with suffixes + 1]: where the suffixes of each such prefix start, and T."""
    suffix_prefix: tuple[int, ...]
    """For each suffix segment, in order, the number of its prefix."""
    cu_segments: torch.Tensor = field(repr=False)
    """``borders``, int32 on the rows' device."""
    cu_prefixes: torch.Tensor = field(repr=False)
    """``prefix_borders``, int32."""
    cu_suffixes: torch.Tensor = field(repr=False)
    """``suffix_borders`` counted from the first suffix, int32."""

    @property
    def num_tokens(self) -> int:
        return self.borders[-1]

    @property
    def suffix_start(self) -> int:
        """Where the first suffix starts; T if there is none."""
        return self.suffix_borders[0]

    @cached_property
    def own(self) -> AttentionPass:
        """Every segment over itself: queries and keys are all T tokens."""
        longest = int(np.diff(self.borders).max())
        return self_pass(list(pairwise(self.borders)), self.cu_segments, longest, self.num_tokens)

    @cached_property
    def cross(self) -> AttentionPass | None:
        """Every suffix over its whole prefix: queries from ``suffix_start`` on, keys up to the last prefix that has
        suffixes. None where no row has a suffix."""
        if not self.suffix_prefix:
            return None
        first, prefixes = self.suffix_start, list(pairwise(self.prefix_borders))
        spans = list(pairwise(self.borders))[-len(self.suffix_prefix) :]
        of_spans = [prefixes[number] for number in self.suffix_prefix]
        suffixes = [(start - first, stop - first) for start, stop in pairwise(self.suffix_borders)]
        return AttentionPass(
            problems=tuple(
                (start - first, stop - first, *prefix, prefix[1] - prefix[0])
                for (start, stop), prefix in zip(spans, of_spans, strict=True)
            ),
            joined=tuple((*queries, *keys) for queries, keys in zip(suffixes, prefixes, strict=True)),
            causal=False,
            cu_q=self.cu_suffixes,
            cu_k=self.cu_prefixes,
            max_q=max(stop - start for start, stop in suffixes),
            max_k=max(stop - start for start, stop in prefixes),
            num_queries=suffixes[-1][1],
            num_keys=prefixes[-1][1],
        )

    @cached_property
    def longest_row(self) -> int:
        """Longest prefix and suffix together, in tokens."""
        num_suffixes = len(self.suffix_prefix)
        lengths = np.diff(self.borders)
        whole = lengths[: len(lengths) - num_suffixes]
        with_suffix = lengths[len(lengths) - num_suffixes :] + np.diff(self.prefix_borders)[list(self.suffix_prefix)]
        return int(max(whole.max(initial=0), with_suffix.max(initial=0)))


@dataclass(frozen=True)
class SharedRows:
    """b rows laid out with shared prefixes, and which of their tokens get a log-prob."""

    input_ids: torch.Tensor
    """[1, T], int64."""
    position_ids: torch.Tensor
    """[1, T], int64."""
    segments: SharedSegments
    """What the attention needs."""
    place: torch.Tensor
    """[b, S], int64: where each token of the rows lies; 0 outside the rows."""
    attention_mask: torch.Tensor
    """[b, S], bool."""
    scored: torch.Tensor
    """[M], int64, ascending: the tokens that get a log-prob, each once."""
    predictors: torch.Tensor
    """[M], int64: the token before each of them, whose hidden state predicts it; the last token of a shared prefix
    stands here once for every suffix."""
    targets: torch.Tensor
    """[M], int64: ids of the scored tokens."""
    scored_mask: torch.Tensor
    """[b, S], bool: where :meth:`to_rows` puts a value."""

    @property
    def shape(self) -> tuple[int, int]:
        """(b, S)."""
        return tuple(self.place.shape)

    def to_rows(self, values_M: torch.Tensor) -> torch.Tensor:
        """Values of the scored tokens, [M, ...], to [b, S, ...], exactly 0 elsewhere; differentiable."""
        return self._scatter(values_M, 0)

    def to_predictors(self, values_M: torch.Tensor) -> torch.Tensor:
        """Values [M, ...] to [b, S, ...] one column further left: at the token that predicts the scored one."""
        return self._scatter(values_M, 1)

    def expand(self, values_T: torch.Tensor) -> torch.Tensor:
        """Values of the laid-out tokens, [T, ...], to [b, S, ...], exactly 0 outside the rows; differentiable."""
        mask = self.attention_mask.view(*self.shape, *(1,) * (values_T.ndim - 1))
        return torch.where(mask, values_T[self.place], values_T.new_zeros(()))

    def _scatter(self, values_M: torch.Tensor, shift: int) -> torch.Tensor:
        number_T = self.place.new_zeros(self.input_ids.shape[1])
        number_T[self.scored] = torch.arange(len(self.scored), device=self.place.device)
        where = self.scored_mask.reshape(-1).nonzero().squeeze(1)
        picked = values_M.index_select(0, number_T[self.place.reshape(-1)[where]])
        flat = values_M.new_zeros((self.place.numel(), *values_M.shape[1:]))
        return flat.index_copy(0, where - shift, picked).view(*self.shape, *values_M.shape[1:])


def num_shared_tokens(group: RowGroup, lengths: Sequence[int]) -> int:
    """Tokens that a group takes in a layout, given the lengths of all rows."""
    return group.shared + sum(int(lengths[row]) - group.shared for row in group.rows)


def share_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, groups: Sequence[RowGroup], prompt_width: int = 0
) -> SharedRows:
    """Lay out rows whose masks have no holes.

    Args:
        input_ids: [b, S].
        attention_mask: [b, S].
        groups: every row of the b in one group; each group's rows begin with ``shared`` equal tokens.
        prompt_width: columns of the prompts; only tokens right of them get a log-prob.

    Raises:
        ValueError: a row is in no group or in two, a prefix is longer than a row, or the rows of a group differ in it.
    """
    kept = attention_mask.bool()
    device = kept.device
    lengths = kept.sum(dim=1)
    num_rows, width = kept.shape
    table = _RowTable(num_rows, lengths.tolist(), groups)
    starts = kept.int().argmax(dim=1) if width else lengths
    offset = torch.arange(width, device=device) - starts[:, None]
    shared, prefix_start, suffix_start = torch.as_tensor(table.columns, device=device)[:, :, None]
    place = torch.where(offset < shared, prefix_start + offset, suffix_start + offset - shared).where(kept, 0)

    flat = place[kept]
    ids_T = input_ids.new_zeros(table.num_tokens)
    ids_T[flat] = input_ids[kept]
    if not torch.equal(ids_T[flat], input_ids[kept]):
        raise ValueError("rows of a group differ within their shared prefix")
    positions_T = offset.new_zeros(table.num_tokens)
    positions_T[flat] = offset[kept]

    follows = kept & (offset > 0)
    before_T = torch.zeros_like(positions_T)
    before_T[place[follows]] = place.roll(1, dims=1)[follows]
    scored_mask = follows & (torch.arange(width, device=device) >= prompt_width)
    scored_T = torch.zeros_like(ids_T, dtype=torch.bool)
    scored_T[place[scored_mask]] = True
    scored = scored_T.nonzero().squeeze(1)
    return SharedRows(
        input_ids=ids_T[None],
        position_ids=positions_T[None],
        segments=table.segments(device),
        place=place,
        attention_mask=kept,
        scored=scored,
        predictors=before_T[scored],
        targets=ids_T[scored],
        scored_mask=scored_mask,
    )


class _RowTable:
    """The segments of a layout, and for each row its shared length and where its prefix and suffix start."""

    def __init__(self, num_rows: int, lengths: list[int], groups: Sequence[RowGroup]):
        rows = [row for group in groups for row in group.rows]
        if sorted(rows) != list(range(num_rows)):
            raise ValueError(f"groups must hold each of the {num_rows} rows once, got rows {sorted(rows)}")
        short = [row for group in groups for row in group.rows if lengths[row] < group.shared]
        if short:
            raise ValueError(f"row {short[0]} has {lengths[short[0]]} tokens, fewer than its group's shared prefix")
        alone = [RowGroup((row,), lengths[row]) for group in groups if not group.shared for row in group.rows]
        groups = [group for group in (*groups, *alone) if group.shared]
        is_whole = [all(lengths[row] == group.shared for row in group.rows) for group in groups]
        with_suffix = [group for group, whole in zip(groups, is_whole, strict=True) if not whole]
        prefixes = [*with_suffix, *(group for group, whole in zip(groups, is_whole, strict=True) if whole)]
        suffixes = [
            (number, row)
            for number, group in enumerate(with_suffix)
            for row in group.rows
            if lengths[row] > group.shared
        ]
        sizes = [group.shared for group in prefixes]
        sizes += [lengths[row] - prefixes[number].shared for number, row in suffixes]
        self.borders = np.cumsum([0, *(sizes or [_FILLER_TOKENS])])
        self.prefix_borders = self.borders[: len(with_suffix) + 1]
        self.suffix_prefix = [number for number, _ in suffixes]
        first = np.searchsorted(self.suffix_prefix, np.arange(len(with_suffix) + 1))
        self.suffix_borders = self.borders[(len(prefixes) if sizes else 1) + first]
        self.columns = np.zeros((3, num_rows), dtype=np.int64)
        for number, group in enumerate(prefixes):
            self.columns[:2, list(group.rows)] = np.array([[group.shared], [self.borders[number]]])
        self.columns[2, [row for _, row in suffixes]] = self.borders[len(prefixes) : -1] if suffixes else 0
        self.num_tokens = int(self.borders[-1])

    def segments(self, device: torch.device) -> SharedSegments:
        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=device)

        return SharedSegments(
            borders=tuple(self.borders.tolist()),
            prefix_borders=tuple(self.prefix_borders.tolist()),
            suffix_borders=tuple(self.suffix_borders.tolist()),
            suffix_prefix=tuple(self.suffix_prefix),
            cu_segments=tensor(self.borders),
            cu_prefixes=tensor(self.prefix_borders),
            cu_suffixes=tensor(self.suffix_borders - self.suffix_borders[0]),
        )
