"""`hfpatch coverage`: a sample of the models against what is committed; all in `make test-all`."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hfpatch import cli
from hfpatch.coverage import page
from hfpatch.coverage.blocks import NOT_RUN
from hfpatch.coverage.command import rows_of

DATA = Path(__file__).parent / "data" / "coverage.json"
COMMITTED = json.loads(DATA.read_text(encoding="utf-8"))

#: Encoders, decoders, vision, sound, several towers; what is served whole and what is not.
SAMPLE = (
    *("bert", "vit", "clip", "whisper", "llama", "mistral", "qwen3", "gemma2", "gemma3_text"),
    *("phi3", "t5", "t5gemma", "modernbert", "lfm2", "gte", "granitemoehybrid", "llama4_text"),
    *("convnext", "sam", "deepseek_v4", "seed_oss", "nemotron", "falcon", "moshi", "xlstm"),
)
CLASSES = (
    *("FluxTransformer2DModel", "WanTransformer3DModel", "LTXVideoTransformer3DModel"),
    *("AutoencoderKLWan", "UNet2DConditionModel", "ErnieImageTransformer2DModel"),
)
#: Those that are called too, for their blocks: a few seconds each.
CALLED = ("bert", "vit", "gemma2", "t5", "falcon", "gpt2", "exaone4_5_vision")


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: plans depend on them."""


def _counts(rows: dict[str, Any]) -> dict[str, Any]:
    """Of each row what is counted; reasons hold figures that differ from machine to machine."""
    return {
        name: {k: row.get(k) for k in ("category", "norms", "mlps")}
        | {"left": sorted(row.get("left", {}))}
        for name, row in rows.items()
    }


def _blocks(rows: dict[str, Any]) -> dict[str, Any]:
    """The same of blocks, of rows whose model was called when they were committed."""
    return {
        name: (row.get("blocks"), sorted(row.get("unfused", {})))
        for name, row in rows.items()
        if COMMITTED["models"][name].get("uncalled") != NOT_RUN
    }


def _of_the_versions() -> None:
    for library, known in COMMITTED["versions"].items():
        if version(library) != known:
            pytest.skip(f"the data are of {library} {known}, here is {version(library)}")


def test_a_sample_is_as_committed() -> None:
    _of_the_versions()
    kinds, classes = "|".join(SAMPLE), "|".join(CLASSES)
    only = re.compile(rf"^transformers \w+ \(({kinds})\)$|^diffusers ({classes})$")
    wanted = {n: r for n, r in COMMITTED["models"].items() if only.search(n)}
    assert len(wanted) == len(SAMPLE) + len(CLASSES)
    assert _counts(rows_of(only, called=False)) == _counts(wanted)


def test_blocks_of_a_sample_are_as_committed() -> None:
    _of_the_versions()
    only = re.compile(rf" \(({'|'.join(CALLED)})\)$| (CogView4|QwenImage21)Transformer2DModel$")
    wanted = _blocks({n: r for n, r in COMMITTED["models"].items() if only.search(n)})
    assert len(wanted) == len(CALLED) + 2
    assert _blocks(rows_of(only)) == wanted


@pytest.mark.exhaustive
def test_all_are_as_committed() -> None:
    _of_the_versions()
    found = rows_of(re.compile(""))
    assert _counts(found) == _counts(COMMITTED["models"])
    assert _blocks(found) == _blocks(COMMITTED["models"])


def test_the_page_is_of_the_data() -> None:
    text = (DATA.parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert text == page.page(COMMITTED), "run `hfpatch coverage --write`"
    assert COMMITTED["counts"] == page.counts_of(COMMITTED["models"])


def test_nothing_is_left_without_a_reason() -> None:
    for name, row in COMMITTED["models"].items():
        assert "nothing looks at it" not in str(row.get("left", "")), name
        whole = all(row[k][0] == row[k][1] for k in ("norms", "mlps") if k in row)
        assert whole is not bool(row.get("left")), name
        fused, called = row.get("blocks", (0, 0))
        assert (fused == called) is not bool(row.get("unfused")), name
        assert all(row.get("unfused", {}).values()), name


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["coverage", "--only", r"\(llama\)", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"].values()
    assert (row["category"], row["norms"], row["mlps"]) == ("leaves only", [5, 5], [2, 2])
    assert row["blocks"] == [2, 2]
    assert cli.main(["coverage", "--only", r"\(seed_oss\)"]) == 0
    said = capsys.readouterr().out
    assert "SeedOssMLP: unexplained: " in said
    (last,) = (line for line in said.splitlines() if line.startswith("transformers: "))
    pattern = r"models 1, .*nothing 0, not built 0, .* 0 of 1 \(0\.0%\); norms \d+ of "
    assert re.search(pattern, last)
    assert "diffusers: " not in said and "{" not in last


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "("], "`--only` '(' is not a regular expression"),
        (["--only", "no such model"], "matches no model; names are such as"),
        (["--only", "llama", "--write"], "`--write` is of all models: leave `--only` away"),
    ],
)
def test_bad_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["coverage", *arguments]) == 2
    assert said in capsys.readouterr().err
