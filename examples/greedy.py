"""Greedy execution accuracy of a model: ``python -m examples.greedy --model_dir M --data D/validation.parquet``."""

import argparse
import sys
from pathlib import Path

import pyarrow.parquet
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs.bird.reward import compute_score


def greedy_responses(
    model_dir: Path, prompts: list[list[dict[str, str]]], *, max_new_tokens: int = 96, batch_size: int = 64
) -> list[str]:
    """The most likely response of transformers' own model to each chat prompt, in float32 on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    responses = []
    for start in tqdm(range(0, len(prompts), batch_size), desc="greedy answers"):
        batch = tokenizer.apply_chat_template(
            prompts[start : start + batch_size],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
        responses += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return responses


def greedy_accuracy(model_dir: Path, parquet: Path, *, limit: int | None = None, max_new_tokens: int = 96) -> float:
    """Share of the rows of ``parquet`` (its first ``limit``; None = all) whose greedy response scores 1.0."""
    rows = pyarrow.parquet.read_table(parquet).to_pylist()[:limit]
    responses = greedy_responses(model_dir, [row["prompt"] for row in rows], max_new_tokens=max_new_tokens)
    scores = [
        compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])["score"]
        for row, response in zip(rows, responses, strict=True)
    ]
    return sum(score == 1.0 for score in scores) / len(scores)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_dir", type=Path, required=True, help="model folder that make_model wrote")
    parser.add_argument("--data", type=Path, required=True, help="verl-format parquet")
    parser.add_argument("--limit", type=int, default=None, help="use the first so many rows (default: all)")
    arguments = parser.parse_args(argv)
    print(f"{greedy_accuracy(arguments.model_dir, arguments.data, limit=arguments.limit):.3f}")


if __name__ == "__main__":
    main()
