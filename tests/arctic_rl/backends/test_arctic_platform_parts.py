"""The parts of the backend for ``arctic-platform`` that need no server: prompts as text, rows, answers, its config."""

import json
import pickle
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.backends.arctic_platform import checkpoints, jobs
from integrations.arctic_rl.backends.arctic_platform.backend import ArcticPlatformBackend
from integrations.arctic_rl.backends.arctic_platform.prompt_text import PromptTexts, check_prompt_seen, check_prompts
from integrations.arctic_rl.backends.arctic_platform.rollouts import group_requests, rollout, server_params
from integrations.arctic_rl.backends.arctic_platform.rows import check_rows, pad_rows, row_chunks
from integrations.arctic_rl.backends.handle import BackendHandle
from integrations.arctic_rl.client import ClientConfig
from integrations.arctic_rl.errors import ArcticError, CheckpointError, ConfigError, RequestError, UnsupportedError
from integrations.arctic_rl.sampling_params import to_vllm_kwargs

URL = "http://127.0.0.1:8000"
STATUS = {"training_gpus": 2, "sampling_gpus": 3, "log_prob_gpus": 1, "jobs": {}}


def server_config(**changes):
    settings = {"model_path": "m", "reference_path": "m", "dtype": "bfloat16", "server_url": URL}
    return ClientConfig(**{**settings, "scheduler": "constant", **changes}).server_config()


