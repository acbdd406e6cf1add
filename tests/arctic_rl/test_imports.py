import json
import resource
import subprocess
import sys

import pytest

LIGHT = [
    "integrations.arctic_rl",
    "skyrl_arctic_rl",
    "skyrl_arctic_rl.config",
    "envs",
    "skyrl_arctic_rl.envs",
    "integrations.arctic_rl.layout",
    "integrations.arctic_rl.scoring",
    "integrations.arctic_rl.placement",
    "integrations.arctic_rl.support",
    "integrations.arctic_rl.sampling_params",
    "integrations.arctic_rl.backends.registry",
    "integrations.arctic_rl.processors.registry",
]
HEAVY = ("vllm", "deepspeed", "ray", "skyrl")


def loaded(module, cwd):
    code = f"import {module}, sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(result.stdout.splitlines()[-1]), processor_seconds


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy_from_any_folder(module, tmp_path):
    heavy, seconds = loaded(module, tmp_path)
    assert heavy == []
    assert seconds < 3 * 2.0, "three times the stated two seconds"


def write_decoys(folder):
    for package in ("integrations/arctic_rl", "envs"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise ImportError('the decoy was imported')\n")
    (folder / "integrations" / "__init__.py").touch()


def test_a_checkout_with_packages_of_the_same_names_does_not_shadow_the_alias(tmp_path):
    write_decoys(tmp_path)
    code = (
        "import skyrl_arctic_rl.placement, skyrl_arctic_rl.envs, skyrl_gym\n"
        "from skyrl_arctic_rl.environments import register_environments\n"
        "register_environments([])\n"
        "from skyrl_gym.envs.registration import registry\n"
        "print(skyrl_arctic_rl.placement.__file__, 'bird' in registry, 'bird_sql' in registry)"
    )
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"]
    result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    path, bird, bird_sql = result.stdout.split()[-3:]
    assert path.endswith("integrations/arctic_rl/placement.py") and not path.startswith(str(tmp_path))
    assert (bird, bird_sql) == ("True", "True")
