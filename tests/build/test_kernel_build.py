"""The builder: what it makes of build.toml, what it writes, and how it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from kernels.variants import ArchVariant, parse_variant
from own_project import copy_project, named_files

from hfpatch import kernel_build
from hfpatch.kernel_build import KernelBuildError, ToolchainMissing, toolchain
from hfpatch.kernel_build import __main__ as command
from hfpatch.kernel_build.builder import Builder
from hfpatch.kernel_build.commands import run
from hfpatch.kernel_build.objects import Objects, Unit, compile_all, other_builds
from hfpatch.kernel_build.toolchain import Nvcc

ROOT = Path(__file__).resolve().parents[2]
has_nvcc = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ


def cpu_variant(kernels_dir: Path) -> Path:
    (variant,) = (kernels_dir / "build").glob("torch-stable-abi*-cpu-*")
    return variant


def test_kernels_parser_accepts_build_toml() -> None:
    build = Build.open(ROOT)
    assert sorted(str(b).lower().split(".")[-1] for b in build.general.backends) == ["cpu", "cuda"]


def test_build_toml_names_every_source() -> None:
    cuda = set(named_files("cuda"))
    found = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "kernel_src").rglob("*")
        if p.suffix in {".h", ".cpp", ".cu", ".cuh"}
    }
    assert found <= cuda
    # One CUDA build serves CPU tensors too.
    assert set(named_files("cpu")) <= cuda


def test_metadata(kernels_dir: Path) -> None:
    variant = cpu_variant(kernels_dir)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == "hfpatch-kernels"
    assert metadata.version == 1
    assert metadata.license == "Apache-2.0"
    assert metadata.id.startswith("_hfpatch_kernels_cpu_")
    assert metadata.id.isidentifier()
    assert metadata.digest is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_variant_name(kernels_dir: Path) -> None:
    parsed = parse_variant(cpu_variant(kernels_dir).name)
    assert isinstance(parsed, ArchVariant)
    assert str(parsed.framework.version) == "2.11"
    assert parsed.arch.backend.name == "cpu"


def test_compatibility_directory_exports_the_same(kernels_dir: Path) -> None:
    variant = cpu_variant(kernels_dir)
    code = (
        "import importlib.util as u, sys\n"
        "s = u.spec_from_file_location('compat', sys.argv[1]); m = u.module_from_spec(s)\n"
        "s.loader.exec_module(m); import torch\n"
        "assert set(m.__all__) <= set(vars(m)), m.__all__\n"
        "assert m.silu(torch.zeros(2)).tolist() == [0, 0]\n"
    )
    path = variant / "hfpatch_kernels" / "__init__.py"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_two_copies_in_one_process(kernels_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(kernels_dir / "build", copy / "build")
    code = (
        "import sys, torch, kernels; from pathlib import Path\n"
        "a, b = (kernels.get_local_kernel(Path(p)) for p in sys.argv[1:])\n"
        "assert a is not b\n"
        "assert torch.equal(a.silu(torch.ones(3)), b.silu(torch.ones(3)))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(kernels_dir), str(copy)], check=True)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_library_needs_torch_and_names_no_path(kernels_dir: Path) -> None:
    (library,) = cpu_variant(kernels_dir).glob("*.abi3.so")
    text = subprocess.run(["objdump", "-p", library], capture_output=True, text=True).stdout
    needed = [line.split()[1] for line in text.splitlines() if "NEEDED" in line]
    assert "libtorch_cpu.so" in needed
    # A second OpenMP runtime would not follow torch.set_num_threads.
    assert not any("gomp" in name or "omp.so" in name for name in needed)
    assert "RPATH" not in text
    assert "RUNPATH" not in text
    content = library.read_bytes()
    for path in (str(ROOT), sys.prefix, str(Path.home())):
        if path != "/":
            assert path.encode() + b"/" not in content


def test_exports_only_the_c_interface_and_the_python_module(kernels_dir: Path) -> None:
    (library,) = cpu_variant(kernels_dir).glob("*.abi3.so")
    out = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    functions = {line.split()[-1] for line in out.splitlines() if " T " in line}
    module = f"PyInit_{library.name.removesuffix('.abi3.so')}"
    assert module in functions and len(functions) > 1
    functions.remove(module)
    assert all(name.startswith("hfp_") for name in functions), functions


def only_light_sources(toml: str) -> str:
    """build.toml without the C++ sources of the kernels but simd.cpp."""
    return re.sub(r'"kernel_src/(?!cpu/simd\.)[\w/]+\.cpp",', "", toml)


def test_objects_are_reused_until_a_header_changes(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project", "cpu")
    # Only the light files, so that the test is quick.
    toml = only_light_sources((project / "build.toml").read_text())
    (project / "build.toml").write_text(toml)
    ran: list[str] = []
    objects = Builder(project, "cpu", None, False).objects()
    original = objects.compile_unit

    def spy(unit: Unit) -> bool:
        fresh = original(unit)
        if fresh:
            ran.append(unit.label.split()[-1])
        return fresh

    objects.compile_unit = spy  # type: ignore[method-assign]
    objects.compile()
    assert sorted(ran) == ["portable.cpp", "python_calls.cpp", "simd.cpp", "torch_binding.cpp"]
    ran.clear()
    objects.compile()
    assert ran == []
    header = project / "kernel_src" / "cpu" / "common.h"
    header.write_text(header.read_text() + "\n")
    objects.compile()
    assert ran == ["simd.cpp"]


EDITED_WHILE_COMPILED = """\
import pathlib, sys
*_, source, target, _, _, deps = sys.argv
text = pathlib.Path(source).read_text()
pathlib.Path(target).write_text(text)
pathlib.Path(deps).write_text(f"x: {source}")
with open("deps.log", "a") as log:
    print(deps, file=log)
