"""What is proven of every op by the table of samples, on the CPU and on a GPU alike.

Bitwise equality wherever the same numbers are added in the same order; `assert_close` where a
layout may choose another order. Each proof raises AssertionError and names the sample.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from op_samples import FORMULAS, Sample
from tolerances import tolerance
from torch import Tensor

MARGIN = 96  # elements before and after an output that must not change
FILL = -7.0
#: Inputs that a result never replaces: what may be broadcast, and tables.
BROADCAST = {"scale", "shift", "b", "c", "mask", "cos", "sin"}
#: Where a result may only replace its own input: k is read after q_out was written.
CROSSED = {"rope_qk", "qk_norm_rope"}
#: Whose inputs are read again after rows of the result are written: refused in place.
READ_AGAIN = {"gemm", "gemm_batched", "attention"}


def bits(t: Tensor) -> Tensor:
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(kind)


def assert_same_bits(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{what}: result {i}"
        assert torch.equal(bits(a), bits(e)), f"{what}: result {i} has other bits"


def assert_close(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    """As for two orders of adding up one row, relative to its largest value."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{what}: result {i}"
        if e.numel() == 0:
            continue
        if not e.dtype.is_floating_point:
            assert torch.equal(a, e), f"{what}: result {i}"
            continue
        scale = e.double().abs().amax(-1, keepdim=True).clamp_min(1e-3)
        error = ((a.double() - e.double()).abs() / scale).max().item()
        limit = tolerance("torch reordered", e.dtype)
        assert error <= limit, f"{what}: result {i} is off by {error:.3g}"


def of_rows(sample: Sample, results: list[Tensor]) -> list[Tensor]:
    """The results whose first dimension is the batch."""
    return [r for r, kind in zip(results, sample.kinds, strict=True) if kind == "rows"]


def cut(sample: Sample, tensors: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
    """The call for some samples of the batch: a slice is a view, an index tensor a copy."""
    return {k: t[index] if sample.tensors[k].per_row else t for k, t in tensors.items()}


# -------------------------------------------------------------------------------------------------
# Layouts: the same values in other places of memory


def _shifted(t: Tensor) -> Tensor:
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def _padded(before: int, after: int) -> Callable[[Tensor], Tensor]:
    def make(t: Tensor) -> Tensor:
        shape = (*t.shape[:-1], before + t.shape[-1] + after)
        wide = torch.empty(shape, dtype=t.dtype, device=t.device)
        return wide[..., before : before + t.shape[-1]].copy_(t)

    return make


def _swapped(a: int, b: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.transpose(a, b).contiguous().transpose(a, b)


#: name -> (how, the fewest dimensions it needs)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "misaligned": (_shifted, 1),
    "padded rows": (_padded(8, 8), 2),
    "misaligned rows": (_padded(3, 2), 2),
    "transposed": (_swapped(0, 1), 3),
    "columns": (_swapped(-1, -2), 2),
    "every other column": (lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2], 1),
    "repeated": (lambda t: t[:1].expand(t.shape), 1),
    "reversed": (lambda t: t.permute(*reversed(range(t.dim()))).contiguous().permute(
        *reversed(range(t.dim()))), 3),
}  # fmt: skip


def laid_out(sample: Sample, tensors: dict[str, Tensor], layout: str) -> dict[str, Tensor] | None:
    """The batch's tensors in a layout; parameters too where it is one of vectors. None: no such."""
    make, least = LAYOUTS[layout]
    made = {}
    for name, t in tensors.items():
        spec = sample.tensors[name]
        whole = layout in ("misaligned", "every other column")
        if spec.dense or t.dim() < least or not (spec.per_row or whole):
            made[name] = t
        else:
            made[name] = make(t)
    return None if all(made[k] is tensors[k] for k in tensors) else made


def layouts(sample: Sample, kernels: Any, dtype: torch.dtype, device: str, width: int) -> None:
    tensors = sample.make(dtype, width=width, device=device)
    compare = assert_same_bits if device == "cpu" else assert_close
    for layout in LAYOUTS:
        strided = laid_out(sample, tensors, layout)
        if strided is None:
            continue
        plain = {k: t.contiguous().clone() for k, t in strided.items()}
        actual = sample.call(kernels, strided, width)
        assert all(a.is_contiguous() for a in actual)
        compare(actual, sample.call(kernels, plain, width), f"{sample.id} {layout}")


# -------------------------------------------------------------------------------------------------
# Bits


