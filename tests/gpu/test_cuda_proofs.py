"""What holds for every op of the table of samples, on a GPU; on the CPU: `test_proofs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import proofs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from large_samples import LARGE
from op_samples import BY_ID, DTYPES, FIRST, PUBLIC, SAMPLES
from test_fuzz import (
    ROUNDS,
    fuzz,
    library,  # noqa: F401  (a fixture)
    say_the_same,
    say_the_same_of_lists,
)
from test_proofs import compiles_once, opchecked

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
EVERY = pytest.mark.parametrize("name", BY_ID)
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: (columns, batch): each way of `rows.cuh` to share out a row, in bf16: parts of a warp, a warp
#: with 4 and 8 vectors (many rows), a CTA with 1 (few), 4 and 8 vectors, the loop; and odd sizes.
SHAPES = [
    (34, 5), (64, 9), (256, 5), (512, 5), (1000, 5), (1024, 5), (1024, 800), (2048, 400),
    (4096, 300), (20000, 4), (50000, 3),
]  # fmt: skip


@OF_DTYPE
@EVERY
def test_opcheck(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """In every layout."""
    sample = BY_ID[name]
    tensors = sample.make(dtype, device="cuda")
    opchecked(sample, tensors, kernels_module)
    for layout in proofs.LAYOUTS:
        strided = proofs.laid_out(sample, tensors, layout)
        if strided is not None:
            opchecked(sample, strided, kernels_module)


@pytest.mark.parametrize("name", PUBLIC)
def test_compiles_once_for_all_batches(name: str, kernels_module: ModuleType) -> None:
    compiles_once(PUBLIC[name], kernels_module, grad=False, device="cuda")


@OF_DTYPE
@pytest.mark.parametrize("width", [34, 64, 1024])
@EVERY
def test_layouts(name: str, width: int, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    proofs.layouts(BY_ID[name], kernels_module, dtype, "cuda", width)


@OF_DTYPE
@pytest.mark.parametrize(("width", "n"), SHAPES)
@EVERY
def test_bits(
    name: str, width: int, n: int, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    proofs.repeats(BY_ID[name], kernels_module, dtype, "cuda", width, n)


@pytest.mark.parametrize("name", LARGE)
def test_bits_of_large_calls(name: str, kernels_module: ModuleType) -> None:
    sample, shapes = LARGE[name]
    for dtype, width, n in shapes:
        proofs.repeats(sample, kernels_module, dtype, "cuda", width, n)


@OF_DTYPE
@EVERY
def test_memory(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    for width in (34, 64, 1024, 20000):
        proofs.canaries(BY_ID[name], kernels_module, dtype, "cuda", width)
        proofs.in_place(BY_ID[name], kernels_module, dtype, "cuda", width)


@OF_DTYPE
@EVERY
def test_zero_size_and_odd_values(
    name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    proofs.zero_size(BY_ID[name], kernels_module, dtype, "cuda")
    proofs.odd_values(BY_ID[name], kernels_module, dtype, "cuda")


def test_threads_and_streams(kernels_module: ModuleType) -> None:
    """8 threads with 4 streams each."""

    def streams() -> Iterator[Any]:
        for stream in [torch.cuda.Stream() for _ in range(4)]:
            yield torch.cuda.stream(stream)

    calls = proofs.calls_of(SAMPLES, kernels_module, BF16, "cuda", 1024)
    proofs.at_once(calls, "cuda", streams=streams)


@EVERY
def test_a_thousand_replays(name: str, kernels_module: ModuleType) -> None:
    sample = BY_ID[name]
    tensors = sample.make(BF16, 7, 1024, "cuda")
    expected = sample.call(kernels_module, tensors, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample.call(kernels_module, tensors, 1024)
    for i in range(1000):
        if i % 100 == 0:
            for c in captured:
                c.fill_(-7)
        graph.replay()
        if i % 100 < 2:
            proofs.assert_same_bits(captured, expected, f"{name}: replay {i}")
    proofs.assert_same_bits(captured, expected, f"{name}: the last replay")


@EVERY
def test_other_stream(name: str, kernels_module: ModuleType) -> None:
    sample = BY_ID[name]
    tensors = sample.make(BF16, 7, 1024, "cuda")
    expected = sample.call(kernels_module, tensors, 1024)
    _, actual = proofs.on_a_late_stream(tensors, lambda t: sample.call(kernels_module, t, 1024))
    proofs.assert_same_bits(actual, expected, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@EVERY
def test_second_device(name: str, kernels_module: ModuleType) -> None:
    sample = BY_ID[name]
    tensors = sample.make(BF16, 7, 1024, "cuda:0")
    expected = sample.call(kernels_module, tensors, 1024)
    moved = {k: t.to("cuda:1") for k, t in tensors.items()}
    actual = sample.call(kernels_module, moved, 1024)
    assert torch.cuda.current_device() == 0
    assert all(a.device == torch.device("cuda:1") for a in actual)
    proofs.assert_same_bits([a.to("cuda:0") for a in actual], expected, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", LARGE)
def test_second_device_of_large_calls(name: str, kernels_module: ModuleType) -> None:
    """What a kernel may take of a GPU, shared memory and clusters, is asked for on each."""
    sample, shapes = LARGE[name]
    for dtype, width, n in shapes:
        tensors = sample.make(dtype, n, width)
        on_each = []
        for device in ("cuda:1", "cuda:0"):  # what the first one is asked must not stand for both
            moved = {k: t.to(device) for k, t in tensors.items()}
            on_each.append([r.cpu() for r in sample.call(kernels_module, moved, width)])
        proofs.assert_same_bits(*on_each, f"{name} {dtype} {width} columns")


@pytest.mark.slow
def test_a_million_calls(kernels_module: ModuleType) -> None:
    """Over all ops."""
    for sample in FIRST.values():
        arguments = sample.arguments(sample.make(BF16, 2, 64, "cuda"), 64)
        operator = getattr(kernels_module.ops, sample.op).default
        calling = partial(proofs.repeat, operator, arguments)
        proofs.assert_no_growth(calling, 10**6 // len(FIRST) + 1, sample.op)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_more_than_two_to_the_31_elements(name: str, kernels_module: ModuleType) -> None:
    """The first and the last samples of the batch are those of a small batch; sums over the rows
    are those of the rows that are not zero."""
    sample, width = FIRST[name], 4096
    made = sample.make(BF16, 1, width)
    sizes = [t.numel() for name, t in made.items() if sample.tensors[name].per_row]
    n = 2**31 // max(sizes) + 3
    wanted = 3 * n * 2 * sum(sizes)
    torch.cuda.empty_cache()  # of the tests before
    if torch.cuda.mem_get_info()[0] < wanted + 10 * 2**30:
        pytest.skip(f"needs {wanted / 2**30 + 10:.0f} GiB of free GPU memory")
    tensors = sample.make(BF16, n, width, "cuda")
    assert max(t.numel() for t in tensors.values()) > 2**31
    if "sum" in sample.kinds:
        tensors[next(iter(tensors))][2:-2] = 0
        if "target" in tensors:  # zeros have a loss
            tensors["target"][2:-2] = sample.params["ignore_index"]
        if "mask" in tensors:  # so have zeros that count
            tensors["mask"][2:-2] = 0
    whole = sample.call(kernels_module, tensors, width)
    for part in (slice(0, 2), slice(n - 2, n)):
        some = sample.call(kernels_module, proofs.cut(sample, tensors, part), width)
        rows = [w[part] for w in proofs.of_rows(sample, whole)]
        same = proofs.assert_close if sample.positional else proofs.assert_same_bits
        same(proofs.of_rows(sample, some), rows, f"{name}: {part}")
    ends = torch.tensor([0, 1, n - 2, n - 1], device="cuda")
    few = sample.call(kernels_module, proofs.cut(sample, tensors, ends), width)
    for w, f, kind in zip(whole, few, sample.kinds, strict=True):
        if kind != "rows":
            proofs.assert_close([w if kind == "sum" else w[ends]], [f], name)


def test_bad_calls_by_ctypes(kernels_dir: Path, tmp_path: Path) -> None:
    assert fuzz(kernels_dir, tmp_path, "--device", "cuda")["refused"] >= 10_000


@pytest.mark.parametrize("says_the_same", [say_the_same, say_the_same_of_lists])
@ROUNDS
@given(data=st.data())
def test_torch_and_ctypes_say_the_same(
    data: st.DataObject,
    says_the_same: Any,
    library: Any,  # noqa: F811
    kernels_module: ModuleType,
) -> None:
    says_the_same(data, library, kernels_module, "cuda")
