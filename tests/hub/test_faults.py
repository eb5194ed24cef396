"""What goes wrong with a Hub kernel: the modules keep their forward and the report says why; under
`strict` a typed error is raised. No case may change a module or import what was not verified."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import kernels.hf_hub
import kernels.resolver
import pytest
import torch
from huggingface_hub import constants
from packages import SILU, build_files, fresh, package
from server import Flip, Hang, HubServer, Slow, Status, Truncate
from torch import nn

import hfpatch
from hfpatch.errors import (
    KernelIntegrityError,
    KernelLoadError,
    KernelUntrustedError,
    NoCompatibleVariantError,
)
from hfpatch.hub import HubOptions, HubSpec, explain, verify
from hfpatch.hub.download import lock
from hfpatch.hub.patience import impatient
from hfpatch.hub.sealed import seal
from hfpatch.kernels.sources import Kernel

SPEC = "toy/kernel@v1"
X = torch.linspace(-4, 4, 96).reshape(2, 48)
#: A module that must never be imported says so by ending the process.
DEADLY = "raise SystemExit('it was imported')\n"


def expect_original(
    *reasons: str, error: type[Exception] = KernelLoadError, spec: str = SPEC, **arguments: object
) -> None:
    """The original forward runs, the report says why; strict raises `error` with the same words."""
    m = nn.Sequential(nn.SiLU()).requires_grad_(False)
    before, expected = dict(m[0].__dict__), m(X)
    report = hfpatch.apply(m, kernels={"silu": spec}, **arguments)  # type: ignore[arg-type]
    assert not report.swaps and dict(m[0].__dict__) == before
    (skip,) = report.skips
    assert skip.kind == "unavailable"
    for reason in reasons:
        assert reason in skip.reason
        assert any(reason in note for note in report.notes)
    assert report.notes[0].endswith("The modules stay as they are.")
    assert torch.equal(m(X), expected)
    fresh()
    with pytest.raises(error) as raised:
        hfpatch.apply(m, kernels={"silu": spec}, strict=True, **arguments)  # type: ignore[arg-type]
    assert type(raised.value) is error and reasons[0] in str(raised.value)
    assert dict(m[0].__dict__) == before
    fresh()


def expect_kernel(spec: str = SPEC, **arguments: object) -> str:
    """The kernel is used; its version."""
    m = nn.Sequential(nn.SiLU()).requires_grad_(False)
    (swap,) = hfpatch.apply(m, kernels={"silu": spec}, strict=True, **arguments).swaps  # type: ignore[arg-type]
    torch.testing.assert_close(m(X), torch.nn.functional.silu(X))
    fresh()
    return swap.version


# ------------------------------------------------------------------------------ the network


def test_unreachable(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    expect_original("Hub kernel `toy/kernel@v1` could not be loaded", "Connection refused")


def test_what_led_to_an_error_is_told_with_it_and_once() -> None:
    outer, inner, root = RuntimeError("no kernel"), ValueError("no file"), OSError("disk full")
    assert explain.reason(outer) == "RuntimeError: no kernel"
    outer.__cause__, inner.__cause__ = inner, root
    assert explain.reason(outer) == "RuntimeError: no kernel (OSError: disk full)"
    told = RuntimeError("no kernel, since the disk full error came")
    told.__cause__ = root
    assert explain.reason(told) == "RuntimeError: no kernel, since the disk full error came"


def test_offline_and_never_downloaded(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with toy.quiet():
        expect_original("was never downloaded", "`hfpatch download toy/kernel@v1`")


def test_offline_and_half_downloaded(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_kernel()
    (file,) = Path(constants.HF_HUB_CACHE).glob("kernels--toy--*/snapshots/*/build/*/__init__.py")
    file.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expect_original("is not complete in the cache", "`hfpatch download toy/kernel@v1`")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    expect_kernel()


def test_no_such_repository_version_or_commit(toy: HubServer) -> None:
    expect_original("Repository toy/absent not found", spec="toy/absent@v1")
    expect_original("Invalid rev id: v7", spec="toy/kernel@v7")
    expect_original("Invalid rev id: " + "a" * 40, spec="toy/kernel@" + "a" * 40)


def test_the_server_fails(toy: HubServer) -> None:
    toy.fail("GET", "/overview", Status(500))
    expect_original("does not say whether `toy` is a trusted", error=KernelUntrustedError)
    toy.heal()
    toy.fail("GET", "/tree/", Status(403))
    expect_original("could not be loaded", "403")


def test_timeout(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the clients' retries
    toy.fail("GET", "/api/kernels/toy/kernel/revision/", Hang(60))
    expect_original("could not be loaded", "timed out")
    toy.heal()
    toy.fail("GET", "/overview", Hang(60))
    expect_original("does not say", "timed out", error=KernelUntrustedError)
    toy.heal()
    toy.fail("GET", "/tree/", Hang(60))
    expect_original("could not be loaded", "timed out")
    toy.heal()
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    toy.fail("GET", "/resolve/.*__init__.py", Hang(60))
    expect_original("could not be loaded", "timed out")
    toy.heal()
    expect_kernel()


def test_a_hub_that_is_away_is_waited_for_once(
    toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each repository of a list would cost a timeout; what is cached is used all the same."""
    expect_kernel()
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    toy.fail("GET", "/api/", Hang(60))
    m = nn.Sequential(nn.SiLU()).requires_grad_(False)
    before = len(toy.requests)
    report = hfpatch.apply(m, kernels="hub", hub={"repos": ["a/b@v1", "c/d@v1", SPEC]})
    assert [s.source for s in report.swaps] == [SPEC] and len(toy.requests) == before + 1
    first, second = report.notes
    assert "timed out" in first
    assert "`c/d@v1` is not in the cache, and the Hub gave no answer about `a/b@v1`" in second