if text == "one":
    pathlib.Path(source).write_text("two")
"""


def test_a_source_edited_while_it_compiles_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiler.py").write_text(EDITED_WHILE_COMPILED)
    (tmp_path / "a.cpp").write_text("one")
    target = tmp_path / "out" / "a.o"
    target.parent.mkdir()
    unit = Unit("a", (sys.executable, "compiler.py", "a.cpp", str(target)), target)
    objects = Objects([unit], tmp_path, "", lambda line: None)
    for process, expected in ((1, "one"), (2, "two"), (3, "two")):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        objects.compile()
        assert target.read_text() == expected
    first, second = (tmp_path / "deps.log").read_text().splitlines()  # the third was up to date
    assert first != second, "two builds at once would read each other's list of headers"
    assert {p.name for p in target.parent.iterdir()} == {"a.o", "a.json"}


def test_what_compilers_say_is_english() -> None:
    """The linker's words for symbols that are missing are looked for."""
    assert run(["sh", "-c", "echo $LC_ALL"]) == "C\n"


def test_objects_in_a_directory_that_others_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a project that is read-only: in the system's directory for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    access = os.access
    monkeypatch.setattr("os.access", lambda p, *a, **k: p != ROOT and access(p, *a, **k))
    Builder(ROOT, "cpu", None, False)
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(KernelBuildError, match="expected a directory that no other user can write"):
        Builder(ROOT, "cpu", None, False)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    project = copy_project(tmp_path, "cpu")
    (project / "kernel_src" / "api.cpp").unlink()
    with pytest.raises(KernelBuildError, match=r"api\.cpp.*does not exist"):
        kernel_build.build(project, tmp_path / "out", ("cpu",), verbose=False)


