"""Every causal language model family of transformers: shared prompts are exact or refused, never silently wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.zorro.attention import register_shared_attention
from tests.arctic_rl.processors.test_prompt_sharing import SHARED, update
from tests.arctic_rl.zorro.families import response_mask_of, rollouts, row_logprobs
from tests.arctic_rl.zorro.tiny_configs import EVERY_FAMILY, VOCAB, tiny_configs, tiny_model

_EXACT = """
afmoe apertus arcee aria_text axk1 bitnet cohere cohere2 cohere2_moe cwm dbrx deepseek_v2 deepseek_v3 diffllama
dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma2 gemma3 gemma3_text gemma3n
gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2
gpt_neox granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
jais2 jetmoe laguna lfm2 lfm2_moe llama longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral
ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2 qwen3
qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
EXACT = frozenset(_EXACT.split())
"""Families that share prompts, windows of 6 tokens and experts included where they have some."""

_NOT_BUILT = """
blt cohere_compass_text emu3 gemma4_assistant gemma4_unified_assistant git mllama musicgen musicgen_melody
qwen4_exp qwen4_exp_text reformer xmod zamba2
"""
NOT_BUILT = frozenset(_NOT_BUILT.split())
"""Families that no tiny model is made of here, for want of a text model or of settings that fit."""


def expected_of(family: str, batch: dict) -> tuple[Any, torch.Tensor]:
    """A config, and log-probs of each row alone by its model with transformers' own attention."""
    for config in tiny_configs(family):
        try:
            with torch.no_grad():
                return config, row_logprobs(tiny_model(config, "eager"), batch)
        except (ValueError, TypeError, AttributeError, LookupError, AssertionError, RuntimeError):
            continue
    pytest.fail(f"no config of {family} gives a model that runs")


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in EVERY_FAMILY if family not in NOT_BUILT])
def test_exact_or_refused(family: str):
    batch = {name: value % VOCAB if "ids" in name else value for name, value in rollouts([3, 1, 4], 3).items()}
    batch["prompts"] = batch["prompts"] % VOCAB
    config, expected = expected_of(family, batch)
    mask = response_mask_of(batch)
    meta = SHARED | {"temperature": 1.0, "logits_optimization": "compute"}
    try:
        model = tiny_model(config, register_shared_attention())
        result, _ = update(model, batch, meta, {"post": ["compute_logprobs"]}, backward=False)
    except (ArcticError, KeyError):
        assert family not in EXACT
        return
    ours = result["batch"]["logprobs"].double()
    assert (ours - expected)[mask].abs().max() < 3e-5
    assert family in EXACT


def test_families_are_those_of_this_transformers():
    assert not EXACT & NOT_BUILT
    assert set(EVERY_FAMILY) >= EXACT | NOT_BUILT
    readme = " ".join((Path(__file__).parents[3] / "README.md").read_text().split())
    built = len(EVERY_FAMILY) - len(NOT_BUILT)
    assert f"Of the {built} causal language model families" in readme
    assert f"{len(EXACT)} are exact and the others refused" in readme
