"""Is a prompt computed once for all its rollouts? ``python -m benchmarks.prefix_cache``.

Two real engines on CPUs, 24 prompts of 200 to 700 tokens and 8 rollouts of each, sent where ``EngineChoice`` sends
them, all at once. Tokens of prompts that the engines computed (vLLM's own count of each request) are put over the
ideal, every prompt once. vLLM caches whole blocks, here of 32 tokens, and always computes a prompt's last token: each
further rollout computes what its prompt has behind the last whole block. The bound is the ideal with that, to the
token. Requests dealt to the engines in turn are reported beside it. About two minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.engines import EngineProcess, engine_spec, engines, tokenizer_for
from benchmarks.packing import small_model
from benchmarks.report import at_least, print_line
from integrations.arctic_rl.backends.engine_choice import EngineChoice
from integrations.arctic_rl.sampling_params import to_vllm_kwargs

PROMPTS, LENGTHS, ROLLOUTS, NEW_TOKENS = 24, (200, 700), 8, 16
BLOCK = 32
VOCABULARY = 1280


def draw_prompts(count: int, lengths: tuple[int, int], seed: int) -> list[list[int]]:
    """Prompts without a common beginning."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(*lengths))] for _ in range(count)]


def recomputed(length: int, block: int) -> int:
    """Tokens of a prompt that an engine computes although all of it was computed before."""
    return length - (length - 1) // block * block


def limit(prompts: list[list[int]], rollouts: int, block: int) -> float:
    """The least that an engine can compute with whole blocks cached, over every prompt once."""
    ideal = sum(map(len, prompts))
    return (ideal + (rollouts - 1) * sum(recomputed(len(prompt), block) for prompt in prompts)) / ideal


def measure(
    name: str,
    workers: dict[str, EngineProcess],
    prompts: list[list[int]],
    place: Callable[[int, list[int]], str],
    bound: float | None,
) -> bool:
    """Run all rollouts, each on the engine that ``place`` gives for its number and prompt, and print the ratio."""
    params = to_vllm_kwargs({"temperature": 1.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": None})
    requests: dict[str, list[dict]] = {engine: [] for engine in workers}
    for number, prompt in enumerate(prompt for prompt in prompts for _ in range(ROLLOUTS)):
        request = {"prompt_token_ids": prompt, "params": params, "request_id": f"{name}-{number}"}
        requests[place(number, prompt)].append(request)
    for engine, worker in workers.items():
        worker.send("generate_many", requests[engine])
    for worker in workers.values():
        worker.receive()
    prefills = {engine: worker.call("take_prefills") for engine, worker in workers.items()}
    computed = {engine: sum(length - cached for length, cached in each) for engine, each in prefills.items()}
    total, ideal = sum(computed.values()), sum(map(len, prompts))
    work = [computed[engine] + NEW_TOKENS * len(prefills[engine]) for engine in workers]
    more = {
        "prompt_tokens": ideal * ROLLOUTS,
        "computed": total,
        "ideal": ideal,
        "requests": [len(each) for each in prefills.values()],
        "most_over_mean_work": round(max(work) * len(work) / sum(work), 3),
    }
    for worker in workers.values():
        worker.call("reset_prefix_cache")
    return print_line(f"prefix_cache/{name}", total / ideal, bound, "none" if bound is None else "max", **more)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=at_least(1), default=2, help="sampling engines")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    prompts = draw_prompts(PROMPTS, LENGTHS, 0)
    with tempfile.TemporaryDirectory() as folder:
        model_path = Path(folder)
        small_model(128, 2, VOCABULARY, 2048).save_pretrained(model_path)
        tokenizer_for(model_path, VOCABULARY)
        names = [f"sampling-{number}" for number in range(given.engines)]
        specs = [
            engine_spec(model_path, engine_kwargs={"block_size": BLOCK}, log_file=f"{folder}/{n}.log") for n in names
        ]
        with engines(specs) as started:
            workers = dict(zip(names, started, strict=True))
            choice = EngineChoice(names)
            bound = round(limit(prompts, ROLLOUTS, BLOCK) + 5e-5, 4)
            ok = measure("chosen", workers, prompts, lambda _, p: choice.assign(p, NEW_TOKENS).engine, bound)
            measure("in_turn", workers, prompts, lambda number, _: names[number % len(names)], None)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