def test_threads_leave_the_shared_client_as_it_was() -> None:
    """`impatient` blocks that overlap: each takes its own hook out, in any order."""
    client = huggingface_hub.get_session()
    before = client.event_hooks
    first, second = impatient(), impatient()
    for block in (first, second):
        block.__enter__()
    assert len(client.event_hooks["request"]) == len(before["request"]) + 2
    for block in (first, second):
        block.__exit__(None, None, None)
    assert client.event_hooks == before


def test_a_slow_download_arrives(toy: HubServer) -> None:
    toy.fail("GET", "/resolve/", Slow(0.4))
    expect_kernel()


def test_a_truncated_download_is_resumed_or_reported(
    toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's retries
    toy.fail("GET", "/resolve/.*__init__.py", Truncate(0))
    expect_original("could not be loaded", "peer closed connection")
    toy.heal()
    toy.fail("GET", "/resolve/.*__init__.py", Truncate(20), times=1)
    expect_kernel()


# ------------------------------------------------------------------------------ integrity


def test_a_flipped_bit_in_the_library(hub: HubServer, kernels_dir: Path) -> None:
    """Of the right size, so huggingface_hub does not see it; loading it could end the process."""
    hub.trust("me")
    hub.put("me/kernel", build_files(kernels_dir))
    hub.fail("GET", "^/store/", Flip(200_000))
    expect_original(
        "is not what was published", ".so", error=KernelIntegrityError, spec="me/kernel@v1"
    )
    hub.heal()
    expect_original("hfpatch download", error=KernelIntegrityError, spec="me/kernel@v1")
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / "kernels--me--kernel")
    expect_kernel("me/kernel@v1")


def test_a_flipped_bit_where_the_metadata_hold_no_digest(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package(DEADLY, digest=False))
    hub.fail("GET", "/resolve/.*__init__.py", Flip(0))
    expect_original("`__init__.py` is damaged", error=KernelIntegrityError)


def with_metadata(files: dict[str, bytes], change: Callable[[dict], None]) -> dict[str, bytes]:
    (path,) = (p for p in files if p.endswith("metadata.json"))
    data = json.loads(files[path])
    change(data)
    return files | {path: json.dumps(data).encode()}


def test_wrong_digest(hub: HubServer) -> None:
    hub.trust("toy")
    wrong = base64.b64encode(bytes(32)).decode()
    hub.put(
        "toy/kernel",
        with_metadata(
            package(DEADLY), lambda d: d["digest"]["files"].update({"__init__.py": wrong})
        ),
    )
    expect_original("is not what was published", "__init__.py", error=KernelIntegrityError)


def test_an_extra_and_a_missing_file(hub: HubServer) -> None:
    hub.trust("toy")
    extra = {"build/torch-cpu/extra.py": b"x = 1\n"}
    hub.put("toy/kernel", package(DEADLY) | extra)
    expect_original("extra.py", error=KernelIntegrityError)
    files = package(DEADLY, more={"needed.py": ""})
    del files["build/torch-cpu/needed.py"]
    hub.put("toy/kernel", files, branch="v2")
    expect_original("needed.py", error=KernelIntegrityError, spec="toy/kernel@v2")


