"""Attention by name and Liger's kernels: what reaches the model, and what is refused by name before a run."""

import dataclasses

import pytest
import torch

from integrations.arctic_rl.errors import ConfigError, UnsupportedError
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.processors.pipeline import run_pipeline
from integrations.arctic_rl.server import kernel_settings, liger
from integrations.arctic_rl.server.engine import InferenceEngine, load_model
from integrations.arctic_rl.server.kernel_settings import ATTENTIONS, check_attention_package
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.specs import training_spec


def spec(**changes):
    return training_spec(**({"use_zorro": False} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_liger": True}, "trainer.arctic_rl.use_liger=true: Liger's kernels run on GPUs, .* write false"),
        ({"attention": "flash_attention_2"}, "attention=flash_attention_2: on CPUs .* arctic_varlen, sdpa, eager"),
        ({"attention": "flex"}, "attention=flex: on CPUs"),
        ({"attention": "arctic_varlen", "device": "cuda"}, "on GPUs .* flash_attention_2, .*sdpa"),
        ({"attention": "sdpa", "use_zorro": None}, "trainer.arctic_rl.use_zorro=false too"),
        ({"attention": "sdpa", "use_zorro": True, "device": "cuda"}, "trainer.arctic_rl.use_zorro=false too"),
    ],
)
def test_what_a_device_does_not_have_is_refused_before_a_run(changes, words):
    with pytest.raises(ConfigError, match=words):
        spec(**changes)


def test_what_a_device_has_is_accepted():
    for device, names in ATTENTIONS.items():
        for name in names:
            assert spec(attention=name, device=device).attention == name
        assert attention_implementation(device) == names[0]
    assert spec(use_liger=True, device="cuda").use_liger


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(kernel_settings, "find_spec", lambda name: None)
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(UnsupportedError, match=f"attention={name}: there is no module flash_attn"):
            check_attention_package(name)
    check_attention_package("sdpa")
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"use_liger=true: there is no module liger_kernel; run uv sync"):
        liger.apply_liger(tiny_model(), "cpu")


@pytest.mark.parametrize("use_zorro", [None, False])
def test_rows_on_gpus_are_attended_to_without_flash_attention_where_the_recipe_says_so(
    tmp_path, monkeypatch, use_zorro
):
    """A model whose attention drops out in training shares no prompts."""
    tiny_model("qwen3", attention_dropout=0.3).save_pretrained(tmp_path)
    monkeypatch.setattr(kernel_settings, "find_spec", lambda name: None)
    changes = {"device": "cuda", "zero_stage": 3, "use_zorro": use_zorro, "flash_attention": False}
    asked = spec(model_path=str(tmp_path), **changes)
    assert load_model(asked).config._attn_implementation == "sdpa"
    with pytest.raises(UnsupportedError, match="there is no module flash_attn"):
        load_model(dataclasses.replace(asked, flash_attention=True))


def test_each_attention_on_cpus_reaches_the_model_and_gives_the_same_log_probs(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 100, (4, 12), generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 5, 9, 3])[:, None]
    batch = {"input_ids": ids, "attention_mask": mask.long(), "prompts": ids[:, :4], "responses": ids[:, 4:]}
    batch["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    meta = {"pad_token_id": 0, "temperature": 0.7, "rollout_n": 1, "max_prompt_len": 4, "max_response_len": 8}
    found = {}
    for name in ATTENTIONS["cpu"]:
        model = load_model(dataclasses.replace(spec(model_path=str(tmp_path)), attention=name))
        assert model.config._attn_implementation == name
        result = run_pipeline(
            InferenceEngine(model, "float32"),
            (),
            batch,
            meta,
            {"post": ["compute_logprobs"], "loss_fn": None, "config": {}},
            "cpu",
            backward=False,
            pack=True,
            max_tokens_per_mb=40,
            return_tensors=True,
        )
        found[name] = result["batch"]["logprobs"]
    right = found.pop("eager")
    assert right.abs().sum() > 1
    for name, values in found.items():
        assert torch.allclose(values, right, atol=2e-5), name


@pytest.mark.parametrize(("factor", "off"), [(1.0, False), (1.01, True)])
def test_ligers_layers_are_compared_in_float32_whatever_the_model_is_in(factor, off):
    """A bound method stands in for the forward pass, as Liger's does; 16 bits would hide or invent a difference."""
    layer = tiny_model().bfloat16().model.layers[0].mlp

    def forward(self, hidden):
        gate = torch.nn.functional.silu(self.gate_proj(hidden))
        return self.down_proj(gate * self.up_proj(hidden) * factor)

    layer.forward = forward.__get__(layer)
    distance = liger._distance(layer, "cpu")
    assert (distance > liger._ROUNDING) == off and distance < 0.02
    assert {value.dtype for value in layer.parameters()} == {torch.bfloat16}
