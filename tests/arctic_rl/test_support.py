"""The support table: complete, backed by evidence, and true of what the backend is told."""

import ast
import asyncio
import copy
import dataclasses
import importlib
import inspect
import re
import textwrap
import types
from pathlib import Path

import pytest
from skyrl.train.config.config import (
    DeltaWeightSyncConfig,
    MixedPrecisionConfig,
    SkyRLTrainConfig,
    _resolve_class_type,
)
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.registration import EnvSpec, registry

from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.support import SECTIONS, TABLE, refusals, without_effect
from integrations.arctic_rl.support.entries import Honoured, NoEffect, PartOf, Refused, RefusedKeys, on_cpus
from integrations.arctic_rl.support.leaves import skyrl_leaves, value_of
from tests.arctic_rl.support_artefacts import artefacts

ROOT = Path(__file__).parents[2]
BASE = ["trainer.logger=console"]


def kind(*classes):
    return [name for name, entry in TABLE.items() if isinstance(entry, classes)]


def walk(config_class, prefix=""):
    """SkyRL's leaves, by its own rule for what is a section."""
    for field in dataclasses.fields(config_class):
        section = _resolve_class_type(field.type)
        if section is not None and dataclasses.is_dataclass(section):
            yield from walk(section, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


class TestComplete:
    def test_every_leaf_of_skyrls_config_is_there_and_no_other(self):
        leaves = set(walk(SkyRLTrainConfig))
        assert len(leaves) > 400
        assert set(TABLE) == leaves == set(skyrl_leaves())

    def test_no_leaf_stands_in_two_sections(self):
        assert sum(map(len, SECTIONS.values())) == len(TABLE)

    def test_details_belong_to_something_that_is_refused(self):
        for name in kind(PartOf):
            feature = TABLE[TABLE[name].feature]
            assert isinstance(feature, Refused) or (isinstance(feature, Honoured) and feature.limit is not None), name


def test_names(path):
    """Names of the test functions of a file, methods as ``Class::name``."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


test_names.__test__ = False

EVIDENCE = [(name, evidence) for name in kind(Honoured) for evidence in TABLE[name].evidence]


class TestEvidence:
    def test_nothing_is_called_honoured_without_any(self):
        assert all(TABLE[name].evidence for name in kind(Honoured))

    @pytest.mark.parametrize("node", sorted({evidence for _, evidence in EVIDENCE if "::" in evidence}))
    def test_each_named_test_exists(self, node):
        path, _, name = node.partition("::")
        assert name in test_names(path)

    @pytest.mark.parametrize(("setting", "named"), [pair for pair in EVIDENCE if "::" not in pair[1]])
    def test_each_named_function_of_skyrl_reads_the_setting(self, setting, named):
        module, _, path = named.partition(":")
        function = importlib.import_module(module)
        for name in path.split("."):
            function = getattr(function, name)
        source = inspect.getsource(function)
        attributes = {node.attr for node in ast.walk(ast.parse(textwrap.dedent(source))) if is_read(node)}
        assert setting.rpartition(".")[2] in attributes, "a section around the setting is not enough"


@pytest.mark.parametrize("name", ["model", "base_url"])
def test_an_environment_gets_the_section_of_its_id(name):
    """SkyRL's loop makes the environment before it asks for anything else of the generator."""

    class Made(Exception):
        pass

    class Judge:
        def __init__(self, env_config, extras):
            raise Made(vars(env_config)[name])

    async def finish_session(session_id):
        pass

    cfg = parse_config([*BASE, f"environment.skyrl_gym.llm_as_a_judge.{name}=mine"])
    generator = object.__new__(SkyRLGymGenerator)
    generator.__dict__ |= {
        "max_turns": 1,
        "skyrl_gym_cfg": cfg.environment.skyrl_gym,
        "generator_cfg": cfg.generator,
        "use_conversation_multi_turn": True,
        "custom_chat_template": None,
        "inference_engine_client": types.SimpleNamespace(finish_session=finish_session),
    }
    registry["llm_as_a_judge"] = EnvSpec(id="llm_as_a_judge", entry_point=Judge)
    try:
        with pytest.raises(Made, match=r"^mine$"):
            asyncio.run(generator.agent_loop([], "llm_as_a_judge", {}, 8, 8))
    finally:
        del registry["llm_as_a_judge"]


def is_read(node):
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def contexts():
    """Recipes in which settings that others switch off are read."""
    return {
        "fsdp": parse_config(BASE),
        "megatron": parse_config([*BASE, "trainer.strategy=megatron"]),
        "gpus": parse_config([*BASE, "trainer.arctic_rl.device=cuda"]),
        "adapters": parse_config([*BASE, "trainer.strategy=megatron", "trainer.policy.model.lora.rank=8"]),
    }


@pytest.fixture(scope="module")
def recipes():
    return contexts()


def odd(setting):
    """Another value than the default, of the setting's type."""
    leaf = skyrl_leaves()[setting]
    default = leaf.default if leaf.default is not dataclasses.MISSING else None
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 7
    if isinstance(default, str):
        return f"odd-{default}"
    if isinstance(default, list):
        return [*default, "odd"]
    if isinstance(default, dict):
        return {**default, "odd": 1}
    options = [option for option in getattr(leaf.hint, "__args__", (leaf.hint,)) if option is not types.NoneType]
    values = {int: 3, float: 0.3, str: "odd", bool: True}
    return values[options[0]] if options[0] in values else ({} if "Dict" in str(options[0]) else [])


def changed(recipe, setting, value=None):
    """A copy of a recipe with an odd value; an optional section is made for it."""
    cfg = copy.deepcopy(recipe)
    section, _, name = setting.rpartition(".")
    parent, _, own = section.rpartition(".")
    if value_of(cfg, section) is None:
        made = DeltaWeightSyncConfig(sync_dir="x") if own == "delta_weight_sync" else MixedPrecisionConfig()
        setattr(value_of(cfg, parent), own, made)
    setattr(value_of(cfg, section), name, odd(setting) if value is None else value)
    return cfg


def context_of(setting, recipes):
    if setting.startswith("trainer.critic."):
        return changed(recipes["fsdp"], "trainer.critic.model.path")
    if "lora" in setting:
        return recipes["adapters"]
    on_gpus_only = isinstance(TABLE[setting], Refused) and TABLE[setting].idle is on_cpus
    if on_gpus_only or setting.endswith("sequence_parallel_size"):
        return recipes["gpus"]
    return recipes["megatron" if "megatron_config" in setting else "fsdp"]


def mentions(lines, setting):
    return [line for line in lines if f"{setting}=" in line or f"{setting}.odd=" in line]


class TestRefused:
    @pytest.mark.parametrize("setting", kind(Refused, RefusedKeys))
    def test_away_from_its_default_it_is_refused_by_name_with_what_to_write(self, setting, recipes):
        cfg = changed(context_of(setting, recipes), setting)
        (line,) = refusals(cfg)
        assert line.startswith((f"{setting}=", f"{setting}.odd="))
        reason, _, instead = line.partition(": ")[2].rpartition("; ")
        assert reason and instead
        assert mentions(without_effect(cfg), setting) == []

    def test_defaults_are_refused_nowhere_and_have_no_line(self, recipes):
        for cfg in (*recipes.values(), parse_config([*BASE, "trainer.algorithm.use_kl_loss=false"])):
            assert refusals(cfg) == []
        assert without_effect(recipes["fsdp"]) == []
        assert len(without_effect(recipes["megatron"])) == 1, "the strategy itself"

    @pytest.mark.parametrize("setting", [name for name in kind(Refused) if "megatron_config" in name])
    def test_megatrons_settings_are_not_refused_where_skyrl_does_not_read_them(self, setting, recipes):
        cfg = changed(recipes["fsdp"], setting)
        assert refusals(cfg) == []
        assert mentions(without_effect(cfg), setting)

    def test_all_are_reported_at_once_in_the_order_of_the_config(self):
        cfg = parse_config(
            [
                *BASE,
                "generator.vision_language_generator=true",
                "trainer.policy.inference_only_init=true",
                "trainer.policy.model.path=a/model",
                "trainer.mtp.enabled=true",
            ]
        )
        names = [line.split("=")[0] for line in refusals(cfg)]
        assert names == [
            "trainer.policy.inference_only_init",
            "trainer.mtp.enabled",
            "generator.vision_language_generator",
        ]


class TestRowsOverSeveralGpus:
    CRITIC = ("trainer.critic.model.path=some/model", "trainer.algorithm.advantage_estimator=gae")
    REFERENCE = ("trainer.algorithm.use_kl_loss=true",)

    @pytest.mark.parametrize(("model", "more"), [("policy", ()), ("ref", REFERENCE), ("critic", CRITIC)])
    def test_are_refused_on_gpus_and_the_same_on_cpus(self, model, more):
        setting = f"trainer.{model}.sequence_parallel_size"
        given = [*BASE, *more, f"{setting}=2"]
        (line,) = refusals(parse_config([*given, "trainer.arctic_rl.device=cuda"]))
        assert line.startswith(f"{setting}=2: a row is computed by one GPU") and "write 1;" in line
        assert not refusals(parse_config([*given, "trainer.arctic_rl.device=cpu"]))
        plain = [*BASE, *more, f"{setting}=1", "trainer.arctic_rl.device=cuda"]
        assert not refusals(parse_config(plain))


class TestTurns:
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["generator.max_turns=3", "generator.batched=true"], "generator.max_turns=3: .*batched=false"),
            (
                ["generator.step_wise_trajectories=true", "generator.batched=true"],
                "step_wise_trajectories=true: .*turn",
            ),
            (
                ["generator.step_wise_trajectories=true", "generator.use_conversation_multi_turn=false"],
                "step_wise_trajectories=true: .*use_conversation_multi_turn=true",
            ),
            (
                [
                    "generator.max_input_length=128",
                    "generator.inference_engine.engine_init_kwargs.max_model_len=128",
                ],
                "generator.max_input_length=128: .*max_model_len=128 no room",
            ),
        ],
    )
    def test_a_combination_that_skyrl_would_not_run_is_refused(self, overrides, said):
        (line,) = refusals(parse_config([*BASE, *overrides]))
        assert re.search(said, line)

    def test_several_turns_step_wise_and_merged_are_served(self):
        turns = ["generator.max_turns=5", "generator.max_input_length=4096"]
        assert refusals(parse_config([*BASE, *turns])) == []
        step_wise = [*turns, "generator.step_wise_trajectories=true", "generator.merge_stepwise_output=true"]
        assert refusals(parse_config([*BASE, *step_wise])) == without_effect(parse_config([*BASE, *step_wise])) == []


