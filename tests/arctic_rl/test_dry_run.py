"""Recipes of many shapes: what they are refused for, and the report of a dry run, without anything being started."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config.config import SkyRLTrainConfig

from integrations.arctic_rl.described_placement import described_plan, planned_cluster
from integrations.arctic_rl.dry_run import exit_status, report
from integrations.arctic_rl.entrypoint import load_config
from integrations.arctic_rl.errors import ConfigError
from integrations.arctic_rl.horizon import horizon
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.recipe_checks import gpu_placement_problems
from integrations.arctic_rl.skyrl_config import parse_config, parse_what_is_known

ROOT = Path(__file__).parents[2]
SIZES = [
    "trainer.train_batch_size=96",
    "trainer.policy_mini_batch_size=24",
    "trainer.micro_train_batch_size_per_gpu=4",
    "trainer.micro_forward_batch_size_per_gpu=8",
    "generator.n_samples_per_prompt=8",
]


ASYNCHRONOUS = [
    "trainer.fully_async.enabled=true",
    "trainer.fully_async.max_staleness_steps=2",
    "trainer.fully_async.num_parallel_generation_workers=72",
    "trainer.placement.colocate_all=false",
    "trainer.algorithm.policy_loss_type=rollout_is",
    *SIZES[1:],
    "trainer.train_batch_size=24",
]


def gpus(nodes, per_node, engines, tensor_parallel=1):
    """Policy and reference model on all GPUs, and as many for engines."""
    return [
        f"trainer.placement.policy_num_nodes={nodes}",
        f"trainer.placement.policy_num_gpus_per_node={per_node}",
        f"trainer.placement.ref_num_nodes={nodes}",
        f"trainer.placement.ref_num_gpus_per_node={per_node}",
        f"generator.inference_engine.num_engines={engines}",
        f"generator.inference_engine.tensor_parallel_size={tensor_parallel}",
    ]


def megatron(role="policy", **sizes):
    return [f"trainer.{role}.megatron_config.{name}={value}" for name, value in sizes.items()]


SHAPES = {
    "plain grpo on one node": (["trainer.policy.model.path=some/model-1b", *SIZES, *gpus(1, 8, 8)], []),
    "its own loss and reduction": (
        [
            *SIZES,
            *gpus(1, 4, 4),
            "trainer.algorithm.policy_loss_type=gspo",
            "trainer.algorithm.loss_reduction=sequence_mean",
            "trainer.algorithm.use_kl_loss=false",
        ],
        [],
    ),
    "dapo's family": (
        [
            *SIZES,
            *gpus(2, 8, 4, 4),
            "trainer.algorithm.policy_loss_type=dual_clip",
            "trainer.algorithm.eps_clip_high=0.28",
            "trainer.algorithm.clip_ratio_c=10",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.algorithm.dynamic_sampling.type=filter",
            "generator.apply_overlong_filtering=true",
            "generator.batched=true",
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        ],
        [],
    ),
    "kl in the reward, adaptive": (
        [
            *SIZES,
            *gpus(1, 2, 2),
            "trainer.algorithm.advantage_estimator=reinforce++",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.algorithm.use_kl_in_reward=true",
            "trainer.algorithm.kl_ctrl.type=adaptive",
        ],
        [],
    ),
    "engines apart, weights as checkpoint deltas": (
        [
            *SIZES,
            *gpus(1, 4, 2, 2),
            "trainer.placement.colocate_all=false",
            "generator.inference_engine.weight_sync_backend=delta",
            "generator.inference_engine.delta_weight_sync.sync_dir=/shared/deltas",
        ],
        [],
    ),
    "fsdp2 by its old name, with sequence parallelism": (
        [
            *SIZES,
            *gpus(1, 8, 4, 2),
            "trainer.strategy=fsdp2",
            "trainer.policy.sequence_parallel_size=2",
            "trainer.ref.sequence_parallel_size=2",
            "trainer.ref.fsdp_config.cpu_offload=true",
        ],
        [],
    ),
    "a mixture of experts on Megatron": (
        [
            *SIZES,
            *gpus(4, 8, 2, 16),
            "trainer.strategy=megatron",
            *megatron(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, expert_model_parallel_size=8),
            *megatron("ref", tensor_model_parallel_size=4, pipeline_model_parallel_size=2),
            "trainer.policy.megatron_config.transformer_config_kwargs.num_layers_in_last_pipeline_stage=11",
            "trainer.policy.megatron_config.optimizer_config_kwargs.optimizer_cpu_offload=true",
            "trainer.flash_attn=false",
        ],
        [],
    ),
    "experts balanced by a loss, in fp8": (
        [
            *SIZES,
            *gpus(1, 8, 1, 8),
            "trainer.strategy=megatron",
            *megatron(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, fp8="hybrid"),
            "generator.inference_engine.engine_init_kwargs.quantization=fp8",
        ],
        [
            "trainer.policy.megatron_config.moe_router_load_balancing_type=aux_loss",
            "trainer.policy.megatron_config.moe_aux_loss_coeff=0.01",
            "trainer.policy.megatron_config.fp8=hybrid",
            "generator.inference_engine.engine_init_kwargs.quantization=fp8",
        ],
    ),
    "heads for speculation": (
        [*SIZES, *gpus(1, 8, 8), "trainer.strategy=megatron", "trainer.mtp.enabled=true", "trainer.mtp.loss_weight=1"],
        ["trainer.mtp.enabled=true"],
    ),
    "ppo": (
        [
            *SIZES,
            *gpus(1, 4, 4),
            "trainer.placement.critic_num_gpus_per_node=4",
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.critic.model.path=some/model",
            "trainer.critic.optimizer_config.lr=2e-5",
            "trainer.critic_mini_batch_size=12",
        ],
        [],
    ),
    "low rank on top of ppo": (
        [
            *SIZES,
            *gpus(1, 4, 4),
            "trainer.policy.model.path=some/model",
            "trainer.policy.model.lora.rank=16",
            "trainer.policy.model.lora.alpha=64",
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.critic.model.path=some/model",
            "trainer.critic.model.lora.rank=8",
            "trainer.critic.optimizer_config.lr=2e-5",
            "trainer.critic_mini_batch_size=24",
        ],
        [],
    ),
    "fully asynchronous": (
        [
            *gpus(1, 4, 4),
            *ASYNCHRONOUS,
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "trainer.fully_async.clear_kv_cache_on_weight_sync=true",
        ],
        [],
    ),
    "fully asynchronous, and everything that this excludes": (
        [
            *SIZES,
            *gpus(1, 4, 4),
            "trainer.fully_async.enabled=true",
            "trainer.fully_async.num_parallel_generation_workers=121",
            "trainer.fully_async.sample_full_batch=true",
            "trainer.fully_async.simulate_training=true",
            "trainer.algorithm.dynamic_sampling.type=filter",
            "generator.batched=true",
            "generator.sampling_params.logprobs=null",
        ],
        [
            "trainer.train_batch_size=96",
            "trainer.fully_async.num_parallel_generation_workers=121",
            "trainer.algorithm.policy_loss_type=regular",
            "generator.sampling_params.logprobs=null",
            "trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.fully_async.sample_full_batch=true",
            "generator.batched=true",
            "trainer.placement.colocate_all=true",
            "trainer.fully_async.simulate_training=true",
        ],
    ),
    "served elsewhere": (
        [
            *SIZES,
            "trainer.placement.colocate_all=false",
            "generator.inference_engine.run_engines_locally=false",
            "generator.inference_engine.external_proxy_url=http://proxy:8000",
        ],
        [
            "generator.inference_engine.run_engines_locally=false",
            "generator.inference_engine.external_proxy_url=http://proxy:8000",
        ],
    ),
    "images": (
        [*SIZES, "generator.vision_language_generator=true"],
        ["generator.vision_language_generator=true"],
    ),
    "rollouts of another precision, experts replayed": (
        [
            *SIZES,
            *gpus(1, 8, 1, 8),
            "trainer.strategy=megatron",
            *megatron(moe_enable_routing_replay="true"),
            "generator.inference_engine.enable_return_routed_experts=true",
            "generator.inference_engine.distributed_executor_backend=mp",
            "generator.inference_engine.fp8_weight_sync_mode=blockwise",
        ],
        [
            "trainer.policy.megatron_config.moe_enable_routing_replay=true",
            "generator.inference_engine.fp8_weight_sync_mode=blockwise",
            "generator.inference_engine.enable_return_routed_experts=true",
        ],
    ),
    "names as variables left empty": (
        [*SIZES, "trainer.run_name=", "trainer.resume_mode=null", "generator.sampling_params.temperature=1"],
        [],
    ),
}
"""Overrides of a recipe, and beginnings of the lines that refuse it."""


@pytest.fixture(autouse=True)
def without_key(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def inspected(overrides):
    cfg = parse_config([*overrides, "trainer.arctic_rl.dry_run=true"])
    return cfg, inspect_config(cfg)


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_is_refused_for_exactly_what_is_not_there(name):
    overrides, expected = SHAPES[name]
    cfg, findings = inspected(overrides)
    assert [line.split(": ")[0] for line in findings.refused] == expected
    assert exit_status(findings) == (1 if expected else 0)
    text = report(cfg, findings)
    for title in ("Not on this machine", "Server", "Placement on the cluster", "Schedule"):
        assert f"\n\n{title}" in text
    assert ("\n\nRefused" in text) == bool(expected)
    assert "cannot be" not in text.split("\n\nServer")[1].split("\n\nSchedule")[0]
    sizes = (24, "1 optimizer step") if "trainer.train_batch_size=24" in overrides else (96, "4 optimizer steps")
    assert "horizon: floor(prompts / {}) x 1 epoch x {} a batch".format(*sizes) in text
    assert all(len(line.splitlines()) == 1 for line in [*findings.refused, *findings.missing, *findings.ignored])


def test_a_missing_key_and_data_set_are_notes_and_hide_nothing_of_skyrls_checks():
    _, findings = inspected(["trainer.policy_mini_batch_size=7", "data.train_data=[/nowhere/x.parquet]"])
    (line,) = findings.refused
    assert line.startswith("SkyRL's own check: train_batch_size 1024 should be divisible by policy_mini_batch_size 7")
    assert "data.train_data: /nowhere/x.parquet: no such file" in findings.missing
    assert any("WANDB_API_KEY" in line for line in findings.missing)
    assert "WANDB_API_KEY" not in os.environ


def test_a_run_ends_with_all_of_it_together(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                "trainer.policy_mini_batch_size=7",
                "trainer.algorithm.eps_clip_hgih=1",
                "trainer.arctic_rl.zero_stge=2",
                "trainer.epochs=many",
                "generator.inference_engine.enable_pd=true",
                "trainer.placement.policy_num_gpus_per_node=8",
                "generator.inference_engine.num_engines=8",
                "data.train_data=[/nowhere/x.parquet]",
            ]
        )
    said = str(caught.value)
    for part in (
        "did you mean 'trainer.algorithm.eps_clip_high'",
        "did you mean 'zero_stage'",
        "trainer.epochs=many is not a whole number",
        "generator.inference_engine.enable_pd=true",
        "SkyRL's own check",
        "/nowhere/x.parquet: no such file",
        "WANDB_API_KEY",
        "trainer.arctic_rl.max_cpu_workers=4",
    ):
        assert part in said, part
    assert "Valid fields" not in said


def test_the_resolved_config_is_the_servers_and_holds_no_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    cfg, findings = inspected(
        ["trainer.policy.optimizer_config.lr=3.5e-4", "trainer.arctic_rl.zero_stage=3", "trainer.bf16=false"]
    )
    text = report(cfg, findings)
    server = text.split("\n\nServer\n")[1].split("\n\n")[0]
    for line in ("backend: builtin", "lr: 0.00035", "zero_stage: 3", "dtype: float32", "max_num_seqs: 1024"):
        assert f"  {line}" in server
    assert server.count("lr: 0.00035") == 1, "a reference model has no optimizer"
    assert "a-secret" not in text and "env_vars" not in text
    assert not any("WANDB_API_KEY" in line for line in findings.missing)


def test_a_critic_has_a_schedule_and_gpus_of_its_own():
    overrides, _ = SHAPES["ppo"]
    cfg, findings = inspected(overrides)
    text = report(cfg, findings)
    batches = "floor(prompts / 96) x 1 epoch"
    assert f"horizon: {batches} x 4 optimizer steps a batch" in text
    assert f"horizon of the critic: {batches} x 8 optimizer steps a batch" in text
    assert "critic: loss_fn=value, value_clip=0.2" in text and "gamma=1.0, lambd=1.0" in text
    assert "critic_ranks: 4" in text and "section: trainer.critic.optimizer_config" in text
    together = [(job.job, job.processes, job.first_gpu) for job in described_plan(cfg).jobs]
    assert together == [("policy", 4, 0), ("ref", 4, 0), ("critic", 4, 0), ("sampling", 4, 0)]
    apart, _ = inspected([*overrides, "trainer.placement.colocate_all=false"])
    apart = [(job.job, job.first_gpu) for job in described_plan(apart).jobs]
    assert apart == [("policy", 0), ("ref", 0), ("critic", 4), ("sampling", 8)]


def section(overrides, title):
    text = report(*inspected(overrides))
    return [line.strip() for line in text.split(f"\n\n{title}\n")[1].split("\n\n")[0].splitlines()]


class TestResolved:
    """Settings that travel with each call, which the server's own config does not hold."""

    def test_each_updates_loss(self):
        correction = "trainer.algorithm.off_policy_correction"
        lines = section(
            [
                "trainer.algorithm.policy_loss_type=cispo",
                "trainer.algorithm.cispo.cispo_eps_clip_high=3.5",
                "trainer.algorithm.kl_loss_coef=0.25",
                "trainer.algorithm.kl_estimator_type=k2",
                "trainer.algorithm.loss_reduction=sequence_mean",
                "generator.sampling_params.temperature=0.6",
                f"{correction}.tis_ratio_type=token",
                f"{correction}.token_tis_ratio_clip_high=1.5",
                "trainer.max_tokens_per_microbatch=777",
            ],
            "Updates",
        )
        for line in (
            "policy_loss_type: cispo",
            "policy_loss_config.cispo_eps_clip_high: 3.5",
            "kl_loss_coef: 0.25",
            "kl_loss_type: k2",
            "temperature: 0.6",
            "tokens_per_micro_batch: 777",
        ):
            assert line in lines
        (weights,) = (line for line in lines if line.startswith("off_policy_correction: "))
        assert "tis_ratio_type=token, token_tis_ratio_clip_high=1.5" in weights
        assert "loss_reduction=sequence_mean" in lines[-1]

    def test_a_loss_that_looks_beyond_a_row(self):
        lines = section(
            ["trainer.algorithm.policy_loss_type=kl_cov", "trainer.algorithm.kl_cov.kl_cov_frac=0.3"], "Updates"
        )
        assert {"policy_loss_config.kl_cov_frac: 0.3", "rows_per_micro_batch: 1"} <= set(lines)

    def test_requests(self):
        lines = section(
            [
                "generator.sampling_params.top_p=0.9",
                "generator.sampling_params.stop=[END]",
                "generator.sampling_params.additional_kwargs.presence_penalty=0.5",
                "generator.eval_sampling_params.temperature=0.3",
                "generator.eval_n_samples_per_prompt=4",
            ],
            "Rollouts",
        )
        (training,) = (line for line in lines if line.startswith("training: samples=5, "))
        for part in ("temperature=1.0", "top_p=0.9", "stop=['END']", "presence_penalty=0.5", "logprobs=0"):
            assert part in training
        assert any(line.startswith("evaluation: samples=4, temperature=0.3") for line in lines)
        assert not any(line.startswith("evaluation") for line in section(["trainer.eval_interval=-1"], "Rollouts"))


