"""SkyRL's sampling parameters as explicit keyword arguments of ``vllm.SamplingParams``, and per-rollout seeds."""

import difflib
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from .errors import UnsupportedError

NEUTRAL: dict[str, Any] = {
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
    "logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": True,
    "watermarking": False,
}
"""Every parameter that is sent, with the value that leaves the model's own distribution as it is."""

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("n", "top_k", "min_tokens", "max_tokens")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_SPELLINGS = {"max_generate_length": "max_tokens"}
_SMALLEST_TEMPERATURE = 0.01

_REFUSED = {
    "prompt_logprobs": "log-probs of the prompt are not returned; leave it out",
    "logprob_token_ids": "only the chosen token's log-prob is returned; leave it out",
    "flat_logprobs": "the server chooses the form of log-probs; leave it out",
    "detokenize": "the server decides it from the stop strings; leave it out",
    "output_kind": "a request is answered once, when it ends; leave it out",
    "stream_interval": "a request is answered once, when it ends; leave it out",
    "best_of": "write generator.n_samples_per_prompt instead",
    "use_beam_search": "beam search has no log-probs to train on; leave it out",
    "structured_outputs": "constrained decoding is not served; leave it out",
    "repetition_detection": "it ends a rollout with a reason that SkyRL does not know; leave it out",
    "thinking_token_budget": "forced tokens have no log-prob of the policy; leave it out",
    "trace_decode_token_ids": "forced tokens have no log-prob of the policy; leave it out",
    "routed_experts_prompt_start": "routed experts are not returned; leave it out",
    "truncate_prompt_tokens": "the trainer would see another prompt; set generator.max_input_length instead",
    "extra_args": "no plug-in that reads it is loaded; leave it out",
}


def _plain(value: Any) -> Any:
    """OmegaConf and other containers as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _refuse(name: str, value: Any, why: str) -> UnsupportedError:
    return UnsupportedError(f"generator.sampling_params.{name}={value!r}: {why}")


def _flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """One level of names in vLLM's spelling; a name given twice must have one value."""
    flat: dict[str, Any] = {}
    additional = params.get("additional_kwargs")
    for source in (params, {} if additional is None else additional):
        for key, value in source.items():
            name = _SPELLINGS.get(key, key)
            if name == "additional_kwargs" and source is params:
                continue
            if name in _REFUSED:
                raise _refuse(key, value, _REFUSED[name])
            if name not in NEUTRAL and name != "max_tokens":
                known = [*NEUTRAL, "max_tokens", *_SPELLINGS, "additional_kwargs"]
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(sorted(known))}"
                raise _refuse(key, value, f"no such sampling parameter; {hint}")
            if name in flat and flat[name] != _plain(value):
                raise _refuse(key, value, f"given twice, the other value is {flat[name]!r}; keep one")
            flat[name] = _plain(value)
    return flat


def _check_number(name: str, value: Any) -> None:
    integer = name in _INTEGERS
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise _refuse(name, value, f"write {'a whole number' if integer else 'a number'}")


def _check_ranges(kwargs: Mapping[str, Any]) -> None:
    temperature = kwargs["temperature"]
    if temperature != 0 and not _SMALLEST_TEMPERATURE <= temperature <= 2:
        why = f"vLLM samples at 0 (greedy) and from {_SMALLEST_TEMPERATURE} to 2 only; write one of these"
        raise _refuse("temperature", temperature, why)
    if not 0 < kwargs["top_p"] <= 1:
        raise _refuse("top_p", kwargs["top_p"], "must be above 0 and at most 1; 1 switches it off")
    if not 0 <= kwargs["min_p"] <= 1:
        raise _refuse("min_p", kwargs["min_p"], "must be between 0 and 1; 0 switches it off")
    if kwargs["top_k"] < 0:
        raise _refuse("top_k", kwargs["top_k"], "must be a count of tokens; -1 or 0 switches it off")
    if kwargs["max_tokens"] < 1:
        raise _refuse("max_tokens", kwargs["max_tokens"], "must be at least 1")
    if not 0 <= kwargs["min_tokens"] <= kwargs["max_tokens"]:
        raise _refuse("min_tokens", kwargs["min_tokens"], f"must be from 0 to max_tokens={kwargs['max_tokens']}")


