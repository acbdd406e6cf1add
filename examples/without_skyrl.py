"""A server driven by a script, without SkyRL: a supervised warm-up, then ten GRPO steps on a reward of one line.

python examples/without_skyrl.py MODEL_FOLDER [SERVER_URL]
"""

import asyncio
import statistics
import sys

from transformers import AutoTokenizer

from integrations.arctic_rl.client import create_arctic_rl_client, make_batch, make_meta
from integrations.arctic_rl.sampling_params import to_vllm_kwargs

QUESTIONS = ["List all names", "Count the rows", "Show the oldest", "Which are red?"]
ANSWER, LETTER, GROUP, WARM_UP_STEPS, GRPO_STEPS = " the rows are here", "e", 8, 6, 10
SUPERVISED = {"loss_fn": "regularized", "config": {"policy_loss": "cross_entropy"}}
GRPO = {"loss_fn": "grpo", "config": {"clip_ratio": 0.2, "loss_agg_mode": "token-mean"}}


async def main(model_path: str, server_url: str | None = None) -> list[float]:
    """The mean reward of each GRPO step."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    pad = tokenizer.pad_token_id
    config = {"model_path": model_path, "server_url": server_url, "lr": 3e-3, "max_model_len": 256}
    client = create_arctic_rl_client(config)
    await client.initialize(WARM_UP_STEPS + GRPO_STEPS)
    try:
        prompts = [tokenizer.encode(question, add_special_tokens=False) for question in QUESTIONS]
        answers = [tokenizer.encode(ANSWER, add_special_tokens=False)] * len(prompts)
        supervised = make_batch(prompts, answers, pad_token_id=pad)
        for step in range(WARM_UP_STEPS):
            result = await client.fwd_bwd(supervised, scalars(client, supervised), SUPERVISED)
            await client.step()
            print(f"supervised step {step}: loss {result['avg_loss']:.3f}")

        params = to_vllm_kwargs({"max_tokens": 12, "temperature": 1.0, "logprobs": 1})
        curve = []
        for step in range(GRPO_STEPS):
            await client.update_weights()
            asked = [prompt for prompt in prompts for _ in range(GROUP)]
            rollouts = await client.generate([{"prompt_token_ids": prompt, "params": params} for prompt in asked])
            responses = [rollout["token_ids"] for rollout in rollouts]
            texts = [tokenizer.decode(response) for response in responses]
            rewards = [text.count(LETTER) / max(len(text), 1) for text in texts]
            rows = make_batch(asked, responses, pad_token_id=pad)
            old = await client.log_probs("policy", rows, scalars(client, rows))
            values = {
                "advantages": [[a] * len(r) for a, r in zip(advantages(rewards), responses, strict=True)],
                "old_log_probs": [row[: len(r)].tolist() for row, r in zip(old, responses, strict=True)],
            }
            rows = make_batch(asked, responses, pad_token_id=pad, **values)
            await client.fwd_bwd(rows, scalars(client, rows), GRPO)
            norm = (await client.step())["grad_norm"]
            curve.append(statistics.mean(rewards))
            print(f"GRPO step {step}: reward {curve[-1]:.3f}, gradient norm {norm:.3f}")
        return curve
    finally:
        await client.destroy()


def scalars(client, rows) -> dict:
    return make_meta(rows, dp_size=client.dp_size("policy"), rollout_n=GROUP)


def advantages(rewards: list[float]) -> list[float]:
    """Each reward over the mean of its group, in its standard deviations."""
    result = []
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        spread = statistics.pstdev(group) or 1.0
        result += [(reward - statistics.mean(group)) / spread for reward in group]
    return result


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
