"""The recipes of examples/: what they run, that nothing stands against them, and what SMOKE=1 makes of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg

from examples import smoke
from integrations.arctic_rl.described_placement import described_plan
from integrations.arctic_rl.dry_run import exit_status
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.skyrl_config import parse_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OVERRIDE = "trainer.override_entrypoint=integrations.arctic_rl.entrypoint"
MAIN_BASE = "skyrl.train.entrypoints.main_base"
VALUES = ("bird_values", "gsm8k_values")
NOT_RECIPES = ("quickstart", "recipe", *VALUES)

GPUS = {
    "gsm8k_0.6b": {"policy": 1, "ref": 1, "sampling": 1},
    "gsm8k_ppo": {"policy": 4, "critic": 4, "ref": 4, "sampling": 4},
    "gsm8k_async": {"policy": 4, "sampling": 4},
    "bird_1.7b": {"policy": 8, "sampling": 8},
    "bird_1.7b_fsdp": {"policy": 8, "sampling": 8},
    "bird_8b": {"policy": 16, "sampling": 16},
    "bird_32b": {"policy": 32, "sampling": 32},
    "bird_multi_turn": {"policy": 8, "sampling": 8},
}
"""GPUs of each job of a recipe."""

STUB = """#!{python}
import json, os, subprocess, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:] == ["-m", "examples.smoke"]:
    sys.exit(subprocess.run([{python!r}, *sys.argv[1:]]).returncode)
"""


def commands(tmp_path, name, *arguments, **environment):
    """What a recipe's script would run, each as the arguments of Python."""
    log, stub = tmp_path / "commands.jsonl", tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable, log=str(log)))
    stub.chmod(0o755)
    log.unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("SMOKE", "GPUS", "MODEL", "DATA")}
    variables = {**kept, "HOME": str(tmp_path), "PYTHON": str(stub), "RUNS": str(tmp_path / "runs"), **environment}
    subprocess.run(["bash", str(EXAMPLES / f"{name}.sh"), *arguments], env=variables, check=True, timeout=60)
    return [json.loads(line) for line in log.read_text().splitlines()]


def overrides(command):
    """The overrides of a command that trains."""
    start = next(i for i, argument in enumerate(command) if "=" in argument)
    assert command[:start] == ["-m", MAIN_BASE] or command[start - 1] == "examples.bird_fsdp", command[:start]
    if command[1] == MAIN_BASE:
        assert command[-1] == OVERRIDE
    return [argument for argument in command[start:] if argument != OVERRIDE]


def test_every_script_is_a_recipe_that_is_tested_and_listed():
    scripts = {path.stem for path in EXAMPLES.glob("*.sh") if path.stem not in NOT_RECIPES}
    assert scripts == {*GPUS}
    readme = (ROOT / "README.md").read_text()
    assert {name for name in scripts if f"`{name}.sh`" not in readme} == set()


@pytest.mark.parametrize("name", GPUS)
def test_nothing_stands_against_a_recipe_on_its_gpus(tmp_path, name):
    cfg = parse_config([*overrides(commands(tmp_path, name)[-1]), "trainer.arctic_rl.dry_run=true"])
    findings = inspect_config(cfg)
    assert findings.refused == [] and exit_status(findings) == 0
    plan = described_plan(cfg)
    assert {job.job: job.processes * job.gpus_each for job in plan.jobs} == GPUS[name]
    cuts = ("data.", "trainer.placement.", "the recipe's processes")
    machine = [line for line in findings.missing if not line.startswith(cuts) and "max_cpu_workers" not in line]
    assert machine == [], "only data and processes are not on this machine"


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
def test_gsm8k_runs_on_one_to_four_gpus(tmp_path, gpus):
    command = commands(tmp_path, "gsm8k_0.6b", GPUS=str(gpus))[-1]
    cfg = parse_config([*overrides(command), "trainer.arctic_rl.dry_run=true"])
    assert inspect_config(cfg).refused == []
    assert {job.processes for job in described_plan(cfg).jobs} == {gpus}