def test_a_value_that_is_refused_is_not_said_to_have_no_effect_too():
    override = "trainer.algorithm.dppo.dppo_type=foo"
    cfg, unknown = parse_what_is_known([override, "trainer.flash_attn=false"])
    findings = inspect_config(cfg, unknown)
    (line,) = findings.refused
    assert line.startswith(f"{override}: ")
    assert [line.split(": ")[0] for line in findings.ignored] == ["trainer.flash_attn=false"]


SKYRLS = {
    "trainer.policy_mini_batch_size=7": ("trainer.train_batch_size=1024 or trainer.policy_mini_batch_size=7",),
    "trainer.policy_mini_batch_size=2048": (
        "cfg.trainer.train_batch_size >= cfg.trainer.policy_mini_batch_size does not hold",
        "change trainer.train_batch_size=1024 or trainer.policy_mini_batch_size=2048",
    ),
    "trainer.policy.sequence_parallel_size=2": ("modulo by zero", "trainer.policy.sequence_parallel_size=2"),
    "trainer.algorithm.use_kl_in_reward=true": (
        "change trainer.algorithm.use_kl_in_reward=true or trainer.algorithm.use_kl_loss=true",
    ),
    "trainer.placement.policy_num_gpus_per_node=2": (
        "trainer.placement.policy_num_gpus_per_node=2",
        "generator.inference_engine.num_engines=1",
    ),
    "trainer.max_training_steps=0": ("change trainer.max_training_steps=0",),
    "generator.max_input_length=99": ("generator.max_input_length=99 or trainer.max_prompt_length=512",),
    "trainer.placement.colocate_all=true generator.inference_engine.num_engines=4": (
        "generator.inference_engine.num_engines=4",
        "change trainer.placement.colocate_all=true or",
    ),
    "trainer.sequence_parallel_backend=ring": ("change trainer.sequence_parallel_backend=ring",),
}
"""A recipe that SkyRL itself refuses, and what of the settings behind that is told."""


