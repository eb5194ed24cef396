"""`hfpatch kernel new` and `build`: what they write, and what they refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels._rust import Build
from scaffold import NAME, ROOT, built_scaffold
from server import python_path

from hfpatch import cli, kernel_build
from hfpatch.kernel_build import KernelBuildError
from hfpatch.kernel_project import ProjectError
from hfpatch.kernel_project.new import TEMPLATE_NAMES, TEMPLATES, check_repo_id, new_project

has_nvcc = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_scaffold(tmp_path_factory.mktemp("new"))


def own_tests(project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project / "tests")],
        env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
        cwd=project, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_scaffold_is_a_project_of_that_name(tmp_path: Path) -> None:
    root = new_project("a-b2", tmp_path, "me/a-b2")
    assert len(Build.open(root).general.backends) == 2
    written = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert {".gitignore", "torch-ext/a_b2/layers.py", "CARD.md"} <= written
    text = "\n".join(p.read_text() for p in sorted(root.rglob("*")) if p.is_file())
    assert "example" not in text.lower().replace("usage example", "")
    assert 'repo-id = "me/a-b2"' in text and "your-name" not in text


def test_the_scaffold_passes_its_own_tests(project: Path) -> None:
    """As it is, and under a name other than the template's."""
    done = own_tests(project)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_the_scaffolds_tests_can_fail(project: Path, tmp_path: Path) -> None:
    """Another reference than the kernel: values, gradients and compilation all notice."""
    copy = tmp_path / NAME
    shutil.copytree(project, copy)
    for file in copy.rglob("reference.py"):
        file.write_text(file.read_text().replace("torch.relu(x)", "torch.relu(x + 0.125)"))
    (variant,) = (copy / "build").iterdir()
    shutil.rmtree(variant / "__pycache__", ignore_errors=True)
    done = own_tests(copy)
    assert done.returncode == 1
    for name in ("test_matches_the_reference", "test_gradients", "test_the_operator_is_what"):
        assert f"FAILED tests/test_ops.py::{name}" in done.stdout


@pytest.mark.exhaustive
def test_the_row_scaffold_passes_its_own_tests_and_they_can_fail(tmp_path: Path) -> None:
    """A reduction, an operator in place, no weight and one of another dtype."""
    root = new_project(NAME, tmp_path, "me/my-kernel", "row")
    assert len(Build.open(root).general.backends) == 2
    text = "\n".join(p.read_text() for p in sorted(root.rglob("*")) if p.is_file())
    assert "example" not in text.lower().replace("usage example", "")
    assert "relu" not in text.lower() and "your-name" not in text
    (built,) = kernel_build.build(root, root, ("cpu",), verbose=False)
    done = own_tests(root)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout
    reference = built.path / "reference.py"
    reference.write_text(reference.read_text().replace("+ eps", "+ 2 * eps + 1e-3"))
    shutil.rmtree(built.path / "__pycache__", ignore_errors=True)
    done = own_tests(root)
    assert done.returncode == 1
    for name in ("test_matches_the_reference", "test_gradients", "test_views_and_special"):
        assert f"FAILED tests/test_ops.py::{name}" in done.stdout


def test_the_row_scaffold_serves_a_model(tmp_path: Path) -> None:
    """By `register`, as hfpatch's own kernels are: proven, used, restored."""
    import torch
    from kernels import get_local_kernel

    import hfpatch

    root = new_project("my-row", tmp_path, template="row")
    kernel_build.build(root, root, ("cpu",), verbose=False)
    ops = get_local_kernel(root, backend=None if torch.cuda.is_available() else "cpu")

    def rms_norm(x, weight=None, bias=None, eps=1e-6, weight_offset=0.0, cast="none"):  # type: ignore[no-untyped-def]
        if bias is not None or weight_offset or cast != "none":
            raise NotImplementedError("no bias, no offset, one rounding")
        return ops.rms_norm(x, weight, eps)

    model = torch.nn.Sequential(torch.nn.RMSNorm(48, eps=1e-6)).requires_grad_(False)
    x = torch.randn(3, 48)
    expected = model(x)
    report = hfpatch.apply(model, kernels={"rms_norm": rms_norm})
    assert [s.op for s in report.swaps] == ["rms_norm"], report
    torch.testing.assert_close(model(x), expected)
    hfpatch.restore(model)


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc, reason="no nvcc")
@pytest.mark.parametrize(
    "template", [pytest.param("elementwise", marks=pytest.mark.exhaustive), "row"]
)
def test_the_scaffolds_cuda_half_compiles(template: str, tmp_path: Path) -> None:
    """And keeps to the Hub's demands, checked from the outside."""
    from machine import failures

    root = new_project(NAME, tmp_path, template=template)
    (built,) = kernel_build.build(root, root, ("cuda",), archs="9.0", verbose=False)
    assert built.archs == ("9.0",) and "-cu" in built.name
    assert failures(root) == []
    assert not any(k["spill_stores"] for k in kernel_build.resources(root, "9.0", verbose=False))


