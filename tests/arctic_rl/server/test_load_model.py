"""Which attention a training worker's model is loaded with."""

import dataclasses
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.server.engine import load_model
from integrations.arctic_rl.server.specs import OptimizerSpec, TrainingSpec

OPTIMIZER = OptimizerSpec(
    lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0, scheduler="constant", num_warmup_steps=0
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def spec_of(tmp_path):
    def build(*, dropout: float = 0.0, **changes) -> TrainingSpec:
        folder = tmp_path / f"model-{dropout}"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=dropout)).save_pretrained(folder)
        spec = TrainingSpec(
            role="policy",
            model_path=str(folder),
            dtype="float32",
            zero_stage=0,
            optimizer=OPTIMIZER,
            gradient_checkpointing=False,
            gradient_checkpointing_use_reentrant=False,
            seed=0,
            device="cpu",
            threads=1,
            processor_modules=(),
            loss_fn=None,
        )
        return dataclasses.replace(spec, **changes)

    return build


@pytest.mark.parametrize(
    ("use_zorro", "attention"), [(None, "arctic_zorro"), (True, "arctic_zorro"), (False, "arctic_varlen")]
)
def test_prompts_are_shared_unless_switched_off(spec_of, use_zorro: bool | None, attention: str):
    assert load_model(spec_of(use_zorro=use_zorro)).config._attn_implementation == attention


def test_a_model_that_cannot_is_refused_or_left_unshared(spec_of, caplog):
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0.3.*use_zorro=false"):
        load_model(spec_of(dropout=0.3, use_zorro=True))
    with caplog.at_level(logging.WARNING):
        assert load_model(spec_of(dropout=0.3)).config._attn_implementation == "arctic_varlen"
    assert "attention_dropout=0.3" in caplog.text
    reference = load_model(spec_of(dropout=0.3, use_zorro=True, role="ref"))
    assert reference.config._attn_implementation == "arctic_zorro"
