"""Jobs in processes: what a job does costs only itself. The jobs are expressions, so that any worker can run them."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from envs.bird.preprocess.build import ContextFailed
from envs.bird.preprocess.describe import UnreadableDatabase
from envs.bird.preprocess.find import LayoutError
from envs.bird.preprocess.settings import SettingError
from envs.bird.preprocess.workers import JobFailure, Workers
from envs.bird.preprocess.workspace import WorkspaceBusyError

STUCK = "SELECT instr(hex(zeroblob(40000000)), hex(zeroblob(19000000)) || '1')"


def run(jobs, *, workers=2, timeout_s=30.0):
    with Workers(workers) as pool:
        return dict(pool.run(eval, list(enumerate(jobs)), timeout_s=timeout_s))


@pytest.mark.parametrize("workers", [1, 2])
def test_each_job_gets_its_own_result(workers):
    results = run([(f"{number} * 2",) for number in range(20)], workers=workers)
    assert results == {number: number * 2 for number in range(20)}
    assert run([]) == {}


def test_a_bad_job_costs_itself_only():
    stuck = f"__import__('sqlite3').connect(':memory:').execute({STUCK!r}).fetchall()"
    results = run(
        [
            ("1 + 1",),
            (stuck,),
            ("bytearray(3_000_000_000) and 1",),
            ("__import__('os').kill(__import__('os').getpid(), 9)",),
            ("1 / 0",),
            *[(f"{number}",) for number in range(10)],
        ],
        timeout_s=2.0,
    )
    assert results[0] == 2
    assert results[1] == JobFailure(True, "it took more than 2 s and its process was killed")
    assert results[2] == JobFailure(False, "it needs more than 512 MiB")
    assert not results[3].timed_out and "its process died" in results[3].reason
    assert results[4] == JobFailure(False, "ZeroDivisionError: division by zero")
    assert [results[number + 5] for number in range(10)] == list(range(10))


def test_a_worker_imports_no_training_stack():
    (modules,) = run([("sorted(__import__('sys').modules)",)]).values()
    loaded = {name.split(".")[0] for name in modules}
    assert not loaded & {"torch", "transformers", "skyrl", "ray", "vllm", "deepspeed", "datasets"}


def test_workers_are_kept_for_the_next_jobs_and_end_with_their_pool():
    process_id = "__import__('os').getpid()"
    with Workers(1) as pool:
        ((_, first),) = pool.run(eval, [(0, (process_id,))], timeout_s=30.0)
        results = pool.run(eval, [(number, (process_id,)) for number in range(9)], timeout_s=30.0)
        assert next(results)[1] == first
        results.close()
        ((_, second),) = pool.run(eval, [(0, (process_id,))], timeout_s=30.0)
        assert second != first
    for process in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    code = (
        "from envs.bird.preprocess.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    job = \"__import__('time').sleep({}) or __import__('os').getpid()\"\n"
        "    jobs = [(seconds, (job.format(seconds),)) for seconds in (0, 0, 60, 60)]\n"
        "    for _, pid in Workers(2).run(eval, jobs, timeout_s=90.0): print(pid, flush=True)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    try:
        process_ids = {int(parent.stdout.readline()), int(parent.stdout.readline())}
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
        parent.stdout.close()
    deadline = time.monotonic() + 20
    while process_ids and time.monotonic() < deadline:
        process_ids = {one for one in process_ids if os.path.exists(f"/proc/{one}") and not _is_zombie(one)}
        time.sleep(0.1)
    assert not process_ids


def _is_zombie(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("error", [UnreadableDatabase, ContextFailed, LayoutError, SettingError, WorkspaceBusyError])
def test_errors_can_be_pickled(error):
    assert str(pickle.loads(pickle.dumps(error("why")))) == "why"
