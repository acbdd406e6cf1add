import os
import subprocess
import sys
import time

import psutil
import pytest

from integrations.arctic_rl.server import run_directory
from integrations.arctic_rl.server.process import RUN_ID_VARIABLE, kill_run, log_tail

TRACKER = "import time; time.sleep(1.0)  # resource_tracker"


def spawn(code, run_id):
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, RUN_ID_VARIABLE: run_id})


def test_only_the_runs_own_processes_are_killed():
    mine, other = spawn("import time; time.sleep(60)", "run-a"), spawn("import time; time.sleep(60)", "run-b")
    try:
        time.sleep(0.3)
        assert kill_run("run-a") == [mine.pid]
        assert not psutil.pid_exists(mine.pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_resource_tracker_may_end_by_itself():
    tracker = spawn(TRACKER, "run-c")
    time.sleep(0.3)
    assert kill_run("run-c") == []
    assert not psutil.pid_exists(tracker.pid)


CHILD = """
from integrations.arctic_rl.server.process import end_with_parent
import subprocess, time
end_with_parent()
grandchild = subprocess.Popen(["sleep", "60"])
"""
PARENT = f"""
import subprocess, sys, time
code = {CHILD!r} + "print(grandchild.pid, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), child.pid, sep="", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("of_a_run", [True, False])
def test_a_runs_process_ends_with_the_one_that_started_it(of_a_run, monkeypatch):
    monkeypatch.delenv(RUN_ID_VARIABLE, raising=False)
    more = {RUN_ID_VARIABLE: "run-d"} if of_a_run else {}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, env={**os.environ, **more}, stdout=subprocess.PIPE, text=True) as parent:
        started = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        parent.kill()
    try:
        _, alive = psutil.wait_procs(started, timeout=20 if of_a_run else 2)
        assert set(alive) == (set() if of_a_run else set(started))
    finally:
        for process in started:
            if process.is_running():
                process.kill()


SIBLINGS = f"""
import os, subprocess, sys, time
code = {CHILD!r} + "print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
starting = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(1, flush=True); time.sleep(60)"
bare = {{name: value for name, value in os.environ.items() if name != {RUN_ID_VARIABLE!r}}}
socket = "--raylet-name=/a/socket"
for more, environment in ((["worker.py", socket], bare), (["worker.py", socket + "2"], bare)):
    process = subprocess.Popen([sys.executable, "-c", starting, *more], env=environment, stdout=subprocess.PIPE)
    process.stdout.readline()
    print(process.pid, flush=True)
time.sleep(60)
"""


def test_siblings_that_only_start_end_too():
    """Ray's workers look for its control process for half a minute before anything of ours is in them."""
    environment = {**os.environ, RUN_ID_VARIABLE: "run-f"}
    command = [sys.executable, "-c", SIBLINGS, "--raylet_socket_name=/a/socket"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        siblings = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        families = [[sibling, *sibling.children()] for sibling in siblings]
        parent.kill()
    try:
        assert [len(family) for family in families] == [2] * 2
        assert psutil.wait_procs(families[0], timeout=20)[1] == []
        assert all(process.is_running() for process in families[1]), "it is of another raylet"
    finally:
        for process in (process for family in families for process in family if process.is_running()):
            process.kill()


def test_a_log_tail_without_a_file_says_so(tmp_path):
    assert "no log file" in log_tail(str(tmp_path / "none.log"))
    (tmp_path / "some.log").write_text("\n".join(f"line {i}" for i in range(40)))
    assert log_tail(str(tmp_path / "some.log"), lines=2) == "line 38\nline 39"


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_base", lambda: tmp_path)
    return tmp_path


def test_folders_of_dead_runs_are_removed_and_others_kept(shared_memory):
    dead = next(pid for pid in range(300_000, 10**6) if not psutil.pid_exists(pid))
    for owner in (dead, os.getpid()):
        (shared_memory / f"{run_directory.PREFIX}{owner}-x-y").mkdir()
    (shared_memory / f"{run_directory.PREFIX}another").mkdir()
    fresh = run_directory.run_directory("z")
    left = sorted(path.name.split("-")[2] for path in shared_memory.iterdir())
    assert left == [*[str(os.getpid())] * 2, "another"]
    assert os.path.isdir(fresh)
    with open(f"{fresh}/weights", "w") as file:
        file.write("many")
    run_directory.remove_run_directories("z")
    assert not os.path.exists(fresh) and len(list(shared_memory.iterdir())) == 2


OTHERS = """
others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
for other in others:
    other.stdout.readline()
child = """
MANY = PARENT.replace("\nchild = ", OTHERS)


@pytest.mark.parametrize("code", [PARENT, MANY])
def test_a_killed_run_leaves_nothing_in_shared_memory(monkeypatch, code):
    """Its processes remove it when the one that started them is gone."""
    monkeypatch.setenv(RUN_ID_VARIABLE, "run-e")
    folder = run_directory.run_directory("run-e")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        started = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        started = [*started, *psutil.Process(parent.pid).children(recursive=True)]
        assert os.path.isdir(folder)
        parent.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == [] and not os.path.exists(folder)
