"""Liger's Triton kernels (https://github.com/linkedin/Liger-Kernel) in place of a model's norms, MLPs and rotary
embeddings.

Its fused losses stay off: log-probs are read at the LM head (``processors.model``), in tiles, so the model's own
forward pass must run up to there. Attention is not Liger's business: queries and keys reach ours, shared prompts or
not, after the rotary embedding. Adapters stay in place, since the MLP's linear layers are called as modules. ZeRO
stage 3 gathers weights around those calls too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SETTING = "trainer.arctic_rl.use_liger"

_ROUNDING = 1e-4
"""Norm of a difference between float32 results over the norm of the right one."""


def apply_liger(model: PreTrainedModel, device: str) -> None:
    """Replace layers of a model in place; the rotary embedding for all models of its family in this process.

    Every kind of replaced layer is compared on a few random inputs with the layer that it stands for, since Liger
    takes a model's family for its layers (an activation that the config names is not looked at).

    Args:
        model: in the dtype that it runs in, on its device or still on the host.
        device: where the layers are compared, in float32.

    Raises:
        UnsupportedError: Liger is not installed, knows no layer of this family, or computes something else.
    """
    if find_spec("liger_kernel") is None:
        raise UnsupportedError(
            f"{SETTING}=true: there is no module liger_kernel; run uv sync --extra arctic-rl, or write false"
        )
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    family = model.config.get_text_config().model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedError(
            f"{SETTING}=true: Liger has no kernels for models of type {family}; write {SETTING}=false"
        )
    own = {id(module) for module in model.modules() if "forward" in vars(module)}
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    replaced = [module for module in model.modules() if "forward" in vars(module) and id(module) not in own]
    if not replaced:
        raise UnsupportedError(
            f"{SETTING}=true: Liger replaced no layer of this {type(model).__name__}; write {SETTING}=false"
        )
    for module in {type(module): module for module in replaced}.values():
        if not _takes_hidden_states_alone(module):
            raise UnsupportedError(
                f"{SETTING}=true: Liger replaces {type(module).__name__}, which is not tried here; write "
                f"{SETTING}=false"
            )
        distance = _distance(module, device)
        if not distance <= _ROUNDING:
            raise UnsupportedError(
                f"{SETTING}=true: Liger's {type(module).__name__} differs from this model's by {distance:.1e} of its "
                f"norm; write {SETTING}=false"
            )


def _takes_hidden_states_alone(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [item for item in parameters if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1


@torch.no_grad()
def _distance(module: nn.Module, device: str) -> float:
    """How far a replaced layer is from its class's own forward pass in float32, relative, over all results."""
    module = copy.deepcopy(module).to(device, torch.float32)
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 3, weight.shape[-1], generator=generator).to(weight)
    right, ours = (list(_tensors(value)) for value in (type(module).forward(module, inputs), module(inputs)))
    difference = sum(float((a - b).norm()) ** 2 for a, b in zip(ours, right, strict=True)) ** 0.5
    return difference / sum(float(value.norm()) ** 2 for value in right) ** 0.5


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from value if isinstance(value, tuple) else (value,)
