"""The tests whose numbers depend most on the order of sums, as other CPUs would run them.

`make test-cpus` runs all numeric tests so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cpus
import pytest

REPORT = "import torch as t; print(t.backends.cpu.get_cpu_capability(), t.get_num_threads())"


@pytest.mark.usefixtures("kernels_module")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        # Without vectors sums differ most; kernels and steps run for AVX2 in tests of their own.
        pytest.param(n, marks=() if n == "baseline" else pytest.mark.exhaustive)
        for n in cpus.SETTINGS
        if n != "1-thread"  # baseline has one
    ],
)
def test_order_of_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the build was brought up to date here, and the other process is no worker of pytest-xdist
    monkeypatch.setenv("HFPATCH_TEST_BUILD", "0")
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(variable, raising=False)
    # hypothesis, which none of these needs, takes seconds to import
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    options = ("-q", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    status = cpus.run(name, cpus.SENSITIVE, options)
    if status == cpus.SKIPPED:
        pytest.skip(str(cpus.SETTINGS[name].missing()))
    assert status == 0


@pytest.mark.parametrize(
    ("name", "seen"), [("avx2", "AVX2 "), ("baseline", "DEFAULT 1\n"), ("4-threads", " 4\n")]
)
def test_settings_take_effect(name: str, seen: str) -> None:
    setting = cpus.SETTINGS[name]
    if (why := setting.missing()) is not None:
        pytest.skip(why)
    run = subprocess.run(
        [sys.executable, "-c", REPORT],
        env=cpus.environment(setting),
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen in run.stdout


def test_files_are_there() -> None:
    named = {t.partition("::")[0] for t in (*cpus.NUMERIC, *cpus.SENSITIVE)}
    assert all((cpus.ROOT / path).exists() for path in named)
    assert {p.name for p in Path(__file__).parent.glob("test_*blocks*.py")} <= {
        Path(path).name for path in cpus.NUMERIC
    }


def test_what_compares_results_runs_under_every_setting() -> None:
    """A new file too, unless it is named with the reason why not."""
    assert {"tests/test_models.py", "tests/compat/test_matrix.py", "tests/test_head_loss.py",
            "tests/decoding/test_model_generate.py", "tests/decoding/test_choice.py",
            } <= set(cpus.NUMERIC)  # fmt: skip
    assert not [p for p in cpus.NUMERIC if p.startswith(("tests/kernels/", "tests/gpu/"))]
    assert all((cpus.ROOT / path).exists() for path in cpus.ELSEWHERE)


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpus.main(["avx3"]) == cpus.BAD_USAGE
    assert "avx2, baseline" in capsys.readouterr().err
