"""Values that cannot work: each is refused by its own name, all of them at once, and nothing else is."""

import pytest

from integrations.arctic_rl.checks import setting_problems
from integrations.arctic_rl.errors import ConfigError
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.skyrl_config import parse_config

BASE = ["trainer.logger=console", "trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct"]


def parsed(overrides):
    return parse_config([*BASE, *overrides.split()])


def settings(lines):
    return [line.split("=")[0] for line in lines]


def refused(overrides):
    return inspect_config(parsed(overrides)).refused


class TestSampling:
    @pytest.mark.parametrize("section", ["sampling_params", "eval_sampling_params"])
    def test_the_way_to_a_repetition_penalty_that_is_advised_works(self, section):
        (line,) = refused(f"generator.{section}.repetition_penalty=1.1")
        advised = line.rpartition("write ")[2]
        assert advised == f"generator.{section}.additional_kwargs.repetition_penalty"
        assert refused(f"{advised}=1.1") == []

    @pytest.mark.parametrize("section", ["sampling_params", "eval_sampling_params"])
    def test_all_that_is_wrong_is_said_at_once_under_the_names_of_the_recipe(self, section):
        names = ("top_p=3", "min_p=-1", "top_k=-7", "max_generate_length=0", "additional_kwargs.presence_penalty=5")
        lines = setting_problems(parsed(" ".join(f"generator.{section}.{name}" for name in names)))
        assert set(settings(lines)) == {f"generator.{section}.{name.split('=')[0]}" for name in names}

    def test_evaluations_that_do_not_take_place_are_not_checked(self):
        bad = "generator.eval_sampling_params.temperature=5 trainer.eval_batch_size=0"
        bad += " generator.eval_n_samples_per_prompt=0"
        assert set(settings(setting_problems(parsed(bad)))) == {
            "generator.eval_sampling_params.temperature",
            "trainer.eval_batch_size",
            "generator.eval_n_samples_per_prompt",
        }
        assert setting_problems(parsed(f"{bad} trainer.eval_interval=-1")) == []

    @pytest.mark.parametrize("value", ["-1", "0", ".nan", ".inf"])
    def test_trainings_own_temperature_is_named_where_it_is_the_wrong_one(self, value):
        lines = setting_problems(parsed(f"trainer.algorithm.temperature={value}"))
        assert settings(lines) == ["trainer.algorithm.temperature"]
        lines = setting_problems(parsed(f"generator.sampling_params.temperature={value}"))
        assert settings(lines) == ["generator.sampling_params.temperature"]


ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
LOSS = f"{ALGORITHM}.policy_loss_type"
OUT_OF_RANGE = {
    "eps_clip_low": (["-1", ".inf", ".nan"], ""),
    "eps_clip_high": (["-1", ".inf", ".nan"], ""),
    "clip_ratio_c": (["1", ".inf"], f"{LOSS}=dual_clip"),
    "kl_loss_coef": ([".nan", ".inf"], f"{ALGORITHM}.use_kl_loss=true"),
    "entropy_loss_coef": ([".nan"], f"{ALGORITHM}.use_entropy_loss=true"),
    "zero_variance_filter_tol": (["-0.1", ".nan"], f"{ALGORITHM}.zero_variance_filter=true"),
    "sapo.tau_pos": (["0", ".inf"], f"{LOSS}=sapo"),
    "sapo.tau_neg": (["-1", ".nan"], f"{LOSS}=sapo"),
    "cispo.cispo_eps_clip_low": (["-1"], f"{LOSS}=cispo"),
    "cispo.cispo_eps_clip_high": (["-1", ".inf"], f"{LOSS}=cispo"),
    "dppo.delta_low": (["-1"], f"{LOSS}=dppo"),
    "dppo.delta_high": (["-1", ".nan"], f"{LOSS}=dppo"),
    "clip_cov.clip_ratio": (["2", "-0.1"], f"{LOSS}=clip_cov"),
    "clip_cov.clip_cov_lb": (["9"], f"{LOSS}=clip_cov"),
    "kl_cov.kl_cov_frac": (["2", "-0.1"], f"{LOSS}=kl_cov"),
    "kl_cov.ppo_kl_coef": ([".inf"], f"{LOSS}=kl_cov"),
    "max_seq_len": (["0", "-5"], f"{ALGORITHM}.loss_reduction=seq_mean_token_sum_norm"),
    "dynamic_sampling.min_replace_ratio": (["2"], f"{ALGORITHM}.dynamic_sampling.type=replace"),
    "off_policy_correction.token_tis_ratio_clip_high": (["0", ".nan"], f"{CORRECTION}.tis_ratio_type=token"),
    "off_policy_correction.token_mask_is_threshold_low": (
        ["3"],
        f"{CORRECTION}.token_mask_is_threshold_low=1 {CORRECTION}.token_mask_is_threshold_high=2",
    ),
    "off_policy_correction.geo_mask_low": (["1.5"], f"{CORRECTION}.sequence_mask_metric=geometric"),
    "off_policy_correction.product_mask_low": (["3"], f"{CORRECTION}.sequence_mask_metric=product"),
    "gamma": ([".nan"], f"{ALGORITHM}.advantage_estimator=reinforce++"),
}


