"""Nothing degrades in silence: one warning with what to do, and a record of the logger."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import hfpatch
from hfpatch.announce import logger
from hfpatch.errors import KernelLoadError
from hfpatch.hub import HubOptions
from hfpatch.kernels import config, sources


@pytest.fixture(autouse=True)
def _usual_level() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def said(call: Any) -> list[str]:
    """What a call warns of, and that the logger has the same."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        logger.removeHandler(handler)
    ours = [w for w in caught if str(w.message).startswith("hfpatch: ")]
    assert all(w.category is RuntimeWarning for w in ours)
    assert all(w.filename == __file__ for w in ours), "it points at who called"
    texts = [str(w.message).removeprefix("hfpatch: ") for w in ours]
    assert texts == records
    return texts


def test_a_build_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        raise KernelLoadError("the local kernel build is damaged. Rebuild it")

    monkeypatch.setattr(sources, "_load_local", broken)
    model = zoo.ENTRIES["llama"].build()
    (text,) = said(lambda: hfpatch.apply(model))
    assert text.startswith("the local kernel build is damaged. Rebuild it")
    report = hfpatch.status(model)
    assert text in report.notes


def test_a_script_module() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.LayerNorm(8)))
    (text,) = said(lambda: hfpatch.apply(scripted))
    assert "it is a ScriptModule" in text and "torch.jit keeps no kernels" in text


def test_unknown_classes() -> None:
    (text,) = said(lambda: hfpatch.apply(nn.Sequential(Odd())))
    assert text == (
        "nothing was swapped in `Sequential`: none of its modules is of a class that hfpatch "
        "knows; `hfpatch.register` adds one"
    )


def test_an_include_that_selects_nothing_known(kernels_module: object) -> None:
    """Other modules of the model are known: it is the pattern that selects none."""
    model = zoo.ENTRIES["llama"].build()
    (text,) = said(lambda: hfpatch.apply(model, include="model.embed_tokens"))
    note = "'model.embed_tokens' in `include` matches Embedding, which hfpatch has no kernel for"
    assert text == (
        "nothing was swapped in `LlamaForCausalLM`: `include` selects no module that hfpatch has "
        f"a kernel for: {note}"
    )
    assert note in hfpatch.status(model).notes


def test_a_model_on_meta(kernels_module: object) -> None:
    """One remedy, for its decoding steps too, and a module that has a path."""
    model = zoo.ENTRIES["llama"].build().to("meta")
    (text,) = said(lambda: hfpatch.apply(model))
    assert "stay as they are, `model.layers.0.mlp` because: its weights are on the meta" in text
    reasons = {s.reason for s in hfpatch.status(model).skips}
    assert len(reasons) == 2 and all("; load " in r and "then call apply" in r for r in reasons)
    (text,) = said(lambda: hfpatch.apply(model, include="LlamaForCausalLM"))
    assert "stay as they are, the model itself because: decoding: " in text


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ({"mode": "training", "decoding": "int8"}, "`decoding='int8'` serves no step under mode="),
        ({"mode": "training", "decoding": True}, "`decoding=True` serves no step under mode="),
        ({"mode": "training", "blocks": True}, "`blocks=True` captures nothing: mode='training'"),
        ({"verify": False, "blocks": True}, "`blocks=True` captures nothing: a captured block"),
        ({"kernels": "torch", "blocks": True}, "`blocks=True` captures nothing: its kernels are"),
    ],
    ids=str,
)
def test_what_is_asked_for_in_vain(
    arguments: dict[str, Any], begins: str, kernels_module: object
) -> None:
    model = zoo.ENTRIES["llama"].build()
    (text,) = said(lambda: hfpatch.apply(model, **arguments))
    assert text.startswith(begins)
    for report in (hfpatch.status(model), hfpatch.plan(model, **arguments)):
        assert text in report.notes
    (asked,) = {"decoding", "blocks"} & set(arguments)
    assert said(lambda: hfpatch.apply(model, **(arguments | {asked: "auto"}))) == []


def test_modules_that_all_stay() -> None:
    model = nn.Sequential(nn.LayerNorm(8)).double()
    (text,) = said(lambda: hfpatch.apply(model))
    assert text.startswith("nothing was swapped in `Sequential`: 1 modules of ")
    assert "stay as they are, `0` because: " in text
    assert "torch.float64" in text


def test_nothing_is_said_where_nothing_is_lost(kernels_module: object) -> None:
    model = zoo.ENTRIES["llama"].build()
    assert said(lambda: hfpatch.apply(model)) == []
    hfpatch.restore(model)
    assert said(lambda: hfpatch.apply(model, exclude="*")) == []
    assert said(lambda: hfpatch.apply(model, kernels={"*": None})) == []
    assert said(lambda: hfpatch.plan(nn.Sequential(Odd()))) == []


