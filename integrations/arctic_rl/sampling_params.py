"""SkyRL's sampling parameters as explicit keyword arguments of ``vllm.SamplingParams``, and per-rollout seeds."""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "watermarking",
)
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


@dataclass(frozen=True)
class SamplingProblem:
    """One parameter that cannot be sent."""

    name: str
    """As it was given."""
    value: Any
    why: str
    """The reason, and what to write."""


def _flatten(params: Mapping[str, Any]) -> tuple[dict[str, Any], list[SamplingProblem]]:
    """One level of names in vLLM's spelling; a name given twice must have one value."""
    flat: dict[str, Any] = {}
    problems = []
    additional = params.get("additional_kwargs")
    for source in (params, {} if additional is None else additional):
        for key, value in source.items():
            name = _SPELLINGS.get(key, key)
            if name == "additional_kwargs" and source is params:
                continue
            if name in _REFUSED:
                problems.append(SamplingProblem(key, value, _REFUSED[name]))
            elif name not in NEUTRAL and name != "max_tokens":
                known = [*NEUTRAL, "max_tokens", *_SPELLINGS, "additional_kwargs"]
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(sorted(known))}"
                problems.append(SamplingProblem(key, value, f"no such sampling parameter; {hint}"))
            elif name in flat and flat[name] != _plain(value):
                why = f"given twice, the other value is {flat[name]!r}; keep one"
                problems.append(SamplingProblem(key, value, why))
            else:
                flat[name] = _plain(value)
    return flat, problems


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(item, int) and item >= 0 for item in value)


def _is_texts(value: Any) -> bool:
    """A text or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _type_problem(name: str, value: Any) -> str | None:
    """Why a value is not of its parameter's kind."""
    if name in _INTEGERS and not _is_number(value, int):
        return "write a whole number"
    if name in _NUMBERS and not (_is_number(value) and math.isfinite(value)):
        return "write a number"
    if name in _FLAGS and not isinstance(value, bool):
        return "write true or false"
    if name in ("stop", "bad_words") and value is not None and not _is_texts(value):
        return "write a list of texts"
    if name == "stop_token_ids" and value is not None and not _is_token_list(value):
        return "write a list of token ids"
    if name == "allowed_token_ids" and value is not None and not (_is_token_list(value) and value):
        return "write a list of token ids, or null"
    if name == "logit_bias" and value is not None and not _is_bias(value):
        return "write a mapping of token ids to numbers from -100 to 100"
    return None


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        re.fullmatch(r"\d+", str(token)) and _is_number(bias) and -100 <= bias <= 100 for token, bias in value.items()
    )


def _range_problem(name: str, value: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why a value of the right kind cannot be sent."""
    match name:
        case "temperature" if value != 0 and not _SMALLEST_TEMPERATURE <= value <= 2:
            return f"vLLM samples at 0 (greedy) and from {_SMALLEST_TEMPERATURE} to 2 only; write one of these"
        case "top_p" if not 0 < value <= 1:
            return "must be above 0 and at most 1; 1 switches it off"
        case "min_p" if not 0 <= value <= 1:
            return "must be between 0 and 1; 0 switches it off"
        case "top_k" if value < -1:
            return "must be a count of tokens; -1 or 0 switches it off"
        case "repetition_penalty" if not value > 0:
            return "must be above 0; 1 switches it off"
        case "presence_penalty" | "frequency_penalty" if not -2 <= value <= 2:
            return "must be between -2 and 2; 0 switches it off"
        case "max_tokens" if value < 1:
            return "must be at least 1"
        case "min_tokens" if value < 0:
            return "must be at least 0"
        case "min_tokens" if _is_number(kwargs["max_tokens"], int) and value > max(kwargs["max_tokens"], 1):
            return f"must be from 0 to max_tokens={kwargs['max_tokens']}"
        case "n" if value != 1:
            return "a request has one response; write generator.n_samples_per_prompt instead"
        case "logprobs" if value is not None and (isinstance(value, bool) or value not in (0, 1)):
            return "only the chosen token's is returned; write 1, 0 or null"
        case "seed" if value is not None and not (_is_number(value, int) and 0 <= value < 2**63):
            return "write a whole number from 0 to 2**63 - 1, or null for unseeded sampling"
        case "stop" | "bad_words" if value is not None and "" in ([value] if isinstance(value, str) else value):
            return "an empty one would end or forbid every response; remove it"
        case "watermarking" if value:
            return "it changes the sampled distribution; leave it out"
        case "include_stop_str_in_output" if not value:
            return "a response's text is the text of its tokens; leave it out"
    return None


def sampling_problems(params: Mapping[str, Any]) -> list[SamplingProblem]:
    """Everything in ``to_vllm_kwargs``'s argument that it would refuse."""
    given, problems = _flatten(params)
    spelled = {_SPELLINGS.get(key, key): key for key in params}
    if given.get("max_tokens") is None and not any(_SPELLINGS.get(p.name, p.name) == "max_tokens" for p in problems):
        why = (
            "max_generate_length is missing: without it an engine would stop at a default of its own; write the "
            "largest number of tokens of a response"
        )
        problems.append(SamplingProblem("max_generate_length", None, why))
    kwargs = {**NEUTRAL, "max_tokens": None, **given}
    for name, value in given.items():
        why = _type_problem(name, value) if name != "max_tokens" or value is not None else None
        if why is None and value is not None:
            why = _range_problem(name, value, kwargs)
        if why is not None:
            problems.append(SamplingProblem(spelled.get(name, name), value, why))
    return problems


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
        UnsupportedError: a line for each unknown name (with the nearest known one), value of the wrong kind or out of
            range, ``n`` above 1, ``logprobs`` above 1, a missing length, or parameter that the server does not serve.
    """
    problems = sampling_problems(params)
    if problems:
        raise UnsupportedError(
            "\n".join(f"generator.sampling_params.{item.name}={item.value!r}: {item.why}" for item in problems)
        )
    kwargs = {**NEUTRAL, **_flatten(params)[0]}
    if kwargs["min_tokens"] == 1:
        kwargs["min_tokens"] = 0
    if kwargs["logprobs"] is not None:
        kwargs["logprobs"] = 0
    if kwargs["top_k"] == -1:
        kwargs["top_k"] = 0
    for name in ("stop", "stop_token_ids", "bad_words"):
        value = [] if kwargs[name] is None else kwargs[name]
        kwargs[name] = [value] if isinstance(value, str) else list(value)
    if kwargs["logit_bias"] is not None:
        kwargs["logit_bias"] = {int(token): float(bias) for token, bias in kwargs["logit_bias"].items()}
    kwargs["detokenize"] = bool(kwargs["stop"] or kwargs["bad_words"])
    return kwargs


def expand_seed(*, seed: int, step: int, prompt_key: str, sample: int, turn: int) -> int:
    """One seed per generated response, from 0 to 2**63 - 1.

    The same five values give the same seed on every machine; any change gives an unrelated one. With one seed for
    all requests, every rollout of a prompt would be the same text.
    """
    text = json.dumps([seed, step, prompt_key, sample, turn]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
