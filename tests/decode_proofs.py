"""What is proven of the decoding functions by `decode_samples.py`, on the CPU and on a GPU alike.

As `proofs.py`, of calls by the C interface. Each proof raises AssertionError and names the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import c_api
import torch
from decode_samples import ChoiceSample, Made, StepSample
from proofs import assert_same_bits
from torch import Tensor

#: Positions of arguments: of a step, and of the results of a choice.
LOGITS, HIDDEN, WORKSPACE, MODEL, CACHE, IDS, EMBEDS, POSITIONS, MASK = range(9)
IDS_OUT, COUNTERS, TEXT = range(3)
MARGIN = 64

Sample = StepSample | ChoiceSample


def call(library: Any, sample: Sample, made: Made) -> None:
    """On the current stream; it has ended when this returns."""
    cuda = made.arguments[made.scratch].is_cuda
    stream = torch.cuda.current_stream() if cuda else None
    library.call(sample.op, *made.arguments, stream=stream and stream.cuda_stream)
    if stream is not None:
        stream.synchronize()


def results(made: Made) -> list[Tensor]:
    return list(made.written.values())


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def assert_equal(got: list[Tensor], want: list[Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(_bits(a), _bits(b)), f"{what}: result {i} has other bits"


def numbers(library: Any, sample: Sample, dtype: torch.dtype, device: str = "cpu") -> None:
    """Against fp64, or exactly."""
    for seed in range(3):
        made = sample.make(dtype, library.size, device, seed)
        call(library, sample, made)
        _assert_expected(sample, made)


def _assert_expected(sample: Sample, made: Made) -> None:
    for what, (true, bound) in made.expected.items():
        got = made.written[what].cpu().double().reshape(true.shape)
        assert torch.equal(got.isnan(), true.isnan()), f"{sample.id}: {what}"
        error = float((got - true).nan_to_num(0.0).abs().max())
        assert error <= bound, f"{sample.id}: {what} is off by {error:.3g}, not {bound:.3g}"


# -------------------------------------------------------------------------------------------------
# Memory


def _banded(value: Tensor, bands: list[Tensor], shift: int) -> Tensor:
    """The same tensor between bands of memory, `shift` elements behind their margin."""
    if value.dtype == torch.bool:
        return value
    fill = -7.0 if value.is_floating_point() else 77
    size = value.untyped_storage().nbytes() // value.element_size()
    memory = torch.full((size + 2 * MARGIN + 1,), fill, dtype=value.dtype, device=value.device)
    memory[MARGIN + shift : MARGIN + shift + size] = value.as_strided((size,), (1,), 0)
    bands += [memory[: MARGIN + shift], memory[MARGIN + shift + size :]]
    return memory.as_strided(value.shape, value.stride(), MARGIN + shift + value.storage_offset())


def _moved(
    made: Made, place: Callable[[Tensor], Tensor], led_to: Callable[[Tensor], Tensor]
) -> Made:
    """The call with every tensor in another place of memory; `led_to`: those that addresses lead
    to."""
    known: dict[int, Tensor] = {}

    def one(value: Any, place: Callable[[Tensor], Tensor] = place) -> Any:
        if isinstance(value, list):
            return [one(v) for v in value]
        if isinstance(value, c_api.Addressed):
            led = {i: one(t, led_to) for i, t in value.leads_to.items()}
            return c_api.Addressed(value.table.tolist(), led)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = place(value)
        return known[id(value)]

    arguments = [one(value) for value in made.arguments]
    written = {
        name: arguments[TEXT].table[: len(value)] if name == "text" else known[id(value)]
        for name, value in made.written.items()
    }
    return Made(arguments, written, made.expected, made.scratch)


def _inputs(value: Any) -> list[Tensor]:
    """Not tables: where their addresses lead is looked at among the results."""
    if isinstance(value, list):
        return [t for v in value for t in _inputs(v)]
    return [value] if isinstance(value, Tensor) else []


def memory(library: Any, sample: Sample, dtype: torch.dtype, device: str = "cpu") -> None:
    """Nothing beside the results is written, no input is, and an element's shift of every tensor
    changes no bit. On a GPU it may, as other kernels add up otherwise, and what addresses lead to
    stays at a multiple of 16 bytes."""
    plain = sample.make(dtype, library.size, device)
    call(library, sample, plain)
    for shift in (0, 1):
        fresh = sample.make(dtype, library.size, device)
        bands: list[Tensor] = []
        made = _moved(
            fresh,
            partial(_banded, bands=bands, shift=shift),
            partial(_banded, bands=bands, shift=shift if device == "cpu" else 0),
        )
        before = [b.clone() for b in bands]
        call(library, sample, made)
        if device == "cpu" or shift == 0:
            assert_equal(results(made), results(plain), f"{sample.id}, shift {shift}")
        else:
            _assert_expected(sample, made)
        for band, was in zip(bands, before, strict=True):
            assert torch.equal(band, was), f"{sample.id}: wrote beside its results"
        outputs = set(range(sample.schema.outputs))
        for i in set(range(len(made.arguments))) - outputs:
            for a, b in zip(_inputs(made.arguments[i]), _inputs(fresh.arguments[i]), strict=True):
                same = torch.equal(a.nan_to_num(7), b.nan_to_num(7))
                assert same, f"{sample.id}: wrote to an input"


def keys_stay(library: Any, sample: StepSample, dtype: torch.dtype, device: str = "cpu") -> None:
    """Keys and values before the step's own and behind them."""
    fresh, made = (sample.make(dtype, library.size, device) for _ in range(2))
    call(library, sample, made)
    end = sample.length + sample.tokens
    for what in made.written:
        if what.startswith(("keys", "values")):
            now, was = made.written[what], fresh.written[what]
            assert torch.equal(now[:, :, : sample.length], was[:, :, : sample.length])
            assert bool(now[:, :, sample.length : end].isfinite().all())
            assert bool(now[:, :, end:].isnan().all())


