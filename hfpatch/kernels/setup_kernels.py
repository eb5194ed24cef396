"""`hfpatch setup`: compiled kernels for this machine, found here, downloaded, or compiled.

What may be downloaded is in `builds.json` of this installation, written when the release was made:
a file's name, size and SHA-256. Any other content is refused, wherever it comes from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from hfpatch import kernel_build
from hfpatch.errors import KernelIntegrityError, KernelLoadError
from hfpatch.kernel_build.clib import source_root
from hfpatch.kernels import builds, sources
from hfpatch.kernels.builds import INSTALLED

PINS = Path(__file__).parents[1] / "builds.json"
_TIMEOUT = 60.0  # seconds without a byte
_LARGEST = 4 << 30  # bytes, unpacked
_ARCHS = re.compile(r"all|native|none|\d+\.\d(\+PTX)?([;,\s]+\d+\.\d(\+PTX)?)*", re.IGNORECASE)


@dataclass(frozen=True)
class Pin:
    """A build that belongs to this release: `variant` in the Hub's naming, and its wheel."""

    variant: str
    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Outcome:
    """How the kernels came here ("found", "downloaded", "built"), and which build is used."""

    how: str
    variant: str
    where: str


def read_pins(path: Path | None = None) -> tuple[str, list[Pin]]:
    """(where the files are, with `{file}` in it; the builds) of this release; none in a tree.

    Raises:
        KernelIntegrityError: the file is damaged.
    """
    path = path or PINS
    if not path.is_file():
        return "", []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        pins = [Pin(r["variant"], r["file"], r["sha256"], r["size"]) for r in data["builds"]]
        if not all(re.fullmatch(r"[0-9a-f]{64}", p.sha256) and p.size > 0 for p in pins):
            raise ValueError("a digest or a size is none")
        return str(data["url"]), pins
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise KernelIntegrityError(
            f"`{path}` is damaged ({type(e).__name__}: {e}); install hfpatch again"
        ) from e


def problem_here() -> str | None:
    """What is wrong with the kernels that are used now, or None: they serve all devices here."""
    import torch

    try:
        package = sources.local_package()
    except KernelLoadError as e:
        return str(e)
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return package.kernel("rms_norm").refuses("cuda")


def ensure(
    how: str | None = None,
    source: str | None = None,
    sha256: str | None = None,
    archs: str | None = None,
    say: Any = print,
) -> Outcome:
    """Kernels for this machine: those that are here, else a download, else a build.

    Args:
        how: "download" or "build": this alone, also where there are some already; None: what works
            first.
        source: a wheel on this machine, or a folder with it, instead of the address of the release.
        sha256: of that wheel, where this installation pins none.
        archs: CUDA architectures of a build, as HFPATCH_CUDA_ARCHS.
        say: gets a line for each step.

    Raises:
        KernelLoadError: none could be had; the message says why each way failed.
        KernelIntegrityError: a file is not the one that this release pins.
    """
    if how is None and source is None and (why := problem_here()) is None:
        return _used("found")
    if how is None and source is None:
        say(why)
    failures = []
    if how != "build":
        try:
            _download(source, sha256, say)
            return _used("downloaded")
        except KernelIntegrityError:
            raise
        except KernelLoadError as e:
            if how == "download" or source is not None:
                raise
            failures.append(str(e))
            say(f"{e}; compiling them")
    try:
        _build(archs)
        return _used("built")
    except (kernel_build.KernelBuildError, KernelLoadError) as e:
        failures.append(str(e))
    raise KernelLoadError("no kernels for this machine: " + "; ".join(failures))


def _used(how: str) -> Outcome:
    sources._load_local.cache_clear()
    package = sources.local_package()
    return Outcome(
        how, package.variant.partition(":")[0], str(Path(package.module.__file__ or "").parent)
    )


def _folder() -> Path:
    folder = builds.own_folder(make=True)
    if folder is None:
        raise KernelLoadError(
            "there is no folder of your own for kernels: HFPATCH_STATE, XDG_STATE_HOME or your "
            "home's `.local/state` must be one that no other user can write to"
        )
    (folder / "build").mkdir(parents=True, exist_ok=True)
    return folder


# ------------------------------------------------------------------------------ download


def _download(source: str | None, sha256: str | None, say: Any) -> None:
    url, pins = read_pins()
    if source is not None:
        path = _wheel_at(Path(source), pins)
        pin = next((p for p in pins if p.file == path.name), None)
        if pin is None and sha256 is None:
            raise KernelLoadError(
                f"`{path}`: this installation pins no such file; give its digest with --digest"
            )
        expected = sha256 or (pin.sha256 if pin is not None else "")
        with path.open("rb") as file:
            _take(file, path.name, expected.lower(), path.stat().st_size)
        return
    if not pins:
        raise KernelLoadError("this installation is not a release, so it pins no build to download")
    pin = _choose(pins)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise KernelLoadError(f"`{pin.file}` is not downloaded: HF_HUB_OFFLINE is set")
    address = url.format(file=pin.file)
    if not address.startswith("https://"):
        raise KernelIntegrityError(f"`{address}`: expected an address of https")
    say(f"downloading {address} ({pin.size / 1e6:.0f} MB)")
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as response:
            _take(response, pin.file, pin.sha256, pin.size)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as e:
        raise KernelLoadError(f"`{address}` could not be downloaded: {e}") from e


