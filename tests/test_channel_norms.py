"""Norms over an image's channels, `[N, C, H, W]`: ConvNeXt's, which SAM and others copied."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch

WIDTH = 48
#: Copies of one class, in models of several kinds.
CLASSES = {
    "ConvNextLayerNorm": "convnext", "SamLayerNorm": "sam", "Sam2LayerNorm": "sam2",
    "RfDetrLayerNorm": "rf_detr", "DeepseekVLHybridLayerNorm": "deepseek_vl_hybrid",
}  # fmt: skip
SHAPES = ((2, WIDTH, 5, 7), (1, WIDTH, 1, 1), (3, WIDTH, 1, 9), (1, WIDTH, 16, 16))


def drawn(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return module.to(dtype).eval()


def of(name: str, data_format: str = "channels_first", **kwargs: Any) -> nn.Module:
    family = CLASSES[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    cls = getattr(module, name)
    norm: nn.Module = cls(WIDTH, eps=1e-6, data_format=data_format, **kwargs)
    return norm


class LayerNorm2d(nn.LayerNorm):
    """As timm and others write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ImageLayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            return super().forward(x.permute((0, 2, 3, 1))).permute(dims=(0, 3, 1, 2))
        return super().forward(x)


HERE = (LayerNorm2d, ImageLayerNorm)


def images(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(s, generator=generator).to(dtype) * 3 + 1 for s in SHAPES]
    x = made[0]
    channels_last = x.contiguous(memory_format=torch.channels_last)
    return [*made, channels_last, x[:, :, ::2], x.transpose(2, 3), x[:1].expand(4, -1, -1, -1)]


def alike(ours: torch.Tensor, original: torch.Tensor, exact: torch.Tensor) -> None:
    """No farther from fp64 than the original by more than a rounding, and as it lies in memory."""
    assert ours.dtype is original.dtype and ours.shape == original.shape
    assert ours.stride() == original.stride()
    rounding = torch.finfo(ours.dtype).eps * exact.abs().amax()
    theirs = (original.double() - exact).abs().amax()
    assert (ours.double() - exact).abs().amax() <= theirs + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CLASSES, *(c.__name__ for c in HERE)])
def test_images(name: str, dtype: torch.dtype) -> None:
    made = of(name) if name in CLASSES else {c.__name__: c for c in HERE}[name](WIDTH)
    model = nn.Sequential(drawn(made, dtype))
    original = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    report = hfpatch.apply(model)
    assert len(report.swaps) == 1, report
    with torch.no_grad():
        for x in images(dtype):
            alike(model(x), original(x), exact(x.double()))
        empty = torch.empty(0, WIDTH, 3, 3, dtype=dtype)
        assert model(empty).shape == empty.shape
    hfpatch.restore(model)
    assert torch.equal(model(images(dtype)[0]), original(images(dtype)[0]))


@pytest.mark.parametrize("name", CLASSES)
def test_channels_last(name: str) -> None:
    """The same class as a norm of rows, of any number of dimensions."""
    model = nn.Sequential(drawn(of(name, "channels_last")))
    original = copy.deepcopy(model)
    assert len(hfpatch.apply(model).swaps) == 1
    for shape in ((2, 5, 7, WIDTH), (3, WIDTH), (2, WIDTH, 3, WIDTH)):
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), original(x))


def test_other_inputs() -> None:
    """What the class does with them: an error, or rows."""
    model = nn.Sequential(drawn(of("SamLayerNorm")), drawn(ImageLayerNorm(WIDTH)))
    original = copy.deepcopy(model)
    assert len(hfpatch.apply(model).swaps) == 2
    for shape in ((3, WIDTH), (2, 3, 4, 5, 6), (2, WIDTH + 1, 3, 3)):
        x = torch.randn(shape)
        with pytest.raises(RuntimeError) as ours:
            model[0](x)
        with pytest.raises(RuntimeError) as theirs:
            original[0](x)
        assert str(ours.value) == str(theirs.value)
    rows = torch.randn(3, 5, WIDTH)
    assert torch.equal(model[1](rows), original[1](rows))
    x = images()[0]
    torch.testing.assert_close(model[0](features=x), original[0](features=x))
    with pytest.raises(TypeError):
        model[0]()


