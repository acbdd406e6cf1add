"""An environment of several turns whose answers, length and rewards come from its row and the turn."""

import random
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

OBSERVATIONS = ["", "right", "é <b>", "<end>", "<start>user:", "</sql>", "\n\n"]


class TalkEnv(BaseTextEnv):
    """``seed`` chooses what it says; ``turns``, ``rewrites`` and ``unjudged_turn``, if there, say what it does."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        assert extras is not None
        self.draw = random.Random(extras["seed"])
        turns = extras.get("turns")
        self.last_turn = self.draw.randint(1, extras["max_turns"]) if turns is None else turns
        self.rewrites = extras.get("rewrites", False)
        self.unjudged_turn = extras.get("unjudged_turn")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.last_turn
        said = [self.draw.choice(OBSERVATIONS) for _ in range(self.draw.randint(0, 2))]
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text} for text in said],
            reward=self.draw.choice([0.0, 0.5, 1.0]),
            done=done,
            metadata={"judged": self.turns != self.unjudged_turn},
            postprocessed_action=action + "!" if self.rewrites else None,
        )

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}