# -------------------------------------------------------------------------------------------------
# Rows


def _of_rows(made: Made, rows: list[int], library: Any) -> Made:
    """The step for some rows of the batch."""
    known: dict[int, Tensor] = {}

    def picked(value: Any) -> Any:
        if isinstance(value, Tensor):
            return known.setdefault(id(value), value[rows].clone())
        return value

    model, cache = made.arguments[MODEL], made.arguments[CACHE]
    arguments = [
        value if i in (WORKSPACE, MODEL, CACHE) else picked(value)
        for i, value in enumerate(made.arguments)
    ]
    led = {i: picked(t) for i, t in cache.leads_to.items()}
    arguments[CACHE] = c_api.Addressed(cache.table.tolist(), led)
    tokens = made.arguments[POSITIONS].shape[1]
    count = library.size("hfp_decode_workspace", model, len(rows), tokens, 0)
    arguments[WORKSPACE] = torch.zeros(count, device=cache.table.device)
    written = {name: known[id(t)] for name, t in made.written.items()}
    return Made(arguments, written, {}, made.scratch)


def rows_are_their_own(
    library: Any, sample: StepSample, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """The bits of a row are the same alone, in another order, and more than once."""
    whole = sample.make(dtype, library.size, device)
    parts = [[r] for r in range(sample.rows)] + [list(range(sample.rows))[::-1], [0] * 5]
    chosen = [(rows, _of_rows(whole, rows, library)) for rows in parts]
    call(library, sample, whole)
    for rows, made in chosen:
        call(library, sample, made)
        expected = [t[rows] for t in results(whole)]
        assert_same_bits(results(made), expected, f"{sample.id}: rows {rows}")


def odd_values(
    library: Any, sample: StepSample, dtype: torch.dtype, value: float, device: str = "cpu"
) -> None:
    """In what a row's embeddings are, or its cache; they come out of that row, and of no other."""
    plain = sample.make(dtype, library.size, device)
    call(library, sample, plain)
    for where in ("embeds", "values") if sample.length else ("embeds",):
        made = sample.make(dtype, library.size, device)
        embedding = made.arguments[MODEL][2]
        if where == "embeds":
            given = made.arguments[EMBEDS]
            if given is None:
                scale = float(made.arguments[MODEL][1][0])
                given = (embedding[made.arguments[IDS]] * scale).to(dtype)
            made.arguments[EMBEDS], made.arguments[IDS] = given, None
            given[-1, 0, embedding.shape[1] // 3] = value
        else:
            made.written["values[0]"][-1, :, sample.length - 1, 0] = value
        call(library, sample, made)
        for what in set(made.written) & {"logits", "hidden"}:
            got, want = made.written[what], plain.written[what]
            assert_same_bits([got[:-1]], [want[:-1]], f"{sample.id}, {where}: {what}")
            assert not bool(got[-1].isfinite().all()), f"{sample.id}, {where}: it vanished"