def test_a_template_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ProjectError, match="no template `rows`; there are `elementwise`, `row`"):
        new_project(NAME, tmp_path, template="rows")
    assert list(tmp_path.iterdir()) == []


def test_the_templates_are_in_the_wheel() -> None:
    """Every file matches a pattern of pyproject.toml's package data, which setuptools globs."""
    import glob

    toml = kernel_build.project.tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = toml["tool"]["setuptools"]["package-data"]["hfpatch"]
    found = {
        Path(path)
        for pattern in patterns
        for path in glob.glob(str(ROOT / "hfpatch" / pattern), recursive=True)
    }
    folders = TEMPLATES.parent.glob("templates*")
    files = (p for folder in folders for p in folder.rglob("*"))
    needed = {p for p in files if p.is_file() and "__pycache__" not in p.parts}
    assert needed <= found and not any(p.name.startswith(".") for p in needed)


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a",
        "2fast",
        "My-kernel",
        "a_b",
        "a/b",
        "../x",
        "kernel-",
        "ä-b",
        "try",
        "torch",
        "ab\n",
        "a--b",
    ],
)
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProjectError, match=r"is not a kernel's name|which is taken"):
        new_project(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "repo", ["x", "a/b/c", "a/", "/b", "a b/c", "a/b--c", "a/b.git", "-a/b", "a/b\n", "a/ö"]
)
def test_repositories_that_are_none(repo: str, tmp_path: Path) -> None:
    with pytest.raises(ProjectError, match="is not a repository of the Hub"):
        check_repo_id(repo)
    with pytest.raises(ProjectError, match="is not a repository of the Hub"):
        new_project("my-kernel", tmp_path, repo)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("template", TEMPLATE_NAMES)
