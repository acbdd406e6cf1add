"""The prompts that training samples are shown with, in the table of a trajectory logger and as a printed example."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from .dynamic_sampling import original_uid

__all__ = ["ShownPromptsMixin", "with_a_prompt_a_row"]


_KEPT = 8
"""Batches that are waiting to be shown, at most: a recipe's loop need not show what it generates."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Batch:
    output: Any
    """What the generator returned, or what dynamic sampling made of it."""
    input: dict[str, Any]
    """What it was given, where SkyRL looks for prompts to show."""
    prompts: dict[Any, Any]
    """By uid."""


class ShownPromptsMixin:
    """Put before a SkyRL trainer class: each row of a training batch is shown with the prompt it came from.

    SkyRL shows row k with prompt k of the last batch that was generated. That is another one where a trajectory has
    several rows (``generator.step_wise_trajectories``), and where dynamic sampling drops, collects or replaces groups.
    Batches may be under way at the same time: an output is known by its identity.
    """

    async def generate(self, input_batch: Any) -> Any:
        """The trainer's own; its prompts are noted by uid, where a recipe's loop gives them trajectory ids."""
        output = await super().generate(input_batch)
        ids = input_batch.get("trajectory_ids")
        if ids is not None:
            prompts = {row.instance_id: prompt for row, prompt in zip(ids, input_batch["prompts"], strict=True)}
            self._waiting().append(_Batch(output, input_batch, prompts))
        return output

    def handle_dynamic_sampling(self, generator_output: Any, uids: list[str]) -> Any:
        """The trainer's own; a batch has the prompts of all that it was collected from."""
        batch = self._take(generator_output)
        output, uids, again = super().handle_dynamic_sampling(generator_output, uids)
        if batch is not None:
            collected = vars(self).setdefault("_arctic_collected_prompts", {})
            collected.update(batch.prompts)
            if not again:
                self._waiting().append(_Batch(output, batch.input, dict(collected)))
                collected.clear()
        return output, uids, again

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own; the generator's input, from which SkyRL takes what it shows, then has a prompt a row."""
        batch = self._take(generator_output)
        output, uids = super().postprocess_generator_output(generator_output, uids, *args, **kwargs)
        originals = [original_uid(uid) for uid in uids]
        if batch is not None and batch.prompts.keys() >= set(originals):
            batch.input["prompts"] = [batch.prompts[uid] for uid in originals]
        return output, uids

    def _waiting(self) -> deque[_Batch]:
        return vars(self).setdefault("_arctic_waiting", deque(maxlen=_KEPT))

    def _take(self, output: Any) -> _Batch | None:
        waiting = self._waiting()
        found = next((batch for batch in waiting if batch.output is output), None)
        if found is not None:
            waiting.remove(found)
        return found


def with_a_prompt_a_row(group: Any, *, merges: bool) -> Any:
    """A ``GeneratedOutputGroup`` of the asynchronous trainer whose prompt stands once for each row of its output.

    Args:
        group: all samples of one prompt.
        merges: the rows are those that ``generator.merge_stepwise_output`` will leave.
    """
    from skyrl.train.generators.utils import merge_stepwise_output

    if not group.prompts:
        return group
    output = merge_stepwise_output(group.generator_output) if merges else group.generator_output
    return dataclasses.replace(group, prompts=group.prompts[:1] * len(output["response_ids"]))