def repeats(
    sample: Sample, kernels: Any, dtype: torch.dtype, device: str, width: int, n: int
) -> None:
    """Repeats, parts of the batch and another order of the batch give the same bits."""
    tensors = sample.make(dtype, n, width, device)
    first = sample.call(kernels, tensors, width)
    for _ in range(3):
        assert_same_bits(sample.call(kernels, tensors, width), first, f"{sample.id}: repeated")
    if sample.positional:
        return
    whole = of_rows(sample, first)
    for part in (slice(0, 1), slice(1, n), slice(n - 1, n), slice(0, n // 2)):
        some = of_rows(sample, sample.call(kernels, cut(sample, tensors, part), width))
        assert_same_bits(some, [w[part] for w in whole], f"{sample.id}: samples {part}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    mixed = of_rows(sample, sample.call(kernels, cut(sample, tensors, order), width))
    assert_same_bits(mixed, [w[order] for w in whole], f"{sample.id}: another order")


# -------------------------------------------------------------------------------------------------
# Memory


class Guarded:
    """A contiguous output, `shift` elements off 16 bytes, between bands that must not change."""

    def __init__(self, like: Tensor, shift: int) -> None:
        size = like.numel() + 2 * MARGIN + shift
        self.all = torch.full((size,), FILL, dtype=like.dtype, device=like.device)
        self.at = slice(MARGIN + shift, MARGIN + shift + like.numel())
        self.out = self.all[self.at].view(like.shape)

    def assert_bands(self, what: str) -> None:
        edges = torch.cat([self.all[: self.at.start], self.all[self.at.stop :]])
        assert bool((edges == FILL).all()), f"{what}: wrote outside of its output"


def canaries(sample: Sample, kernels: Any, dtype: torch.dtype, device: str, width: int) -> None:
    """Outputs are written wholly, nothing beside them is, and no input is."""
    tensors = sample.make(dtype, width=width, device=device)
    expected = sample.call_all(kernels, tensors, width)
    compare = assert_same_bits if device == "cpu" else assert_close
    for shift in (0, 1):
        before = {k: t.clone() for k, t in tensors.items()}
        guarded = [Guarded(e, shift if e.dtype.is_floating_point else 0) for e in expected]
        sample.call_out(kernels, [g.out for g in guarded], tensors, width)
        written = sample.meant([g.out for g in guarded])
        compare(written, sample.meant(expected), f"{sample.id}: out, shift {shift}")
        for g in guarded:
            g.assert_bands(sample.id)
        for k, t in tensors.items():
            assert torch.equal(bits(t), bits(before[k])), f"{sample.id}: wrote to `{k}`"


def refused_in_place(
    sample: Sample, kernels: Any, dtype: torch.dtype, device: str, width: int
) -> None:
    """The first result in the memory of each input but `c`: an error, and nothing is written."""
    for name, spec in sample.tensors.items():
        if name == "c" or spec.dtype is not None:
            continue
        tensors = sample.make(dtype, width=width, device=device)
        outs = sample.call_all(kernels, tensors, width)
        target, size = tensors[name].flatten(), outs[0].numel()
        if target.numel() < size:
            continue
        before = target.clone()
        outs[0] = target[:size].view(outs[0].shape)
        with pytest.raises(RuntimeError, match=rf"`out` must not overlap `{name}`"):
            sample.call_out(kernels, outs, tensors, width)
        assert_same_bits([target], [before], f"{sample.id}: `{name}` was written")


def in_place(sample: Sample, kernels: Any, dtype: torch.dtype, device: str, width: int) -> int:
    """Each output over each input of its shape and dtype: the same bits; how many there are."""
    if sample.op in READ_AGAIN:
        refused_in_place(sample, kernels, dtype, device, width)
        return 0
    expected = sample.call_all(kernels, sample.make(dtype, width=width, device=device), width)
    found = 0
    for i, e in enumerate(expected):
        for name, spec in sample.tensors.items():
            tensors = sample.make(dtype, width=width, device=device)
            target = tensors[name]
            crossed = sample.op in CROSSED and sample.results[i] != f"={name}"
            if not spec.per_row or name in BROADCAST or crossed:
                continue
            if (target.shape, target.dtype) != (e.shape, e.dtype):
                continue
            outs = [torch.empty_like(x) for x in expected]
            outs[i] = target
            sample.call_out(kernels, outs, tensors, width)
            what = f"{sample.id}: result {i} over `{name}`"
            assert_same_bits(sample.meant(outs), sample.meant(expected), what)
            found += 1
    return found


def zero_size(sample: Sample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """An empty batch: empty results, and sums that are 0."""
    tensors = sample.make(dtype, 0, 34, device)
    for r, kind in zip(sample.call(kernels, tensors), sample.kinds, strict=True):
        if kind == "sum":
            assert bool((r == 0).all()), sample.id
        else:
            assert r.shape[0] == 0 and r.numel() == 0, sample.id


class MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def bytes_in_use() -> int:
    """Bytes that malloc has handed out and not got back: exact, unlike the resident size."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("needs mallinfo2 of glibc 2.33")
    mallinfo2.restype = MallInfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def repeat(operator: Any, arguments: Sequence[Any], times: int) -> None:
    for _ in range(times):
        operator(*arguments)


def kept_by_launches(calls: int) -> int:
    """Bytes that so many launches of PyTorch's leave behind."""
    x = torch.zeros(8, device="cuda")
    host = bytes_in_use()
    for _ in range(calls):
        x.neg_()
    torch.cuda.synchronize()
    return bytes_in_use() - host


def assert_no_growth(calling: Callable[[int], None], calls: int, what: str) -> None:
    """`calling(calls)` leaves no memory behind. What leaks is 16 bytes or more a time on the host,
    512 on a GPU, and does so each time: on the host others take memory too, once."""

    def on_the_gpu() -> tuple[int, ...]:
        if not torch.cuda.is_initialized():
            return ()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    calling(200)
    grown = []
    for _ in range(3):
        before, host = on_the_gpu(), bytes_in_use()
        calling(calls)
        assert on_the_gpu() == before, what
        grown.append(bytes_in_use() - host)
        if grown[-1] < 8 * calls:
            return
    # A profiler that ran in this process goes on to note each launch; a call has a few of them.
    kept = kept_by_launches(calls) if torch.cuda.is_initialized() else 0
    if kept > 8 * calls and min(grown) < 8 * calls + 4 * kept:
        return
    raise AssertionError(f"{what}: {grown} bytes in {calls} calls each")


# -------------------------------------------------------------------------------------------------
# NaN and infinity


def odd_values(sample: Sample, kernels: Any, dtype: torch.dtype, device: str) -> None:
    """NaN and infinities come out where they do of the formula, and stay in their sample."""
    n = 7
    for name, spec in sample.tensors.items():
        if not spec.per_row or (spec.dtype or dtype) != dtype or name in sample.constant:
            continue
        tensors = sample.make(dtype, n, device=device)
        plain = of_rows(sample, sample.call(kernels, tensors))
        odd = tensors[name].view(n, -1)
        for row, value in ((1, float("nan")), (3, float("inf")), (5, float("-inf"))):
            odd[row, odd.shape[1] // 3] = value
        everything = sample.call(kernels, tensors)
        results = of_rows(sample, everything)
        what = f"{sample.id} with odd `{name}`"
        assert_same_bits([r[::2] for r in results], [p[::2] for p in plain], what)
        if any(r.is_floating_point() for r in results):
            reached = [r[1] for r in results]
            reached += [r for r, k in zip(everything, sample.kinds, strict=True) if k != "rows"]
            assert any(bool(r.isnan().any()) for r in reached), f"{what}: a NaN vanished"
        if sample.op not in FORMULAS:
            continue
        # In fp64: the AVX-512 erf gelu of torch 2.13 makes NaN of +inf in fp32 and bf16 only.
        wide = {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()}
        for r, e in zip(results, sample.call_formula(wide), strict=True):
            assert torch.equal(r.isnan(), e.isnan()), f"{what}: NaN"
            assert torch.equal(r.isposinf(), e.isposinf()), f"{what}: infinity"
            assert torch.equal(r.isneginf(), e.isneginf()), f"{what}: negative infinity"


# -------------------------------------------------------------------------------------------------
# Threads


def at_once(
    calls: Sequence[tuple[str, Callable[[], list[Tensor]]]],
    device: str,
    threads: int = 8,
    rounds: int = 4,
    streams: Callable[[], Iterable[Any]] = lambda: (nullcontext(),),
) -> None:
    """All calls, by their names, in several threads at once, each in its own order, give the bits
    of one thread.

    `streams()` yields the context managers in which a thread makes each call, one after the other.
    """
    expected = [call() for _, call in calls]
    if device != "cpu":
        torch.cuda.synchronize()

    def work(index: int) -> None:
        for round_ in range(rounds):
            kept = []
            for i in range(len(calls)):
                at = (i + 5 * index + round_) % len(calls)
                for context in streams():
                    with context:
                        kept.append((at, calls[at][1]()))
            if device != "cpu":
                torch.cuda.synchronize()
            for at, results in kept:
                assert_same_bits(results, expected[at], f"{calls[at][0]} in thread {index}")

    in_threads(work, threads)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """`work(index)` in so many threads that begin together; raises what the first to fail did."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            start.wait(60)
            work(index)
        except BaseException as e:
            failures.append(e)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if failures:
        raise failures[0]


def calls_of(
    samples: Iterable[Sample], kernels: Any, dtype: torch.dtype, device: str, width: int
) -> list[tuple[str, Callable[[], list[Tensor]]]]:
    """For `at_once`; every call of a sample has the same tensors."""
    made = [(s, s.make(dtype, 9, width, device)) for s in samples]
    return [(s.id, partial(s.call, kernels, tensors, width)) for s, tensors in made]


def on_a_late_stream(
    tensors: dict[str, Tensor], call: Callable[[dict[str, Tensor]], list[Tensor]]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Copies of `tensors` and what `call` makes of them on a stream of its own, where they come
    after a sleep: a launch on any other stream would miss them."""
    late = {k: torch.zeros_like(t) for k, t in tensors.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for k, t in tensors.items():
            late[k].copy_(t)
        results = call(late)
    stream.synchronize()
    return late, results