class TestKeys:
    def lines(self, *overrides):
        cfg = parse_config([*BASE, "trainer.strategy=megatron", *overrides])
        return refusals(cfg), without_effect(cfg)[1:]

    def test_only_the_keys_that_change_something_are_refused(self):
        prefix = "trainer.policy.megatron_config.transformer_config_kwargs"
        refused, ignored = self.lines(f"{prefix}.moe_aux_loss_coeff=0.01", f"{prefix}.recompute_num_layers=2")
        assert [line.split(":")[0] for line in refused] == [f"{prefix}.moe_aux_loss_coeff=0.01"]
        assert [line.split(":")[0] for line in ignored] == [f"{prefix}.recompute_num_layers=2"]

    def test_a_key_that_skyrl_fills_from_its_own_setting_is_told_once(self):
        prefix = "trainer.policy.megatron_config"
        refused, _ = self.lines(f"{prefix}.fp8=hybrid")
        assert [line.split(":")[0] for line in refused] == [f"{prefix}.fp8=hybrid"]
        refused, _ = self.lines(f"{prefix}.transformer_config_kwargs.fp8=hybrid")
        assert [line.split(":")[0] for line in refused] == [f"{prefix}.transformer_config_kwargs.fp8=hybrid"]

    def test_offloading_megatrons_optimizer_has_no_effect(self):
        prefix = "trainer.policy.megatron_config.optimizer_config_kwargs"
        refused, ignored = self.lines(f"{prefix}.optimizer_cpu_offload=true", f"{prefix}.clip_grad=3")
        assert [line.split(":")[0] for line in refused] == [f"{prefix}.clip_grad=3"]
        assert len(ignored) == 1


