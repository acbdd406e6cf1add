"""The dispatch over an in-process backend: what goes over the wire, what SkyRL gets back, and in which order."""

import asyncio
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.trainer import RayPPOTrainer
from torch import nn

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.errors import CheckpointError, UnsupportedError
from integrations.arctic_rl.skyrl_config import parse_config
from tests.arctic_rl.in_process_backend import InProcessBackend, packable
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.skyrl_reference import (
    PAD_ID,
    ReferenceTrainer,
    action_log_probs,
    rollout_batch,
    update_batch,
)

NO_KL = "trainer.algorithm.use_kl_loss=false"


class InferenceClient:
    def __init__(self):
        self.weight_version = 0

    def increment_weight_version(self):
        self.weight_version += 1


@pytest.fixture
def config(tmp_path):
    def build(*overrides):
        return parse_config(["trainer.logger=console", f"trainer.log_path={tmp_path}", *overrides])

    return build


@pytest.fixture
def dispatch_to(loop, config):
    def build(backend, *overrides, client=None):
        return ArcticDispatch(
            config(*overrides), backend, loop, pad_token_id=PAD_ID, inference_client=client or InferenceClient()
        )

    return build


@pytest.fixture(scope="module")
def policy():
    return tiny_model(attention="eager")


@pytest.fixture(scope="module")
def reference():
    return tiny_model(attention="eager", seed=3)


