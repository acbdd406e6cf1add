"""Where log-probs are read in a forward pass over rows, and the way from there back to the rows."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..zorro.layout import SharedRows
from .logprobs import align_to_tokens, next_token_targets
from .packing import PackedRows

__all__ = ["ModelRows", "PaddedRows", "Places"]


@dataclass(frozen=True)
class PaddedRows:
    """Rows given to the model as they are, padding and all."""

    input_ids: torch.Tensor
    """[b, S]."""
    attention_mask: torch.Tensor
    """[b, S]."""
    position_ids: torch.Tensor
    """[b, S]."""


ModelRows = PackedRows | PaddedRows | SharedRows
"""Rows as a model can be given them."""


class Places:
    """The N positions of a forward pass that log-probs are read at, and the way from there to rows [b, S]."""

    def __init__(self, rows: ModelRows):
        self._rows = rows
        self.selected: torch.Tensor | None = None
        """[N]: the model's positions that are read, where they are not all of them."""
        if isinstance(rows, SharedRows):
            # One position at least, also where nothing is scored: the LM head takes part in every micro-batch.
            missing = (0, int(not len(rows.scored)))
            self.selected, self.targets = pad(rows.predictors, missing), pad(rows.targets, missing)
            self.predicts = pad(torch.ones_like(rows.scored, dtype=torch.bool), missing)
            self.shape = (1, len(self.selected))
            return
        if isinstance(rows, PackedRows):
            self.targets, self.predicts = next_token_targets(rows.input_ids[0], rows.position_ids[0])
            if rows.scored is not None:
                self.predicts[:-1] &= rows.scored[1:]
        else:
            self.targets, self.predicts = _padded_targets(rows)
        self.shape = tuple(rows.input_ids.shape)

    def select(self, hidden: torch.Tensor) -> torch.Tensor:
        """What of [1, T, H], or [b, S, H], goes through the LM head."""
        return hidden if self.selected is None else hidden.index_select(1, self.selected)

    def to_tokens(self, values_N: torch.Tensor) -> torch.Tensor:
        """[N] to [b, S], each at the token that it predicts."""
        if isinstance(self._rows, SharedRows):
            return self._rows.to_rows(values_N[: len(self._rows.scored)])
        return self.to_rows(align_to_tokens(values_N, self.predicts))

    def to_rows(self, values_N: torch.Tensor) -> torch.Tensor:
        """[N, ...] to [b, S, ...], each at the position that it was read at."""
        if isinstance(self._rows, SharedRows):
            return self._rows.to_predictors(values_N[: len(self._rows.scored)])
        return self.all_to_rows(values_N)

    def all_to_rows(self, values_T: torch.Tensor) -> torch.Tensor:
        """Values of all the model's positions to [b, S, ...]."""
        if isinstance(self._rows, SharedRows):
            return self._rows.expand(values_T)
        if isinstance(self._rows, PackedRows):
            return self._rows.unpack(values_T)
        return values_T.view(*self.shape, *values_T.shape[1:])


def _padded_targets(rows: PaddedRows) -> tuple[torch.Tensor, torch.Tensor]:
    kept = rows.attention_mask.bool()
    predicts = torch.zeros_like(kept)
    predicts[:, :-1] = kept[:, :-1] & kept[:, 1:]
    targets = rows.input_ids.roll(-1, dims=1).where(predicts, 0)
    return targets.reshape(-1), predicts.reshape(-1)
