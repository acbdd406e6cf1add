"""Which models can be packed and read in which logits mode, and how the rest is refused."""

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors.logprobs import chunk_rows
from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.helpers import (
    FakeEngine,
    gradients,
    ragged_batch,
    reference_logprobs,
    reference_model,
    tiny_model,
)


def logprobs(model, meta=None, **kwargs) -> torch.Tensor:
    arguments = {"backward": False, "return_tensors": True, "max_tokens_per_mb": 40} | kwargs
    processing = {"post": ["compute_logprobs"]}
    meta = {"temperature": 1.0} | (meta or {})
    return run_pipeline(FakeEngine(model), (), ragged_batch(5, 3), meta, processing, "cpu", **arguments)["batch"][
        "logprobs"
    ]


class NoPositions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(128, 128))

    def forward(self, input_ids, attention_mask=None):
        return self.table[input_ids]


def test_a_model_that_takes_no_positions_is_not_packed():
    with pytest.raises(UnsupportedError, match=r"NoPositions\.forward takes no position_ids.*pass pack=False"):
        logprobs(NoPositions())
    assert logprobs(NoPositions(), pack=False).abs().sum() > 0


def test_an_attention_without_masks_is_not_packed():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("maskless_attention", sdpa_attention_forward)
    model = tiny_model("qwen3", "maskless_attention")
    with pytest.raises(UnsupportedError, match="attn_implementation='maskless_attention' gets no mask"):
        logprobs(model)


def test_models_that_mix_rows_are_not_packed():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedError, match="layers of type linear_attention, which mix packed rows"):
        logprobs(model)
    model = tiny_model("qwen3")
    model._is_stateful = True
    with pytest.raises(UnsupportedError, match="a recurrent state"):
        logprobs(model)
    model = tiny_model("qwen3", "arctic_varlen")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedError, match="chunked_attention, whose chunks 'arctic_varlen' does not mask"):
        logprobs(model)


class Capped(torch.nn.Module):
    """A model that caps its logits after the LM head."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, input_ids, **kwargs):
        return (torch.tanh(self.inner(input_ids=input_ids, **kwargs).logits / 3) * 3,)


def test_logits_changed_after_the_head_are_read_in_mode_compute_only():
    model = Capped(tiny_model("qwen3"))
    with pytest.raises(UnsupportedError, match="changes its logits after the LM head"):
        logprobs(model)
    values = [logprobs(model, {"logits_optimization": mode}) for mode in ("compute", "none")]
    assert torch.allclose(*values, atol=1e-6)
    assert not torch.allclose(values[0], logprobs(model.inner), atol=1e-2)


def test_modes_that_need_a_head_are_refused_without_one():
    model = NoPositions()
    for meta in ({"logits_optimization": "memory"}, {"logits_compute_from_fp32_inputs": True}):
        with pytest.raises(UnsupportedError, match="needs a model with a plain linear LM head, NoPositions has none"):
            logprobs(model, meta, pack=False)
    assert torch.equal(logprobs(model, pack=False), logprobs(model, {"logits_optimization": "compute"}, pack=False))


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_the_head_is_left_as_it_was(mode: str):
    model = tiny_model("qwen3")
    ids = torch.arange(6)[None]
    before = model(input_ids=ids, use_cache=False).logits
    logprobs(model, {"logits_optimization": mode})
    assert "forward" not in vars(model.lm_head)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)

    def fail(*_: object, **__: object):
        raise RuntimeError("in the middle")

    broken = tiny_model("qwen3")
    broken.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        logprobs(broken, {"logits_optimization": mode})
    assert "forward" not in vars(broken.lm_head)


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_bf16_models_give_float32_logprobs(mode: str):
    model = tiny_model("qwen3").bfloat16()
    with torch.no_grad():
        exact, _ = reference_logprobs(reference_model(model), ragged_batch(5, 3))
    errors = {}
    for upcast in (True, False):
        values = logprobs(model, {"logits_optimization": mode, "logits_compute_in_fp32": upcast})
        assert values.dtype == (torch.float32 if upcast else torch.bfloat16)
        errors[upcast] = (values - exact).abs().mean().item()
    fp32_inputs = logprobs(model, {"logits_optimization": mode, "logits_compute_from_fp32_inputs": True})
    errors["inputs"] = (fp32_inputs - exact).abs().mean().item()
    assert errors[True] < 0.05
    assert errors[False] > errors[True]
    assert fp32_inputs.dtype == torch.float32
    assert not torch.equal(fp32_inputs, logprobs(model, {"logits_optimization": mode}))


def test_the_memory_budget_sets_the_chunks():
    """The smallest budget gives chunks of one token, and the same numbers."""
    model = tiny_model("qwen3")
    size = 1e-9
    assert chunk_rows(128, size) == 1
    batch = ragged_batch(5, 3)
    results = []
    for meta in ({"logits_optimization_peak_mem_size_in_gib": size}, {}):
        for mode in ("compute", "memory"):
            model.zero_grad()
            meta = {"temperature": 1.0, "logits_optimization": mode} | meta
            out = run_pipeline(FakeEngine(model), (), batch, meta, {"loss_fn": "grpo"}, "cpu")
            results.append((out["avg_loss"], gradients(model)))
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for name, value in results[0][1].items():
            assert (gradient[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("result", [None, 3, {}, {"logits": torch.zeros(2, 3)}, torch.zeros(1, 2, 3)])
def test_results_without_logits_are_refused(result):
    class Returns(torch.nn.Module):
        def forward(self, **_: object):
            return result

    with pytest.raises(ValueError, match="logits"):
        logprobs(Returns())
