"""The prompts that training samples are shown with, in the table of a trajectory logger and as a printed example."""

from __future__ import annotations

import dataclasses
from typing import Any

from .dynamic_sampling import original_uid

__all__ = ["ShownPromptsMixin", "with_a_prompt_a_row"]


class ShownPromptsMixin:
    """Put before a SkyRL trainer class: each row of a training batch is shown with the prompt it came from.

    SkyRL shows row k with prompt k of the last batch that was generated. That is another one where a trajectory has
    several rows (``generator.step_wise_trajectories``), and where dynamic sampling drops, collects or replaces groups.
    """

    async def generate(self, input_batch: Any) -> Any:
        """The trainer's own; its prompts are noted by uid, where a recipe's loop gives them trajectory ids."""
        ids = input_batch.get("trajectory_ids")
        if ids is None:
            return await super().generate(input_batch)
        known = vars(self).setdefault("_arctic_prompts", {})
        known.update({row_id.instance_id: prompt for row_id, prompt in zip(ids, input_batch["prompts"], strict=True)})
        self._arctic_input = input_batch
        return await super().generate(input_batch)

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own; the generator's input, from which SkyRL takes what it shows, then has a prompt a row."""
        output, uids = super().postprocess_generator_output(generator_output, uids, *args, **kwargs)
        batch = vars(self).pop("_arctic_input", None)
        known = vars(self).pop("_arctic_prompts", {})
        originals = [original_uid(uid) for uid in uids]
        if batch is not None and known.keys() >= set(originals):
            batch["prompts"] = [known[uid] for uid in originals]
        return output, uids


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
