"""Linear layers packed into one storage: the same parameters, one product."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from hfpatch import packing
from hfpatch.blocks.projections import _packed, project


def layers(bias: bool = True, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    return [nn.Linear(32, n, bias=bias, dtype=dtype).requires_grad_(False) for n in (48, 16, 24)]


def is_packed(made: list[Any], x: torch.Tensor) -> bool:
    return _packed(made, x) is not None


@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_are_one_product_with_the_same_parameters(bias: bool) -> None:
    made = layers(bias)
    x = torch.randn(2, 5, 32)
    parameters = [p for m in made for p in m.parameters()]
    values = [p.clone() for p in parameters]
    expected = [m(x) for m in made]
    assert not is_packed(made, x)

    packed = packing.pack(made)
    assert is_packed(made, x) and not is_packed(made[::-1], x)
    assert [p for m in made for p in m.parameters()] == parameters or all(
        a is b for a, b in zip([p for m in made for p in m.parameters()], parameters, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(parameters, values, strict=True))
    results = project(x, made)
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert results[0].untyped_storage().data_ptr() == results[1].untyped_storage().data_ptr()

    for group in packed:
        packing.unpack(group)
    assert not is_packed(made, x)
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
    assert all(torch.equal(a, b) for a, b in zip(parameters, values, strict=True))


def test_what_is_written_to_a_parameter_is_read() -> None:
    made, x = layers(), torch.randn(3, 32)
    packing.pack(made)
    made[1].weight.data += 1.0
    made[2].load_state_dict({"weight": torch.ones(24, 32), "bias": torch.zeros(24)})
    results = project(x, made)
    assert is_packed(made, x)
    for got, m in zip(results, made, strict=True):
        torch.testing.assert_close(got, m(x))


def moved_to_another_dtype(made: list[Any]) -> list[Any]:
    return [m.half().float() for m in made]


def copied(made: list[Any]) -> list[Any]:
    return copy.deepcopy(made)


def replaced(made: list[Any]) -> list[Any]:
    made[1].weight = nn.Parameter(torch.randn(16, 32), requires_grad=False)
    return made


def without_a_bias(made: list[Any]) -> list[Any]:
    made[2].bias = None
    return made


def wrapped(made: list[Any]) -> list[Any]:
    made[0] = nn.Sequential(made[0])
    made[0].in_features, made[0].weight, made[0].bias = 32, made[0][0].weight, made[0][0].bias
    return made


def hooked(made: list[Any]) -> list[Any]:
    made[1].register_forward_hook(lambda m, a, y: y * 2)
    return made


@pytest.mark.parametrize(
    "change",
    [moved_to_another_dtype, replaced, without_a_bias, wrapped, hooked],
    ids=lambda f: f.__name__,
)
def test_layers_that_are_no_longer_packed_are_called(change: Any) -> None:
    made, x = layers(), torch.randn(3, 32)
    packing.pack(made)
    made = change(made)
    assert not is_packed(made, x)
    for got, m in zip(project(x, made), made, strict=True):
        assert torch.equal(got, m(x))


def test_a_copy_computes_the_same() -> None:
    made, x = layers(), torch.randn(3, 32)
    packing.pack(made)
    twin = copied(made)
    with torch.no_grad():
        made[0].weight.zero_()
    for got, m in zip(project(x, twin), twin, strict=True):
        torch.testing.assert_close(got, m(x))


def test_neighbours_in_memory_are_not_one_storage() -> None:
    """Two storages that happen to touch must not be read as one."""
    buffer = torch.randn(64 * 32)
    made = layers(bias=False)[:2]
    halves = [buffer[: 48 * 32].view(48, 32), buffer[48 * 32 :].view(16, 32)]
    for m, half in zip(made, halves, strict=True):
        own = torch.frombuffer(half.numpy().data, dtype=torch.float32).view(half.shape)
        m.weight.data = own
    x = torch.randn(3, 32)
    assert made[1].weight.data_ptr() == made[0].weight.data_ptr() + made[0].weight.nbytes
    assert not is_packed(made, x)
    for got, m in zip(project(x, made), made, strict=True):
        torch.testing.assert_close(got, m(x))


def test_only_plain_layers_on_a_gpu_are_packed() -> None:
    assert not packing.can_pack(layers())  # nothing gained on the CPU
    with torch.device("meta"):
        assert not packing.can_pack(layers())


def test_sizes_that_are_numpys() -> None:
    """An address is wider than 32 bits."""
    made: list[Any] = layers()
    x = torch.randn(2, 32)
    expected = [m(x) for m in made]
    for m in made:
        m.in_features, m.out_features = numpy.int32(m.in_features), numpy.int32(m.out_features)
    packing.pack(made)
    assert is_packed(made, x)
    for got, want in zip(project(x, made), expected, strict=True):
        torch.testing.assert_close(got, want)
