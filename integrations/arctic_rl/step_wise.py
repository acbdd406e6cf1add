"""Step-wise trajectories (``generator.step_wise_trajectories=true``): the limit on the length of a turn's prompt."""

from __future__ import annotations

from typing import Any


class StepWiseMixin:
    """Put before a SkyRL gym generator: no turn of a step-wise trajectory is sent more than
    ``generator.max_input_length`` tokens.

    SkyRL compares the prompt of the turn before with the limit, so that one turn more is sent, which may be longer
    than the engine accepts.
    """

    def _update_agent_loop_state_with_multiturn_chat_template(self, agent_loop_state: Any, turn_output: Any) -> Any:
        state = super()._update_agent_loop_state_with_multiturn_chat_template(agent_loop_state, turn_output)
        if self.generator_cfg.step_wise_trajectories and not state.done:
            state.input_ids = self.tokenizer.apply_chat_template(
                state.chat_history,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **self.generator_cfg.chat_template_kwargs,
            )
        return state
