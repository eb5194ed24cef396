"""`hfpatch kernel check`: passes what is right, and finds each thing that is not."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from scaffold import ROOT, built_scaffold

from hfpatch import cli, kernel_build
from hfpatch.kernel_project.checks import Row, as_table, check_project, elf, library
from hfpatch.kernel_project.project import Project


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_scaffold(tmp_path_factory.mktemp("check"))


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(built, tmp_path / built.name)


def variant(project: Path) -> Path:
    (found,) = (project / "build").iterdir()
    return found


def failures(project: Path, load: bool = False) -> dict[str, Row]:
    rows = check_project(Project.open(project), load=load)
    return {row.what: row for row in rows if not row.passed}


def with_digest(project: Path) -> None:
    """As a builder would have left it."""
    folder = variant(project)
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["digest"] = kernel_build.digest(folder)
    (folder / "metadata.json").write_text(json.dumps(metadata))


# ------------------------------------------------------------------------------ what is right


def test_the_scaffold_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernel", "check", str(project)]) == 0
    table = capsys.readouterr().out
    assert "FAIL" not in table and table.rstrip().endswith("checks, all passed")
    assert "loads on manylinux_2_28" in table and "2 names, 1 layers" in table
    assert max(map(len, table.splitlines())) <= 120
    assert cli.main(["kernel", "check", str(project), "--no-load", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 25 and all(row["passed"] for row in rows)


def test_our_own_kernels_pass(
    kernels_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cpu,) = (kernels_dir / "build").glob("*-cpu-*")
    clean = shutil.ignore_patterns("__pycache__")
    shutil.copytree(cpu, tmp_path / "build" / cpu.name, ignore=clean)
    assert cli.main(["kernel", "check", str(ROOT), "--build", str(tmp_path)]) == 0
    assert "9 layers" in capsys.readouterr().out


# ------------------------------------------------------------------------------ the project


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(project: Path) -> None:
        text = (project / path).read_text()
        assert old in text
        (project / path).write_text(text.replace(old, new))

    return apply


def remove(path: str) -> Callable[[Path], None]:
    return lambda project: (project / path).unlink()


def append(path: str, text: str) -> Callable[[Path], None]:
    def apply(project: Path) -> None:
        with (project / path).open("a") as file:
            file.write(text)

    return apply


INIT, LAYERS = "torch-ext/my_kernel/__init__.py", "torch-ext/my_kernel/layers.py"
CLASS = "\n\nclass Bad(nn.Module):\n    "

PROJECT = {
    "build.toml: kernels' parser": (
        edit("build.toml", 'backend = "cpu"', 'backend = "abacus"'),
        "`build.toml` is valid",
        "abacus",
    ),
    "build.toml: another name": (
        edit("build.toml", 'name = "my-kernel"', 'name = "My_Kernel"'),
        "`build.toml` is valid",
        "My_Kernel",
    ),
    "build.toml: old edition": (
        edit("build.toml", "edition = 5", "edition = 4"),
        "`build.toml` is valid",
        "edition",
    ),
    "a source that is not there": (
        remove("kernel_src/cuda.cu"),
        "every source is there",
        "`kernel.my_kernel_cuda` names `kernel_src/cuda.cu`",
    ),
    "a header that is not named": (
        edit("build.toml", '  "kernel_src/formulas.h",\n', ""),
        "headers are named too",
        "`kernel.my_kernel_cpu` includes `kernel_src/formulas.h`",
    ),
    "a header of a header": (
        lambda p: (
            (p / "kernel_src" / "more.h").write_text("#pragma once\n"),
            append("kernel_src/formulas.h", '#include "more.h"\n')(p),
        ),
        "headers are named too",
        "includes `kernel_src/more.h`",
    ),
    "no flake": (remove("flake.nix"), "`flake.nix` is there", "it is not"),
    "no card": (remove("CARD.md"), "`CARD.md` can be filled", "is missing"),
    "a broken card": (
        append("CARD.md", "{% if %}"),
        "`CARD.md` can be filled",
        "is not a Jinja template",
    ),
    "a card without a head": (
        edit("CARD.md", "library_name: kernels", "title: x"),
        "`CARD.md` can be filled",
        "`library_name: kernels`",
    ),
    "a folder where builds put theirs": (
        lambda p: (p / "torch-ext" / "my_kernel" / "my_kernel").mkdir(),
        "the Python package is in its place",
        "`torch-ext/my_kernel/my_kernel` is there",
    ),
    "match": (
        append(INIT, "\nmatch 1:\n    case 1:\n        pass\n"),
        "Python 3.9 can read it",
        "Pattern matching",
    ),
    "X | None": (
        append(INIT, "\n\ndef f(x: int | None):\n    pass\n"),
        "Python 3.9 can read it",
        "`int | None` (Optional or Union)",
    ),
    "an absolute import": (
        append(INIT, "\nfrom my_kernel import layers\n"),
        "imports are relative, or torch's",
        "`from my_kernel import layers`",
    ),
    "a foreign import": (
        append(INIT, "\n\ndef f():\n    import numpy.linalg\n"),
        "imports are relative, or torch's",
        "`import numpy.linalg`",
    ),
    "a registration without the prefix": (
        append(INIT, '\ntorch.library.custom_op("mine::f", lambda x: x, mutates_args=())\n'),
        "operators are registered under their namespace",
        "`custom_op('mine::f')`",
    ),
    "no __all__": (
        edit(INIT, "__all__ =", "_all ="),
        "`__all__` says what is public",
        "has no `__all__`",
    ),
    "layers that are not exported": (
        edit(INIT, '"layers", ', ""),
        "layers are exported",
        "`layers` is not in `__all__`",
    ),
    "a layer with a constructor": (
        append(LAYERS, CLASS + "def __init__(self): pass\n    def forward(self, x): return x\n"),
        "layers are pure",
        "`Bad` has a method `__init__`",
    ),
    "a layer with state": (
        append(LAYERS, CLASS + "eps = 1e-5\n    def forward(self, x): return x\n"),
        "layers are pure",
        "`Bad` has a class variable `eps`",
    ),
    "a layer without a forward": (
        append(LAYERS, CLASS + "weight: torch.Tensor\n"),
        "layers are pure",
        "`Bad` has no `forward`",
    ),
}


@pytest.mark.parametrize("case", PROJECT)
def test_what_is_wrong_with_the_project(project: Path, case: str) -> None:
    break_, what, problem = PROJECT[case]
    break_(project)
    row = failures(project)[what]
    assert problem in row.problem and row.todo


def test_python_depends_may_be_imported(project: Path) -> None:
    append(INIT, "\nimport einops\n")(project)
    what = "imports are relative, or torch's"
    assert what in failures(project)
    edit("build.toml", "version = 1\n", 'version = 1\npython-depends = ["einops"]\n')(project)
    assert what not in failures(project)


# ------------------------------------------------------------------------------ a variant


def test_bytecode_of_an_import_is_no_part_of_it(project: Path) -> None:
    """Python leaves it beside what it imports, with the machine's paths; it is not published."""
    (variant(project) / "__pycache__").mkdir(exist_ok=True)
    in_variant("__pycache__/ops.cpython-311.pyc", f"{project}/ops.py".encode())(project)
    assert not failures(project)