@pytest.mark.parametrize("name", GPUS)
def test_smoke_replaces_only_model_data_and_sizes(tmp_path, name):
    cfg = parse_config(overrides(commands(tmp_path, name, SMOKE="1")[-1]))
    refused = inspect_config(cfg).refused
    assert refused == []
    assert cfg.trainer.max_training_steps == smoke.STEPS == 3
    assert {job.processes for job in described_plan(cfg).jobs} == {1}
    full = parse_config(overrides(commands(tmp_path, name)[-1]))
    assert cfg.trainer.algorithm == full.trainer.algorithm
    assert cfg.trainer.policy.optimizer_config == full.trainer.policy.optimizer_config
    assert cfg.trainer.arctic_rl == full.trainer.arctic_rl
    assert cfg.trainer.critic.optimizer_config == full.trainer.critic.optimizer_config
    assert bool(cfg.trainer.critic.model.path) == bool(full.trainer.critic.model.path) == (name == "gsm8k_ppo")
    assert cfg.environment == full.environment
    assert cfg.generator.max_turns == full.generator.max_turns
    assert cfg.generator.sampling_params.stop == full.generator.sampling_params.stop
    assert cfg.trainer.fully_async.enabled == full.trainer.fully_async.enabled


def test_smoke_makes_the_quickstarts_inputs_first(tmp_path):
    made, listed, trained = commands(tmp_path, "bird_multi_turn", SMOKE="1", ARCTIC_RL_CACHE=f"{tmp_path}/cache")
    assert made == ["-m", "examples.smoke", "--cache_dir", f"{tmp_path}/cache", "--env_class", "bird_multi_turn"]
    assert listed == ["-m", "examples.smoke"]
    cfg = parse_config(overrides(trained))
    assert cfg.data.train_data == [f"{tmp_path}/cache/data-0-bird_multi_turn/train.parquet"]
    assert cfg.trainer.policy.model.path == f"{tmp_path}/cache/model-0"
    assert Path(cfg.trainer.log_path).parent.name.startswith("bird_multi_turn-smoke-")


def test_arguments_win_and_data_is_prepared_unless_the_run_is_dry(tmp_path):
    prepared, trained = commands(tmp_path, "gsm8k_0.6b", "trainer.epochs=2", DATA="/data/g", MODEL="/models/m")
    assert prepared == ["-m", "examples.gsm8k_data", "--output_dir", "/data/g"]
    cfg = parse_config(overrides(trained))
    assert (cfg.trainer.epochs, cfg.trainer.policy.model.path) == (2, "/models/m")
    assert cfg.data.train_data == ["/data/g/train.parquet"]
    assert len(commands(tmp_path, "gsm8k_0.6b", "trainer.arctic_rl.dry_run=true")) == 1


class TestFsdp:
    """The counterpart that SkyRL's own workers train."""

    def test_it_has_the_values_of_ours_and_nothing_of_ours(self, tmp_path):
        native = overrides(commands(tmp_path, "bird_1.7b_fsdp")[-1])
        ours = overrides(commands(tmp_path, "bird_1.7b")[-1])
        ours = [value for value in ours if not value.startswith("trainer.arctic_rl.")]
        assert [value.replace("bird_1.7b_fsdp", "bird_1.7b") for value in native] == [*ours, "trainer.strategy=fsdp"]
        assert OVERRIDE not in native

    def test_skyrl_itself_takes_it(self, tmp_path):
        command = commands(tmp_path, "bird_1.7b_fsdp")[-1]
        assert command[:2] == ["-m", "examples.bird_fsdp"]
        cfg = SkyRLTrainConfig.from_cli_overrides(overrides(command))
        validate_cfg(cfg)
        assert cfg.trainer.strategy == "fsdp"

    @pytest.mark.parametrize("settings", [{"SMOKE": "1"}, {}], ids=["smoke", "dry run"])
    def test_without_gpus_its_module_runs_on_our_server(self, tmp_path, settings):
        dry = () if settings else ("trainer.arctic_rl.dry_run=true",)
        command = commands(tmp_path, "bird_1.7b_fsdp", *dry, **settings)[-1]
        assert command[:3] == ["-m", "integrations.arctic_rl.launch", "examples.bird_fsdp"]


def test_scripts_only_set_values():
    """Conditions and loops stand in recipe.sh alone."""
    words = re.compile(r"^\s*(if|for|while|case|until|function)\b|\[\[|\|\||&&", re.MULTILINE)
    for name in [*GPUS, *VALUES]:
        text = (EXAMPLES / f"{name}.sh").read_text()
        assert not words.search(text), name


def test_smoke_data_has_rows_of_the_recipes_environment(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("examples.quickstart._make", lambda target, command: made.append((target.name, command)))
    smoke.main(["--cache_dir", str(tmp_path), "--env_class", "bird_multi_turn"])
    assert [name for name, _ in made] == ["data-0", "model-0", "data-0-bird_multi_turn"]
    assert [command[-1] for _, command in made] == ["bird", "0", "bird_multi_turn"]
    made.clear()
    smoke.main(["--cache_dir", str(tmp_path)])
    assert [name for name, _ in made] == ["data-0", "model-0"]
