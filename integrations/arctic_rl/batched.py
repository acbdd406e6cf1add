"""SkyRL's single-turn batched mode, row by row: a row is scored while the others are still being generated.

SkyRL's ``generate_batched`` sends all prompts as one request and scores the responses one after another once the last
one is there. Here each row is a request of its own, and its output is put together as SkyRL does.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class BatchedRow:
    """What one row of the batch gave."""

    prompt_token_ids: list[int]
    response_ids: list[int]
    """At most ``max_tokens`` of them."""
    reward: float
    stop_reason: str
    env_metrics: dict[str, Any]
    logprobs: list[float] | None
    expert_indices: Any
    sample_support: Any
    judged: bool


@dataclass(frozen=True)
class BatchedRequest:
    """What all rows of a batch have in common."""

    max_tokens: int
    sampling_params: dict[str, Any] | None
    cache_salt: str | None
    captures_sample_support: bool
    captures_routed_experts: bool


async def run_row(
    generator: Any, env: Any, prompt: Any, request: BatchedRequest, session_id: str, steps_judged: list[bool]
) -> BatchedRow:
    """One episode of one turn.

    Args:
        generator: a ``SkyRLGymGenerator``.
        env: its environment, not yet initialised.
        prompt: the dataset's messages.
        request: see there.
        session_id: tells the row's request apart from those of equal prompts.
        steps_judged: filled by the generator, an entry a step.
    """
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput

    messages, _ = await generator._run_in_executor_if_available(env.init, prompt)
    prompt_ids = generator.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    client = generator.inference_engine_client
    try:
        answer = await client.generate(
            InferenceEngineInput(
                prompt_token_ids=[prompt_ids],
                session_ids=[session_id],
                sampling_params=request.sampling_params,
                return_sample_support=request.captures_sample_support,
                cache_salt=request.cache_salt,
            ),
            model=generator.policy_model_name,
        )
        step = await generator._run_in_executor_if_available(env.step, answer["responses"][0])
        metrics = env.get_metrics()
        await generator._run_in_executor_if_available(env.close)
    finally:
        await client.finish_session(session_id)

    response_ids = answer["response_ids"][0][: request.max_tokens]
    logprobs, support = _only(answer, "response_logprobs"), _only(answer, "rollout_sample_support")
    experts = _only(answer, "rollout_expert_indices") if request.captures_routed_experts else None
    return BatchedRow(
        prompt_token_ids=prompt_ids,
        response_ids=response_ids,
        reward=step["reward"],
        stop_reason=answer["stop_reasons"][0],
        env_metrics=metrics,
        logprobs=None if logprobs is None else logprobs[: len(response_ids)],
        expert_indices=None if experts is None else experts[: len(prompt_ids) + len(response_ids)],
        sample_support=None if support is None else support[: len(response_ids)],
        judged=all(steps_judged),
    )


def _only(answer: Any, key: str) -> Any:
    values = answer.get(key)
    return None if values is None else values[0]


async def gather_rows(rows: Sequence[Any]) -> list[Any]:
    """``asyncio.gather``, but when a row fails, the others are stopped before its exception is raised."""
    tasks = [asyncio.ensure_future(row) for row in rows]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def batched_output(
    rows: Sequence[BatchedRow],
    env_classes: Sequence[str],
    *,
    filter_overlong: bool,
    unjudged_mask: Callable[[int], Any],
) -> dict[str, Any]:
    """The rows in SkyRL's batched form: scalar rewards, and the same keys in the same order.

    Raises:
        ValueError: when an inference client returned something for some rows only.
    """
    from skyrl.train.generators.utils import apply_overlong_filtering, get_rollout_metrics

    responses, rewards = [row.response_ids for row in rows], [row.reward for row in rows]
    loss_masks: list[Any] = [[1] * len(response) for response in responses]
    stop_reasons = [row.stop_reason for row in rows]
    metrics = get_rollout_metrics(responses, rewards, [row.env_metrics for row in rows], list(env_classes), loss_masks)
    if filter_overlong:
        loss_masks = apply_overlong_filtering(loss_masks, stop_reasons)
    return {
        "prompt_token_ids": [row.prompt_token_ids for row in rows],
        "response_ids": responses,
        "rewards": rewards,
        "loss_masks": [
            mask if row.judged else unjudged_mask(len(mask)) for row, mask in zip(rows, loss_masks, strict=True)
        ],
        "stop_reasons": stop_reasons,
        "rollout_metrics": metrics,
        "rollout_logprobs": _all_or_none([row.logprobs for row in rows], "response_logprobs"),
        "rollout_expert_indices": _all_or_none([row.expert_indices for row in rows], "rollout_expert_indices"),
        "rollout_sample_support": _all_or_none([row.sample_support for row in rows], "rollout_sample_support"),
    }


def _all_or_none(values: list[Any], name: str) -> list[Any] | None:
    missing = sum(value is None for value in values)
    if missing == len(values):
        return None
    if missing:
        raise ValueError(f"the inference client returned no {name} for {missing} of {len(values)} rows of one batch")
    return values