class TestOnGpus:
    @pytest.mark.parametrize(("attention", "agrees"), [(None, True), ("eager", True), ("flash_attention_2", False)])
    def test_attention_without_flash_is_not_asked_for_twice(self, attention, agrees):
        asked = [] if attention is None else [f"trainer.arctic_rl.attention={attention}"]
        more = ["trainer.arctic_rl.use_zorro=false", *asked, "trainer.flash_attn=false"]
        for device in ("cuda", "cpu"):
            cfg = parse_config([*BASE, f"trainer.arctic_rl.device={device}", *more])
            refused = [line for line in refusals(cfg) if line.startswith("trainer.flash_attn=false: ")]
            assert len(refused) == (device == "cuda" and not agrees)
            assert len(mentions(without_effect(cfg), "trainer.flash_attn")) == (device == "cpu")

    def test_an_optimizer_alone_on_its_gpus_has_nothing_to_make_room_for(self):
        apart = ["trainer.placement.colocate_all=false", "trainer.algorithm.use_kl_loss=true"]
        off = "trainer.policy.optimizer_config.offload_after_step"
        for both, idle in ((True, False), (False, True)):
            cfg = parse_config(
                [*BASE, *apart, f"{off}=false", f"trainer.placement.colocate_policy_ref={str(both).lower()}"]
            )
            assert bool(mentions(without_effect(cfg), off)) == idle


