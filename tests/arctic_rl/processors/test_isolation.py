"""Models that mix packed rows are refused at their first use, whatever they say about themselves; others are not."""

import gc
import weakref

import pytest
import torch
import transformers
from torch import nn

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors import isolation
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.helpers import (
    FakeEngine,
    ragged_batch,
    tiny_model,
)

VOCAB = 64
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "opt": ("OPTConfig", PLAIN | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "biogpt": ("BioGptConfig", PLAIN),
    "openai-gpt": ("OpenAIGPTConfig", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2}),
    "gpt-oss": ("GptOssConfig", PLAIN | EXPERTS | {"num_local_experts": 4, "head_dim": 8}),
    "qwen3": ("Qwen3Config", PLAIN | {"head_dim": 8}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", PLAIN | EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "mixtral": ("MixtralConfig", PLAIN | {"num_local_experts": 4}),
}


def build(name: str, attention: str, **changes) -> nn.Module:
    if attention == "arctic_varlen":
        attention_implementation("cpu")
    config, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, 0.15)
    return model


def batch_of(lengths: list[int], seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths) + 1), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()}


def logprobs(model, batch: dict, **kwargs) -> torch.Tensor:
    engine = model if isinstance(model, FakeEngine) else FakeEngine(model)
    meta = {"temperature": 1.0} | kwargs.pop("meta", {})
    arguments = {"backward": False, "return_tensors": True} | kwargs
    return run_pipeline(engine, (), batch, meta, {"post": ["compute_logprobs"]}, "cpu", **arguments)["batch"][
        "logprobs"
    ]


def alone(model, batch: dict) -> torch.Tensor:
    """Every row by itself, by transformers alone, in float32: grouped matrix products have no float64."""
    result = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, :-1].detach()
        result[row, 1:length] = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return result


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("bloom", "eager", "lets packed rows see each other.*this family cannot be packed: pass pack=False"),
        ("opt", "eager", "lets packed rows see each other"),
        ("opt", "sdpa", "lets packed rows see each other"),
        ("biogpt", "sdpa", "lets packed rows see each other with attn_implementation='sdpa'.*pass pack=False"),
        ("openai-gpt", "eager", "lets packed rows see each other"),
        ("mpt", "eager", "lets packed rows see each other"),
        ("gpt-oss", "eager", "lets packed rows see each other"),
        ("opt", "arctic_varlen", "that the model made itself.*pass pack=False"),
        ("biogpt", "arctic_varlen", "that the model made itself.*pass pack=False"),
    ],
)
def test_models_that_mix_packed_rows_are_refused(name: str, attention: str, message: str):
    model = build(name, attention)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=message):
            logprobs(model, batch_of([5, 8]))


@pytest.mark.parametrize("name", ["bloom", "opt", "gpt-oss"])
def test_they_go_on_working_with_pack_false(name: str):
    model, batch = build(name, "eager"), batch_of([5, 8])
    assert torch.allclose(logprobs(model, batch, pack=False), alone(model, batch), atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "arctic_varlen"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_keep_rows_apart_are_packed(name: str, attention: str, dtype: torch.dtype):
    """To the bit, as promised."""
    model, batch = build(name, attention).to(dtype), batch_of([5, 8, 3])
    before = logprobs(model, batch)
    batch["input_ids"][1] = batch["input_ids"][1].flip(0)
    after = logprobs(model, batch)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "arctic_varlen"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_are_packed_and_exact_up_to_rounding(name: str, attention: str):
    model, batch = build(name, attention), batch_of([5, 8, 3])
    before = logprobs(model, batch)
    assert torch.allclose(before, alone(model, batch), atol=1e-5)
    batch["input_ids"][1] = batch["input_ids"][1].flip(0)
    assert torch.allclose(logprobs(model, batch)[[0, 2]], before[[0, 2]], rtol=0, atol=2e-6)


class Table(nn.Module):
    """Logits of a token alone, plus what ``mixing`` takes from the whole packed row."""

    def __init__(self, mixing=None, vocab: int = VOCAB):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocab, vocab))
        self.mixing = mixing
        self.forwards = 0

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        self.forwards += 1
        logits = self.table[input_ids]
        return logits if self.mixing is None else logits + self.mixing(logits, position_ids)


def running_mean(logits, _positions):
    return logits.cumsum(1) / torch.arange(1, logits.shape[1] + 1)[None, :, None]


def from_behind(logits, _positions):
    return 0.1 * logits.flip(1).cumsum(1).flip(1)


def one_bit(logits, _positions):
    return 1e-6 * logits.sum(dim=1, keepdim=True)


def own_positions(logits, _positions):
    return torch.arange(logits.shape[1])[None, :, None].sin()


def given_positions(logits, positions):
    return positions[..., None].sin().expand_as(logits)


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (running_mean, "Table lets packed rows see each other: changing one row"),
        (from_behind, "lets packed rows see each other"),
        (one_bit, "lets packed rows see each other"),
        (
            own_positions,
            "gives a packed row other logits than the same row alone.*restarting position_ids.*pack=False",
        ),
    ],
)
def test_models_from_elsewhere_are_looked_into_as_well(mixing, message: str):
    model = Table(mixing)
    with pytest.raises(UnsupportedError, match=message):
        logprobs(model, batch_of([5, 8]))
    assert logprobs(model, batch_of([5, 8]), pack=False).isfinite().all()


@pytest.mark.parametrize("vocab", [VOCAB, 2])
@pytest.mark.parametrize("mixing", [None, given_positions])
def test_a_table_is_packed(mixing, vocab: int):
    batch = batch_of([5, 8])
    batch["input_ids"] %= vocab
    model = Table(mixing, vocab)
    assert torch.allclose(logprobs(model, batch), logprobs(model, batch, pack=False), atol=1e-6)


