"""What is kept of a run that was killed."""

import os

import pytest

from envs.bird.preprocess.workspace import FOLDER, Workspace, WorkspaceBusyError, file_state, job_key


def test_results_survive_and_a_torn_tail_does_not(tmp_path):
    with Workspace(tmp_path) as work:
        journal = work.journal("jobs")
        journal.put("a", {"x": "é\n"})
        journal.put("b", [1, None])
    path = tmp_path / FOLDER / "jobs.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Workspace(tmp_path) as work:
            journal = work.journal("jobs")
            lines = whole[:cut].count(b"\n")
            assert ("a" in journal, "b" in journal) == (lines > 0, lines > 1)
            journal.put("c", 3)
        with Workspace(tmp_path) as work:
            journal = work.journal("jobs")
            assert journal["c"] == 3
            if lines:
                assert journal["a"] == {"x": "é\n"}


def test_lines_that_are_no_results_are_passed_over(tmp_path):
    with Workspace(tmp_path) as work:
        (work.path / "jobs.jsonl").write_bytes(b'\x00\x00\n{}\n[1, 2]\n["a"]\n["good", 5]\n')
        journal = work.journal("jobs")
        assert "good" in journal and journal["good"] == 5 and "a" not in journal


def test_one_run_at_a_time(tmp_path):
    with Workspace(tmp_path), pytest.raises(WorkspaceBusyError, match="another run is writing to"):
        Workspace(tmp_path).__enter__()
    with Workspace(tmp_path) as work:
        work.clear()
    assert list(tmp_path.iterdir()) == []
    with Workspace(tmp_path):
        pass


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    target = tmp_path / "out.json"

    def fail(path):
        path.write_text("half")
        raise OSError("disk full")

    with Workspace(tmp_path) as work:
        with pytest.raises(OSError, match="disk full"):
            work.write(target, fail)
        assert not target.exists()
        work.write(target, lambda path: path.write_text("whole"))
        with pytest.raises(OSError, match="disk full"):
            work.write(target, fail)
    assert target.read_text() == "whole"


def test_a_key_changes_with_what_a_result_depends_on(tmp_path):
    path = tmp_path / "a"
    path.write_text("x")
    first = job_key(1, file_state(str(path)))
    assert first == job_key(1, file_state(str(path))) != job_key(2, file_state(str(path)))
    os.utime(path, ns=(0, 12345))
    assert first != job_key(1, file_state(str(path)))
    path.unlink()
    assert file_state(str(path)) == [str(path), None, None]
