"""Requests for rollouts as the package's ``generate`` takes them, and its answers as ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ArcticError, UnsupportedError

__all__ = ["group_requests", "rollout", "server_params"]


def server_params(params: Mapping[str, Any], end_token_ids: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of ``vllm.SamplingParams``, in JSON types, for a server of an older vLLM.

    Args:
        params: as ``sampling_params.to_vllm_kwargs`` makes them.
        end_token_ids: the model's own ends of a response, added to ``stop_token_ids`` unless they are to be ignored.

    Raises:
        UnsupportedError: ``logit_bias``, whose token ids would arrive as text.
    """
    if params["logit_bias"] is not None:
        raise UnsupportedError(
            "generator.sampling_params.logit_bias: arctic-platform's wire turns its token ids into text, which vLLM "
            "does not take: leave it out"
        )
    sent = {name: value for name, value in params.items() if name != "watermarking"}
    if not sent["ignore_eos"]:
        sent["stop_token_ids"] = list(dict.fromkeys([*sent["stop_token_ids"], *end_token_ids]))
    return sent


def group_requests(requests: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Indices of requests with equal parameters, which one call takes, in the order of their first."""
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(json.dumps(request["params"], sort_keys=True), []).append(index)
    return list(groups.values())


def rollout(answer: Mapping[str, Any], *, with_logprobs: bool, version: int) -> dict[str, Any]:
    """One answer of the server as a result of ``RemoteBackend.generate``.

    Args:
        answer: ``token_ids``, ``finish_reason``, and ``logprobs``: by token id, a mapping a token.
        with_logprobs: whether they were asked for.
        version: of the weights.

    Raises:
        ArcticError: ids or log-probs are missing.
    """
    if "token_ids" not in answer:
        raise ArcticError(
            "arctic-platform's server returned a response without token ids, and its text may have others: serve "
            "with a release of arctic-inference that returns them"
        )
    token_ids = [int(token) for token in answer["token_ids"]]
    logprobs = None
    if with_logprobs:
        given = answer.get("logprobs")
        if given is None or len(given) != len(token_ids):
            raise ArcticError(
                f"arctic-platform's server returned {'no' if given is None else len(given)} log-probs with "
                f"{len(token_ids)} tokens: serve with a release of arctic-inference that returns them"
            )
        logprobs = [float(chosen[str(token)]["logprob"]) for token, chosen in zip(token_ids, given, strict=True)]
    return {
        "token_ids": token_ids,
        "logprobs": logprobs,
        "stop_reason": answer["finish_reason"],
        "weight_version": version,
        "last_weight_version": version,
    }