def test_metadata_that_are_not_metadata(hub: HubServer) -> None:
    hub.trust("toy")
    for version, content in enumerate((b"", b"{}", b"\xff\xfe", b'{"name": "../../etc"}'), 1):
        hub.put("toy/kernel", package(DEADLY) | {"build/torch-cpu/metadata.json": content},
                branch=f"v{version}")  # fmt: skip
        expect_original("could not be loaded", spec=f"toy/kernel@v{version}")


# ------------------------------------------------------------------------------ signatures


def signature(metadata: bytes) -> bytes:
    """A well-formed Sigstore bundle over `metadata`, by a key that nobody vouches for."""
    import datetime
    import hashlib

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime(2026, 1, 1)
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(minutes=10))
        .add_extension(x509.ExtendedKeyUsage([x509.OID_CODE_SIGNING]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {
            "certificate": {
                "rawBytes": encoded(certificate.public_bytes(serialization.Encoding.DER))
            },
            "tlogEntries": [
                {
                    "logIndex": "1",
                    "logId": {"keyId": encoded(bytes(32))},
                    "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
                    "integratedTime": str(int(now.timestamp())),
                    "inclusionPromise": {"signedEntryTimestamp": encoded(b"promise")},
                    "inclusionProof": {
                        "logIndex": "1", "rootHash": encoded(bytes(32)), "treeSize": "2",
                        "hashes": [], "checkpoint": {"envelope": "log\n2\n\n"},
                    },
                    "canonicalizedBody": encoded(b"{}"),
                }
            ],
        },
        "messageSignature": {
            "messageDigest": {
                "algorithm": "SHA2_256", "digest": encoded(hashlib.sha256(metadata).digest()),
            },
            "signature": encoded(key.sign(metadata, ec.ECDSA(hashes.SHA256()))),
        },
    }  # fmt: skip
    return json.dumps(bundle).encode()


def test_missing_malformed_and_wrong_signature(hub: HubServer) -> None:
    hub.trust("toy")
    files = package(DEADLY)
    signed = "build/torch-cpu/metadata.json.sigstore"
    metadata = files["build/torch-cpu/metadata.json"]
    signatures = {
        "v1": (None, "is not signed; `require_signed` refuses it"),
        "v2": (b"{}", "is malformed"),
        "v3": (signature(metadata), "is not valid"),
        "v4": (signature(b"something else"), "is not valid"),
    }
    for branch, (content, reason) in signatures.items():
        hub.put("toy/kernel", files | ({signed: content} if content else {}), branch=branch)
        expect_original(
            reason, error=KernelIntegrityError, spec=f"toy/kernel@{branch}",
            hub={"require_signed": True},
        )  # fmt: skip


class Accepts:
    """A verifier to which the certificate and the log entry are in order."""

    def verify_artifact(self, data: bytes, bundle: object, policy: object) -> None:
        self.data = data


def test_what_a_valid_signature_still_has_to_cover(tmp_path: Path) -> None:
    """The cryptography is sigstore's; here its verdict is given, to see what follows from it."""
    spec = HubSpec.parse("kernels-community/toy@v1")
    for case, (wanted, digest, message) in enumerate(
        [
            (spec, True, ""),
            (spec, False, "hold no digest"),
            (HubSpec.parse("kernels-community/toy@v2"), True, "is one of version 1, not of"),
            (HubSpec.parse("kernels-community/other@v1"), True, "is one of the kernel `toy`"),
            (HubSpec.parse("toy/toy@v1"), True, "knows nobody who signs for `toy`"),
        ]
    ):
        folder = tmp_path / str(case)
        folder.mkdir()
        for path, data in package(digest=digest).items():
            (folder / Path(path).name).write_bytes(data)
        metadata = (folder / "metadata.json").read_bytes()
        (folder / "metadata.json.sigstore").write_bytes(signature(metadata))
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
        sealed = seal(folder, files, copy=False)
        verifier = Accepts()
        if message:
            with pytest.raises(KernelIntegrityError, match=message):
                verify.check_signature(sealed, wanted, verifier)
        else:
            verify.check_signature(sealed, wanted, verifier)
            assert verifier.data == metadata


# ------------------------------------------------------------------------------ pins


def test_a_revision_that_moved_under_a_pin(toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    locked = lock([HubSpec.parse(SPEC)], HubOptions(), path).kernels[SPEC].commit
    toy.put("toy/kernel", package(DEADLY))
    for options in ({"lockfile": path}, HubOptions(lockfile=path)):
        assert expect_kernel(hub=options).startswith(locked[:12])
    # the commit is gone from the Hub, and nothing else is taken in its place
    shutil.rmtree(constants.HF_HUB_CACHE)
    del toy.repos["kernel", "toy/kernel"].commits[locked]
    expect_original(f"Invalid rev id: {locked}", hub={"lockfile": path})


def test_another_build_than_the_locked_one(toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    text = path.read_text()
    data = json.loads(text)
    expected = data["kernels"][0]["variants"]["torch-cpu"]
    path.write_text(text.replace(expected, "0" * 64))
    expect_original("is not the locked one", "expected " + "0" * 64,
                    error=KernelIntegrityError, hub={"lockfile": path})  # fmt: skip
    data["kernels"][0]["variants"] = {"torch-cuda": expected}
    path.write_text(json.dumps(data))
    expect_original("`torch-cpu` is not in", error=KernelIntegrityError, hub={"lockfile": path})
    for content in ("", "{}", '{"format": 2, "kernels": []}'):
        path.write_text(content)
        expect_original("cannot be read", hub={"lockfile": path})
    expect_original("cannot be read", hub={"lockfile": tmp_path / "none.lock"})


def test_a_kernel_that_is_not_in_the_lock_file(toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    toy.put("toy/kernel", package(DEADLY), branch="v2")
    before = len(toy.requests)
    expect_original("`toy/kernel@v2` is not in the lock file", "hfpatch lock toy/kernel@v2",
                    spec="toy/kernel@v2", hub={"lockfile": path})  # fmt: skip
    assert toy.requests[before:] == []


# ------------------------------------------------------------------------------ fit


def test_builds_for_other_systems(hub: HubServer) -> None:
    """Another torch, CUDA, C++ ABI, machine: the report has the trace and what to do."""
    hub.trust("toy")
    variants = (
        "torch25-cxx11-cpu-x86_64-linux",
        "torch-stable-abi999-cpu-x86_64-linux",
        "torch213-cxx98-cpu-x86_64-linux",
        "torch213-cxx11-cu130-x86_64-linux",
        "torch213-cxx11-cpu-riscv64-linux",
        "torch-cuda",
        "torch-xpu",
    )
    files: dict[str, bytes] = {}
    for variant in variants:
        files |= package(DEADLY, variant=variant)
    hub.put("toy/kernel", files)
    expect_original(
        f"has no build for this system (torch {torch.__version__}",
        *(f"\n  {v}: " for v in variants if torch.version.cuda is None),
        "kernels=['local', 'torch']",
        error=NoCompatibleVariantError,
    )


def test_a_variant_is_chosen_by_kernels_own_rules(hub: HubServer) -> None:
    hub.trust("toy")
    files = package(DEADLY, variant="torch-cuda") | package(variant="torch-cpu")
    hub.put("toy/kernel", files)
    if torch.version.cuda is None:
        assert expect_kernel().endswith(":torch-cpu")
        assert not hub.seen("GET", "torch-cuda/__init__.py"), "one variant is downloaded"


def test_no_code_for_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs each is checked, before the first launch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])

    def kernel(**fields: object) -> Kernel:
        return Kernel("silu", nn.functional.silu, SPEC, devices=frozenset({"cuda"}), **fields)  # type: ignore[arg-type]

    why = kernel(archs=("8.0", "9.0")).refuses("cuda")
    assert why is not None and "cannot run on cuda:1" in why and "only for 8.0, 9.0" in why
    why = kernel(min_capability=(8, 0)).refuses("cuda")
    assert why is not None and "cuda:1: it needs compute capability 8.0" in why
    assert kernel(archs=("7.5", "9.0")).refuses("cuda") is None
    assert kernel(archs=("7.0+PTX",)).refuses("cuda") is None


def test_a_kernel_without_code_for_the_models_device(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package(backend={"type": "xpu"}))
    m = nn.Sequential(nn.SiLU()).requires_grad_(False)
    (skip,) = hfpatch.apply(m, kernels={"silu": SPEC}).skips
    assert skip.reason == "kernel `toy/kernel@v1` has no code for cpu"


# ------------------------------------------------------------------------------ the package


def test_import_errors(hub: HubServer) -> None:
    hub.trust("toy")
    sources = {
        "v1": ("import no_such_module\n", "No module named 'no_such_module'"),
        "v2": ("from . import layers\n", "layers"),
        "v3": ("def silu(:\n", "SyntaxError"),
        "v4": ("raise RuntimeError('a bad day')\n", "a bad day"),
    }
    for branch, (source, reason) in sources.items():
        hub.put("toy/kernel", package(source), branch=branch)
        expect_original("could not be imported", reason, spec=f"toy/kernel@{branch}")


def test_missing_symbol(hub: HubServer, tmp_path: Path) -> None:
    """Of the package, and of the library that it loads."""
    hub.trust("toy")
    hub.put("toy/kernel", package("def relu(x): return x.relu()\n"))
    expect_original("exports no `silu`; it has: relu")
    source = tmp_path / "lib.c"
    source.write_text("int absent(void); int present(void) { return absent(); }\n")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "lib.so"), str(source)], check=True
    )
    loads = "import ctypes, os\nctypes.CDLL(os.path.dirname(__file__) + '/lib.so', 2)\n" + SILU
    files = package(loads, digest=False)
    files["build/torch-cpu/lib.so"] = (tmp_path / "lib.so").read_bytes()
    hub.put("toy/kernel", files, branch="v2")
    expect_original("could not be imported", "undefined symbol: absent", spec="toy/kernel@v2")


