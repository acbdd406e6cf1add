"""Make the quickstart's starting model: ``python -m examples.make_model --data_dir D --output_dir M --seed S``.

A tiny Qwen3 with a byte-level BPE tokenizer of its own, both trained here on ``D/demonstrations.jsonl``. The
demonstrations are of mixed quality on purpose (see ``envs.bird.synthetic.questions``): a stated share of them answers
with a plausible wrong query, so the model starts out knowing the language and the schemas but getting most kinds of
question wrong more often than right, which is what reinforcement learning then has to repair.
"""

import argparse
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WHOLE_TOKENS = ("<think>", "</think>", "```sql", "```")

# Words keep digits and underscores, so that an identifier or a number can be one token.
WORDS = r" ?[\p{L}\p{N}_]+| ?[^\s\p{L}\p{N}_]+|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class WarmStart:
    """Size of the tokenizer and the model, and the supervised run."""

    vocab_size: int = 1280
    """Upper bound of the number of tokens."""
    min_token_count: int = 100
    """Times that a pair must occur in the demonstrations to become a token."""
    hidden_size: int = 128
    """Width; a multiple of 32 times ``heads``, which is what vLLM's CPU attention accepts."""
    intermediate_size: int = 384
    """Width of the feed-forward layers."""
    layers: int = 2
    """Decoder layers."""
    heads: int = 4
    """Query heads; half as many key-value heads."""
    init_std: float = 0.08
    """Standard deviation of the initial weights; four times Qwen3's own, which learns faster at this width."""
    learning_rate: float = 4e-3
    """Peak of AdamW's learning rate (one cycle: 10% warm-up, cosine to zero)."""
    epochs: int = 1
    """Passes over the demonstrations."""
    rows_per_step: int = 1
    """Packed rows an optimizer step."""
    examples_per_row: int = 8
    """Demonstrations on one database that share a row and its prompt's prefix."""


def train_tokenizer(texts: list[str], *, vocab_size: int, min_count: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on ``texts`` with chat markers; every string survives encode and decode exactly.

    Args:
        texts: what merges are counted on.
        vocab_size: upper bound of the number of tokens, markers included.
        min_count: a pair seen less often is not merged, so that no token is too rare to be learned.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(WHOLE_TOKENS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=min_count,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in WHOLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def demonstration_texts(demonstrations: list[dict]) -> list[str]:
    """What the tokenizer is trained on: roles, prompts and responses."""
    messages = [message for row in demonstrations for message in row["prompt"]]
    return [
        *(text for message in messages for text in (message["role"], message["content"])),
        *(text for row in demonstrations for text in ("assistant", row["response"])),
    ]


def build_model(tokenizer: PreTrainedTokenizerFast, warm: WarmStart) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=warm.hidden_size,
        intermediate_size=warm.intermediate_size,
        num_hidden_layers=warm.layers,
        num_attention_heads=warm.heads,
        num_key_value_heads=warm.heads // 2,
        head_dim=warm.hidden_size // warm.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=warm.init_std,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class PackedRow:
    """Demonstrations that share a prompt prefix, packed into T tokens; each sees the prefix and itself."""

    input_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, counted as if each demonstration stood alone behind the prefix."""
    segments: torch.Tensor
    """[T] int64, 0 in the prefix, k in the k-th demonstration."""
    labels: torch.Tensor
    """[T] int64, the token that follows, -100 where none is learned."""

    def mask(self) -> torch.Tensor:
        """[1, 1, T, T] bool, true where a query (third axis) may look."""
        causal = torch.ones(len(self.segments), len(self.segments), dtype=torch.bool).tril()
        same = self.segments[:, None] == self.segments[None, :]
        return (causal & (same | (self.segments == 0)[None, :]))[None, None]


def _common_prefix(rows: list[list[int]]) -> list[int]:
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in columns]


def pack_row(examples: list[tuple[list[int], list[int]]]) -> PackedRow:
    """Pack (prompt ids, response ids) pairs; their common prompt prefix is kept once."""
    prefix = _common_prefix([prompt[:-1] for prompt, _ in examples])
    ids, positions, segments = list(prefix), list(range(len(prefix))), [0] * len(prefix)
    labels = [-100] * len(prefix)
    for number, (prompt, response) in enumerate(examples, start=1):
        rest = prompt[len(prefix) :] + response
        ids += rest
        positions += range(len(prefix), len(prefix) + len(rest))
        segments += [number] * len(rest)
        learned = len(response)
        labels += [-100] * (len(rest) - learned - 1) + response + [-100]
    return PackedRow(*(torch.tensor(column) for column in (ids, positions, segments, labels)))


def row_loss(model: Qwen3ForCausalLM, row: PackedRow) -> torch.Tensor:
    """Sum of the cross-entropies of the learned tokens."""
    hidden = model.model(
        input_ids=row.input_ids[None], position_ids=row.position_ids[None], attention_mask=row.mask(), use_cache=False
    ).last_hidden_state[0]
    learned = row.labels != -100
    logits = model.lm_head(hidden[learned])
    return torch.nn.functional.cross_entropy(logits, row.labels[learned], reduction="sum")


def encode(tokenizer: PreTrainedTokenizerFast, demonstration: dict) -> tuple[list[int], list[int]]:
    """Prompt ids as the sampler sees them, and response ids with the end marker."""
    prompt = tokenizer.apply_chat_template(
        demonstration["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    response = tokenizer(demonstration["response"], add_special_tokens=False).input_ids
    return prompt, [*response, tokenizer.eos_token_id]


def warm_start(
    model: Qwen3ForCausalLM, examples: list[tuple[list[int], list[int]]], warm: WarmStart, *, seed: int
) -> None:
    """Train on (prompt ids, response ids) pairs, in place."""
    rng = random.Random(f"{seed}/warm start")
    prefix_of = defaultdict(list)
    for example in examples:
        prefix_of[tuple(example[0][:100])].append(example)
    rows = []
    for _ in range(warm.epochs):
        epoch = []
        for group in prefix_of.values():
            rng.shuffle(group)
            epoch += [group[i : i + warm.examples_per_row] for i in range(0, len(group), warm.examples_per_row)]
        rng.shuffle(epoch)
        rows += epoch
    steps = len(rows) // warm.rows_per_step
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, warm.learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    progress = tqdm(range(steps), desc="warm start")
    for step in progress:
        packed = [pack_row(group) for group in rows[step * warm.rows_per_step : (step + 1) * warm.rows_per_step]]
        tokens = sum(int((row.labels != -100).sum()) for row in packed)
        total = 0.0
        for row in packed:
            loss = row_loss(model, row) / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{total:.3f}", refresh=False)
    model.eval()


def make_model(data_dir: Path, output_dir: Path, *, seed: int, warm: WarmStart | None = None) -> None:
    """Train tokenizer and model on ``data_dir/demonstrations.jsonl`` and save both in ``output_dir``."""
    warm = WarmStart() if warm is None else warm
    with open(Path(data_dir) / "demonstrations.jsonl", encoding="utf-8") as file:
        demonstrations = [json.loads(line) for line in file]
    tokenizer = train_tokenizer(
        demonstration_texts(demonstrations), vocab_size=warm.vocab_size, min_count=warm.min_token_count
    )
    torch.manual_seed(seed)
    model = build_model(tokenizer, warm)
    warm_start(model, [encode(tokenizer, row) for row in demonstrations], warm, seed=seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", type=Path, required=True, help="folder that make_data wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    make_model(arguments.data_dir, arguments.output_dir, seed=arguments.seed)


if __name__ == "__main__":
    main()
