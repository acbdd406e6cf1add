"""Dynamic sampling (``trainer.algorithm.dynamic_sampling``) of whole trajectories, in groups with uids of their own.

SkyRL chooses groups; what it chooses among are trajectories here, whatever rows they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .equal_rewards import shifted_rewards

__all__ = ["DynamicSamplingMixin", "original_uid"]

type _Trajectory = dict[str, Any]
"""What a generator output holds of one trajectory: by column the list of its rows' values, by column and name where
the column is a dict of lists, None where there is no column."""

_TRAJECTORIES = "arctic_trajectories"
_IN_PLACE_OF = "/in place of/"


def original_uid(uid: Any) -> Any:
    """The uid of the prompt that a group's samples answer; a recipe's own uids need not be text."""
    return uid.partition(_IN_PLACE_OF)[0] if isinstance(uid, str) else uid


class DynamicSamplingMixin:
    """Put before a SkyRL trainer class: what is kept, sampled again or replaced are groups of whole trajectories.

    * The rewards compared are those of trajectories, on which their last row decides, and equal ones have the
      deviation 0 exactly. SkyRL compares the rewards of rows, keeps a group if rounding makes its deviation another
      number, and cuts a batch of several rows a trajectory (``generator.step_wise_trajectories``) off in the middle.
    * A batch of which filtering keeps nothing is sampled again, where SkyRL's own ends in a failed assertion.
    * A group that takes another one's place has a uid of its own, ``GOOD/in place of/BAD``, in its trajectory ids
      too. SkyRL gives it that of the group it is a copy of, so that the batch holds too few prompts and the step ends
      in a failed assertion.
    """

    def handle_dynamic_sampling(self, generator_output: Any, uids: list[str]) -> Any:
        """SkyRL's dynamic sampling; see the class. Its random choice depends on NumPy's state alone.

        Returns:
            Output and uids, a row each, and whether to go on sampling; both are those given while it is to go on.

        Raises:
            RuntimeError: ``max_sample_batches`` batches were not enough.
        """
        from skyrl.train.trainer import RayPPOTrainer

        if super().handle_dynamic_sampling.__func__ is not RayPPOTrainer.handle_dynamic_sampling:
            return super().handle_dynamic_sampling(generator_output, uids)
        last = generator_output["is_last_step"] if self.cfg.generator.step_wise_trajectories else [True] * len(uids)
        trajectories, names = _trajectories(generator_output, uids, last)
        rewards = shifted_rewards([trajectory["rewards"][-1] for trajectory in trajectories], names)
        if self._keeps_nothing(rewards):
            self._count_sampled_batch()
            return generator_output, uids, True
        given = _one_row_each(trajectories, rewards)
        if self.cfg.trainer.algorithm.dynamic_sampling.type != "replace":
            chosen, names, again = super().handle_dynamic_sampling(given, names)
            trajectories = chosen[_TRAJECTORIES]
        else:
            # SkyRL draws from a set of uids, which has the same order in every process if they are small numbers.
            known = list(dict.fromkeys(names))
            places = [known.index(name) for name in names]
            chosen, groups, again = super().handle_dynamic_sampling(given, places)
            names = [
                known[group] if group == place else f"{known[group]}{_IN_PLACE_OF}{known[place]}"
                for group, place in zip(groups, places, strict=True)
            ]
            trajectories = [
                trajectory if group == place else _renamed(trajectory, name)
                for trajectory, name, group, place in zip(chosen[_TRAJECTORIES], names, groups, places, strict=True)
            ]
        if again:
            return generator_output, uids, True
        rows = [len(trajectory["response_ids"]) for trajectory in trajectories]
        return _joined(trajectories), [name for name, n in zip(names, rows, strict=True) for _ in range(n)], False

    def _keeps_nothing(self, rewards: Sequence[float]) -> bool:
        filtering = self.cfg.trainer.algorithm.dynamic_sampling.type == "filter"
        return filtering and self.cfg.generator.n_samples_per_prompt > 1 and not any(rewards)

    def _count_sampled_batch(self) -> None:
        if self.dynamic_sampling_state is None:
            self.dynamic_sampling_state = {"sample_batch_count": 0}
        self.dynamic_sampling_state["sample_batch_count"] += 1
        limit = self.cfg.trainer.algorithm.dynamic_sampling.max_sample_batches
        if 0 < limit <= self.dynamic_sampling_state["sample_batch_count"]:
            raise RuntimeError(
                f"trainer.algorithm.dynamic_sampling.max_sample_batches={limit} batches held too few prompts whose "
                "samples earn different rewards: choose other questions, or write a larger number"
            )


def _trajectories(output: Any, uids: Sequence[str], last: Sequence[bool]) -> tuple[list[_Trajectory], list[str]]:
    """A generator output cut behind each row that is its trajectory's last one, and the trajectories' uids."""
    ends = [row + 1 for row, is_last in enumerate(last) if is_last]
    starts = [0, *ends[:-1]]
    columns = {name: column for name, column in output.items() if name != "rollout_metrics"}
    trajectories = [
        {name: _per_column(column, lambda values, a=start, z=end: values[a:z]) for name, column in columns.items()}
        for start, end in zip(starts, ends, strict=True)
    ]
    return trajectories, [uids[start] for start in starts]


def _joined(trajectories: Sequence[_Trajectory]) -> dict[str, Any]:
    """A generator output of these trajectories."""
    output: dict[str, Any] = {}
    for name, first in trajectories[0].items():
        parts = [trajectory[name] for trajectory in trajectories]
        if isinstance(first, dict):
            output[name] = {key: [value for part in parts for value in part[key]] for key in first}
        else:
            output[name] = None if first is None else [value for part in parts for value in part]
    return output


def _per_column(column: Any, change: Any) -> Any:
    if isinstance(column, dict):
        return {name: change(values) for name, values in column.items()}
    return None if column is None else change(column)


def _one_row_each(trajectories: list[_Trajectory], rewards: list[float]) -> dict[str, Any]:
    """A generator output that SkyRL can choose from: a made-up token and the reward of each trajectory, and itself."""
    token = [[0] for _ in trajectories]
    return {
        "prompt_token_ids": token,
        "response_ids": token,
        "rewards": rewards,
        "loss_masks": [[1] for _ in trajectories],
        "stop_reasons": None,
        "rollout_logprobs": None,
        _TRAJECTORIES: trajectories,
    }


def _renamed(trajectory: _Trajectory, uid: str) -> _Trajectory:
    ids = trajectory.get("trajectory_ids")
    if ids is None:
        return trajectory
    return {**trajectory, "trajectory_ids": [dataclasses.replace(row_id, instance_id=uid) for row_id in ids]}
