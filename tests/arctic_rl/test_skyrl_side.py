"""Config, refusals and checks against SkyRL's own config classes (importing them takes a while)."""

import dataclasses
import json
import os
import pickle
import re
import sys

import pytest
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
from skyrl.train.config.config import AlgorithmConfig, make_config
from skyrl.train.utils import validate_cfg
from skyrl_gym.envs.registration import registry

from integrations.arctic_rl.checkpoint import set_latest, write_manifest
from integrations.arctic_rl.checks import setting_problems
from integrations.arctic_rl.dry_run import report
from integrations.arctic_rl.entrypoint import load_config
from integrations.arctic_rl.errors import ConfigError, UnsupportedError
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.loss_config import actor_config
from integrations.arctic_rl.preflight import checkpoint_problems, data_problems, model_kind_problems, model_problems
from integrations.arctic_rl.runtime_env import runtime_env_vars
from integrations.arctic_rl.server.sampling_spec import engine_arguments
from integrations.arctic_rl.server_config import server_config
from integrations.arctic_rl.skyrl_config import leaf_names, parse_config
from integrations.arctic_rl.support import refusals, without_effect

BASE = ["trainer.logger=console"]


def parse(*overrides):
    return parse_config([*BASE, *overrides])


def validated(*overrides):
    cfg = parse(*overrides)
    validate_cfg(cfg)
    return cfg


class TestParsing:
    def test_the_override_itself_is_left_out_and_ours_are_optional(self):
        cfg = parse("trainer.override_entrypoint=integrations.arctic_rl.entrypoint")
        assert cfg.trainer.arctic_rl.backend == "builtin"

    def test_unknown_setting_of_ours(self):
        with pytest.raises(ConfigError, match=r"trainer.arctic_rl.zero_stge.*did you mean 'zero_stage'"):
            parse("trainer.arctic_rl.zero_stge=2")

    def test_each_unknown_setting_of_skyrl_is_one_line_that_names_the_nearest(self):
        with pytest.raises(ValueError) as caught:
            parse("trainer.algorithm.eps_clip_lo=0.1", "trainer.epohcs=1")
        assert str(caught.value).splitlines() == [
            "trainer.algorithm.eps_clip_lo: did you mean 'trainer.algorithm.eps_clip_low'?",
            "trainer.epohcs: did you mean 'trainer.epochs'?",
        ]

    def test_unknown_fields_of_a_mapping_keep_skyrls_message(self):
        with pytest.raises(ConfigError, match=r"^Invalid fields .'eps'. for AlgorithmConfig$"):
            parse("trainer.algorithm={eps: 1}")

    def test_a_plus_is_refused_with_what_to_write(self):
        with pytest.raises(ConfigError) as caught:
            parse("+trainer.epochs=3", "+trainer.epohcs=3")
        first, second = str(caught.value).splitlines()
        assert first.startswith("+trainer.epochs=3:") and first.endswith("write trainer.epochs=3")
        assert second.startswith("+trainer.epohcs=3:") and "did you mean 'trainer.epochs'" in second

    def test_dataloader_processes_are_only_started_when_asked_for(self):
        assert parse().data.dataloader.num_workers == 0
        assert parse("data.dataloader.num_workers=3").data.dataloader.num_workers == 3

    def test_a_recipes_own_config_class_gets_our_settings(self):
        @dataclasses.dataclass
        class MyAlgorithm(AlgorithmConfig):
            my_knob: int = 3

        overrides = ["trainer.arctic_rl.zero_stage=3", "trainer.algorithm.my_knob=7"]
        cfg = parse_config(overrides, make_config(algorithm_cls=MyAlgorithm))
        assert (cfg.trainer.arctic_rl.zero_stage, cfg.trainer.algorithm.my_knob) == (3, 7)

    def test_the_config_crosses_a_process(self):
        cfg = parse("trainer.arctic_rl.zero_stage=3")
        assert pickle.loads(pickle.dumps(cfg)) == cfg


REFUSED = {
    "trainer.policy.model.lora.rank": "-8",
    "trainer.ref.language_model_only": "true",
    "trainer.mtp.enabled": "true",
    "generator.vision_language_generator": "true",
    "generator.sampling_params.repetition_penalty": "1.1",
    "generator.inference_engine.enable_return_routed_experts": "true",
    "generator.inference_engine.engine_init_kwargs.quantization": "fp8",
    "generator.inference_engine.run_engines_locally": "false",
    "trainer.fully_async.simulate_training": "true",
    "trainer.resume_mode": "from_path",
    "trainer.ckpt_path": "s3://bucket/ckpt",
    "trainer.policy.fsdp_config.mixed_precision.reduce_dtype": "bf16",
    "generator.inference_engine.backend": "sglang",
}


