"""The vLLM arguments against SkyRL's own translation and hand-written values; seeds against a plain restatement."""

import random

import pytest

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.sampling_params import NEUTRAL, expand_seed, to_vllm_kwargs

SKYRL_DEFAULTS = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 64,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}


def test_every_neutral_value_is_explicit():
    """A recipe that sets only temperature and length leaves nothing for an engine or a checkpoint to fill."""
    kwargs = to_vllm_kwargs({"temperature": 1.0, "max_generate_length": 64})
    assert kwargs == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "bad_words": [],
        "logit_bias": None,
        "allowed_token_ids": None,
        "ignore_eos": False,
        "min_tokens": 0,
        "max_tokens": 64,
        "logprobs": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": True,
        "watermarking": False,
        "detokenize": False,
    }


@pytest.mark.parametrize(("given", "sent"), [(0, 0), (1, 0), (2, 2), (64, 64)])
def test_the_end_token_may_come_first_unless_a_longer_response_is_asked_for(given, sent):
    assert to_vllm_kwargs({**SKYRL_DEFAULTS, "min_tokens": given})["min_tokens"] == sent


def test_both_of_skyrls_spellings_give_the_same():
    """The engine dict and the config's own dict of one recipe, with eval values that differ."""
    changes = {"temperature": 0.6, "top_k": 20, "stop": ["</sql>"], "seed": 7, "presence_penalty": 0.5}
    engine = {**SKYRL_DEFAULTS, **changes}
    config = {
        "max_generate_length": 64,
        "repetition_penalty": 1.0,
        "temperature": 0.6,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": 20,
        "logprobs": 1,
        "stop": ["</sql>"],
        "additional_kwargs": {"seed": 7, "presence_penalty": 0.5, "min_tokens": 1},
    }
    kwargs = to_vllm_kwargs(engine)
    assert kwargs == to_vllm_kwargs(config)
    assert (kwargs["temperature"], kwargs["top_k"], kwargs["seed"], kwargs["presence_penalty"]) == (0.6, 20, 7, 0.5)
    assert kwargs["stop"] == ["</sql>"] and kwargs["detokenize"] is True and kwargs["max_tokens"] == 64


@pytest.mark.parametrize(("given", "sent"), [(None, None), (0, 0), (1, 0)])
def test_logprobs_are_the_chosen_tokens(given, sent):
    assert to_vllm_kwargs({**SKYRL_DEFAULTS, "logprobs": given})["logprobs"] == sent


@pytest.mark.parametrize(("given", "sent"), [(-1, 0), (0, 0), (20, 20)])
def test_top_k(given, sent):
    assert to_vllm_kwargs({**SKYRL_DEFAULTS, "top_k": given})["top_k"] == sent


def test_containers_become_plain():
    from omegaconf import OmegaConf

    config = OmegaConf.create({"max_tokens": 8, "stop": ["a", "b"], "additional_kwargs": {"logit_bias": {"3": -1}}})
    kwargs = to_vllm_kwargs(config)
    assert type(kwargs["stop"]) is list and kwargs["stop"] == ["a", "b"]
    assert kwargs["logit_bias"] == {3: -1.0} and type(kwargs["logit_bias"]) is dict


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temprature": 0.5}, ("temprature", "temperature")),
        ({"additional_kwargs": {"top_pp": 0.5}}, ("top_pp", "top_p")),
        ({"n": 4}, ("n=4", "n_samples_per_prompt")),
        ({"logprobs": 2}, ("logprobs=2", "1, 0 or null")),
        ({"logprobs": True}, ("logprobs=True",)),
        ({"top_p": 0.0}, ("top_p=0.0",)),
        ({"top_p": "0.9"}, ("top_p='0.9'", "a number")),
        ({"top_k": 2.5}, ("top_k=2.5", "whole number")),
        ({"top_k": -2}, ("top_k=-2",)),
        ({"min_p": 1.5}, ("min_p=1.5",)),
        ({"temperature": -0.1}, ("temperature=-0.1",)),
        ({"temperature": 0.001}, ("temperature=0.001", "0.01")),
        ({"temperature": 2.5}, ("temperature=2.5",)),
        ({"temperature": None}, ("temperature=None",)),
        ({"repetition_penalty": True}, ("repetition_penalty=True",)),
        ({"min_tokens": 65}, ("min_tokens=65", "max_tokens=64")),
        ({"seed": -1}, ("seed=-1",)),
        ({"seed": "7"}, ("seed='7'",)),
        ({"stop": [""]}, ("stop=['']",)),
        ({"ignore_eos": 1}, ("ignore_eos=1", "true or false")),
        ({"prompt_logprobs": 1}, ("prompt_logprobs=1",)),
        ({"best_of": 2}, ("best_of=2", "n_samples_per_prompt")),
        ({"watermarking": True}, ("watermarking",)),
        ({"include_stop_str_in_output": False}, ("include_stop_str_in_output",)),
        ({"max_generate_length": 65}, ("max_generate_length=65", "64")),
        ({"temperature": float("nan")}, ("temperature=nan", "a number")),
        ({"repetition_penalty": 0}, ("repetition_penalty=0", "above 0")),
        ({"repetition_penalty": float("inf")}, ("repetition_penalty=inf", "a number")),
        ({"presence_penalty": 5}, ("presence_penalty=5", "between -2 and 2")),
        ({"frequency_penalty": -2.5}, ("frequency_penalty=-2.5", "between -2 and 2")),
        ({"stop_token_ids": ["abc"]}, ("stop_token_ids=['abc']", "a list of token ids")),
        ({"stop_token_ids": 7}, ("stop_token_ids=7", "a list of token ids")),
        ({"allowed_token_ids": []}, ("allowed_token_ids=[]", "a list of token ids")),
        ({"bad_words": 5}, ("bad_words=5", "a list of texts")),
        ({"bad_words": [""]}, ("bad_words=['']",)),
        ({"logit_bias": {"a": 1}}, ("logit_bias={'a': 1}", "token ids")),
        ({"logit_bias": {"3": 101}}, ("logit_bias={'3': 101}", "-100 to 100")),
        ({"logit_bias": 5}, ("logit_bias=5",)),
        ({"stop": [3]}, ("stop=[3]", "a list of texts")),
        ({"seed": 2**63}, ("seed=9223372036854775808",)),
        ({"logprobs": "1"}, ("logprobs='1'",)),
        ({"temperature": float("nan")}, ("temperature=nan", "a number")),
        ({"repetition_penalty": 0}, ("repetition_penalty=0", "above 0")),
        ({"repetition_penalty": float("inf")}, ("repetition_penalty=inf", "a number")),
        ({"presence_penalty": 5}, ("presence_penalty=5", "between -2 and 2")),
        ({"frequency_penalty": -2.5}, ("frequency_penalty=-2.5", "between -2 and 2")),
        ({"stop_token_ids": ["abc"]}, ("stop_token_ids=['abc']", "a list of token ids")),
        ({"stop_token_ids": 7}, ("stop_token_ids=7", "a list of token ids")),
        ({"allowed_token_ids": []}, ("allowed_token_ids=[]", "a list of token ids")),
        ({"bad_words": 5}, ("bad_words=5", "a list of texts")),
        ({"bad_words": [""]}, ("bad_words=['']",)),
        ({"logit_bias": {"a": 1}}, ("logit_bias={'a': 1}", "token ids")),
        ({"logit_bias": {"3": 101}}, ("logit_bias={'3': 101}", "-100 to 100")),
        ({"logit_bias": 5}, ("logit_bias=5",)),
        ({"stop": [3]}, ("stop=[3]", "a list of texts")),
        ({"seed": 2**63}, ("seed=9223372036854775808",)),
        ({"logprobs": "1"}, ("logprobs='1'",)),
    ],
)
def test_refused_by_name(change, words):
    with pytest.raises(UnsupportedError) as error:
        to_vllm_kwargs({**SKYRL_DEFAULTS, **change})
    for word in words:
        assert word in str(error.value)


