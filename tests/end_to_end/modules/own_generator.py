"""An entry module with a generator of its own: it asks the inference client itself and knows no environment."""

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import get_rollout_metrics
from skyrl.train.utils import initialize_ray, validate_cfg


class EvenGenerator(GeneratorInterface):
    """Rewards the share of even token ids."""

    def __init__(self, client, tokenizer):
        self.client = client
        self.tokenizer = tokenizer

    async def generate(self, input_batch):
        prompts = [
            self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
            for prompt in input_batch["prompts"]
        ]
        output = await self.client.generate(
            {
                "prompt_token_ids": prompts,
                "sampling_params": input_batch["sampling_params"],
                "session_ids": [trajectory.to_string() for trajectory in input_batch["trajectory_ids"]],
            }
        )
        responses = output["response_ids"]
        rewards = [sum(token % 2 == 0 for token in response) / len(response) for response in responses]
        return {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "rewards": rewards,
            "loss_masks": [[1] * len(response) for response in responses],
            "stop_reasons": output["stop_reasons"],
            "rollout_metrics": get_rollout_metrics(responses, rewards),
            "rollout_logprobs": output["response_logprobs"],
        }


class EvenExp(BasePPOExp):
    def __init__(self, cfg, label):
        self.label = label
        super().__init__(cfg)

    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return EvenGenerator(inference_engine_client, tokenizer)

    def _setup_trainer(self):
        trainer = super()._setup_trainer()
        trainer.all_metrics["label"] = float(len(self.label))
        return trainer


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg):
    EvenExp(cfg, label="even").run()


def main():
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