def test_a_repository_that_is_called_as_the_template(template: str, tmp_path: Path) -> None:
    name, repo = "my-example-kernel", "me/example-kernel-example_kernel"
    root = new_project(name, tmp_path, repo, template)
    found = {p: p.read_text() for p in root.rglob("*") if p.is_file()}
    assert not any("your-name" in text for text in found.values())
    if template != "triton":  # which has nothing to publish
        assert f'repo-id = "{repo}"' in found[root / "build.toml"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "precious").write_text("x")
    with pytest.raises(ProjectError, match="exists already"):
        new_project(NAME, tmp_path)
    assert [p.name for p in (tmp_path / NAME).iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(ProjectError, match="cannot be written"):
        new_project(NAME, Path("/proc"))


@pytest.mark.parametrize("action", ["build", "check", "publish"])
def test_not_a_kernel_project(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kernel", action, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hfpatch kernel {action}: ") and "is not a kernel project" in error
    assert cli.main(["kernel", action, str(tmp_path / "absent")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "build.toml").write_text("[general\n")
    assert cli.main(["kernel", action, str(tmp_path)]) == 2
    assert "build.toml` cannot be read" in capsys.readouterr().err
    (tmp_path / "build.toml").write_text('[general]\nname = "x"\n')
    assert cli.main(["kernel", action, str(tmp_path)]) == 2
    assert "lacks `general.version`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "version = '1'", "`general.version` must be a whole number"),
        ("version = 1", "version = -1", "`general.version` must be a whole number"),
        ("[general.hub]\nrepo-id =", "hub =", "`general.hub` must be a table"),
        ('name = "my-kernel"', "name = 5", "`general.name` must be a string"),
        ("[kernel.my_kernel_cpu]", "[[kernel]]", "`kernel` must be a table"),
        ("version = 1", "version = 1\npython-depends = 'einops'", "`general.python-depends` must"),
        ("[torch]", "[torch]\npyext = 'py'", "`torch.pyext` must be a list of strings"),
        ('backend = "cpu"\n', "", "`kernel.my_kernel_cpu` lacks `backend`"),
        ('cxx-flags = ["-fno-trapping-math"]', 'cxx-flags = "-O3"', "must be a list of strings"),
        ('["cpu", "cuda"]', '"cpu"', "`general.backends` must be a list"),
        ("[torch.stable-abi]", "[general.cuda]\n[torch.stable-abi]", ""),
        ("[general.hub]", "cuda = 1\n[general.hub]", "`general.cuda` must be a table"),
    ],
)
def test_values_of_another_type(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = new_project(NAME, tmp_path)
    toml = (root / "build.toml").read_text()
    assert old in toml
    (root / "build.toml").write_text(toml.replace(old, new, 1))
    for action in ("build", "check", "publish"):
        if message:
            assert cli.main(["kernel", action, str(root)]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"hfpatch kernel {action}: ") and message in error
    if not message:
        assert kernel_build.read_project(root)


def test_dependencies_and_one_abi_for_all_backends(tmp_path: Path) -> None:
    """What kernels' parser takes, and the kernel needs to load: in the metadata of the build."""
    from kernels import Metadata

    root = new_project(NAME, tmp_path)
    toml = (root / "build.toml").read_text()
    toml = toml.replace('[torch.stable-abi]\ncpu = "2.11"\ncuda = "2.11"\n', "")
    toml = toml.replace("[torch]\n", '[torch]\nstable-abi = "2.11"\n')
    toml = toml.replace(
        "[general.hub]",
        'python-depends = ["einops"]\n'
        'kernel-depends = [{ repo-id = "toy/base", version = 1 }]\n'
        '[general.cuda]\npython-depends = ["nvidia-cutlass-dsl"]\n[general.hub]',
    )
    (root / "build.toml").write_text(toml)
    assert Build.open(root).general
    (variant,) = kernel_build.build(root, root, ("cpu",), verbose=False)
    metadata = Metadata.read_from_file(variant.path / "metadata.json")
    assert "abi211" in variant.path.name
    assert metadata.python_depends == ["einops"]
    assert [d.repo_id for d in metadata.kernel_depends] == ["toy/base"]
    shutil.rmtree(root / "torch-ext" / "my_kernel")
    with pytest.raises(KernelBuildError, match="the Python package of a kernel called `my-kernel`"):
        kernel_build.build(root, root, ("cpu",), verbose=False)


def test_build_without_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = new_project(NAME, tmp_path)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert cli.main(["kernel", "build", str(root)]) == 2
    error = capsys.readouterr().err
    assert "cpu: not built: no C++ compiler" in error and "nothing was built" in error
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cli.main(["kernel", "build", str(root), "--backend", "cuda"]) == 2
    assert "no CUDA compiler: no `nvcc` in `CUDA_HOME`" in capsys.readouterr().err


def test_build_of_what_is_not_built_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = new_project(NAME, tmp_path)
    toml = (root / "build.toml").read_text()
    (root / "build.toml").write_text(toml.replace('["cpu", "cuda"]', '["rocm"]'))
    assert cli.main(["kernel", "build", str(root)]) == 2
    assert "this builds cpu and cuda" in capsys.readouterr().err
    (root / "build.toml").write_text(toml.replace('name = "my-kernel"', 'name = "My Kernel"'))
    with pytest.raises(KernelBuildError, match=r"`general\.name` must be of lower-case letters"):
        kernel_build.build(root, tmp_path, ("cpu",), verbose=False)
    (root / "build.toml").write_text(toml.replace('cpu = "2.11"\n', ""))
    with pytest.raises(KernelBuildError, match=r"expected `cpu = \"2.11\"` under"):
        kernel_build.build(root, tmp_path, ("cpu",), verbose=False)


def test_a_compile_error_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = new_project(NAME, tmp_path)
    (root / "kernel_src" / "cpu.cpp").write_text("this is not C++;\n")
    assert cli.main(["kernel", "build", str(root), "--archs", "none", "--quiet"]) == 1
    assert "cpu.cpp:1:1: error" in capsys.readouterr().err