class TestWithoutEffect:
    @pytest.mark.parametrize("setting", kind(NoEffect))
    def test_it_is_said_once_and_changes_nothing_that_the_backend_is_told(self, setting, recipes, loop):
        plain = context_of(setting, recipes)
        cfg = changed(plain, setting)
        assert refusals(cfg) == []
        if not setting.endswith(("local_checkpoint_dir", "publish_staging_dir")):
            assert len(mentions(without_effect(cfg), setting)) == 1
        assert artefacts(cfg, loop) == artefacts(plain, loop)

    @pytest.mark.parametrize("setting", kind(PartOf))
    def test_a_detail_without_its_feature(self, setting, recipes, loop):
        plain = context_of(setting, recipes)
        cfg = changed(plain, setting)
        assert refusals(cfg) == []
        assert len(mentions(without_effect(cfg), setting)) == 1
        assert artefacts(cfg, loop) == artefacts(plain, loop)

    @pytest.mark.parametrize("setting", kind(PartOf))
    def test_a_detail_of_a_refused_feature_is_left_to_the_feature(self, setting, recipes):
        feature = TABLE[setting].feature
        cfg = changed(context_of(setting, recipes), feature)
        alone = refusals(cfg)
        cfg = changed(cfg, setting)
        assert refusals(cfg) == alone and len(alone) == 1
        assert mentions(without_effect(cfg), setting) == []

    def test_settings_with_one_reason_share_a_line(self):
        cfg = parse_config(
            [
                *BASE,
                "generator.inference_engine.tensor_parallel_size=2",
                "trainer.policy.use_torch_compile=true",
                "generator.inference_engine.pipeline_parallel_size=2",
            ]
        )
        compiled, engine = without_effect(cfg)
        assert compiled.startswith("trainer.policy.use_torch_compile=true: ")
        assert engine.startswith(
            "generator.inference_engine.tensor_parallel_size=2, generator.inference_engine.pipeline_parallel_size=2: "
        )

    def test_what_skyrl_fills_in_is_not_told(self):
        cfg = parse_config([*BASE, "trainer.algorithm.use_kl_loss=false", "trainer.policy.model.path=a/model"])
        assert cfg.trainer.ref.model.path == "a/model"
        assert without_effect(cfg) == []


IDLE = {
    "trainer.algorithm.kl_loss_coef=0.5": ["trainer.algorithm.use_kl_loss=false"],
    "trainer.algorithm.entropy_loss_coef=0.5": [],
    "trainer.algorithm.kl_ctrl.horizon=5": [],
    "trainer.algorithm.sapo.tau_pos=2": [],
    "trainer.algorithm.eps_clip_low=0.1": ["trainer.algorithm.policy_loss_type=sapo"],
    "trainer.algorithm.clip_ratio_c=5": [],
    "trainer.algorithm.grpo_norm_by_std=false": ["trainer.algorithm.advantage_estimator=rloo"],
    "trainer.algorithm.gamma=0.9": [],
    "trainer.algorithm.max_seq_len=99": [],
    "trainer.algorithm.zero_variance_filter_tol=0.1": [],
    "trainer.algorithm.off_policy_correction.geo_mask_high=2": [],
    "trainer.algorithm.dynamic_sampling.max_sample_batches=3": [],
    "trainer.placement.ref_num_nodes=2": ["trainer.algorithm.use_kl_loss=false"],
    "trainer.eval_batch_size=3": ["trainer.eval_interval=-1"],
    "trainer.tags=[a]": [],
    "trainer.print_example_interval=7": ["trainer.fully_async.enabled=true", "trainer.eval_interval=-1"],
    "generator.chat_template.source=file": [],
    "generator.eval_sampling_params.top_p=0.5": ["trainer.eval_interval=0"],
}

