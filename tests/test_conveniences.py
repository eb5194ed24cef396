"""What people expect beside `apply`: a `with` block, lazy names, charts, suggestions."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import warnings
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import hfpatch
from hfpatch.ops import OPS
from hfpatch.planning.plan import SKIP_KINDS, Plan, Skip
from hfpatch.report import Report
from hfpatch.text import meant

ROOT = Path(__file__).resolve().parent.parent


def llama() -> Any:
    return zoo.ENTRIES["llama"].build()


def paths(model: Any) -> set[str]:
    return {s.path for s in hfpatch.status(model).swaps}


def dicts(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(m.__dict__) for m in model.modules()]


# ------------------------------------------------------------------------------ with applied(...)


def test_applied_and_gone() -> None:
    model = llama()
    before = dicts(model)
    with hfpatch.applied(model, exclude="LlamaMLP") as report:
        assert paths(model) == {s.path for s in report.swaps} != set()
        assert "LlamaMLP" not in {s.class_name for s in report.swaps}
    assert dicts(model) == before


def test_applied_is_undone_where_the_block_raises() -> None:
    model = llama()
    with pytest.raises(KeyError), hfpatch.applied(model):
        raise KeyError("the user's")
    assert not paths(model)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_applied_where_the_pipeline_lets_go_of_a_module_inside(nested: bool, alone: bool) -> None:
    from diffusers import AutoencoderTiny, DDIMPipeline, DDIMScheduler, UNet2DModel

    class Pipe(DDIMPipeline):  # type: ignore[misc]
        def __init__(self, unet: Any, vae: Any, scheduler: Any) -> None:
            super().__init__(unet, scheduler)
            self.register_modules(vae=vae)

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    unet = UNet2DModel(8, block_out_channels=(32,), norm_num_groups=8, **blocks).eval()
    vae = None if alone else AutoencoderTiny(encoder_block_out_channels=(8,) * 4)
    pipe = Pipe(unet, vae, DDIMScheduler())
    before = dicts(unet)
    outer = hfpatch.applied(pipe, exclude="*.mid_block.*") if nested else nullcontext()
    with outer, hfpatch.applied(pipe):
        assert paths(unet)
        pipe.unet = None  # for its memory, before the latents are decoded
    assert dicts(unet) == before


def test_applied_goes_back_to_the_apply_before() -> None:
    model = llama()
    hfpatch.apply(model, mode="training", include="LlamaRMSNorm")
    before = paths(model)
    with hfpatch.applied(model):
        assert paths(model) > before
        with hfpatch.applied(model, include="LlamaMLP"):
            assert not paths(model) & before
        assert paths(model) > before
    assert paths(model) == before
    assert hfpatch.status(model).plan.mode == "training"


@pytest.mark.parametrize("apply_before", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_applied_in_blocks_that_overlap(order: tuple[int, ...], apply_before: bool) -> None:
    """As of two threads: the model is as it was when the last one has ended, and a block that goes
    on keeps its kernels."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    if apply_before:
        hfpatch.apply(model, include="2")
    before = dicts(model)
    selected = [{"0", "2"}, {"0"}, {"2"}]
    blocks = [hfpatch.applied(model, include=sorted(s)) for s in selected]
    for block in blocks:
        block.__enter__()
    going = [0, 1, 2]
    for i in order:
        blocks[i].__exit__(None, None, None)
        going.remove(i)
        if going:
            assert paths(model) == selected[going[-1]]
    if apply_before:
        assert paths(model) == {"2"}
    else:
        assert dicts(model) == before


@pytest.mark.parametrize("way", ["a part", "a copy"])
def test_applied_refuses_what_it_could_not_bring_back(way: str) -> None:
    model = llama()
    if way == "a part":
        hfpatch.apply(model.model.layers[0])
    else:
        hfpatch.apply(model)
        model = deepcopy(model)
    before = paths(model)
    block = hfpatch.applied(model)
    with pytest.raises(ValueError, match=r"call `hfpatch\.restore` on it first"):
        block.__enter__()
    assert paths(model) == before


