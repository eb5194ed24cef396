"""Sizes, layouts and values that a kernel is asked about, made of one call that it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hfpatch.foreign.memory import Held
from hfpatch.foreign.values import FEW, FINITE, OF_WEIGHTS, SCALES, SPECIAL, Pattern, fill

Tensor = torch.Tensor

#: Ops that compute each row, the last dimension, by itself; the other tensors are vectors.
ROWWISE = frozenset(
    {
        *("rms_norm", "layer_norm", "gated_rms_norm", "gelu", "silu", "gated", "gated_packed"),
        *("rms_norm_silu", "softmax"),
    }
)

#: Widths around vectors of 4, 8 and 16 elements, blocks of threads, and beyond one block. Few: a
#: Triton kernel is compiled for each.
_WIDTHS = (1, 3, 16, 17, 100, 257, 1000, 1024, 4099, 16400)
_FEW_WIDTHS = (17, 1024)
#: Numbers of rows: one, odd ones, more than a grid's second dimension (65,535) holds.
_ROWS = (0, 1, 2, 3, 7, 33, 129, 1025)
_FEW_ROWS = (0, 1, 33)
_MANY_ROWS = 65_537


@dataclass
class Sample:
    """The tensors of one call; in two places one tensor where `held` has one in both.

    Attributes:
        what: of the call, for messages.
        held: of each argument, None for one that is None.
        draw: fills them, from a generator.
        smooth: whether gradients can be compared: no infinity, no overflow.
    """

    what: str
    held: list[Held | None]
    draw: Callable[[torch.Generator], None]
    smooth: bool = True

    @property
    def tensors(self) -> list[Tensor | None]:
        return [None if h is None else h.tensor for h in self.held]

    def remember(self) -> None:
        for h in self.held:
            if h is not None:
                h.remember()

    def written(self) -> int | None:
        """The place of the first argument that was written to, or None."""
        return next((i for i, h in enumerate(self.held) if h is not None and h.written()), None)


_View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layout:
    """How the rows lie: the shape of the core, and the view of it."""

    what: str
    core: tuple[int, ...]
    view: _View = lambda t: t
    offset: int = 0


def _layouts(width: int) -> list[_Layout]:
    return [
        _Layout(f"[{width}]", (width,)),
        _Layout(f"[2, 3, 5, {width}]", (2, 3, 5, width)),
        _Layout(f"[2, 3, {width}] one element off an aligned address", (2, 3, width), offset=1),
        _Layout(f"[2, 3, {width}] three elements off", (2, 3, width), offset=3),
        _Layout(f"[3, 4, {width}] of transposed rows", (4, 3, width), lambda t: t.transpose(0, 1)),
        _Layout(
            f"[3, 4, {width}] cut out of wider rows", (3, 4, width + 5), lambda t: t[..., 2:-3]
        ),
        _Layout(f"[4, {width}] of every second row", (8, width), lambda t: t[::2]),
        _Layout(f"[4, {width}] of every second column", (4, 2 * width), lambda t: t[:, ::2]),
        _Layout(f"[{width}, {width}] transposed", (width, width), lambda t: t.t()),
        _Layout(f"[5, {width}] of one row repeated", (1, width), lambda t: t.expand(5, width)),
        _Layout(f"[2, 3, {width}] channels first", (2, width, 3), lambda t: t.movedim(1, -1)),
    ]


def samples_of(op: str, given: Sequence[Tensor | None], *, few: bool) -> Iterator[Sample]:
    """Calls like `given`; of an op that is not row by row, with other values alone.

    `few`: a handful, for a combination of dtypes that the model does not have now.
    """
    yield _as_given(given)
    rows = [t for t in given if t is not None and t.dim() > 1]
    vectors = [t for t in given if t is not None and t.dim() == 1]
    if op not in ROWWISE or not rows or any(v.shape[0] != rows[0].shape[-1] for v in vectors):
        return
    double = 2 if op == "gated_packed" else 1
    for width in _FEW_WIDTHS if few else _WIDTHS:
        width *= double
        yield _sample(given, _Layout(f"[3, {width}]", (3, width)))
    for count in _FEW_ROWS if few else _ROWS:
        layout = _Layout(f"[{count}, {24 * double}]", (count, 24 * double))
        yield _sample(given, layout, parameters=True)
    if len(rows) > 1:
        layout = _Layout(f"[5, {24 * double}], one in two places", (5, 24 * double))
        yield _sample(given, layout, one=True)
    yield _extreme(given, 48 * double)
    yield from _patterns(given, 24 * double, few)
    layouts = _layouts(48 * double)
    for layout in layouts[2:6:3] if few else layouts:
        yield _sample(given, layout)
    if not few:
        yield _sample(given, _Layout(f"[{_MANY_ROWS}, {4 * double}]", (_MANY_ROWS, 4 * double)))


def _sample(
    given: Sequence[Tensor | None], layout: _Layout, parameters: bool = False, one: bool = False
) -> Sample:
    """`parameters`: weights are parameters, as those of modules; `one`: two inputs that are alike
    are one tensor, as of a module that is called with one thing twice."""
    held: list[Held | None] = []
    rows: list[Held] = []
    for t in given:
        if t is None:
            held.append(None)
        elif one and t.dim() > 1 and rows and rows[0].core.dtype == t.dtype:
            held.append(rows[0])
        elif t.dim() == 1:
            width = layout.view(torch.empty(layout.core, device="meta")).shape[-1]
            made = Held.make((width,), t.dtype, t.device, offset=layout.offset)
            if parameters:
                made.tensor = nn.Parameter(made.tensor, requires_grad=False)
                # as in every step of a training but the first
                made.tensor.grad = torch.ones_like(made.tensor)
            held.append(made)
        else:
            rows.append(Held.make(layout.core, t.dtype, t.device, layout.view, layout.offset))
            held.append(rows[-1])

    def draw(generator: torch.Generator) -> None:
        for t, h in zip(given, held, strict=True):
            if h is None or t is None:
                continue
            values = torch.randn(h.core.shape, generator=generator)
            if t.dim() == 1:  # a weight, as those of the probe
                values = 1.0 + 0.5 * values
            elif h.core.dim() > 1 and h.core.shape[0] > 1:
                values[0] = values[0] * 4.0 + 1.0
            h.fill(values)

    return Sample(layout.what, held, draw)


def _extreme(given: Sequence[Tensor | None], width: int) -> Sample:
    """Rows as large and as small as the dtype holds, far from zero, constant, NaN, infinite."""
    dtype = next(t.dtype for t in given if t is not None and t.dim() > 1)
    largest = torch.finfo(dtype).max
    scales = [s for s in SCALES if s <= largest / 8] + [largest / 8]
    special = (float("nan"), float("inf"), -float("inf"))
    count = len(scales) + 4 + 2 * len(special)
    sample = _sample(given, _Layout(f"[{count}, {width}] of extreme values", (count, width)))
    plain = sample.draw

    def draw(generator: torch.Generator) -> None:
        plain(generator)
        drawn = [h for t, h in zip(given, sample.held, strict=True) if h and t is not None]
        inputs = [h for h in drawn if h.core.dim() > 1]
        for place, h in enumerate(inputs):
            values = torch.randn(h.core.shape, generator=generator)
            for i, scale in enumerate(scales):
                # the second input stays small, so that a product stays finite
                values[i] *= scale if place == 0 else 1.0
            n = len(scales)
            values[n] = 0.0
            values[n + 1] = 3.0
            values[n + 2] += 100.0
            values[n + 3, ::2] = -0.0
            for i, one in enumerate(special):
                at = int(torch.randint(values.shape[1], (), generator=generator))
                values[n + 4 + i, at] = one
                values[n + 4 + len(special) + i] = one
            h.fill(values)

    sample.draw = draw
    sample.smooth = False
    return sample


#: Patterns of which gradients are compared too: others overflow, or are nothing but roundings.
_SMOOTH = ("no negative numbers", "whole numbers")


def _patterns(given: Sequence[Tensor | None], width: int, few: bool) -> Iterator[Sample]:
    """All rows of one kind, which no random ones are: of all inputs, and of each by itself; and
    weights of one kind."""
    rows = [i for i, t in enumerate(given) if t is not None and t.dim() > 1]
    vectors = [i for i, t in enumerate(given) if t is not None and t.dim() == 1]
    for name, pattern in (FINITE | SPECIAL).items():
        if few and name not in FEW:
            continue
        for places in (rows, *([[i] for i in rows] if len(rows) > 1 else [])):
            where = "" if places is rows else f" in argument {places[0]}"
            sample = _changed(given, width, places, pattern, f"{name}{where}")
            sample.smooth = name in _SMOOTH and places is rows and not few
            yield sample
    for name, pattern in OF_WEIGHTS.items() if vectors and not few else ():
        sample = _changed(given, width, vectors, pattern, f"{name} in its weight")
        sample.smooth = name == "ones"
        yield sample


def _changed(
    given: Sequence[Tensor | None], width: int, places: list[int], pattern: Pattern, what: str
) -> Sample:
    sample = _sample(given, _Layout(f"[5, {width}] of {what}", (5, width)))
    plain = sample.draw

    def draw(generator: torch.Generator) -> None:
        plain(generator)
        for i in places:
            h = sample.held[i]
            if h is not None:
                fill(h.core, pattern)

    sample.draw = draw
    return sample


def _as_given(given: Sequence[Tensor | None]) -> Sample:
    held = Held.all_like(given)
    times = 0

    def draw(generator: torch.Generator) -> None:
        nonlocal times
        if times:
            for h in {id(h): h for h in held if h is not None}.values():
                h.stir()
        times += 1

    shapes = ", ".join("None" if t is None else str(list(t.shape)) for t in given)
    return Sample(shapes, held, draw, smooth=False)
