"""Each setting that this package itself applies is changed, and found changed in what the backend is told."""

import json

import pytest
from skyrl.train.utils import validate_cfg

from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.support import TABLE
from integrations.arctic_rl.support.entries import EFFECT_TESTS, Honoured
from tests.arctic_rl.support_artefacts import artefacts

BASE = ["trainer.logger=console", "trainer.algorithm.use_kl_loss=false"]
GPUS = ["trainer.arctic_rl.device=cuda"]
LORA = ["trainer.policy.model.lora.rank=8"]
KL = ["trainer.algorithm.use_kl_loss=true"]
CRITIC = ["trainer.critic.model.path=some/critic"]
CRITIC_LORA = [*CRITIC, "trainer.critic.model.lora.rank=8"]
CORRECTION = "trainer.algorithm.off_policy_correction"
TOKEN = [f"{CORRECTION}.tis_ratio_type=token"]
SEQUENCE = [f"{CORRECTION}.tis_ratio_type=sequence"]
GEOMETRIC = [f"{CORRECTION}.sequence_mask_metric=geometric", f"{CORRECTION}.geo_mask_low=0.5"]
PRODUCT = [f"{CORRECTION}.sequence_mask_metric=product", f"{CORRECTION}.product_mask_low=0.1"]
RANGE = [f"{CORRECTION}.token_mask_is_threshold_low=0.01", f"{CORRECTION}.token_mask_is_threshold_high=100"]


def loss(name):
    return [f"trainer.algorithm.policy_loss_type={name}"]


