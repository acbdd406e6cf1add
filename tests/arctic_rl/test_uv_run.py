"""Requirements on the command line of ``uv run``, which a shell would read otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.runtime_env import uv_runtime_env_hook

from integrations.arctic_rl.uv_run import uv_run_problems

RECIPE = ["-m", "skyrl.train.entrypoints.main_base", "data.train_data=['a b']", "trainer.run_name=a;b<5"]
CASES = {
    "a bound": (["--with", "transformers<5"], ["transformers<5"]),
    "bounds": (["--extra", "fsdp", "--with=foo>=1", "--with", "bar==2"], ["--with=foo>=1"]),
    "a path with a space": (["--with-requirements", "my folder/requirements.txt"], ["my folder/requirements.txt"]),
    "several commands": (["--python", "3.12;", "--isolated"], ["3.12;"]),
    "an extra in brackets": (["--with", "ray[default]"], ["ray[default]"]),
    "plain": (["--isolated", "--extra", "cpu", "--with", "peft==0.18.1"], []),
    "none": ([], []),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", [RECIPE, ["python", *RECIPE]], ids=["module", "python"])
def test_arguments_that_a_shell_would_read_otherwise_are_named(case, program):
    arguments, named = CASES[case]
    lines = list(uv_run_problems([["bash"], ["/somewhere/uv", "run", *arguments, *program], ["uv", "run", "x<5"]]))
    assert [line.split(":")[0] for line in lines] == [f"uv run {argument!r}" for argument in named]
    assert all(".venv/bin/python" in line for line in lines)


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_ray_would_give_to_a_shell(case, monkeypatch, tmp_path):
    """Where nothing is named, the shell reads Ray's command as it was written; else it does not."""
    arguments, named = CASES[case]
    command = ["uv", "run", "--no-project", *arguments, *RECIPE]
    monkeypatch.setattr(uv_runtime_env_hook, "_get_uv_run_cmdline", lambda: list(command))
    monkeypatch.setattr(uv_runtime_env_hook, "_check_working_dir_files", lambda *_: None)
    monkeypatch.setenv("UV_PYTHON", "3.12")
    executable = uv_runtime_env_hook.hook({})["py_executable"]
    (tmp_path / "uv").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "uv").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.run(
        ["bash", "-c", executable], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, timeout=20
    )
    end = ["python"] if "--python" in arguments else ["--python", "3.12", "python"]
    as_written = shell.stdout.splitlines() == ["run", "--no-project", *arguments, *end]
    assert as_written == (named in ([], ["ray[default]"])), "brackets are a pattern, which may find no file"


def test_a_parents_command_line_is_seen(tmp_path):
    """Started as uv would be: the child of a process whose arguments are ``uv run --with transformers<5``."""
    code = "from integrations.arctic_rl.uv_run import uv_run_problems as found; print(len(list(found())))"
    (tmp_path / "run").write_text(
        f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', {code!r}], cwd={str(Path.cwd())!r})\n"
    )
    command = ["uv", "run", "--with", "transformers<5", "python"]
    done = subprocess.run(
        command, executable=sys.executable, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["1"], done.stderr