def stated_batch(**tensors):
    """Two rows: prompts [11 12] and [13 14 15], responses [21 22 23] and [24]."""
    batch = TrainingInputBatch(
        {
            "sequences": torch.tensor([[11, 12, 21, 22, 23], [0, 13, 14, 15, 24]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
            "response_mask": torch.tensor([[1, 1, 1], [0, 0, 1]]),
            "loss_mask": torch.tensor([[1, 0, 1], [0, 0, 1]]),
            "advantages": torch.tensor([[0.1, 0.2, 0.3], [9.0, 9.0, 0.9]]),
            "action_log_probs": torch.tensor([[-1.0, -2.0, -3.0], [9.0, 9.0, -4.0]]),
            "base_action_log_probs": None,
            "rollout_logprobs": torch.tensor([[-1.5, -2.5, -3.5], [9.0, 9.0, -4.5]]),
            "rewards": torch.zeros(2, 3),
            "returns": torch.zeros(2, 3),
            "values": None,
        }
        | tensors
    )
    batch.metadata = {"response_length": 3, "uids": ["a", "b"]}
    return batch


class TestForward:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("model", ["policy", "ref"])
    @pytest.mark.parametrize("temperature", [0.6, 1.0])
    def test_rows_are_right_aligned_and_equal_to_transformers(
        self, dispatch_to, policy, reference, ranks, model, temperature
    ):
        models = {"policy": policy, "ref": reference}
        backend = InProcessBackend({job: packable(m) for job, m in models.items()}, ranks={model: ranks})
        dispatch = dispatch_to(backend, f"trainer.algorithm.temperature={temperature}")
        batch = rollout_batch(7, seed=ranks)
        sent = batch.select(["sequences", "attention_mask"], ["response_length"])
        output = dispatch.forward(model, sent)
        rows = torch.tensor([row["logprobs"] for row in output.loss_fn_outputs])
        assert rows.shape == batch["response_mask"].shape
        with torch.no_grad():
            expected = action_log_probs(models[model], batch, temperature)[0]
        responses = batch["response_mask"].bool()
        assert (rows - expected)[responses].abs().max() < 1e-5
        assert not rows[~batch["attention_mask"][:, -rows.shape[1] :].bool()].any()
        assert output.metrics == {}

    def test_the_end_of_the_prompt_fills_the_window_of_a_short_response(self, dispatch_to, policy):
        batch = rollout_batch(6, seed=5)
        dispatch = dispatch_to(InProcessBackend({"policy": packable(policy)}))
        rows = torch.tensor([row["logprobs"] for row in dispatch.forward("policy", batch).loss_fn_outputs])
        with torch.no_grad():
            expected = action_log_probs(policy, batch, 1.0)[0]
        width = batch.metadata["response_length"]
        predicted = (batch["attention_mask"].cumsum(1) > 1)[:, -width:]
        in_front = predicted & ~batch["response_mask"].bool()
        assert in_front.any()
        assert (rows - expected)[in_front].abs().max() < 1e-5

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_staged_mini_batches_give_the_rows_of_the_whole_batch(self, dispatch_to, policy, ranks):
        dispatch = dispatch_to(InProcessBackend({"policy": packable(policy)}, ranks={"policy": ranks}))
        batch = rollout_batch(7, seed=2)
        whole = dispatch.forward("policy", batch).loss_fn_outputs
        staged = dispatch.stage_data("policy", batch, [(0, 3), (3, 7)])
        parts = [row for chunk in staged for row in dispatch.forward_from_staged("policy", chunk).loss_fn_outputs]
        assert [len(dispatch.forward_from_staged("policy", chunk).loss_fn_outputs) for chunk in staged] == [3, 4]
        whole, parts = (torch.tensor([row["logprobs"] for row in rows]) for rows in (whole, parts))
        assert torch.allclose(whole, parts, atol=1e-6)

    def test_what_a_server_returns_at_padding_is_dropped(self, dispatch_to, monkeypatch):
        async def twos(self, job, batch, meta, processing):
            return {"batch": {"logprobs": torch.full(batch["input_ids"].shape, 2.0)}, "metrics": {}}

        monkeypatch.setattr(InProcessBackend, "fwd_no_grad", twos)
        output = dispatch_to(InProcessBackend()).forward(
            "policy", stated_batch().select(["sequences", "attention_mask"])
        )
        assert [row["logprobs"] for row in output.loss_fn_outputs] == [[2.0] * 3, [2.0] * 3]
        short = stated_batch(attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]))
        output = dispatch_to(InProcessBackend()).forward("policy", short.select(["sequences", "attention_mask"]))
        assert [row["logprobs"] for row in output.loss_fn_outputs] == [[2.0] * 3, [0.0, 2.0, 2.0]]

    def test_payload(self, dispatch_to):
        backend = InProcessBackend()
        dispatch = dispatch_to(backend, "trainer.micro_forward_batch_size_per_gpu=3")
        dispatch.forward("ref", stated_batch())
        ((job, batch, meta, processing),) = backend.arguments("fwd_no_grad")
        assert job == "ref"
        assert processing == {"post": ["compute_logprobs"], "config": {}}
        names = {"input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask"}
        assert set(batch) == names
        assert batch["input_ids"].tolist() == [[11, 12, 21, 22, 23], [0, 13, 14, 15, 24]]
        assert batch["prompts"].tolist() == [[11, 12], [0, 13]]
        assert batch["response_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
        assert meta["max_token_len_per_gpu"] == 15


class TestForwardBackward:
    def test_payload(self, dispatch_to):
        backend = InProcessBackend(ranks={"policy": 2})
        dispatch = dispatch_to(
            backend,
            NO_KL,
            "trainer.micro_train_batch_size_per_gpu=3",
            "trainer.algorithm.temperature=0.7",
            "trainer.algorithm.eps_clip_low=0.1",
            "trainer.algorithm.eps_clip_high=0.3",
            "generator.n_samples_per_prompt=2",
        )
        dispatch.forward_backward("policy", stated_batch())
        ((batch, meta, processing),) = backend.arguments("fwd_bwd")
        expected = {
            "input_ids": [[0, 11, 12, 21, 22, 23], [13, 14, 15, 24, 0, 0]],
            "attention_mask": [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]],
            "position_ids": [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 3]],
            "prompts": [[0, 11, 12], [13, 14, 15]],
            "responses": [[21, 22, 23], [24, 0, 0]],
            "response_mask": [[1, 1, 1], [1, 0, 0]],
            "loss_mask": [[1, 0, 1], [1, 0, 0]],
            "advantages": torch.tensor([[0.1, 0.2, 0.3], [0.9, 0, 0]]).tolist(),
            "old_log_probs": [[-1, -2, -3], [-4, 0, 0]],
            "rollout_logprobs": [[-1.5, -2.5, -3.5], [-4.5, 0, 0]],
        }
        assert {name: values.tolist() for name, values in batch.items()} == expected
        assert meta == {
            "pad_token_id": PAD_ID,
            "temperature": 0.7,
            "rollout_n": 2,
            "max_prompt_len": 3,
            "max_response_len": 3,
            "max_token_len_per_gpu": 15,
            "batch_num_tokens": 3,
            "global_batch_size": 2,
            "dp_size": 2,
            "calculate_entropy": True,
            "response_logprobs_only": True,
            "logits_compute_in_fp32": True,
            "logits_compute_from_fp32_inputs": False,
            "zorro_train_enable": "where_possible",
            "zorro_self_check": True,
        }
        assert processing["loss_fn"] == "grpo"
        assert processing["config"]["clip_ratio_low"] == 0.1
        assert processing["config"]["clip_ratio_high"] == 0.3

    def test_how_logits_are_computed_is_said_in_every_pass(self, dispatch_to):
        backend = InProcessBackend()
        dispatch = dispatch_to(
            backend,
            "trainer.arctic_rl.logits_optimization=compute",
            "trainer.arctic_rl.logits_optimization_peak_mem_size_in_gib=0.5",
            "trainer.arctic_rl.logits_compute_in_fp32=false",
            "trainer.arctic_rl.logits_compute_from_fp32_inputs=true",
        )
        dispatch.forward("policy", stated_batch())
        dispatch.forward_backward("policy", stated_batch())
        for meta in (backend.arguments("fwd_no_grad")[0][2], backend.arguments("fwd_bwd")[0][1]):
            assert {name: value for name, value in meta.items() if name.startswith("logits_")} == {
                "logits_optimization": "compute",
                "logits_optimization_peak_mem_size_in_gib": 0.5,
                "logits_compute_in_fp32": False,
                "logits_compute_from_fp32_inputs": True,
            }

    @pytest.mark.parametrize(("written", "sent"), [("true", True), ("false", False), ("null", "where_possible")])
    def test_whether_prompts_are_shared_is_said_in_every_pass(self, dispatch_to, written, sent):
        backend = InProcessBackend()
        settings = (f"trainer.arctic_rl.use_zorro={written}", "trainer.arctic_rl.zorro_self_check=false")
        dispatch = dispatch_to(backend, *settings)
        dispatch.forward("policy", stated_batch())
        dispatch.forward("ref", stated_batch())
        dispatch.forward_backward("policy", stated_batch())
        passes = [call[2] for call in backend.arguments("fwd_no_grad")] + [backend.arguments("fwd_bwd")[0][1]]
        assert len(passes) == 3
        for meta in passes:
            assert {name: value for name, value in meta.items() if name.startswith("zorro_")} == {
                "zorro_train_enable": sent,
                "zorro_self_check": False,
            }

    def test_a_loss_of_the_users_own_with_the_recipes_terms_around_it(self, dispatch_to):
        backend = InProcessBackend()
        dispatch = dispatch_to(
            backend,
            "trainer.arctic_rl.loss_fn=tests.arctic_rl.processors.user_module.undecorated",
            "trainer.arctic_rl.loss_config.alpha=2.5",
            "trainer.algorithm.kl_loss_coef=0.25",
            "trainer.algorithm.eps_clip_low=0.125",
            NO_KL,
        )
        dispatch.forward_backward("policy", stated_batch())
        ((_, meta, processing),) = backend.arguments("fwd_bwd")
        assert processing["loss_fn"] == "regularized"
        assert processing["config"]["policy_loss"] == "tests.arctic_rl.processors.user_module.undecorated"
        assert processing["config"]["policy_loss_config"] == {"alpha": 2.5}
        assert processing["config"]["kl_loss_coef"] == 0.25
        assert meta["algorithm"]["eps_clip_low"] == 0.125

    def test_the_references_log_probs_go_along_where_there_are_some(self, dispatch_to):
        backend = InProcessBackend()
        batch = stated_batch(base_action_log_probs=torch.tensor([[-5.0, -6.0, -7.0], [9.0, 9.0, -8.0]]))
        dispatch_to(backend).forward_backward("policy", batch)
        assert backend.arguments("fwd_bwd")[0][0]["ref_log_prob"].tolist() == [[-5, -6, -7], [-8, 0, 0]]

    @pytest.mark.parametrize(
        ("overrides", "sent"),
        [
            (["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"], False),
            ([NO_KL, "trainer.algorithm.policy_loss_type=gspo"], False),
            ([NO_KL, "trainer.arctic_rl.loss_fn=tests.arctic_rl.processors.user_module.undecorated"], True),
        ],
    )
    def test_the_references_log_probs_stay_where_no_loss_reads_them(self, dispatch_to, overrides, sent):
        backend = InProcessBackend()
        batch = stated_batch(base_action_log_probs=torch.tensor([[-5.0, -6.0, -7.0], [9.0, 9.0, -8.0]]))
        dispatch_to(backend, *overrides).forward_backward("policy", batch)
        assert ("ref_log_prob" in backend.arguments("fwd_bwd")[0][0]) is sent

    @pytest.mark.parametrize(("setting", "tokens"), [(0, 10), (12, 12), (3, 5)])
    def test_token_budget_of_a_micro_batch(self, dispatch_to, setting, tokens):
        backend = InProcessBackend()
        dispatch = dispatch_to(
            backend,
            "trainer.micro_train_batch_size_per_gpu=2",
            f"trainer.max_tokens_per_microbatch={setting}",
        )
        dispatch.forward_backward("policy", stated_batch())
        assert backend.arguments("fwd_bwd")[0][1]["max_token_len_per_gpu"] == tokens

    def test_rows_that_the_ranks_cannot_share_are_padded_with_rows_without_loss(self, dispatch_to):
        backend = InProcessBackend(ranks={"policy": 3})
        dispatch_to(backend).forward_backward("policy", stated_batch())
        ((batch, meta, _),) = backend.arguments("fwd_bwd")
        assert {len(values) for values in batch.values()} == {3}
        assert not batch["loss_mask"][2].any()
        assert meta["batch_num_tokens"] == 3
        assert meta["global_batch_size"] == 2

    def test_padding_changes_neither_gradient_nor_metrics(self, dispatch_to, policy, reference):
        settings = ("trainer.algorithm.kl_loss_coef=0.3", "trainer.algorithm.use_entropy_loss=true")
        batch = update_batch(rollout_batch(7, seed=4, holes=True), policy, reference, temperature=1.0, seed=4)
        outcomes = []
        for ranks in (1, 2, 4):
            backend = InProcessBackend({"policy": packable(policy)}, ranks={"policy": ranks})
            output = dispatch_to(backend, *settings).forward_backward("policy", batch)
            outcomes.append((output.metrics, backend.gradient()))
        (metrics, gradient), *others = outcomes
        for other_metrics, other_gradient in others:
            for name in ("final_loss", "policy_loss", "policy_kl", "policy_entropy"):
                assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7)
            for name, values in gradient.items():
                assert (other_gradient[name] - values).norm() <= 1e-5 * values.norm(), name

    def test_a_missing_old_log_prob_is_never_made_up(self, dispatch_to, policy):
        batch = stated_batch()
        del batch["action_log_probs"]
        with pytest.raises(UnsupportedError, match="action_log_probs"):
            dispatch_to(InProcessBackend({"policy": packable(policy)})).forward_backward("policy", batch)


