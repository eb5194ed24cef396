"""Autocast that a block's code turns off, and the complex rotations that stand in it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import blocks_families
import pytest
import torch
import zoo
from support.called import calls_seen
from support.nearness import assert_as_near, draw
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import hfpatch
from hfpatch.planning import families
from hfpatch.regions.capture import Uncapturable, capture
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.modes import without_modes
from hfpatch.regions.nodes import Fused
from hfpatch.regions.offer import forget
from hfpatch.regions.rules import rewrite
from hfpatch.regions.structure import take_apart

aten: Any = torch.ops.aten
Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    forget()
    with families.without_files():
        yield


class Blocks(nn.Module):
    """Z-Image's, one after the other."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = [zoo.randomize_(blocks_families.z_image()()) for _ in range(2)]
        self.blocks = nn.ModuleList(made)
        self.to(dtype).eval().requires_grad_(False)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **others)
        return x


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    return blocks_families.z_image_masked(
        lambda *shape: torch.randn(*shape, generator=g).to(dtype), 2, 10
    )


def wide(call: Inputs) -> Inputs:
    return {k: v.double() if v.is_floating_point() else v for k, v in call.items()}


def run(model: nn.Module, call: Inputs) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**call)
    return out


def is_fused(model: Blocks, call: Inputs) -> bool:
    """Whether a call reaches no attention module."""
    with calls_seen(model.blocks[1].attention) as seen:  # type: ignore[arg-type]
        run(model, call)
    return not seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_z_image_is_captured(dtype: torch.dtype) -> None:
    draws = []
    for seed in range(8):
        model, call = Blocks(dtype, seed), inputs(dtype, seed)
        exact, eager = copy.deepcopy(model).double(), run(model, call)
        hfpatch.apply(model, blocks=True)
        run(model, call)
        assert is_fused(model, call)
        found = {(c.state, c.reason, c.found) for c in hfpatch.status(model).plan.candidates}
        ((state, _, ops),) = found
        assert state == "fused" and "qk_norm_rope" in ops
        draws.append(draw(run(model, call), eager, run(exact, wide(call))))
    assert_as_near(draws, dtype)


#: What is around a call, and whether a block runs fused in it.
AROUND: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], bool]] = {
    "off": (lambda: torch.autocast("cpu", enabled=False), True),
    "on": (lambda: torch.autocast("cpu", torch.bfloat16), False),
    "on, of another device": (lambda: _of_cuda(), True),
    "on within off": (lambda: _both(False), False),
    "off within on": (lambda: _both(True), True),
}


