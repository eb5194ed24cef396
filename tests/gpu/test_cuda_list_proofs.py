"""What holds for every op over lists, on a GPU; on the CPU: `test_list_proofs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import list_proofs
import proofs
import pytest
import torch
from list_samples import LIST_SAMPLES, LISTS_BY_ID, LISTS_FIRST, LISTS_OF_DTYPES
from torch import Tensor

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
EVERY = pytest.mark.parametrize("name", LISTS_BY_ID)
OF_DTYPE = pytest.mark.parametrize(("name", "dtype"), LISTS_OF_DTYPES, ids=str)


@OF_DTYPE
def test_opcheck(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    sample = LISTS_BY_ID[name]
    operator = getattr(kernels_module.ops, sample.op).default
    for change in (lambda t: t, *list_proofs.LAYOUTS.values()):
        made = sample.make(dtype, "cuda", ((3, 40), (), (0, 2), (17,)), change)
        torch.library.opcheck(operator, sample.arguments(made))


@OF_DTYPE
def test_bits_and_memory(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    sample = LISTS_BY_ID[name]
    list_proofs.repeats(sample, kernels_module, dtype, "cuda")
    list_proofs.layouts(sample, kernels_module, dtype, "cuda")
    list_proofs.canaries(sample, kernels_module, dtype, "cuda")


@OF_DTYPE
def test_zero_size_and_odd_values(
    name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    list_proofs.zero_size(LISTS_BY_ID[name], kernels_module, dtype, "cuda")
    list_proofs.odd_values(LISTS_BY_ID[name], kernels_module, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scale(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """One product in fp32, one rounding."""
    for factor in (0.0, -0.5, 1.0, 3.0, float("inf"), float("nan")):
        made = LISTS_BY_ID["scale_grads"].make(dtype, "cuda")
        before = [g.clone() for g in made["grads"]]
        kernels_module.scale_grads(made["grads"], torch.tensor(factor, device="cuda"))
        for g, old in zip(made["grads"], before, strict=True):
            torch.testing.assert_close(
                g, (old.float() * factor).to(dtype), rtol=0, atol=0, equal_nan=True
            )


def test_threads_and_streams(kernels_module: ModuleType) -> None:
    """8 threads with 4 streams each."""

    def streams() -> Iterator[Any]:
        for stream in [torch.cuda.Stream() for _ in range(4)]:
            yield torch.cuda.stream(stream)

    calls = list_proofs.calls_of(kernels_module, BF16, "cuda")
    proofs.at_once(calls, "cuda", streams=streams)


@EVERY
def test_a_thousand_replays(name: str, kernels_module: ModuleType) -> None:
    """Each changes what the one before has left: as a thousand calls."""
    sample = LISTS_BY_ID[name]
    eager, captured = (sample.make(BF16, "cuda") for _ in range(2))
    for _ in range(1000):
        expected = sample.call(kernels_module, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = sample.call(kernels_module, captured)
    for _ in range(1000):
        graph.replay()
    proofs.assert_same_bits(actual, expected, f"{name}: after 1000 replays")
    both = list_proofs.all_of(captured), list_proofs.all_of(eager)
    proofs.assert_same_bits(*both, f"{name}: after 1000 replays")


@EVERY
def test_other_stream(name: str, kernels_module: ModuleType) -> None:
    sample = LISTS_BY_ID[name]
    expected = sample.call(kernels_module, sample.make(BF16, "cuda"))
    made = sample.make(BF16, "cuda")
    ours = list_proofs.all_of(made)
    late = {str(i): t.clone() for i, t in enumerate(ours)}
    for t in ours:
        t.zero_()

    def call(given: dict[str, Tensor]) -> list[Tensor]:
        for i, t in enumerate(ours):
            t.copy_(given[str(i)])
        return sample.call(kernels_module, made)

    _, actual = proofs.on_a_late_stream(late, call)
    proofs.assert_same_bits(actual, expected, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@EVERY
def test_second_device(name: str, kernels_module: ModuleType) -> None:
    sample = LISTS_BY_ID[name]
    expected = sample.call(kernels_module, sample.make(BF16, "cuda:0"))
    actual = sample.call(kernels_module, sample.make(BF16, "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(a.device == torch.device("cuda:1") for a in actual)
    proofs.assert_same_bits([a.to("cuda:0") for a in actual], expected, name)


@pytest.mark.parametrize("sample", LIST_SAMPLES, ids=lambda s: s.id)
def test_compiles_once_for_all_sizes(sample: Any, kernels_module: ModuleType) -> None:
    list_proofs.compiles_once(sample, kernels_module, BF16, "cuda")


@pytest.mark.slow
def test_a_million_calls(kernels_module: ModuleType) -> None:
    """Over all ops."""
    for sample in LISTS_FIRST.values():
        arguments = sample.arguments(sample.make(BF16, "cuda", ((5,), (3, 64))))
        operator = getattr(kernels_module.ops, sample.op).default
        calling = partial(proofs.repeat, operator, arguments)
        proofs.assert_no_growth(calling, 10**6 // len(LISTS_FIRST), sample.op)