def to_vllm_kwargs(params: Mapping[str, Any]) -> dict[str, Any]:
    """Translate SkyRL's sampling parameters to keyword arguments of ``vllm.SamplingParams``.

    Accepts the dict that ``skyrl...engine_utils.get_vllm_sampling_params`` makes, or a plain dict of
    ``skyrl.train.config.SamplingParams`` (``max_generate_length``, ``additional_kwargs``). Everything in
    ``NEUTRAL`` is in the result, so that no default of the engine or of a checkpoint can fill a gap.

    ``logprobs`` is None (none returned), 0 or 1 (the chosen token's; sent as 0). ``top_k`` -1 and 0 switch it
    off. ``min_tokens`` 1, which SkyRL writes for every recipe, is sent as 0: a response has one token anyway, its end
    token counted, and vLLM would forbid that token at the first position, so that its log-probs there would be off
    the trainer's by log(1 - P(end)). Stop strings stay in the output text. ``detokenize`` is on where stop strings or
    bad words need text.

    Raises:
        UnsupportedError: for an unknown name (with the nearest known one), a value out of range, ``n`` above 1,
            ``logprobs`` above 1, a missing length, or a parameter that the server does not serve.
    """
    given = _flatten(params)
    if given.get("max_tokens") is None:
        raise UnsupportedError(
            "generator.sampling_params.max_generate_length is missing: without it an engine would stop at a default "
            "of its own; write the largest number of tokens of a response"
        )
    kwargs = {**NEUTRAL, **given}
    for name in (*_NUMBERS, *_INTEGERS):
        _check_number(name, kwargs[name])
    for name in _FLAGS:
        if not isinstance(kwargs[name], bool):
            raise _refuse(name, kwargs[name], "write true or false")
    if kwargs["watermarking"]:
        raise _refuse("watermarking", kwargs["watermarking"], "it changes the sampled distribution; leave it out")
    if not kwargs["include_stop_str_in_output"]:
        raise _refuse("include_stop_str_in_output", False, "a response's text is the text of its tokens; leave it out")
    if kwargs["n"] != 1:
        raise _refuse("n", kwargs["n"], "a request has one response; write generator.n_samples_per_prompt instead")
    if kwargs["min_tokens"] == 1:
        kwargs["min_tokens"] = 0
    if kwargs["logprobs"] is not None:
        if isinstance(kwargs["logprobs"], bool) or kwargs["logprobs"] not in (0, 1):
            raise _refuse("logprobs", kwargs["logprobs"], "only the chosen token's is returned; write 1, 0 or null")
        kwargs["logprobs"] = 0
    seed = kwargs["seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise _refuse("seed", seed, "write a whole number from 0, or null for unseeded sampling")
    if kwargs["top_k"] == -1:
        kwargs["top_k"] = 0
    for name in ("stop", "stop_token_ids", "bad_words"):
        value = [] if kwargs[name] is None else kwargs[name]
        kwargs[name] = [value] if isinstance(value, str) else list(value)
    if "" in kwargs["stop"]:
        raise _refuse("stop", kwargs["stop"], "an empty stop string would end every response; remove it")
    if kwargs["logit_bias"] is not None:
        kwargs["logit_bias"] = {int(token): float(bias) for token, bias in kwargs["logit_bias"].items()}
    _check_ranges(kwargs)
    kwargs["detokenize"] = bool(kwargs["stop"] or kwargs["bad_words"])
    return kwargs


def expand_seed(*, seed: int, step: int, prompt_key: str, sample: int, turn: int) -> int:
    """One seed per generated response, from 0 to 2**63 - 1.

    The same five values give the same seed on every machine; any change gives an unrelated one. With one seed for
    all requests, every rollout of a prompt would be the same text.
    """
    text = json.dumps([seed, step, prompt_key, sample, turn]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
