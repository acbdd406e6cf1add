"""The critic through our dispatch and SkyRL's trainer, against SkyRL's own critic on padded batches."""

import json

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.zorro.attention import register_shared_attention
from tests.arctic_rl.in_process_backend import InProcessBackend, packable
from tests.arctic_rl.skyrl_critic import skyrls_twin, skyrls_update, skyrls_values, value_model, values_of_tokens
from tests.arctic_rl.skyrl_reference import PAD_ID, rollout_batch

CRITIC = "trainer.critic.model.path=some/model"


@pytest.fixture(scope="module")
def critic():
    return value_model()


@pytest.fixture(scope="module")
def theirs(critic):
    return skyrls_twin(critic)


def config(tmp_path, *settings, ranks=1):
    return parse_config(
        [
            "trainer.logger=console",
            f"trainer.log_path={tmp_path}",
            CRITIC,
            f"trainer.placement.critic_num_gpus_per_node={ranks}",
            "trainer.micro_train_batch_size_per_gpu=2",
            "trainer.micro_forward_batch_size_per_gpu=3",
            *settings,
        ]
    )


def shared(model):
    """A copy with the attention that shares prompts."""
    twin = packable(model)
    twin.set_attn_implementation(register_shared_attention())
    return twin


def dispatch_to(cfg, critic, loop, ranks=1, *, sharing=False):
    model = shared(critic) if sharing else packable(critic)
    backend = InProcessBackend({"critic": model}, ranks={"critic": ranks})
    backend.tokens = []
    model.register_forward_pre_hook(
        lambda _module, _arguments, inputs: backend.tokens.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    return ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None), backend


def with_returns(batch, values, seed=0, drift=0.4):
    """The batch as an update of the critic takes it: old values off the present ones, returns about them."""
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(values.shape, generator=generator) * drift

    tensors = {name: batch[name] for name in batch} | {"values": values + noise(), "returns": values + 2 * noise()}
    result = TrainingInputBatch(tensors)
    result.metadata = batch.metadata
    return result


def repeated_prompts(num_rows, seed):
    """Rows of which each two have the same prompt, of 6 tokens."""
    batch = rollout_batch(num_rows, seed, prompt_lengths=(6, 6), max_response=5)
    starts = (batch["sequences"].shape[1] - batch["response_mask"].sum(1)).tolist()
    for row in range(1, num_rows, 2):
        one, other = (slice(starts[at] - 6, starts[at]) for at in (row - 1, row))
        batch["sequences"][row, other] = batch["sequences"][row - 1, one]
    return batch


_OF_THE_ISOLATION_CHECK = 18 + 18 + 6
"""Tokens of the three forward passes with which the first call looks into a model."""


class TestValues:
    @pytest.mark.parametrize("sharing", [False, True], ids=["unshared", "shared"])
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_each_is_skyrls_at_its_place(self, critic, theirs, loop, tmp_path, ranks, sharing):
        batch = repeated_prompts(7, seed=ranks) if sharing else rollout_batch(7, seed=ranks)
        cfg = config(tmp_path, "trainer.arctic_rl.zorro_self_check=false", ranks=ranks)
        dispatch, backend = dispatch_to(cfg, critic, loop, ranks, sharing=sharing)
        sent = batch.select(["sequences", "attention_mask"], ["response_length"])
        values = torch.tensor([row["values"] for row in dispatch.forward("critic", sent).loss_fn_outputs])
        expected = skyrls_values(cfg, theirs, batch)
        there = values_of_tokens(batch)
        assert there[batch["response_mask"].bool()].all()
        assert (values - expected)[there].abs().max() < 1e-5
        assert (values[~there] == 0).all(), "as SkyRL's packed rows have it"
        assert expected[there].std() > 0.2
        ((job, _, meta, processing),) = backend.arguments("fwd_no_grad")
        assert job == "critic" and processing == {"post": ["compute_values"], "config": {}}
        assert not [name for name in meta if name.startswith("logits_")]
        tokens = sum(backend.tokens) - _OF_THE_ISOLATION_CHECK
        if ranks == 1:
            assert tokens == int(batch["attention_mask"].sum()) - (3 * 6 if sharing else 0)

    def test_they_do_not_depend_on_the_recipes_temperature(self, critic, loop, tmp_path):
        batch = rollout_batch(3, seed=1)
        outputs = []
        for temperature in (0.5, 1.0):
            cfg = config(tmp_path, f"trainer.algorithm.temperature={temperature}")
            outputs.append(dispatch_to(cfg, critic, loop)[0].forward("critic", batch).loss_fn_outputs)
        assert outputs[0] == outputs[1]


