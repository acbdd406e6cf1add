"""An entry module that registers environment and policy loss in the Ray task, and has an argument of its own."""

import argparse
import sys

import ray
from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints import main_base
from skyrl.train.utils.utils import initialize_ray
from skyrl_gym.envs import register


def vowel_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """Plain policy gradient: the log-probs weighted by the advantages."""
    loss = -(advantages * log_probs * loss_mask).sum()
    return loss, {"tokens_max": float(loss_mask.sum())}


@ray.remote(num_cpus=1)
def train(cfg, letters):
    register(id="counted", entry_point="counted_env:CountedEnv", kwargs={"letters": letters})
    register_policy_loss("vowels")(vowel_loss)
    experiment = main_base.BasePPOExp(cfg)
    experiment.run()
    return letters


@ray.remote
def prepare():
    raise AssertionError("never called")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--letters", required=True)
    options, overrides = parser.parse_known_args(sys.argv[1:])
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
    cfg.environment.env_class = "counted"
    main_base.validate_cfg(cfg)
    initialize_ray(cfg)
    print("the task returned", ray.get(train.options(num_cpus=0.5).remote(cfg, letters=options.letters)))


if __name__ == "__main__":
    main()
