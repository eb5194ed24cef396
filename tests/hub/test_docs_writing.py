"""docs/writing-kernels.md from top to bottom: its commands, its edits, its scripts, in its order,
against a loopback Hub; last in a fresh process, a model with the published kernel."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from server import HubServer

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "writing-kernels.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|diff|python no-run)\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)

#: What the page's script does, with the kernel that was published.
PUBLISHED = """
import kernels
get = kernels.get_local_kernel
def published(path, **options):
    if str(path) != "my-kernel":
        return get(path, **options)
    return kernels.get_kernel("me/my-kernel", version=1, trust_remote_code=True)
kernels.get_local_kernel = published
"""
CALLED = """
calls, original = [], kernel.relu_squared
kernel.relu_squared = lambda x: calls.append(x.shape) or original(x)
with torch.no_grad():
    model(ids)
assert len(calls) == 2 and "kernels--me--my-kernel" in kernel.__file__, (calls, kernel)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)  # some fifteen processes that import torch, and two builds
def test_from_nothing_to_the_hub(hub: HubServer, tmp_path: Path) -> None:
    env = hub.env(
        tmp_path / "home", CUDA_VISIBLE_DEVICES="", HFPATCH_CUDA_ARCHS="none", OMP_NUM_THREADS="1"
    )

    def run(arguments: list[str], text: str = "") -> str:
        done = subprocess.run(
            arguments, env=env, cwd=tmp_path, input=text, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    printed: list[str] = []
    scripts: list[str] = []
    for kind, text in BLOCKS:
        if kind == "diff":
            printed.append(run(["patch", "-p1", "-d", "my-kernel"], text))
            assert "fuzz" not in printed[-1] and "offset" not in printed[-1], "the page is old"
        elif kind == "python no-run":
            scripts.append(text)
            printed.append(run([sys.executable, "-c", text]))
        else:
            for line in filter(None, text.splitlines()):
                program, *rest = shlex.split(line)
                if program == "pip":
                    continue
                module = ["-m", "hfpatch"] if program == "hfpatch" else []
                printed.append(run([sys.executable, *module, *rest]))
    everything = "\n".join(printed)
    first, second = (int(n) for n in re.findall(r"(\d+) passed", everything))
    assert second > first >= 20, "the new operator is tested too"
    assert "all passed" in everything and "dry run: nothing was sent" in everything
    assert "relu_squared" in everything and "GB/s" in everything
    assert everything.count("3 swapped") == 1  # two activations, and decoding
    repo = hub.repos["kernel", "me/my-kernel"]
    assert any(p.endswith(".abi3.so") for p in repo.commits[repo.branches["v1"]])
    assert (
        "- `gated_relu_squared`" in repo.commits[repo.branches["main"]]["README.md"].data.decode()
    )

    (model,) = (s for s in scripts if "hfpatch.apply" in s)
    assert "3 swapped" in run([sys.executable, "-c", PUBLISHED + model + CALLED])
    assert hub.seen("GET", "/resolve/")


def test_the_page_is_run_whole() -> None:
    """No command, edit or script stands in a block of another kind, except sessions of the shell
    that need a CUDA compiler: tests/build/test_ptx.py."""
    assert [kind for kind, _ in BLOCKS].count("diff") == 5
    fences = re.findall(r"^```(\S.*)$", DOC, re.MULTILINE)
    assert [kind for kind in fences if kind != "console"] == [kind for kind, _ in BLOCKS]
