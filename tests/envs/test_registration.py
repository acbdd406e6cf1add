import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import skyrl_gym

import envs

ROOT = Path(__file__).resolve().parents[2]


def run(script):
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_both_ids_are_registered_and_again_is_harmless():
    importlib.reload(envs)
    for env_id in ("bird", "bird_sql"):
        assert skyrl_gym.registry[env_id].entry_point.endswith("envs.bird.env:BirdEnv")


def test_a_users_package_registers_its_own_as_the_readme_says(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = readme.split("# my_envs/__init__.py\n")[1].split("```")[0]
    assert len([line for line in lines.splitlines() if line]) <= 3
    package = tmp_path / "my_envs"
    package.mkdir()
    (package / "__init__.py").write_text(lines)
    (package / "env.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class MyEnv(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras=None):\n"
        "        super().__init__()\n"
    )
    done = run(
        f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
import my_envs, skyrl_gym
importlib.reload(my_envs)
assert type(skyrl_gym.make("my_env", env_config=None, extras={{}})).__name__ == "MyEnv"
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [("envs", "skyrl_arctic_rl.envs"), ("skyrl_arctic_rl.envs", "envs")])
def test_either_name_works_and_both_together(order):
    done = run(
        f"""
import {order[0]}, {order[1]}, skyrl_gym
assert skyrl_gym.registry["bird"].entry_point == "{order[0]}.bird.env:BirdEnv"
from skyrl_gym.envs.registration import load_env_creator
assert load_env_creator(skyrl_gym.registry["bird_sql"].entry_point).__module__ == "{order[0]}.bird.env"
import sqlite3, tempfile, os
folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "d.sqlite")
sqlite3.connect(path).close()
row = dict(reward_model=dict(ground_truth="SELECT 1"), extra_info=dict(db_path=path))
env = skyrl_gym.make("bird", env_config={{}}, extras=row)
assert env.step("SELECT 1")["reward"] == 1.0
folder.cleanup()
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("entry_point", ["elsewhere.env:BirdEnv", "json.bird.env:BirdEnv"])
def test_a_foreign_environment_under_our_id_is_an_error(entry_point):
    done = run(f"import json, skyrl_gym; skyrl_gym.register('bird', {entry_point!r}); import envs")
    assert done.returncode != 0
    assert "'bird' is already registered" in done.stderr and entry_point in done.stderr


def test_a_foreign_package_called_envs_is_an_error(tmp_path):
    package = tmp_path / "envs"
    package.mkdir()
    (package / "__init__.py").write_text("import skyrl_gym\nskyrl_gym.register('bird', 'envs.bird.env:BirdEnv')\n")
    done = run(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import envs
sys.path.pop(0)
import skyrl_arctic_rl.envs
"""
    )
    assert done.returncode != 0 and "'bird' is already registered" in done.stderr, done.stderr


def test_importing_loads_no_heavy_library():
    done = run(
        """
import sys
import envs, envs.bird.env, envs.bird.reward
heavy = {"torch", "skyrl", "ray", "vllm", "deepspeed", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    )
    assert done.returncode == 0, done.stderr


def test_the_scorer_alone_needs_only_the_standard_library():
    done = run(
        """
import importlib.util, sys
folder = "envs/bird"
spec = importlib.util.spec_from_file_location("bird", f"{folder}/__init__.py", submodule_search_locations=[folder])
sys.modules["bird"] = importlib.util.module_from_spec(spec)
import bird.reward
foreign = {"numpy", "pandas", "skyrl_gym", "torch"} & set(sys.modules)
assert not foreign, foreign
"""
    )
    assert done.returncode == 0, done.stderr
