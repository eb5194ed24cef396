"""What the hub tests pass over on a machine with a newer libc, and what they do not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from machine import failures

from hfpatch import kernel_build
from hfpatch.kernel_project.checks import check_project
from hfpatch.kernel_project.new import new_project
from hfpatch.kernel_project.project import Project


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_machines_own_libstdcxx_is_passed_over_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = subprocess.run(
        ["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True
    )
    if not os.path.isabs(static.stdout.strip()):
        pytest.skip("no libstdc++.a")
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    root = new_project("my-kernel", tmp_path)
    kernel_build.build(root, root, ("cpu",), verbose=False)
    rows = [row for row in check_project(Project.open(root)) if not row.passed]
    if not rows:
        pytest.skip("a libstdc++.a of an old libc")
    assert [row.what for row in rows] == ["loads on manylinux_2_28"]
    assert failures(root) == []

    assert failures(root, tmp_path / "absent") == rows, "nobody knows what it was linked of"
    with monkeypatch.context() as old:
        old.setattr(os, "confstr", lambda name: "glibc 2.28")
        assert failures(root) == rows, "not this machine's libc"
    (root / "CARD.md").unlink()
    assert [row.what for row in failures(root)] == ["`CARD.md` can be filled"]

    with (root / "kernel_src" / "cpu.cpp").open("a") as file:
        file.write(
            "#include <sys/stat.h>\n"
            'extern "C" int size_of(int fd) { struct stat s; return fstat(fd, &s); }\n'
        )
    kernel_build.build(root, root, ("cpu",), verbose=False)
    assert "loads on manylinux_2_28" in {row.what for row in failures(root)}, "the project's own"