EFFECTS = {
    "trainer.placement.policy_num_nodes": (2,),
    "trainer.placement.policy_num_gpus_per_node": (2,),
    "trainer.placement.ref_num_nodes": (2, *KL),
    "trainer.placement.ref_num_gpus_per_node": (2, *KL),
    "trainer.placement.critic_num_nodes": (2, *CRITIC),
    "trainer.placement.critic_num_gpus_per_node": (2, *CRITIC),
    "trainer.gradient_checkpointing": (False,),
    "trainer.gradient_checkpointing_use_reentrant": (True,),
    "trainer.bf16": (False,),
    "trainer.micro_train_batch_size_per_gpu": (3,),
    "trainer.micro_forward_batch_size_per_gpu": (3,),
    "trainer.max_tokens_per_microbatch": (77,),
    "trainer.use_expandable_segments": (False, *GPUS),
    "trainer.flash_attn": (False, *GPUS),
    "trainer.policy.record_memory": (True, *GPUS),
    "trainer.policy.model.path": ("some/model",),
    "trainer.policy.model.lora.rank": (3,),
    "trainer.policy.model.lora.alpha": (3, *LORA),
    "trainer.policy.model.lora.dropout": (0.3, *LORA),
    "trainer.policy.model.lora.target_modules": (["q_proj"], *LORA),
    "trainer.policy.model.lora.exclude_modules": (["q_proj"], *LORA),
    "trainer.policy.model.lora.init_method": ("gaussian", *LORA),
    "trainer.policy.optimizer_config.lr": (3.5e-4,),
    "trainer.policy.optimizer_config.offload_after_step": (False,),
    "trainer.critic.optimizer_config.offload_after_step": (False, *CRITIC),
    "trainer.policy.optimizer_config.adam_betas": ([0.8, 0.88],),
    "trainer.policy.optimizer_config.weight_decay": (0.37,),
    "trainer.policy.optimizer_config.max_grad_norm": (0.7,),
    "trainer.policy.optimizer_config.num_warmup_steps": (13,),
    "trainer.policy.optimizer_config.scheduler": ("cosine",),
    "trainer.critic.model.path": ("some/model",),
    "trainer.critic.sequence_parallel_size": (4, *CRITIC, "trainer.placement.critic_num_gpus_per_node=4"),
    "trainer.critic.model.lora.rank": (3, *CRITIC),
    "trainer.critic.model.lora.alpha": (3, *CRITIC_LORA),
    "trainer.critic.model.lora.dropout": (0.3, *CRITIC_LORA),
    "trainer.critic.model.lora.target_modules": (["q_proj"], *CRITIC_LORA),
    "trainer.critic.model.lora.exclude_modules": (["q_proj"], *CRITIC_LORA),
    "trainer.critic.optimizer_config.lr": (3.5e-4, *CRITIC),
    "trainer.critic.optimizer_config.adam_betas": ([0.8, 0.88], *CRITIC),
    "trainer.critic.optimizer_config.weight_decay": (0.37, *CRITIC),
    "trainer.critic.optimizer_config.max_grad_norm": (0.7, *CRITIC),
    "trainer.critic.optimizer_config.num_warmup_steps": (13, *CRITIC),
    "trainer.critic.optimizer_config.scheduler": ("cosine", *CRITIC),
    "trainer.ref.model.path": ("some/model", *KL),
    "trainer.algorithm.kl_estimator_type": ("k2", *KL),
    "trainer.algorithm.use_kl_loss": (True,),
    "trainer.algorithm.kl_loss_coef": (0.5, *KL),
    "trainer.algorithm.use_entropy_loss": (True,),
    "trainer.algorithm.entropy_loss_coef": (0.5, "trainer.algorithm.use_entropy_loss=true"),
    "trainer.algorithm.temperature": (0.6,),
    "trainer.algorithm.value_head_prefix": ("head", *CRITIC),
    "trainer.algorithm.value_clip": (0.5, *CRITIC),
    "trainer.algorithm.policy_loss_type": ("gspo",),
    "trainer.algorithm.eps_clip_low": (0.11,),
    "trainer.algorithm.eps_clip_high": (0.33,),
    "trainer.algorithm.clip_ratio_c": (5.0, *loss("dual_clip")),
    f"{CORRECTION}.tis_ratio_type": ("token",),
    f"{CORRECTION}.token_tis_ratio_clip_high": (1.1, *TOKEN),
    f"{CORRECTION}.sequence_tis_ratio_clip_high": (0.9, *SEQUENCE),
    f"{CORRECTION}.sequence_mask_metric": ("product",),
    f"{CORRECTION}.geo_mask_high": (9.0, *GEOMETRIC),
    f"{CORRECTION}.geo_mask_low": (
        0.1,
        f"{CORRECTION}.sequence_mask_metric=geometric",
        f"{CORRECTION}.geo_mask_high=9",
    ),
    f"{CORRECTION}.product_mask_high": (1.5, *PRODUCT),
    f"{CORRECTION}.product_mask_low": (0.99, f"{CORRECTION}.sequence_mask_metric=product"),
    f"{CORRECTION}.outlier_token_is_threshold_low": (0.9,),
    f"{CORRECTION}.outlier_token_is_threshold_high": (1.5,),
    f"{CORRECTION}.token_mask_is_threshold_low": (0.8, *RANGE),
    f"{CORRECTION}.token_mask_is_threshold_high": (1.2, *RANGE),
    "trainer.algorithm.sapo.tau_pos": (2.0, *loss("sapo")),
    "trainer.algorithm.sapo.tau_neg": (2.0, *loss("sapo")),
    "trainer.algorithm.clip_cov.clip_ratio": (0.5, *loss("clip_cov")),
    "trainer.algorithm.clip_cov.clip_cov_lb": (0.5, *loss("clip_cov")),
    "trainer.algorithm.clip_cov.clip_cov_ub": (7.0, *loss("clip_cov")),
    "trainer.algorithm.kl_cov.kl_cov_frac": (0.5, *loss("kl_cov")),
    "trainer.algorithm.kl_cov.ppo_kl_coef": (0.5, *loss("kl_cov")),
    "trainer.algorithm.cispo.cispo_eps_clip_low": (0.5, *loss("cispo")),
    "trainer.algorithm.cispo.cispo_eps_clip_high": (2.0, *loss("cispo")),
    "trainer.algorithm.cispo.cispo_anchor": ("rollout", *loss("cispo")),
    "trainer.algorithm.dppo.dppo_type": ("binary_kl", *loss("dppo")),
    "trainer.algorithm.dppo.delta_low": (0.5, *loss("dppo")),
    "trainer.algorithm.dppo.delta_high": (0.5, *loss("dppo")),
    "trainer.seed": (991,),
    "trainer.log_path": ("/somewhere/else",),
    "generator.inference_engine.model_dtype": ("float32",),
    "generator.inference_engine.num_engines": (2,),
    "generator.inference_engine.tensor_parallel_size": (2, *GPUS),
    "generator.inference_engine.pipeline_parallel_size": (2, *GPUS),
    "generator.inference_engine.enforce_eager": (True, *GPUS),
    "generator.inference_engine.gpu_memory_utilization": (0.3, *GPUS),
    "generator.inference_engine.use_expandable_segments": (True, *GPUS),
    "generator.inference_engine.enable_prefix_caching": (False,),
    "generator.inference_engine.enable_chunked_prefill": (False,),
    "generator.inference_engine.max_num_batched_tokens": (777,),
    "generator.inference_engine.max_num_seqs": (77,),
    "generator.inference_engine.engine_init_kwargs": ({"max_model_len": 321},),
    "generator.inference_engine.speculative_config": ({"method": "ngram", "num_speculative_tokens": 4}, *GPUS),
    "generator.n_samples_per_prompt": (3,),
}
"""By setting, another value than the default, and overrides without which it would have no effect."""

CLAIMED = [name for name, entry in TABLE.items() if isinstance(entry, Honoured) and EFFECT_TESTS in entry.evidence]


def test_there_is_a_case_for_each_setting_that_claims_one():
    assert set(CLAIMED) == set(EFFECTS)


@pytest.mark.parametrize("setting", EFFECTS)
def test_a_changed_value_reaches_the_backend(setting, loop):
    value, *context = EFFECTS[setting]
    plain = parse_config([*BASE, *context])
    changed = parse_config([*BASE, *context, f"{setting}={json.dumps(value)}"])
    assert artefacts(changed, loop) != artefacts(plain, loop)
    assert artefacts(plain, loop) == artefacts(parse_config([*BASE, *context]), loop)


def test_use_tis_is_the_old_name_of_a_token_correction(loop):
    old = parse_config([*BASE, "trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=1.3"])
    validate_cfg(old)
    new = parse_config([*BASE, *TOKEN, f"{CORRECTION}.token_tis_ratio_clip_high=1.3"])
    assert artefacts(old, loop) == artefacts(new, loop) != artefacts(parse_config(BASE), loop)
