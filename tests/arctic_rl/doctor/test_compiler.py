"""What Triton would look for is there, or named."""

import shutil
import sysconfig

from integrations.arctic_rl.doctor.compiler import compiler_problems


def test_a_compiler_and_pythons_headers(monkeypatch, tmp_path):
    found = {"clang": "/usr/bin/clang"}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", found.get)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (line,) = compiler_problems()
    assert line.startswith(f"there is no {tmp_path}/Python.h")
    (tmp_path / "Python.h").touch()
    assert compiler_problems() == []
    monkeypatch.setenv("CC", "icx")
    assert "CC=icx is none" in compiler_problems()[0]
    monkeypatch.delenv("CC")
    found.clear()
    assert "neither gcc nor clang" in compiler_problems()[0]
