"""The first use of a model compares both ways, once, and stops where they differ."""

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.processors.attention import varlen_kwargs
from integrations.arctic_rl.zorro.layout import SharedRows
from integrations.arctic_rl.zorro.self_check import check_once
from tests.arctic_rl.zorro.families import FAMILIES, VOCAB, family_model


def logprobs_of(model, *, with_segments: bool = True):
    """log-probs [b, S] of laid-out rows, without the pipeline."""
    calls = []

    @torch.no_grad()
    def logprobs(rows) -> torch.Tensor:
        calls.append(type(rows).__name__)
        inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "use_cache": False}
        if isinstance(rows, SharedRows):
            layout = {"shared_segments": rows.segments} if with_segments else {}
            logits = model(**inputs, **layout).logits[0, rows.predictors]
            return rows.to_rows(logits.float().log_softmax(-1).gather(1, rows.targets[:, None]).squeeze(1))
        logits = model(**inputs, **varlen_kwargs(rows.cu_seqlens, rows.max_length)).logits[0, :-1]
        values = logits.float().log_softmax(-1).gather(1, rows.input_ids[0, 1:, None]).squeeze(1)
        return rows.unpack(torch.cat([values.new_zeros(1), values]))

    return logprobs, calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_models_pass_once(family: str, dtype: torch.dtype):
    model = family_model(family)
    logprobs, calls = logprobs_of(model.to(dtype))
    difference = check_once(model, logprobs, VOCAB, torch.device("cpu"))
    assert difference <= (1e-5 if dtype == torch.float32 else 0.05)
    assert calls == ["SharedRows", "PackedRows"]
    assert check_once(model, logprobs, VOCAB, torch.device("cpu")) is None
    assert len(calls) == 2
    other = family_model("llama")
    assert check_once(other, logprobs_of(other)[0], VOCAB, torch.device("cpu")) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_drops_the_layout_is_stopped_every_time(dtype: torch.dtype):
    """As one would whose layers do not hand extra arguments down to the attention."""
    model = family_model("qwen3", initializer_range=0.4).to(dtype)
    logprobs, _ = logprobs_of(model, with_segments=False)
    for _ in range(2):
        with pytest.raises(ArcticError, match=r"Qwen3ForCausalLM gives other log-probs.*use_zorro=false"):
            check_once(model, logprobs, VOCAB, torch.device("cpu"))


@pytest.mark.parametrize(("spread", "off", "passes"), [(3.0, 0.2, True), (3.0, 0.5, False), (0.5, 0.2, False)])
def test_in_16_bits_a_difference_is_held_against_the_spread_of_log_probs(spread, off, passes):
    model = family_model("llama").bfloat16()

    def logprobs(rows):
        values = spread * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)) - 15
        return values + off if isinstance(rows, SharedRows) else values

    if passes:
        assert check_once(model, logprobs, VOCAB, torch.device("cpu")) == pytest.approx(off)
        return
    with pytest.raises(ArcticError, match="gives other log-probs"):
        check_once(model, logprobs, VOCAB, torch.device("cpu"))