class TestNumbers:
    @pytest.mark.parametrize(
        ("name", "value", "context"),
        [(name, value, context) for name, (values, context) in OUT_OF_RANGE.items() for value in values],
    )
    def test_a_number_of_the_algorithm_out_of_range_is_refused_by_its_own_name(self, name, value, context):
        lines = setting_problems(parsed(f"{context} {ALGORITHM}.{name}={value}"))
        assert settings(lines) == [f"{ALGORITHM}.{name}"]
        assert setting_problems(parsed(context)) == []

    @pytest.mark.parametrize(
        "setting",
        [
            "trainer.policy.optimizer_config.lr",
            "trainer.policy.optimizer_config.weight_decay",
            "trainer.policy.optimizer_config.max_grad_norm",
            "trainer.arctic_rl.lr_warmup_ratio",
            "trainer.arctic_rl.cpu_kv_cache_gib",
            "trainer.algorithm.lambd",
        ],
    )
    def test_what_is_not_a_number_is_refused(self, setting):
        assert settings(setting_problems(parsed(f"{setting}=.nan"))) == [setting]

    @pytest.mark.parametrize(
        "setting", ["trainer.policy.optimizer_config.lr", "trainer.arctic_rl.scoring_time_limit_s"]
    )
    def test_infinity_is_refused_where_it_means_nothing(self, setting):
        assert settings(setting_problems(parsed(f"{setting}=.inf"))) == [setting]

    def test_infinity_means_no_bound_in_a_correction(self):
        token = f"{CORRECTION}.tis_ratio_type=token {CORRECTION}.token_tis_ratio_clip_high=.inf"
        assert setting_problems(parsed(token)) == []

    def test_a_conversation_has_a_turn(self):
        assert settings(setting_problems(parsed("generator.max_turns=0"))) == ["generator.max_turns"]

    def test_each_problem_of_a_loss_is_said(self):
        bad = "eps_clip_low=-1 eps_clip_high=.inf clip_ratio_c=0 policy_loss_type=dual_clip kl_loss_coef=.nan"
        lines = setting_problems(parsed(" ".join(f"{ALGORITHM}.{item}" for item in bad.split())))
        assert set(settings(lines)) == {
            f"{ALGORITHM}.{name}" for name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c", "kl_loss_coef")
        }

    def test_a_wrong_estimator_of_the_kl_is_said_once(self):
        assert settings(refused(f"{ALGORITHM}.kl_estimator_type=k4")) == [f"{ALGORITHM}.kl_estimator_type"]


class TestTogether:
    def test_no_problem_hides_another_of_the_server(self):
        lines = refused(
            "trainer.policy.optimizer_config.lr=-1 trainer.policy.optimizer_config.adam_betas=[0.9] "
            "trainer.policy.optimizer_config.scheduler=bogus generator.inference_engine.model_dtype=int3 "
            f"{ALGORITHM}.kl_loss_coef=.nan {LOSS}=nobodys generator.inference_engine.max_num_seqs=0"
        )
        lines = [line for line in lines if not line.startswith("SkyRL")]
        assert sorted(settings(lines)) == sorted(
            [
                "trainer.policy.optimizer_config.lr",
                "trainer.policy.optimizer_config.adam_betas",
                "trainer.policy.optimizer_config.scheduler",
                "generator.inference_engine.model_dtype",
                f"{ALGORITHM}.kl_loss_coef",
                LOSS,
                "generator.inference_engine.max_num_seqs",
            ]
        )

    def test_a_count_of_an_engine_is_named_once(self):
        lines = refused("generator.inference_engine.max_num_seqs=0")
        assert [line for line in lines if "max_num_seqs" in line] == [
            "generator.inference_engine.max_num_seqs=0 must be a whole number of at least 1"
        ]