def test_compile_error_carries_the_compilers_words(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project", "cpu")
    (project / "kernel_src" / "cpu" / "simd.cpp").write_text("this is not C++;\n")
    result = kernel_build.build_available(project, tmp_path / "out", archs="none", verbose=False)
    assert "cpu" in result.failed
    assert "simd.cpp:1" in result.failed["cpu"]
    assert "command:" in result.failed["cpu"]
    reason = json.loads((tmp_path / "out" / "REASON.json").read_text())
    assert "simd.cpp" in reason["reason"]


def test_undefined_symbol_is_found_at_link_time(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project", "cpu")
    toml = only_light_sources((project / "build.toml").read_text())
    (project / "build.toml").write_text(toml)
    with pytest.raises(KernelBuildError, match=r"undefined symbols.*hfp_rms_norm"):
        kernel_build.build(project, tmp_path / "out", ("cpu",), verbose=False)
    assert not list((tmp_path / "out" / "build").glob("torch-*"))


def builds_of(root: Path, name: str, *extra: str) -> tuple[Objects, list[str]]:
    """Of two sources, of which the second reads a macro; and the lines of those compiled."""
    folder = root / ".cache" / "kernel_build" / name
    folder.mkdir(parents=True, exist_ok=True)
    header = folder / "generated.h"
    header.write_text("#define SEVEN 7\n")
    cxx = toolchain.find_cxx()
    common = (cxx, "-O1", "-include", str(header), f"-D{name.upper()}_KERNEL", *extra)
    units = [
        Unit(file, (*common, "-c", file, "-o", str(folder / f"{file}.o")), folder / f"{file}.o")
        for file in ("plain.cpp", "asks.cpp")
    ]
    said: list[str] = []
    others = other_builds(root / ".cache", folder)
    return Objects(units, root, name, said.append, "g++ 12", others), said


def compiled(objects: Objects, said: list[str]) -> list[str]:
    """The files for which a compiler ran, in alphabetical order."""
    said.clear()
    objects.compile()
    done = [line.split(" ", 1)[1] for line in said if line.startswith("[")]
    return sorted(line.split()[0] for line in done if not line.endswith("up to date"))


def test_another_builds_object_is_taken_where_it_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "plain.cpp").write_text("int plain() { return SEVEN; }\n")
    (tmp_path / "asks.cpp").write_text(
        "#ifdef CUDA_KERNEL\nint asks() { return 2; }\n#else\nint asks() { return 1; }\n#endif\n"
    )
    cpu, cpu_said = builds_of(tmp_path, "cpu")
    for path in (*tmp_path.glob("*.cpp"), cpu.units[0].object.parent / "generated.h"):
        os.utime(path, (1e9, 1e9))  # what is written during a build is compiled again
    assert compiled(cpu, cpu_said) == ["asks.cpp", "plain.cpp"]

    cuda, said = builds_of(tmp_path, "cuda")
    header = cuda.units[0].object.parent / "generated.h"
    os.utime(header, (1e9, 1e9))
    assert compiled(cuda, said) == ["asks.cpp"]
    assert cuda.units[0].object.read_bytes() == cpu.units[0].object.read_bytes()
    assert cuda.units[1].object.read_bytes() != cpu.units[1].object.read_bytes()
    assert compiled(cuda, said) == []  # up to date the next time

    header.write_text("#define SEVEN 8\n")  # this build's own: not what the other one has
    os.utime(header, (1e9, 1e9))
    assert compiled(cuda, said) == ["asks.cpp", "plain.cpp"]
    assert cuda.units[0].object.read_bytes() != cpu.units[0].object.read_bytes()

    other, said = builds_of(tmp_path, "other", "-DMORE")
    assert compiled(other, said) == ["asks.cpp", "plain.cpp"]


def test_builds_are_compiled_at_once_and_share_an_object(tmp_path: Path) -> None:
    (tmp_path / "plain.cpp").write_text("int plain() { return SEVEN; }\n")
    (tmp_path / "asks.cpp").write_text(
        "#ifdef CUDA_KERNEL\nint asks() { return 2; }\n#else\nint asks() { return 1; }\n#endif\n"
    )
    builds = [builds_of(tmp_path, name) for name in ("cpu", "cuda")]
    for path in tmp_path.rglob("*.[ch]*"):
        os.utime(path, (1e9, 1e9))
    (cpu, cpu_said), (cuda, cuda_said) = builds
    assert compile_all([cpu, cuda]) == [[u.object for u in o.units] for o in (cpu, cuda)]
    assert cuda.units[0].object.read_bytes() == cpu.units[0].object.read_bytes()
    assert cuda.units[1].object.read_bytes() != cpu.units[1].object.read_bytes()
    assert not any("up to date" in line for line in cpu_said)
    assert [line.split()[1] for line in cuda_said if "up to date" in line] == ["plain.cpp"]
    assert cuda_said[-1].startswith("[2/2]")


def test_a_build_that_fails_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "plain.cpp").write_text("int plain() { return SEVEN; }\n")
    (tmp_path / "asks.cpp").write_text("#ifdef CPU_KERNEL\n#error not here\n#endif\n")
    (cpu, _), (cuda, _) = (builds_of(tmp_path, name) for name in ("cpu", "cuda"))
    failed, found = compile_all([cpu, cuda])
    assert isinstance(failed, KernelBuildError)
    assert "not here" in str(failed)
    assert found == [u.object for u in cuda.units]
    assert all(u.object.is_file() for u in cuda.units)