@pytest.mark.parametrize("override", SKYRLS)
def test_a_check_of_skyrls_is_told_with_the_settings_behind_it(override):
    _, findings = inspected(override.split())
    (line,) = findings.refused
    assert line.startswith("SkyRL's own check: ")
    assert all(part in line for part in SKYRLS[override]), line


class TestPlacement:
    def table(self, *overrides):
        return described_plan(parse_config(list(overrides))).table().splitlines()

    def test_colocated_jobs_start_at_the_first_gpu(self):
        lines = self.table(*gpus(2, 8, 4, 4))
        assert [line.split() for line in lines[1:]] == [
            ["policy", "16", "1", "0-1", "all"],
            ["ref", "16", "1", "0-1", "all"],
            ["sampling", "4", "4", "0-1", "all"],
        ]

    def test_engines_apart_take_the_next_nodes(self):
        apart = "trainer.placement.colocate_all=false"
        lines = self.table(*gpus(1, 4, 3, 2), apart)
        assert [line.split()[3:] for line in lines[1:]] == [
            ["0", "0-3"],
            ["0", "0-3"],
            ["1-2", "from", "0", "to", "1"],
        ]
        lines = self.table(*gpus(1, 4, 2, 2), apart, "trainer.placement.colocate_policy_ref=false")
        assert [line.split()[3:] for line in lines[1:]] == [["0", "0-3"], ["1", "0-3"], ["2", "0-3"]]

    @pytest.mark.parametrize(("ranks", "engine", "nodes"), [(1, 2, [2, 2]), (4, 8, [8, 8]), (2, 1, [2, 2])])
    def test_nodes_are_as_large_as_an_engine_with_gpus_of_its_own(self, ranks, engine, nodes):
        recipe = [
            *gpus(1, ranks, 2 // engine or 1, engine),
            "trainer.placement.colocate_all=false",
            "trainer.arctic_rl.device=cuda",
        ]
        cfg = parse_config(recipe)
        assert [node.gpus for node in planned_cluster(cfg).nodes] == nodes
        assert list(gpu_placement_problems(cfg)) == []
        lines = section(recipe, "Placement on the cluster that the recipe describes")
        assert ("each engine stays within a node" in lines) == (nodes[0] == ranks)
        assert (f"on nodes with {nodes} GPUs:" in lines) == (nodes[0] != ranks)

    def test_no_reference_model_without_a_kl_term(self):
        lines = self.table(*gpus(1, 2, 2), "trainer.algorithm.use_kl_loss=false")
        assert [line.split()[0] for line in lines] == ["job", "policy", "sampling"]

    @pytest.mark.parametrize("setting", ["policy_num_gpus_per_node", "policy_num_nodes", "ref_num_gpus_per_node"])
    @pytest.mark.parametrize("value", [0, -7])
    def test_sizes_that_cannot_be_end_in_no_traceback(self, setting, value):
        cfg, findings = inspected([f"trainer.placement.{setting}={value}"])
        assert any(line.startswith(f"trainer.placement.{setting}={value}") for line in findings.refused)
        assert "\n\nPlacement on the cluster" in report(cfg, findings)

    def test_plans_count_what_skyrl_counts(self):
        plan = described_plan(parse_config([*gpus(1, 8, 2, 2), "generator.inference_engine.data_parallel_size=2"]))
        assert (plan.jobs[-1].processes, plan.jobs[-1].gpus_each, plan.nodes) == (2, 4, 1)


class TestHorizon:
    def test_it_is_that_of_skyrls_loader(self):
        """100 prompts in batches of 24: 4 batches an epoch, the rest is dropped."""
        sizes = ["trainer.train_batch_size=24", "trainer.policy_mini_batch_size=8"]
        run = horizon(parse_config([*sizes, "trainer.epochs=3", "trainer.update_epochs_per_batch=2"]))
        assert run.optimizer_steps(100) == 4 * 3 * 3 * 2
        assert run.optimizer_steps(23) == 0
        capped = horizon(parse_config([*sizes, "trainer.epochs=3", "trainer.max_training_steps=5"]))
        assert capped.optimizer_steps(100) == 5 * 3
        assert capped.formula() == "min(floor(prompts / 24) x 3 epochs, 5) x 3 optimizer steps a batch"

    def test_a_number_where_data_set_and_tokenizer_are_here(self, tmp_path):
        sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))
        try:
            from recipes import write_inputs
        finally:
            sys.path.pop(0)
        write_inputs(tmp_path, prompts=10)
        (model,) = {path.parent for path in tmp_path.rglob("config.json")}
        (data,) = tmp_path.rglob("*.parquet")
        cfg, findings = inspected(
            [
                f"data.train_data=['{data}']",
                f"trainer.policy.model.path={model}",
                "trainer.train_batch_size=4",
                "trainer.policy_mini_batch_size=2",
                "trainer.epochs=3",
                "trainer.eval_interval=-1",
                "trainer.logger=console",
                "trainer.max_prompt_length=128",
                "generator.sampling_params.max_generate_length=8",
                f"trainer.ckpt_path={tmp_path}/ckpt",
            ]
        )
        assert (findings.refused, findings.missing) == ([], [])
        assert "horizon: 12 optimizer steps" in report(cfg, findings), "2 batches x 3 epochs x 2"