def test_requirements_that_are_not_met(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package(DEADLY, **{"kernels-minver": "99.0.0"}))
    expect_original("requires kernels>=99.0")
    hub.put("toy/kernel", package(DEADLY, **{"python-depends": ["nonsense"]}), branch="v2")
    expect_original("nonsense", spec="toy/kernel@v2")
    depends = {"kernel-depends": [{"repo-id": "toy/absent", "version": 1}]}
    hub.put("toy/kernel", package(DEADLY, **depends), branch="v3")
    expect_original("toy/absent", spec="toy/kernel@v3")


# ------------------------------------------------------------------------------ the cache


def test_a_cache_that_cannot_be_written(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /proc not even root can make a file."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/hub-cache")
    expect_original("could not be loaded", "/proc/hub-cache")


def test_two_processes_write_the_same_cache(toy: HubServer, tmp_path: Path) -> None:
    toy.put("toy/kernel", package(more={f"part{i}.py": f"x = {i}\n" * 500 for i in range(6)}))
    toy.fail("GET", "/resolve/", Slow(0.2))
    code = (
        "from hfpatch.hub import HubOptions, HubSpec\nfrom hfpatch.hub.load import load\n"
        "input()\n"
        "package = load(HubSpec.parse('toy/kernel@v1'), HubOptions())\n"
        "print(package.module.silu.__name__, package.version)\n"
    )
    cache = tmp_path / "kernels"
    env = toy.env(tmp_path / "home", KERNELS_CACHE=str(cache))
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, text=True, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    results = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        results.append(out)
    assert results[0] == results[1] and results[0].startswith("silu ")
    assert list(cache.glob("kernels--toy--kernel/snapshots/*/build/torch-cpu/part5.py"))
    assert not list(tmp_path.glob("home/**/kernels--*")), "the variable says where"


def test_a_download_that_was_killed_is_taken_up(toy: HubServer, tmp_path: Path) -> None:
    toy.put("toy/kernel", package(more={f"part{i}.py": f"x = {i}\n" * 500 for i in range(6)}))
    toy.fail("GET", "/resolve/.*part3.py", Hang(60))
    command = [sys.executable, "-m", "hfpatch", "download", SPEC]
    env = toy.env(tmp_path / "home", HF_HUB_CACHE=constants.HF_HUB_CACHE)
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    while process.poll() is None and not toy.seen("GET", "part3.py"):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert toy.seen("GET", "part3.py"), "it ended before"
    toy.heal()
    assert expect_kernel().endswith(":torch-cpu")


def test_nothing_warns_where_all_is_well(toy: HubServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_kernel()
    assert kernels.hf_hub.CACHE_DIR is kernels.resolver.CACHE_DIR is None