def merging_tokenizer(first=None):
    """Letters, one merge (a b -> ab), a marker, and a first token that is added to every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"ab": len(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<first>", "<user>"])
    if first is not None:
        pair = [("<first>", tokenizer.token_to_id("<first>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<first> $A", special_tokens=pair)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class TestPromptTexts:
    @pytest.mark.parametrize("first", [None, "<first>"])
    @pytest.mark.parametrize("text", ["<user>cab, ab", "  two  spaces \n", "ünï€ 漢", "<user><user>", "a b", "'s 't"])
    def test_the_text_has_the_very_tokens(self, first, text):
        tokenizer = merging_tokenizer(first)
        ids = tokenizer(text).input_ids
        found = PromptTexts(tokenizer).text(ids)
        assert tokenizer(found).input_ids == ids
        assert found == text

    def test_tokens_that_no_text_has_are_refused(self):
        tokenizer = merging_tokenizer()
        a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
        with pytest.raises(UnsupportedError, match=r"arctic-platform.*no text|other tokens than its 2 ids"):
            PromptTexts(tokenizer).text([a, b])
        half = tokenizer("漢").input_ids[:2]
        with pytest.raises(UnsupportedError, match="other tokens"):
            PromptTexts(tokenizer).text(half)

    def test_a_tokenizers_own_first_token_must_stand_there(self):
        tokenizer = merging_tokenizer("<first>")
        with pytest.raises(UnsupportedError, match="other tokens"):
            PromptTexts(tokenizer).text(tokenizer("cab").input_ids[1:])


class TestPromptsOfADataSet:
    def dataset(self, *prompts):
        return SimpleNamespace(prompt_key="prompt", dataframe={"prompt": list(prompts)})

    def test_every_row_is_looked_at_and_the_rows_without_a_text_are_named(self):
        tokenizer = merging_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}<user>{{ m['content'] }}{{ tail }}{% endfor %}"
        rows = self.dataset(*([{"role": "user", "content": text}] for text in ("cab", "b a")))
        check_prompts(rows, tokenizer, chat_template_kwargs={"tail": "!"}, setting="data.train_data")

        a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
        tokenizer.apply_chat_template = lambda ids, **_: ids
        with pytest.raises(ConfigError) as caught:
            check_prompts(
                self.dataset([a], [a, b], [b], *[[a, b]] * 20), tokenizer, chat_template_kwargs=None, setting="x"
            )
        lines = str(caught.value).splitlines()
        assert len(lines) == 10 and lines[0].startswith("x, row 1: ") and lines[1].startswith("x, row 3: ")


SEEN = {"prompt_len": 3, "prompt_logprobs": [None, {"7": {"logprob": -1.0}}, {"8": {"logprob": -2.0}}]}


class TestPromptSeen:
    def test_the_same_prompt(self):
        check_prompt_seen([5, 7, 8], SEEN, whole=True)
        check_prompt_seen([5, 7, 8], {}, whole=False)

    @pytest.mark.parametrize(
        ("ids", "answer", "whole"),
        [
            ([5, 7, 9], SEEN, True),
            ([5, 7, 8, 9], SEEN, False),
            ([5, 7, 8], {"prompt_len": 4}, False),
            ([5, 7, 8], {"prompt_len": 3}, True),
            ([5, 7, 8], {"prompt_logprobs": SEEN["prompt_logprobs"][:2]}, True),
        ],
    )
    def test_another_prompt_or_none_told(self, ids, answer, whole):
        with pytest.raises(ArcticError, match=r"another prompt|no prompt_logprobs"):
            check_prompt_seen(ids, answer, whole=whole)


class TestRollouts:
    def test_ids_and_log_probs_come_back_as_they_are(self):
        answer = {
            "token_ids": [4, 9],
            "finish_reason": "stop",
            "logprobs": [{"4": {"logprob": -0.5, "rank": 1}}, {"7": {"logprob": -0.1}, "9": {"logprob": -2.0}}],
        }
        result = rollout(json.loads(json.dumps(answer)), with_logprobs=True, version=3)
        assert result["token_ids"] == [4, 9] and result["logprobs"] == [-0.5, -2.0]
        assert result["stop_reason"] == "stop" and result["weight_version"] == result["last_weight_version"] == 3
        assert rollout(answer, with_logprobs=False, version=0)["logprobs"] is None

    @pytest.mark.parametrize(
        "answer",
        [
            {"text": "ab", "finish_reason": "stop"},
            {"token_ids": [4, 9], "finish_reason": "stop"},
            {"token_ids": [4, 9], "finish_reason": "stop", "logprobs": [{"4": {"logprob": -0.5}}]},
        ],
    )
    def test_what_is_missing_is_told(self, answer):
        with pytest.raises(ArcticError, match=r"without token ids|log-probs with 2 tokens"):
            rollout(answer, with_logprobs=True, version=0)

    def test_parameters_are_vllms_own_after_the_wire(self):
        from vllm import SamplingParams

        params = to_vllm_kwargs({"max_tokens": 5, "logprobs": 1, "stop": ["x"], "stop_token_ids": [3], "seed": 8})
        sent = json.loads(json.dumps(server_params(params, [2, 3])))
        built = SamplingParams(**sent)
        assert (built.max_tokens, built.logprobs, built.seed, built.temperature) == (5, 0, 8, 1.0)
        assert sorted(built.stop_token_ids) == [2, 3] and built.stop == ["x"]
        assert server_params(params | {"ignore_eos": True}, [2])["stop_token_ids"] == [3]

    def test_logit_bias_is_refused(self):
        params = to_vllm_kwargs({"max_tokens": 5, "logit_bias": {3: 1.0}})
        with pytest.raises(UnsupportedError, match="logit_bias"):
            server_params(params, [])

    def test_one_call_takes_requests_with_equal_parameters(self):
        requests = [{"params": {"seed": seed, "stop": []}} for seed in (1, None, 1, 2, None)]
        assert group_requests(requests) == [[0, 2], [1, 4], [3]]


class TestRows:
    def test_padding_carries_no_loss(self):
        batch = {name: torch.arange(1, 11).view(5, 2) for name in ("input_ids", "loss_mask", "response_mask", "other")}
        padded = pad_rows(batch, 4)
        assert len(padded["input_ids"]) == 8
        for name, values in padded.items():
            assert torch.equal(values[:5], batch[name])
            zero = name.endswith("_mask")
            assert torch.equal(values[5:], torch.zeros(3, 2).long() if zero else batch[name][-1:].expand(3, 2))
        assert batch["loss_mask"][-1].tolist() == [9, 10]
        assert pad_rows(batch, 5)["input_ids"].shape == (5, 2)

    def test_chunks_are_the_batch(self):
        batch = {"input_ids": torch.arange(14).view(7, 2)}
        chunks = list(row_chunks(batch, 3))
        assert [len(chunk["input_ids"]) for chunk in chunks] == [3, 3, 1]
        assert torch.equal(torch.cat([chunk["input_ids"] for chunk in chunks]), batch["input_ids"])
        assert len(list(row_chunks(batch, None))) == 1

    def test_batches_that_are_none(self):
        rows = {name: torch.zeros(2, 3) for name in ("input_ids", "attention_mask", "prompts")}
        check_rows(rows)
        for wrong in (rows | {"prompts": None}, rows | {"advantages": torch.zeros(3, 3)}):
            with pytest.raises(RequestError):
                check_rows(wrong)
        with pytest.raises(RequestError):
            check_rows({name: values[:0] for name, values in rows.items()})


class TestConfig:
    @pytest.mark.parametrize(
        ("ranks", "mini", "micro", "pieces"),
        [(1, 8, 2, 4), (2, 8, 2, 2), (2, 9, 2, 3), (4, 4, 8, 1), (1, None, 2, 1), (1, 8, None, 1)],
    )
    def test_micro_batches_of_a_step(self, ranks, mini, micro, pieces):
        config = server_config(policy_ranks=ranks, mini_batch_rows=mini, micro_batch_rows=micro)
        assert jobs.micro_batches_of_a_step(config) == pieces
        assert jobs.training_config(config)["gradient_accumulation_steps"] == pieces

    def test_every_setting_of_the_optimizer_is_in_the_engines_config(self):
        config = server_config(lr=3e-4, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=0.5, zero_stage=3)
        told = jobs.training_config(config)
        params = told["optimizer"]["params"]
        assert (params["lr"], params["betas"], params["weight_decay"]) == (3e-4, [0.8, 0.95], 0.1)
        assert told["gradient_clipping"] == 0.5 and told["zero_optimization"]["stage"] == 3
        assert told["bf16"] == {"enabled": True} and told["torch_autocast"] == {"enabled": False}
        assert "scheduler" not in told and "managed_gradient_accumulation" not in told

    def test_the_clients_own_config_takes_it(self):
        pytest.importorskip("arctic_platform", reason="the extra arctic-platform is not installed")
        config = server_config(gradient_checkpointing=True, max_model_len=77, policy_ranks=2, engines=3, seed=5)
        told = jobs.client_config(config, request_timeout_s=9.0, context_length=512)
        training, sampling, reference = (told.to_onprem(name) for name in ("training", "sampling", "log_prob"))
        assert training["ds_worker_config"]["enable_gradient_checkpointing"] is True
        assert training["checkpoint_path"] and training["seed"] == 5
        kept = (training["ds_worker_config"][name] for name in ("attn_implementation", "use_liger"))
        assert tuple(kept) == ("flash_attention_2", False)
        kernels = {"attention": "flash_attention_3", "use_liger": True, "use_zorro": False}
        policy = replace(config.policy, device="cuda", **kernels)
        other = jobs.client_config(replace(config, policy=policy), request_timeout_s=9.0, context_length=512)
        kept = (other.training.ds_worker_config[name] for name in ("attn_implementation", "use_liger"))
        assert tuple(kept) == ("flash_attention_3", True)
        assert sampling["vllm_config"]["max_model_len"] == 77
        assert sampling["vllm_config"]["logprobs_mode"] == "processed_logprobs"
        assert reference["log_prob_config"]["zero_optimization"] == {"stage": 0}
        assert reference["ds_config"] == training["ds_config"]
        assert (told.training_gpus, told.sampling_gpus, told.log_prob_gpus) == (2, 3, 1)
        told = jobs.client_config(server_config(), request_timeout_s=9.0, context_length=512)
        assert told.to_onprem("sampling")["vllm_config"]["max_model_len"] == 512

    def test_vllm_knows_the_engines_arguments(self):
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = {field.name for field in fields(AsyncEngineArgs)}
        assert set(jobs.engine_arguments(server_config(max_model_len=9).sampling)) <= known

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"dtype": "float32"}, "dtype"),
            ({"zero_stage": 0}, "zero_stage"),
            ({"scheduler": "cosine"}, "scheduler"),
            ({"scheduler": "constant_with_warmup", "num_warmup_steps": 3}, "num_warmup_steps"),
            ({"use_zorro": True}, "use_zorro"),
            ({"processor_modules": ("json",)}, "processor_modules"),
            ({"reference_path": "another"}, "reference_path"),
        ],
    )
    def test_a_scripts_setting_that_would_be_ignored_is_refused(self, change, name):
        with pytest.raises(UnsupportedError, match=rf"^{name}="):
            jobs.check_config(server_config(**change))

    def test_jobs_that_the_server_has_not_are_refused(self):
        config = server_config()
        with pytest.raises(UnsupportedError, match=r"^critic"):
            jobs.check_config(replace(config, critic=config.policy, critic_ranks=1))

    @pytest.mark.parametrize(
        "url", [None, "", "127.0.0.1:8000", "https://h:1", "http://h", "http://h:1/x", "http://h:x"]
    )
    def test_addresses_that_the_client_cannot_be_told(self, url):
        with pytest.raises(ConfigError, match=r"trainer\.arctic_rl\.server_url="):
            jobs.server_address(url)
        assert jobs.server_address("http://h:7/") == ("h", 7)

    def test_a_server_of_another_size_or_in_use(self):
        config = server_config(policy_ranks=2, engines=3)
        assert list(jobs.allocation_problems(config, STATUS)) == []
        assert (
            list(jobs.allocation_problems(server_config(policy_ranks=2, engines=3, reference_path=None), STATUS)) == []
        )
        wrong = STATUS | {"training_gpus": 4, "log_prob_gpus": 0, "jobs": {"3": {"job_type": "sampling"}}}
        lines = list(jobs.allocation_problems(config, wrong))
        assert [line.split(":")[0] for line in lines] == [
            "trainer.placement.policy_num_gpus_per_node",
            "trainer.placement.ref_num_gpus_per_node",
            "the server has jobs of another run",
        ]
        assert "--training-gpus 4" in lines[0]

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setattr(jobs, "version", lambda name: "0.1.3")
        with pytest.raises(ConfigError, match=r"arctic-platform is 0\.1\.3 here.*0\.1\.4"):
            jobs.check_package()


class TestCheckpoints:
    optimizer = server_config(lr=1e-3).policy.optimizer

    def saved(self, folder):
        (folder / "latest").write_text("global_step4")
        checkpoints.write_facts(str(folder), {"global_step": 4}, self.optimizer)

    def test_facts_come_back(self, tmp_path):
        self.saved(tmp_path)
        changed = replace(self.optimizer, max_grad_norm=0.25)
        facts = checkpoints.read_facts(str(tmp_path), changed)
        outcome = checkpoints.load_outcome(str(tmp_path), facts, {"global_step": 4}, changed)
        assert outcome["optimizer_steps"] == 4 and not outcome["same_ranks"] and not outcome["same_engines"]
        differing = [name for name, value in outcome["now"].items() if value != outcome["saved"][name]]
        assert differing == ["max_grad_norm"]

    def test_settings_that_the_server_would_take_from_the_checkpoint(self, tmp_path):
        self.saved(tmp_path)
        with pytest.raises(CheckpointError, match=r"optimizer_config: lr=0.002, .* 0.001 would"):
            checkpoints.read_facts(str(tmp_path), replace(self.optimizer, lr=2e-3))

    def test_a_load_that_loaded_nothing(self, tmp_path):
        self.saved(tmp_path)
        facts = checkpoints.read_facts(str(tmp_path), self.optimizer)
        with pytest.raises(CheckpointError, match="loaded step 0"):
            checkpoints.load_outcome(str(tmp_path), facts, {"global_step": 0}, self.optimizer)

    def test_folders_that_are_not_shared(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"trainer\.ckpt_path must be"):
            checkpoints.write_facts(str(tmp_path), {"global_step": 4}, self.optimizer)
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            checkpoints.read_facts(str(tmp_path), self.optimizer)
        with pytest.raises(CheckpointError, match=r"trainer\.export_path must be"):
            checkpoints.move_export(str(tmp_path / "hf"), str(tmp_path / "out"), str(tmp_path / "scratch"))


class TestBackend:
    @pytest.fixture
    def backend(self):
        pytest.importorskip("arctic_platform", reason="the extra arctic-platform is not installed")
        return ArcticPlatformBackend.from_config(server_config(policy_ranks=2))

    def test_nothing_is_asked_of_a_server_before_it_is_needed(self, backend):
        assert (backend.dp_size("policy"), backend.dp_size("ref")) == (2, 1)
        assert backend.requires_single_forwarder()
        with pytest.raises(UnsupportedError, match="critic"):
            backend.dp_size("critic")
        with pytest.raises(ArcticError, match="call initialize first"):
            backend.reconnect_handle()

    def test_a_handle_names_the_jobs_and_no_setting(self, backend):
        backend._client = SimpleNamespace(jobs=SimpleNamespace(training=3, sampling=1, log_prob=None))
        handle = pickle.loads(pickle.dumps(backend.reconnect_handle()))
        assert handle == BackendHandle("arctic-platform", {"policy": "3", "sampling": "1"}, URL)
        other = ArcticPlatformBackend.from_config(server_config(server_url=None), handle)
        found = other._jobs()
        assert (found.training, found.sampling, found.log_prob) == (3, 1, None)
        assert other._connected().transport.base_url == URL
