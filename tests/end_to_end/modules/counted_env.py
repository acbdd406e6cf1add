"""An environment that counts letters; its module imports nothing of the training stack."""

import os

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class CountedEnv(BaseTextEnv):
    def __init__(self, letters, env_config=None, extras=None):
        super().__init__()
        self.letters = letters

    def step(self, action):
        self.reward = sum(letter in self.letters for letter in action) / max(len(action), 1)
        self.process_id = os.getpid()
        return BaseTextEnvStepOutput(observations=[], reward=self.reward, done=True, metadata={})

    def get_metrics(self):
        return {"counted": self.reward, "process_id": float(self.process_id)}