def test_gradients() -> None:
    for mode in ("inference", "training"):
        model = nn.Sequential(drawn(of("ConvNextLayerNorm")))
        original = copy.deepcopy(model)
        assert len(hfpatch.apply(model, mode=mode).swaps) == 1
        upstream = torch.randn(SHAPES[0])
        found = []
        for m in (model, original):
            x = images()[0].requires_grad_()
            (m(x) * upstream).sum().backward()
            found.append([x.grad, *(p.grad for p in m.parameters())])
        torch.testing.assert_close(*found)


def test_settings_that_change_afterwards() -> None:
    model = nn.Sequential(drawn(of("SamLayerNorm")))
    original = copy.deepcopy(model)
    assert len(hfpatch.apply(model).swaps) == 1
    rows, x = torch.randn(2, 3, 5, WIDTH), images()[0]
    with torch.no_grad():
        for m in (model, original):
            m[0].data_format = "channels_last"
        assert torch.equal(model(rows), original(rows))
        for m in (model, original):
            m[0].data_format = "channels_first"
            m[0].eps = 0.5
        torch.testing.assert_close(model(x), original(x))

        class Negative(type(model[0])):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return -super().forward(x)

        for m in (model, original):
            m[0].__class__ = Negative
        assert torch.equal(model(x), original(x))


def test_compile() -> None:
    model = nn.Sequential(drawn(of("SamLayerNorm")))
    original = copy.deepcopy(model)
    assert len(hfpatch.apply(model).swaps) == 1
    x = images()[0]
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), original(x))


class OtherLayerNorm(LayerNorm2d):
    """Images norms that are no layer norm of channels, or not put back as they came."""

    def __init__(self, first: tuple[int, ...], back: tuple[int, ...], scale: float = 1.0) -> None:
        super().__init__(WIDTH)
        self.first, self.back, self.scale = first, back, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(*self.first)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return (x * self.scale).permute(*self.back)


class TwiceLayerNorm(LayerNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class LargeLotLayerNorm(LayerNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[0] > 4 else y


class WideLayerNorm(LayerNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[-1] > 100 else y


class TurnedLayerNorm(LayerNorm2d):
    """Permuted once more than it is put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OtherLayerNorm((0, 3, 2, 1), (0, 3, 2, 1)),
        lambda: OtherLayerNorm((0, 2, 3, 1), (0, 3, 2, 1)),
        lambda: OtherLayerNorm((0, 2, 3, 1), (0, 3, 1, 2), 2.0),
        lambda: OtherLayerNorm((0, 3, 1, 2), (0, 2, 3, 1)),
        lambda: TwiceLayerNorm(WIDTH),
        lambda: LargeLotLayerNorm(WIDTH),
        lambda: WideLayerNorm(WIDTH),
        lambda: TurnedLayerNorm(WIDTH),
    ],
)
def test_what_is_no_norm_of_channels(make: Any) -> None:
    """It is refused with a reason, or computed as its class does."""
    model = nn.Sequential(drawn(make()))
    original = copy.deepcopy(model)
    with pytest.warns(RuntimeWarning, match="nothing was swapped"):
        report = hfpatch.apply(model)
    assert not report.swaps and [s.kind for s in report.skips] != []
    for shape in ((2, WIDTH, WIDTH, WIDTH), (6, WIDTH, WIDTH, WIDTH), (1, WIDTH, 2, 120)):
        x = torch.randn(shape)
        try:
            expected = original(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                model(x)
            continue
        assert torch.equal(model(x), expected)
