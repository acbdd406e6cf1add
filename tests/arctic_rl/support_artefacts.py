"""What the backend is told for a recipe, as plain values: the server's config, and the payloads of a small batch."""

import dataclasses
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

from integrations.arctic_rl.backends.loop_thread import LoopThread
from integrations.arctic_rl.devices import device_here
from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.server_config import server_config
from tests.arctic_rl.in_process_backend import InProcessBackend

ROLLOUT_OFFSETS = [[0.3, -0.2, 0.05], [0.0, 0.0, -0.6]]
"""Log-probs of the sampler less the old ones: ratios of 0.55 to 1.82, apart from each other."""


def batch() -> TrainingInputBatch:
    """Two rows in SkyRL's layout: prompts of 2 and 3 tokens, responses of 3 and 1."""
    response_mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    old = torch.tensor([[-1.0, -2.0, -3.0], [0.0, 0.0, -4.0]])
    rows = TrainingInputBatch(
        {
            "sequences": torch.tensor([[11, 12, 21, 22, 23], [0, 13, 14, 15, 24]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
            "response_mask": response_mask,
            "loss_mask": response_mask.clone(),
            "advantages": torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.0, 0.9]]),
            "action_log_probs": old,
            "base_action_log_probs": None,
            "rollout_logprobs": old + torch.tensor(ROLLOUT_OFFSETS),
            "returns": torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.0, 0.9]]),
            "values": torch.tensor([[0.3, 0.2, 0.1], [0.0, 0.0, 0.5]]),
        }
    )
    rows.metadata = {"response_length": 3, "uids": ["a", "b"], "global_step": 1}
    return rows


def artefacts(cfg: Any, loop: LoopThread) -> dict[str, Any]:
    """Everything that a backend would be given: two recipes with equal artefacts train alike."""
    backend = InProcessBackend()
    dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=0, inference_client=None)
    dispatch.forward("policy", batch())
    dispatch.forward_backward("policy", batch())
    if cfg.trainer.critic.model.path:
        dispatch.forward("critic", batch())
        dispatch.forward_backward("critic", batch())
    device = device_here(cfg)
    server = dataclasses.asdict(server_config(cfg, run_id="", env_vars={}, device=device))
    if device == "cpu":
        # Engines on CPUs do not read it.
        del server["sampling"]["gpu_memory_utilization"]
    return {
        "server": server,
        "forward": [_plain(argument) for call in backend.arguments("fwd_no_grad") for argument in call],
        "update": [_plain(argument) for call in backend.arguments("fwd_bwd") for argument in call],
        "critic_update": [_plain(argument) for call in backend.arguments("critic_fwd_bwd") for argument in call],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
