"""Hub kernels in a model: found, pinned, trusted, verified, cached; each by the real clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from packages import SILU, build_files, fresh, package
from server import HubServer
from torch import nn

import hfpatch
from hfpatch.errors import (
    KernelIntegrityError,
    KernelLoadError,
    KernelUntrustedError,
    VerificationError,
)
from hfpatch.report import Report

X = torch.linspace(-4, 4, 96).reshape(2, 48)


def model() -> nn.Module:
    return nn.Sequential(nn.SiLU()).requires_grad_(False)


def apply(spec: str = "toy/kernel@v1", **arguments: object) -> Report:
    """The report of a model with one SiLU, whose kernel comes from `spec`."""
    m = model()
    report = hfpatch.apply(m, kernels={"silu": spec}, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(m(X), torch.nn.functional.silu(X))
    return report


def test_a_version_is_loaded_proven_and_reported(hub: HubServer) -> None:
    commit = hub.put("toy/kernel", package())
    hub.trust("toy")
    (swap,) = apply().swaps
    assert swap.source == "toy/kernel@v1"
    assert swap.version == f"{commit[:12]}:torch-cpu"


def test_a_commit_is_loaded_whatever_the_branch_is_now(hub: HubServer) -> None:
    hub.trust("toy")
    old = hub.put("toy/kernel", package())
    hub.put("toy/kernel", package("def silu(x): return x * 0\n"))
    (swap,) = apply(f"toy/kernel@{old}").swaps
    assert swap.version.startswith(old[:12])


def test_branches_only_when_asked_for(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package(), branch="experiment")
    with pytest.raises(ValueError, match="is not a pinned Hub kernel"):
        apply("toy/kernel@experiment")
    with pytest.raises(ValueError, match="is not a pinned Hub kernel"):
        apply("toy/kernel")
    with hub.quiet(), pytest.raises(ValueError, match="is not a Hub kernel"):
        apply("toy/../kernel@v1")
    (swap,) = apply("toy/kernel@experiment", hub={"allow_branches": True}).swaps
    assert swap.source == "toy/kernel@experiment"


def test_a_publisher_must_be_trusted_or_named(hub: HubServer) -> None:
    hub.put("toy/kernel", package())
    report = apply()
    assert [s.kind for s in report.skips] == ["unavailable"]
    assert "`toy` is not a trusted publisher" in report.skips[0].reason
    assert "hub={'trust_remote_code': ['toy/kernel']}" in report.skips[0].reason
    assert hub.seen("GET", "/resolve/") == [], "nothing was downloaded"
    with pytest.raises(KernelUntrustedError):
        apply(strict=True)
    for trust in (True, ["toy/kernel"]):
        fresh()
        assert apply(hub={"trust_remote_code": trust}).swaps
    # what was downloaded on the user's word is not trusted without it
    fresh()
    assert apply(hub={"trust_remote_code": ["toy/other"]}).skips
    hub.trust("toy")
    assert apply().swaps


def test_no_traffic_once_it_is_cached(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package() | {"README.md": b"# toy"} | package(variant="torch-cuda"))
    old = apply().swaps[0].version
    hub.put("toy/kernel", package("import torch\ndef silu(x): return torch.nn.SiLU()(x)\n"))
    cache = snapshot(Path(constants.HF_HUB_CACHE))
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        fresh()
        with hub.quiet():
            assert apply().swaps[0].version == old, "a moved version is not taken up by itself"
    # a read-only cache is as good: nothing was written to it, bytecode included
    assert snapshot(Path(constants.HF_HUB_CACHE)) == cache


def snapshot(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.lstat().st_mtime_ns
        for p in folder.rglob("*")
        if ".locks" not in p.parts
    }


FRESH = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")
if "--no-sockets" in sys.argv:
    socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import torch, hfpatch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                     num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(12).reshape(1, 12)
with torch.no_grad():
    before = model(ids).logits
    report = hfpatch.apply(model, kernels="me/hfpatch-kernels@v1", strict=True,
                           hub={"trust_remote_code": True})
    after = model(ids).logits
assert {s.source for s in report.swaps} == {"me/hfpatch-kernels@v1"}, report
print(len(report.swaps), float((after - before).abs().max() / before.abs().max()))
"""
GET_KERNEL = """
from kernels import get_kernel
k = get_kernel("me/hfpatch-kernels", version=1, trust_remote_code=True)
x = torch.randn(3, 8)
assert torch.allclose(k.silu(x), torch.nn.functional.silu(x))
print(k.__file__)
"""


