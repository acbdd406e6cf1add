"""Tests that any backend passes. A backend of your own runs them with pytest::

    from integrations.arctic_rl.backends.contract import BackendContract

    class TestMine(BackendContract):
        backend = "my_package.my_module.MyBackend"

They bring one server up on a tiny random model in float32, on CPUs, and compare it with ``transformers``
(docs/backends.md).
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ..client import ClientConfig, create_arctic_rl_client, make_batch, make_meta
from ..errors import ArcticError
from ..sampling_params import to_vllm_kwargs
from .base import RemoteBackend
from .handle import BackendHandle
from .loop_thread import LoopThread

VOCABULARY, PAD, END = 96, 0, 1
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [20, 21], [30, 31, 32, 33]]
RESPONSES = [[10, 11, 12], [13], [22, 23, 24, 25], [34, 35]]
STEPS = 8
LR = 1e-2
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
"""float32 in two implementations of one model."""


@dataclass(frozen=True)
class Served:
    """A backend that is up."""

    backend: RemoteBackend
    loop: LoopThread
    config: ClientConfig

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.loop.run(getattr(self.backend, name)(*args, **kwargs))

    def log_probs(self, job: str = "policy") -> torch.Tensor:
        """[B, R] of the sample rows."""
        return self.run("log_probs", job, batch(), meta(self, job))

    def generate(self, prompts: list[list[int]], **params: Any) -> list[dict]:
        """Responses of at most 6 tokens."""
        kwargs = to_vllm_kwargs({"max_tokens": 6, "logprobs": 1, "stop_token_ids": [END], **params})
        requests = [
            {"prompt_token_ids": prompt, "params": kwargs, "cache_salt": None, "session_id": None}
            for prompt in prompts
        ]
        return self.run("generate", requests)


def write_model(folder: Path) -> Path:
    """A random model and a tokenizer with one word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {"<pad>": PAD, "<end>": END, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    return folder


def batch(**changes: Any) -> dict[str, torch.Tensor]:
    """The sample rows with advantages and old log-probs."""
    values = {
        "advantages": [[1.0] * len(row) if index % 2 else [-0.5] * len(row) for index, row in enumerate(RESPONSES)],
        "old_log_probs": [[-2.0] * len(row) for row in RESPONSES],
    }
    return make_batch(PROMPTS, RESPONSES, pad_token_id=PAD, **{**values, **changes})


def meta(served: Served, job: str = "policy") -> dict[str, Any]:
    return make_meta(batch(), dp_size=served.backend.dp_size(job), max_tokens_per_micro_batch=12)


def expected_log_probs(model_path: str | Path) -> torch.Tensor:
    """[B, R] of the sample rows from ``transformers``, 0 outside."""
    with torch.no_grad():
        return _log_probs(_reference(model_path)).float()


@dataclass(frozen=True)
class ExpectedUpdate:
    """One mini-batch of the sample rows on ``transformers``, in float64."""

    loss: float
    """The clipped surrogate, a mean over tokens, clip range 0.2."""
    grad_norm: float
    """L2 norm of its gradient, before clipping."""
    weight_norm: float
    """L2 norm of the weights, tied ones once."""


def clipped_loss(logprobs: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The clipped surrogate, a mean over tokens, clip range 0.2."""
    ratio, advantages, mask = (logprobs - rows["old_log_probs"]).exp(), rows["advantages"], rows["loss_mask"]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * mask).sum() / mask.sum()


def expected_update(model_path: str | Path) -> ExpectedUpdate:
    model = _reference(model_path)
    loss = clipped_loss(_log_probs(model), batch())
    loss.backward()

    def norm(tensors: Iterable[torch.Tensor]) -> float:
        return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())

    weights = list(model.parameters())
    return ExpectedUpdate(float(loss.detach()), norm(w.grad for w in weights), norm(w.detach() for w in weights))


def _reference(model_path: str | Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()


def _log_probs(model: torch.nn.Module) -> torch.Tensor:
    """[B, R] of the sample rows, a row at a time."""
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        of_tokens = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(of_tokens, (0, max(map(len, RESPONSES)) - len(response))))
    return torch.stack(rows)


UPDATE = {"loss_fn": "grpo", "config": {"clip_ratio": 0.2, "loss_agg_mode": "token-mean"}}


class BackendContract:
    """See the module; subclasses set ``backend``, and ``settings`` where the server needs more."""

    backend: ClassVar[str] = "builtin"
    """Registered name or dotted path."""
    settings: ClassVar[dict[str, Any]] = {}
    """More fields of ``ClientConfig``."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        values = {
            "model_path": str(model_path),
            "reference_path": str(model_path),
            "backend": cls.backend,
            "lr": LR,
            "scheduler": "constant",
            "max_model_len": 128,
            "cpu_kv_cache_gib": 0.05,
            "log_dir": str(tmp_path_factory.mktemp("logs")),
        }
        config = ClientConfig(**{**values, **cls.settings})
        loop = LoopThread("contract")
        backend = create_arctic_rl_client(config)
        try:
            loop.run(backend.initialize(STEPS))
            yield Served(backend, loop, config)
        finally:
            loop.run(backend.destroy())
            loop.close()

    def test_log_probs_are_those_of_transformers(self, served: Served, model_path: Path) -> None:
        expected = expected_log_probs(model_path)
        for job in ("policy", "ref"):
            assert served.backend.dp_size(job) >= 1
            found = served.log_probs(job)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, **CLOSE)

    def test_rollouts_carry_the_log_probs_of_their_tokens(self, served: Served) -> None:
        first = served.generate(PROMPTS, temperature=0.0)
        assert [result["token_ids"] for result in served.generate(PROMPTS[::-1], temperature=0.0)] == [
            result["token_ids"] for result in first[::-1]
        ]
        for result in first:
            assert result["stop_reason"] in ("stop", "length")
            assert 1 <= len(result["token_ids"]) == len(result["logprobs"]) <= 6
        sampled = served.generate(PROMPTS, temperature=0.8, seed=11)
        assert served.generate(PROMPTS, temperature=0.8, seed=11) == sampled
        unseeded = served.generate(PROMPTS[:1] * 8, temperature=1.0)
        assert len({tuple(result["token_ids"]) for result in unseeded}) > 1, "a group without seeds is no group"
        rows = make_batch(PROMPTS, [result["token_ids"] for result in sampled], pad_token_id=PAD)
        scalars = make_meta(rows, dp_size=served.backend.dp_size("policy"), temperature=0.8)
        found = served.run("log_probs", "policy", rows, scalars)
        for row, result in zip(found, sampled, strict=True):
            torch.testing.assert_close(row[: len(result["logprobs"])], torch.tensor(result["logprobs"]), **CLOSE)

    def test_an_update_changes_the_weights_once_a_step_and_reaches_the_engines(
        self, served: Served, model_path: Path, tmp_path: Path
    ) -> None:
        before, norm = served.log_probs(), served.run("weight_norm", "policy")
        expected = expected_update(model_path)
        assert norm == pytest.approx(expected.weight_norm, rel=1e-5)
        result = served.run("fwd_bwd", batch(), meta(served), UPDATE)
        assert result["avg_loss"] == pytest.approx(expected.loss, abs=1e-4)
        assert result["metrics"]["pg_loss"] == pytest.approx(result["avg_loss"], abs=1e-6)
        assert served.run("weight_norm", "policy") == norm
        step = served.run("step")
        assert step["lr"] == LR
        assert step["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3), "whatever the number of ranks"
        assert served.run("weight_norm", "policy") != norm
        after = served.log_probs()
        assert not torch.allclose(after, before, atol=1e-3)
        torch.testing.assert_close(served.log_probs("ref"), before, **CLOSE)

        version = served.run("update_weights")
        assert served.run("update_weights") == version + 1
        ranks = served.backend.dp_size("policy")
        prompts = PROMPTS[:1] * ranks
        results = served.generate(prompts, temperature=1.0, seed=3)
        rows = make_batch(prompts, [result["token_ids"] for result in results], pad_token_id=PAD)
        found = served.run("log_probs", "policy", rows, make_meta(rows, dp_size=ranks))
        sampled = torch.tensor([result["logprobs"] for result in results])
        torch.testing.assert_close(found, sampled, **CLOSE)

        served.run("save_weights", str(tmp_path / "export"))
        torch.testing.assert_close(expected_log_probs(tmp_path / "export"), after, **CLOSE)

    def test_the_reference_becomes_a_copy_of_the_policy(self, served: Served) -> None:
        served.run("update_reference")
        torch.testing.assert_close(served.log_probs("ref"), served.log_probs(), **CLOSE)

    def test_gradients_add_up_until_the_step(self, served: Served, tmp_path: Path) -> None:
        served.run("save_checkpoint", "policy", str(tmp_path / "policy"))
        norms = []
        for calls in (1, 2):
            served.run("load_checkpoint", "policy", str(tmp_path / "policy"))
            for _ in range(calls):
                served.run("fwd_bwd", batch(), meta(served), UPDATE)
            norms.append(served.run("step")["grad_norm"])
        assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)

    def test_a_second_mini_batch_is_measured_against_the_log_probs_of_before_the_first(self, served: Served) -> None:
        old = served.log_probs()
        before, ranks = old.clone(), served.backend.dp_size("policy")
        for number, half in enumerate((slice(0, 2), slice(2, 4))):
            rows = {name: value[half] for name, value in (batch() | {"old_log_probs": old}).items()}
            new = served.log_probs()[half]
            moved = ((new - old[half]).exp() - 1).abs()[rows["loss_mask"] > 0].mean()
            assert moved < 1e-4 if number == 0 else moved > 1e-3
            result = served.run("fwd_bwd", rows, make_meta(rows, dp_size=ranks), UPDATE)
            assert result["avg_loss"] == pytest.approx(float(clipped_loss(new, rows)), abs=1e-4)
            served.run("step")
        assert torch.equal(old, before)

    def test_a_checkpoint_brings_weights_and_optimizer_back(self, served: Served, tmp_path: Path) -> None:
        def update() -> torch.Tensor:
            served.run("fwd_bwd", batch(), meta(served), UPDATE)
            served.run("step")
            return served.log_probs()

        update()
        saved, norm = served.log_probs(), served.run("weight_norm", "policy")
        served.run("save_checkpoint", "policy", str(tmp_path / "policy"))
        following = update()
        outcome = served.run("load_checkpoint", "policy", str(tmp_path / "policy"))
        assert {"same_ranks", "same_engines", "optimizer_steps", "saved", "now"} <= set(outcome)
        assert served.run("weight_norm", "policy") == norm
        assert torch.equal(served.log_probs(), saved)
        assert torch.equal(update(), following)

    def test_what_cannot_be_served_is_refused_and_changes_nothing(self, served: Served) -> None:
        norm = served.run("weight_norm", "policy")
        without_old = {name: value for name, value in batch().items() if name != "old_log_probs"}
        wrong = [
            ("a loss that is not known", batch(), {"loss_fn": "no_such_loss", "config": {}}),
            ("token ids that the model has not", _with_id(VOCABULARY + 3), UPDATE),
            ("no old log-probs", without_old, UPDATE),
            ("old log-probs under another name", without_old | {"old_log_prob": batch()["old_log_probs"]}, UPDATE),
            ("tensors of another height", {**batch(), "advantages": batch()["advantages"][:2]}, UPDATE),
            ("a setting that is not known", batch(), {**UPDATE, "config": {"clip_ration": 0.2}}),
        ]
        for what, rows, processing in wrong:
            with pytest.raises((ArcticError, ValueError)):
                served.run("fwd_bwd", rows, meta(served), processing)
                pytest.fail(f"{what} was taken")
        ranks = served.backend.dp_size("policy")
        counts = ("batch_num_tokens", "global_batch_size")
        of_counts = [
            meta(served) | {"dp_size": None},
            meta(served) | {"dp_size": ranks + 1},
            {name: value for name, value in meta(served).items() if name != "dp_size"},
            {name: value for name, value in meta(served).items() if name not in counts},
        ]
        for scalars in of_counts:
            with pytest.raises((ArcticError, ValueError)):
                served.run("fwd_bwd", batch(), scalars, UPDATE)
                pytest.fail(f"dp_size={scalars.get('dp_size')} was taken for {ranks} ranks")
        assert served.run("weight_norm", "policy") == norm
        served.run("fwd_bwd", batch(), meta(served), UPDATE)
        served.run("step")
        assert served.run("weight_norm", "policy") != norm

    def test_paused_requests_wait(self, served: Served) -> None:
        served.run("pause_generation")
        kwargs = to_vllm_kwargs({"max_tokens": 3, "temperature": 0.0})
        requests = [{"prompt_token_ids": PROMPTS[0], "params": kwargs, "cache_salt": None, "session_id": None}]

        async def held() -> bool:
            task = asyncio.ensure_future(served.backend.generate(requests))
            await asyncio.sleep(0.5)
            waiting = not task.done()
            await served.backend.resume_generation()
            return waiting and len(await asyncio.wait_for(task, 60)) == 1

        assert served.loop.run(held())

    def test_a_sleeping_job_refuses_until_it_wakes(self, served: Served) -> None:
        cases: list[tuple[str, tuple, str, tuple, Callable[[], Any]]] = [
            ("sleep_sampling", (1,), "wake_sampling", (None,), lambda: served.generate(PROMPTS[:1])),
            ("sleep_training", (), "wake_training", (), lambda: served.log_probs("policy")),
            ("sleep_log_prob", (), "wake_log_prob", (), lambda: served.log_probs("ref")),
        ]
        for sleep, sleep_args, wake, wake_args, call in cases:
            served.run(sleep, *sleep_args)
            with pytest.raises(ArcticError):
                call()
            served.run(wake, *wake_args)
            call()
        served.run("empty_training_cache")
        served.run("reset_prefix_cache")

    def test_another_process_attaches_with_the_handle(self, served: Served) -> None:
        handle = served.backend.reconnect_handle()
        assert isinstance(handle, BackendHandle)
        assert "lr" not in repr(handle) + repr(dict(handle.facts))
        other = create_arctic_rl_client(served.config, _carried(handle))
        try:
            found = served.loop.run(other.log_probs("policy", batch(), meta(served)))
            torch.testing.assert_close(found, served.log_probs(), rtol=0, atol=1e-6)
            assert other.dp_size("policy") == served.backend.dp_size("policy")
            version = served.loop.run(other.update_weights())
            assert served.run("update_weights") == version + 1
        finally:
            served.loop.run(other.destroy())
        served.log_probs()

    def test_requires_single_forwarder_is_stated(self, served: Served) -> None:
        assert isinstance(served.backend.requires_single_forwarder(), bool)
        assert served.run("node_ids")


def _with_id(token_id: int) -> dict[str, torch.Tensor]:
    responses = [[token_id, *RESPONSES[0][1:]], *RESPONSES[1:]]
    values = {name: [[0.0] * len(row) for row in RESPONSES] for name in ("advantages", "old_log_probs")}
    return make_batch(PROMPTS, responses, pad_token_id=PAD, **values)


def _carried(handle: BackendHandle) -> BackendHandle:
    """The handle after a trip to another process; one with Ray actors travels with Ray."""
    if not handle.actors:
        return pickle.loads(pickle.dumps(handle))
    import ray

    return ray.get(ray.put(handle))