class TableModel(nn.Module):
    """Logits of the next token depend on the last token alone: a row of a table."""

    def __init__(self, vocab=32):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        return {"logits": self.table[input_ids]}


class TestLossMask:
    """Zeros of the loss mask count everywhere, whatever the response mask says."""

    def one_row(self, loss_mask):
        batch = TrainingInputBatch(
            {
                "sequences": torch.tensor([[1, 2, 3, 4, 5, 6, 7]]),
                "attention_mask": torch.ones(1, 7, dtype=torch.int64),
                "response_mask": torch.ones(1, 5, dtype=torch.int64),
                "loss_mask": torch.tensor([loss_mask]),
                "advantages": torch.full((1, 5), 1.0 / max(sum(loss_mask), 1)),
            }
        )
        batch.metadata = {"response_length": 5}
        batch["action_log_probs"] = action_log_probs_of_table(batch)
        return batch

    def test_observation_tokens_are_neither_counted_nor_trained_on(self, dispatch_to):
        backend = InProcessBackend({"policy": TableModel()})
        metrics = dispatch_to(backend, NO_KL).forward_backward("policy", self.one_row([1, 1, 0, 0, 1])).metrics
        ((batch, meta, _),) = backend.arguments("fwd_bwd")
        assert batch["loss_mask"].tolist() == [[1, 1, 0, 0, 1]]
        assert meta["batch_num_tokens"] == 3
        assert metrics["final_loss"] == pytest.approx(-1.0, abs=1e-6)
        gradient = backend.gradient()["table"]
        # Tokens 3 to 7 are predicted from the table's rows 2 to 6.
        assert gradient.any(dim=1).nonzero().flatten().tolist() == [2, 3, 6]

    def test_a_filtered_group_leaves_the_other_group_as_if_alone(self, dispatch_to, policy, reference):
        batch = update_batch(rollout_batch(8, seed=6), policy, reference, temperature=1.0, seed=6)
        batch["loss_mask"][4:] = 0
        outcomes = []
        for rows in (batch, batch[:4]):
            backend = InProcessBackend({"policy": packable(policy)})
            loss = dispatch_to(backend, NO_KL).forward_backward("policy", rows).metrics["final_loss"]
            outcomes.append((loss, backend.arguments("fwd_bwd")[0][1]["batch_num_tokens"], backend.gradient()))
        (loss, tokens, gradient), (loss_alone, tokens_alone, gradient_alone) = outcomes
        assert tokens == tokens_alone
        assert loss == pytest.approx(loss_alone, rel=1e-5)
        for name, values in gradient_alone.items():
            assert (gradient[name] - values).norm() <= 1e-5 * values.norm(), name

    def test_nothing_to_learn_changes_nothing(self, dispatch_to, policy, reference):
        model = packable(policy)
        batch = update_batch(rollout_batch(4, seed=7), policy, reference, temperature=1.0, seed=7)
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        dispatch = dispatch_to(InProcessBackend({"policy": model}))
        assert dispatch.forward_backward("policy", batch).metrics["final_loss"] == 0
        assert dispatch.optim_step("policy") == 0
        for before, after in zip(policy.parameters(), model.parameters(), strict=True):
            assert torch.equal(before, after)