class TestOldNames:
    TIS = f"{ALGORITHM}.use_tis=true {ALGORITHM}.tis_imp_ratio_cap=2.5"

    @pytest.mark.parametrize(
        ("beside", "named"),
        [
            ("tis_ratio_type=sequence", "tis_ratio_type"),
            ("token_tis_ratio_clip_high=3", "token_tis_ratio_clip_high"),
            ("tis_ratio_type=sequence sequence_tis_ratio_clip_high=3", "tis_ratio_type"),
        ],
    )
    def test_the_new_name_with_another_value_is_refused(self, beside, named):
        lines = refused(f"{self.TIS} " + " ".join(f"{CORRECTION}.{item}" for item in beside.split()))
        assert settings(lines) == [f"{CORRECTION}.{named}"]

    def test_the_same_value_under_both_names_passes(self):
        both = f"{self.TIS} {CORRECTION}.tis_ratio_type=token {CORRECTION}.token_tis_ratio_clip_high=2.5"
        found = inspect_config(parsed(both))
        assert found.refused == found.ignored == []

    def test_a_cap_that_the_old_name_switches_off_is_said_to_have_no_effect(self):
        found = inspect_config(parsed(f"{self.TIS} {CORRECTION}.sequence_tis_ratio_clip_high=3"))
        assert found.refused == []
        assert settings(found.ignored) == [f"{CORRECTION}.sequence_tis_ratio_clip_high"]


class TestOwnLoss:
    @pytest.mark.parametrize(
        ("name", "said"), [("nope", "unknown"), ("os.path", "not a function"), ("os.nofunc", "no 'nofunc'")]
    )
    def test_a_function_that_is_not_there_is_known_before_anything_starts(self, name, said):
        (line,) = refused(f"trainer.arctic_rl.loss_fn={name}")
        assert line.startswith(f"trainer.arctic_rl.loss_fn='{name}': ") and said in line

    def test_a_dotted_path_and_a_registered_name_pass(self, tmp_path, monkeypatch):
        assert refused("trainer.arctic_rl.loss_fn=tests.arctic_rl.processors.user_module.undecorated") == []
        (tmp_path / "losses_of_a_recipe.py").write_text(
            "from integrations.arctic_rl.processors.pipeline import register_loss_fn\n"
            "@register_loss_fn('loss_of_a_recipe')\n"
            "def loss(model_outputs, batch, meta, config, device):\n"
            "    return model_outputs['logprobs'].sum(), {}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        named = "trainer.arctic_rl.loss_fn=loss_of_a_recipe"
        assert refused(f"{named} trainer.arctic_rl.processor_modules=[losses_of_a_recipe]") == []

    def test_a_module_that_does_not_import_is_not_held_against_the_name(self, tmp_path, monkeypatch):
        (tmp_path / "broken_losses_of_a_recipe.py").write_text("raise RuntimeError('broken')\n")
        monkeypatch.syspath_prepend(tmp_path)
        modules = "trainer.arctic_rl.processor_modules=[broken_losses_of_a_recipe]"
        (line,) = refused(f"trainer.arctic_rl.loss_fn=nope {modules}")
        assert "broken_losses_of_a_recipe" in line


class TestSingleValues:
    @pytest.mark.parametrize("seed", [-1, 2**32])
    def test_a_seed_that_no_process_can_be_seeded_with(self, seed):
        (line,) = refused(f"trainer.seed={seed}")
        assert line == f"trainer.seed={seed} must be a whole number from 0 to 4294967295"
        assert refused("trainer.seed=4294967295") == []

    def test_one_name_of_a_data_set_without_brackets_is_taken_as_skyrl_takes_it(self, tmp_path):
        found = inspect_config(parsed(f"data.train_data={tmp_path}/x.parquet trainer.eval_interval=-1"))
        assert found.refused == []
        assert found.missing == [f"data.train_data: {tmp_path}/x.parquet: no such file"]
        (line,) = refused("data.train_data=5")
        assert line == "data.train_data=5 is not a list of texts"

    def test_a_templates_source_that_is_none_is_told_once(self):
        chat, quiet = "generator.chat_template", "sampling_params.logprobs=null"
        lines = refused(f"{chat}.source=nope {chat}.name_or_path=x generator.{quiet} generator.eval_{quiet}")
        assert settings(lines) == ["generator.chat_template.source"]

    def test_a_folder_of_logs_that_cannot_be(self, tmp_path):
        (tmp_path / "file").write_text("")
        found = inspect_config(parsed(f"trainer.log_path={tmp_path}/file/logs"))
        assert f"trainer.log_path={tmp_path}/file/logs: {tmp_path}/file is not a folder" in found.missing

    def test_a_copy_that_skyrl_made_is_not_told_beside_its_source(self):
        (line,) = refused("generator.sampling_params.temperature=abc")
        assert line == "generator.sampling_params.temperature=abc is not a number"
        lines = refused("generator.sampling_params.temperature=abc trainer.algorithm.temperature=xyz")
        assert settings(lines) == ["trainer.algorithm.temperature", "generator.sampling_params.temperature"]

    def test_nor_one_in_a_mapping(self):
        lines = refused("trainer.strategy=megatron trainer.policy.megatron_config.fp8=7")
        assert lines == ["trainer.policy.megatron_config.fp8=7 is not a text or null"]

    def test_a_key_glued_to_its_value_is_told_once(self):
        name = "generator.sampling_params.additional_kwargs"
        assert refused(f"{name}={{seed:5}}") == [
            f"{name}={{seed:5}}: read as one name without a value; write {name}.seed=5"
        ]


class TestEngineSizes:
    ENGINE = "generator.inference_engine"

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            ("{}.gpu_memory_utilization=1.5 trainer.arctic_rl.device=cuda", "1.5 must be above 0 and at most 1"),
            ("{}.gpu_memory_utilization=0 trainer.arctic_rl.device=cuda", "0 must be above 0 and at most 1"),
            ("{}.gpu_memory_utilization=1 trainer.arctic_rl.device=cuda", None),
            ("{}.gpu_memory_utilization=0 trainer.arctic_rl.device=cpu", None),
            ("{}.max_num_batched_tokens=7 {}.max_num_seqs=8", "max_num_seqs=8 sequences; write at least as many"),
            ("{}.max_num_batched_tokens=8 {}.max_num_seqs=8", None),
            ("{}.max_num_batched_tokens=1535 {}.enable_chunked_prefill=false", "1536 tokens must fit"),
            ("{}.max_num_batched_tokens=1536 {}.enable_chunked_prefill=false", None),
        ],
    )
    def test_what_vllm_builds_no_engine_with_is_refused(self, overrides, said):
        lines = setting_problems(parsed(overrides.replace("{}", self.ENGINE)))
        lines = [line for line in lines if line.startswith(self.ENGINE)]
        assert len(lines) == (said is not None) and all(said in line for line in lines)

    def test_the_longest_sequence_is_that_of_the_engine_where_it_is_said(self):
        said = f"{self.ENGINE}.engine_init_kwargs.max_model_len=4096 {self.ENGINE}.enable_chunked_prefill=false"
        (line,) = setting_problems(parsed(f"{said} {self.ENGINE}.max_num_batched_tokens=2048"))
        assert line.endswith("write at least 4096, or enable_chunked_prefill=true")


