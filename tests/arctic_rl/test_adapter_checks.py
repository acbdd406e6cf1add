"""Layers that a recipe's adapters name, held against its models before anything is started."""

import pytest

from integrations.arctic_rl.adapter_checks import adapter_problems
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.skyrl_config import parse_config
from tests.arctic_rl.processors.helpers import tiny_model

POLICY, CRITIC = "trainer.policy.model.lora", "trainer.critic.model.lora"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tied"
    tiny_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture
def problems(path):
    def find(*settings, check=adapter_problems, model=path):
        base = ["trainer.logger=console", f"trainer.policy.model.path={model}", f"{POLICY}.rank=4"]
        return list(check(parse_config([*base, *settings])))

    return find


@pytest.mark.parametrize("init_method", ["kaiming", "gaussian", "orthogonal"])
def test_layers_that_there_are(problems, path, init_method):
    assert problems(f"{POLICY}.init_method={init_method}", f"{POLICY}.dropout=0.1") == []
    assert (
        problems(f"{POLICY}.target_modules=[q_proj,down_proj]", f"{POLICY}.exclude_modules=[layers.0.mlp.down_proj]")
        == []
    )
    assert problems(f"trainer.critic.model.path={path}", f"{CRITIC}.rank=2") == []


@pytest.mark.parametrize(
    "settings, said",
    [
        ("target_modules=[q_proj,nothing]", "target_modules=['q_proj', 'nothing']: Qwen3ForCausalLM has no 'nothing'"),
        ("target_modules=[q_proj] exclude_modules=[self_attn.q_proj]", "No modules"),
        ("target_modules=[embed_tokens]", "no linear layer (Embedding)"),
        ("target_modules=[lm_head]", "an adapter would untie them"),
    ],
)
def test_layers_that_cannot_have_one_are_told_with_what_there_is(problems, path, settings, said):
    (line,) = problems(*(f"{POLICY}.{setting}" for setting in settings.split()))
    assert line.startswith(f"{POLICY}.target_modules=") and said in line
    (line,) = problems(f"trainer.critic.model.path={path}", f"{CRITIC}.rank=2", f"{CRITIC}.target_modules=[c_attn]")
    assert line.startswith(f"{CRITIC}.target_modules=['c_attn']: CriticModel has no 'c_attn'") and "q_proj" in line


def test_what_is_not_here_or_said_elsewhere_is_left_out(problems):
    unknown = f"{POLICY}.target_modules=[nothing]"
    assert problems(unknown, model="Qwen/Qwen3-0.6B") == []
    assert problems(unknown, f"{POLICY}.rank=0") == []
    assert problems(f"{POLICY}.target_modules='['") == []


def test_it_is_said_with_everything_else(problems):
    settings = (f"{POLICY}.target_modules=[nothing]", f"{POLICY}.alpha=0")
    refused = problems(*settings, check=lambda cfg: inspect_config(cfg).refused)
    assert [line.partition("=")[0] for line in refused if line.startswith(POLICY)] == [
        f"{POLICY}.alpha",
        f"{POLICY}.target_modules",
    ]
