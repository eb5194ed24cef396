"""What a release publishes (wheels, sources, digests, signatures), and kernels out of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hfpatch
from hfpatch import cli
from hfpatch.errors import KernelIntegrityError, KernelLoadError
from hfpatch.kernel_build import tag
from hfpatch.kernels import builds, setup_kernels, sources

ROOT = Path(__file__).resolve().parents[2]
URL = "https://example.invalid/{file}"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(ROOT / "release"))
    try:
        import release

        return release
    finally:
        sys.path.remove(str(ROOT / "release"))


@pytest.fixture(scope="module")
def released(
    script: ModuleType, kernels_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The CPU's wheel, the pure wheel that pins it, and the sdist; as the script makes them, except
    for the tool `build`, which need not be installed."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    script.export(tree, dirty=True)
    (variant,) = (kernels_dir / "build").glob("*-cpu-*")
    version, source = script.version_of(tree), script.source_of(tree)
    wheel = script.make_wheel(variant, out, version, source)
    script.write_pins(tree, {variant.name: wheel}, version, URL)
    commands = ["-q", "sdist", "-d", str(out), "bdist_wheel", "-d", str(out)]
    script.run([sys.executable, "setup.py", *commands], cwd=tree, HFPATCH_BUILD="0")
    return out


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def described(wheel: Path) -> tuple[Any, Any]:
    """METADATA and WHEEL."""
    with zipfile.ZipFile(wheel) as archive:
        inside = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        folder = inside.rpartition("/")[0]
        return tuple(  # type: ignore[return-value]
            Parser().parsestr(archive.read(f"{folder}/{n}").decode()) for n in ("METADATA", "WHEEL")
        )


# ------------------------------------------------------------------------------ the files


def test_the_pure_wheel(released: Path) -> None:
    wheel = one(released, "hfpatch-*.whl")
    assert wheel.name == f"hfpatch-{hfpatch.__version__}-py3-none-any.whl"
    metadata, said = described(wheel)
    assert said["Root-Is-Purelib"] == "true" and said["Tag"] == "py3-none-any"
    urls = dict(u.split(", ") for u in metadata.get_all("Project-URL"))
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"} and metadata["Author"]
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "hfpatch/lab/experience.jsonl" in names
    assert "hfpatch/builds.json" in names and not [n for n in names if n.endswith(".so")]
    needed = ["build.toml", "kernel_src/hfpatch.h", "torch-ext/torch_binding.cpp", "clib/stub.c"]
    assert {f"hfpatch/_clib/{n}" for n in needed} <= names, "it can be compiled from"
    assert wheel.stat().st_size < 3e6


def test_links_of_the_long_description_lead_somewhere(released: Path) -> None:
    metadata, _ = described(one(released, "hfpatch-*.whl"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.strip().splitlines()[0] == readme.splitlines()[0]
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    at = f"https://github.com/hfpatch/hfpatch/blob/v{hfpatch.__version__}/"
    assert targets and all(t.startswith(("https://", "http://", "#")) for t in targets)
    ours = [t.removeprefix(at).partition("#")[0].partition("?")[0] for t in targets if at in t]
    assert ours and all((ROOT / name).exists() for name in ours if "performance" not in name)


def test_the_kernels_wheel(released: Path, kernels_dir: Path) -> None:
    wheel = one(released, "hfpatch_kernels_cpu-*.whl")
    metadata, said = described(wheel)
    assert metadata["Name"] == "hfpatch-kernels-cpu"
    assert said["Root-Is-Purelib"] == "false"
    assert re.fullmatch(r"py3-none-manylinux_2_(17|2[4-8])_\w+", said["Tag"]), said["Tag"]
    assert wheel.name.endswith(f"{said['Tag']}.whl")
    (variant,) = (kernels_dir / "build").glob("*-cpu-*")
    with zipfile.ZipFile(wheel) as archive:
        for path in variant.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"hfpatch_kernel_builds/build/{variant.name}/{path.relative_to(variant)}"
                assert archive.read(name) == path.read_bytes(), name


def test_the_sdist_has_every_file(released: Path) -> None:
    """So that it tests itself: the tests read the documentation, the examples, the sources."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout")
    with tarfile.open(one(released, "hfpatch-*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {n for n in listed.stdout.splitlines() if not n.startswith(".")}
    assert {n for n in tracked if (ROOT / n).exists()} <= names


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # a session of its own, and the collection of all tests
def test_the_sdist_tests_itself(released: Path, kernels_dir: Path, tmp_path: Path) -> None:
    with tarfile.open(one(released, "hfpatch-*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = one(tmp_path, "hfpatch-*")
    shutil.copytree(kernels_dir, tree / "hfpatch" / "_kernels", dirs_exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(tree), "HFPATCH_TEST_BUILD": "0"}
    some = ["tests/test_announce.py", "tests/test_docs.py", "tests/test_api.py", "tests/clib"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    everything = [*command[: -len(some)], "--collect-only"]
    done = subprocess.run(everything, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_it_installs_without_an_index_and_runs_without_a_compiler(
    script: ModuleType, released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.check_installation(released, tmp_path, resolve=False)
    said = capsys.readouterr().out
    assert f"runs without a compiler: hfpatch {hfpatch.__version__}" in said


# ------------------------------------------------------------------------------ tags


def library(tmp_path: Path, *strings: str) -> Path:
    path = tmp_path / "a.so"
    path.write_bytes(b"\x7fELF\0" + b"\0".join(s.encode() for s in strings) + b"\0")
    return path


@pytest.mark.parametrize(
    ("strings", "policy"),
    [
        (["GLIBC_2.2.5"], (2, 17)),
        (["GLIBC_2.17", "GLIBC_2.27"], (2, 27)),
        (["GLIBC_2.4", "GLIBCXX_3.4.20"], (2, 24)),
        (["GLIBC_2.28"], (2, 28)),
        (["GLIBC_2.5", "CXXABI_1.3.12"], (2, 31)),
        (["GLIBC_2.34"], (2, 34)),
        (["GLIBC_2.99"], None),
        (["GLIBC_2.2.5", "libgomp.so.1"], None),
        (["as GLIBC_2.99 says", "libcuda.so.1"], (2, 17)),
    ],
    ids=str,
)
def test_the_policy_of_symbols(strings: list[str], policy: Any, tmp_path: Path) -> None:
    assert tag.manylinux([library(tmp_path, *strings)]) == policy
    name = "linux_x86_64" if policy is None else f"manylinux_{policy[0]}_{policy[1]}_"
    assert tag.platform_tag([library(tmp_path, *strings)], "linux_x86_64").startswith(name)


def test_the_tag_is_auditwheels(script: ModuleType, released: Path) -> None:
    pytest.importorskip("auditwheel")
    script.check_tag(one(released, "hfpatch_kernels_cpu-*.whl"))


# ------------------------------------------------------------------------------ the script


def test_versions_that_differ(script: ModuleType, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hfpatch/__init__.py", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert script.version_of(tmp_path) == hfpatch.__version__
    (tmp_path / "CITATION.cff").write_text("version: 9.9\n")
    with pytest.raises(script.ReleaseError, match=r"versions differ: .*CITATION.cff says 9\.9"):
        script.version_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{full}"], "is not empty; name another --out"),
        (["--dirty", "--out", "{new}", "--url", "http://a/{{file}}"], "expected https://…"),
        (["--dirty", "--out", "{new}", "--url", "https://a/b"], "with `{file}` in it"),
        (["--dirty", "--out", "{new}", "--kernels", "{full}"], "has no build: expected `build/"),
    ],
)
def test_a_release_that_is_refused(
    arguments: list[str],
    message: str,
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full, new = tmp_path / "full", tmp_path / "new"
    (full / "build").mkdir(parents=True)
    assert script.main([a.format(full=full, new=new) for a in arguments]) == 1
    assert message in capsys.readouterr().err
    assert not list(new.rglob("*.whl"))


@pytest.mark.skipif(shutil.which("gpg") is None, reason="no gpg")
def test_signatures(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, out = Path("/tmp") / f"gpg-{os.getpid()}", tmp_path / "out"  # gpg wants a short path
    home.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))
    try:
        script.run(["gpg", "--batch", "--passphrase", "", "--quick-gen-key", "a@b.c", "ed25519"])
        (out / "hub").mkdir(parents=True)
        for name in ("a-1-py3-none-any.whl", "a-1.tar.gz", "hub/x"):
            (out / name).write_text(name)
        script.sign(out, "a@b.c")
        assert {p.name for p in out.glob("*.asc")} == {
            "a-1-py3-none-any.whl.asc", "a-1.tar.gz.asc", "SHA256SUMS.asc",
        }  # fmt: skip
        lines = (out / "SHA256SUMS").read_text().splitlines()
        assert f"{hashlib.sha256(b'hub/x').hexdigest()}  hub/x" in lines and len(lines) == 3
        with pytest.raises(script.ReleaseError, match="gpg"):
            script.sign(out, "nobody@else")
    finally:
        script.run(["gpgconf", "--kill", "all"])
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.exhaustive
def test_the_whole_script(
    script: ModuleType, kernels_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in ("twine", "auditwheel", "build"):
        pytest.importorskip(tool)
    out = tmp_path / "dist"
    assert script.main(["--dirty", "--out", str(out), "--kernels", str(kernels_dir)]) == 0
    said = capsys.readouterr().out
    assert "twine check: " in said and "auditwheel show: " in said
    assert "nothing was uploaded" in said and (out / "SHA256SUMS").is_file()
    assert (out / "hub" / "hfpatch-kernels" / "build.toml").is_file()


# ------------------------------------------------------------------------------ hfpatch setup


@pytest.fixture
def machine(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of the pure wheel: pins, no kernels; returns the folder of the wheels."""
    with zipfile.ZipFile(one(released, "hfpatch-*.whl")) as archive:
        (tmp_path / "builds.json").write_bytes(archive.read("hfpatch/builds.json"))
    monkeypatch.setattr(setup_kernels, "PINS", tmp_path / "builds.json")
    monkeypatch.setattr(sources, "LOCAL_BUILD", tmp_path / "_kernels")
    monkeypatch.setenv("HFPATCH_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(
        setup_kernels.kernel_build, "build_available", lambda *a: pytest.fail("it compiled")
    )
    sources._load_local.cache_clear()
    yield released  # type: ignore[misc]
    sources._load_local.cache_clear()


class Server:
    """Answers of `urlopen`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception) -> None:
        self.asked: list[str] = []

        def urlopen(address: str, timeout: float) -> Any:
            assert timeout > 0
            self.asked.append(address)
            if isinstance(answer, Exception):
                raise answer
            return io.BytesIO(answer)

        monkeypatch.setattr(setup_kernels.urllib.request, "urlopen", urlopen)


def state(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "state").rglob("*") if p.is_file())


def test_setup_downloads_what_the_release_pins(
    machine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel = one(machine, "hfpatch_kernels_cpu-*.whl")
    with pytest.raises(KernelLoadError, match="`hfpatch setup` downloads or compiles them"):
        sources.local_package()
    server = Server(monkeypatch, wheel.read_bytes())
    assert cli.main(["setup"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("downloaded: torch-stable-abi") and str(tmp_path) in said[-1]
    assert server.asked == [URL.format(file=wheel.name)]
    assert sources.local_package().kernel("rms_norm").source == "local"
    assert cli.main(["setup"]) == 0
    assert capsys.readouterr().out.startswith("found: torch-stable-abi") and len(server.asked) == 1


def test_setup_from_a_folder_or_a_file(machine: Path, tmp_path: Path) -> None:
    assert cli.main(["setup", "--from", str(machine)]) == 0
    wheel = shutil.copy(one(machine, "hfpatch_kernels_cpu-*.whl"), tmp_path / "renamed.whl")
    digest = hashlib.sha256(Path(wheel).read_bytes()).hexdigest()
    shutil.rmtree(tmp_path / "state")
    assert cli.main(["setup", "--from", str(wheel), "--digest", digest.upper()]) == 0
    assert "metadata.json" in state(tmp_path)


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed, "expected the SHA-256 .*was not opened"),
        (lambda d: d[:-10], "expected the SHA-256 .*was not opened"),
        (lambda d: d + b"more", "bytes, got more"),
        (lambda d: b"<html>", "expected the SHA-256"),
    ],
    ids=["changed", "cut off", "longer", "another"],
)
def test_another_file_is_never_opened(
    change: Any, message: str, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Server(monkeypatch, change(one(machine, "hfpatch_kernels_cpu-*.whl").read_bytes()))
    monkeypatch.setattr(setup_kernels, "unpack", lambda *a: pytest.fail("it was opened"))
    for how in (None, "download"):  # nor does it compile instead
        with pytest.raises(KernelIntegrityError, match=message):
            setup_kernels.ensure(how, say=lambda line: None)
    assert state(tmp_path) == []


def test_a_hub_that_does_not_answer_means_compiling(
    machine: Path, monkeypatch: pytest.MonkeyPatch, kernels_dir: Path
) -> None:
    Server(monkeypatch, TimeoutError("timed out"))
    with pytest.raises(KernelLoadError, match=r"could not be downloaded: timed out"):
        setup_kernels.ensure("download")
    given: list[Any] = []

    def build(root: Path, out: Path, archs: Any) -> Any:
        given.append(archs)
        shutil.copytree(kernels_dir / "build", out / "build", dirs_exist_ok=True)
        return setup_kernels.kernel_build.BuildResult([object()])  # type: ignore[list-item]

    monkeypatch.setattr(setup_kernels.kernel_build, "build_available", build)
    assert setup_kernels.ensure(archs="none", say=lambda line: None).how == "built"
    assert given == ["none"]


def test_nothing_can_be_had(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = setup_kernels.kernel_build.BuildResult(missing={"cpu": "no C++ compiler"})
    monkeypatch.setattr(setup_kernels.kernel_build, "build_available", lambda *a: result)
    with pytest.raises(
        KernelLoadError,
        match="no kernels for this machine: .*HF_HUB_OFFLINE is set; nothing could be compiled: "
        r"cpu: no C\+\+ compiler",
    ):
        setup_kernels.ensure(say=lambda line: None)


@pytest.mark.parametrize(
    "name",
    ["../../x", "hfpatch_kernel_builds/build/v/../../../x", "hfpatch_kernel_builds/build/v/a:b"],
)
def test_names_that_lead_out_of_a_wheel(name: str, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(KernelIntegrityError, match=r"has a file|is no wheel of builds"):
        setup_kernels.unpack(wheel, tmp_path / "target")
    assert not (tmp_path / "x").exists() and not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"no zip"])
def test_what_is_no_wheel(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(data)
    with pytest.raises(KernelIntegrityError, match="cannot be unpacked"):
        setup_kernels.unpack(tmp_path / "a.whl", tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"url": "x", "builds": [{}]}', "[1]",
     '{"url": "u", "builds": [{"variant": "v", "file": "f", "sha256": "00", "size": 1}]}'],
)  # fmt: skip
def test_pins_that_are_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "builds.json").write_text(text)
    with pytest.raises(KernelIntegrityError, match=r"is damaged .*install hfpatch again"):
        setup_kernels.read_pins(tmp_path / "builds.json")


def test_an_address_without_encryption(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = json.loads(setup_kernels.PINS.read_text())
    setup_kernels.PINS.write_text(json.dumps({**pins, "url": "http://example.invalid/{file}"}))
    with pytest.raises(KernelIntegrityError, match="expected an address of https"):
        setup_kernels.ensure("download")


def test_no_build_of_the_release_fits(machine: Path) -> None:
    pins = json.loads(setup_kernels.PINS.read_text())
    pins["builds"][0]["variant"] = "torch-stable-abi211-cpu-riscv64-linux"
    setup_kernels.PINS.write_text(json.dumps(pins))
    with pytest.raises(KernelLoadError, match=r"(?s)no build of this release fits:.*riscv64"):
        setup_kernels.ensure("download")


def test_a_folder_of_that_name_is_no_installation(
    kernels_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A working directory may be anybody's: only what a package manager installed is loaded."""
    monkeypatch.setenv("HFPATCH_STATE", str(tmp_path / "state"))
    shutil.copytree(kernels_dir / "build", tmp_path / "hfpatch_kernel_builds" / "build")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert builds.beside() == []
    (tmp_path / "hfpatch_kernels_cpu-0.1.0.dist-info").mkdir()
    assert builds.beside() == [tmp_path / "hfpatch_kernel_builds"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"hfpatch {hfpatch.__version__}\n"
