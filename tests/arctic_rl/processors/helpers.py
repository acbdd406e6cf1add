"""Tiny models, a fake engine, random ragged batches, and a padded float64 reference written without our code."""

import copy

import torch
from torch.nn.functional import log_softmax

VOCAB = 128


class FakeEngine:
    """Called like a DeepSpeed engine; ``backward`` divides by an accumulation setting unless told not to."""

    def __init__(self, module: torch.nn.Module, gradient_accumulation_steps: int = 7):
        self.module = module
        self.gas = gradient_accumulation_steps
        self.backward_calls = 0
        self.forward_shapes: list[tuple[int, ...]] = []

    def __call__(self, *args, **inputs):
        self.forward_shapes.append(tuple(inputs["input_ids"].shape))
        return self.module(*args, **inputs)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        self.backward_calls += 1
        (loss / self.gas if scale_wrt_gas else loss).backward()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


def tiny_model(kind: str = "qwen3", attention: str | None = None, seed: int = 0, **changes) -> torch.nn.Module:
    """A random 2-layer model, float32, grouped-query attention."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    from integrations.arctic_rl.processors.attention import attention_implementation

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": kind == "qwen3",
    } | changes
    config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**settings)
    implementation = attention_implementation("cpu") if attention is None else attention
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def reference_model(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in float64, with transformers' eager attention."""
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    return twin.eval()


def ragged_batch(
    num_rows: int,
    seed: int,
    *,
    side: str = "both",
    max_prompt: int = 9,
    max_response: int = 9,
    holes: bool = True,
    response_width: bool = True,
) -> dict:
    """Random rows with pads left of the prompt and right of the response ("both"), or on one side only.

    With one side only there is no common prompt width, so the response tensors are [B, S].
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int) -> list[int]:
        return torch.randint(1, high + 1, (num_rows,), generator=generator).tolist()

    prompt_lens, response_lens = integers(max_prompt), integers(max_response)
    response_lens[0] = 1
    prompt_width, response_len = max(prompt_lens) + 1, max(response_lens) + 1
    width = prompt_width + response_len
    ids = torch.randint(0, VOCAB, (num_rows, width), generator=generator)
    attention_mask = torch.zeros(num_rows, width, dtype=torch.int64)
    response_mask = torch.zeros(num_rows, width, dtype=torch.int64)
    for i, (p, r) in enumerate(zip(prompt_lens, response_lens, strict=True)):
        start = {"both": prompt_width - p, "left": width - p - r, "right": 0}[side]
        attention_mask[i, start : start + p + r] = 1
        response_mask[i, start + p : start + p + r] = 1
    loss_mask = response_mask.float()
    if holes:
        loss_mask *= torch.randint(0, 4, loss_mask.shape, generator=generator) > 0

    def values(scale: float) -> torch.Tensor:
        return torch.randn(num_rows, width, generator=generator) * scale

    batch = {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "loss_mask": loss_mask,
        "advantages": values(1.0),
        "old_log_probs": -values(1.0).abs() - 4,
        "ref_log_prob": -values(1.0).abs() - 4,
        "rollout_is_weights": values(0.3).exp(),
    }
    if side == "both" and response_width:
        for name in (
            "response_mask",
            "loss_mask",
            "advantages",
            "old_log_probs",
            "ref_log_prob",
            "rollout_is_weights",
        ):
            batch[name] = batch[name][:, prompt_width:].contiguous()
        batch["prompts"] = ids[:, :prompt_width]
        batch["responses"] = ids[:, prompt_width:]
    return batch


def wide(batch: dict, name: str) -> torch.Tensor:
    """A response tensor at [B, S], float64."""
    values = batch[name].double()
    missing = batch["input_ids"].shape[1] - values.shape[1]
    return torch.cat([values.new_zeros(len(values), missing), values], dim=1)


def reference_logprobs(
    model: torch.nn.Module, batch: dict, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probs and entropy [B, S] of a float64 model, row by row without padding; 0 where nothing predicts."""
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    logprobs, entropy = [], []
    for row, kept in zip(ids, mask, strict=True):
        line, line_entropy = torch.zeros(2, len(row), dtype=torch.float64)
        places = kept.nonzero().squeeze(1)
        if len(places) > 1:
            tokens = row[places]
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature
            logp = log_softmax(logits, dim=-1)
            line = line.index_put((places[1:],), logp.gather(1, tokens[1:, None]).squeeze(1))
            line_entropy = line_entropy.index_put((places[1:],), -(logp.exp() * logp).sum(-1))
        logprobs.append(line)
        entropy.append(line_entropy)
    return torch.stack(logprobs), torch.stack(entropy)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_agree(model: torch.nn.Module, reference: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """Every tensor's gradient within ``tolerance`` of the reference's norm."""
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = max(float(expected.norm()), 1e-12)
        assert float((ours[name] - expected).norm()) <= tolerance * scale, name
