"""skyrl-gym environments for the generator's tests; spawned workers import this module by name."""

import os
import signal
import time
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class GuessEnv(BaseTextEnv):
    """Several turns; rewards text that holds the target and shows how many turns are left."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        assert extras is not None
        self.target = extras["target"]
        self.max_turns = extras["max_turns"]
        self.history: list[dict[str, str]] = []
        self.closed = False
        self.process_ids: list[int] = []

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.history = [*prompt, {"role": "user", "content": f"find {self.target}"}]
        return self.history, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.process_ids.append(os.getpid())
        hit = self.target in action
        done = hit or self.turns >= self.max_turns
        reward = 1.0 if hit else 0.1 * self.turns
        observations = [] if done else [{"role": "user", "content": f"{self.max_turns - self.turns} left"}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})

    def close(self) -> None:
        self.closed = True

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns, "in_parent": float(os.getpid() in self.process_ids)}


class TroubleStepEnv(GuessEnv):
    """Does in ``step`` what its extras say."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        assert extras is not None
        self.trouble = extras["trouble"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        if self.trouble == "init":
            raise ValueError("no prompt")
        return super().init(prompt)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        match self.trouble:
            case "hang":
                while True:
                    pass
            case "memory":
                bytearray(1 << 30)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise LookupError("no such table: singer")
            case "slow":
                time.sleep(0.3)
            case "gold_failed" | "scorer_failed":
                metadata = {"judged": False, "outcome": self.trouble, "error": "no such table: concert"}
                return BaseTextEnvStepOutput(observations=[], reward=0.7, done=True, metadata=metadata)
        return super().step(action)

    def close(self) -> None:
        if self.trouble == "close":
            raise OSError("cannot close")
        super().close()


class StandInEnv(TroubleStepEnv):
    """Limits its own steps and stands in for those that fail."""

    max_step_s = 0.5
    failed: tuple[str, str, str] | None = None

    def step_failed(self, action: str, cause: str, error: str) -> BaseTextEnvStepOutput:
        self.failed = (action, cause, error)
        metadata = {"judged": cause != "scorer_failed", "outcome": cause, "error": error}
        return BaseTextEnvStepOutput(observations=[], reward=-0.5, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        causes = ("timed_out", "out_of_memory", "scorer_failed")
        return {cause: float(self.failed is not None and self.failed[1] == cause) for cause in causes}


class SilentEnv(BaseTextEnv):
    """Inherits ``init`` and ``close``."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action)), done=True, metadata={})
