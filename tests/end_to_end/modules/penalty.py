"""An entry module with a config field, a check and a trainer of its own: long answers lose a part of their reward.

The experiment adds a callback and a logger of samples from a module beside this one.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import ray
from observers import Events, ShoutingLogger
from skyrl.train.config import AlgorithmConfig, make_config
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray


@dataclass
class PenaltyAlgorithmConfig(AlgorithmConfig):
    penalty: float = 0.0
    free_tokens: int = 4


PenaltyConfig = make_config(algorithm_cls=PenaltyAlgorithmConfig)


class PenaltyTrainer(RayPPOTrainer):
    def postprocess_generator_output(self, generator_output, uids):
        """Take the penalty from the last token's reward; rewards are one list a response, a number a token."""
        algorithm = self.cfg.trainer.algorithm
        rewards = generator_output["rewards"]
        lost = [algorithm.penalty * max(len(row) - algorithm.free_tokens, 0) for row in rewards]
        self.all_metrics["penalty/rewards_before"] = sum(map(sum, rewards)) / len(rewards)
        self.all_metrics["penalty/lost"] = sum(lost) / len(lost)
        generator_output["rewards"] = [[*row[:-1], row[-1] - part] for row, part in zip(rewards, lost, strict=True)]
        return super().postprocess_generator_output(generator_output, uids)


class PenaltyExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        trainer = PenaltyTrainer(*args, **kwargs)
        trainer.add_callback(Events(Path(self.cfg.trainer.log_path) / "events.jsonl"))
        return trainer

    def get_trajectory_logger(self):
        return ShoutingLogger()


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg):
    PenaltyExp(cfg).run()


def main():
    cfg = PenaltyConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    if cfg.trainer.algorithm.free_tokens > cfg.generator.sampling_params.max_generate_length:
        raise ValueError("free_tokens is longer than any answer")
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))
    print("main ends after the run")


if __name__ == "__main__":
    main()