UPDATES = {
    "one micro-batch": ("trainer.micro_train_batch_size_per_gpu=8",),
    "two rows": (),
    "one row": ("trainer.micro_train_batch_size_per_gpu=1",),
    "uneven": ("trainer.micro_train_batch_size_per_gpu=3",),
    "tokens": ("trainer.max_tokens_per_microbatch=40",),
    "narrow clip": ("trainer.algorithm.value_clip=0.05",),
    "no clip": ("trainer.algorithm.value_clip=null",),
}


class TestUpdate:
    @pytest.mark.parametrize("sharing", [False, True], ids=["unshared", "shared"])
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("name", UPDATES)
    def test_gradient_and_loss_are_skyrls(self, critic, theirs, loop, tmp_path, name, ranks, sharing):
        cfg = config(tmp_path, *UPDATES[name], ranks=ranks)
        rows = repeated_prompts(8, seed=2) if sharing else rollout_batch(8, seed=2, holes=True)
        rows["loss_mask"][5] = 0
        batch = with_returns(rows, skyrls_values(cfg, theirs, rows))
        expected, expected_gradient = skyrls_update(cfg, theirs, batch, ranks)
        dispatch, backend = dispatch_to(cfg, critic, loop, ranks, sharing=sharing)
        metrics = dispatch.forward_backward("critic", batch).metrics
        gradient = backend.gradient("critic")
        assert gradient.keys() == expected_gradient.keys()
        for tensor, value in expected_gradient.items():
            assert (gradient[tensor] - value).norm() <= 1e-5 * value.norm(), tensor
        assert metrics.keys() == expected.keys()
        if name == "one micro-batch" and ranks == 1:
            assert metrics == pytest.approx(expected, rel=1e-5)
            assert 0.1 < metrics["values_clipfrac"] < 0.9
        assert ("values_clipfrac" in metrics) == (name != "no clip")

    @pytest.mark.parametrize("rows", [5, 7])
    @pytest.mark.parametrize("name", ["two rows", "uneven", "tokens"])
    def test_rows_that_do_not_divide_are_weighed_as_skyrl_weighs_them(
        self, critic, theirs, loop, tmp_path, name, rows
    ):
        """As in step-wise training: SkyRL pads them, and the padding counts."""
        cfg = config(tmp_path, *UPDATES[name], ranks=2)
        plain = rollout_batch(rows, seed=3)
        batch = with_returns(plain, skyrls_values(cfg, theirs, plain))
        _, expected = skyrls_update(cfg, theirs, pad_training_input_batch(batch, rows % 2), 2)
        dispatch, backend = dispatch_to(cfg, critic, loop, 2)
        dispatch.forward_backward("critic", batch)
        for tensor, value in backend.gradient("critic").items():
            assert (value - expected[tensor]).norm() <= 1e-5 * expected[tensor].norm(), tensor

    def test_what_has_no_loss_is_not_read(self, critic, theirs, loop, tmp_path):
        cfg = config(tmp_path)
        rows = rollout_batch(4, seed=4, holes=True)
        batch = with_returns(rows, skyrls_values(cfg, theirs, rows))
        outcomes = []
        for garbage in (0.0, torch.nan):
            dirty = with_returns(rows, skyrls_values(cfg, theirs, rows))
            for name in ("values", "returns"):
                dirty[name] = torch.where(batch["loss_mask"] != 0, batch[name], garbage)
            dispatch, backend = dispatch_to(cfg, critic, loop)
            outcomes.append((dispatch.forward_backward("critic", dirty).metrics, backend.gradient("critic")))
        assert outcomes[0][0] == outcomes[1][0]
        assert all(torch.equal(value, outcomes[1][1][name]) for name, value in outcomes[0][1].items())

    def test_steps_are_logged_beside_the_policys(self, critic, theirs, loop, tmp_path):
        cfg = config(tmp_path)
        rows = rollout_batch(4, seed=5)
        batch = with_returns(rows, skyrls_values(cfg, theirs, rows))
        dispatch, backend = dispatch_to(cfg, critic, loop)
        loss = dispatch.forward_backward("critic", batch).metrics["critic_loss"]
        norm = dispatch.optim_step("critic")
        (line,) = (tmp_path / "critic_optimizer_steps.jsonl").read_text().splitlines()
        assert {"loss": loss, "grad_norm": norm, "num_rows": 4, "optimizer_step": 1}.items() <= json.loads(
            line
        ).items()
        assert backend.names() == ["critic_fwd_bwd", "critic_step"]
        assert not (tmp_path / "optimizer_steps.jsonl").exists()
