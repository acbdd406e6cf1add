"""How a value model is loaded: its head, its weights, and what cannot be one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.value_loss import is_value_model
from integrations.arctic_rl.server.critic import load_value_model, value_model_class
from integrations.arctic_rl.server.engine import load_model
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.skyrl_critic import load_skyrls, value_model
from tests.arctic_rl.specs import training_spec

ATTENTION = "sdpa"
IDS = torch.tensor([[3, 5, 7, 9, 11]])


def spec(path, *, head="value_head", fresh=False, seed=3, **changes):
    values = {"role": "critic", "zero_stage": 2, "gradient_checkpointing": True, "seed": seed}
    values |= {"value_head": head, "fresh_value_head": fresh}
    return training_spec(path, **(values | changes))


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def plain(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(request.param).save_pretrained(folder)
    return folder


def test_a_head_that_is_not_there_is_drawn_from_the_seed(plain):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, again, other = (load_value_model(spec(plain, seed=seed), ATTENTION) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.value_head.weight, again.value_head.weight)
    assert not torch.equal(one.value_head.weight, other.value_head.weight)
    assert one.value_head.weight.std().item() == pytest.approx(one.config.initializer_range, rel=0.5)
    weights = load_file(plain / "model.safetensors")
    for name, value in one.named_parameters():
        assert name == "value_head.weight" or torch.equal(value, weights[name]), name


def test_a_fresh_head_is_as_small_as_skyrls(plain):
    fresh, drawn = (load_value_model(spec(plain, fresh=fresh), ATTENTION) for fresh in (True, False))
    hidden = fresh.config.hidden_size
    assert fresh.value_head.weight.shape == (1, hidden)
    assert fresh.value_head.weight.std().item() == pytest.approx(1 / (hidden + 1), rel=0.5)
    assert drawn.value_head.weight.std() > 2 * fresh.value_head.weight.std()


def test_a_head_in_the_folder_is_read_unless_it_is_to_be_fresh(tmp_path):
    model = value_model()
    model.save_pretrained(tmp_path)
    assert torch.equal(load_value_model(spec(tmp_path), ATTENTION).value_head.weight, model.value_head.weight)
    fresh = load_value_model(spec(tmp_path, fresh=True), ATTENTION)
    assert not torch.equal(fresh.value_head.weight, model.value_head.weight)
    with torch.no_grad():
        expected = load_skyrls(tmp_path)(IDS, 4, torch.ones_like(IDS))
        values = load_value_model(spec(tmp_path), ATTENTION).eval()(input_ids=IDS, use_cache=False).logits
    assert (values[:, :-1, 0] - expected).abs().max() < 1e-6


def test_the_heads_name_is_the_recipes(tmp_path):
    model = value_model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"] = weights.pop("value_head.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load_value_model(spec(tmp_path, head="score"), ATTENTION)
    assert torch.equal(loaded.score.weight, model.value_head.weight)
    assert loaded.value_head_prefix == "score"


@pytest.mark.parametrize("head", ["model", "forward", "value head", "config_class"])
def test_a_name_that_the_model_cannot_give_its_head_is_refused(plain, head):
    with pytest.raises(UnsupportedError, match=f"value_head_prefix='{head}'.*write value_head"):
        load_value_model(spec(plain, head=head), ATTENTION)


def test_missing_weights_are_refused_instead_of_drawn(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"it has no model\.layers\.1\.mlp\.up_proj\.weight"):
        load_value_model(spec(tmp_path), ATTENTION)


def test_values_of_its_config_are_those_of_the_recipe(plain):
    def values(model_config):
        torch.manual_seed(0)
        model = load_value_model(spec(plain, model_config=model_config), ATTENTION).eval()
        return model.config.rms_norm_eps, model(input_ids=IDS, use_cache=False).logits

    epsilon, changed = values({"rms_norm_eps": 0.5})
    assert epsilon == 0.5
    assert not torch.allclose(changed, values({})[1], atol=1e-3)
    with pytest.raises(UnsupportedError, match="has no such value"):
        values({"odd": 1})


def test_a_family_that_transformers_has_no_backbone_for_is_refused():
    class OddConfig:
        pass

    with pytest.raises(UnsupportedError, match="no backbone for OddConfig"):
        value_model_class(OddConfig, "value_head")


@pytest.mark.parametrize("use_zorro", [None, True, False])
def test_the_server_loads_it_as_it_loads_a_policy(plain, use_zorro):
    model = load_model(spec(plain, use_zorro=use_zorro))
    policy = load_model(spec(plain, role="policy", use_zorro=use_zorro))
    assert is_value_model(model) and not is_value_model(policy)
    assert model.config._attn_implementation == policy.config._attn_implementation
    assert model.is_gradient_checkpointing and not model.config.use_cache
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_a_model_whose_rows_see_each_other_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
    with pytest.raises(UnsupportedError):
        load_model(spec(tmp_path, use_zorro=True))
