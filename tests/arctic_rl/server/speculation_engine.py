"""A vLLM engine on CPUs that drafts by n-grams, in a process of its own.

vLLM 0.30.0 replaces the Triton kernels of its rejection sampler on CPUs under names that it no longer calls. They are
put in their places here, so that everything around them runs as it does on GPUs.
"""

import multiprocessing
import os
from typing import Any

from integrations.arctic_rl.server.sampling_spec import SamplingSpec, engine_arguments, engine_environment

Rounds = list[tuple[str | None, list[list[int]], list[dict[str, Any]]]]
"""For each: weights to load before, or None; prompts; sampling parameters of each."""


def drafted_rollouts(spec: SamplingSpec, drafts: dict[str, Any], rounds: Rounds) -> dict[str, Any]:
    """Token ids and log-probs of every request, the lengths of drafts, and how many of their tokens were taken over.

    Args:
        spec: an engine on CPUs.
        drafts: its ``speculative_config``.
        rounds: what is asked.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (spec, drafts, rounds))


def _run(spec: SamplingSpec, drafts: dict[str, Any], rounds: Rounds) -> dict[str, Any]:
    for name, value in engine_environment(spec).items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(spec, spec.engine_kwargs)
    del arguments["enable_log_requests"]  # of the asynchronous engine alone
    engine = LLM(**arguments, speculative_config=drafts)
    engine.collective_rpc("arctic_prepare")
    lengths, taken = _replace_kernels()
    found = []
    for weights, prompts, params in rounds:
        if weights is not None:
            engine.collective_rpc("arctic_load_weights", args=(weights,))
            assert engine.reset_prefix_cache()
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(logprobs=1, ignore_eos=True, **one) for one in params],
            use_tqdm=False,
        )
        found.append([_answer(output.outputs[0]) for output in outputs])
    built = engine.llm_engine.vllm_config.speculative_config
    return {"rounds": found, "lengths": lengths, "taken": sum(taken), "method": built.method}


def _answer(completion: Any) -> tuple[list[int], list[float]]:
    token_ids = list(completion.token_ids)
    return token_ids, [chosen[token].logprob for token, chosen in zip(token_ids, completion.logprobs, strict=True)]


def _replace_kernels() -> tuple[list[int], list[int]]:
    """Returns lists that get the length of each draft, and how many tokens of it were taken over."""
    import torch
    from vllm.utils import cpu_triton_utils as kernels
    from vllm.v1.sample import rejection_sampler as module

    def expand(output, input, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        replaced = torch.where(input == replace_from, torch.tensor(replace_to, dtype=input.dtype), input)
        output.copy_(replaced.repeat_interleave(counts.long()))

    module._rejection_greedy_sample.kernel = kernels.rejection_greedy_sample_kernel
    module._rejection_random_sample.kernel = kernels.rejection_random_sample_kernel
    module._sample_recovered_tokens.kernel = kernels.sample_recovered_tokens_kernel
    module._expand.kernel = kernels._FuncWrapper(expand)

    lengths: list[int] = []
    taken: list[int] = []
    sample = module.rejection_sample

    def counted(draft_token_ids, num_draft_tokens, *args, **kwargs):
        output = sample(draft_token_ids, num_draft_tokens, *args, **kwargs)
        lengths.extend(num_draft_tokens)
        taken.extend((((output != module.PLACEHOLDER_TOKEN_ID).sum(dim=1)) - 1).tolist())
        return output

    module.rejection_sample = counted
    return lengths, taken