@pytest.mark.parametrize("how", ["CXX", "PATH"])
def test_no_compiler(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if how == "CXX":
        monkeypatch.setenv("CXX", "/nonexistent")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"no C\+\+ compiler"):
        kernel_build.build(ROOT, tmp_path, ("cpu",))
    result = kernel_build.build_available(ROOT, tmp_path, verbose=False)
    assert result.variants == []
    assert set(result.missing) == {"cpu", "cuda"}
    reason = json.loads((tmp_path / "REASON.json").read_text())
    assert "no C++ compiler" in reason["reason"]
    assert set(reason["backends"]) <= {"cpu", "cuda"}


def test_setup_without_a_compiler_still_makes_a_pure_package(tmp_path: Path) -> None:
    """The commands that pip runs, in a copy of the project."""
    project = copy_project(tmp_path / "project", "cpu")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy2(ROOT / name, project / name)
    shutil.copytree(ROOT / "clib", project / "clib")
    (project / "README.md").write_text("hfpatch\n")
    (project / "hfpatch").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy2(ROOT / "hfpatch" / name, project / "hfpatch" / name)
    clean = shutil.ignore_patterns("__pycache__")
    for name in ("kernel_build", "kernel_project"):
        shutil.copytree(ROOT / "hfpatch" / name, project / "hfpatch" / name, ignore=clean)
    env = {**os.environ, "CXX": "/nonexistent"}
    env.pop("HFPATCH_BUILD_STRICT", None)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=project, env=env, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == "hfpatch-0.1.0-py3-none-any.whl"
    shutil.unpack_archive(wheel, tmp_path / "unpacked", "zip")
    reason = json.loads((tmp_path / "unpacked/hfpatch/_kernels/REASON.json").read_text())
    assert "/nonexistent" in reason["reason"]
    header = (ROOT / "kernel_src" / "hfpatch.h").read_bytes()
    assert (tmp_path / "unpacked/hfpatch/include/hfpatch.h").read_bytes() == header
    for name in ("build.toml", "clib/stub.c", "clib/hfpatch.pc.in", "kernel_src/api.cpp"):
        assert (tmp_path / "unpacked/hfpatch/_clib" / name).is_file(), name
    inside = Path("hfpatch/kernel_project/templates")
    for path in (project / inside).rglob("*"):
        assert (tmp_path / "unpacked" / path.relative_to(project)).exists(), path
    strict = subprocess.run(
        command, cwd=project, env={**env, "HFPATCH_BUILD_STRICT": "1"}, capture_output=True
    )
    assert strict.returncode != 0


@pytest.mark.parametrize("missing", ["nothing", "compiler", "torch"])
def test_the_build_backend_asks_for_torch_where_its_headers_are_missing(
    missing: str, tmp_path: Path
) -> None:
    """In a process of its own, as pip calls it: hfpatch is not imported there."""
    code = (
        "import json, sys, hfpatch_backend as b; "
        "wanted = b.get_requires_for_build_wheel(), b.get_requires_for_build_editable(); "
        "assert 'hfpatch' not in sys.modules; print(json.dumps(wanted))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    if missing != "nothing":
        env |= {"compiler": {"CXX": "/nonexistent"}, "torch": {"HFPATCH_TORCH_DIR": str(tmp_path)}}[
            missing
        ]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for wanted in json.loads(done.stdout.splitlines()[-1]):
        assert [w for w in wanted if "torch" in w] == ["torch>=2.11"] * (missing == "torch")


def test_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFPATCH_TORCH_DIR", str(tmp_path))
    with pytest.raises(ToolchainMissing, match="no torch headers found"):
        kernel_build.find_torch()


def test_libtorch_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include" / "torch" / "csrc" / "stable" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setenv("HFPATCH_TORCH_DIR", str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"got its headers without `version\.py`"):
        kernel_build.find_torch()


def test_nvcc_that_names_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho hello\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"expected `release X\.Y`, got `hello`"):
        toolchain.find_nvcc()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    found = toolchain.find_nvcc()
    assert (found.version, found.release) == ((13, 0), "13.0.48")