def test_masked_vocabulary_is_no_difference():
    model = Table()
    with torch.no_grad():
        model.table[:, :3] = -torch.inf
    assert logprobs(model, batch_of([5, 8])).isfinite().all()


def test_it_is_done_once_for_a_model_and_an_attention():
    table = Table()
    engine = FakeEngine(table)
    logprobs(engine, batch_of([5, 8]))
    assert (table.forwards, len(engine.forward_shapes)) == (4, 1)
    logprobs(engine, batch_of([5, 8]))
    assert (table.forwards, len(engine.forward_shapes)) == (5, 2)
    model = build("biogpt", "eager")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="'sdpa'"):
        logprobs(model, batch_of([5, 8]))
    model = build("qwen3", "sdpa")
    logprobs(model, batch_of([5, 8]))
    assert isolation._CHECKED[model] == {("packed", "sdpa"), ("head", "sdpa")}


def test_it_leaves_no_trace():
    model = build("gpt2", "eager", resid_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()
    modes = [part.training for part in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    isolation.check_packing(model, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_an_engine_that_is_a_module_is_run_itself():
    """As DeepSpeed's, whose forward gathers what the module lacks."""

    class Engine(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Table()
            self.shift = 1

        def forward(self, input_ids, **inputs):
            return self.module(input_ids=input_ids % VOCAB, **inputs) * self.shift

    engine = Engine()
    run_pipeline(
        engine, (), batch_of([5, 8]), {"temperature": 1.0}, {"post": ["compute_logprobs"]}, "cpu", backward=False
    )
    assert engine.module.forwards == 4


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rows_past_the_length_that_a_model_is_exact_for_are_refused(kind: str, pack: bool):
    attention = attention_implementation("cpu")
    if kind == "longrope":
        rope = LONG | {"original_max_position_embeddings": 16, "factor": 4.0}
        config = transformers.Phi3Config(
            **PLAIN,
            rope_parameters=rope,
            original_max_position_embeddings=16,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        config = transformers.LlamaConfig(**PLAIN, rope_parameters=rope, max_position_embeddings=16)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    together = logprobs(model, batch_of([6, 16, 8]), pack=pack)
    batch = batch_of([6, 16, 8])
    alone = {name: value[:1] for name, value in batch.items()}
    assert torch.allclose(logprobs(model, alone, pack=pack), together[:1], atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"row 1 has 17 tokens, and beyond 16 .*at most 16 tokens"):
        logprobs(model, batch_of([6, 17, 8]), pack=pack)


def test_padded_rows_take_one_pass_in_mode_memory_alone():
    table = Table()
    logprobs(table, batch_of([5, 8]), pack=False)
    assert table.forwards == 1
    model = ChangedLogits(lambda logits: logits)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(model.training))
    for _ in range(2):
        logprobs(model, batch_of([5, 8]), pack=False, meta={"logits_optimization": "memory"})
    assert len(calls) == 3


class ChangedLogits(nn.Module):
    """A linear LM head, and something done to its logits."""

    def __init__(self, change, *, only_training: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)
        self.change = change
        self.only_training = only_training

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        logits = self.head(self.embedding(input_ids))
        return self.change(logits) if self.training or not self.only_training else logits


def divide_in_place(logits):
    logits /= 4
    return logits


def mask_in_place(logits):
    logits[..., 40:] = -1e9
    return logits


CHANGES = {
    "scaled": lambda logits: logits / 4,
    "scaled in place": divide_in_place,
    "masked in place": mask_in_place,
    "sliced": lambda logits: logits[..., :40],
    "rolled": lambda logits: logits.roll(1, dims=-1),
}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_logits_changed_after_the_head_are_not_read_there(change: str, pack: bool):
    model = ChangedLogits(CHANGES[change])
    batch = batch_of([5, 8])
    batch["input_ids"] %= 40
    for meta in ({}, {"logits_optimization": "memory"}):
        with pytest.raises(UnsupportedError, match=r"ChangedLogits changes its logits after the LM head.*'compute'"):
            logprobs(model, batch, pack=pack, meta=meta)
    values = [
        logprobs(model, batch, pack=pack, meta={"logits_optimization": mode}).double() for mode in ("compute", "none")
    ]
    expected = torch.log_softmax(model(batch["input_ids"]).double().detach(), dim=-1)
    for row, length in enumerate((5, 8)):
        ids = batch["input_ids"][row, 1:length, None]
        for value in values:
            assert torch.allclose(value[row, 1:length], expected[row, : length - 1].gather(1, ids)[:, 0], atol=1e-5)


@pytest.mark.parametrize("change", ["scaled", "scaled in place"])
def test_logits_changed_in_training_only_are_not_read_either(change: str):
    model, batch = ChangedLogits(CHANGES[change], only_training=True), batch_of([5, 8])
    logprobs(model, batch)
    batch["loss_mask"] = batch["attention_mask"].float()
    with pytest.raises(UnsupportedError, match="changes its logits after the LM head"):
        run_pipeline(FakeEngine(model), (), batch, {"temperature": 1.0}, {"loss_fn": "sft"}, "cpu")


def test_logits_that_are_only_upcast_are_read_at_the_head():
    model, batch = ChangedLogits(lambda logits: logits.float()), batch_of([5, 8])
    memory, full = (logprobs(model, batch, meta={"logits_optimization": mode}) for mode in ("memory", "none"))
    assert torch.allclose(memory, full, atol=1e-5)


def test_our_models_pass():
    for kind in ("qwen3", "llama"):
        logprobs(tiny_model(kind), ragged_batch(4, 0))
