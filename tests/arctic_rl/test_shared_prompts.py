"""The dispatch with a model that shares prompts, on rollouts in SkyRL's layout, against SkyRL's own arithmetic."""

import copy

import pytest
import torch

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.zorro.attention import register_shared_attention
from tests.arctic_rl.in_process_backend import InProcessBackend
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.skyrl_reference import PAD_ID, ReferenceTrainer, action_log_probs, rollout_batch, update_batch

TEMPERATURE = 0.7
SETTINGS = (f"trainer.algorithm.temperature={TEMPERATURE}", "trainer.algorithm.kl_loss_coef=0.1")


@pytest.fixture(scope="module")
def models():
    return tiny_model(attention="eager"), tiny_model(attention="eager", seed=3)


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(register_shared_attention())
    return twin


def grouped_batch(seed: int):
    """12 rows: 4 prompts of 5 to 9 tokens with 3 responses of 1 to 9 tokens each."""
    batch = rollout_batch(12, seed, prompt_lengths=(5, 9))
    lengths = batch["attention_mask"].sum(1) - batch["response_mask"].sum(1)
    for first in range(0, 12, 3):
        shortest = int(lengths[first : first + 3].min())
        ends = batch["sequences"].shape[1] - batch["response_mask"].sum(1)
        prompt = batch["sequences"][first, ends[first] - shortest : ends[first]].clone()
        for row in range(first, first + 3):
            batch["attention_mask"][row, : ends[row] - shortest] = 0
            batch["sequences"][row, : ends[row] - shortest] = PAD_ID
            batch["sequences"][row, ends[row] - shortest : ends[row]] = prompt
    return batch


@pytest.fixture
def dispatch_to(loop, tmp_path):
    def build(backend, *overrides):
        cfg = parse_config(["trainer.logger=console", f"trainer.log_path={tmp_path}", *SETTINGS, *overrides])
        return ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None), cfg

    return build


def forwarded_tokens(backend, batch) -> tuple[list[int], int]:
    """Tokens of every forward pass, and those of the batch."""
    return [shape[1] for shape in backend.shapes], int(batch["attention_mask"].sum())


class CountingBackend(InProcessBackend):
    """Notes how many tokens each forward pass of the policy has; the first call has checks of its own."""

    def __init__(self, models, **kwargs):
        super().__init__(models, **kwargs)
        self.shapes = []
        models["policy"].register_forward_pre_hook(
            lambda _, __, inputs: self.shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
        )


@pytest.mark.parametrize("use_zorro", ["true", "null", "false"])
def test_forward_equals_skyrls(dispatch_to, models, use_zorro: str):
    policy, reference = models
    batch = grouped_batch(1)
    backend = CountingBackend({"policy": sharing(policy), "ref": sharing(reference)})
    dispatch, _ = dispatch_to(
        backend, f"trainer.arctic_rl.use_zorro={use_zorro}", "trainer.arctic_rl.zorro_self_check=false"
    )
    dispatch.forward("policy", batch)
    backend.shapes.clear()
    mask = batch["response_mask"].bool()
    for name, model in (("policy", policy), ("ref", reference)):
        output = dispatch.forward(name, batch)
        ours = torch.tensor([row["logprobs"] for row in output.loss_fn_outputs])
        with torch.no_grad():
            expected = action_log_probs(model, batch, TEMPERATURE)[0]
        assert (ours - expected)[mask].abs().max() < 1e-5
    tokens, padded = forwarded_tokens(backend, batch)
    assert (sum(tokens) < padded - 20) == (use_zorro != "false")


@pytest.mark.parametrize("ranks", [1, 2])
def test_update_equals_skyrls(dispatch_to, models, ranks: int):
    policy, reference = models
    batch = update_batch(grouped_batch(2), policy, reference, temperature=TEMPERATURE, seed=2)
    backend = CountingBackend({"policy": sharing(policy), "ref": sharing(reference)}, ranks={"policy": ranks})
    dispatch, cfg = dispatch_to(
        backend,
        "trainer.micro_train_batch_size_per_gpu=3",
        "trainer.max_tokens_per_microbatch=45",
        "trainer.arctic_rl.zorro_self_check=false",
    )
    dispatch.forward("policy", batch)
    backend.shapes.clear()
    metrics = dispatch.forward_backward("policy", batch).metrics
    plain = ReferenceTrainer(
        copy.deepcopy(policy),
        lr=1e-2,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        max_grad_norm=1e9,
        scheduler="constant",
        num_warmup_steps=0,
        num_training_steps=2,
    )
    expected = plain.update(batch, cfg.trainer.algorithm)
    for name, gradient in backend.gradient().items():
        assert (gradient - expected.gradient[name]).norm() <= 1e-5 * expected.gradient[name].norm(), name
    assert metrics["final_loss"] == pytest.approx(expected.metrics["final_loss"], rel=1e-5)
    assert metrics["policy_entropy"] == pytest.approx(expected.metrics["policy_entropy"], rel=1e-5)
    shapes = backend.shapes
    assert metrics["num_microbatches"] * ranks == len(shapes) + metrics["num_padding_microbatches"] * ranks
    assert max(shape[1] for shape in shapes) <= 45
    assert sum(shape[1] for shape in shapes) < int(batch["attention_mask"].sum())


def test_a_model_that_cannot_ends_the_call(dispatch_to, models):
    policy, _ = models
    backend = InProcessBackend({"policy": copy.deepcopy(policy)})
    dispatch, _ = dispatch_to(backend, "trainer.arctic_rl.use_zorro=true")
    with pytest.raises(UnsupportedError, match=r"attn_implementation='eager'.*use_zorro=false"):
        dispatch.forward("policy", grouped_batch(3))