class TestRefusals:
    def test_skyrls_defaults_are_accepted(self):
        assert refusals(validated()) == []

    @pytest.mark.parametrize(("setting", "value"), REFUSED.items())
    def test_each_is_refused_by_name_with_what_to_write(self, setting, value):
        lines = refusals(parse(f"{setting}={value}"))
        assert len(lines) == 1
        assert lines[0].split("=")[0] in setting
        assert ";" in lines[0]

    def test_all_are_reported_at_once(self):
        cfg = parse(
            "trainer.policy.inference_only_init=true",
            "generator.vision_language_generator=true",
            "trainer.mtp.enabled=true",
        )
        assert len(refusals(cfg)) == 3

    def test_what_has_no_effect_is_said_not_refused(self):
        cfg = parse("trainer.flash_attn=false", "trainer.policy.fsdp_config.cpu_offload=true")
        assert refusals(cfg) == []
        assert len(without_effect(cfg)) == 2


def preflight_problems(cfg):
    checks = (data_problems, model_problems, model_kind_problems, checkpoint_problems)
    return [line for check in checks for line in check(cfg)]


class TestPreflight:
    @pytest.mark.parametrize(("env_class", "there"), [("text2sql", False), ("text2sql", True), ("gsm8k", False)])
    def test_the_databases_of_text2sql_are_looked_for(self, tmp_path, env_class, there):
        folder = tmp_path if there else tmp_path / "databases"
        settings = [f"environment.env_class={env_class}", f"environment.skyrl_gym.text2sql.db_path={folder}"]
        lines = [line for line in inspect_config(parse(*settings)).missing if "db_path" in line]
        assert len(lines) == (env_class == "text2sql" and not there)
        assert all(line.startswith(f"environment.skyrl_gym.text2sql.db_path={folder}: ") for line in lines)

    def folder(self, tmp_path, *files):
        for name in files:
            (tmp_path / name).write_text("{}")
        return tmp_path

    def cfg(self, tmp_path, *overrides):
        data = self.folder(tmp_path, "train.parquet", "config.json", "model.safetensors")
        return parse(
            f"data.train_data=['{data}/train.parquet']",
            "trainer.eval_interval=-1",
            f"trainer.policy.model.path={data}",
            f"trainer.ckpt_path={tmp_path}/ckpt",
            *overrides,
        )

    def test_a_complete_recipe_passes(self, tmp_path):
        assert preflight_problems(self.cfg(tmp_path)) == []

    def test_every_problem_is_reported_at_once(self, tmp_path):
        (tmp_path / "empty").mkdir()
        cfg = self.cfg(
            tmp_path,
            "data.train_data=['/nowhere/train.parquet']",
            f"trainer.policy.model.path={tmp_path}/empty",
            "trainer.ref.model.path=/nowhere/model",
        )
        problems = "\n".join(preflight_problems(cfg))
        for said in ("/nowhere/train.parquet: no such file", "no config.json", "no weights", "no such folder"):
            assert said in problems

    def checkpoint(self, tmp_path):
        folder = tmp_path / "ckpt" / "global_step_7"
        (folder / "policy").mkdir(parents=True)
        write_manifest(folder, 7)
        set_latest(folder.parent, 7)
        return folder

    def test_a_checkpoint_to_go_on_from(self, tmp_path):
        folder = self.checkpoint(tmp_path)
        from_path = ("trainer.resume_mode=from_path", f"trainer.resume_path={folder}")
        for overrides in ((), from_path, ("trainer.resume_mode=null",)):
            assert preflight_problems(self.cfg(tmp_path, *overrides)) == []

    def test_a_checkpoint_that_is_not_whole(self, tmp_path):
        folder = self.checkpoint(tmp_path)
        (folder / "manifest.json").unlink()
        for overrides, said in (
            ((), "trainer.resume_mode=latest"),
            (("trainer.resume_mode=from_path", f"trainer.resume_path={folder}"), f"trainer.resume_path={folder}"),
        ):
            (line,) = preflight_problems(self.cfg(tmp_path, *overrides))
            assert line.startswith(said) and "manifest.json" in line
        assert preflight_problems(self.cfg(tmp_path, "trainer.resume_mode=null")) == []

    def test_a_checkpoint_of_a_run_of_another_kind(self, tmp_path):
        folder = self.checkpoint(tmp_path)
        critic = (f"trainer.critic.model.path={tmp_path}", "trainer.algorithm.advantage_estimator=gae")
        (line,) = preflight_problems(self.cfg(tmp_path, *critic))
        assert line.startswith("trainer.resume_mode=latest") and "holds no critic" in line
        (folder / "critic").mkdir()
        (folder / "critic" / "share").touch()
        (folder / "fully_async_state.pt").touch()
        write_manifest(folder, 7)
        held, kind = preflight_problems(self.cfg(tmp_path))
        assert "holds a critic" in held and "is of an asynchronous run" in kind
        asynchronous = ("trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false")
        assert preflight_problems(self.cfg(tmp_path, *critic, *asynchronous)) == []

    def test_a_checkpoint_that_is_gone(self, tmp_path):
        folder = self.checkpoint(tmp_path)
        folder.rename(folder.parent / "elsewhere")
        (line,) = preflight_problems(self.cfg(tmp_path))
        assert "names global_step_7, which is not there" in line
        overrides = ("trainer.resume_mode=from_path", f"trainer.resume_path={folder.parent / 'elsewhere'}")
        (line,) = preflight_problems(self.cfg(tmp_path, *overrides))
        assert "begins with global_step_" in line

    @pytest.mark.parametrize("name", ["ckpt_path", "export_path", "policy.torch_profiler_config.save_path"])
    def test_folders_that_cannot_be_written(self, tmp_path, name):
        file = tmp_path / "a file"
        file.touch()
        profiler = "trainer.policy.torch_profiler_config.enable=true"
        (line,) = preflight_problems(self.cfg(tmp_path, f"trainer.{name}={file}/below", profiler))
        assert line.startswith(f"trainer.{name}=") and line.endswith("is not a folder")


