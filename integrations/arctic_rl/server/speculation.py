"""Speculative decoding: which drafts an engine may make (vLLM's ``speculative_config``), and what goes with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SETTING = "generator.inference_engine.speculative_config"

LONGEST_DRAFT = 128
"""``MAX_SPEC_LEN`` of vLLM's rejection sampler, which ends the engine at a longer draft."""

COUNTS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""What drafts by n-grams read, beside ``method``."""

_NGRAM = "write ngram"
_OTHER_METHODS = {
    "ngram_gpu": ("it drafts on GPUs while a step is under way, and no test here covers its log-probs", _NGRAM),
    "suffix": ("it needs arctic-inference, which this package does not bring", _NGRAM),
    "custom_class": ("drafts by code of one's own are not served", _NGRAM),
    "extract_hidden_states": ("it drafts nothing", "leave speculative_config out"),
}
_OF_A_MODEL = "its drafts come from weights that no weight sync reaches, and fit the policy less with every step"
_REJECTION = "rejection_sample_method"


@dataclass(frozen=True)
class Problem:
    """What stands against one setting."""

    name: str
    """Its dotted name."""
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.why}; {self.instead}"


def speculation_problems(config: Mapping[str, Any], device: str) -> list[Problem]:
    """What stands against a ``speculative_config``; empty if engines honour it.

    Drafts by n-grams are taken from the prompt and the response so far, so there are no weights that a sync would have
    to reach. vLLM's rejection sampler (Leviathan et al., https://arxiv.org/abs/2211.17192) keeps the policy's
    distribution whatever the drafts are, and its log-probs are the policy's (``RejectionSampler``, with
    ``logprobs_mode="processed_logprobs"``).

    Args:
        config: vLLM's keys and values.
        device: ``cpu`` or ``cuda``.
    """
    if device == "cpu":
        why = (
            "the engines are on CPUs, where vLLM 0.30.0's rejection sampler launches kernels that only GPUs have and "
            "the engine ends at its first draft"
        )
        return [Problem(SETTING, dict(config), why, "write null")]
    return list(_method_problems(config)) or [*_key_problems(config), *_count_problems(config)]


def _method_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    if "method" not in config:
        yield Problem(SETTING, dict(config), "it names no method", "write method: ngram too")
    elif config["method"] != "ngram":
        method = config["method"]
        known = _OTHER_METHODS.get(method) if isinstance(method, str) else None
        why, instead = (_OF_A_MODEL, _NGRAM) if known is None else known
        yield Problem(f"{SETTING}.method", method, why, instead)


def _key_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    known = ("method", *COUNTS)
    for key, value in config.items():
        if key in known or (key == _REJECTION and value == "standard"):
            continue
        if key == _REJECTION:
            why, instead = "another rule than the standard one is not tried here", "leave it out"
            if value == "synthetic":
                why = "it takes drafts over without asking the policy, and rollouts are no longer its own"
        else:
            close = difflib.get_close_matches(str(key), known, n=1)
            why = "drafts by n-grams do not read it"
            instead = f"did you mean {close[0]!r}?" if close else "leave it out"
        yield Problem(f"{SETTING}.{key}", value, why, instead)


def _count_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    if "num_speculative_tokens" not in config:
        yield Problem(SETTING, dict(config), "the length of a draft is missing", "write num_speculative_tokens too")
    given = [name for name in COUNTS if name in config]
    wrong = [name for name in given if not _is_count(config[name])]
    for name in wrong:
        yield Problem(f"{SETTING}.{name}", config[name], "it counts tokens", "write a whole number of at least 1")
    if wrong:
        return
    if config.get("num_speculative_tokens", 1) > LONGEST_DRAFT:
        why = f"vLLM checks {LONGEST_DRAFT} tokens of a draft at most"
        yield Problem(
            f"{SETTING}.num_speculative_tokens",
            config["num_speculative_tokens"],
            why,
            f"write a number from 1 to {LONGEST_DRAFT}",
        )
    shortest, longest = (config.get(name) for name in ("prompt_lookup_min", "prompt_lookup_max"))
    if shortest is not None and longest is not None and shortest > longest:
        yield Problem(
            f"{SETTING}.prompt_lookup_min", shortest, f"it is above prompt_lookup_max={longest}", "write a smaller one"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