def metadata(**change: object) -> Callable[[Path], None]:
    def apply(project: Path) -> None:
        path = variant(project) / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return apply


def rename(name: str) -> Callable[[Path], None]:
    return lambda project: variant(project).rename(project / "build" / name)


def in_variant(name: str, data: bytes) -> Callable[[Path], None]:
    def apply(project: Path) -> None:
        (variant(project) / name).write_bytes(data)

    return apply


VARIANT = {
    "no variant": (
        lambda p: shutil.rmtree(p / "build"), "a variant is built", "there is none"
    ),
    "a name that is none": (rename("my-build"), "the variant's name is one", "my-build"),
    "a name of another backend": (
        rename("torch-stable-abi211-cu130-x86_64-linux"),
        "its metadata are valid",
        "`backend` is cpu",
    ),
    "metadata that are none": (
        in_variant("metadata.json", b"{}"), "its metadata are valid", "metadata.json"
    ),
    "another kernel's": (metadata(name="other"), "its metadata are valid", "`name` is 'other'"),
    "another version": (metadata(version=7), "its metadata are valid", "`version` is 7"),
    "an id that is no module": (metadata(id="a-b"), "its metadata are valid", "`id` is 'a-b'"),
    "no digest": (metadata(digest=None), "the digest is its files'", "there is none"),
    "a file too much": (in_variant("x.py", b""), "the digest is its files'", "x.py"),
    "an edited file": (
        in_variant("reference.py", b"x = 1\n"), "its Python is the sources'", "`reference.py`"
    ),
    "an edited source": (
        append(INIT, "\n"), "its Python is the sources'", "`__init__.py` was edited since"
    ),
    "a module that is missing": (
        lambda p: shutil.rmtree(variant(p) / "my_kernel"),
        "its files are in their places",
        "no `my_kernel/__init__.py`",
    ),
    "a path of this machine": (
        lambda p: in_variant("note.py", f"# {p}/x\n".encode())(p),
        "no path of this machine",
        "`note.py` names",
    ),
    "a library that is none": (
        in_variant("broken.so", b"\x7fELF garbage"), "the library can be read", "`broken.so`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANT)
def test_what_is_wrong_with_a_variant(project: Path, case: str) -> None:
    break_, what, problem = VARIANT[case]
    break_(project)
    row = failures(project)[what]
    assert problem in row.problem and row.todo


def test_a_package_that_does_not_load(project: Path) -> None:
    in_variant("layers.py", b"raise RuntimeError('a bad day')\n")(project)
    with_digest(project)
    row = failures(project, load=True)["`kernels` loads it"]
    assert "a bad day" in row.problem
    in_variant("layers.py", b"")(project)
    edit_all = variant(project) / "__init__.py"
    edit_all.write_text(edit_all.read_text().replace('__all__ = ["', '__all__ = ["ghost", "'))
    with_digest(project)
    assert "ghost" in failures(project, load=True)["`kernels` loads it"].problem


def test_a_variant_for_another_system_is_not_loaded(project: Path) -> None:
    rename("torch-stable-abi211-cpu-riscv64-linux")(project)
    rows = check_project(Project.open(project))
    (row,) = (r for r in rows if r.what == "`kernels` loads it")
    assert row.passed and row.note.startswith("not for this system")


# ------------------------------------------------------------------------------ its library


def compile_library(project: Path, source: str, *flags: str) -> dict[str, Row]:
    """The failures of the project with this library in place of its own."""
    folder = variant(project)
    (own,) = folder.glob("*.so")
    own.unlink()
    file = project / "library.cpp"
    file.write_text(source)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O0", "-std=c++17", *flags, str(file), "-o", str(own)],
        check=True,
    )
    with_digest(project)
    return failures(project)


#: Takes constructors that libstdc++ has from GCC 9 on.
NEW_LIBSTDCXX = '#include <sstream>\nextern "C" int f() { std::stringstream s; return s.good(); }\n'


@pytest.mark.parametrize("stripped", [True, False])
def test_a_library_for_newer_systems_only(project: Path, stripped: bool) -> None:
    """Found by kernel-abi-check, which sees nothing in a stripped library by itself."""
    from kernel_abi_check import ObjectFile

    found = compile_library(project, NEW_LIBSTDCXX, *(["-s"] if stripped else []))
    row = found["loads on manylinux_2_28"]
    assert "GLIBCXX 3.4.26" in row.problem and "kernel-builder" in row.todo
    (path,) = variant(project).glob("*.so")
    assert bool(ObjectFile(path).check_manylinux("manylinux_2_28")) is not stripped


def test_python_beyond_its_stable_abi(project: Path) -> None:
    source = (
        'extern "C" int _PyObject_GetDictPtr(void*), PyList_New(long), PyType_GetModuleByDef();\n'
        'extern "C" int f() { return _PyObject_GetDictPtr(0) + PyList_New(0) +\n'
        "  PyType_GetModuleByDef(); }\n"
    )
    row = compile_library(project, source, "-s")["loads in Python 3.9 and later"]
    assert "`_PyObject_GetDictPtr`" in row.problem and "PyType_GetModuleByDef" in row.problem
    assert "PyList_New" not in row.problem


def test_torch_beyond_its_stable_abi(project: Path) -> None:
    source = (
        "namespace c10 { struct X { void f(); }; struct Error { virtual ~Error(); }; }\n"
        "namespace at { int h(); }\n"
        "namespace torch { void t(); namespace stable { void fine(); } }\n"
        "namespace attention { void mine(); }\n"
        'extern "C" void f() { c10::X().f(); at::h(); torch::t(); torch::stable::fine();\n'
        "  attention::mine(); try { at::h(); } catch (c10::Error &) {} }\n"
    )
    row = compile_library(project, source, "-s")["only torch's stable ABI is used"]
    names = [f"`{name}`" for name in ("_ZN2at1hEv", "_ZN3c101X1fEv", "_ZN5torch1tEv")]
    assert len([name for name in names if name in row.problem]) >= 2
    assert row.problem.endswith("; 1 more"), "these and c10::Error's typeinfo"


def test_libraries_that_others_do_not_have(project: Path) -> None:
    source = '#include <omp.h>\nextern "C" int f() { return omp_get_max_threads(); }\n'
    found = compile_library(project, source, "-fopenmp", "-Wl,-rpath,/opt/x")
    assert "`libgomp.so.1`" in found["needs torch and the system only"].problem
    assert found["no search path"].problem == "`/opt/x`"


def test_what_a_library_asks_of_its_loader(project: Path) -> None:
    what = "asks nothing odd of the loader"
    source = 'extern "C" int relu_squared() { return 1; }\n'
    assert what not in compile_library(project, source)
    found = compile_library(project, source, "-Wl,-z,execstack", "-Wl,-rpath,/opt/x")
    assert found[what].problem.endswith("asks for a stack that can be executed")


def test_symbols_that_are_nobodys_business(project: Path) -> None:
    source = (
        "int global_helper() { return 1; }\n"
        "inline int &shared() { static int one; return one; }\n"
        'extern "C" int relu_squared() { return shared() + global_helper(); }\n'
    )
    row = compile_library(project, source, "-fgnu-unique")["exports its C interface only"]
    assert "`_Z13global_helperv`" in row.problem and "(unique in the process)" in row.problem
    assert "`relu_squared`" not in row.problem, "a header declares it"


def test_a_source_path_in_the_library(project: Path) -> None:
    source = 'extern "C" const char *f() { return "/build/agent/src/kernel.cu"; }\n'
    row = compile_library(project, source)["no path of this machine"]
    assert "names `/build/agent/src/kernel.cu`" in row.problem


def test_without_the_tools_it_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    original = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] in ("elftools", "kernel_abi_check"):
            raise ImportError(f"No module named {name!r}")
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    row = failures(project)["the library keeps to the ABIs"]
    assert "not checked" in row.problem and "hfpatch[publish]" in row.todo


def test_the_symbols_are_those_that_nm_shows(built: Path) -> None:
    (path,) = variant(built).glob("*.so")
    out = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1] for line in out.splitlines() if line.split()[-2] in "Uw"}
    found = elf.read_library(path)
    assert {f"{n}@{v}" if v else n for n, v in found.undefined} == shown
    assert "libtorch_cpu.so" in found.needed and found.machine == 62 and found.paths == ()
    assert library.MANYLINUX == "manylinux_2_28"


def test_the_table_says_what_to_do() -> None:
    table = as_table([Row("project", "a"), Row("v", "b", "is wrong", "mend it", "unused")])
    line = next(line for line in table.splitlines() if "FAIL" in line)
    assert line.split() == ["FAIL", "b", "is", "wrong", "mend", "it"]
    assert table.endswith("2 checks, 1 failed")
