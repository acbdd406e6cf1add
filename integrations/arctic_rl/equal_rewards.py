"""Groups whose samples earned the same: nothing to learn from, whatever form the rewards have and however they round.

The mean of n equal floating-point numbers is not always that number (n = 8, 0.7: off by one unit in the last place),
so that a standard deviation meant to be 0 is not, and a baseline is missed by as much.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["EqualRewardsMixin", "rows_of_equal_groups", "shifted_rewards"]

_OUTCOME_ESTIMATORS = ("grpo", "rloo", "maxrl")
"""SkyRL's estimators that compare a sample's summed reward with its group's."""


def rows_of_equal_groups(rewards: torch.Tensor, uids: Sequence[Hashable], counted: Sequence[bool]) -> torch.Tensor:
    """Which rows belong to a group of two or more counted rows that all have the same summed reward.

    Args:
        rewards: [B, R], per token.
        uids: per row, equal for the samples of one prompt.
        counted: per row; the others follow their group.

    Returns:
        [B], bool.
    """
    group_B = torch.from_numpy(np.unique(np.asarray(uids), return_inverse=True)[1])
    counted_B = torch.as_tensor(counted, dtype=torch.bool)
    totals, groups = rewards.sum(dim=1)[counted_B], group_B[counted_B]
    empty = totals.new_zeros(int(group_B.max()) + 1)
    sizes = empty.index_add(0, groups, torch.ones_like(totals))
    largest = empty.scatter_reduce(0, groups, totals, "amax", include_self=False)
    smallest = empty.scatter_reduce(0, groups, totals, "amin", include_self=False)
    return ((sizes > 1) & (largest == smallest))[group_B]


def shifted_rewards(rewards: Sequence[float | list[float]], uids: Sequence[Hashable]) -> list[float]:
    """Each row's summed reward less that of its group's first row: exactly 0 throughout a group of equal ones."""
    totals = [float(sum(reward)) if isinstance(reward, list) else float(reward) for reward in rewards]
    first: dict[Hashable, float] = {}
    for uid, total in zip(uids, totals, strict=True):
        first.setdefault(uid, total)
    return [total - first[uid] for uid, total in zip(uids, totals, strict=True)]


class EqualRewardsMixin:
    """Put before a SkyRL trainer class: what it does with groups of equal rewards, done exactly.

    * ``trainer.algorithm.zero_variance_filter`` sees summed rewards of tokens too; SkyRL's own filters rewards of
      whole responses only, which per-trajectory generation does not give.
    * The advantages of GRPO, RLOO and MAXRL are 0 in such a group.
    """

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *others: Any, **more: Any) -> Any:
        """SkyRL's rewards per token; groups of equal summed rewards are masked where the recipe asks for it."""
        per_token = bool(generator_output["rewards"]) and isinstance(generator_output["rewards"][0], list)
        output, uids = super().postprocess_generator_output(generator_output, uids, *others, **more)
        algorithm = self.cfg.trainer.algorithm
        if per_token and algorithm.zero_variance_filter:
            self._mask_equal_groups(output, uids, algorithm.zero_variance_filter_tol)
        return output, uids

    def _mask_equal_groups(self, output: Any, uids: list[str], tolerance: float) -> None:
        from skyrl.train.utils.trainer_utils import zero_variance_filter

        masks = output["loss_masks"]
        last = output.get("is_last_step")
        counted = [row for row in range(len(uids)) if last is None or last[row]]
        kept = zero_variance_filter(
            [sum(output["rewards"][row]) for row in counted],
            [uids[row] for row in counted],
            loss_masks=[masks[row] for row in counted],
            tol=tolerance,
        )
        kept_uids = {uids[counted[place]] for place in kept}
        output["loss_masks"] = [
            mask if uid in kept_uids else [0] * len(mask) for mask, uid in zip(masks, uids, strict=True)
        ]
        self.all_metrics["reward/num_zero_variance_filtered"] = len(set(uids)) - len(kept_uids)

    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's advantages, exactly 0 in groups of equal rewards for the estimators that compare samples."""
        if self.cfg.trainer.algorithm.advantage_estimator not in _OUTCOME_ESTIMATORS:
            return super().compute_advantages_and_returns(data)
        uids = data.metadata["uids"]
        last = data.metadata.get("is_last_step")
        equal = rows_of_equal_groups(data["rewards"], uids, [True] * len(uids) if last is None else last)
        data = super().compute_advantages_and_returns(data)
        for name in ("advantages", "returns"):
            data[name] = data[name].masked_fill(equal[:, None], 0)
        return data
