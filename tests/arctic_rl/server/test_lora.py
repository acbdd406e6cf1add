"""Adapters in one process against ``peft``'s own model: initial values, merged weights, the base, what is refused."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from integrations.arctic_rl.errors import CheckpointError, UnsupportedError
from integrations.arctic_rl.processors.pipeline import run_pipeline
from integrations.arctic_rl.server.engine import build_optimizer, full_adapters, full_parameters, load_model
from integrations.arctic_rl.server.hf_export import export_model
from integrations.arctic_rl.server.lora import (
    EXPORT_FOLDER,
    adapter_facts,
    adapters_off,
    check_adapter_facts,
    check_rank,
    lora_layers,
    model_weights,
)
from integrations.arctic_rl.server.plain import from_plain
from integrations.arctic_rl.server.specs import INIT_METHODS, LoraSpec, OptimizerSpec, TrainingSpec
from integrations.arctic_rl.server.training_worker import TrainingWorker
from integrations.arctic_rl.server.weight_sync.sender import WeightSender
from integrations.arctic_rl.server.weights import compare_manifest, model_tensors, read_manifest
from integrations.arctic_rl.zorro.attention import SHARED_ATTENTION
from tests.arctic_rl import specs
from tests.arctic_rl.processors.helpers import FakeEngine, tiny_model
from tests.arctic_rl.skyrl_critic import load_skyrls
from tests.arctic_rl.skyrl_reference import action_log_probs, rollout_batch, with_adapters

SEED = 7
PLAIN = LoraSpec(
    rank=4, alpha=12, dropout=0.0, target_modules="all-linear", exclude_modules=None, init_method="kaiming"
)
OPTIMIZER = OptimizerSpec(1e-2, (0.9, 0.99), 0.1, 0.0, "constant", 0)


@pytest.fixture(scope="module", params=["tied", "untied"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / request.param
    tiny_model("qwen3" if request.param == "tied" else "llama").save_pretrained(folder)
    return str(folder)


def training_spec(path, **changes):
    lora = dataclasses.replace(PLAIN, **{name: changes.pop(name) for name in [*changes] if name in vars(PLAIN)})
    return specs.training_spec(path, **{"optimizer": OPTIMIZER, "seed": SEED, "lora": lora} | changes)


def adapted(path, *, moved=0.0, **changes):
    """A model with adapters, which noise of standard deviation ``moved`` then sets apart from their initial values."""
    model = load_model(training_spec(path, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and moved:
                parameter += torch.randn(parameter.shape, generator=generator) * moved
    return model


def peft_model(path, spec):
    from transformers import AutoModelForCausalLM

    return with_adapters(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"), spec, SEED)


def log_probs(model):
    batch = rollout_batch(6, 3)
    with torch.no_grad():
        model.eval()
        # The servers' attention gets no mask from transformers; the eager one does.
        model.set_attn_implementation("eager")
        return action_log_probs(model, batch, 1.0)[0][batch["response_mask"].bool()]


class TestAdapters:
    @pytest.mark.parametrize("init_method", INIT_METHODS)
    @pytest.mark.parametrize(
        "chosen",
        [
            {},
            {"target_modules": ("q_proj", "down_proj")},
            {"target_modules": r".*\.1\..*up_proj"},
            {"exclude_modules": ("k_proj", "layers.0.mlp.up_proj")},
        ],
        ids=["all-linear", "listed", "regular expression", "excluded"],
    )
    def test_are_those_of_skyrls_worker(self, path, init_method, chosen):
        spec = dataclasses.replace(PLAIN, init_method=init_method, **chosen)
        torch.manual_seed(99)
        before = torch.random.get_rng_state()
        ours = {
            n: p for n, p in adapted(path, init_method=init_method, **chosen).named_parameters() if p.requires_grad
        }
        assert torch.equal(torch.random.get_rng_state(), before), "random states stay as they are"
        theirs = {n: p for n, p in peft_model(path, spec).named_parameters() if p.requires_grad}
        assert [f"base_model.model.{name}" for name in ours] == list(theirs)
        for (name, value), expected in zip(ours.items(), theirs.values(), strict=True):
            assert value.dtype == torch.float32 and torch.equal(value, expected), name

    def test_the_model_begins_as_the_base_model(self, path):
        base = log_probs(load_model(training_spec(path, lora=None)))
        for init_method in INIT_METHODS:
            assert (log_probs(adapted(path, init_method=init_method)) - base).abs().max() < 2e-6

    def test_only_they_are_in_the_optimizer(self, path):
        model = adapted(path)
        (group,) = build_optimizer(model, OPTIMIZER).param_groups
        held = {id(parameter) for parameter in group["params"]}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in held]
        assert len(names) == len(held) == 2 * len(lora_layers(model)) == 2 * 14
        assert all(".lora_A." in name or ".lora_B." in name for name in names)

    def test_scale_and_dropout(self, path):
        model = adapted(path, dropout=0.25, alpha=10)
        for layer in lora_layers(model).values():
            assert layer.scaling["default"] == 2.5
            assert layer.lora_dropout["default"].p == 0.25

    def test_dropout_keeps_prompts_apart(self, path, caplog):
        assert adapted(path, use_zorro=None).config._attn_implementation == SHARED_ATTENTION
        model = adapted(path, use_zorro=None, dropout=0.1)
        assert model.config._attn_implementation != SHARED_ATTENTION
        assert "lora_dropout" in caplog.text and "p=0.1" in caplog.text
        with pytest.raises(UnsupportedError, match=r"cannot share prompts.*lora_dropout"):
            adapted(path, use_zorro=True, dropout=0.1)


class TestMergedWeights:
    def test_are_those_of_peft(self, path):
        model = adapted(path, moved=0.1)
        theirs = peft_model(path, PLAIN)
        theirs.load_state_dict({f"base_model.model.{n}": v for n, v in model.state_dict().items()})
        expected = dict(theirs.merge_and_unload().named_parameters())
        ours = dict(full_parameters(SimpleNamespace(module=model), 0))
        assert list(ours) == list(expected)
        for name, value in ours.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), name
        changed = {name for name, value in ours.items() if not torch.equal(value, expected_base(path)[name])}
        assert len(changed) == 14

    def test_give_the_log_probs_of_the_model(self, path, tmp_path):
        from transformers import AutoModelForCausalLM

        model = adapted(path, moved=0.1)
        export_model(SimpleNamespace(module=model), 0, path, tmp_path / "export", rank=0)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        base = log_probs(AutoModelForCausalLM.from_pretrained(path))
        ours = log_probs(model)
        assert (log_probs(merged) - ours).abs().max() < 1e-5
        assert (base - ours).abs().max() > 0.1
        assert not any("lora" in name for name in load_file(tmp_path / "export" / "model.safetensors"))

    def test_are_what_an_engine_expects(self, path, tmp_path):
        engine = SimpleNamespace(module=adapted(path, moved=0.1))
        manifest = read_manifest(WeightSender(engine, 0, 0).export(str(tmp_path), 1, "bfloat16"))
        assert compare_manifest(manifest, model_tensors(path)[0], "bfloat16") == []

    def test_of_a_bfloat16_model_are_summed_in_float32(self, path):
        model = adapted(path, moved=0.1).bfloat16()
        layers = lora_layers(model)
        for name, value in full_parameters(SimpleNamespace(module=model), 0):
            layer = layers.get(name.removesuffix(".weight"))
            if layer is None:
                assert value.dtype == torch.bfloat16
                continue
            a, b = (factor["default"].weight.float() for factor in (layer.lora_A, layer.lora_B))
            assert torch.equal(value, layer.base_layer.weight.float() + (b @ a) * 3.0)

    def test_of_layers_that_hold_their_weights_transposed(self):
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)
        model = get_peft_model(
            GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
        torch.nn.init.normal_(model.base_model.model.transformer.h[0].attn.c_attn.lora_B["default"].weight)
        ours = {weight.name: weight.value() for weight in model_weights(model.base_model.model)}
        expected = dict(model.merge_and_unload().named_parameters())
        assert ours.keys() == expected.keys()
        assert all(torch.allclose(ours[name], expected[name], rtol=0, atol=1e-6) for name in ours)


def expected_base(path):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


def test_adapters_of_an_export_are_a_folder_of_pefts(path, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(path, moved=0.1, exclude_modules=("v_proj",))
    export_model(SimpleNamespace(module=model), 0, path, tmp_path / "export", rank=0)
    base = AutoModelForCausalLM.from_pretrained(path)
    loaded = PeftModel.from_pretrained(base, tmp_path / "export" / EXPORT_FOLDER)
    assert (log_probs(loaded) - log_probs(model)).abs().max() < 1e-6
    config = json.loads((tmp_path / "export" / EXPORT_FOLDER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 12, path)
    written = load_file(tmp_path / "export" / EXPORT_FOLDER / "adapter_model.safetensors")
    ours = full_adapters(SimpleNamespace(module=model), 0)
    assert written.keys() == ours.keys() and all(torch.equal(written[name], ours[name]) for name in ours)


class TestBase:
    def test_without_adapters_the_model_is_the_base_model(self, path):
        model = adapted(path, moved=0.1)
        base, policy = log_probs(load_model(training_spec(path, lora=None))), log_probs(model)
        with adapters_off(model):
            assert torch.equal(log_probs(model), base)
        assert torch.equal(log_probs(model), policy) and not torch.equal(policy, base)
        assert all(layer.lora_A["default"].weight.requires_grad for layer in lora_layers(model).values())

    def test_adapters_are_back_after_an_error(self, path):
        model = adapted(path, moved=0.1)
        before = log_probs(model)
        with pytest.raises(KeyError), adapters_off(model):
            raise KeyError
        assert torch.equal(log_probs(model), before)

    def test_a_worker_runs_it_alone_when_asked_to(self, path):
        spec = training_spec(path)
        worker = TrainingWorker.__new__(TrainingWorker)
        worker._spec, worker._engine, worker._asleep = spec, FakeEngine(adapted(path, moved=0.1)), set()
        ids = torch.arange(12).view(2, 6) + 1
        ones = torch.ones_like(ids)
        batch = {"input_ids": ids, "attention_mask": ones, "prompts": ids[:, :3], "responses": ids[:, 3:]}
        meta = {"pad_token_id": 0, "temperature": 0.7, "zorro_train_enable": False}
        processing = {"post": ["compute_logprobs"], "config": {}}

        def of(engine):
            return run_pipeline(engine, (), batch, meta, processing, "cpu", backward=False, max_tokens_per_mb=6)

        base_only, policy = (
            worker.run(batch, meta, processing, backward=False, max_tokens_per_mb=6, base_only=base_only)
            for base_only in (True, False)
        )
        expected = torch.as_tensor(of(FakeEngine(load_model(training_spec(path, lora=None))))["batch"]["logprobs"])
        assert torch.equal(base_only["batch"]["logprobs"], expected)
        assert (policy["batch"]["logprobs"] - expected).abs().max() > 1e-3


REFUSED = {
    "nothing of that name": (
        {"target_modules": ("q_proj", "linear_qkv")},
        "target_modules=.*has no 'linear_qkv'.*up_",
    ),
    "nothing excluded": ({"exclude_modules": ("q_porj",)}, r"exclude_modules=\['q_porj'\].*has no 'q_porj'"),
    "a name where a pattern is expected": ({"target_modules": "q_proj"}, "target_modules=q_proj .*all-linear"),
    "everything excluded": (
        {"target_modules": ("q_proj",), "exclude_modules": ("self_attn.q_proj",)},
        "target_modules=.*No modules",
    ),
    "no linear layer": (
        {"target_modules": ("embed_tokens",)},
        "target_modules=.* no linear layer .Embedding.*exclude_modules",
    ),
}


class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_layers_that_cannot_have_an_adapter(self, path, case):
        changes, words = REFUSED[case]
        with pytest.raises(UnsupportedError, match=rf"trainer\.policy\.model\.lora\.{words}"):
            adapted(path, **changes)

    def test_a_tied_head(self, path):
        if "untied" in path:
            model = adapted(path, target_modules=("lm_head",), moved=0.1)
            assert [weight.name for weight in model_weights(model) if weight.scaling] == ["lm_head.weight"]
            return
        with pytest.raises(UnsupportedError, match=r"names lm_head, whose weight is another layer's too .*untie"):
            adapted(path, target_modules=("lm_head",))


class TestCritic:
    CHOSEN = ({}, {"target_modules": ("q_proj", "up_proj"), "exclude_modules": ("layers.0.mlp.up_proj",)})

    @pytest.fixture(params=CHOSEN, ids=["all-linear", "listed"])
    def pair(self, path, request):
        """Ours, and SkyRL's critic with the same adapters and value head."""
        spec = dataclasses.replace(PLAIN, setting="trainer.critic.model.lora", causal_lm=False, **request.param)
        ours = load_model(
            training_spec(path, role="critic", value_head="value_head", fresh_value_head=True, lora=spec)
        )
        generator = torch.Generator().manual_seed(1)
        theirs = load_skyrls(
            path,
            lora_rank=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=spec.target_modules,
            exclude_modules=spec.exclude_modules,
        )
        with torch.no_grad():
            for parameter in ours.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=generator) * 0.1
        state = {f"base_model.model.{name}": value for name, value in ours.state_dict().items()}
        assert state.keys() == theirs.state_dict().keys()
        theirs.load_state_dict(state)
        return ours, theirs

    def test_trains_what_skyrls_does(self, pair):
        ours, theirs = ({n for n, p in model.named_parameters() if p.requires_grad} for model in pair)
        assert {f"base_model.model.{name}" for name in ours} == theirs
        everywhere = len(theirs) == 2 * 15
        assert everywhere == ("value_head.lora_A.default.weight" in ours)

    def test_values_and_gradients_are_skyrls(self, pair):
        ours, theirs = pair
        ours.set_attn_implementation("sdpa")
        batch = rollout_batch(6, 3)
        mask, width = batch["attention_mask"], batch.metadata["response_length"]
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
        values = ours(batch["sequences"], attention_mask=mask, position_ids=positions, use_cache=False).logits[..., 0]
        expected = theirs(batch["sequences"], width, mask)
        response = batch["response_mask"].bool()
        ours_of, expected_of = values[:, -width - 1 : -1][response], expected[response]
        assert (ours_of - expected_of).abs().max() < 1e-5
        for of_tokens in (ours_of, expected_of):
            (of_tokens - 1).square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        for name, parameter in ours.named_parameters():
            gradient = gradients[f"base_model.model.{name}"]
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm() and gradient.any(), name

    def test_is_exported_whole(self, pair, path, tmp_path):
        ours, _ = pair
        export_model(SimpleNamespace(module=ours), 0, path, tmp_path / "export", rank=0)
        spec = training_spec(str(tmp_path / "export"), role="critic", value_head="value_head", lora=None)
        exported, batch = load_model(spec), rollout_batch(1, 3)
        ids = batch["sequences"][:, batch["attention_mask"][0].bool()]
        for model in (ours, exported):
            model.eval().set_attn_implementation("sdpa")
        with torch.no_grad():
            one, other = (model(ids, use_cache=False).logits for model in (ours, exported))
        assert (one - other).abs().max() < 1e-5 and one.std() > 1e-2
        assert not (tmp_path / "export" / EXPORT_FOLDER).exists()