@pytest.mark.parametrize("given", [[], ["--out", "x", "--resources"]])
def test_one_task_at_a_time(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (given, ["--resources", "--backend", "cpu"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert "--resources" in capsys.readouterr().err


def test_old_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include" / "torch" / "csrc" / "stable" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "version.py").write_text("__version__ = '2.10.0+cu128'\ncuda: str = '12.8'\n")
    monkeypatch.setenv("HFPATCH_TORCH_DIR", str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"expected version 2\.11 or newer, got 2\.10\.0"):
        kernel_build.find_torch()
    (tmp_path / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: str = '13.0'\n")
    assert kernel_build.find_torch().cuda == "13.0"


ALL = "\n".join(f"compute_{n}" for n in (70, 75, 80, 86, 90, 100, 103, 120, 121))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("all", ["7.5", "8.0", "8.6", "9.0", "10.0", "10.3", "12.0", "12.1+PTX"]),
        ("none", []),
        ("9.0;8.0", ["8.0", "9.0"]),
        ("8.0, 9.0+PTX", ["8.0", "9.0+PTX"]),
        ("12.1 12.1+ptx", ["12.1+PTX"]),
        ("native", ["8.6", "9.0+PTX"]),
    ],
)
def test_archs(request_: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "run", lambda *a, **k: ALL)
    monkeypatch.setattr(toolchain, "gpus", lambda: ["9.0", "8.6", "9.0"])
    nvcc = Nvcc("nvcc", Path("/cuda"), (13, 0))
    assert kernel_build.cuda_archs(request_, nvcc) == expected
    monkeypatch.setenv("HFPATCH_CUDA_ARCHS", request_)
    assert kernel_build.cuda_archs(None, nvcc) == expected


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["9.0"], ["9.0+PTX"]),
        (["8.0", "9.0", "9.0"], ["8.0", "9.0+PTX"]),
        (["9.2"], ["9.0+PTX"]),  # unknown to this nvcc: what comes next below
        (["13.0", "8.6"], ["8.6", "12.1+PTX"]),
        (["6.1"], []),  # too old for any kernel here
        ([], ["7.5", "8.0", "8.6", "9.0", "10.0", "10.3", "12.0", "12.1+PTX"]),
    ],
    ids=str,
)
def test_archs_that_nobody_asked_for_are_those_of_the_gpus(
    there: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "run", lambda *a, **k: ALL)
    monkeypatch.setattr(toolchain, "gpus", lambda: there)
    monkeypatch.delenv("HFPATCH_CUDA_ARCHS", raising=False)
    assert kernel_build.cuda_archs(None, Nvcc("nvcc", Path("/cuda"), (13, 0))) == expected


@pytest.mark.parametrize("text", ["9", "sm_90", "9.0a", "3.5", "hopper"])
def test_bad_archs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "run", lambda *a, **k: ALL)
    monkeypatch.setenv("HFPATCH_CUDA_ARCHS", text)
    for argument, name in ((text, "archs"), (None, "HFPATCH_CUDA_ARCHS")):
        expected = f"^`{name}`: expected `all`, `native`, `none` or"
        with pytest.raises(KernelBuildError, match=expected) as error:
            kernel_build.cuda_archs(argument, Nvcc("nvcc", Path("/cuda"), (13, 0)))
        assert f"got `{text}`" in str(error.value)


@pytest.mark.parametrize("text", ["all", "-1", "2.5"])
def test_bad_jobs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", text)
    with pytest.raises(KernelBuildError, match=f"^`MAX_JOBS`: expected .*, got `{text}`$"):
        toolchain.jobs()


def test_as_many_jobs_as_there_are_processors_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert toolchain.jobs() == 16
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS, Windows
    assert toolchain.jobs() == 32


def test_native_without_a_gpu_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "run", lambda *a, **k: ALL)
    monkeypatch.setattr(toolchain, "gpus", list)
    assert kernel_build.cuda_archs("native", Nvcc("nvcc", Path("/cuda"), (13, 0))) == []


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc, reason="no nvcc")
@pytest.mark.timeout(1800)  # where nothing was built before
def test_cuda_sources_compile(tmp_path: Path) -> None:
    """Those of `make test`, whose objects are used where they are up to date."""
    (built,) = kernel_build.build(ROOT, tmp_path, ("cuda",), archs="8.0;9.0", verbose=False)
    parsed = parse_variant(built.name)
    assert isinstance(parsed, ArchVariant)
    assert parsed.arch.backend.name == "cuda"
    metadata = Metadata.read_from_file(built.path / "metadata.json")
    assert metadata.backend.archs == ["8.0", "9.0"]
    assert metadata.digest is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, built.path))
    (library,) = built.path.glob("*.abi3.so")
    text = subprocess.run(["objdump", "-p", library], capture_output=True, text=True).stdout
    needed = [line.split()[1] for line in text.splitlines() if "NEEDED" in line]
    # dlopen resolves torch's symbols through these; the CUDA runtime is inside.
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(needed)
    assert not any("cudart" in name for name in needed)
    assert "RUNPATH" not in text
