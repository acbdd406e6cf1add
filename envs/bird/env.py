"""The bird environment: one question, one response, scored by running its query."""

import os
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from .config import BirdEnvConfig
from .extract import parse_response
from .outcome import FULL_REWARD, Outcome
from .parts import Part
from .score import Score, failed_score, score_parts, score_record
from .task import read_task
from .workers import WorkersFailedError, run_in_workers

type FailureCause = Literal["timed_out", "out_of_memory", "scorer_failed"]


class BirdEnv(BaseTextEnv):
    """Single-turn text-to-SQL. Holds plain data only, so that it can move between processes at any time.

    Reads from `extras`: `reward_model` or `reward_spec` (mappings with `ground_truth`), `extra_info.db_path`, and
    `extra_info.alternative_answers` if it is there. `env_config` is whatever `BirdEnvConfig.parse` accepts.

    For a generator that runs `step` in a process it may kill: `max_step_s` is the time limit to set, `step_failed`
    stands in for a step whose process was killed or lost, and `metadata["judged"]` of a step is False if its reward
    says nothing about the response.
    """

    config_class: ClassVar[type[BirdEnvConfig]] = BirdEnvConfig

    def __init__(
        self,
        env_config: Any = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Raises:
            ValueError: a field of `extras` is missing or wrong, or a setting is unknown or out of range.
            FileNotFoundError: the database does not exist.
        """
        super().__init__()
        if extras is None:
            raise ValueError("the bird environment needs the dataset row as extras, with reward_model and extra_info")
        self.config = self.config_class.parse(env_config)
        task = read_task(extras)
        self.golds = task.golds
        self.db_path = os.path.abspath(self.config.resolve(task.db_path))
        if not os.path.isfile(self.db_path):
            raise FileNotFoundError(f"extra_info.db_path: database file {self.db_path!r} does not exist")
        self.score: Score | None = None

    @property
    def max_step_s(self) -> float:
        """Seconds that `step` takes at most if every query stops at its time limit; past it, the process is stuck."""
        return (len(self.golds) + 1) * self.config.timeout_s

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Scores the response `action`; the episode is over. Queries run in processes of this one's own: see
        `run_in_workers`."""
        try:
            return run_in_workers(self.step_parts(action), self.config.sqlite_heap_mb)
        except WorkersFailedError as failure:
            return self.step_failed(action, "scorer_failed", str(failure))

    def step_parts(self, action: str) -> Generator[list[Part], list[Any], BaseTextEnvStepOutput]:
        """`step`, with its work given out in parts: each a query at most, and equal ones need to run only once."""
        score = yield from score_parts(action, self.golds, self.db_path, self.config)
        return self._finish(score)

    step.in_parts = "step_parts"

    def step_failed(self, action: str, cause: FailureCause, error: str) -> BaseTextEnvStepOutput:
        """Stands in for `step` where the process that ran it was killed, for the `cause` given."""
        return self._finish(failed_score(Outcome(cause), error, parse_response(action)))

    def get_metrics(self) -> dict[str, float]:
        """Returns 0 or 1 for each outcome and each property of the response; empty before the step.

        The accuracy is left out where the response could not be judged, so that it is a mean over judged ones.
        """
        score = self.score
        if score is None:
            return {}
        metrics = {f"outcome/{outcome.value}": float(score.outcome is outcome) for outcome in Outcome}
        metrics["format_correct"] = float(score.format_correct)
        metrics["execution_success"] = float(score.execution_success)
        if score.judged:
            metrics[f"execution_accuracy_{self.config.comparison}"] = float(score.reward == FULL_REWARD)
        metrics["gold_empty"] = float(score.gold_empty)
        metrics["gold_timed_out"] = float(score.gold_outcome is Outcome.TIMED_OUT)
        return metrics

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
        """Returns the mean of each metric over the episodes that have it."""
        values: dict[str, list[float]] = {}
        for episode in metrics:
            for key, value in episode.items():
                values.setdefault(key, []).append(float(value))
        return {key: sum(values[key]) / len(values[key]) for key in sorted(values)}

    def _finish(self, score: Score) -> BaseTextEnvStepOutput:
        self.score = score
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[],
            reward=score.reward,
            done=True,
            metadata=score_record(score, self.config),
        )
