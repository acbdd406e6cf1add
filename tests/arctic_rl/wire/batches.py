"""Random batches in the server's layout."""

import torch

from integrations.arctic_rl.layout import repack_to_verl


def skyrl_batch(generator, rows, prompt_len, response_len, *, pad=0, vocabulary=100):
    """A batch as SkyRL's trainer makes it, in the server's layout."""
    prompts = torch.randint(1, prompt_len + 1, (rows, 1), generator=generator)
    responses = torch.randint(0, response_len + 1, (rows, 1), generator=generator)
    responses[int(torch.randint(rows, (1,), generator=generator))] = response_len
    width = int((prompts + responses).max())
    column = torch.arange(width)
    mask = (column >= width - prompts - responses).long()
    response_mask = (torch.arange(response_len) >= response_len - responses).long()
    sequences = torch.randint(0, vocabulary, (rows, width), generator=generator) * mask + pad * (1 - mask)
    values = {
        "sequences": sequences,
        "attention_mask": mask,
        "response_mask": response_mask,
        "loss_mask": (torch.rand(response_mask.shape, generator=generator) < 0.7).float() * response_mask,
        "advantages": torch.randn(response_mask.shape, generator=generator) * response_mask,
        "old_log_probs": -torch.rand(response_mask.shape, generator=generator) * response_mask,
    }
    return repack_to_verl(values, pad)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
