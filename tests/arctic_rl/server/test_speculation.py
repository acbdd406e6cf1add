"""Which speculative decoding is refused, and what a vLLM engine that drafts samples."""

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.server.sampling_spec import engine_arguments
from integrations.arctic_rl.server.speculation import speculation_problems
from integrations.arctic_rl.server.weights import declare, write_weights
from tests.arctic_rl.server.speculation_engine import drafted_rollouts
from tests.arctic_rl.server.test_sampling_worker import (
    VOCABULARY,
    assert_sampled_from,
    random_prompts,
    reference_greedy,
    reference_logprobs,
    save_model,
    spec,
)

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize("config", [DRAFTS, {**DRAFTS, "rejection_sample_method": "standard"}])
def test_drafts_by_n_grams_reach_an_engine_on_gpus(config):
    built = engine_arguments(spec(device="cuda", speculative_config=config), [])
    assert built["speculative_config"] == config and built["speculative_config"] is not config
    assert "speculative_config" not in engine_arguments(spec(device="cuda"), [])


REFUSED = {
    "no method": ({"num_speculative_tokens": 4}, "", "it names no method; write method: ngram too"),
    "no length": ({"method": "ngram"}, "", "the length of a draft is missing; write num_speculative_tokens too"),
    "a draft model": (
        {**DRAFTS, "method": "draft_model", "model": "some/model"},
        ".method=draft_model",
        "weight sync",
    ),
    "heads": ({"method": "mtp", "num_speculative_tokens": 1}, ".method=mtp", "no weight sync reaches"),
    "a list": ({**DRAFTS, "method": ["ngram"]}, ".method=['ngram']", "write ngram"),
    "suffixes": ({**DRAFTS, "method": "suffix"}, ".method=suffix", "arctic-inference"),
    "on the GPU": ({**DRAFTS, "method": "ngram_gpu"}, ".method=ngram_gpu", "write ngram"),
    "a typo": ({**DRAFTS, "prompt_lookup_mx": 4}, ".prompt_lookup_mx=4", "did you mean 'prompt_lookup_max'?"),
    "a detail of others": (
        {**DRAFTS, "draft_tensor_parallel_size": 1},
        ".draft_tensor_parallel_size=1",
        "leave it out",
    ),
    "drafts unseen": (
        {**DRAFTS, "rejection_sample_method": "synthetic"},
        ".rejection_sample_method",
        "no longer its own",
    ),
    "blocks": ({**DRAFTS, "rejection_sample_method": "block"}, ".rejection_sample_method=block", "leave it out"),
    "a text": ({**DRAFTS, "num_speculative_tokens": "4"}, ".num_speculative_tokens=4", "at least 1"),
    "true": ({**DRAFTS, "prompt_lookup_min": True}, ".prompt_lookup_min=True", "at least 1"),
    "none": ({**DRAFTS, "num_speculative_tokens": 0}, ".num_speculative_tokens=0", "at least 1"),
    "too long": (
        {**DRAFTS, "num_speculative_tokens": 129},
        ".num_speculative_tokens=129",
        "from 1 to 128",
    ),
    "crossed": ({**DRAFTS, "prompt_lookup_min": 4}, ".prompt_lookup_min=4", "it is above prompt_lookup_max=3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_engines_would_not_do_or_not_rightly_is_refused(case):
    config, name, words = REFUSED[case]
    (problem,) = speculation_problems(config, "cuda")
    line = str(problem)
    assert line.startswith(f"generator.inference_engine.speculative_config{name}") and words in line
    with pytest.raises(UnsupportedError) as error:
        spec(device="cuda", speculative_config=config)
    assert str(error.value) == line


def test_every_problem_is_told():
    config = {"method": "ngram", "num_speculative_tokens": 0, "prompt_lookup_max": -1, "model": "some/model"}
    assert [problem.name.rpartition(".")[2] for problem in speculation_problems(config, "cuda")] == [
        "model",
        "num_speculative_tokens",
        "prompt_lookup_max",
    ]


def test_engines_on_cpus_refuse_drafts():
    with pytest.raises(UnsupportedError, match=r"speculative_config=\{'method': 'ngram'.* on CPUs, .*; write null"):
        spec(speculative_config=DRAFTS)


@pytest.mark.parametrize("name", ["speculative_config", "spec_method", "spec_model", "spec_tokens"])
def test_no_other_way_leads_around_the_check(name):
    with pytest.raises(UnsupportedError, match=f"engine_init_kwargs.{name}: .*inference_engine.speculative_config"):
        spec(device="cuda", engine_kwargs={name: None})


TEMPERATURES = (0.0, 1.0, 0.6)
CUT = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}


def repeating_prompts(count):
    """Prompts in which every n-gram has been seen before."""
    return [(prompt * 20)[:90] for prompt in random_prompts(count, seed=21, low=5, high=12)]


def sampled_from_the_top(model, prompt, response):
    """Log-probs of a response under ``CUT``, by float64 from transformers' logits."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    logits = logits / CUT["temperature"]
    logits = logits.where(logits >= logits.topk(CUT["top_k"], dim=-1).values[:, -1:], -torch.inf)
    largest, order = logits.sort(dim=-1, descending=True)
    probabilities = largest.softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < CUT["top_p"]
    logits = torch.full_like(logits, -torch.inf).scatter(-1, order, largest.where(kept, -torch.inf))
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def second_token(model, prompt):
    """Probabilities of the second token after a prompt, over all first ones."""
    first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    return first @ model(rows).logits[:, -1].double().softmax(-1)


@pytest.mark.slow
def test_log_probs_with_drafts_are_those_of_the_policy(tmp_path):
    """Greedy and sampled rollouts, cut distributions, other weights after a sync, and the frequencies of samples.

    Frequencies: chi-square of 2048 second tokens over those expected at least 5 times, 5 sigma above its mean at most.
    The first token is one of the prompt, so that the second is drafted.
    """
    model, other = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=1)
    weights = list(other.named_parameters())
    synced = str(write_weights(declare(weights, "float32"), weights, tmp_path, 1, "float32"))
    prompts = repeating_prompts(12)
    seeds = range(len(prompts))
    sampled = [
        [{"temperature": temperature, "max_tokens": 40} | ({"seed": i} if temperature else {}) for i in seeds]
        for temperature in TEMPERATURES
    ]
    cut = [{**CUT, "max_tokens": 40, "seed": i} for i in seeds]
    every_byte = torch.randperm(256, generator=torch.Generator().manual_seed(3)).tolist()
    twice = [{"temperature": 1.0, "max_tokens": 2, "seed": 1000 + i} for i in range(2048)]
    rounds = [(None, prompts, params) for params in (*sampled, cut, cut)]
    rounds += [(None, [every_byte] * len(twice), twice), (synced, prompts, sampled[1])]
    found = drafted_rollouts(spec(model_path=str(tmp_path / "model"), max_model_len=512), DRAFTS, rounds)

    assert found["method"] == "ngram" and max(found["lengths"]) == DRAFTS["num_speculative_tokens"]
    assert 100 < found["taken"] < sum(found["lengths"]) - 100, "drafts must be taken over, and refused"
    *plain, first_cut, again, second, after = found["rounds"]
    assert first_cut == again, "equal seeds give equal samples"
    temperatures = {"before": TEMPERATURES, "after": (1.0,)}
    for of, answers, key in ((model, plain, "before"), (other, [after], "after")):
        for temperature, answer in zip(temperatures[key], answers, strict=True):
            for prompt, (response, logprobs) in zip(prompts, answer, strict=True):
                expected = reference_logprobs(of, prompt, response, temperature or 1.0)
                assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
                if not temperature:
                    assert response == reference_greedy(of, prompt, len(response))
    for prompt, (response, logprobs) in zip(prompts, first_cut, strict=True):
        expected = sampled_from_the_top(model, prompt, response)
        assert (torch.tensor(logprobs).double() - expected).abs().max() < 1e-4
    expected = second_token(model, every_byte) * len(twice)
    counts = torch.bincount(torch.tensor([tokens[1] for tokens, _ in second]), minlength=VOCABULARY).double()
    assert_sampled_from(expected, counts)