def test_a_value_of_another_type_leaves_the_rest_readable():
    cfg, findings = inspected(["trainer.epochs=many", "trainer.policy.model.path=a/model", "generator.max_turns=two"])
    assert findings.refused == [
        "trainer.epochs=many is not a whole number",
        "generator.max_turns=two is not a whole number",
    ]
    assert "horizon: floor(prompts / 1024) x 1 epoch x 4 optimizer steps a batch" in report(cfg, findings)


def test_unknown_settings_are_told_beside_the_rest():
    cfg, problems = parse_what_is_known(["trainer.algorithm.eps=1", "trainer.arctic_rl.x=1", "generator.max_turns=2"])
    assert cfg.generator.max_turns == 2
    assert [line for line in problems if ".eps:" in line] == ["trainer.algorithm.eps: SkyRL 0.4.0 has no such setting"]
    assert len(problems) == 2 and any("trainer.arctic_rl.x" in line for line in problems)


def reported(capsys, *overrides):
    """The refusals in the dry run's report of a recipe, without their bullets."""
    with pytest.raises(SystemExit) as caught:
        load_config(["trainer.logger=console", "trainer.arctic_rl.dry_run=true", *overrides])
    sections = [part.splitlines() for part in capsys.readouterr().out.split("\n\n")]
    refused = [line.removeprefix("  - ") for part in sections if part[0].startswith("Refused") for line in part[1:]]
    assert caught.value.code == (1 if refused else 0)
    return refused


