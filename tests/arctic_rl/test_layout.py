"""Repacking between SkyRL's and verl's layouts: stated arrays, random batches, and what is refused."""

import pickle

import pytest
import torch

from integrations.arctic_rl.layout import repack_to_verl, response_to_skyrl

RESPONSE_KEYS = ["loss_mask", "advantages", "action_log_probs", "rollout_logprobs", "returns", "values"]


def skyrl_batch(prompts: list[list[int]], responses: list[list[int]], pad: int, seed: int = 0) -> dict:
    """SkyRL's left-padded layout, built row by row from token lists; response tensors carry junk outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    response_width = max(len(r) for r in responses)
    sequences, attention_mask, response_mask = [], [], []
    for p, r in zip(prompts, responses, strict=True):
        gap = width - len(p) - len(r)
        sequences.append([pad] * gap + p + r)
        attention_mask.append([0] * gap + [1] * (len(p) + len(r)))
        response_mask.append([0] * (response_width - len(r)) + [1] * len(r))
    batch = {
        "sequences": torch.tensor(sequences).view(len(prompts), width),
        "attention_mask": torch.tensor(attention_mask).view(len(prompts), width),
        "response_mask": torch.tensor(response_mask, dtype=torch.int64).view(len(prompts), response_width),
    }
    shape = batch["response_mask"].shape
    batch |= {key: torch.randn(shape, generator=generator) for key in RESPONSE_KEYS}
    batch["loss_mask"] = torch.randint(0, 2, shape, generator=generator).float()
    return batch


def random_rows(generator: torch.Generator) -> tuple[list[list[int]], list[list[int]]]:
    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_rows = integer(1, 8)
    prompts = [[integer(0, 5) for _ in range(integer(1, 9))] for _ in range(num_rows)]
    responses = [[integer(0, 5) for _ in range(integer(0, 9))] for _ in range(num_rows)]
    return prompts, responses


def test_stated_batch():
    batch = {
        "sequences": torch.tensor([[11, 12, 21, 22, 23], [0, 13, 14, 15, 24]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 1], [0, 0, 1]]),
        "advantages": torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.0, 0.9]]),
        "base_action_log_probs": None,
    }
    out = repack_to_verl(batch, 0)
    assert out["input_ids"].tolist() == [[0, 11, 12, 21, 22, 23], [13, 14, 15, 24, 0, 0]]
    assert out["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert out["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert torch.equal(out["advantages"], torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.0, 0.0]]))
    assert out["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 3]]
    assert out["prompts"].tolist() == [[0, 11, 12], [13, 14, 15]]
    assert out["responses"].tolist() == [[21, 22, 23], [24, 0, 0]]
    assert "base_action_log_probs" not in out


def test_stated_way_back():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    values = torch.tensor([[5.0, 6.0, 7.0], [8.0, 0.0, 0.0]])
    assert response_to_skyrl(values, mask).tolist() == [[5.0, 6.0, 7.0], [0.0, 0.0, 8.0]]


def test_values_outside_the_mask_do_not_come_back():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    values = torch.full((3, 5), 2.0)
    values[0, :2] = torch.tensor([-1.0, -3.0])
    values[1, 0] = -4.0
    assert response_to_skyrl(values, mask).tolist() == [[0.0, -1.0, -3.0], [0.0, 0.0, -4.0], [0.0, 0.0, 0.0]]


def test_pad_id_equal_to_eos_id_drops_no_token():
    batch = skyrl_batch([[5, 2, 6], [5]], [[7, 2], [7, 8, 9]], pad=2)
    batch["loss_mask"] = batch["response_mask"].float()
    out = repack_to_verl(batch, 2)
    assert out["attention_mask"].sum(1).tolist() == [5, 4]
    assert out["response_mask"].sum(1).tolist() == [2, 3]
    assert out["responses"].tolist() == [[7, 2, 2], [7, 8, 9]]
    assert out["loss_mask"].tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize("seed", range(200))
def test_random_batches_keep_every_token_and_come_back(seed: int):
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = random_rows(generator)
    pad = 3 if seed % 2 else 99
    batch = skyrl_batch(prompts, responses, pad, seed)
    forced = None if seed % 3 else max(len(r) for r in responses) + seed % 5
    original = {key: value.clone() for key, value in batch.items()}
    out = repack_to_verl(batch, pad, response_len=forced)

    prompt_width = max(len(p) for p in prompts)
    response_width = max(len(r) for r in responses) if forced is None else forced
    source_width = batch["response_mask"].shape[1]
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        left, right = prompt_width - len(p), response_width - len(r)
        mask = [0] * left + [1] * (len(p) + len(r)) + [0] * right
        assert out["input_ids"][i].tolist() == [pad] * left + p + r + [pad] * right
        assert out["attention_mask"][i].tolist() == mask
        assert out["position_ids"][i].tolist() == [max(sum(mask[: j + 1]) - 1, 0) for j in range(len(mask))]
        assert out["prompts"][i].tolist() == [pad] * left + p
        assert out["responses"][i].tolist() == r + [pad] * right
        assert out["response_mask"][i].tolist() == [1] * len(r) + [0] * right
        for key in RESPONSE_KEYS:
            assert out[key][i].tolist() == batch[key][i, source_width - len(r) :].tolist() + [0.0] * right

    for key in RESPONSE_KEYS:
        back = response_to_skyrl(out[key], batch["response_mask"])
        assert torch.equal(back, batch[key] * batch["response_mask"])
        assert back.dtype == batch[key].dtype
    assert all(torch.equal(batch[key], original[key]) for key in original)
    assert all(value.is_contiguous() for value in out.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_dtypes_are_kept(dtype: torch.dtype):
    batch = skyrl_batch([[1], [2, 3]], [[4, 5], [6]], pad=0)
    batch["advantages"] = batch["advantages"].to(dtype)
    batch["response_mask"] = batch["response_mask"].to(dtype)
    out = repack_to_verl(batch, 0)
    assert out["advantages"].dtype == out["response_mask"].dtype == dtype
    assert response_to_skyrl(out["advantages"], batch["response_mask"]).dtype == dtype


def test_rows_without_padding_and_rows_without_response():
    full = repack_to_verl(skyrl_batch([[1, 2], [3, 4]], [[5, 6], [7, 8]], pad=0), 0)
    assert full["input_ids"].tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]
    assert bool(full["attention_mask"].all())
    empty = repack_to_verl(skyrl_batch([[1, 2], [3]], [[], []], pad=0), 0, response_len=2)
    assert empty["input_ids"].tolist() == [[1, 2, 0, 0], [0, 3, 0, 0]]
    assert empty["advantages"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert response_to_skyrl(torch.ones(2, 3), torch.zeros(2, 0)).shape == (2, 0)


def test_no_rows():
    batch = {key: torch.zeros(0, 4) for key in ("sequences", "attention_mask", "response_mask")}
    assert repack_to_verl(batch, 0)["input_ids"].shape == (0, 4)


def test_row_coded_values_stay_with_their_rows():
    lengths = [1, 9, 3, 1, 7, 2, 9, 5, 4, 8, 6, 1]
    batch = skyrl_batch([[i + 1] for i in range(12)], [[100 + i] * n for i, n in enumerate(lengths)], pad=0)
    batch["advantages"] = torch.arange(12.0)[:, None] * batch["response_mask"]
    batch["action_log_probs"] = -batch["advantages"]
    out = repack_to_verl(batch, 0)
    for i, n in enumerate(lengths):
        assert out["responses"][i, :n].tolist() == [100 + i] * n
        assert out["advantages"][i, :n].tolist() == [float(i)] * n
        assert out["action_log_probs"][i, :n].tolist() == [-float(i)] * n


def edited(**changes) -> dict:
    batch = skyrl_batch([[1, 2], [3]], [[5], [7, 8, 9]], pad=0)
    return {key: value for key, value in (batch | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("batch", "response_len", "message"),
    [
        (edited(response_mask=...), None, "no response_mask"),
        (edited(sequences=None), None, "no sequences"),
        (edited(attention_mask=torch.ones(2, 3)), None, "must both be"),
        (edited(response_mask=torch.ones(3, 3)), None, r"must be \[B, Rs\] with B=2"),
        (edited(response_mask=torch.tensor([[1, 0, 0], [1, 1, 1]])), None, "row 0 are not its last 1 columns"),
        (edited(attention_mask=torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]])), None, "row 1 are not its last 3"),
        (edited(attention_mask=torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])), None, "row 1 has 3 response tokens"),
        (edited(advantages=torch.zeros(2, 4)), None, r"'advantages' is \[2, 4\]"),
        (edited(rollout_expert_indices=[1, 2]), None, "'rollout_expert_indices' is a list"),
        (edited(responses=torch.zeros(2, 3)), None, "'responses' is a name of the result"),
        (edited(), 2, "response_len=2 is narrower than the longest response of 3"),
    ],
)
def test_contradictions_are_refused(batch: dict, response_len: int | None, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        repack_to_verl(batch, 0, response_len=response_len)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        (torch.zeros(2, 3), torch.ones(3, 3), "with one B"),
        (torch.zeros(3), torch.ones(3, 3), "must be"),
        (torch.zeros(2, 2), torch.tensor([[0, 0, 1], [1, 1, 1]]), "row 1 has 3 response tokens"),
        (torch.zeros(1, 3), torch.tensor([[1, 1, 0]]), "not its last 2 columns"),
    ],
)
def test_contradictions_on_the_way_back_are_refused(values: torch.Tensor, mask: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        response_to_skyrl(values, mask)


@pytest.mark.slow
def test_skyrl_own_batches_repack():
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    generator = torch.Generator().manual_seed(7)
    prompts, responses = random_rows(generator)
    responses[0] = [4]
    logprobs = [[-0.5 - k for k in range(len(r))] for r in responses]
    loss_masks = [[k % 2 for k in range(len(r))] for r in responses]
    rewards = [[float(k) for k in range(len(r))] for r in responses]
    sequences, attention_mask, response_mask, rewards_t, loss_mask, logprobs_t, _, _ = (
        convert_prompts_responses_to_batch_tensors(3, prompts, responses, rewards, loss_masks, logprobs)
    )
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "rewards": rewards_t,
            "rollout_logprobs": logprobs_t,
            "values": None,
        }
    )
    out = repack_to_verl(batch, 3)
    for i, r in enumerate(responses):
        assert out["responses"][i, : len(r)].tolist() == r
        assert out["loss_mask"][i, : len(r)].tolist() == loss_masks[i]
        assert out["rollout_logprobs"][i, : len(r)].tolist() == logprobs[i]
        assert out["rewards"][i, : len(r)].tolist() == rewards[i]
    assert torch.equal(response_to_skyrl(out["rollout_logprobs"], response_mask), logprobs_t)
