"""A value model: a causal language model's backbone with a linear head of one output in place of its LM head."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from .model_config import load_model_config
from .specs import TrainingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PATH = "trainer.critic.model.path"


def load_value_model(spec: TrainingSpec, attention: str) -> PreTrainedModel:
    """Load the backbone of ``spec.model_path`` in float32, and its value head where the folder holds one.

    A head that is not there, or is to be drawn afresh (``spec.fresh_value_head``), is drawn from ``spec.seed``, the
    same on every rank: normal with the model's own deviation, or 1 / (hidden size + 1). SkyRL draws both so in its
    ``get_llm_for_sequence_regression``.

    Args:
        spec: of the critic.
        attention: name of a ``transformers`` attention.

    Raises:
        UnsupportedError: for a model without a backbone of its own class in ``transformers``, or a folder that lacks
            weights of it.
    """
    config = load_model_config(spec.model_path, spec.model_config)
    model_class = value_model_class(type(config), spec.value_head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model, info = model_class.from_pretrained(
            spec.model_path,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
        )
        missing = set(info["missing_keys"]) - {f"{spec.value_head}.weight"}
        if missing:
            raise UnsupportedError(
                f"{_PATH}={spec.model_path}: it has no {', '.join(sorted(missing)[:5])}"
                f"{' and more' if len(missing) > 5 else ''}, and the critic would start from random weights; write "
                "the path of a whole model"
            )
        if spec.fresh_value_head:
            torch.manual_seed(spec.seed)
            head = getattr(model, spec.value_head)
            torch.nn.init.normal_(head.weight, std=1 / (head.in_features + 1))
    return model


@functools.cache
def value_model_class(config_class: type, head_name: str) -> type[PreTrainedModel]:
    """The class of value models of a family, whose head is an attribute of that name.

    Its parameters have the names that SkyRL's critic gives them, so that either loads what the other exports.

    Raises:
        UnsupportedError: ``transformers`` has no backbone for the family, or an attribute of that name already.
    """
    from transformers import AutoModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

    if config_class not in AutoModel._model_mapping:
        raise UnsupportedError(
            f"{_PATH}: transformers has no backbone for {config_class.__name__}, so there is nothing to put a value "
            "head on; write the path of a model that transformers itself knows"
        )
    backbone_class = AutoModel._model_mapping[config_class]
    family = backbone_class.__base__
    if not head_name.isidentifier() or hasattr(family, head_name) or head_name == family.base_model_prefix:
        raise UnsupportedError(
            f"trainer.algorithm.value_head_prefix={head_name!r}: {family.__name__} cannot have a module of that name; "
            "write value_head"
        )

    class CriticModel(family):
        value_head_prefix = head_name
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            setattr(self, self.base_model_prefix, backbone_class(config))
            setattr(self, head_name, torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False))
            self.post_init()

        def get_output_embeddings(self) -> None:
            """None: there is no LM head."""

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            logits_to_keep: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            """Values [b, T, 1], or [b, N, 1] of the N positions of ``logits_to_keep``, as ``logits``."""
            backbone = getattr(self, self.base_model_prefix)
            hidden = backbone(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
            ).last_hidden_state
            if logits_to_keep is not None:
                hidden = hidden.index_select(1, logits_to_keep)
            return CausalLMOutputWithPast(logits=getattr(self, head_name)(hidden))

    return CriticModel