UNBUILDABLE = (
    "trainer.algorithm.dppo.dppo_type=foo",
    "trainer.algorithm.cispo.cispo_anchor=foo",
    "data.dataloader.num_workers=-1",
    "trainer.logprobs_chunk_size=0",
    "trainer.policy.model.fake_int4_qat.enabled=true",
    "generator.inference_engine.fp8_weight_sync_mode=blockwise",
    "trainer.algorithm.enable_sample_support_replay=true",
    "+trainer.seed=3",
    "trainer.seed=${nothing}",
    "trainer.seed=[1",
    "trainer.algorithm={eps: 1}",
    "trainer.arctic_rl.max_cpu_workers=0",
    "trainer.arctic_rl.zero_stag=3",
    "environment.skyrl_gym.bird_sql.timeout_s=-1",
    "trainer.placement=null",
    "environment=null",
    "trainer.arctic_rl=null",
    "trainer.arctic_rl=5",
    "generator.eval_sampling_params=3",
    "trainer.policy.fsdp_config.mixed_precision=bf16",
    "trainer.algorithm.off_policy_correction=null",
    "trainer.policy.optimizer_config=null",
    "trainer=5",
    "trainer.policy=null",
)


@pytest.mark.parametrize("override", UNBUILDABLE)
def test_a_value_that_no_config_is_built_with_hides_nothing(override, capsys):
    """One line that begins with the setting, beside all that is refused without it; the report is there."""
    others = ["trainer.ref.language_model_only=true", "trainer.epohcs=1", "trainer.arctic_rl.cpu_threads=0"]
    alone, lines = reported(capsys, *others), reported(capsys, *others, override)
    assert len(alone) >= 3
    setting = override.split("=")[0]
    told = [line for line in lines if line.startswith((f"{setting}=", f"{setting} ", f"{setting}:"))]
    assert len(told) == 1, lines
    assert any(word in told[0] for word in ("write", "did you mean", "must be")), told
    assert set(alone) <= set(lines)