def action_log_probs_of_table(batch):
    logits = TableModel()(batch["sequences"])["logits"].detach()
    log_probs = logits.log_softmax(-1)[:, :-1].gather(-1, batch["sequences"][:, 1:, None]).squeeze(-1)
    return log_probs[:, -batch.metadata["response_length"] :]


def skyrl_trainer(dispatch, config):
    """SkyRL's trainer with nothing but what its forward pass and training step read."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.dispatch = config, dispatch
    trainer.all_metrics, trainer.all_timings = {}, {}
    trainer.ref_model = dispatch if config.trainer.algorithm.use_kl_loss else None
    return trainer


class TestSkyRLsOwnLoop:
    """SkyRL's trainer methods, unchanged, on batches of two mini-batches."""

    BOUNDARIES = ((0, 5), (5, 8))

    def batch(self, seed):
        batch = rollout_batch(8, seed, holes=True)
        batch["advantages"] = torch.randn(8, 1, generator=torch.Generator().manual_seed(seed)) * batch["response_mask"]
        batch.metadata["policy_mini_batch_boundaries"] = list(self.BOUNDARIES)
        return batch

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
    def test_the_ratio_is_one_on_the_first_mini_batch_of_each_batch_only(
        self, dispatch_to, config, policy, reference, tmp_path, temperature, ranks
    ):
        settings = (
            f"trainer.algorithm.temperature={temperature}",
            "trainer.micro_forward_batch_size_per_gpu=1",
            "trainer.micro_train_batch_size_per_gpu=2",
        )
        models = {"policy": packable(policy), "ref": packable(reference)}
        backend = InProcessBackend(models, ranks={"policy": ranks})
        trainer = skyrl_trainer(dispatch_to(backend, *settings), config(*settings))
        for seed in (0, 1):
            batch = trainer.fwd_logprobs_values_reward(self.batch(seed))
            trainer._execute_training_step("policy", batch)
        lines = [json.loads(line) for line in (tmp_path / "optimizer_steps.jsonl").read_text().splitlines()]
        deviations = [line["ratio_max_deviation"] for line in lines]
        assert len(deviations) == 4
        assert max(deviations[0], deviations[2]) < 1e-4
        assert min(deviations[1], deviations[3]) > 1e-3

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_two_mini_batches_are_two_optimizer_steps(self, dispatch_to, config, policy, reference, tmp_path, ranks):
        settings = ("trainer.algorithm.kl_loss_coef=0.1",)
        models = {"policy": packable(policy), "ref": packable(reference)}
        backend = InProcessBackend(models, ranks={"policy": ranks, "ref": ranks})
        cfg = config(*settings)
        trainer = skyrl_trainer(dispatch_to(backend, *settings), cfg)
        batch = trainer.fwd_logprobs_values_reward(self.batch(4))
        metrics = trainer._execute_training_step("policy", batch)
        assert [name for name in backend.names() if name in ("fwd_bwd", "step")] == ["fwd_bwd", "step"] * 2

        plain = ReferenceTrainer(
            copy.deepcopy(policy),
            lr=1e-2,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            max_grad_norm=1.0,
            scheduler="constant",
            num_warmup_steps=0,
            num_training_steps=2,
        )
        updates = [plain.update(batch[start:end], cfg.trainer.algorithm) for start, end in self.BOUNDARIES]
        for expected, ours in zip(plain.model.parameters(), models["policy"].parameters(), strict=True):
            assert (ours - expected).abs().max() < 1e-5
        for name in ("final_loss", "policy_loss", "policy_entropy", "policy_kl"):
            assert metrics[name] == pytest.approx(sum(u.metrics[name] for u in updates) / 2, rel=1e-3, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(sum(u.grad_norm for u in updates) / 2, rel=1e-3)
        lines = [json.loads(line) for line in (tmp_path / "optimizer_steps.jsonl").read_text().splitlines()]
        assert [(line["optimizer_step"], line["num_rows"]) for line in lines] == [(1, 5), (2, 3)]


class TestWeightSync:
    ORDER = (
        ("pause_generation", ()),
        ("wake_sampling", ("weights",)),
        ("sync_weights", ()),
        ("wake_sampling", ("kv_cache",)),
        ("reset_prefix_cache", ()),
        ("resume_generation", ()),
    )

    def test_order(self, dispatch_to):
        backend, client = InProcessBackend(), InferenceClient()
        dispatch = dispatch_to(backend, client=client)
        assert dispatch.get_timing_metrics() == {}
        asyncio.run(dispatch.save_weights_for_sampler())
        assert backend.calls == list(self.ORDER)
        assert client.weight_version == 1
        assert dispatch.get_timing_metrics()["sync_weights_only_transfer"] >= 0

    @pytest.mark.parametrize("failing", ["pause_generation", "wake_sampling", "sync_weights", "reset_prefix_cache"])
    def test_a_failure_ends_the_pause_and_is_raised(self, dispatch_to, failing):
        backend, client = InProcessBackend(failing=(failing,)), InferenceClient()
        dispatch = dispatch_to(backend, client=client)
        with pytest.raises(RuntimeError, match=failing):
            asyncio.run(dispatch.save_weights_for_sampler())
        assert backend.names()[-2:] == [failing, "resume_generation"]
        assert client.weight_version == 0
        assert dispatch.get_timing_metrics() == {}

    @pytest.mark.parametrize("clear", [False, True])
    def test_requests_are_kept_in_mid_generation_where_training_is_asynchronous(self, dispatch_to, clear):
        backend, client = InProcessBackend(), InferenceClient()
        cleared = f"trainer.fully_async.clear_kv_cache_on_weight_sync={str(clear).lower()}"
        dispatch = dispatch_to(backend, "trainer.fully_async.enabled=true", cleared, client=client)
        asyncio.run(dispatch.save_weights_for_sampler())
        sync = ("sync_weights", () if clear else ("keep_cache",))
        assert backend.calls == [("pause_generation", ("keep",)), sync, ("resume_generation", ())]
        assert client.weight_version == 1
        assert dispatch.get_timing_metrics()["sync_weights_only_transfer"] >= 0

    def test_nothing_goes_on_with_weights_that_may_be_half_there(self, dispatch_to):
        backend, client = InProcessBackend(failing=("sync_weights",)), InferenceClient()
        dispatch = dispatch_to(backend, "trainer.fully_async.enabled=true", client=client)
        with pytest.raises(RuntimeError, match="sync_weights"):
            asyncio.run(dispatch.save_weights_for_sampler())
        assert backend.names() == ["pause_generation", "sync_weights"]
        assert client.weight_version == 0

    def test_another_inference_client_is_refused(self, dispatch_to):
        client = InferenceClient()
        dispatch = dispatch_to(InProcessBackend(), client=client)
        dispatch.init_weight_sync_state(client)
        with pytest.raises(UnsupportedError, match="get_inference_client"):
            dispatch.init_weight_sync_state(InferenceClient())


class TestSmallCalls:
    @pytest.mark.parametrize(
        ("overrides", "expected"),
        [
            ((), 12),
            ((NO_KL,), 4),
            (("trainer.policy.sequence_parallel_size=2",), 6),
            (("trainer.policy.sequence_parallel_size=4", "trainer.ref.sequence_parallel_size=3"), 1),
            (("trainer.strategy=megatron", "trainer.policy.megatron_config.tensor_model_parallel_size=4"), 3),
        ],
    )
    def test_least_common_multiple_of_skyrls_sizes_in_use(self, dispatch_to, overrides, expected):
        """Whatever the backend's ranks, which take any number of rows."""
        backend = InProcessBackend(ranks={"policy": 5, "ref": 7})
        gpus = ("trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.ref_num_gpus_per_node=3")
        assert dispatch_to(backend, *gpus, *overrides).get_lcm_dp_size() == expected

    def test_checkpoint_of_the_policy_with_its_tokenizer(self, dispatch_to, tmp_path):
        saved = []
        backend = InProcessBackend()
        dispatch = dispatch_to(backend)
        dispatch.save_checkpoint("policy", str(tmp_path), SimpleNamespace(save_pretrained=saved.append))
        dispatch.finalize_pending_saves("policy")
        assert backend.calls == [("save_checkpoint", ("policy", str(tmp_path)))]
        assert saved == [f"{tmp_path}/huggingface"]

    @pytest.mark.parametrize("model", ["policy", "ref"])
    def test_checkpoint_taken_up(self, dispatch_to, tmp_path, model):
        backend = InProcessBackend()
        dispatch_to(backend).load_checkpoint(model, str(tmp_path))
        assert backend.calls == [("load_checkpoint", (model, str(tmp_path)))]

    def test_export_appears_as_a_whole(self, dispatch_to, tmp_path):
        seen = []

        def save_tokenizer(folder):
            seen.append((tmp_path / "exports" / "policy").exists())
            (Path(folder) / "tokenizer.json").write_text("{}")

        (tmp_path / "exports" / ".saving-policy-0a1b").mkdir(parents=True)
        backend = InProcessBackend()
        target = tmp_path / "exports" / "policy"
        dispatch_to(backend).save_hf_model("policy", str(target), SimpleNamespace(save_pretrained=save_tokenizer))
        assert backend.names() == ["save_weights"]
        assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]
        assert seen == [False]
        assert [path.name for path in target.parent.iterdir()] == ["policy"]

    def test_an_export_that_cannot_be_written_is_told(self, dispatch_to, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=r"file/step/policy could not be written: .*trainer\.export_path"):
            dispatch_to(InProcessBackend()).save_hf_model("policy", str(tmp_path / "file" / "step" / "policy"), None)

    def test_calls_handed_on(self, dispatch_to):
        backend = InProcessBackend()
        dispatch = dispatch_to(backend)
        dispatch.empty_cache()
        dispatch.empty_cache("ref")
        assert dispatch.get_node_ids() == ["this-node"]
        dispatch.mark_all_offloaded()
        assert backend.names() == ["empty_training_cache", "empty_training_cache", "node_ids"]


