"""Tiny random models of every family that prompt sharing is tested for, and groups of rollouts for them."""

import copy

import torch

VOCAB = 128

FAMILIES = {
    "qwen3": ("Qwen3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-windowed": ("MistralConfig", {"sliding_window": 10}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 14, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def family_model(family: str, attention: str | None = None, seed: int = 0, **changes) -> torch.nn.Module:
    """:func:`random_model` of a family."""
    name, settings = FAMILIES[family]
    return random_model(name, settings | changes, attention, seed)


def random_model(config_name: str, settings: dict, attention: str | None = None, seed: int = 0) -> torch.nn.Module:
    """Two layers, float32, grouped-query attention, on the attention that shares prompts unless told otherwise."""
    import transformers

    from integrations.arctic_rl.zorro.attention import register_shared_attention

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**common | settings)
    implementation = register_shared_attention() if attention is None else attention
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def reference_of(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in float64 with transformers' own eager attention and eager experts."""
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    if twin._can_set_experts_implementation():
        twin.set_experts_implementation("eager")
    return twin.eval()


def rollouts(
    counts: list[int], seed: int, *, max_prompt: int = 20, max_response: int = 12, side: str = "both"
) -> dict:
    """Shuffled rows of ``len(counts)`` prompts with that many responses each.

    The first prompt has one token, some responses one token, the last row is a copy of another, and two responses of
    the last prompt begin with the same tokens. Pads stand on both sides of a row, or on one.

    Returns:
        input_ids, attention_mask [B, S]; prompts [B, P] with side "both"; prompt_lengths [B].
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (length,), generator=generator)

    def length(longest: int) -> int:
        return int(torch.randint(1, longest + 1, (), generator=generator))

    rows = []
    for number, count in enumerate(counts):
        prompt = tokens(1 if number == 0 else length(max_prompt))
        responses = [tokens(1 if place == 0 else length(max_response)) for place in range(count)]
        if number == len(counts) - 1 and count > 2:
            responses[2] = torch.cat([responses[1][:3], responses[2]])
        rows += [(prompt, response) for response in responses]
    rows.append(rows[1])
    rows = [rows[place] for place in torch.randperm(len(rows), generator=generator)]
    prompt_width = max(len(prompt) for prompt, _ in rows) + 1
    width = prompt_width + max(len(response) for _, response in rows) + 1
    ids = torch.randint(0, VOCAB, (len(rows), width), generator=generator)
    mask = torch.zeros_like(ids)
    for number, (prompt, response) in enumerate(rows):
        total = len(prompt) + len(response)
        start = {"both": prompt_width - len(prompt), "left": width - total, "right": 0}[side]
        ids[number, start : start + total] = torch.cat([prompt, response])
        mask[number, start : start + total] = 1
    batch = {"input_ids": ids, "attention_mask": mask, "prompt_lengths": torch.tensor([len(p) for p, _ in rows])}
    return batch | ({"prompts": ids[:, :prompt_width]} if side == "both" else {})


def response_mask_of(batch: dict) -> torch.Tensor:
    """[B, S] bool: the tokens after each row's prompt."""
    mask = batch["attention_mask"].bool()
    return mask & (mask.long().cumsum(1) > batch["prompt_lengths"][:, None])


def row_logprobs(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """log-probs [B, S] row by row, each alone and without padding; 0 at first tokens and outside the rows."""
    lines = []
    for ids, kept in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        line = torch.zeros(len(ids), dtype=torch.float64)
        places = kept.nonzero().squeeze(1)
        if len(places) > 1:
            tokens = ids[places]
            logp = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            line = line.index_put((places[1:],), logp.gather(1, tokens[1:, None]).squeeze(1).double())
        lines.append(line)
    return torch.stack(lines)


def assert_same_gradients(model: torch.nn.Module, reference: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """Every tensor's gradient within ``tolerance`` of the reference's norm."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        grad = expected[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            assert float((parameter.grad.double() - grad.double()).norm()) <= tolerance * float(grad.norm()), name