def test_verbosity() -> None:
    hfpatch.set_verbosity("error")
    assert said(lambda: hfpatch.apply(nn.Sequential(Odd()))) == []
    hfpatch.set_verbosity(logging.WARNING)
    assert len(said(lambda: hfpatch.apply(nn.Sequential(Odd())))) == 1
    with pytest.raises(ValueError, match=r"`level` must be one of debug, info.*, got 'loud'"):
        hfpatch.set_verbosity("loud")
    with pytest.raises(TypeError, match="`level` must be a str or an int, got float"):
        hfpatch.set_verbosity(1.5)  # type: ignore[arg-type]


def test_nothing_is_printed_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """The logger has no handler of its own that shows what the warning shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(nn.Sequential(Odd()))
    assert capfd.readouterr().err == ""


def test_a_kernel_without_code_for_the_device_is_warned_of(kernels_module: object) -> None:
    """Though other modules are swapped: a kernel that was asked for could not be had."""
    from hfpatch.ops.rms_norm import rms_norm

    model = zoo.ENTRIES["llama"].build()
    handle = hfpatch.register(op="rms_norm", kernel=rms_norm, name="gpu-only", devices="cuda")
    try:
        (text,) = said(lambda: hfpatch.apply(model, kernels={"rms_norm": "gpu-only"}))
    finally:
        handle.remove()
    assert text.endswith(
        "because: kernel `gpu-only` has no code for cpu; the report has all reasons"
    )
    report = hfpatch.status(model)
    assert report.swaps and {s.kind for s in report.skips} >= {"unavailable"}


def test_a_build_without_code_for_the_device_says_what_to_do(
    kernels_dir: Path, tmp_path: Path
) -> None:
    name = next(p.name for p in (kernels_dir / "build").iterdir() if "-cpu-" in p.name)
    shutil.copytree(kernels_dir / "build" / name, tmp_path / "build" / name)
    (tmp_path / "REASON.json").write_text('{"reason": "cuda kernels were not built: no nvcc"}')
    kernel = sources.local_package(tmp_path).kernel("rms_norm")
    assert kernel.refuses("cpu") is None
    assert kernel.refuses("cuda") == (
        f"kernel `local` has no code for cuda; the local build is `{name}` (cuda kernels were not "
        "built: no nvcc). Rebuild it here with `pip install --force-reinstall --no-deps .`"
    )


# ------------------------------------------------------------------------------ who chose


@pytest.fixture
def in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HFPATCH_CONFIG", raising=False)
    monkeypatch.delenv("HFPATCH_KERNELS", raising=False)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    return tmp_path


def notes() -> tuple[str, ...]:
    return hfpatch.plan(nn.Sequential(nn.LayerNorm(8))).notes


def test_the_report_names_what_chose(
    in_a_project: Path, monkeypatch: pytest.MonkeyPatch, kernels_module: object
) -> None:
    assert notes() == ()
    file = in_a_project / "hfpatch.toml"
    file.write_text('kernels = ["torch"]\n')
    assert notes() == (f"the config file `{file}` chose the kernels: *: torch",)
    model = nn.Sequential(nn.LayerNorm(8))
    assert hfpatch.apply(model).notes == hfpatch.status(model).notes == notes()
    file.write_text("[hub]\nrequire-signed = true\n")
    said_of_the_hub = f"the config file `{file}` chose for the Hub: require-signed = True"
    assert notes() == (said_of_the_hub,)
    assert hfpatch.plan(model, hub=HubOptions()).notes == (), "an argument counts"
    monkeypatch.setenv("HFPATCH_KERNELS", "local,torch")
    assert notes() == (
        "the variable HFPATCH_KERNELS chose the kernels: local,torch",
        said_of_the_hub,
    )
    assert hfpatch.plan(model, kernels="torch").notes == (said_of_the_hub,)


@pytest.mark.parametrize(
    "text",
    [
        "[tool.other\n",
        "x = [[[",
        "[tool]\nhfpatch_helper = 1\n[tool.hfpatch-extras\nx = ",
        "\x00",
        "[project]\nname = 'a'\nname = 'b'\n",
        "tool = 3\n",
        "",
    ],
)
def test_a_pyproject_of_others_stops_nothing(in_a_project: Path, text: str) -> None:
    (in_a_project / "pyproject.toml").write_text(text)
    assert notes() == ()


def test_a_broken_pyproject_of_ours_is_an_error(in_a_project: Path) -> None:
    (in_a_project / "pyproject.toml").write_text("[tool.hfpatch]\nkernels = [\n")
    with pytest.raises(ValueError, match=r"the config file `.*pyproject.toml` cannot be read"):
        notes()


def test_a_working_directory_that_is_gone(in_a_project: Path) -> None:
    (in_a_project / "inside").rmdir()
    assert notes() == ()


def test_folders_that_may_not_be_looked_into(
    in_a_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as m:
        m.setattr(Path, "is_file", refused)
        assert config.config_file() is None
