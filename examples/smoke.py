"""What a recipe's CPU-sized twin replaces: ``python -m examples.smoke`` prints overrides, a line each.

``python -m examples.smoke --cache_dir C --env_class E`` makes the quickstart's data and starting model instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.quickstart import make_data, make_inputs

STEPS = 3
ROLES = ("policy", "ref", "critic")

SETTINGS = {
    **{f"trainer.placement.{role}_num_nodes": "1" for role in ROLES},
    **{f"trainer.placement.{role}_num_gpus_per_node": "1" for role in ROLES},
    "generator.inference_engine.num_engines": "1",
    "generator.inference_engine.tensor_parallel_size": "1",
    "generator.inference_engine.model_dtype": "float32",
    "trainer.bf16": "false",
    "trainer.gradient_checkpointing": "false",
    "trainer.epochs": "1",
    "trainer.max_training_steps": str(STEPS),
    "trainer.train_batch_size": "8",
    "trainer.policy_mini_batch_size": "8",
    "trainer.critic_mini_batch_size": "8",
    "trainer.micro_forward_batch_size_per_gpu": "16",
    "trainer.micro_train_batch_size_per_gpu": "16",
    "trainer.fully_async.num_parallel_generation_workers": "16",
    "trainer.max_prompt_length": "2048",
    "trainer.eval_batch_size": "256",
    "trainer.eval_before_train": "false",
    "trainer.eval_interval": str(STEPS),
    "trainer.ckpt_interval": "-1",
    "trainer.hf_save_interval": "-1",
    "trainer.resume_mode": "null",
    "trainer.logger": "console",
    "trainer.enable_ray_gpu_monitor": "false",
    "generator.inference_engine.enable_ray_prometheus_stats": "false",
    "generator.n_samples_per_prompt": "4",
    "generator.max_input_length": "2048",
    "generator.sampling_params.max_generate_length": "64",
    "generator.eval_sampling_params.max_generate_length": "64",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache_dir", type=Path, help="where data and starting model are kept")
    parser.add_argument("--env_class", default="bird", help="the environment that the data's rows name")
    arguments = parser.parse_args(argv)
    if arguments.cache_dir is None:
        print("\n".join(f"{setting}={value}" for setting, value in SETTINGS.items()))
        return
    cache_dir = arguments.cache_dir.resolve()
    make_inputs(cache_dir, seed=0)
    if arguments.env_class != "bird":
        make_data(cache_dir, seed=0, env_class=arguments.env_class)


if __name__ == "__main__":
    main()