BAD = {
    "trainer.arctic_rl.backend": "nope",
    "trainer.arctic_rl.env_modules": "[no_such_module]",
    "trainer.arctic_rl.processor_modules": "[no.such.module]",
    "trainer.epochs": "0",
    "trainer.update_epochs_per_batch": "0",
    "trainer.placement.policy_num_gpus_per_node": "0",
    "trainer.policy.optimizer_config.lr": "-1",
    "trainer.policy.optimizer_config.adam_betas": "[0.9]",
    "trainer.policy.optimizer_config.num_warmup_steps": "0.1",
    "trainer.policy.optimizer_config.scheduler": "bogus",
    "trainer.policy.optimizer_config.max_grad_norm": "-1",
    "generator.sampling_params.top_p": "2",
    "generator.sampling_params.temperature": "0",
    "generator.sampling_params.max_generate_length": "0",
    "generator.sampling_params.additional_kwargs": "{bogus: 1}",
    "generator.eval_sampling_params.top_k": "-7",
    "generator.inference_engine.model_dtype": "int3",
}


class TestChecks:
    def test_skyrls_defaults_pass(self):
        assert setting_problems(parse()) == []

    @pytest.mark.parametrize(("setting", "value"), BAD.items())
    def test_a_value_that_cannot_work_is_named_before_anything_starts(self, setting, value):
        lines = setting_problems(parse(f"{setting}={value}"))
        assert any(setting.rsplit(".", 1)[-1] in line for line in lines), lines

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["trainer.arctic_rl.loss_config.a=1"], "loss_config"),
            (["trainer.arctic_rl.loss_fn=x", "trainer.algorithm.policy_loss_type=dual_clip"], "both name the policy"),
            (["trainer.arctic_rl.loss_fn=grpo"], "reduced already"),
            (["trainer.arctic_rl.loss_fn=no_such_module.loss"], "no module 'no_such_module'"),
        ],
    )
    def test_a_loss_of_the_users_own_that_cannot_be(self, overrides, said):
        (line,) = setting_problems(parse(*overrides))
        assert said in line

    @pytest.mark.parametrize("setting", ["eps_clip_low=-1", "kl_estimator_type=bogus"])
    def test_a_loss_setting_out_of_range(self, setting):
        assert len(setting_problems(parse(f"trainer.algorithm.{setting}"))) == 1

    def test_skyrls_own_checks_and_ours_come_together_as_lines(self, tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config([*BASE, "trainer.policy_mini_batch_size=7", f"data.train_data=['{tmp_path}/x.parquet']"])
        lines = str(caught.value).splitlines()
        assert any("SkyRL's own check" in line and "policy_mini_batch_size" in line for line in lines)
        assert any("no such file" in line for line in lines)

    @pytest.mark.parametrize(
        "override", ["trainer.placement.policy_num_gpus_per_node=0", "trainer.policy_mini_batch_size=4096"]
    )
    def test_no_check_of_skyrls_ends_in_a_traceback(self, override):
        with pytest.raises(ConfigError, match=r"SkyRL's own check: \w+"):
            load_config([*BASE, override])


FOUND = {
    "trainer.train_batch_size=abc": "trainer.train_batch_size=abc is not a whole number",
    "trainer.logger=[console]": "trainer.logger=['console'] is not a text",
    "generator.sampling_params.stop=</sql>": "is not a list of texts or null",
    "trainer.flash_attn=1": "trainer.flash_attn=1 is not true or false",
    "generator.chat_template_kwargs={effort:low}": "write generator.chat_template_kwargs.effort=low",
    "trainer.strategy=deepspeed": "write one of fsdp, fsdp2, megatron",
    "environment.env_class=birdd": "did you mean 'bird'?",
    "environment.env_class=geometry3k": "trainer.arctic_rl.env_modules",
    "environment.env_class=bird_multi_turn": "generator.max_turns=1: it leaves environment.env_class=bird_multi_turn",
    "trainer.arctic_rl.env_modules=[no_such_module]": "'no_such_module' cannot be imported",
    "trainer.arctic_rl.processor_modules=[no_such_module]": "'no_such_module' cannot be imported",
    "trainer.algorithm.advantage_estimator=gae": "it needs a critic; write trainer.critic.model.path",
    "trainer.critic.model.path=a/model trainer.algorithm.value_clip=-0.1": "value_clip=-0.1: must be a finite number",
    "trainer.critic.model.path=a/model trainer.strategy=megatron": "SkyRL trains no critic with",
    "trainer.critic.model.path=a/model trainer.critic.model.lora.rank=-8": "model.lora.rank=-8: no rank",
    "trainer.critic.model.path=a/model trainer.critic.model_config_kwargs={dtype: odd}": "write trainer.bf16",
    "trainer.critic.model.path=a/model trainer.critic.optimizer_config.lr=-1": (
        "trainer.critic.optimizer_config.lr=-1 must be"
    ),
    "trainer.critic.model.path=a/model trainer.critic.optimizer_config.scheduler=odd": (
        "trainer.critic.optimizer_config.scheduler='odd': the optimizer's steps alone"
    ),
    "trainer.critic.model.path=a/model trainer.critic.optimizer_config.scheduler=cosine_with_min_lr": (
        "trainer.critic.optimizer_config.scheduler=cosine_with_min_lr: it needs the rate at its end"
    ),
    "trainer.critic.model.path=a/model trainer.critic_mini_batch_size=0": (
        "trainer.critic_mini_batch_size=0 must be a whole number"
    ),
    "trainer.critic.model.path=a/model trainer.critic_mini_batch_size=100": "divisible by critic_mini_batch_size 100",
    "trainer.arctic_rl.loss_fn=value": "'value' is the critic's loss",
    "generator.inference_engine.engine_init_kwargs.max_model_len=1000": "write at least 1536",
    "trainer.policy.model.lora.alpha=3": "trainer.policy.model.path=null",
    "trainer.micro_train_batch_size_per_gpu=0": "trainer.micro_train_batch_size_per_gpu=0 must be a whole number",
    "generator.eval_n_samples_per_prompt=0": "generator.eval_n_samples_per_prompt=0 must be a whole number",
    "trainer.algorithm.policy_loss_type=mine": "'mine' is not registered",
    "generator.inference_engine.engine_init_kwargs={max_model_len: abc}": "max_model_len=abc is not a whole number",
    "trainer.policy_mini_batch_size=2048": "trainer.train_batch_size=1024 or trainer.policy_mini_batch_size=2048",
    "trainer.train_batch_size=4": "trainer.train_batch_size=4 or trainer.policy_mini_batch_size=256",
}


class TestInspection:
    def test_skyrls_defaults_are_not_refused(self):
        assert inspect_config(parse()).refused == []

    @pytest.mark.parametrize("override", FOUND)
    def test_each_is_found_before_anything_starts(self, override):
        lines = inspect_config(parse(*re.split(" (?=trainer)", override))).refused
        assert any(FOUND[override] in line for line in lines), lines
        assert all("\n" not in line for line in lines)

    def test_one_setting_is_told_once(self):
        setting = "generator.inference_engine.engine_init_kwargs.generation_config"
        assert len(inspect_config(parse(f"{setting}=auto")).refused) == 1

    def test_what_is_passed_through_to_an_engine_is_plain_python(self):
        def kinds(value):
            inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
            return {type(value)}.union(*map(kinds, inside))

        raw = {"hf_overrides": {"a_section": {"factor": 4.0}, "eos_token_id": [1, 2]}, "block_size": 64}
        cfg = parse(f"generator.inference_engine.engine_init_kwargs={json.dumps(raw)}")
        for device in ("cpu", "cuda"):
            spec = server_config(cfg, run_id="", env_vars={}, device=device).sampling
            built = engine_arguments(spec, [*spec.engine_kwargs])
            assert raw.items() <= built.items()
            assert kinds(built) <= {dict, list, str, int, float, bool, type(None)}

    def test_drafts_by_n_grams_pass_skyrls_own_check_which_knows_others_only(self):
        drafts = {"method": "ngram", "num_speculative_tokens": 4}
        settings = [f"{name}={value}" for name, value in drafts.items()]
        overrides = [f"generator.inference_engine.speculative_config.{setting}" for setting in settings]
        cfg = parse("trainer.arctic_rl.device=cuda", "trainer.placement.policy_num_gpus_per_node=1", *overrides)
        assert inspect_config(cfg).refused == []
        built = server_config(cfg, run_id="", env_vars={}, device="cuda").sampling.speculative_config
        assert built == drafts and type(built) is dict
        with pytest.raises(UnsupportedError, match=r"speculative_config=.* on CPUs"):
            server_config(cfg, run_id="", env_vars={}, device="cpu")

    def test_lists_and_whole_numbers_fit_where_skyrl_takes_them(self):
        cfg = parse(
            "trainer.policy.model.lora.target_modules=[q_proj]",
            "trainer.critic.model.path=a/model",
            "trainer.algorithm.value_clip=null",
            "trainer.policy.model.path=a/model",
            "trainer.policy.optimizer_config.lr=1",
            "trainer.run_name=",
            "generator.eval_sampling_params.temperature=0",
        )
        assert inspect_config(cfg).refused == []

    def test_a_module_of_the_recipe_registers_before_names_are_checked(self, tmp_path, monkeypatch):
        (tmp_path / "my_names.py").write_text(
            "from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator\n"
            "from skyrl_gym.envs.registration import register, registry\n"
            "@register_advantage_estimator('of_my_own')\n"
            "def estimate(**kwargs): ...\n"
            "if 'env_of_my_own' not in registry: register(id='env_of_my_own', entry_point='my_names:Env')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        names = ["trainer.algorithm.advantage_estimator=of_my_own", "environment.env_class=env_of_my_own"]
        assert len(inspect_config(parse(*names)).refused) == 3, "both names, and SkyRL's own check"
        try:
            assert inspect_config(parse(*names, "trainer.arctic_rl.env_modules=[my_names]")).refused == []
        finally:
            AdvantageEstimatorRegistry.unregister("of_my_own")
            registry.pop("env_of_my_own")
            del sys.modules["my_names"]

    def test_a_model_that_cannot_be_served(self, tmp_path):
        config = {"vision_config": {}, "text_config": {"max_position_embeddings": 600}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        lines = inspect_config(parse(f"trainer.policy.model.path={tmp_path}")).refused
        assert len(lines) == 2 and "multimodal" in lines[0] and "600 tokens" in lines[1]
        config = {"max_position_embeddings": 600, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert inspect_config(parse(f"trainer.policy.model.path={tmp_path}")).refused == []

    @pytest.mark.parametrize(
        ("config", "overrides", "said"),
        [
            ({"attention_dropout": 0.1}, [], "config.json is not done on CPUs; write 0.0"),
            ({"sliding_window": 1000}, ["trainer.arctic_rl.use_zorro=false"], "use_zorro=false: .* 1000 .* 1536 tog"),
            ({"sliding_window": 1000}, [], None),
            ({"sliding_window": 1000, "use_sliding_window": False}, ["trainer.arctic_rl.use_zorro=false"], None),
            ({"sliding_window": 1536}, ["trainer.arctic_rl.use_zorro=false"], None),
        ],
    )
    def test_attention_that_cpus_do_not_compute(self, tmp_path, config, overrides, said):
        (tmp_path / "config.json").write_text(json.dumps(config))
        lines = inspect_config(parse(f"trainer.policy.model.path={tmp_path}", *overrides)).refused
        assert len(lines) == (said is not None)
        assert said is None or re.search(said, lines[0])

    @pytest.mark.parametrize(("size", "device", "refused"), [(8, "cuda", 1), (2, "cuda", 0), (8, "cpu", 0)])
    def test_heads_that_cannot_be_dealt_out(self, tmp_path, size, device, refused):
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
        setting = f"generator.inference_engine.tensor_parallel_size={size}"
        alone = ("trainer.placement.colocate_all=false", f"trainer.arctic_rl.device={device}")
        lines = inspect_config(parse(f"trainer.policy.model.path={tmp_path}", setting, *alone)).refused
        assert len(lines) == refused and all(line.startswith(f"{setting}: the 4 attention heads") for line in lines)


class TestModelConfig:
    """Values in place of those of a model's config: trainer and engines must agree on them."""

    POLICY = "trainer.policy.model_config_kwargs"
    ENGINES = "generator.inference_engine.engine_init_kwargs.hf_overrides"

    def test_both_sides_are_given_theirs(self):
        cfg = parse(f"{self.POLICY}.rms_norm_eps=0.5", f"{self.ENGINES}.rms_norm_eps=0.5")
        assert inspect_config(cfg).refused == []
        config = server_config(cfg, run_id="", env_vars={})
        assert config.policy.model_config == {"rms_norm_eps": 0.5} and config.reference.model_config == {}
        assert config.sampling.engine_kwargs["hf_overrides"] == {"rms_norm_eps": 0.5}
        cfg = parse("trainer.ref.model_config_kwargs.rms_norm_eps=0.5")
        assert inspect_config(cfg).refused == []
        assert server_config(cfg, run_id="", env_vars={}).reference.model_config == {"rms_norm_eps": 0.5}

    @pytest.mark.parametrize("engines", [[], [f"{ENGINES}.rms_norm_eps=0.4"], [f"{ENGINES}.hidden_act=relu"]])
    def test_engines_of_another_config_are_refused(self, engines):
        (line,) = inspect_config(parse(f"{self.POLICY}.rms_norm_eps=0.5", *engines)).refused
        assert line.startswith(f"{self.POLICY}.rms_norm_eps=0.5: ")
        assert line.endswith(f"; write {self.ENGINES}.rms_norm_eps too")

    @pytest.mark.parametrize("name", ["dtype", "torch_dtype", "attn_implementation", "use_cache"])
    def test_what_something_else_rules(self, name):
        for role in ("policy", "ref"):
            (line,) = inspect_config(parse(f"trainer.{role}.model_config_kwargs.{name}=odd")).refused
            assert line.startswith(f"trainer.{role}.model_config_kwargs.{name}=odd: another setting rules it; ")

    def test_names_that_the_models_config_does_not_have(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 600}))
        path = f"trainer.policy.model.path={tmp_path}"
        same = [f"{name}.rms_nrom_eps=1" for name in (self.POLICY, self.ENGINES, "trainer.ref.model_config_kwargs")]
        context, policy, reference = inspect_config(parse(path, *same)).refused
        assert "600 tokens" in context
        assert policy.startswith(f"{self.POLICY}.rms_nrom_eps=1: the config of {tmp_path} (LlamaConfig) has no such")
        assert reference.startswith("trainer.ref.model_config_kwargs.rms_nrom_eps=1: ")
        longer = [f"{name}.max_position_embeddings=1600" for name in (self.POLICY, self.ENGINES)]
        assert inspect_config(parse(path, *longer, "trainer.algorithm.use_kl_loss=false")).refused == []


def _types(value):
    yield type(value)
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    for item in items:
        yield from _types(item)


ODD = {
    "trainer.arctic_rl.deepspeed.zero_optimization.reduce_bucket_size": (
        77,
        lambda c: c.policy.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size"),
    ),
    "trainer.policy.optimizer_config.lr": (3.5e-4, lambda c: c.policy.optimizer.lr),
    "trainer.policy.optimizer_config.weight_decay": (0.37, lambda c: c.policy.optimizer.weight_decay),
    "trainer.policy.optimizer_config.max_grad_norm": (0.7, lambda c: c.policy.optimizer.max_grad_norm),
    "trainer.policy.optimizer_config.num_warmup_steps": (13, lambda c: c.policy.optimizer.num_warmup_steps),
    "trainer.policy.optimizer_config.scheduler": ("cosine", lambda c: c.policy.optimizer.scheduler),
    "trainer.arctic_rl.zero_stage": (3, lambda c: c.policy.zero_stage),
    "trainer.arctic_rl.use_zorro": (False, lambda c: c.policy.use_zorro),
    "trainer.seed": (991, lambda c: c.policy.seed),
    "trainer.gradient_checkpointing": (False, lambda c: c.policy.gradient_checkpointing),
    "trainer.placement.policy_num_gpus_per_node": (2, lambda c: c.policy_ranks),
    "generator.inference_engine.num_engines": (2, lambda c: c.engines),
    "generator.inference_engine.max_num_seqs": (77, lambda c: c.sampling.max_num_seqs),
    "generator.inference_engine.max_num_batched_tokens": (777, lambda c: c.sampling.max_num_batched_tokens),
    "generator.inference_engine.enable_prefix_caching": (False, lambda c: c.sampling.enable_prefix_caching),
    "generator.inference_engine.model_dtype": ("float32", lambda c: c.sync_dtype),
    "trainer.arctic_rl.cpu_threads": (5, lambda c: c.sampling.threads),
}


class TestServerConfig:
    @pytest.mark.parametrize(("setting", "case"), ODD.items())
    def test_an_odd_value_is_found_in_the_servers_config(self, setting, case):
        value, read = case
        plain = server_config(parse(), run_id="x", env_vars={})
        odd = server_config(parse(f"{setting}={json.dumps(value)}"), run_id="x", env_vars={})
        assert read(odd) == value
        assert read(plain) != value

    def test_what_is_passed_through_is_plain_python(self):
        engine, deepspeed = "generator.inference_engine.engine_init_kwargs", "trainer.arctic_rl.deepspeed"
        offload = "zero_optimization.offload_optimizer"
        cfg = parse(
            f"{engine}.additional_config.inner.name=yarn",
            f"{engine}.additional_config.inner.factor=2.0",
            f"{engine}.compilation_config.cudagraph_capture_sizes=[1,2]",
            f"{deepspeed}.{offload}.device=cpu",
            f"{deepspeed}.{offload}.pin_memory=false",
        )
        for device in ("cpu", "cuda"):
            config = server_config(cfg, run_id="x", env_vars={}, device=device)
            kwargs = config.sampling.engine_kwargs
            assert kwargs["additional_config"] == {"inner": {"name": "yarn", "factor": 2.0}}
            assert kwargs["compilation_config"] == {"cudagraph_capture_sizes": [1, 2]}
            found = set(_types([kwargs, config.policy.deepspeed]))
            assert found <= {dict, list, str, int, float, bool}, found

    def test_kernels_that_cpus_do_not_have_are_refused_with_the_rest(self):
        refused = inspect_config(
            parse("trainer.arctic_rl.use_liger=true", "trainer.arctic_rl.attention=flash_attention_2")
        ).refused
        assert [line.split(":")[0] for line in refused] == [
            "trainer.arctic_rl.use_liger=true",
            "trainer.arctic_rl.attention=flash_attention_2",
        ]

    @pytest.mark.parametrize("gpus", ["trainer.arctic_rl.device=cuda", "trainer.arctic_rl.cluster_gpus=[8]"])
    def test_kernels_of_gpus_are_taken_where_there_are_some(self, gpus):
        asked = ("use_liger=true", "attention=flash_attention_2", "use_zorro=false")
        kernels = [f"trainer.arctic_rl.{setting}" for setting in asked]
        refused = inspect_config(parse(gpus, *kernels)).refused
        assert not [line for line in refused if line.startswith("trainer.arctic_rl.")]

    def test_the_deepspeed_block_is_for_what_is_trained_and_checked_with_the_rest(self):
        block = "trainer.arctic_rl.deepspeed"
        asked = (f"{block}.zero_optimization.offload_optimizer.device=cpu", f"{block}.steps_per_print=5")
        cfg = parse(*asked, "trainer.critic.model.path=tiny")
        config = server_config(cfg, run_id="x", env_vars={})
        told = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "steps_per_print": 5}
        assert (config.policy.deepspeed, config.critic.deepspeed, config.reference.deepspeed) == (told, told, {})
        assert not [line for line in inspect_config(parse(*asked)).refused if block in line]
        assert str(told) in report(parse(*asked), inspect_config(parse(*asked)), "unknown")
        clipped, odd = (
            line
            for line in inspect_config(parse(f"{block}.gradient_clipping=3", f"{block}.zero_opt=1")).refused
            if block in line
        )
        assert clipped == f"{block}.gradient_clipping=3: it is computed; write trainer.policy.optimizer_config." + (
            "max_grad_norm"
        )
        assert odd == f"{block}.zero_opt=1 is not a key of DeepSpeed's: did you mean 'zero_optimization'?"

    def test_betas_dtype_and_the_engines_raw_arguments(self):
        cfg = parse(
            "trainer.policy.optimizer_config.adam_betas=[0.8,0.88]",
            "trainer.bf16=false",
            "generator.inference_engine.engine_init_kwargs.max_model_len=321",
            "generator.inference_engine.engine_init_kwargs.block_size=64",
        )
        config = server_config(cfg, run_id="x", env_vars={})
        assert config.policy.optimizer.betas == (0.8, 0.88)
        assert config.policy.dtype == "float32"
        assert server_config(parse(), run_id="x", env_vars={}).policy.dtype == "bfloat16"
        assert config.sampling.max_model_len == 321
        assert config.sampling.engine_kwargs == {"block_size": 64, "enable_chunked_prefill": True}
        cfg = parse("generator.inference_engine.enable_chunked_prefill=false")
        plain = server_config(cfg, run_id="x", env_vars={})
        assert plain.sampling.engine_kwargs == {"block_size": 32, "enable_chunked_prefill": False}

    def test_a_reference_model_only_where_a_kl_term_asks_for_it(self):
        assert server_config(parse(), run_id="x", env_vars={}).ref_ranks == 1
        without = server_config(parse("trainer.algorithm.use_kl_loss=false"), run_id="x", env_vars={})
        assert (without.reference, without.ref_ranks) == (None, 0)

    def test_an_engine_argument_that_is_ours_is_refused(self):
        with pytest.raises(UnsupportedError, match="logprobs_mode"):
            server_config(
                parse("generator.inference_engine.engine_init_kwargs.logprobs_mode=raw_logprobs"),
                run_id="x",
                env_vars={},
            )

    def test_an_unknown_dtype_is_refused(self):
        with pytest.raises(UnsupportedError, match="model_dtype='int3'"):
            server_config(parse("generator.inference_engine.model_dtype=int3"), run_id="x", env_vars={})


LOSS_SETTINGS = {
    "trainer.algorithm.eps_clip_low=0.11": ("clip_ratio_low", 0.11),
    "trainer.algorithm.eps_clip_high=0.33": ("clip_ratio_high", 0.33),
    "trainer.algorithm.kl_loss_coef=0.5": ("kl_loss_coef", 0.5),
    "trainer.algorithm.kl_estimator_type=k2": ("kl_loss_type", "k2"),
    "trainer.algorithm.use_kl_loss=false": ("use_kl_loss", False),
    "trainer.algorithm.use_entropy_loss=true": ("entropy_coeff", 0.01),
    "trainer.algorithm.policy_loss_type=dual_clip": ("clip_ratio_c", 3.0),
}


@pytest.mark.parametrize(("override", "expected"), LOSS_SETTINGS.items())
def test_each_algorithm_setting_reaches_the_loss(override, expected):
    key, value = expected
    assert actor_config(parse(override))[key] == value
    assert actor_config(parse())[key] != value


class TestRuntimeEnv:
    def test_forwarded_and_never_forwarded(self, monkeypatch):
        values = {
            "WANDB_MODE": "off;line",
            "ARCTIC_X": "a b",
            "ARCTIC_BOUND": "foo>=1",
            "TMPDIR": "/a path/with spaces",
            "SKYRL_Y": "transformers<5",
        }
        masks = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        masks += ("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")
        masks += ("NEURON_RT_VISIBLE_CORES", "TPU_VISIBLE_CHIPS", "GPU_DEVICE_ORDINAL", "RAY_ADDRESS", "LD_PRELOAD")
        for name, value in (values | dict.fromkeys(masks, "3")).items():
            monkeypatch.setenv(name, value)
        gpus = "trainer.placement.policy_num_gpus_per_node"
        for cfg in (validated(f"{gpus}=1"), parse(f"{gpus}=8")):
            env_vars = runtime_env_vars(cfg, "the-run")
            assert values.items() <= env_vars.items(), "as they are: no shell stands between"
            assert not env_vars.keys() & set(masks), "they are of the driver's node alone"
            assert env_vars["ARCTIC_RL_RUN_ID"] == "the-run"

    @pytest.mark.parametrize("value", ["$HOME/x", "a ${HOME}"])
    def test_a_value_that_ray_would_expand_is_refused(self, monkeypatch, value):
        monkeypatch.setenv("WANDB_DIR", value)
        with pytest.raises(UnsupportedError, match="WANDB_DIR"):
            runtime_env_vars(parse(), "x")
        monkeypatch.setenv("WANDB_DIR", "costs 5$ | more")
        assert runtime_env_vars(parse(), "x")["WANDB_DIR"] == "costs 5$ | more"

    def test_many_gpus_are_not_probed(self):
        cfg = parse("trainer.placement.policy_num_gpus_per_node=8", "generator.inference_engine.num_engines=8")
        before = dataclasses.asdict(cfg)
        env_vars = runtime_env_vars(cfg, "x")
        assert "NCCL_P2P_DISABLE" not in env_vars
        assert dataclasses.asdict(cfg) == before
        assert "RAY_ADDRESS" not in os.environ


def test_leaf_names_hold_skyrls_and_ours():
    from integrations.arctic_rl.skyrl_config import ArcticSkyRLTrainConfig

    names = leaf_names(ArcticSkyRLTrainConfig)
    assert {"trainer.arctic_rl.zero_stage", "trainer.algorithm.eps_clip_low", "data.train_data"} <= names
    assert len(names) > 300