def test_everything_that_is_refused_is_said_at_once():
    changes = {
        "top_p": 3,
        "min_p": -1,
        "top_k": -7,
        "stop_token_ids": "x",
        "additional_kwargs": {"presence_penalty": 9},
    }
    with pytest.raises(UnsupportedError) as error:
        to_vllm_kwargs({**SKYRL_DEFAULTS, **changes, "temprature": 1, "max_tokens": 0})
    named = {
        line.removeprefix("generator.sampling_params.").partition("=")[0] for line in str(error.value).split("\n")
    }
    assert named == {"top_p", "min_p", "top_k", "stop_token_ids", "presence_penalty", "temprature", "max_tokens"}


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": 2**63 - 1},
        {"stop_token_ids": [5], "allowed_token_ids": [1, 5], "bad_words": "word", "logit_bias": {5: -100, "6": 0.5}},
    ],
)
def test_what_vllm_takes_is_sent(change):
    kwargs = to_vllm_kwargs({**SKYRL_DEFAULTS, **change})
    as_sent = {"bad_words": ["word"], "logit_bias": {5: -100.0, 6: 0.5}}
    assert all(kwargs[name] == as_sent.get(name, value) for name, value in change.items())


def test_a_missing_length_is_refused():
    with pytest.raises(UnsupportedError, match="max_generate_length is missing"):
        to_vllm_kwargs({"temperature": 1.0})


def test_results_share_nothing():
    to_vllm_kwargs(SKYRL_DEFAULTS)["stop_token_ids"].append(5)
    assert to_vllm_kwargs(SKYRL_DEFAULTS)["stop_token_ids"] == [] == NEUTRAL["stop_token_ids"]


def test_seeds_are_stable_and_tell_everything_apart():
    # printf "%s" '[1, 2, "p", 3, 4]' | b2sum -l 64
    assert expand_seed(seed=1, step=2, prompt_key="p", sample=3, turn=4) == 0xAAEB7333E4F93A9E >> 1
    seen = set()
    for seed in (0, 1):
        for step in range(3):
            for prompt in ("a", "b", "1", "1, 0"):
                for sample in range(4):
                    for turn in range(3):
                        seen.add(expand_seed(seed=seed, step=step, prompt_key=prompt, sample=sample, turn=turn))
    assert len(seen) == 2 * 3 * 4 * 4 * 3
    assert all(0 <= value < 2**63 for value in seen)


def test_seeds_look_uniform():
    """Mean of 4000 draws scaled to [0, 1): within five standard deviations (0.0046) of a half."""
    generator = random.Random(0)
    values = [
        expand_seed(seed=generator.randrange(10), step=i, prompt_key="p", sample=i % 8, turn=0) / 2**63
        for i in range(4000)
    ]
    assert abs(sum(values) / len(values) - 0.5) < 5 * 0.0046