CARRIED = "trainer.algorithm.kl_loss_coef=0.5"
"""Sent with each update, beside the flag that switches the term off."""


@pytest.mark.parametrize("override", IDLE)
def test_a_setting_that_another_one_switches_off_is_said_to_have_no_effect(override, loop):
    plain = parse_config([*BASE, *IDLE[override]])
    cfg = parse_config([*BASE, *IDLE[override], override])
    (line,) = set(without_effect(cfg)) - set(without_effect(plain))
    assert line.startswith(f"{override.replace('[a]', chr(91) + chr(39) + 'a' + chr(39) + chr(93))}: ")
    if override != CARRIED:
        assert artefacts(cfg, loop) == artefacts(plain, loop)


PROFILER = "trainer.policy.torch_profiler_config"
SPECULATION = "generator.inference_engine.speculative_config"
DRAFTS = f"{SPECULATION}.method=ngram {SPECULATION}.num_speculative_tokens=4"
CRITIC = "trainer.critic.model.path=a/model trainer.critic_mini_batch_size=4"
LIMITS = {
    "trainer.algorithm.kl_estimator_type=k9": "k1, k2, k3, abs",
    "trainer.algorithm.loss_reduction=mean": "token_mean",
    "trainer.algorithm.advantage_estimator=grop": "grpo",
    "trainer.algorithm.dynamic_sampling.type=drop": "null, filter, replace",
    "trainer.logger=wandbb": "wandb, mlflow, swanlab, tensorboard, console",
    "trainer.resume_mode=newest": "latest",
    "trainer.resume_mode=from_path": "trainer.resume_path is not set",
    "trainer.resume_mode=from_path trainer.resume_path=s3://bucket/global_step_3": "a local folder",
    "trainer.max_ckpts_to_keep=0": "1 or more",
    "trainer.ckpt_path=s3://bucket/x": "a local folder",
    "trainer.export_path=gs://bucket/x": "a local folder",
    "trainer.log_path=s3://bucket/x": "a local folder",
    "trainer.export_path=runs/../x/ trainer.ckpt_path=x trainer.hf_save_interval=5": "a folder of its own",
    "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.target_modules=[]": "it names no layer",
    "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.target_modules=(q_proj": "a list of last parts",
    "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.exclude_modules=+proj": "nothing to repeat",
    f"{CRITIC} trainer.critic.model.lora.rank=4 trainer.critic.model.lora.target_modules=[]": "it names no layer",
    f"{CRITIC} trainer.algorithm.value_head_prefix=a.b": "write value_head",
    f"{PROFILER}.enable=true {PROFILER}.save_path=/traces {PROFILER}.ranks=[0,1]": "has 1 ranks",
    f"{PROFILER}.enable=true {PROFILER}.save_path=traces": "an absolute path",
    "generator.zero_reward_on_non_stop=true generator.batched=true": "generator.batched=false",
    "generator.chat_template_kwargs.a=1 generator.batched=true": "generator.batched=false",
    "generator.sampling_params.additional_kwargs.min_tokens=5": "leave it out",
    "generator.eval_sampling_params.additional_kwargs.top_p=0.5": "generator.eval_sampling_params.top_p",
    "generator.inference_engine.engine_init_kwargs.quantization=fp8": "leave it out",
    "generator.inference_engine.engine_init_kwargs.quantization_config.bits=8": "in another precision than training",
    "generator.inference_engine.engine_init_kwargs.mamba_ssm_cache_dtype=float16": "in another precision",
    "generator.inference_engine.engine_init_kwargs.prefill_context_parallel_size=2": "write tensor_parallel_size or",
    "generator.inference_engine.engine_init_kwargs.nnodes=2": "write tensor_parallel_size or num_engines",
    "generator.inference_engine.engine_init_kwargs.device_ids=[1]": "write tensor_parallel_size or num_engines",
    "generator.inference_engine.engine_init_kwargs.data_parallel_size_local=2": "write tensor_parallel_size or num_e",
    "generator.inference_engine.engine_init_kwargs.enable_sleep_mode=true": "write trainer.placement.colocate_all",
    "generator.inference_engine.engine_init_kwargs.generation_config=auto": "leave it out",
    "generator.inference_engine.engine_init_kwargs.dtype=float32": "generator.inference_engine.model_dtype",
    "generator.inference_engine.engine_init_kwargs.max_modle_len=9": "did you mean 'max_model_len'",
    "trainer.algorithm.use_tis=true": "trainer.algorithm.tis_imp_ratio_cap=-1.0",
    f"{DRAFTS} trainer.arctic_rl.device=cpu": "write null",
    f"{SPECULATION}.method=mtp trainer.arctic_rl.device=cuda": f"{SPECULATION}.method=mtp: its drafts come from w",
    f"{DRAFTS} trainer.arctic_rl.device=cuda generator.sampling_params.min_p=0.1": f"or write {SPECULATION}=null",
    f"{DRAFTS} trainer.arctic_rl.device=cuda generator.eval_sampling_params.additional_kwargs.logit_bias.3=1.0": (
        "generator.eval_sampling_params.additional_kwargs.logit_bias={'3': 1.0}: vLLM does not take it"
    ),
}


