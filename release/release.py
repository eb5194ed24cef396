"""All that a release publishes, built, checked and signed into a folder; nothing is uploaded.

    python release/release.py --out dist --sign KEY --url 'https://…/v0.1.0/{file}'

What comes of it:

    hfpatch-0.1.0-py3-none-any.whl      no compiled code; pins the builds below by their SHA-256
    hfpatch-0.1.0.tar.gz                the sources, which test themselves
    hfpatch_kernels_cpu-….whl           one wheel for each variant that this machine compiles
    hub/hfpatch-kernels/                the same variants in the Kernel Hub's layout
    SHA256SUMS, *.asc                   digests, and a signature of each file

The package is made of the commit, not of the working tree. Tools: `pip install '.[release]'`, gpg.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "release"))

from kernel_wheel import backend, make_wheel  # noqa: E402

KERNELS = "hfpatch-kernels"
#: Libraries that the torch which is there brings: no policy of manylinux knows them.
TORCHS = re.compile(r"lib(torch|c10)\w*\.so")


class ReleaseError(Exception):
    """What is not as a release must be."""


def run(command: Sequence[str | Path], cwd: Path = ROOT, **env: str) -> str:
    """What a command says; ReleaseError if it fails."""
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**os.environ, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except FileNotFoundError as e:
        raise ReleaseError(f"`{command[0]}` is not installed: pip install '.[release]'") from e
    if done.returncode:
        raise ReleaseError(f"`{' '.join(map(str, command))}` failed:\n{done.stdout.strip()}")
    return done.stdout


def say(line: str) -> None:
    print(f"release: {line}", flush=True)


# ------------------------------------------------------------------------------ what is released


def version_of(tree: Path) -> str:
    """The version, which every file that has one must agree on."""
    found = {}
    for name, pattern in (
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("hfpatch/__init__.py", r'^__version__ = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
    ):
        match = re.search(pattern, (tree / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "none"
    pinned = re.findall(rf'"{KERNELS}-\w+==([^"]+)"', (tree / "pyproject.toml").read_text())
    found |= {f"the extras of pyproject.toml ({i})": v for i, v in enumerate(pinned)}
    if len(set(found.values())) != 1:
        said = ", ".join(f"{name} says {version}" for name, version in found.items())
        raise ReleaseError(f"versions differ: {said}")
    return found["pyproject.toml"]


def source_of(tree: Path) -> str:
    text = (tree / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^Source = "(.+)"$', text, re.MULTILINE)
    if match is None:
        raise ReleaseError("pyproject.toml: `[project.urls]` has no `Source`")
    return match[1]


def export(tree: Path, dirty: bool) -> None:
    """The commit's files, in `tree`; the working tree's under `dirty`, for a rehearsal."""
    if not dirty:
        if changed := run(["git", "status", "--porcelain"]):
            raise ReleaseError(f"the working tree is not clean; commit first:\n{changed}")
        archive = tree.with_suffix(".tar")
        run(["git", "archive", "-o", archive, "HEAD"])
        with tarfile.open(archive) as file:
            file.extractall(tree, filter="data")
        return
    for name in run(["git", "ls-files", "-co", "--exclude-standard"]).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


# ------------------------------------------------------------------------------ building


def compiled(kernels: Path | None, archs: str, out: Path) -> list[Path]:
    """The variants, in the Hub's layout at `out`: those that are there already, or built now."""
    if kernels is None:
        command = [sys.executable, "-m", "hfpatch.kernel_build", "--out", str(out)]
        subprocess.run(
            [*command, "--archs", archs], cwd=ROOT, check=True
        )  # in sight: it takes long
    else:
        clean = shutil.ignore_patterns("__pycache__", "*.py[co]")
        shutil.copytree(kernels / "build", out / "build", ignore=clean)
    variants = sorted(p.parent for p in out.glob("build/*/metadata.json"))
    if not variants:
        raise ReleaseError(f"`{kernels or out}` has no build: expected `build/<variant>/`")
    for name in ("build.toml", "LICENSE", "CARD.md"):
        shutil.copy(ROOT / name, out)
    return variants