def test_applied_in_a_block_that_nobody_ends() -> None:
    """A training that raised never ends its block; the collector does, in the midst of the next."""
    model = nn.Sequential(nn.LayerNorm(8))
    before = dicts(model)
    lost = hfpatch.applied(model)
    lost.__enter__()
    with hfpatch.applied(model):
        del lost
        gc.collect()
        assert paths(model) == {"0"}
    assert dicts(model) == before


def test_applied_where_an_inner_block_fails_while_the_outer_one_ends() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    before = dicts(model)
    outer = hfpatch.applied(model)
    outer.__enter__()
    inner = hfpatch.applied(model, kernels=_Ends(outer))
    with pytest.raises(RuntimeError, match="no such choice"):
        inner.__enter__()
    assert dicts(model) == before


class _Ends(dict[str, Any]):
    """`kernels=` that ends a block while it is read, as another thread may, and is then wrong."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def items(self) -> Any:
        self.block.__exit__(None, None, None)
        raise RuntimeError("no such choice")


def test_applied_takes_the_arguments_of_apply() -> None:
    def arguments(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        return {name: p.default for name, p in parameters.items() if name != "model"}

    assert arguments(hfpatch.applied) == arguments(hfpatch.apply)


def test_applied_with_decoding_and_blocks() -> None:
    model = llama().eval()
    with hfpatch.applied(model, decoding=False) as report:
        assert not [s for s in report.swaps if s.op == "decoding"]
        assert "generate" not in model.__dict__
    with hfpatch.applied(model, decoding=True, blocks=True) as report:
        assert [s for s in report.swaps if s.op == "decoding"], report
        assert report.plan.candidates
        assert "generate" in model.__dict__
        with hfpatch.applied(model, blocks=False, decoding=False) as inner:
            assert not inner.plan.candidates and "generate" not in model.__dict__
        assert hfpatch.status(model).plan.candidates and "generate" in model.__dict__
    assert not paths(model) and "generate" not in model.__dict__


@pytest.mark.parametrize(
    ("wrong", "error"), [({"blocks": "all"}, TypeError), ({"decoding": "all"}, ValueError)]
)
def test_applied_checks_decoding_and_blocks(wrong: dict[str, Any], error: Any) -> None:
    model = llama()
    with pytest.raises(error, match=f"`{next(iter(wrong))}` must be"):
        hfpatch.applied(model, **wrong).__enter__()
    assert not paths(model)


def test_applied_of_a_model_that_fails_leaves_it() -> None:
    model = llama()
    block = hfpatch.applied(model, mode="fast")
    with pytest.raises(ValueError, match="`mode` must be one of"):
        block.__enter__()
    assert not paths(model)


# ------------------------------------------------------------------------------ names


def test_names_without_a_second_import() -> None:
    assert hfpatch.optim.AdamW is __import__("hfpatch.optim", fromlist=["AdamW"]).AdamW
    assert callable(hfpatch.loss.causal_lm)
    assert hfpatch.HubOptions(require_signed=True).require_signed
    assert isinstance(hfpatch.apply(nn.Sequential(nn.SiLU())), hfpatch.Report)
    assert set(hfpatch.__all__) <= set(dir(hfpatch))
    assert all(getattr(hfpatch, name) is not None for name in hfpatch.__all__)
    with pytest.raises(AttributeError, match="module 'hfpatch' has no attribute 'optimizer'"):
        hfpatch.optimizer  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        hfpatch.callbacks.Trainer  # noqa: B018


def test_importing_stays_light() -> None:
    """Behind torch, `import hfpatch` brings none of the libraries, and takes little time."""
    code = (
        "import sys, time, torch; before = set(sys.modules); start = time.process_time()\n"
        "import hfpatch\n"
        "spent = time.process_time() - start\n"
        "print(spent); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    spent, brought = done.stdout.splitlines()
    tops = {name.partition(".")[0] for name in brought.split()}
    heavy = {"transformers", "diffusers", "kernels", "huggingface_hub", "accelerate", "rich",
             "tqdm", "matplotlib", "sigstore", "IPython"}  # fmt: skip
    assert not tops & heavy
    lazy = {"hfpatch.optim", "hfpatch.loss", "hfpatch.callbacks", "hfpatch.planning.planner",
            "hfpatch.proof.probe", "hfpatch.report_chart"}  # fmt: skip
    assert not set(brought.split()) & lazy
    assert float(spent) < 1.0, "seconds of this process; a tenth on an idle machine"


# ------------------------------------------------------------------------------ the chart


def test_plot_has_a_bar_for_each_class_and_no_legend_without_one() -> None:
    pytest.importorskip("matplotlib")
    report = hfpatch.apply(llama())
    axes = report.plot()
    names = {s.class_name for s in (*report.swaps, *report.skips)}
    assert {t.get_text() for t in axes.get_yticklabels()} == names
    width = sum(bar.get_width() for bars in axes.containers for bar in bars)
    assert width == len(report.swaps) + len(report.skips)
    legend = {t.get_text() for t in axes.get_legend().get_texts()}
    assert legend == {"swapped", *(s.kind for s in report.skips)}
    assert report.headline in axes.get_title(loc="left")


def test_plot_of_every_kind_of_nothing_and_on_axes_of_ones_own(tmp_path: Path) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    empty = hfpatch.status(nn.Linear(2, 2)).plot()
    assert empty.get_legend() is None and "no module is of a class" in empty.texts[0].get_text()
    skips = tuple(
        Skip(f"{kind}.{i}", f"Class{i}", kind, "because") for kind in SKIP_KINDS for i in range(30)
    )
    figure, axes = plt.subplots()
    drawn = Report(Plan("Everything", "inference", (), skips)).plot(axes)
    assert drawn is axes
    assert "6 more classes are not shown" in axes.get_xlabel()
    legend = [t.get_text() for t in axes.get_legend().get_texts()]
    assert legend == list(SKIP_KINDS)
    colors = [bars[0].get_facecolor() for bars in axes.containers]
    assert len(set(colors)) == len(colors)
    figure.savefig(tmp_path / "report.png")
    plt.close("all")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"`report.plot\(\)` needs matplotlib: `pip install"):
        hfpatch.status(nn.Linear(2, 2)).plot()


# ------------------------------------------------------------------------------ suggestions


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kernels": {"rmsnorm": "local"}}, "unknown op `rmsnorm`. Did you mean `rms_norm`? The"),
        ({"kernels": {"RMS_norm": "local"}}, "Did you mean `rms_norm`?"),
        ({"kernels": {"flash": "local"}}, f"unknown op `flash`. The ops are: {min(OPS)}"),
        ({"kernels": "locl"}, "unknown kernel source 'locl' for op `gelu`. Did you mean "
                              "`local`? Expected"),
        ({"kernels": ["pytorch"]}, "Did you mean `torch`?"),
        ({"mode": "train"}, "got 'train'. Did you mean `training`?"),
        ({"mode": 3}, "got 3."),
    ],
)  # fmt: skip
def test_mistyped_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        hfpatch.plan(nn.Sequential(nn.SiLU()), **arguments)
    assert said in str(caught.value)


def test_a_mistyped_registered_kernel_is_suggested() -> None:
    try:
        kernel = hfpatch.register(
            op="silu", kernel=torch.nn.functional.silu, name="my_silu", devices=["cpu"]
        )
        with pytest.raises(ValueError, match="Did you mean `my_silu`"):
            hfpatch.plan(nn.Sequential(nn.SiLU()), kernels={"silu": "mysilu"})
    finally:
        kernel.remove()


def test_meant() -> None:
    assert meant("rms-norm", ["rms_norm", "gelu"]) == " Did you mean `rms_norm`?"
    assert meant("attention", ["rms_norm", "gelu"]) == ""
    assert meant(None, ["rms_norm"]) == ""


def test_nothing_here_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hfpatch.applied(llama()):
            pass
