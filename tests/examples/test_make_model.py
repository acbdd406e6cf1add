"""The quickstart's starting model: tokenizer, packed warm start, saved folder, command lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from envs.bird.synthetic.dataset import SplitSizes, write_dataset
from examples.greedy import greedy_accuracy, greedy_responses
from examples.make_model import (
    END,
    PAD,
    START,
    WarmStart,
    build_model,
    encode,
    make_model,
    pack_row,
    row_loss,
    warm_start,
)

ROOT = Path(__file__).resolve().parents[2]
SMALL = SplitSizes(train=8, validation=3, heldout_db=2, demonstrations=1)
TINY = WarmStart(vocab_size=700, min_token_count=2, hidden_size=64, intermediate_size=96, heads=2, examples_per_row=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("starting-model")
    write_dataset(root / "data", seed=0, sizes=SMALL)
    make_model(root / "data", root / "model", seed=0, warm=TINY)
    return root / "data", root / "model"


@pytest.fixture(scope="module")
def tokenizer(folders):
    return AutoTokenizer.from_pretrained(folders[1])


@pytest.fixture(scope="module")
def demonstrations(folders) -> list[dict]:
    with open(folders[0] / "demonstrations.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_text_survives_the_tokenizer_exactly(tokenizer, demonstrations):
    texts = [text for row in demonstrations for text in (row["prompt"][-1]["content"], row["response"])]
    texts += [
        "Zoë O'Brien",
        "日本語 🙂 \u200bא",
        "a\r\n\t  b  ",
        " ``` ```sql\nSELECT '''' -- x",
        "T1.T2_3 = -4.5e-6",
        "\x00\x7f",
    ]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids == ids


def test_special_tokens(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (PAD, START, END)]
    assert len(set(ids)) == 3 and tokenizer.unk_token_id is None
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (ids[0], ids[2])
    for token, number in zip((PAD, START, END), ids, strict=True):
        assert tokenizer(f"a{token}b", add_special_tokens=False).input_ids.count(number) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    kept = "<think>x</think>\n```sql\nSELECT 1\n```"
    assert tokenizer.decode(tokenizer(kept).input_ids, skip_special_tokens=True) == kept


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nü<|im_end|>\n<|im_start|>assistant\n"
    closed = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "a"}], tokenize=False)
    assert closed == text + "a<|im_end|>\n"


def test_prompts_and_responses_are_short(tokenizer, demonstrations):
    lengths = [[len(ids) for ids in encode(tokenizer, row)] for row in demonstrations]
    assert max(prompt for prompt, _ in lengths) <= 220
    assert max(response for _, response in lengths) <= 96


def test_packed_rows_have_the_loss_and_gradients_of_separate_rows(tokenizer, demonstrations):
    torch.manual_seed(1)
    model = build_model(tokenizer, TINY)
    by_schema: dict[str, list] = {}
    for row in demonstrations:
        by_schema.setdefault(row["prompt"][-1]["content"].split("\n\n")[0], []).append(encode(tokenizer, row))
    examples = next(iter(by_schema.values()))[:5]
    packed = pack_row(examples)
    assert len(packed.input_ids) < sum(len(prompt) + len(response) for prompt, response in examples) / 2

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        return found

    loss = row_loss(model, packed)
    loss.backward()
    got = gradients()
    expected = torch.zeros(())
    for prompt, response in examples:
        labels = torch.tensor([[-100] * len(prompt) + response])
        one = model(input_ids=torch.tensor([prompt + response]), labels=labels).loss * len(response)
        one.backward()
        expected += one.detach()
    reference = gradients()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
    for name, gradient in reference.items():
        assert (got[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_one_demonstration_packs_to_itself():
    row = pack_row([([5, 6, 7], [8, 9])])
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert row.labels.tolist() == [-100, -100, 8, 9, -100]
    assert (row.mask()[0, 0] == torch.ones(5, 5, dtype=torch.bool).tril()).all()


def test_rows_that_differ_in_the_prompt_and_a_prompt_that_starts_another():
    row = pack_row([([1, 2, 3], [7]), ([1, 2], [8, 9])])
    assert row.input_ids.tolist() == [1, 2, 3, 7, 2, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 1, 2, 3]
    assert row.segments.tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert row.labels.tolist() == [-100, -100, 7, -100, 8, 9, -100]


def test_warm_start_learns_a_demonstration(tokenizer, demonstrations):
    torch.manual_seed(0)
    model = build_model(tokenizer, TINY)
    prompt, response = encode(tokenizer, demonstrations[0])
    warm = WarmStart(**{**vars(TINY), "examples_per_row": 1})
    warm_start(model, [(prompt, response)] * 60, warm, seed=0)
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=len(response))
    assert tokens[0, len(prompt) :].tolist() == response


def test_saved_folder_is_a_plain_qwen3(folders, tokenizer):
    _, folder = folders
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is Qwen3ForCausalLM and model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert not {"temperature", "top_p", "top_k"} & set(generation)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_equal_seeds_give_equal_models(folders, tmp_path):
    data, model = folders
    make_model(data, tmp_path / "again", seed=0, warm=TINY)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (model / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_greedy_accuracy_counts_right_answers_only(folders, monkeypatch):
    data, model = folders
    responses = greedy_responses(model, [[{"role": "user", "content": "x"}]] * 3, max_new_tokens=4, batch_size=2)
    assert len(responses) == 3 and len(set(responses)) == 1
    assert 0.0 <= greedy_accuracy(model, data / "validation.parquet", limit=4, max_new_tokens=8) < 0.5

    rows = {}

    def answer(_, prompts, **__):
        import pyarrow.parquet

        for row in pyarrow.parquet.read_table(data / "validation.parquet").to_pylist():
            rows[row["prompt"][-1]["content"]] = row["reward_model"]["ground_truth"]
        golds = [rows[prompt[-1]["content"]] for prompt in prompts]
        return [f"```sql\n{gold if index % 4 else 'SELECT 12345'}\n```" for index, gold in enumerate(golds)]

    monkeypatch.setattr("examples.greedy.greedy_responses", answer)
    assert greedy_accuracy(model, data / "validation.parquet", limit=8) == 0.75


def test_data_command(tmp_path):
    command = [sys.executable, "-m", "examples.make_data", "--output_dir", str(tmp_path / "data"), "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "validation.parquet: 240 questions" in done.stdout
    assert "databases" in done.stderr
    assert (tmp_path / "data" / "train.parquet").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["make_data.py", "make_model.py", "greedy.py"])
def test_scripts_start_as_files_from_anywhere(script, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--" in done.stdout