REFUSED = {
    "weights alone": (
        lambda d: d.load_checkpoint("policy", "/ckpt/global_step_7", load_optimizer_states=False),
        "load_optimizer_states=False",
    ),
    "no schedule": (
        lambda d: d.load_checkpoint("policy", "/ckpt/global_step_7", load_lr_scheduler_states=False),
        "load_lr_scheduler_states=False",
    ),
    "export of the reference": (lambda d: d.save_hf_model("ref", "/exports", None), "'ref' is not served"),
    "a new reference": (lambda d: d.init_model("ref", "/exports"), "update_reference"),
    "profiling of another kind": (lambda d: d.start_profile("policy", {"enable": True}), "config is not served"),
    "profiling the reference": (lambda d: d.start_profile("ref"), "'ref' is not served"),
    "a critic that the recipe has not": (lambda d: d.forward("critic", stated_batch()), "'critic' is not served"),
    "its step": (lambda d: d.optim_step("critic"), "'critic' is not served"),
    "training the reference": (lambda d: d.forward_backward("ref", stated_batch()), "'ref' is not served"),
    "another loss": (
        lambda d: d.forward("policy", stated_batch(), loss_fn="cross_entropy"),
        "loss_fn='cross_entropy'",
    ),
    "another loss's settings": (
        lambda d: d.forward_backward("policy", stated_batch(), loss_fn_config={"eps": 1}),
        "loss_fn_config",
    ),
    "an adapter": (lambda d: d.optim_step("policy", model_id="adapter"), "model_id='adapter'"),
    "an adapter's sync": (lambda d: asyncio.run(d.save_weights_for_sampler("adapter")), "model_id='adapter'"),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_there_yet_is_refused_by_name(dispatch_to, call, said):
    backend = InProcessBackend()
    with pytest.raises(UnsupportedError, match=said.replace("(", r"\(")):
        call(dispatch_to(backend))
    assert backend.calls == []


def test_a_reference_model_that_no_term_uses_is_refused(dispatch_to):
    with pytest.raises(UnsupportedError, match="known models are policy"):
        dispatch_to(InProcessBackend(), NO_KL).forward("ref", stated_batch())