@pytest.mark.parametrize("lora", [None, PLAIN, dataclasses.replace(PLAIN, target_modules=("q_proj", "o_proj"))])
def test_they_survive_being_told_in_json(path, lora):
    spec = training_spec(path, lora=lora)
    assert from_plain(TrainingSpec, json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


class TestFacts:
    def test_another_alpha_or_base_is_told(self, path):
        model = adapted(path, moved=0.1)
        saved = json.loads(json.dumps(adapter_facts(model, PLAIN)))
        check_adapter_facts("here", saved, adapter_facts(adapted(path), PLAIN), PLAIN.setting)
        now = adapter_facts(model, dataclasses.replace(PLAIN, alpha=16))
        with pytest.raises(CheckpointError, match=r"trainer\.policy\.model\.lora\.alpha=16: .*with 12, .*write that"):
            check_adapter_facts("here", saved, now, PLAIN.setting)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.base_layer.weight[3, 5] += 1e-6
        with pytest.raises(CheckpointError, match=r"trainer\.policy\.model\.path: .*other weights; name that model"):
            check_adapter_facts("here", saved, adapter_facts(model, PLAIN), PLAIN.setting)

    def test_another_rank_is_told_and_so_are_adapters_where_there_were_none(self, path):
        def shares(model):
            pieces = [{"name": name, "shape": list(value.shape)} for name, value in model.named_parameters()]
            return [{"pieces": []}, {"pieces": [piece for piece in pieces if not piece["name"].startswith("lm_head")]}]

        adapters, plain = shares(adapted(path)), shares(load_model(training_spec(path, lora=None)))
        rank = PLAIN.rank
        check_rank("here", adapters, PLAIN, "policy")
        check_rank("here", plain, None, "policy")
        for held, spec, role, said in (
            (
                adapters,
                None,
                "critic",
                rf"trainer\.critic\.model\.lora\.rank=0: .*of rank {rank} alone; write {rank}",
            ),
            (plain, PLAIN, "policy", rf"trainer\.policy\.model\.lora\.rank={rank}: .*all weights.*; write 0,"),
            (adapters, dataclasses.replace(PLAIN, rank=rank + 1), "policy", rf"rank={rank + 1}: .*; write {rank},"),
        ):
            with pytest.raises(CheckpointError, match=said):
                check_rank("here", held, spec, role)