def _wheel_at(path: Path, pins: list[Pin]) -> Path:
    if path.is_dir():
        found = [p for p in pins if (path / p.file).is_file()]
        if not found:
            raise KernelLoadError(f"`{path}` has none of the wheels that this installation pins")
        return path / _choose(found).file
    if not path.is_file():
        raise KernelLoadError(f"`{path}`: no such file or folder")
    return path


def _choose(pins: list[Pin]) -> Pin:
    """The pinned build that fits this system.

    Raises:
        KernelLoadError: none does; the message has the reasons.
    """
    from kernels.variants import parse_variant, resolve_variant, variants_trace_str

    variants = [parse_variant(p.variant) for p in pins]
    chosen, trace = resolve_variant(variants)
    if chosen is None:
        chosen, _ = resolve_variant(variants, "cpu")
    if chosen is None:
        raise KernelLoadError(f"no build of this release fits:\n{variants_trace_str(trace)}")
    return next(p for p in pins if p.variant == chosen.variant_str)


def _take(stream: IO[bytes], name: str, sha256: str, size: int) -> None:
    """Write a wheel aside, compare it with its digest, and only then open it."""
    folder = _folder()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as temporary:
        path, hasher, read = Path(temporary) / "wheel", hashlib.sha256(), 0
        with path.open("wb") as file, _progress(name, size) as step:
            while chunk := stream.read(1 << 20):
                read += len(chunk)
                if read > size:
                    raise KernelIntegrityError(f"`{name}`: expected {size} bytes, got more")
                hasher.update(chunk)
                file.write(chunk)
                step(len(chunk))
        if hasher.hexdigest() != sha256:
            raise KernelIntegrityError(
                f"`{name}`: expected the SHA-256 {sha256}, got {hasher.hexdigest()} ({read} "
                "bytes); it was damaged on its way or is not this release's, and was not opened"
            )
        for variant in unpack(path, Path(temporary) / "unpacked"):
            sources.verified_metadata(variant)
            final = folder / "build" / variant.name
            if final.exists():
                shutil.rmtree(final)
            os.replace(variant, final)


@contextmanager
def _progress(name: str, size: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=size)
        yield lambda done: progress.advance(task, done)


def unpack(wheel: Path, target: Path) -> list[Path]:
    """The variants in a wheel of builds, written to `target`.

    Raises:
        KernelIntegrityError: it is no such wheel, or a name in it leads out of it.
    """
    variants = set()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if sum(info.file_size for info in archive.infolist()) > _LARGEST:
                raise KernelIntegrityError(
                    f"`{wheel.name}` is larger than {_LARGEST} bytes unpacked"
                )
            for info in archive.infolist():
                parts = PurePosixPath(info.filename).parts
                if parts[:2] != (INSTALLED, "build") or len(parts) < 4 or info.is_dir():
                    continue
                if ".." in parts or re.search(r"[\\:\0]", info.filename):
                    raise KernelIntegrityError(f"`{wheel.name}` has a file `{info.filename}`")
                path = target.joinpath(*parts[2:])
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as packed, path.open("wb") as file:
                    shutil.copyfileobj(packed, file)
                variants.add(parts[2])
    except (zipfile.BadZipFile, OSError, RuntimeError) as e:
        if isinstance(e, KernelLoadError):
            raise
        raise KernelIntegrityError(f"`{wheel.name}` cannot be unpacked: {e}") from e
    if not variants:
        raise KernelIntegrityError(f"`{wheel.name}` is no wheel of builds: it has no `{INSTALLED}`")
    return [target / name for name in sorted(variants)]


# ------------------------------------------------------------------------------ build


def _build(archs: str | None) -> None:
    """Compile what this machine can: into a source tree's package, else to the user's folder."""
    root = source_root()
    out = _folder() if root.name == "_clib" else sources.LOCAL_BUILD
    result = kernel_build.build_available(root, out, archs)
    if not result.variants:
        reasons = {**result.missing, **result.failed}
        raise KernelLoadError(
            "nothing could be compiled: " + "; ".join(f"{b}: {why}" for b, why in reasons.items())
        )


# ------------------------------------------------------------------------------ command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--download", action="store_true", help="download, and never compile")
    way.add_argument("--build", action="store_true", help="compile, though there are kernels")
    way.add_argument(
        "--from", dest="source", metavar="PATH", help="a wheel of builds, or a folder with it"
    )
    parser.add_argument(
        "--digest", metavar="SHA256", help="of that wheel, where this installation pins none"
    )
    parser.add_argument(
        "--archs", help="CUDA architectures of a build: all, native, none or 8.0;9.0"
    )


def run_command(args: argparse.Namespace) -> int:
    if args.digest is not None:
        if args.source is None:
            raise ValueError("--digest belongs to --from")
        if not re.fullmatch(r"[0-9a-fA-F]{64}", args.digest):
            raise ValueError(f"--digest {args.digest}: expected 64 hexadecimal digits")
    if args.archs is not None and (args.download or args.source is not None):
        raise ValueError("--archs belongs to a build: leave out --download and --from")
    if args.archs is not None and not _ARCHS.fullmatch(args.archs.strip()):  # not after a minute
        raise ValueError(
            f"--archs {args.archs}: expected all, native, none or capabilities such as 8.0;9.0+PTX"
        )
    how = "download" if args.download else "build" if args.build else None
    outcome = ensure(how, args.source, args.digest, args.archs)
    print(f"{outcome.how}: {outcome.variant} in {outcome.where}")
    return 0
