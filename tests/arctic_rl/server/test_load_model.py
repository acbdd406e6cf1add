"""Which attention a training worker's model is loaded with."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoConfig, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from integrations.arctic_rl.errors import ArcticError, UnsupportedError
from integrations.arctic_rl.server.engine import InferenceEngine, load_model
from integrations.arctic_rl.server.hf_export import export_model
from integrations.arctic_rl.server.specs import TrainingSpec
from integrations.arctic_rl.server.weights import model_tensors
from integrations.arctic_rl.zorro.layout import SharedRows
from tests.arctic_rl.specs import training_spec

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
    def build(*, dropout: float = 0.0, rope: dict | None = None, **changes) -> TrainingSpec:
        folder = tmp_path / f"model-{dropout}-{rope is not None}"
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, attention_dropout=dropout, rope_parameters=rope)
        LlamaForCausalLM(config).save_pretrained(folder)
        return training_spec(**({"model_path": folder} | changes))

    return build


@pytest.mark.parametrize(
    ("use_zorro", "attention"), [(None, "arctic_zorro"), (True, "arctic_zorro"), (False, "arctic_varlen")]
)
def test_prompts_are_shared_unless_switched_off(spec_of, use_zorro: bool | None, attention: str):
    assert load_model(spec_of(use_zorro=use_zorro)).config._attn_implementation == attention


def test_a_model_that_cannot_is_refused_or_left_unshared(spec_of, caplog):
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0.3.*use_zorro=false"):
        load_model(spec_of(dropout=0.3, use_zorro=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    with caplog.at_level(logging.WARNING):
        assert load_model(spec_of(rope=rope)).config._attn_implementation == "arctic_varlen"
    assert "multi-dimensional rotary positions" in caplog.text
    reference = load_model(spec_of(dropout=0.3, use_zorro=True, role="ref"))
    assert reference.config._attn_implementation == "arctic_zorro"


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, "rms_norm_eps": 0.5}


@torch.no_grad()
@pytest.mark.parametrize("role", ["policy", "ref"])
def test_values_of_a_models_config_are_those_of_the_recipe(spec_of, role: str):
    ids = torch.arange(1, 21)[None]
    spec = spec_of(role=role, model_config=LINEAR)
    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=True, **LINEAR)
    expected = LlamaForCausalLM.from_pretrained(spec.model_path, config=config, attn_implementation="eager")
    plain = LlamaForCausalLM.from_pretrained(spec.model_path, attn_implementation="eager")
    loaded = load_model(spec)
    assert loaded.config.rms_norm_eps == 0.5 and loaded.config._attn_implementation == "arctic_zorro"
    assert torch.allclose(loaded(input_ids=ids).logits, expected(input_ids=ids).logits, atol=1e-6)
    assert not torch.allclose(plain(input_ids=ids).logits, expected(input_ids=ids).logits, atol=1e-3)


def test_a_value_that_a_models_config_does_not_have_is_refused(spec_of):
    with pytest.raises(UnsupportedError, match=r"rms_nrom_eps: the config of .*LlamaConfig\) has no such value"):
        load_model(spec_of(model_config={"rms_nrom_eps": 1.0}))


def test_tensors_and_exports_follow_the_changed_config(spec_of, tmp_path):
    spec = spec_of(model_config={"tie_word_embeddings": True, "rms_norm_eps": 0.5})
    model = load_model(spec)
    assert "lm_head.weight" in {tensor.name for tensor in model_tensors(spec.model_path)[0]}
    _, tied = model_tensors(spec.model_path, model_config=spec.model_config)
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    engine = SimpleNamespace(module=model)
    export_model(engine, 0, spec.model_path, tmp_path / "export", rank=0, model_config=spec.model_config)
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert config.tie_word_embeddings and config.rms_norm_eps == 0.5


def test_dropout_of_attention_is_refused_before_the_first_update(spec_of):
    with pytest.raises(UnsupportedError, match=r"trainer.policy.model.path=.*attention_dropout=0.3 .*write 0.0"):
        load_model(spec_of(dropout=0.3))
    load_model(spec_of(dropout=0.3, role="ref"))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Nemotron", "NemotronAttention does not get the arguments"),
        ("StableLm", "StableLmAttention does not get the arguments"),
    ],
)
def test_what_only_running_a_model_tells(spec_of, tmp_path, caplog, family: str, reason: str):
    folder = str(tmp_path / family)
    saved_model(family, folder, initializer_range=0.4)
    with caplog.at_level(logging.WARNING):
        assert load_model(spec_of(model_path=folder)).config._attn_implementation == "arctic_varlen"
    assert reason in caplog.text
    with pytest.raises(ArcticError, match=f"{reason}.*use_zorro=false"):
        load_model(spec_of(model_path=folder, use_zorro=True))
    unchecked = load_model(spec_of(model_path=folder, use_zorro=True, zorro_self_check=False))
    assert unchecked.config._attn_implementation == "arctic_zorro"


@pytest.mark.parametrize("role", ["policy", "ref"])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_difference_that_16_bits_would_hide_is_seen_in_float32(spec_of, monkeypatch, caplog, role, zero_stage):
    to_rows = SharedRows.to_rows
    monkeypatch.setattr(SharedRows, "to_rows", lambda rows, values: to_rows(rows, values + 0.01))
    settings = {"dtype": "bfloat16", "role": role, "zero_stage": zero_stage}
    with pytest.raises(ArcticError, match=r"other log-probs .*torch.float32: by 0.01 nats .*use_zorro=false"):
        load_model(spec_of(use_zorro=True, **settings))
    with caplog.at_level(logging.WARNING):
        assert load_model(spec_of(**settings)).config._attn_implementation == "arctic_varlen"
    assert "torch.float32: by 0.01 nats" in caplog.text
    unchecked = load_model(spec_of(zorro_self_check=False, **settings))
    assert unchecked.config._attn_implementation == "arctic_zorro"


@pytest.mark.parametrize("use_zorro", [None, True, False])
@pytest.mark.parametrize("family", ["GPTJ", "Falcon"])
def test_a_model_with_a_table_of_attentions_is_refused_by_name(spec_of, tmp_path, family: str, use_zorro: bool | None):
    folder = str(tmp_path / family)
    saved_model(family, folder, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    with pytest.raises(UnsupportedError, match=r"trainer.policy.model.path=.*table of its own"):
        load_model(spec_of(model_path=folder, use_zorro=use_zorro))


def saved_model(family: str, folder: str, **settings) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | {"pad_token_id": 0, "bos_token_id": 1} | settings)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def test_a_model_whose_packed_rows_see_each_other_is_refused(spec_of, tmp_path):
    """Bloom takes any attention's name, and builds its mask from the tokens alone."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2, initializer_range=0.2)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    with pytest.raises(UnsupportedError, match=r"BloomForCausalLM lets packed rows see each other") as caught:
        load_model(spec_of(model_path=str(tmp_path / "bloom")))
    assert str(caught.value).startswith(f"trainer.policy.model.path={tmp_path}/bloom: rows are always packed here")
    assert "pack=False" not in str(caught.value), "a recipe cannot ask for it"


def test_a_bfloat16_reference_model_is_the_one_that_transformers_loads(tmp_path):
    """Its rotary frequencies stay float32, as the policy's do: rounded ones show at late positions."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=64))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                value.mul_(40)
    model.save_pretrained(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = InferenceEngine(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), "bfloat16")
    ids = torch.randint(0, SIZES["vocab_size"], (1, 600), generator=torch.Generator().manual_seed(0))

    def logits(of):
        with torch.no_grad():
            return of(input_ids=ids, use_cache=False).logits.float()

    expected = logits(theirs)
    assert {value.dtype for value in ours.module.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(ours), expected)
    theirs.model.rotary_emb.bfloat16()
    assert not torch.allclose(logits(theirs), expected, rtol=0.1), "rounded frequencies would be seen"