@pytest.mark.parametrize("overrides", LIMITS)
def test_a_value_that_cannot_be_honoured_is_refused(overrides):
    (line,) = refusals(parse_config([*BASE, *overrides.split()]))
    assert LIMITS[overrides] in line


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.algorithm.advantage_estimator=rloo trainer.algorithm.kl_estimator_type=abs",
        "trainer.resume_mode=null",
        "trainer.resume_mode=none",
        "trainer.resume_mode=from_path trainer.resume_path=runs/global_step_3",
        "trainer.max_ckpts_to_keep=0 trainer.ckpt_interval=-1",
        "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.target_modules=.*proj",
        "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.exclude_modules=[]",
        "trainer.policy.model.lora.target_modules=[]",
        "trainer.algorithm.value_head_prefix=a.b",
        f"{PROFILER}.ranks=[7] {PROFILER}.save_path=traces",
        f"{PROFILER}.enable=true {PROFILER}.save_path=/traces {PROFILER}.ranks=[1] "
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.export_path=x trainer.ckpt_path=x",
        "trainer.export_path=x/exports trainer.ckpt_path=x trainer.hf_save_interval=5",
        "generator.zero_reward_on_non_stop=true generator.chat_template_kwargs.a=1",
        "generator.sampling_params.additional_kwargs.seed=1",
        "generator.inference_engine.engine_init_kwargs.max_model_len=4096",
        "generator.inference_engine.engine_init_kwargs.enable_log_requests=true",
        "trainer.algorithm.use_tis=true trainer.algorithm.tis_imp_ratio_cap=2.0",
        f"{DRAFTS} trainer.arctic_rl.device=cuda generator.sampling_params.top_k=20",
        f"{DRAFTS} trainer.arctic_rl.device=cuda trainer.eval_interval=-1 generator.eval_sampling_params.min_p=0.1",
    ],
)
def test_values_near_the_limits_are_not(overrides):
    assert refusals(parse_config([*BASE, *overrides.split()])) == []


def test_every_problem_of_a_chat_template_is_told(tmp_path):
    template = "generator.chat_template.name_or_path"
    lines = refusals(parse_config([*BASE, f"{template}=no_such_name"]))
    assert [line.rpartition("; ")[2] for line in lines] == [
        "write generator.sampling_params.logprobs=null",
        "write generator.eval_sampling_params.logprobs=null",
        "write a name or a file that exists",
    ]
    quiet = ["generator.sampling_params.logprobs=null", "generator.eval_sampling_params.logprobs=null"]
    assert refusals(parse_config([*BASE, f"{template}=qwen3_with_thinking", *quiet])) == []
    (line,) = refusals(parse_config([*BASE, f"{template}=qwen3_with_thinking", "generator.batched=true"]))
    assert line.endswith("write generator.batched=false")


@pytest.mark.parametrize("model", ["policy", "ref", "critic"])
def test_the_compute_dtype_of_fsdp_agrees_with_bf16(model):
    setting = f"trainer.{model}.fsdp_config.mixed_precision.param_dtype"
    base = [*BASE, "trainer.critic.model.path=some/model"]
    assert refusals(parse_config([*base, f"{setting}=bf16"])) == []
    assert refusals(parse_config([*base, f"{setting}=fp32", "trainer.bf16=false"])) == []
    for overrides in ([f"{setting}=fp16"], [f"{setting}=bf16", "trainer.bf16=false"]):
        (line,) = refusals(parse_config([*base, *overrides]))
        assert line.startswith(setting) and "trainer.bf16" in line
