"""Names, files and packages that somebody else wrote: nothing of them becomes a path, a program or
trust that it may not be; and what is wrong is said with where it stands and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from packages import SILU, fresh, package
from server import Flip, HubServer, Status
from torch import nn

import hfpatch
from hfpatch.cli import main
from hfpatch.errors import KernelIntegrityError, KernelLoadError, KernelUntrustedError
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.hub.download import download, lock
from hfpatch.hub.inspection import inspect_hub, inspect_local
from hfpatch.hub.load import load
from hfpatch.hub.lock import LockFile
from hfpatch.kernels import sources
from hfpatch.report import Report

ROOT = Path(__file__).resolve().parents[2]
SPEC = "toy/kernel@v1"
DEADLY = "raise SystemExit('it was imported')\n"


def apply(**arguments: object) -> Report:
    arguments.setdefault("kernels", {"silu": SPEC})
    fresh()
    return hfpatch.apply(nn.Sequential(nn.SiLU()).requires_grad_(False), **arguments)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "@v1", "toy", "toy/", "/kernel", "toy/kernel@", "toy/kernel@v1\n",
        " toy/kernel@v1",
        "../kernel@v1", "toy/..@v1", "toy/../kernel@v1", "toy/a..b@v1", ".toy/kernel@v1",
        "toy/-kernel@v1", "to--y/kernel@v1", "toy/kernel@../../x", "toy/kernel@a/../b",
        "toy/kernel@/etc", "toy/kernel@.git", "toy/kernel@v1@v2", "toy\\kernel@v1",
        "tóy/kernel@v1", "toy/kernel@v1?x", "https://huggingface.co/toy/kernel",
    ],
)  # fmt: skip
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Hub kernel: expected `org/name@v1`"):
        HubSpec.parse(text, allow_branches=True)


@pytest.mark.parametrize(
    "ref", ["v", "v1.0", "v01", "v-1", "v9999999999", "V1", "v١", "1" * 39, "A" * 40, "main"]
)
def test_references_that_are_no_pins(ref: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (pinned )?Hub kernel"):
        HubSpec.parse(f"toy/kernel@{ref}")


def test_a_cached_reference_that_is_no_commit(toy: HubServer) -> None:
    """It would be a part of a path. What this user downloaded is known elsewhere; to another user
    the Hub says what the version is."""
    commit = HubSpec.parse(SPEC)
    assert apply().swaps
    (ref,) = Path(constants.HF_HUB_CACHE).glob("kernels--toy--kernel/refs/v1")
    for content in (b"../../../../evil", b""):
        ref.write_bytes(content)
        fresh()
        with toy.quiet():
            assert len(load(commit, HubOptions()).version.split(":")[0]) == 12
        shutil.rmtree(os.environ["HFPATCH_STATE"])
        fresh()
        assert len(load(commit, HubOptions()).version.split(":")[0]) == 12
        assert len(ref.read_text()) == 40, "it was asked for again"


# ------------------------------------------------------------------------------ trust


def test_a_lock_file_does_not_vouch_for_a_publisher(hub: HubServer, tmp_path: Path) -> None:
    """Nor does a config file that names one: no file makes foreign code run."""
    hub.put("toy/kernel", package(DEADLY))
    path = tmp_path / "hfpatch.lock"
    with pytest.raises(KernelUntrustedError):
        lock([HubSpec.parse(SPEC)], HubOptions(), path)
    lock([HubSpec.parse(SPEC)], HubOptions(trust_remote_code=("toy/kernel",)), path)
    (skip,) = apply(hub={"lockfile": path}).skips
    assert "`toy` is not a trusted publisher" in skip.reason
    (tmp_path / "hfpatch.toml").write_text(
        f'kernels = {{silu = "{SPEC}"}}\n[hub]\nlockfile = "hfpatch.lock"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFPATCH_CONFIG", str(tmp_path / "hfpatch.toml"))
        (skip,) = apply(kernels=None).skips
        assert "`toy` is not a trusted publisher" in skip.reason
        with pytest.raises(KernelUntrustedError):
            apply(kernels=None, strict=True)
        (skip,) = apply(kernels=None, hub={"trust_remote_code": ["toy/kernel"]}).skips
        assert "could not be imported" in skip.reason and "it was imported" in skip.reason


def test_a_pull_request_is_not_its_publishers(toy: HubServer) -> None:
    toy.put("toy/kernel", package(DEADLY), branch="refs/pr/1")
    kernels = {"silu": "toy/kernel@refs/pr/1"}
    (skip,) = apply(kernels=kernels, hub={"allow_branches": True}).skips
    assert "is a pull request, which is not its publisher's" in skip.reason


@pytest.mark.parametrize(
    "row",
    [
        {"commit": "../../../../evil"},
        {"commit": "/evil"},
        {"commit": "a" * 39},
        {"commit": None},
        {"kernel": "../evil@v1"},
        {"kernel": "toy/kernel@../v1"},
        {"kernel": 7},
        {"variants": "torch-cpu"},
    ],
)
def test_a_lock_file_is_no_path(row: dict[str, object], hub: HubServer, tmp_path: Path) -> None:
    good = {"kernel": SPEC, "commit": "a" * 40, "variants": {}}
    path = tmp_path / "hfpatch.lock"
    path.write_text(json.dumps({"format": 1, "kernels": [good | row]}))
    with hub.quiet():
        report = apply(hub={"lockfile": path, "trust_remote_code": True})
    assert "cannot be read" in report.skips[0].reason


def test_dependencies_that_are_not_pinned(toy: HubServer, tmp_path: Path) -> None:
    def depends(version: object) -> dict[str, bytes]:
        key = "version" if isinstance(version, int) else "revision"
        return package(**{"kernel-depends": [{"repo-id": "toy/base", key: version}]})

    toy.put("toy/base", package(name="base"), branch="main")
    toy.put("toy/kernel", depends("main"))
    (skip,) = apply().skips
    assert "it depends on `toy/base@main`, a branch" in skip.reason
    assert apply(hub={"allow_branches": True}).swaps
    path = tmp_path / "hfpatch.lock"
    assert set(lock([HubSpec.parse(SPEC)], HubOptions(), path).kernels) == {SPEC, "toy/base@main"}
    assert apply(hub={"lockfile": path}).swaps
    for i, hostile in enumerate(("../../../x", "", "a b"), 2):
        toy.put("toy/kernel", depends(hostile), branch=f"v{i}")
        (skip,) = apply(kernels={"silu": f"toy/kernel@v{i}"}).skips
        assert "could not be loaded" in skip.reason


def test_kernels_that_depend_on_each_other(toy: HubServer, tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        depends = {"kernel-depends": [{"repo-id": f"toy/{other}", "version": 1}]}
        toy.put(f"toy/{name}", package(name="toy", **depends))
    assert "Cyclic" in apply(kernels={"silu": "toy/a@v1"}).skips[0].reason
    with pytest.raises(KernelLoadError, match="`toy/a@v1` → `toy/b@v1` → `toy/a@v1`"):
        lock([HubSpec.parse("toy/a@v1")], HubOptions(), tmp_path / "hfpatch.lock")


def test_a_package_that_ends_the_process(toy: HubServer) -> None:
    toy.put("toy/kernel", package("import sys\nsys.exit(3)\n"))
    (skip,) = apply().skips
    assert "could not be imported" in skip.reason


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_attributes_that_raise(error: str, toy: HubServer) -> None:
    toy.put("toy/kernel", package(f"def __getattr__(name):\n    raise {error}('lazy ' + name)\n"))
    (skip,) = apply().skips
    assert skip.kind == "unavailable" and "lazy silu" in skip.reason


def test_our_own_name_is_no_passport(toy: HubServer) -> None:
    """Another version's function, or another project's by our name, also without `verify`."""
    toy.put("toy/kernel", package("def silu(out, x): pass\n", name="hfpatch-kernels"))
    for verify in (True, False):
        (skip,) = apply(verify=verify).skips
        assert skip.kind == "unavailable" and "expected `silu(x)`" in skip.reason


@pytest.mark.parametrize("value", ["nonsense", "toy/kernel=/nonexistent", "toy/kernel="])
def test_local_kernels_that_are_none(
    value: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", value)
    with hub.quiet():
        (skip,) = apply().skips
    assert f"with LOCAL_KERNELS='{value}', could not be loaded" in skip.reason


@pytest.mark.parametrize("name", ["torch", "json", "sys", "__main__", "hfpatch", "a.b", "", "x-y"])
def test_the_name_of_a_module_that_is_here(name: str, toy: HubServer) -> None:
    """`kernels` would put the package in its place, for the whole process."""
    before = sys.modules.get(name)
    toy.put("toy/kernel", package(DEADLY, id=name))
    (skip,) = apply().skips
    assert "which is a module's that is here already" in skip.reason
    with pytest.raises(KernelIntegrityError):
        apply(strict=True)
    assert sys.modules.get(name) is before


def test_architectures_by_kernels_own_rules() -> None:
    """Also names that nobody knows, which must neither raise nor refuse."""
    from kernels.archs import _supports_cuda_capability

    names = ["7.5", "8.0", "9.0", "9.0a", "10.0f", "12.1+PTX", "9.0a+PTX", "10.0f+PTX", "sm_90",
             "gfx942", "", "9", "x.y", "8.0 "]  # fmt: skip
    pairs = [(a, b) for a in names for b in names]
    for archs in [*((n,) for n in names), *pairs]:
        for found in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)):
            ours = sources.unsupported_capability(archs, found) is None
            assert ours == _supports_cuda_capability(list(archs), found), (archs, found)


# ------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/tree/", Status(401), "the token is missing or not accepted: `hf auth login`"),
        ("/tree/", Status(403), "the token may not read it"),
        ("/tree/", Status(500), "it is the Hub that failed"),
        ("/revision/", Status(403, "GatedRepo"), "its owner must let you in"),
        ("/revision/", Status(401, "RepoNotFound"), "there is no such kernel repository"),
        ("/resolve/.*metadata", Status(404, "EntryNotFound"), "a file that should be there is not"),
    ],
)
def test_what_the_hub_refuses(path: str, status: Status, reason: str, toy: HubServer) -> None:
    toy.fail("GET", path, status)
    toy.fail("HEAD", path, status)
    (skip,) = apply().skips
    assert reason in skip.reason and str(status.code) in skip.reason
    assert "\n" not in skip.reason and "developer.mozilla" not in skip.reason


def test_a_repository_without_builds(toy: HubServer) -> None:
    toy.put("toy/text", {"README.md": b"# text"})
    (skip,) = apply(kernels={"silu": "toy/text@v1"}).skips
    assert "has no `build` folder, so it is no published kernel" in skip.reason


def test_a_repository_is_asked_for_once(hub: HubServer) -> None:
    """And only where a module can be what it would serve: a LayerNorm is no RMS norm."""
    m = nn.Sequential(nn.LayerNorm(32), nn.SiLU(), nn.GELU()).requires_grad_(False)
    report = hfpatch.apply(m, kernels="toy/absent@v1")
    assert [s.kind for s in report.skips] == ["unavailable"] * 3
    assert len(report.notes) == 1 and len(hub.requests) == 1
    fresh()
    hfpatch.apply(m[:1], kernels=["hub", "local", "torch"])
    asked = "\n".join(hub.requests)
    assert "kernels-community/layer-norm" in asked
    assert "kernels-community/liger-kernels" not in asked


def test_a_fused_block_passes_other_projects_over(hub: HubServer) -> None:
    """`hub` first must not cost a model its fused blocks, nor downloads that they cannot use."""
    from diffusers import LTXVideoTransformer3DModel

    hub.trust("kernels-community")
    model = LTXVideoTransformer3DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        caption_channels=16,
    ).eval()  # fmt: skip
    expected = hfpatch.plan(model).candidates
    assert [c.state for c in expected] == ["at its first call"]
    fresh()
    report = hfpatch.plan(model, kernels=["hub", "local", "torch"])
    assert report.candidates == expected
    assert "rotary" not in "\n".join(hub.requests)


def test_the_place_of_a_wrong_choice_is_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HFPATCH_CONFIG")
    file = tmp_path / "hfpatch.toml"
    for text in (
        "kernels = 5", "hub = 1", "kernels = 'toy/kernel@main'", "[kernels]\nrmsnorm = 'local'",
        "[kernels]\nsilu = 1", "[hub]\nrepos = ['toy/kernel']", "[hub]\nrepos = [1]",
        "[hub]\nlockfile = 5",
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=r"hfpatch\.toml`: "):
            apply(kernels=None)
    file.unlink()
    (tmp_path / "pyproject.toml").write_text("[tool]\nhfpatch = 1")
    with pytest.raises(ValueError, match=r"pyproject\.toml`: .* must be a table"):
        apply(kernels=None)
    (tmp_path / "pyproject.toml").unlink()
    for text in ("silu=foo", "nope=local", "silu=", "silu=local;x", "locla", "toy/kernel@main"):
        monkeypatch.setenv("HFPATCH_KERNELS", text)
        with pytest.raises(ValueError, match=r"^HFPATCH_KERNELS: "):
            apply(kernels=None)
    monkeypatch.setenv("HFPATCH_KERNELS", "none")
    assert [s.kind for s in apply(kernels=None).skips] == ["off"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": "toy/kernel"}, "must be True, False or a sequence"),
        ({"trust_remote_code": 5}, "must be True, False or a sequence"),
        ({"repos": 5}, "must be a sequence of repositories"),
        ({"repos": ["toy/kernel"]}, "is not a pinned Hub kernel"),
        ({"repos": ["toy"]}, "is not a Hub kernel"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str, hub: HubServer) -> None:
    with hub.quiet(), pytest.raises((TypeError, ValueError), match=message):
        apply(hub=options)
    with pytest.raises((TypeError, ValueError), match=message):
        HubOptions(**options)  # type: ignore[arg-type]
    assert HubOptions.of({"repos": ["toy/kernel@x"], "allow_branches": True}).repos


# ------------------------------------------------------------------------------ the commands


def test_inspect_of_packages_that_are_odd(
    toy: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Circles, subpackages, control characters, files that are no Python."""
    many = [f"m{i}" for i in range(14)]
    circles = {
        f"{name}.py": "".join(f"from .{other} import f{other}\n" for other in many)
        + f"def f{name}(x, {name}): pass\n"
        for name in many
    }
    source = "from .sub.deep import silu\nfrom .m3 import fm7 as renamed\nfrom .m0 import absent\n"
    files = {**circles, "sub/__init__.py": "", "sub/deep.py": "from .deeper import silu\n",
             "sub/deeper.py": "def silu(x): pass\n"}  # fmt: skip
    toy.put("toy/kernel", package(source, more=files, license="\x1b[31mred"))
    found = inspect_hub("toy/kernel")
    assert found.functions == {"silu": ("x",), "renamed": ("x", "m7")}
    assert [s.op for s in found.ops] == ["silu"]
    assert main(["inspect", "toy/kernel"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    for i, bad in enumerate(("def f(:\n", "x = " + "(" * 5000, "\0"), 2):
        toy.put("toy/kernel", package(bad), branch=f"v{i}")
        with pytest.raises(KernelLoadError, match="could not be inspected"):
            inspect_hub(HubSpec.parse(f"toy/kernel@v{i}"))
        folder = tmp_path / str(i) / "build" / "torch-cpu"
        folder.mkdir(parents=True)
        for path, data in package(bad).items():
            (folder / Path(path).name).write_bytes(data)
        with pytest.raises(KernelLoadError, match="could not be inspected"):
            inspect_local(tmp_path / str(i))
    assert main(["inspect", ""]) == 2


def test_inspect_without_a_network(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.put("toy/kernel", package(), branch="v2")
    for version in ("v1", "v2"):
        download(HubSpec.parse(f"toy/kernel@{version}"), HubOptions())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with toy.quiet():
        assert inspect_hub("toy/kernel").source == "toy/kernel@v2"
        assert inspect_hub(HubSpec.parse(SPEC)).functions == {"silu": ("x",)}
        for absent in ("toy/absent", HubSpec.parse("toy/kernel@v3")):
            with pytest.raises(KernelLoadError, match="While online: `hfpatch download"):
                inspect_hub(absent)


def test_download_goes_on_after_a_failure(
    toy: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.put("toy/none", package(DEADLY, variant="torch-xpu"))
    assert main(["lock", "toy/absent@v1"]) == main(["inspect", "toy/absent@v1"]) == 1
    assert capsys.readouterr().err.startswith("hfpatch lock: `toy/absent@v1`")
    assert main(["lock", "toy/none@v1", SPEC, "toy/none@v1"]) == 0
    assert "toy/none@v1: " in (out := capsys.readouterr()).out and "1 variant\n" in out.out
    assert main(["download"]) == 1
    out = capsys.readouterr()
    assert f"{SPEC}: " in out.out and "`toy/none@v1` has no build for this system" in out.err
    assert main(["download", "--all-variants"]) == 0
    assert "torch-xpu; none for this system" in capsys.readouterr().out
    assert list(Path(constants.HF_HUB_CACHE).glob("kernels--toy--none/snapshots/*/build/*/*.py"))


def test_all_variants_are_verified(toy: HubServer) -> None:
    toy.put("toy/base", package(name="base") | package(name="base", variant="torch-cuda"))
    depends = {"kernel-depends": [{"repo-id": "toy/base", "version": 1}]}
    toy.put("toy/kernel", package(**depends) | package(variant="torch-cuda", **depends))
    spec = HubSpec.parse(SPEC)
    assert download(spec, HubOptions(), all_variants=True).variants == ("torch-cpu", "torch-cuda")
    cache = Path(constants.HF_HUB_CACHE)
    assert list(cache.glob("kernels--toy--base/snapshots/*/build/torch-cuda/__init__.py"))
    toy.put("toy/kernel", package(SILU + "\n") | package(SILU + "\n#", variant="torch-cuda"))
    toy.fail("GET", "/resolve/.*torch-cuda/__init__", Flip(0))
    with pytest.raises(KernelIntegrityError, match=r"`toy/kernel@v1`: `torch-cuda` is not what"):
        download(spec, HubOptions(), all_variants=True)
    with pytest.raises(KernelIntegrityError, match=r"`toy/kernel@v1`: `torch-cpu` is not signed"):
        download(spec, HubOptions(require_signed=True), all_variants=True)


def test_only_a_whole_download_moves_a_version(
    toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a look at the new one, not a lock, not a download that broke off, nor a Hub that is away:
    the cached commit would be taken for what was asked, or lost while the Hub is not there."""
    spec, trusted = HubSpec.parse(SPEC), HubOptions(trust_remote_code=True)
    old = download(spec, HubOptions()).commit
    new = toy.put("toy/kernel", package(SILU + "\n# new\n"))

    def used() -> str:
        with toy.quiet():
            (swap,) = apply().swaps
        return swap.version.split(":")[0]

    assert inspect_hub(spec).commit == new and used() == old[:12]
    locked = lock([spec], HubOptions(), tmp_path / "hfpatch.lock")
    assert locked.of(spec).commit == new  # as it is on the Hub, not as it was downloaded
    assert used() == old[:12]
    new = toy.put("toy/kernel", package(SILU + "\n# newer\n"))
    toy.fail("GET", "/resolve/.*__init__.py", Status(403))
    with pytest.raises(KernelLoadError, match="403"):
        download(spec, HubOptions())
    assert used() == old[:12]
    toy.heal()
    toy.fail("GET", "/revision/v1", Status(403))
    with pytest.raises(KernelLoadError, match="403"):
        download(spec, trusted)
    toy.heal()
    with monkeypatch.context() as away:
        away.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(KernelLoadError, match="Connection refused"):
            download(spec, trusted)
    assert used() == old[:12]
    assert download(spec, HubOptions()).previous == old and used() == new[:12]
    for odd in (Path("refs/v1.tmp"), Path("refs/heads")):
        assert not list(Path(constants.HF_HUB_CACHE).glob(f"kernels--toy--kernel/{odd}*"))


def test_refreshing_needs_a_network(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = HubSpec.parse(SPEC)
    download(spec, HubOptions())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with toy.quiet(), pytest.raises(KernelLoadError, match="cannot be asked while HF_HUB_OFFLINE"):
        download(spec, HubOptions())
    assert apply().swaps


def test_the_lock_of_kernels_keeps_what_others_locked(toy: HubServer, tmp_path: Path) -> None:
    """`kernels.lock` may be `kernels lock`'s already; and `kernels` loads what is in it."""
    path, theirs = tmp_path / "hfpatch.lock", tmp_path / "kernels.lock"
    other = {"dependency": {"repo-id": "a/b", "version": 3}, "lock": {"commit": "c" * 40}}
    theirs.write_text(json.dumps([other]))
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    rows = json.loads(theirs.read_text())
    assert other in rows and len(rows) == 2
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    assert len(json.loads(theirs.read_text())) == 2
    download(HubSpec.parse(SPEC), HubOptions())
    code = (
        "import kernels, pathlib\n"
        "k = kernels.load_kernel('toy/kernel', lockfile=pathlib.Path('kernels.lock'))\n"
        "print(k.silu.__name__)\n"
    )
    env = toy.env(tmp_path / "home", HF_HUB_CACHE=constants.HF_HUB_CACHE)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "silu\n", done.stderr
    before = path.read_text()
    theirs.write_text("nonsense")
    with pytest.raises(KernelLoadError, match="is no lock file of `kernels`"):
        lock([HubSpec.parse(SPEC)], HubOptions(), path)
    assert path.read_text() == before and LockFile.read(path).kernels
    with pytest.raises(KernelLoadError, match="cannot be written"):
        lock([HubSpec.parse(SPEC)], HubOptions(), Path("/proc/hfpatch.lock"))
