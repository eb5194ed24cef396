"""What is proven of every op over lists by `list_samples.py`, on the CPU and on a GPU alike.

As `proofs.py`; the ops change their tensors in place, so each call gets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from list_samples import LIST_SAMPLES, SHAPES, ListSample, Made
from proofs import Guarded, assert_close, assert_same_bits
from torch import Tensor


def _shifted(t: Tensor) -> Tensor:
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def _reversed(t: Tensor) -> Tensor:
    order = tuple(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


#: The same values in other places of memory, without gaps.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"misaligned": _shifted, "reversed": _reversed}


def all_of(made: Made) -> list[Tensor]:
    return [t for value in made.values() for t in (value if isinstance(value, list) else [value])]


def picked(made: Made, places: list[int]) -> Made:
    """The call for some of the parameters, in this order."""
    return {k: [v[i] for i in places] if isinstance(v, list) else v for k, v in made.items()}


def repeats(sample: ListSample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """Repeats, another order of the list and each parameter by itself give the same bits."""
    first = sample.call(kernels, sample.make(dtype, device))
    for _ in range(3):
        again = sample.call(kernels, sample.make(dtype, device))
        assert_same_bits(again, first, f"{sample.id}: repeated")
    if not sample.alone:
        return
    places = list(range(len(SHAPES)))
    expected = sample.make(dtype, device)
    sample.call(kernels, expected)
    for parts in ([places[::-1]], [places[1:] + places[:1]], [[i] for i in places]):
        made = sample.make(dtype, device)
        for part in parts:
            sample.call(kernels, picked(made, part))
        assert_same_bits(all_of(made), all_of(expected), f"{sample.id}: {parts}")


def layouts(sample: ListSample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    expected = sample.call(kernels, sample.make(dtype, device))
    for layout, change in LAYOUTS.items():
        actual = sample.call(kernels, sample.make(dtype, device, change=change))
        # Elements of a norm are added up as they lie in memory.
        same = sample.alone or layout == "misaligned"
        compare = assert_same_bits if same else assert_close
        compare(actual, expected, f"{sample.id}: {layout}")


def canaries(sample: ListSample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """Nothing is written but the lists that an op changes."""
    expected = sample.call(kernels, sample.make(dtype, device))
    for shift in (0, 1):
        bands: list[Guarded] = []

        def guarded(t: Tensor, shift: int = shift, bands: list[Guarded] = bands) -> Tensor:
            bands.append(Guarded(t, shift))
            return bands[-1].out.copy_(t)

        made = sample.make(dtype, device, change=guarded)
        actual = sample.call(kernels, made)
        assert_same_bits(actual, expected, f"{sample.id}: between bands, shift {shift}")
        for band in bands:
            band.assert_bands(sample.id)
        before = sample.make(dtype, device)
        for name in set(made) - set(sample.written):
            kept = all_of({name: made[name]}), all_of({name: before[name]})
            assert_same_bits(*kept, f"{sample.id}: wrote to `{name}`")


def zero_size(sample: ListSample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """Parameters without elements; and none at all, where the op takes that."""
    results = sample.call(kernels, sample.make(dtype, device, ((0, 3), (0,))))
    assert all(r.numel() == 0 if r.dim() else r == 0 for r in results)
    if sample.op != "grad_norm":
        sample.call_public(kernels, sample.make(dtype, device, ()))


def odd_values(sample: ListSample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """NaN and infinity come out, of their element alone; on a GPU where they do on the CPU."""
    name = next(n for n in sample.lists if n in ("grads", "tensors"))
    for value in (float("nan"), float("inf"), float("-inf")):

        def with_odd(where: str, value: float = value) -> Made:
            made = sample.make(dtype, where)
            made[name][4][17] = value
            return made

        plain = sample.call(kernels, sample.make(dtype, device))
        actual = sample.call(kernels, with_odd(device))
        what = f"{sample.id} with {value}"
        assert any(bool((~r.isfinite()).any()) for r in actual), f"{what}: it vanished"
        for a, p in zip(actual, plain, strict=True):
            if sample.alone and a.shape == SHAPES[4]:
                a, p = (torch.cat([t[:17], t[18:]]) for t in (a, p))
            if sample.alone:
                assert_same_bits([a], [p], f"{what}: another element")
        if device != "cpu":
            for a, e in zip(actual, sample.call(kernels, with_odd("cpu")), strict=True):
                a = a.cpu()
                assert torch.equal(a.isnan(), e.isnan()), f"{what}: NaN"
                assert torch.equal(a.isposinf(), e.isposinf()), f"{what}: infinity"
                assert torch.equal(a.isneginf(), e.isneginf()), f"{what}: negative infinity"


def calls_of(
    kernels: Any, dtype: torch.dtype, device: str
) -> list[tuple[str, Callable[[], list[Tensor]]]]:
    """Of all samples, for `proofs.at_once`; every call makes its own tensors."""
    return [(s.id, lambda s=s: s.call(kernels, s.make(dtype, device))) for s in LIST_SAMPLES]


def compiles_once(sample: ListSample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """Without a graph break, and not again for four other sizes."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(made: Made) -> list[Tensor]:
        return sample.call_public(kernels, made)

    for n in (12, 15, 21, 40, 900):
        shapes = ((n, 34), (n + 1,), (2, n + 2))
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual = compiled(sample.make(dtype, device, shapes))
        expected = sample.call_public(kernels, sample.make(dtype, device, shapes))
        assert_same_bits(actual, expected, f"{sample.id}: {n}")
