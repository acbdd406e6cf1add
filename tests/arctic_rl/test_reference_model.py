"""Which model gives reference log-probs under adapters, and values of adapters that are refused."""

import pytest

from integrations.arctic_rl.described_placement import described_plan
from integrations.arctic_rl.server.specs import LoraSpec
from integrations.arctic_rl.server_config import server_config
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.support import refusals, without_effect

LORA = "trainer.policy.model.lora"
ADAPTERS = [f"{LORA}.rank=8", "trainer.policy.model.path=a/model", "trainer.placement.ref_num_gpus_per_node=2"]
KL = "trainer.algorithm.use_kl_loss=true"
KL_IN_REWARD = ["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"]


def parse(*overrides):
    return parse_config(["trainer.logger=console", *overrides])


def of_its_own(cfg):
    """Whether there is a second model, by the server's config, the plan and the support table alike."""
    config, plan = server_config(cfg, run_id="", env_vars={}), described_plan(cfg)
    ignored = " ".join(without_effect(cfg))
    ranks = {config.ref_ranks, sum(job.processes for job in plan.jobs if job.job == "ref")}
    told = "ref_num_gpus_per_node=2: the policy without its adapters is the reference model" in ignored
    assert ranks == ({0} if config.reference is None else {2})
    assert told == (config.reference is None)
    return config.reference is not None


@pytest.mark.parametrize("term", [[KL], KL_IN_REWARD])
def test_the_policy_without_its_adapters_is_the_reference_model(term):
    assert not of_its_own(parse(*ADAPTERS, *term))
    assert not of_its_own(parse(*ADAPTERS, *term, "trainer.ref.model.path=a/model"))


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.ref.model.path=another/model",
        "trainer.update_ref_every_epoch=true",
        "trainer.ref.model_config_kwargs={rope_theta: 5}",
        f"{LORA}.rank=0",
    ],
)
def test_a_reference_that_is_not_the_base_model_is_one_of_its_own(setting):
    assert of_its_own(parse(*ADAPTERS, KL, setting))


def test_adapters_are_translated_as_they_are_written():
    values = ("alpha=24", "dropout=0.125", "target_modules=[q_proj,o_proj]", "exclude_modules=.*k_proj")
    cfg = parse(*ADAPTERS, *(f"{LORA}.{value}" for value in values), f"{LORA}.init_method=gaussian")
    config = server_config(cfg, run_id="", env_vars={})
    assert config.policy.lora == LoraSpec(8, 24, 0.125, ("q_proj", "o_proj"), ".*k_proj", "gaussian")
    other = server_config(parse(*ADAPTERS, KL, "trainer.ref.model.path=b"), run_id="", env_vars={})
    assert other.reference.lora is None
    assert server_config(parse(), run_id="", env_vars={}).policy.lora is None


REFUSED = {
    "alpha=0": "scaled by 0 or less",
    "dropout=1.0": "from 0 to below 1",
    "dropout=-0.1": "from 0 to below 1",
    "rank=-1": "write 0 to train all weights",
    "init_method=pissa": "kaiming, gaussian, orthogonal",
    "init_method=xavier": "kaiming, gaussian, orthogonal",
}


@pytest.mark.parametrize("value", REFUSED)
def test_values_that_cannot_be_trained_with(value):
    (line,) = refusals(parse(f"{LORA}.rank=8", f"{LORA}.{value}"))
    assert line.startswith(f"{LORA}.{value}: ") and REFUSED[value] in line


def test_orthogonal_adapters_have_an_even_rank():
    assert refusals(parse(f"{LORA}.rank=8", f"{LORA}.init_method=orthogonal")) == []
    (line,) = refusals(parse(f"{LORA}.rank=7", f"{LORA}.init_method=orthogonal"))
    assert f"even {LORA}.rank, not 7" in line


@pytest.mark.parametrize("value", [value for value in REFUSED if "rank" not in value])
def test_nothing_is_refused_without_adapters(value):
    cfg = parse(f"{LORA}.{value}")
    assert refusals(cfg) == []
    assert without_effect(cfg) == [f"{LORA}.{value}: {LORA}.rank=0"]
