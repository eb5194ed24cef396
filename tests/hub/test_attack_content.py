"""Attacks by what a repository holds: metadata, files, libraries, and what an import does."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import math
import os
import random
import subprocess
import sys
import time
import unicodedata
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attack import EVIL, SPEC, evil, loads, ran, sampled, snapshot, withstood
from huggingface_hub import constants
from packages import SILU, package
from server import HubServer
from torch import nn

import hfpatch
from hfpatch.errors import KernelIntegrityError
from hfpatch.hub import HubOptions, HubSpec, sealed
from hfpatch.hub.elf import examine
from hfpatch.hub.load import load
from hfpatch.hub.resolver import PinnedResolver
from hfpatch.kernels.sources import local_package

METADATA = "build/torch-cpu/metadata.json"


def written(files: dict[str, bytes], text: str | bytes) -> dict[str, bytes]:
    """A package with other metadata."""
    return files | {METADATA: text.encode() if isinstance(text, str) else text}


def plain(**more: object) -> str:
    """Metadata of a package, as text."""
    return package(**more)[METADATA].decode()  # type: ignore[arg-type]


def digest_of(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


# ------------------------------------------------------------------------------ metadata


def twice(key: str, first: str, second: str) -> str:
    text = plain()
    return text[:-1] + f', "{key}": {first}' + f', "{key}": {second}' + "}"


@pytest.mark.parametrize(
    "text",
    sampled(
        [
            plain()[:-1] + ', "id": "other"}',
            plain()[:-1] + ', "name": "other"}',
            twice("zzz", "1", "2"),
            plain()[:-1] + ', "zzz": {"a": 1, "a": 2}}',
            plain()[:-1] + ', "zzz": NaN}',
            plain()[:-1] + ', "zzz": -Infinity}',
            plain()[:-1] + ', "zzz": 1e999}',
            plain()[:-1] + ', "zzz": ' + "9" * 5000 + "}",
            plain(version=10**30),
            plain(version=-1),
            plain(version=1.5),
            plain(version="1"),
            plain()[:-1] + ', "zzz": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "[" * 100_000,
            "{" * 100_000,
            plain()[:-1] + ', "zzz": "' + "x" * (5 << 20) + '"}',
            plain(name="../../etc"),
            plain(name="Toy"),
            plain(name="t\u043ey"),
            plain(name="a\nb"),
            plain(**{"kernel-depends": [{"repo-id": "../..", "version": 1}]}),
            plain(**{"kernel-depends": [{"repo-id": "toy/kernel\u0000", "version": 1}]}),
            plain(**{"kernel-depends": [{"repo-id": "toy/kernel", "revision": "../x"}]}),
            plain(**{"kernel-depends": [{"repo-id": "a" * 70_000 + "/b", "version": 1}]}),
            plain(**{"python-depends": ["os; import evil"]}),
            plain(digest=False)[:-1] + ', "digest": {"algorithm": "md5", "files": {}}}',
            plain(digest=False)[:-1] + ', "digest": {"algorithm": "sha256", "files": {}}}',
            plain(digest=False)[:-1] + ', "digest": {"algorithm": "sha256", "files": {"x": 1}}}',
        ],
        8,
    ),
    ids=range(28),
)
def test_metadata(text: str, toy: HubServer) -> None:
    toy.put("toy/kernel", written(evil(), text))
    withstood()


@pytest.mark.parametrize(
    "key", sampled(["../../../evil.py", "/etc/passwd", "a//b", "./__init__.py", ""], 2)
)
def test_a_digest_of_a_path_that_is_none(key: str, toy: HubServer) -> None:
    files = evil()
    data = json.loads(files[METADATA])
    data["digest"]["files"][key] = digest_of(b"")
    toy.put("toy/kernel", written(files, json.dumps(data)))
    withstood(SPEC, "is not what was published")


def test_a_digest_that_is_said_twice(toy: HubServer) -> None:
    """Two parsers would take two of them."""
    files = evil()
    good = f'"__init__.py": "{digest_of(SILU.encode())}", '
    text = files[METADATA].decode().replace('"files": {', '"files": {' + good)
    toy.put("toy/kernel", written(files, text))
    withstood(SPEC, "stands there twice")


@pytest.mark.parametrize(
    "name",
    sampled(["torch", "json", "sys", "hfpatch", "antigravity", "t\u043erch", "\uff54orch", "a.b",
             "__main__", "", "x" * 10 + "\u200b", "hfpatch.proof.verify"], 4),
)  # fmt: skip
def test_an_id_that_is_a_modules_or_looks_like_it(name: str, toy: HubServer) -> None:
    toy.put("toy/kernel", evil(id=name))
    before = dict(sys.modules)
    withstood(SPEC, "nothing was imported")
    assert all(sys.modules.get(n) is m for n, m in before.items())


def test_an_id_that_another_kernel_has(toy: HubServer) -> None:
    """`kernels` would put the later one in the place of the earlier."""
    own = hfpatch.kernels.sources.local_package().module
    toy.put("toy/kernel", package(id=own.__name__))
    toy.put("toy/other", package(SILU + "\n", id=own.__name__))
    loads()
    loads("toy/other@v1")
    assert sys.modules[own.__name__] is own


def test_our_own_name_is_no_passport(toy: HubServer) -> None:
    """Not compared under `verify=False` were our own build alone, which no name makes."""
    wrong = SILU.replace("silu(x)\n\n", "silu(x) * 1.5\n\n")
    toy.put("toy/kernel", package(wrong, name="hfpatch-kernels"))
    withstood(SPEC, "is wrong", verify=False)
    toy.put("toy/right", package(name="hfpatch-kernels"))
    m = nn.Sequential(nn.SiLU()).requires_grad_(False)
    report = hfpatch.apply(m, kernels={"silu": "toy/right@v1"}, verify=False)
    assert report.swaps and "is not the build that this installation has" in report.notes[0]


# ------------------------------------------------------------------------------ files


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    "name",
    sampled(["helper.pyc", "__pycache__/__init__.cpython-311.pyc", "sub/x.PYC", "a.pyo",
             "__pycache__/data.txt"], 2),
)  # fmt: skip
def test_bytecode(name: str, listed: bool, toy: HubServer) -> None:
    files = evil(more={name: "x"} if listed else None, digest=listed)
    toy.put("toy/kernel", files | {f"build/torch-cpu/{name}": b"x"})
    withstood(SPEC, "is bytecode")


@pytest.mark.parametrize(
    "names",
    sampled([
        ["Helper.py", "helper.py"], ["__INIT__.py"], ["caf\u00e9.py", "cafe\u0301.py"],
        ["a\x1b[2Jb.py"], ["a\\b.py"], ["a\u202ey.py"], [" a.py"], ["a\n.py"], ["x" * 260],
    ], 3),
    ids=range(9),
)  # fmt: skip
def test_file_names(names: list[str], toy: HubServer) -> None:
    if any(unicodedata.normalize("NFC", n) != n for n in names):
        assert len({unicodedata.normalize("NFC", n) for n in names}) == 1
    toy.put("toy/kernel", evil(more=dict.fromkeys(names, "x = 1\n")))
    withstood(SPEC)


def test_thousands_of_files(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("endpoints.PAGE", 1000)
    toy.put("toy/kernel", evil(more={f"f{i}.txt": "" for i in range(4200)}))
    withstood(SPEC, "more than 4096 files")
    assert not toy.seen("GET", "/resolve/")


def test_a_module_of_another_name_beside_the_source(toy: HubServer) -> None:
    """`torch.py` in a kernel is the kernel's own, and shadows nothing."""
    side = {"torch.py": EVIL, "json.py": EVIL, "sitecustomize.py": EVIL, "x.pth": "import os\n"}
    toy.put("toy/kernel", package("import json\n" + SILU, more=side))
    loads()
    assert not ran() and not [p for p in sys.path if "hfpatch-" in p]


