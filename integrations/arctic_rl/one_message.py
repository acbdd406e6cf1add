"""Turns within one assistant message (``generator.use_conversation_multi_turn=false``): the last turn's end token.

SkyRL takes the end token off every turn, and where the last turn did not run out of tokens, writes one at the end with
the log-prob 0 and a loss mask of 1, whether the model sampled it or not.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Any


@dataclass
class _LastTurn:
    sampled_end: bool = False


# The last turn so far of the trajectory that the current task runs.
_last_turn: contextvars.ContextVar[_LastTurn | None] = contextvars.ContextVar("last_turn", default=None)


class OneMessageMixin:
    """Put before a SkyRL gym generator: in a message of several turns an end token that the model sampled keeps its
    log-prob, and one that nobody sampled has no loss.

    Also, an answer that is the end token alone is kept; SkyRL raises an ``IndexError`` at it.
    """

    async def agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's agent loop."""
        if self.use_conversation_multi_turn:
            return await super().agent_loop(*args, **kwargs)
        last = _LastTurn()
        token = _last_turn.set(last)
        try:
            output = await super().agent_loop(*args, **kwargs)
        finally:
            _last_turn.reset(token)
        if not last.sampled_end and output.response_ids[-1:] == [self.tokenizer.eos_token_id]:
            output.loss_mask[-1] = 0
        return output

    def _update_agent_loop_state_with_singleturn_chat_template(self, agent_loop_state: Any, turn_output: Any) -> Any:
        sampled_end = turn_output.output_ids[-1:] == [self.tokenizer.eos_token_id]
        last = _last_turn.get()
        if last is not None:
            last.sampled_end = sampled_end
        state = super()._update_agent_loop_state_with_singleturn_chat_template(agent_loop_state, turn_output)
        if sampled_end and state.done and state.sample_support_trace is None:
            observed = len(turn_output.obs_ids)
            state.input_ids.insert(len(state.input_ids) - observed, self.tokenizer.eos_token_id)
            state.loss_mask.insert(len(state.loss_mask) - observed, 1)
            if state.rollout_logprobs is not None and turn_output.output_logprobs is not None:
                end = len(state.rollout_logprobs) - observed
                state.rollout_logprobs.insert(end, turn_output.output_logprobs[-1])
            state.response_end_idx += 1
        return state