class TestWeightSync:
    @pytest.mark.parametrize("colocated", ["true", "false"])
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("way", ["shared_memory", "low_memory", "nccl", "ipc"])
    def test_a_way_that_the_recipes_placement_does_not_allow_is_refused(self, way, device, colocated):
        lines = setting_problems(
            parsed(
                f"trainer.arctic_rl.weight_sync={way} trainer.arctic_rl.device={device} "
                f"trainer.placement.colocate_all={colocated}"
            )
        )
        lines = [line for line in lines if "weight_sync" in line]
        words = {
            ("nccl", "cpu"): "needs GPUs, and models run on CPUs",
            ("ipc", "cpu"): "needs GPUs, and models run on CPUs",
            ("nccl", "cuda"): "NCCL takes a GPU once" if colocated == "true" else None,
            ("ipc", "cuda"): "have no training rank" if colocated == "false" else None,
        }.get((way, device))
        assert len(lines) == (words is not None)
        if words is not None:
            assert words in lines[0] and lines[0].startswith(f"trainer.arctic_rl.weight_sync='{way}'")

    @pytest.mark.parametrize(
        ("placement", "spread"),
        [
            ("trainer.placement.policy_num_nodes=2 trainer.placement.colocate_all=true", True),
            ("trainer.placement.policy_num_nodes=2 trainer.placement.colocate_all=false", False),
            ("trainer.placement.colocate_all=false trainer.arctic_rl.cluster_gpus=[1,1]", True),
            ("trainer.placement.colocate_all=false trainer.arctic_rl.cluster_gpus=[2]", False),
            ("trainer.placement.colocate_all=false trainer.arctic_rl.cluster_gpus=[1]", False),
        ],
    )
    def test_memory_is_not_shared_between_nodes(self, placement, spread):
        sizes = "generator.inference_engine.num_engines=1 trainer.placement.policy_num_gpus_per_node=1"
        if "policy_num_nodes=2 trainer.placement.colocate_all=true" in placement:
            sizes = sizes.replace("num_engines=1", "num_engines=2")
        way = "trainer.arctic_rl.weight_sync=shared_memory trainer.algorithm.use_kl_loss=false"
        recipe = f"{sizes} {placement} {way} trainer.arctic_rl.device="
        lines = setting_problems(parsed(f"{recipe}cuda"))
        told = [line for line in lines if line.startswith("trainer.arctic_rl.weight_sync='shared_memory': ")]
        assert len(told) == spread and all("on several nodes" in line and "low_memory" in line for line in told)
        assert not any("weight_sync" in line for line in setting_problems(parsed(f"{recipe}cpu")))

    def test_an_unknown_way_is_refused_with_those_that_there_are(self):
        with pytest.raises(ConfigError, match=r"weight_sync='rdma' is not .*shared_memory.*ipc"):
            parsed("trainer.arctic_rl.weight_sync=rdma")