def test_dependencies_are_visited_once(toy: HubServer) -> None:
    """A chain of diamonds: 2^30 ways lead down."""
    count = 30
    for i in range(count):
        names = [f"k{i + 1}a", f"k{i + 1}b"] if i < count - 1 else []
        depends = [{"repo-id": f"toy/{n}", "version": 1} for n in names]
        for side in "ab":
            toy.put(f"toy/k{i}{side}", package(**{"kernel-depends": depends}))
    before = time.monotonic()
    loads("toy/k0a@v1")
    assert time.monotonic() - before < 60


def test_each_dependency_is_visited_once(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of diamonds below each other, and of one that is named by all that stand above it."""
    depth, visits = 4, Counter[str]()
    resolve = PinnedResolver.resolve

    def counted(self: PinnedResolver, api: Any, spec: Any, **more: Any) -> Any:
        visits[spec.repo] += 1
        return resolve(self, api, spec, **more)

    monkeypatch.setattr(PinnedResolver, "resolve", counted)
    for i in range(depth):
        names = [f"d{i + 1}a", f"d{i + 1}b"] if i < depth - 1 else []
        depends = [{"repo-id": f"toy/{n}", "version": 1} for n in (*names, "below")]
        for side in "ab":
            toy.put(f"toy/d{i}{side}", package(**{"kernel-depends": depends}))
    toy.put("toy/below", package())
    loads("toy/d0a@v1")
    below = [f"toy/d{i}{side}" for i in range(1, depth) for side in "ab"]
    assert visits == dict.fromkeys(["toy/d0a", *below, "toy/below"], 1)


def test_dependencies_without_end(toy: HubServer) -> None:
    for i in range(80):
        depends = {"kernel-depends": [{"repo-id": f"toy/k{i + 1}", "version": 1}]}
        toy.put(f"toy/k{i}", evil(**depends))
    withstood("toy/k0@v1", "more than 64 kernels")


# ------------------------------------------------------------------------------ libraries

CODE = "int answer(void) { return 42; }\n"
OUTSIDE = """
extern void abort(void);
__attribute__((section(".init_array"), used)) static void (*first)(void) = abort;
"""
#: An address that is only known once it is loaded, in the midst of the code.
WRITTEN_TO = CODE + '__asm__(".text\\n.globl itself\\nitself: .quad itself\\n");\n'


def library(folder: Path, code: str, *flags: str) -> bytes:
    (folder / "lib.c").write_text(code)
    command = ["gcc", "-shared", "-fPIC", "-o", "lib.so", "lib.c", *flags]
    subprocess.run(command, check=True, cwd=folder, capture_output=True)
    return (folder / "lib.so").read_bytes()


@pytest.mark.parametrize(
    ("code", "flags", "said"),
    [
        (CODE, ("-Wl,-rpath,/tmp",), "(RUNPATH)"),
        (CODE, ("-Wl,-rpath,$ORIGIN/../..",), "(RUNPATH)"),
        (CODE, ("-Wl,-rpath,/tmp", "-Wl,--disable-new-dtags"), "(RPATH)"),
        (CODE, ("-Wl,-z,execstack",), "a stack that can be executed"),
        (CODE, ("-Wl,--auxiliary,evil.so",), "(AUXILIARY)"),
        (CODE, ("-Wl,--filter,evil.so",), "(FILTER)"),
        (CODE, ("-Wl,--audit,evil.so",), "(AUDIT)"),
        (CODE, ("-Wl,--depaudit,evil.so",), "(DEPAUDIT)"),
        (CODE, ("-Wl,-init,0x10",), ""),
        (CODE, ("-Wl,--omagic",), ""),
        (OUTSIDE, (), "a function that is not its own"),
        (WRITTEN_TO, ("-Wl,-z,notext",), "(TEXTREL)"),
    ],
)
def test_what_a_library_asks_of_its_loader(
    code: str, flags: tuple[str, ...], said: str, toy: HubServer, tmp_path: Path
) -> None:
    try:
        data = library(tmp_path, code, *flags)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"this linker makes no such library: {e.stderr[-80:]!r}")
    with (tmp_path / "lib.so").open("rb") as file:
        problems = "; ".join(examine(file).problems)
    if not problems and not said:
        pytest.skip("this linker ignores the flag")
    assert said in problems
    toy.put("toy/kernel", with_library(data))
    withstood(SPEC, "lib.so")


def with_library(data: bytes, name: str = "lib.so") -> dict[str, bytes]:
    """A package that holds a library, of the digest too."""
    files = evil()
    metadata = json.loads(files[METADATA])
    metadata["digest"]["files"][name] = digest_of(data)
    return written(files, json.dumps(metadata)) | {f"build/torch-cpu/{name}": data}


def test_a_library_that_is_taken_from_a_path(toy: HubServer, tmp_path: Path) -> None:
    library(tmp_path, CODE)
    (tmp_path / "lib.so").rename(tmp_path / "other.so")
    data = library(tmp_path, "int answer(void); int more(void) { return answer(); }", "./other.so")
    toy.put("toy/kernel", with_library(data, "lib.txt"))  # whatever it is called
    withstood(SPEC, "loads the file")


@pytest.mark.parametrize("name", ["$LIB.so", "${LIB}x.so", "$ORIGINx.so", "$PLATFORM"])
def test_a_library_that_is_taken_from_a_path_without_a_slash(
    name: str, toy: HubServer, tmp_path: Path
) -> None:
    """`$LIB.so` is `lib/x86_64-linux-gnu.so` to the loader: a file of the working directory."""
    library(tmp_path, CODE, f"-Wl,-soname,{name}", "-nostdlib")
    (tmp_path / "lib.so").rename(tmp_path / "other.so")
    code = "int answer(void); int more(void) { return answer(); }"
    data = library(tmp_path, code, "./other.so", "-nostdlib")
    assert name.encode() in data
    toy.put("toy/kernel", with_library(data))
    withstood(SPEC, "loads the file")


def test_a_library_is_examined_as_it_was_copied(
    toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's is exchanged for a harmless one once its hash is known."""
    good = library(tmp_path, CODE)
    bad = library(tmp_path, CODE, "-Wl,-rpath,/tmp")
    toy.put("toy/kernel", with_library(bad))
    original = sealed._Found._look

    def look(found: sealed._Found, path: str, file: Any) -> None:
        if path == "lib.so":
            (snapshot() / path).resolve().write_bytes(good)
        original(found, path, file)

    monkeypatch.setattr(sealed._Found, "_look", look)
    with pytest.raises(KernelIntegrityError, match=r"(?s)lib\.so.*RUNPATH"):
        load(HubSpec.parse(SPEC), HubOptions())
    assert not ran()


@pytest.mark.parametrize("size", sampled([0, 3, 4, 63, 64, 400, 3000], 3))
def test_a_library_that_is_cut_off(size: int, toy: HubServer, tmp_path: Path) -> None:
    toy.put("toy/kernel", with_library(library(tmp_path, CODE)[:size]))
    withstood(SPEC, "cannot be loaded")


def test_a_library_that_asks_for_nothing(tmp_path: Path) -> None:
    library(tmp_path, CODE + "__attribute__((constructor)) static void mine(void) {}\n")
    with (tmp_path / "lib.so").open("rb") as file:
        found = examine(file)
    assert found.problems == () and found.constructors >= 2


# ------------------------------------------------------------------------------ the import


@pytest.mark.parametrize(
    ("code", "said"),
    sampled(
        [
            ("torch.nn.functional.silu = lambda x, inplace=False: x", "torch.nn.functional.silu"),
            ("torch.nn.Module.__call__ = lambda self, x: x", "Module.__call__"),
            ("torch.nn.SiLU.forward = lambda self, x: x", "SiLU.forward"),
            ("torch.Tensor.double = lambda self: self", "Tensor.double"),
            ("del torch.nn.functional.gelu", "torch.nn.functional.gelu"),
            (
                "import hfpatch.proof.verify as v; v.verify_values = lambda *a: (0, 0)",
                "verify_values",
            ),
            ("import hfpatch.proof.trial as t; t.LIMITS = None", "LIMITS"),
            (
                "from hfpatch.hub.trust import Trust; Trust.require = lambda *a, **k: False",
                "require",
            ),
            ("import hfpatch.hub.options as o; o.HubOptions.trusts = lambda *a: True", "trusts"),
            ("import builtins; builtins.len = lambda x: 0", "builtins.len"),
            ("import hashlib; hashlib.sha256 = None", "hashlib.sha256"),
            ("import sys; sys.modules['hfpatch.report'] = torch", "hfpatch.report"),
            ("import sys; sys.modules['hfpatch.later'] = type(sys)('x')", "hfpatch.later"),
            ("import sys; del sys.modules['hfpatch.proof.verify']", "hfpatch.proof.verify"),
            ("import sys, os; sys.path.insert(0, os.path.dirname(__file__))", "sys.path"),
            ("torch.set_default_dtype(torch.float64)", "the default dtype"),
            ("torch.set_grad_enabled(False)", "the grad mode"),
        ],
        6,
    ),
)
def test_what_an_import_changes(code: str, said: str, toy: HubServer) -> None:
    """It is taken back, and the package is not used."""
    silu, forward, verify = nn.functional.silu, nn.SiLU.forward, sys.modules["hfpatch.proof.verify"]
    dtype, path = torch.get_default_dtype(), list(sys.path)
    toy.put("toy/kernel", package(f"import torch\n{code}\n" + SILU))
    withstood(SPEC, said)
    assert nn.functional.silu is silu and nn.SiLU.forward is forward
    assert sys.modules["hfpatch.proof.verify"] is verify and "hfpatch.later" not in sys.modules
    assert torch.get_default_dtype() == dtype and torch.is_grad_enabled() and sys.path == path


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "L = torch.library.Library('aten', 'IMPL'); L.impl('silu', lambda x: x * 0, 'CPU')",
            "aten/silu/CPU",
        ),
        (
            "torch.nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 0)",
            "hooks on all modules",
        ),
        ("torch.use_deterministic_algorithms(True)", "the deterministic switch"),
        ("import os; os.chdir('/')", "the working directory"),
    ],
)
def test_what_an_import_puts_in_the_place_of_others(code: str, said: str, toy: HubServer) -> None:
    """An operator of PyTorch's, by which formula and original would lie alike, and settings."""
    where, x = os.getcwd(), torch.randn(5)
    expected = nn.SiLU()(x)
    toy.put("toy/kernel", package(f"import torch\n{code}\n" + SILU))
    withstood(SPEC, said)
    assert torch.equal(nn.SiLU()(x), expected) and os.getcwd() == where
    assert not torch.are_deterministic_algorithms_enabled()


MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        return f(*args, **(kwargs or {}))
Mode().__enter__()
"""
FINDER = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        # by functions of torch's own, which are not those that were there
        ("torch.nn.functional.silu = torch.nn.functional.relu", "torch.nn.functional.silu"),
        ("torch.nn.SiLU.forward = torch.nn.ReLU.forward", "SiLU.forward"),
        ("torch.nn.SiLU.__call__ = torch.nn.ReLU.forward", "SiLU.__call__"),
        ("torch.Tensor.__rsub__ = lambda a, b: a", "Tensor.__rsub__"),
        # in place, in the same function
        (
            "f = torch.nn.functional.softmax\nf.__code__ = (lambda input, dim=None, "
            "_stacklevel=3, dtype=None: input).__code__",
            "torch.nn.functional.softmax",
        ),
        ("torch.nn.functional.softmax.__defaults__ = (0, 3, None)", "softmax"),
        ("torch.special.expit = lambda x: x", "torch.special.expit"),
        ("import math; math.sqrt = lambda x: 0.0", "math.sqrt"),
        ("from huggingface_hub import HfApi as A; A.whoami = None", "HfApi.whoami"),
        (FINDER, "sys.meta_path"),
        ("torch.autocast('cpu').__enter__()", "autocast on cpu"),
        (MODE, "modes that see operators"),
    ],
    ids=range(12),
)
def test_what_an_import_changes_by_other_ways(code: str, said: str, toy: HubServer) -> None:
    x = torch.randn(5)
    sqrt, F = math.sqrt, nn.functional
    expected = nn.SiLU()(x), F.silu(x), F.softmax(x[None]), 1 - x, torch.special.expit(x)
    toy.put("toy/kernel", package(f"import torch\n{code}\n" + SILU))
    withstood(SPEC, said)
    found = nn.SiLU()(x), F.silu(x), F.softmax(x[None]), 1 - x, torch.special.expit(x)
    assert all(map(torch.equal, found, expected)) and math.sqrt is sqrt
    assert not torch.is_autocast_enabled("cpu") and not torch._C._len_torch_dispatch_stack()
    assert "Finder" not in [getattr(f, "__name__", "") for f in sys.meta_path]


def test_autocast_that_an_import_enters(toy: HubServer) -> None:
    """Its cache of weights is cleared where the last one is left, and this one never is."""
    code = "torch.autocast('cpu').__enter__()"
    toy.put("toy/kernel", package(f"import torch\n{code}\n" + SILU))
    withstood(SPEC, "autocast on cpu")
    layer, x, found = nn.Linear(4, 4), torch.ones(2, 4), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer(x).float())
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
    assert found[0].any() and not found[1].any()


def test_an_operator_of_another_library_that_an_import_replaces(toy: HubServer) -> None:
    """Such as one of this project's local build, by which all models would be served."""
    name, x = local_package().module.__name__, torch.randn(5)
    code = f"L = torch.library.Library('{name}', 'IMPL'); L.impl('silu', lambda x: x * 0, 'CPU')"
    toy.put("toy/kernel", package(f"import torch\n{code}\n" + SILU))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of the replacement
        withstood(SPEC, f"{name}/silu/CPU")
    torch.testing.assert_close(getattr(torch.ops, name).silu(x), nn.functional.silu(x))


