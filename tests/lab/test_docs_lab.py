"""docs/lab.md: its files are written and its commands run, in its order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfpatch import cli
from hfpatch.lab.experience import SHIPPED, Entry, Log

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lab.md"


def blocks() -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^```(\w+(?: [\w-]+)?)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_module: object
) -> None:
    monkeypatch.chdir(tmp_path)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("HFPATCH_STATE", str(state))
    done = 0
    for info, text in blocks():
        if info in ("cpp", "python"):
            name = re.match(r"(?://|#) ([\w.]+):", text)
            assert name is not None
            Path(name[1]).write_text(text)
        if info != "sh":
            continue
        for line in text.splitlines():
            words, _, note = line.partition("  #")
            wanted = re.search(r"exit status (\d)", note)
            args = shlex.split(words)
            assert args[0] == "hfpatch"
            assert cli.main(args[1:]) == (int(wanted[1]) if wanted else 0), line
            done += 1
    assert done > 15
    for name in ("lab/env_check.md", "lab/v0/correctness.md", "lab/v0/ncu_summary.md",
                 "lab/v0/ncu_details.md", "lab/final_report.md", "lab/benchmark.md"):  # fmt: skip
        assert Path(name).read_text().startswith("#")
    assert len(Log(state / "experience.jsonl").entries()) == 1


def test_the_commands_for_a_gpu_are_some() -> None:
    parser = cli.build_parser()
    (text,) = (text for info, text in blocks() if info == "sh no-run")
    for line in text.splitlines():
        parser.parse_args(shlex.split(line)[1:])


def test_what_the_page_counts_and_names() -> None:
    text = PAGE.read_text()
    assert f" {len(Log(SHIPPED).entries())} entries" in text
    said = text.split("An entry has", 1)[1]
    assert set(re.findall(r"`(\w+)`", said)) >= set(Entry.__dataclass_fields__)