def write_pins(tree: Path, wheels: dict[str, Path], version: str, url: str) -> None:
    """`hfpatch/builds.json`: what `hfpatch setup` may download (`kernels/setup_kernels.py`)."""
    builds = [
        {"variant": variant, "file": w.name, "sha256": sha256(w), "size": w.stat().st_size}
        for variant, w in sorted(wheels.items())
    ]
    pins = {"version": version, "url": url, "builds": builds}
    (tree / "hfpatch" / "builds.json").write_text(json.dumps(pins, indent=2) + "\n")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_package(tree: Path, out: Path) -> None:
    """The pure wheel and the sdist, with what is installed here."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out]
    run([*command, tree], cwd=tree, HFPATCH_BUILD="0")


# ------------------------------------------------------------------------------ checks


def check(out: Path, scratch: Path) -> None:
    """What an index, an old system and a machine without a compiler would say."""
    files = sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])
    run([sys.executable, "-m", "twine", "check", "--strict", *files])
    say(f"twine check: {len(files)} files passed")
    for wheel in out.glob(f"{KERNELS.replace('-', '_')}_*.whl"):
        check_tag(wheel)
    check_installation(out, scratch)


def check_tag(wheel: Path) -> None:
    """That the name's tag is the one that auditwheel gives, torch's libraries left out."""
    shown = json.loads(run([sys.executable, "-m", "auditwheel", "show", "--json", wheel]))
    others = [name for name in shown["external_libs"] if not TORCHS.fullmatch(name)]
    if others:
        raise ReleaseError(f"`{wheel.name}` needs {', '.join(others)}, which no policy allows")
    tag = wheel.stem.rsplit("-", 1)[-1]
    if tag != shown["sym_tag"] or not tag.startswith("manylinux"):
        raise ReleaseError(f"`{wheel.name}`: auditwheel gives it {shown['sym_tag']}")
    say(f"auditwheel show: {wheel.name} is {tag}")


_SMOKE = """\
import torch, hfpatch
model = torch.nn.Sequential(torch.nn.LayerNorm(64)).requires_grad_(False)
report = hfpatch.apply(model)
assert [s.source for s in report.swaps] == ["local"], report
model(torch.randn(4, 64))
assert hfpatch.restore(model) == 1
print(hfpatch.__file__, report.swaps[0].version)
"""


def check_installation(out: Path, scratch: Path, resolve: bool = True) -> None:
    """The CPU's wheels in a fresh environment, without an index and without a compiler; it sees the
    packages that this interpreter has, which are not built here. `resolve`: ask pip whether these
    are all that it needs."""
    venv = scratch / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    purelib = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    seen = [p for p in sys.path if p.endswith("-packages")]
    Path(purelib, "dependencies.pth").write_text("".join(f"{p}\n" for p in seen))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
    pip += ["--find-links", out]
    run([*pip, "--force-reinstall", "--no-deps", "hfpatch", f"{KERNELS}-cpu"], cwd=scratch)
    if resolve:
        run([*pip, "hfpatch[cpu]"], cwd=scratch)
    nowhere = {"PATH": str(scratch / "nowhere"), "CXX": "", "HFPATCH_STATE": str(scratch / "state")}
    nowhere |= {"PYTHONPATH": "", "HFPATCH_CONFIG": ""}
    said = run([python, "-c", _SMOKE], cwd=scratch, **nowhere)
    if purelib not in said and str(venv) not in said:
        raise ReleaseError(f"another hfpatch was imported: {said}")
    version = run([python, "-m", "hfpatch", "--version"], cwd=scratch, **nowhere).split()[-1]
    say(f"installed without an index, runs without a compiler: hfpatch {version}")


# ------------------------------------------------------------------------------ signing


def sign(out: Path, key: str | None) -> None:
    """SHA256SUMS of every file, and a detached signature of each, by gpg."""
    files = sorted(p for p in out.rglob("*") if p.is_file())
    sums = "".join(f"{sha256(p)}  {p.relative_to(out).as_posix()}\n" for p in files)
    (out / "SHA256SUMS").write_text(sums)
    if key is None:
        say("not signed: no --sign KEY")
        return
    top = sorted([*out.glob("*.whl"), *out.glob("*.tar.gz"), out / "SHA256SUMS"])
    for path in top:
        run(["gpg", "--batch", "--yes", "--local-user", key, "--armor", "--detach-sign", path])
        run(["gpg", "--batch", "--verify", f"{path}.asc", path])
    say(f"signed {len(top)} files with {key}")


# ------------------------------------------------------------------------------ command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="must be empty (dist)")
    parser.add_argument("--sign", metavar="KEY", help="gpg key; without it nothing is signed")
    parser.add_argument("--url", help="where the wheels will be, with `{file}`: https://…/{file}")
    parser.add_argument("--archs", default="all", help="CUDA architectures (all)")
    parser.add_argument("--kernels", type=Path, help="a folder with build/<variant>/, built before")
    parser.add_argument("--dirty", action="store_true", help="rehearse with uncommitted changes")
    return parser.parse_args(argv)


def release(args: argparse.Namespace) -> None:
    if args.out.exists() and any(args.out.iterdir()):
        raise ReleaseError(f"`{args.out}` is not empty; name another --out, or remove it")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        tree = scratch / "tree"
        tree.mkdir()
        export(tree, args.dirty)
        version, source = version_of(tree), source_of(tree)
        url = args.url or f"{source}/releases/download/v{version}/{{file}}"
        if "{file}" not in url or not url.startswith("https://"):
            raise ReleaseError(f"--url {url}: expected https://…, with `{{file}}` in it")
        say(f"hfpatch {version}")
        args.out.mkdir(parents=True, exist_ok=True)
        variants = compiled(args.kernels, args.archs, args.out / "hub" / KERNELS)
        if "cpu" not in {backend(v.name) for v in variants}:
            raise ReleaseError("there is no variant for the CPU, which every machine can use")
        wheels = {v.name: make_wheel(v, args.out, version, source) for v in variants}
        for wheel in wheels.values():
            say(f"wrote {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)")
        write_pins(tree, wheels, version, url)
        build_package(tree, args.out)
        check(args.out, scratch)
        sign(args.out, args.sign)
    say(f"all is in {args.out}; nothing was uploaded. What is left to do:")
    print(f"  git tag -s v{version} && git push origin v{version}")
    print(f"  twine upload {args.out}/*.whl {args.out}/*.tar.gz")
    print(f"  and the wheels to where builds.json says: {url}")
    hub = args.out / "hub" / KERNELS
    print(f"  hfpatch kernel publish . --build {hub} --repo-id ORG/{KERNELS}")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        release(parse(argv))
    except (ReleaseError, RuntimeError, OSError, subprocess.CalledProcessError) as e:
        print(f"release: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