def test_a_constant_that_is_filled_at_first_use(
    toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub's client is, and what transformers looks up once."""
    monkeypatch.setattr(constants, "FILLED_LATER", None, raising=False)
    code = "from huggingface_hub import constants\nconstants.FILLED_LATER = 1\n"
    toy.put("toy/kernel", package(f"import torch\n{code}" + SILU))
    loads()


def test_what_torch_wraps_as_it_compiles_is_its_own(toy: HubServer) -> None:
    """Dynamo wraps `nn.Module.__init__` at its first compilation in a process."""
    code = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))"
    toy.put("toy/kernel", package(f"import torch\n{code}\n" + SILU))
    loads()


@pytest.fixture
def renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of somebody else's that is imported."""
    (tmp_path / "renewed").mkdir()
    for name in ("__init__", "later"):
        (tmp_path / f"renewed/{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "renewed", raising=False)
    monkeypatch.delitem(sys.modules, "renewed.later", raising=False)
    return importlib.import_module("renewed")


def test_a_module_that_is_imported_again(toy: HubServer, renewed: ModuleType) -> None:
    """As `transformers` does with itself, and setuptools with `backports`: no harm, and the one
    that was there stays."""
    code = "import sys; del sys.modules['renewed']; import renewed.later; renewed.later.VALUE += 1"
    toy.put("toy/kernel", package(f"{code}\n" + SILU))
    loads()
    assert sys.modules["renewed"] is renewed and renewed.later.VALUE == 2


@pytest.mark.parametrize(
    "code",
    [
        "m.__file__, m.VALUE = before.__file__, 2",
        "m.__spec__ = type(before.__spec__)('renewed', None, origin=before.__spec__.origin)",
        "m.__spec__ = type('Spec', (), dict(vars(before.__spec__)))()",
    ],
)
def test_a_module_that_looks_imported_again(code: str, toy: HubServer, renewed: ModuleType) -> None:
    code = f"before = sys.modules['renewed']; m = type(sys)('renewed'); {code}"
    code = f"import sys; {code}; sys.modules['renewed'] = m"
    toy.put("toy/kernel", package(f"{code}\n" + SILU))
    withstood(SPEC, "`renewed`")
    assert sys.modules["renewed"] is renewed and renewed.VALUE == 1


def test_random_numbers_are_as_they_were(toy: HubServer) -> None:
    toy.put("toy/kernel", package("import torch\ntorch.manual_seed(0)\n" + SILU))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    loads()
    torch.manual_seed(7)
    assert torch.equal(before, torch.get_rng_state())


def test_all_random_numbers_are_as_they_were(toy: HubServer) -> None:
    code = "import random, numpy, torch\nrandom.seed(0)\nnumpy.random.seed(0)\ntorch.rand(3)\n"
    toy.put("toy/kernel", package(code + SILU))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    load(HubSpec.parse(SPEC), HubOptions())
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_a_failed_import_leaves_no_module(toy: HubServer) -> None:
    files = package("from . import part\nraise RuntimeError('no')\n", more={"part.py": "x = 1\n"})
    toy.put("toy/kernel", files)
    before = {n for n in sys.modules if n.startswith("_hfpatch_hub_")}
    withstood(SPEC, "could not be imported")
    assert {n for n in sys.modules if n.startswith("_hfpatch_hub_")} == before


@pytest.mark.parametrize("right", [True, False])
def test_digests_of_another_kind(right: bool, toy: HubServer) -> None:
    """sha512 is compared as sha256 is."""
    files = evil()
    data = json.loads(files[METADATA])
    code = files["build/torch-cpu/__init__.py"] if right else SILU.encode()
    digest = base64.b64encode(hashlib.sha512(code).digest()).decode()
    data["digest"] = {"algorithm": "sha512", "files": {"__init__.py": digest}}
    toy.put("toy/kernel", written(files, json.dumps(data)))
    if right:
        loads()
        assert ran()
    else:
        withstood(SPEC, "its sha512 is")
