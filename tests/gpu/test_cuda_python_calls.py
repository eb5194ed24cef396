"""Operators as plain callables on a GPU: the operator's bits, stream, device and graphs."""

from __future__ import annotations

from types import ModuleType

import proofs
import pytest
import torch
from op_samples import BY_ID, DTYPES
from test_python_calls import BOUND, as_list, bind, check_same_bits, ordered

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BOUND)
def test_same_bits_as_the_operator(
    name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    check_same_bits(BY_ID[name], kernels_module, dtype, "cuda")


@pytest.mark.parametrize("name", BOUND)
def test_other_stream_and_graph(name: str, kernels_module: ModuleType) -> None:
    s = BY_ID[name]
    call = bind(kernels_module, s, width=1024)
    tensors = s.make(BF16, 7, 1024, "cuda")
    expected = s.call(kernels_module, tensors, 1024)
    late, actual = proofs.on_a_late_stream(tensors, lambda t: as_list(call(*ordered(s, t))))
    proofs.assert_same_bits(actual, expected, name)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_list(call(*ordered(s, late)))
    for c in captured:
        c.fill_(-7)
    graph.replay()
    proofs.assert_same_bits(captured, expected, f"{name}: replay")


def test_results_are_the_allocators_own(kernels_module: ModuleType) -> None:
    """Not borrowed memory: `record_stream` and resizing work as on any tensor."""
    s = BY_ID["rms_norm"]
    tensors = s.make(BF16, 7, 1024, "cuda")
    call = bind(kernels_module, s, width=1024)
    before = torch.cuda.memory_allocated()
    y = call(*ordered(s, tensors))
    size = y.untyped_storage().nbytes()
    assert torch.cuda.memory_allocated() - before == -(-size // 512) * 512
    y.record_stream(torch.cuda.Stream())
    assert y.untyped_storage().resizable()
    del y
    group = BY_ID["group_norm"]
    norm, made = bind(kernels_module, group), group.make(BF16, device="cuda")
    norm(*ordered(group, made))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= sum(
        -(-t.untyped_storage().nbytes() // 512) * 512 for t in made.values()
    )


def test_guard_tells_devices_apart(kernels_module: ModuleType) -> None:
    s = BY_ID["rms_norm"]
    there, here = s.make(BF16, device="cuda"), s.make(BF16)
    call = bind(kernels_module, s)
    guarded = kernels_module.calls.guard(call, *ordered(s, there))
    expected = s.call(kernels_module, there)
    proofs.assert_same_bits([guarded(*ordered(s, there))], expected, "guarded")
    assert guarded(*ordered(s, here)) is NotImplemented
    assert guarded(there["x"], here["weight"], None) is NotImplemented
    with torch.autocast("cuda", BF16):
        assert guarded(*ordered(s, there)) is NotImplemented
    with torch.autocast("cpu", BF16):
        proofs.assert_same_bits([guarded(*ordered(s, there))], expected, "autocast of the CPU")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", BOUND)
def test_second_device(name: str, kernels_module: ModuleType) -> None:
    s = BY_ID[name]
    tensors = s.make(BF16, 7, 1024, "cuda:0")
    expected = s.call(kernels_module, tensors, 1024)
    moved = {k: t.to("cuda:1") for k, t in tensors.items()}
    actual = as_list(bind(kernels_module, s, width=1024)(*ordered(s, moved)))
    assert torch.cuda.current_device() == 0
    assert all(a.device == torch.device("cuda:1") for a in actual)
    proofs.assert_same_bits([a.to("cuda:0") for a in actual], expected, name)
