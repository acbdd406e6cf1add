"""The bird_multi_turn environment: look into the database with read-only queries, then answer."""

import sqlite3
from collections.abc import Generator, Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput

from .database import PendingChangesError
from .env import BirdEnv, FailureCause
from .execute import DatabaseChangedError, ScorerError
from .handles import FileIdentity
from .multi_turn_config import BirdMultiTurnConfig
from .outcome import Outcome
from .parts import Part
from .score import failed_score, score_parts
from .tool import CALL_END, CALL_START, Look, LookUp, ReadTurn, find_call

TOOL_INSTRUCTIONS = """\
You have {turns} turns. In each turn but the last you may look into the database before you answer: after your \
reasoning, write one read-only SQLite query inside <sql></sql> and nothing after it. You are then shown at most \
{rows} rows of its result, or its error, inside <result></result>. A turn that gives a query without <sql></sql> is \
your answer.\
"""
"""What `init` adds to the system message."""

NO_CALL = f"Error: the turn holds neither a query inside {CALL_START}{CALL_END} nor an answer"
NO_TIME = "Error: the time for looking into the database is used up; answer now"

type Turn = Generator[list[Part], list[Any], BaseTextEnvStepOutput]


class BirdMultiTurnEnv(BirdEnv):
    """`BirdEnv` with turns before the answer; `extras["max_turns"]`, SkyRL's `generator.max_turns`, of them in all.

    A turn that calls the tool (see `tool.py`) earns 0 and is answered with the query's result, or with its error: a
    query that is refused, fails, or runs past a limit costs its own turn only. A turn that holds neither a call nor a
    query is answered with an error too. The first turn that gives an answer ends the episode and is scored as `bird`
    scores it, and so is the last turn, in which a call is no answer (outcome no_sql).
    """

    config_class = BirdMultiTurnConfig

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            ValueError: as `BirdEnv`, and where `extras` has no number of turns, or less than 2.
            FileNotFoundError: the database does not exist.
        """
        super().__init__(env_config, extras)
        turns = extras.get("max_turns") if extras is not None else None
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 2:
            raise ValueError(
                f"max_turns={turns!r} in extras must be a whole number of at least 2, or there is no turn before the "
                "answer: write generator.max_turns=2 or more, or choose the environment bird"
            )
        self.max_turns = turns
        self.tool_calls = 0
        self.tool_errors = 0
        self.tool_seconds = 0.0
        self.invalid_turns = 0

    @property
    def max_step_s(self) -> float:
        """Seconds that `step` takes at most if every query stops at its time limit; past it, the process is stuck."""
        return super().max_step_s + self.config.tool_timeout_s

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Returns the prompt with `TOOL_INSTRUCTIONS` at the end of its system message, which is added if missing."""
        if not self.config.explain_tool:
            return prompt, {}
        text = TOOL_INSTRUCTIONS.format(turns=self.max_turns, rows=self.config.tool_max_rows)
        first = prompt[0] if len(prompt) > 0 else {}
        if first.get("role") != "system":
            return [{"role": "system", "content": text}, *prompt], {}
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *prompt[1:]], {}

    def init_parts(self, prompt: list[dict[str, str]]) -> Generator[list[Part], list[Any], Any]:
        """`init`, which needs no worker."""
        yield from ()
        return self.init(prompt)

    init.in_parts = "init_parts"

    def step_parts(self, action: str) -> Turn:
        """One turn, with its work given out in parts: each a query at most, and equal ones need to run only once."""
        [(call, reading)] = yield [ReadTurn(action, self.db_path, self.config.timeout_s)]
        if reading.failure is Outcome.SCORER_FAILED:
            return self._finish(failed_score(reading.failure, reading.error, reading.answer))
        is_last = self.turns + 1 >= self.max_turns
        if is_last or (call is None and reading.answer.sql is not None):
            return self._finish((yield from score_parts(reading.answer, self.golds, self.db_path, self.config)))
        if call is None:
            self.invalid_turns += 1
            return self._go_on(NO_CALL, Outcome.NO_SQL)
        if self.tool_seconds >= self.config.tool_time_s:
            return self._looked(Look(Outcome.TIMED_OUT, NO_TIME, 0.0))
        try:
            look = yield from self._look_up(call, reading.identity)
        except (ScorerError, PendingChangesError, OSError, sqlite3.OperationalError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            return self._finish(failed_score(Outcome.SCORER_FAILED, error, reading.answer))
        return self._looked(look)

    def _look_up(self, sql: str, identity: FileIdentity) -> Generator[list[Part], list[Any], Look]:
        config = self.config

        def part(seen: FileIdentity) -> LookUp:
            return LookUp(
                self.db_path,
                seen,
                sql,
                config.tool_limits(),
                max_characters=config.tool_max_characters,
                max_cell_characters=config.tool_max_cell_characters,
            )

        try:
            [look] = yield [part(identity)]
        except DatabaseChangedError:
            # look into the new file
            [(_, reading)] = yield [ReadTurn("", self.db_path, config.timeout_s)]
            if reading.identity is None:
                raise
            [look] = yield [part(reading.identity)]
        return look

    def step_failed(self, action: str, cause: FailureCause, error: str) -> BaseTextEnvStepOutput:
        """Stands in for `step` where the process that ran it was killed, for the `cause` given."""
        outcome = Outcome(cause)
        if outcome is Outcome.SCORER_FAILED or self.turns + 1 >= self.max_turns or find_call(action) is None:
            return super().step_failed(action, cause, error)
        return self._looked(Look(outcome, f"Error: {outcome.value}", self.max_step_s))

    def get_metrics(self) -> dict[str, float]:
        """Returns how the episode went, and from its end on `BirdEnv`'s metrics of the answer; empty before a turn.

        turns, tool_calls, tool_errors (calls that gave no result), tool_seconds, invalid_turns (neither call nor
        answer), finished (0 = SkyRL ended it before an answer, which has accuracy 0 and no outcome).
        """
        if self.turns == 0:
            return {}
        metrics = {
            "turns": float(self.turns),
            "tool_calls": float(self.tool_calls),
            "tool_errors": float(self.tool_errors),
            "tool_seconds": self.tool_seconds,
            "invalid_turns": float(self.invalid_turns),
            "finished": float(self.score is not None),
        }
        if self.score is None:
            return {**metrics, f"execution_accuracy_{self.config.comparison}": 0.0}
        return {**metrics, **super().get_metrics()}

    def _looked(self, look: Look) -> BaseTextEnvStepOutput:
        self.tool_calls += 1
        self.tool_errors += look.failed
        self.tool_seconds += look.seconds
        return self._go_on(look.text, look.outcome)

    def _go_on(self, text: str, outcome: Outcome) -> BaseTextEnvStepOutput:
        self.turns += 1
        left = self.max_turns - self.turns
        turns = "This is your last turn: answer now." if left == 1 else f"{left} turns left."
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": f"<result>\n{text}\n</result>\n{turns}"}],
            reward=0.0,
            done=False,
            metadata={"tool_outcome": outcome.value},
        )