def test_each_of_several_such_values_is_told(capsys):
    sections = ("bird", "bird_sql")
    overrides = [
        *(f"environment.skyrl_gym.{name}.{item}" for name in sections for item in ("timeout_s=-1", "float_rtol=3")),
        "trainer.arctic_rl.zero_stage=7",
        "trainer.arctic_rl.zero_stag=3",
        "trainer.arctic_rl.max_cpu_workers=0",
        "trainer.algorithm.cispo.cispo_anchor=foo",
        "trainer.algorithm.dppo.dppo_type=foo",
    ]
    lines = reported(capsys, *overrides)
    assert len(lines) == len(overrides)
    for override in overrides:
        setting = override.split("=")[0]
        assert any(line.startswith((f"{setting}=", f"{setting} ")) for line in lines), setting


def test_settings_that_exclude_each_other_are_named_together():
    @dataclasses.dataclass
    class Exclusive(SkyRLTrainConfig):
        def __post_init__(self):
            super().__post_init__()
            if self.trainer.epochs == 3 and self.trainer.seed == 5:
                raise ValueError("trainer.seed of three epochs")

    arguments = ["trainer.seed=5", "generator.max_turns=2", "trainer.epochs=3"]
    cfg, (line,) = parse_what_is_known(arguments, Exclusive)
    assert line.startswith("trainer.seed=5 together with trainer.epochs=3: trainer.seed of three epochs; leave one of")
    assert (cfg.trainer.seed, cfg.trainer.epochs, cfg.generator.max_turns) == (5, 3, 2), "for every further check"


