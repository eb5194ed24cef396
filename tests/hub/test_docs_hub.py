"""The commands of docs/hub.md, in the order in which they stand there, against a loopback Hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packages import fresh, package
from server import HubServer

from hfpatch.cli import main
from hfpatch.hub.adapters import ADAPTERS
from hfpatch.hub.lock import LockFile
from hfpatch.kernels import config

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)


COMMANDS = [
    line
    for block in blocks("sh")
    for line in block.splitlines()
    if line and not line.startswith("export ")
]


@pytest.mark.slow
def test_the_commands_run(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hfpatch's own in this process, which would take seconds to start anew for each: each
    begins with no kernel loaded."""
    for organization in ("toy", "kernels-community"):
        hub.trust(organization)
    hub.put("toy/kernel", package())
    hub.put("kernels-community/activation", package(name="activation"))
    kernels_lock = "kernels download ."  # reads what `hfpatch lock` wrote beside its own file
    env = hub.env(tmp_path / "home", CUDA_VISIBLE_DEVICES="")
    printed = {}
    assert len(COMMANDS) == 8
    for command in (*COMMANDS, kernels_lock):
        program, *rest = shlex.split(command)
        if program == "python":
            arguments = [str(ROOT / rest[0]), *rest[1:], "--device", "cpu"]
        elif program == "kernels":
            arguments = ["-c", "from kernels.cli import main; main()", *rest]
        else:
            fresh()
            assert main(rest) == 0, command
            printed[command] = "".join(capsys.readouterr())
            continue
        done = subprocess.run(
            [sys.executable, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        printed[command] = done.stdout + done.stderr
    assert "gated_packed: has no `silu_and_mul`" in printed[COMMANDS[0]]
    assert "torch-cpu" in printed["hfpatch download toy/kernel@v1"]
    assert "toy/kernel@v1" in printed["hfpatch download"]
    locked = LockFile.read(tmp_path / "hfpatch.lock").kernels["toy/kernel@v1"]
    (pin,) = json.loads((tmp_path / "kernels.lock").read_text())
    assert pin["lock"]["commit"] == locked.commit and set(locked.variants) == {"torch-cpu"}
    assert f"toy/kernel (revision: {locked.commit})" in printed[kernels_lock]
    assert "largest error against fp64" in printed[COMMANDS[-3]]
    assert "1 swapped" in printed[COMMANDS[-2]]
    assert "toy/kernel@v1 " in printed[COMMANDS[-1]] and " us" in printed[COMMANDS[-1]]


def test_the_environment_and_the_config_file_are_understood(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfpatch.kernels.choices import Choices

    exports = [
        line for block in blocks("sh") for line in block.splitlines() if line.startswith("export")
    ]
    assert len(exports) == 2
    for line in exports:
        name, value = shlex.split(line)[1].split("=", 1)
        monkeypatch.setenv(name, value)
        choices = Choices.parse(config.read_defaults().kernels)
        assert choices.of("layer_norm") in (("hub", "local", "torch"), ("local", "torch"))
    assert choices.of("gelu") is None and choices.explicit("silu")
    monkeypatch.delenv("HFPATCH_KERNELS")
    (toml,) = blocks("toml")
    (tmp_path / "hfpatch.toml").write_text(toml)
    monkeypatch.setenv("HFPATCH_CONFIG", str(tmp_path / "hfpatch.toml"))
    defaults = config.read_defaults()
    assert defaults.hub.require_signed and defaults.hub.lockfile == tmp_path / "hfpatch.lock"
    assert Choices.parse(defaults.kernels).explicit("rms_norm")


def test_the_table_of_adapters_is_the_codes() -> None:
    rows = re.findall(r"^\| `(kernels-community/[^`]+)` \| ([^|]+) \|", DOC, re.MULTILINE)
    shown = [(spec, tuple(re.findall("`([a-z_]+)`", ops))) for spec, ops in rows]
    assert sorted(shown) == sorted((a.spec, tuple(row.op for row in a.rows)) for a in ADAPTERS)


def test_errors_that_are_named_exist() -> None:
    from hfpatch import errors

    for name in re.findall(r"^\| `(\w+Error)` \|", DOC, re.MULTILINE):
        assert issubclass(getattr(errors, name), errors.HfpatchError)
    assert os.path.exists(ROOT / "examples" / "hub_kernels.py")