@contextlib.contextmanager
def _of_cuda() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` does it where there is a GPU
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@contextlib.contextmanager
def _both(outer: bool) -> Iterator[None]:
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=outer),
        torch.autocast("cpu", torch.bfloat16, enabled=not outer),
    ):
        yield


@pytest.mark.filterwarnings("ignore:hfpatch")
@pytest.mark.parametrize("first", [True, False], ids=["at its first call", "later"])
@pytest.mark.parametrize("around", AROUND)
def test_autocast_around_the_block(around: str, first: bool) -> None:
    """Where it is on, the original runs, under it; where it is off, it is off throughout."""
    enter, fuses = AROUND[around]
    model, call = Blocks(torch.float32, 0), inputs()
    with enter():
        expected = run(model, call)
    plain = run(model, call)
    assert torch.equal(expected, plain) is fuses
    hfpatch.apply(model, blocks=True, include="ZImageTransformerBlock")  # and no norm by itself
    if not first:
        run(model, call)
        assert is_fused(model, call)
    with enter():
        for _ in range(2):
            found = run(model, call)
        assert is_fused(model, call) is fuses
    if fuses:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    torch.testing.assert_close(run(model, call), plain, rtol=1e-4, atol=1e-5)
    assert is_fused(model, call)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.eval().requires_grad_(False)


def captured(code: Callable[..., Tensor], *given: Tensor) -> Any:
    toy = type("Toy", (Toy,), {"forward": code})()
    structure, tensors, _ = take_apart(given, {})
    return toy, capture(toy, structure, tensors, {}, ())


def test_autocast_that_code_turns_on_is_refused() -> None:
    def code(self: Toy, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return self.linear(x) * 2

    with pytest.raises(Uncapturable, match="calls `_enter_autocast`"):
        captured(code, torch.randn(2, 8))


@pytest.mark.parametrize(
    ("given", "made", "turned_off", "stays"),
    [
        ("cpu", "cpu", "cpu", False),
        ("cpu", "cpu", "cuda", False),
        ("cuda", "cuda", "cuda", False),
        ("cuda", "cuda", "cpu", False),
        ("cuda", "cpu", "cpu", True),  # whether it is on around a call, nobody asks
        ("cpu", "cuda", "cuda", True),
    ],
)
def test_devices_of_which_autocast_is_known_to_be_off(
    given: str, made: str, turned_off: str, stays: bool
) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    mode = torch.amp.autocast_mode
    entered = graph.call_function(mode._enter_autocast, (turned_off, torch.bfloat16, False, True))
    y = graph.call_function(aten.to.device, (x, made, torch.float32))
    graph.call_function(mode._exit_autocast, (entered,))
    graph.output([y])
    with FakeTensorMode():
        x.meta["val"], y.meta["val"] = (torch.empty(2, device=d) for d in (given, made))
    without_modes(graph)
    targets = [n.target for n in graph.nodes]
    assert (mode._enter_autocast in targets) is stays
    assert (mode._exit_autocast in targets) is stays


# Rotations by complex numbers --------------------------------------------------------------------


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """As Z-Image, Lumina 2 and Qwen-Image write it."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def _attends(self: Toy, x: Tensor, turns: Tensor) -> Tensor:
    q, k, v = (self.linear(x).unflatten(-1, (2, 4)) for _ in range(3))
    q, k = (_turned(t, turns.unsqueeze(2)).transpose(1, 2) for t in (q, k))
    return nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2))


def _without_attention(self: Toy, x: Tensor, turns: Tensor) -> Tensor:
    return _turned(self.linear(x).unflatten(-1, (2, 4)), turns.unsqueeze(-2))


def _table_first(self: Toy, x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(self.linear(x).reshape(2, 5, 2, 2, 2))
    return torch.view_as_real(turns[:, :, None] * pairs).flatten(-2)


def _read_twice(self: Toy, x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(self.linear(x).reshape(2, 5, 2, 2, 2))
    product = pairs * turns[:, :, None]
    return torch.view_as_real(product).flatten(-2) * product.abs().sum()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    ("code", "ops", "products"),
    [
        (_attends, ["rope_qk"], 0),
        (_without_attention, [], 1),
        (_table_first, [], 1),
        (_read_twice, [], 1),
    ],
)
def test_products_of_complex_numbers(
    code: Callable[..., Tensor], ops: list[str], products: int, dtype: torch.dtype
) -> None:
    """Those that no rule takes up are products of complex numbers in the end."""
    angles = torch.randn(2, 5, 2)
    given = [torch.randn(2, 5, 8), torch.polar(torch.ones(2, 5, 2), angles).to(dtype)]
    toy, found = captured(code, *given)
    rewrite(found.graph, frozenset())
    found.graph.lint()
    (out,) = Interpreter(toy, torch.float64).run(found.graph, given)
    exact = toy.double()(given[0].double(), given[1].to(torch.complex128))
    torch.testing.assert_close(out, exact.to(out.dtype), rtol=1e-6, atol=1e-6)
    nodes = list(found.graph.nodes)
    assert [n.target.op for n in nodes if isinstance(n.target, Fused)] == ops
    assert sum(n.target is aten.view_as_complex.default for n in nodes) >= products
    complex_ = [n for n in nodes if n.target is aten.mul.Tensor and n.meta["val"].is_complex()]
    assert len(complex_) == products
    assert not any(n.target is aten.stack.default for n in nodes)


@pytest.mark.parametrize("lying", ["conjugate", "part of a table", "exact"])
def test_complex_tables_however_they_lie(lying: str) -> None:
    model, call = Blocks(torch.float32, 0), inputs()
    hfpatch.apply(model, blocks=True)
    for _ in range(2):
        run(model, call)
    turns = call["freqs_cis"]
    call["freqs_cis"] = {
        "conjugate": lambda: turns.conj(),
        "part of a table": lambda: torch.cat((turns, turns), -1)[..., ::2],
        "exact": lambda: turns.to(torch.complex128),
    }[lying]()
    assert not torch.equal(call["freqs_cis"], turns) or lying == "exact"
    with torch.no_grad():
        expected = copy.deepcopy(call["x"])
        for block in model.blocks:
            given = {k: v for k, v in call.items() if k != "x"}
            expected = type(block).forward(block, expected, **given)  # type: ignore[operator]
    for _ in range(2):
        torch.testing.assert_close(run(model, call), expected, rtol=1e-4, atol=1e-5)
    assert is_fused(model, call)
