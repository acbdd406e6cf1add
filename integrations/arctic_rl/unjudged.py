"""Samples that could not be judged: out of the loss, and out of the baseline of their group.

A reward that says nothing about its response (the gold query failed, the scorer failed) must not be trained on as a
wrong answer, and must not move the baseline that the other samples of its prompt are compared with either.
"""

from collections.abc import Hashable, Sequence
from typing import Any

type Reward = float | list[float]


class UnjudgedMask(list[int]):
    """The loss mask, all zero, of a row that could not be judged.

    A type of its own, because SkyRL zeroes masks for other reasons too (overlong filtering) whose rewards stay in the
    baseline. The entries of a generator output's lists survive SkyRL's slicing and concatenation as they are.
    """

    def __init__(self, length: int) -> None:
        super().__init__([0] * length)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return UnjudgedMask, (len(self),)


def fill_unjudged_rewards(
    rewards: Sequence[Reward],
    unjudged: Sequence[bool],
    groups: Sequence[Hashable],
    is_last_step: Sequence[bool] | None = None,
) -> list[Reward]:
    """Rewards in which each row that could not be judged earns the mean of its judged siblings, or 0 without any.

    That leaves the group's mean, its best-of-n and whether its rewards vary as the judged samples alone have them. It
    does not leave the standard deviation: with m of n samples judged, n > m > 1, the sample's deviation shrinks by
    ``sqrt((m - 1) / (n - 1))`` (0.926 for one of eight), so that whoever divides by it must leave the rows out as
    ``JudgedBaselineMixin`` does.

    Args:
        rewards: per row a number, or a number per response token whose sum counts.
        unjudged: per row.
        groups: per row, equal for the samples of one prompt.
        is_last_step: per row, where a trajectory has a row a step: only such rows hold their trajectory's reward.
    """
    counted = [True] * len(rewards) if is_last_step is None else is_last_step
    totals: dict[Hashable, list[float]] = {}
    for reward, left_out, group, counts in zip(rewards, unjudged, groups, counted, strict=True):
        if counts and not left_out:
            totals.setdefault(group, []).append(_total(reward))
    return [
        _with_total(reward, _mean(totals.get(group, [])) if counts else 0.0) if left_out else reward
        for reward, left_out, group, counts in zip(rewards, unjudged, groups, counted, strict=True)
    ]


def _total(reward: Reward) -> float:
    return float(sum(reward)) if isinstance(reward, list) else float(reward)


def _mean(values: list[float]) -> float:
    if not values:
        return 0.0
    # Kept within the values, so that the mean of equal ones is exactly them.
    return min(max(sum(values) / len(values), min(values)), max(values))


def _with_total(reward: Reward, total: float) -> Reward:
    if not isinstance(reward, list):
        return total
    return [0.0] * (len(reward) - 1) + [total] if reward else []


class JudgedBaselineMixin:
    """Put before a SkyRL trainer class: advantages as if the rows that could not be judged were not there.

    SkyRL's estimators (GRPO, RLOO, MAXRL, REINFORCE++) have no notion of a sample without a reward. Rows marked by
    ``UnjudgedMask`` get a group of their own and no response tokens while the advantages are computed, hence the
    advantage 0; mean, standard deviation and size of every other group are those of its judged samples.
    A group with a single judged sample has nothing to compare it with: its advantage is 0 too, where SkyRL would take
    it for a group of size one and keep the raw reward.

    What still counts such a row: the number of sequences in a loss reduction and in
    ``trainer.algorithm.advantage_batch_normalize``, as SkyRL counts a row that overlong filtering masks.
    """

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *args: Any, **kwargs: Any) -> Any:
        """SkyRL's, with the rows of an unjudged trajectory marked where its turns were merged into new rows."""
        ids = generator_output.get("trajectory_ids")
        marked = zip(ids or [], generator_output["loss_masks"], strict=False)
        unjudged = {_trajectory(row_id) for row_id, mask in marked if isinstance(mask, UnjudgedMask)}
        output, uids = super().postprocess_generator_output(generator_output, uids, *args, **kwargs)
        if unjudged:
            output["loss_masks"] = [
                UnjudgedMask(len(mask)) if _trajectory(row_id) in unjudged else mask
                for row_id, mask in zip(output["trajectory_ids"], output["loss_masks"], strict=True)
            ]
        return output, uids

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        """SkyRL's training batch, with the rows that could not be judged noted in its metadata."""
        batch = super().convert_to_training_input(generator_output, uids)
        rows = [row for row, mask in enumerate(generator_output["loss_masks"]) if isinstance(mask, UnjudgedMask)]
        if rows:
            batch.metadata["unjudged_rows"] = rows
        return batch

    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's advantages, with the rows that could not be judged left out of what they are computed from."""
        rows = data.metadata.pop("unjudged_rows", None)
        if rows is None:
            return super().compute_advantages_and_returns(data)
        uids, response_mask = data.metadata["uids"], data["response_mask"]
        counted = data.metadata["is_last_step"] if "is_last_step" in data.metadata else [True] * len(uids)
        data.metadata["uids"] = _groups_without(rows, uids, counted, data["rewards"])
        data["response_mask"] = response_mask.clone()
        data["response_mask"][rows] = 0
        data = super().compute_advantages_and_returns(data)
        data.metadata["uids"] = uids
        data["response_mask"] = response_mask
        return data


def _trajectory(trajectory_id: Any) -> tuple[Any, Any]:
    return trajectory_id.instance_id, trajectory_id.repetition_id


def _groups_without(rows: list[int], uids: list[str], counted: Sequence[bool], rewards: Any) -> list[str]:
    """The group of each row once ``rows`` are left out.

    A group's only judged row keeps one sibling, which is given the same rewards [B, R] in place, so that their mean is
    exactly theirs.
    """
    left_out = set(rows)
    judged: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        if counted[row] and row not in left_out:
            judged.setdefault(uid, []).append(row)
    groups, paired = list(uids), set()
    for row in rows:
        siblings = judged.get(uids[row], [])
        if counted[row] and len(siblings) == 1 and uids[row] not in paired:
            paired.add(uids[row])
            rewards[row] = rewards[siblings[0]]
        else:
            groups[row] = f"{uids[row]}/unjudged/{row}"
    return groups