@pytest.mark.slow
def test_our_own_build_is_published_and_loaded_in_fresh_processes(
    hub: HubServer, kernels_dir: Path, tmp_path: Path
) -> None:
    """Uploaded by huggingface_hub, loaded in a patched model and by `kernels.get_kernel`; last
    with every socket forbidden and telemetry off, of which kernels 0.17.2 dies on its own."""
    env = hub.env(tmp_path / "home")

    def run(code: str, *arguments: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=env | more, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(
        "import sys; from huggingface_hub import HfApi; api = HfApi()\n"
        "api.create_repo('me/hfpatch-kernels', repo_type='kernel')\n"
        "api.create_branch('me/hfpatch-kernels', branch='v1', repo_type='kernel')\n"
        "api.upload_folder(repo_id='me/hfpatch-kernels', repo_type='kernel', revision='v1',"
        " folder_path=sys.argv[1], allow_patterns='build/*-cpu-*/**', ignore_patterns='*.pyc')",
        str(kernels_dir),
    )
    assert hub.seen("PUT", "/store/"), "the library went by LFS"
    uploaded = hub.repos["kernel", "me/hfpatch-kernels"]
    files = uploaded.commits[uploaded.branches["v1"]]
    assert {p: b.data for p, b in files.items() if p != ".gitattributes"} == build_files(
        kernels_dir
    )
    swaps, difference, file = run(FRESH + GET_KERNEL).split()
    assert str(tmp_path / "home") in file
    assert int(swaps) == 7 and float(difference) < 1e-5
    with hub.quiet():
        assert run(FRESH, "--no-sockets", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
        assert run(FRESH, "--no-sockets", HF_HUB_DISABLE_TELEMETRY="1")


def test_telemetry_switched_off_is_no_obstacle(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    hub.trust("toy")
    hub.put("toy/kernel", package())
    assert apply().swaps


def test_local_kernels_and_kernels_cache(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of `kernels` mean here what they mean there."""
    for path, data in package().items():
        file = tmp_path / "mine" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    monkeypatch.setenv("LOCAL_KERNELS", f"toy/kernel={tmp_path / 'mine'}")
    with hub.quiet():
        assert apply().swaps[0].version == "LOCAL_KERNELS:torch-cpu"
    monkeypatch.delenv("LOCAL_KERNELS")
    import kernels.hf_hub

    fresh()
    hub.trust("toy")
    hub.put("toy/kernel", package())
    for module in (kernels.hf_hub, kernels.resolver):
        monkeypatch.setattr(module, "CACHE_DIR", str(tmp_path / "elsewhere"))
    assert apply().swaps
    assert list((tmp_path / "elsewhere").glob("kernels--toy--kernel/snapshots/*/build/torch-cpu"))
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_dependencies_are_resolved_and_verified_too(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/base", package("import torch\nact = torch.nn.functional.silu\n", name="base"))
    source = (
        "from kernels import get_kernel_dep\nbase = get_kernel_dep('toy/base')\n"
        "def silu(x): return base.act(x)\n"
    )
    depends = {"kernel-depends": [{"repo-id": "toy/base", "version": 1}]}
    hub.put("toy/kernel", package(source, **depends))
    assert apply().swaps
    fresh()
    (base,) = Path(constants.HF_HUB_CACHE).glob(
        "kernels--toy--base/snapshots/*/build/*/__init__.py"
    )
    base.resolve().write_text("raise SystemExit('it was imported')")
    assert "`__init__.py` is damaged" in apply().skips[0].reason


def test_an_order_of_preference(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package())
    m = model()
    order = ["toy/absent@v1", "toy/kernel@v1", "torch"]
    report = hfpatch.apply(m, kernels={"silu": order, "*": None})
    assert [s.kind for s in report.skips] == ["no gain"], "a preference is used where it pays"
    (note,) = report.notes
    assert "toy/absent@v1" in note and note.endswith("Trying `toy/kernel@v1` instead.")
    report = hfpatch.apply(m, kernels={"silu": ["toy/absent@v1", "torch"]})
    assert report.notes[0].endswith("Using torch's own operators instead.")
    with pytest.raises(KernelLoadError, match="toy/absent@v1"):
        hfpatch.apply(m, kernels={"silu": order}, strict=True)


GELU = """
import torch

def gelu(x, approximate="none"):
    return torch.nn.functional.gelu(x, approximate=approximate) FACTOR

__all__ = ["gelu"]
"""


def test_a_kernel_that_a_module_cannot_take_is_passed_over(hub: HubServer) -> None:
    """Wrong, or without code for the device: the next in the order of preference is proven."""
    from transformers.activations import NewGELUActivation

    hub.trust("toy")
    hub.put("toy/wrong", package(GELU.replace("FACTOR", "* 1.01")))
    hub.put("toy/xpu", package(GELU.replace("FACTOR", ""), backend={"type": "xpu"}))
    hub.put("toy/kernel", package(GELU.replace("FACTOR", "")))
    module = nn.Sequential(NewGELUActivation())
    expected = module(X)

    def patched(*order: str, **arguments: object) -> Report:
        report = hfpatch.apply(module, kernels={"gelu": list(order)}, **arguments)  # type: ignore[arg-type]
        torch.testing.assert_close(module(X), expected)
        return report

    wrong, xpu, good = "toy/wrong@v1", "toy/xpu@v1", "toy/kernel@v1"
    report = patched(wrong, xpu, good, "local")
    assert [s.source for s in report.swaps] == [good]
    first, second = report.notes
    assert f"`{wrong}` for `gelu` is wrong" in first and first.endswith(f"`{xpu}` instead.")
    assert "has no code for cpu" in second and second.endswith(f"Trying `{good}` instead.")
    assert [s.source for s in patched(wrong, "local").swaps] == ["local"]
    assert [s.kind for s in patched(wrong).skips] == ["rejected"], "another order, another outcome"
    assert [s.source for s in patched(xpu, "torch").swaps] == ["torch"]
    report = hfpatch.apply(module, kernels="hub", hub={"repos": [wrong, good]})
    assert [s.source for s in report.swaps] == [good]
    with pytest.raises(VerificationError):
        patched(wrong, good, strict=True)
    assert [s.source for s in patched(xpu, good, strict=True).swaps] == [good]


def test_the_source_hub_is_the_users_list_or_the_known_repositories(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package())
    m = nn.Sequential(nn.SiLU(), nn.LayerNorm(48)).requires_grad_(False)
    report = hfpatch.apply(m, kernels="hub", hub={"repos": ["toy/kernel@v1"]})
    assert [s.source for s in report.swaps] == ["toy/kernel@v1"]
    assert "exports no `layer_norm`; it has: silu" in report.skips[0].reason
    fresh()
    report = hfpatch.apply(m, kernels={"silu": "hub", "layer_norm": ["hub", "torch"]})
    assert "kernels-community/activation@v1" in report.skips[0].reason
    asked = "\n".join(hub.requests)
    assert "kernels-community/flash-attn-ops" in asked and "kernels-community/layer-norm" in asked


def test_another_signature_is_refused_before_a_call(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package("def silu(out, x):\n    raise SystemExit\n"))
    reason = apply().skips[0].reason
    assert "has `silu(out, x)`, expected `silu(x)`" in reason and "hfpatch.register" in reason


def test_a_kernel_that_computes_something_else_is_rejected(hub: HubServer) -> None:
    """Also without `verify`, which trusts our own kernels only."""
    hub.trust("toy")
    hub.put("toy/kernel", package(SILU.replace("silu(x)\n\n", "silu(x) * 1.001\n\n")))
    for verify in (True, False):
        report = apply(verify=verify)
        assert [s.kind for s in report.skips] == ["rejected"]
        assert "`toy/kernel@v1` for `silu` is wrong" in report.skips[0].reason
    with pytest.raises(VerificationError):
        apply(strict=True)


def test_training_needs_a_differentiable_kernel(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package())
    assert "is not differentiable" in apply(mode="training").skips[0].reason


def test_a_planted_file_is_found_before_anything_is_imported(hub: HubServer) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package(digest=False))
    assert apply().swaps
    fresh()
    (folder,) = Path(constants.HF_HUB_CACHE).glob("kernels--toy--kernel/snapshots/*/build/*")
    (folder / "torch.py").write_text("raise SystemExit")
    report = apply()
    assert "`torch.py` was put there by somebody else" in report.skips[0].reason
    with pytest.raises(KernelIntegrityError):
        apply(strict=True)


def test_bytecode_in_the_cache_is_not_run(hub: HubServer) -> None:
    """Digests cover the sources; bytecode beside them would be run in their place. `kernels` writes
    some when it imports, so its presence is no reason to refuse."""
    import importlib.util
    import py_compile

    hub.trust("toy")
    source = SILU.replace("import torch", "import torch\nfrom .helper import scale")
    source = source.replace("silu(x)\n\n", "silu(x) * scale\n\n")
    hub.put("toy/kernel", package(source, more={"helper.py": "scale = 1.0\n"}))
    assert apply().swaps
    (helper,) = Path(constants.HF_HUB_CACHE).glob("kernels--toy--*/snapshots/*/build/*/helper.py")
    bad = Path("bad.py")
    bad.write_text("scale = 7.0\n")
    os.utime(bad, ns=(helper.stat().st_atime_ns, helper.stat().st_mtime_ns))
    compiled = importlib.util.cache_from_source(str(helper))
    py_compile.compile(str(bad), cfile=compiled, dfile=str(helper), doraise=True)
    fresh()
    for name in [n for n in sys.modules if n.startswith("_toy_")]:
        del sys.modules[name]
    assert apply().swaps, "another scale would have been rejected"


def test_the_environment_and_the_config_file(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.trust("toy")
    hub.put("toy/kernel", package())
    config = tmp_path / "pyproject.toml"
    config.write_text('[tool.hfpatch.kernels]\nsilu = "toy/kernel@v1"\n"*" = ["local", "torch"]\n')
    monkeypatch.setenv("HFPATCH_CONFIG", str(config))
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    m = model()
    report = hfpatch.apply(m)
    assert [s.source for s in report.swaps] == ["toy/kernel@v1"]
    assert f"`{config}` chose the kernels: silu: toy/kernel@v1; *: local, torch" in report.notes[0]
    monkeypatch.delenv("HFPATCH_CONFIG")
    config.write_text('[tool.hfpatch.kernels]\nsilu = "none"\n')
    assert [s.kind for s in hfpatch.apply(m).skips] == ["off"], "a file above may do that"
    monkeypatch.setenv("HFPATCH_KERNELS", "silu=none; *=torch")
    assert [s.kind for s in hfpatch.apply(m).skips] == ["off"]
    assert [s.source for s in hfpatch.apply(m, kernels={"silu": "toy/kernel@v1"}).swaps]
    monkeypatch.setenv("HFPATCH_KERNELS", "toy/kernel@v1")
    assert [s.source for s in hfpatch.apply(m).swaps] == ["toy/kernel@v1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hub]\ntrust-remote-code = true\n", "taken from the argument `hub=` alone"),
        ("[hub]\nrepo = 1\n", "has no key 'repo'"),
        ("[hub]\nrepos = 'toy/kernel@v1'\n", "must be a sequence of repositories"),
        ("[hub]\nrequire-signed = 'yes'\n", "must be True or False"),
        ("kernel = 'local'\n", "has no key 'kernel'"),
        ("kernels = ", "cannot be read"),
        ("kernels = 'toy/kernel@main'\n", "is not a pinned Hub kernel"),
        ("[kernels]\nrmsnorm = 'local'\n", "unknown op `rmsnorm`"),
    ],
)
def test_a_wrong_config_file_is_named(
    text: str, message: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hfpatch.toml").write_text(text)
    monkeypatch.delenv("HFPATCH_CONFIG")
    with hub.quiet(), pytest.raises(ValueError, match=message):
        hfpatch.apply(model())
    monkeypatch.setenv("HFPATCH_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match=r"HFPATCH_CONFIG is .*none\.toml"):
        hfpatch.apply(model())


@pytest.mark.parametrize(
    "text", [b"[project\nname = 1", b"tool = 3\n", b"\xff\xfe", b"# [tool.hfpatch]\n[x"]
)
def test_a_broken_pyproject_of_others_stops_nothing(
    text: bytes, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HFPATCH_CONFIG")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_bytes(text)
    with hub.quiet():
        hfpatch.apply(model())
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.hfpatch]\nkernels = ")
    with hub.quiet(), pytest.raises(ValueError, match=r"pyproject\.toml` cannot be read"):
        hfpatch.apply(model())


def test_the_api_of_the_server_is_the_hubs(hub: HubServer, tmp_path: Path) -> None:
    """The rest of what a publisher needs: branches, deletions, conflicts, pages of a tree."""
    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo("me/k", repo_type="kernel", exist_ok=True)
    api.create_repo("me/k", repo_type="kernel", exist_ok=True)
    with pytest.raises(Exception, match="409"):
        api.create_repo("me/k", repo_type="kernel")
    with pytest.raises(Exception, match="401"):
        HfApi(endpoint=hub.url, token="hf_wrong").create_repo("me/x", repo_type="kernel")
    api.create_branch("me/k", branch="v1", repo_type="kernel")
    api.create_branch("me/k", branch="v1", repo_type="kernel", exist_ok=True)
    for i in range(120):
        (tmp_path / "up" / f"d{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "up" / f"d{i % 3}" / f"{i}.txt").write_text(str(i))
    first = api.upload_folder(
        repo_id="me/k", repo_type="kernel", folder_path=tmp_path / "up", revision="v1"
    )
    tree = api.list_repo_tree("me/k", repo_type="kernel", revision="v1", recursive=True)
    paths = {t.path for t in tree}
    assert len([p for p in paths if p.endswith(".txt")]) == 120 and "d0" in paths
    again = api.upload_folder(
        repo_id="me/k", repo_type="kernel", folder_path=tmp_path / "up", revision="v1"
    )
    assert again.oid == first.oid, "nothing changed, nothing is committed"
    api.delete_folder("d1", repo_id="me/k", repo_type="kernel", revision="v1")
    api.delete_file("d0/0.txt", repo_id="me/k", repo_type="kernel", revision="v1")
    files = api.list_repo_files("me/k", repo_type="kernel", revision="v1")
    assert len(files) == 1 + 120 - 40 - 1
    with pytest.raises(Exception, match="412"):
        api.upload_file(
            repo_id="me/k", repo_type="kernel", revision="v1", path_in_repo="x",
            path_or_fileobj=b"x", parent_commit=first.oid,
        )  # fmt: skip
    assert api.kernel_info("me/k", revision="v1").sha != first.oid
    api.delete_branch("me/k", branch="v1", repo_type="kernel")
    assert [b.name for b in api.list_repo_refs("me/k", repo_type="kernel").branches] == ["main"]