def test_a_setting_that_is_refused_with_or_without_another_is_named_alone():
    quantised = "trainer.policy.model.fake_int4_qat.enabled=true"
    cfg, (line,) = parse_what_is_known(["trainer.policy.model.lora.rank=8", quantised])
    assert line.startswith(f"{quantised}: ") and "lora" not in line
    assert cfg.trainer.policy.model.lora.rank == 8 and cfg.trainer.policy.model.fake_int4_qat.enabled


def test_a_refused_setting_of_ours_leaves_the_modules_registered(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_losses.py").write_text(
        "from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_policy_loss\n"
        "@register_policy_loss('loss_of_my_own')\n"
        "def loss(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [
        "trainer.arctic_rl.processor_modules=[my_losses]",
        "trainer.algorithm.policy_loss_type=loss_of_my_own",
        "trainer.arctic_rl.lr_warmup_ratio=5",
    ]
    try:
        (line,) = reported(capsys, *overrides)
    finally:
        PolicyLossRegistry.unregister("loss_of_my_own")
        sys.modules.pop("my_losses", None)
    assert line.startswith("trainer.arctic_rl.lr_warmup_ratio=5")


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.epochs=[1",
        "trainer.policy=3",
        "generator.inference_engine.delta_weight_sync.max_file_size_in_gb=2",
        "trainer.seed=${nothing}",
        "trainer.policy.model.fake_int4_qat.enabled=true",
    ],
)
def test_what_skyrls_parser_cannot_read_is_one_line_and_no_traceback(argument):
    with pytest.raises(ConfigError) as caught:
        parse_config([argument])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "status"), [("trainer.epochs=2", 0), ("generator.vision_language_generator=true", 1)]
)
def test_a_dry_run_ends_the_process_with_what_it_found(override, status, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config([override, "trainer.arctic_rl.dry_run=true"])
    assert caught.value.code == status
    assert "Dry run, nothing was started" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_prints_a_report_and_starts_nothing(tmp_path):
    overrides = ["trainer.policy.inference_only_init=true", "trainer.arctic_rl.dry_run=true"]
    entry = "trainer.override_entrypoint=integrations.arctic_rl.entrypoint"
    result = subprocess.run(
        [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *overrides, entry],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stderr[-2000:]
    assert "- trainer.policy.inference_only_init=true: this backend trains; write false" in result.stdout
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
