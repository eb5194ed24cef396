"""Values that blocks of a step share: computed once for the same tensors, and never for others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import blocks_families
import pytest
import torch
import zoo
from support.captured import captured
from torch import Tensor, nn

import hfpatch
from hfpatch.regions import emit as emitting
from hfpatch.regions import shared as shared_module
from hfpatch.regions.capture import capture
from hfpatch.regions.nodes import value
from hfpatch.regions.offer import forget
from hfpatch.regions.shared import Shared, shared_values
from hfpatch.regions.structure import take_apart


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def doubled() -> tuple[Shared, list[Tensor]]:
    """A shared `2 * sum of tensors`, and what it was computed for."""
    made: list[Tensor] = []

    def make(*tensors: Tensor) -> Tensor:
        made.append(tensors[0])
        return 2 * sum(tensors)  # type: ignore[return-value]

    return Shared(make), made


def test_the_same_tensors_are_computed_once() -> None:
    share, made = doubled()
    x, y = torch.randn(3), torch.randn(3)
    first = share(x, y)
    assert share(x, y) is first and len(made) == 1
    assert torch.equal(share(x, x), 4 * x) and len(made) == 2  # another tensor
    assert torch.equal(share(x.clone(), x), 4 * x) and len(made) == 3  # an equal one
    share(x, y)
    x.add_(1)  # written to
    assert torch.equal(share(x, y), 2 * (x + y)) and len(made) == 5
    share(x, y).add_(1)  # so was the value
    assert torch.equal(share(x, y), 2 * (x + y)) and len(made) == 6


def test_nothing_is_kept_of_what_is_gone_or_not_counted() -> None:
    share, made = doubled()
    x = torch.randn(3)
    held = weakref.ref(share(x))
    assert held() is not None
    del x
    made.clear()
    gc.collect()
    assert held() is None
    with torch.inference_mode():
        x = torch.randn(3)
        assert share(x) is not share(x)
    y = torch.randn(3)
    with torch.inference_mode():
        assert share(y) is not share(y)
    assert share(y) is share(y)


def test_large_values_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Shared(lambda t: t.repeat(3))
    x = torch.randn(100)
    assert share(x) is share(x)
    monkeypatch.setattr(shared_module, "_SMALL", 900)
    share = Shared(lambda t: t.repeat(3))
    assert share(x) is not share(x)
    share = Shared(lambda t: t.repeat(2))
    assert share(x) is share(x)


def test_a_value_that_nobody_shares_is_no_longer_looked_for() -> None:
    share, made = doubled()
    tensors = [torch.randn(2) for _ in range(shared_module._MOST_MISSES)]
    for t in tensors[:-1]:
        share(t)
    assert share(tensors[-2]) is share(tensors[-2])  # a use begins the count anew
    for t in tensors:
        share(t)
    made.clear()
    assert share(tensors[-1]) is not share(tensors[-1])
    assert len(made) == 2


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.eval().requires_grad_(False)


def _writes(self: Any, x: Tensor, table: Tensor) -> Tensor:
    y = torch.zeros_like(table)
    y[:, 1:] = self.linear(x[:, 0, :4].repeat(1, 2))[:, 1:] * table[:, 1:]
    return x + y[:, None]


SHARED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "of a table": (lambda s, x, t: x * t.cos()[:, None], ["cos"]),
    "of a table, in two steps": (lambda s, x, t: x * (t.cos() * 2)[:, None], ["mul"]),
    "read on the way": (lambda s, x, t: x * (y := t.cos())[:, None] + (y * 2)[:, None],
                        ["cos", "mul"]),
    "a view of it": (lambda s, x, t: x + s.linear(t.cos())[:, None], ["cos"]),
    "of the block's input": (lambda s, x, t: x.cos() + t[:, None], []),
    "of both": (lambda s, x, t: (x + t[:, None]).cos() + x, []),
    "of a parameter": (lambda s, x, t: x * (t * s.linear.bias)[:, None], []),
    "returned": (lambda s, x, t: (x + t[:, None], t.cos()), []),
    "a view is returned": (lambda s, x, t: (x * t[:, None], t.cos()[:, :4]), []),
    "written to": (_writes, []),
    "nothing to compute": (lambda s, x, t: x + t.view(2, 1, 8), []),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED)
def test_what_is_shared(what: str) -> None:
    code, expected = SHARED[what]
    toy = type("Toy", (Toy,), {"forward": code})()
    given = [torch.randn(2, 5, 8), torch.randn(2, 8)]
    structure, tensors, _ = take_apart(given, {})
    found = capture(toy, structure, tensors, {}, ())
    names = [n.target.__name__.partition(".")[0] for n in shared_values(found.graph)]
    assert names == expected
    assert all(value(n).shape[-1] == 8 for n in shared_values(found.graph))
    run, _ = emitting.emit(found.graph, toy, found.result, lambda op, params: None)
    plain = toy(*given)
    for _ in range(2):
        for ours, theirs in zip(*map(_tensors, (run(toy, given, None), plain)), strict=True):
            torch.testing.assert_close(ours, theirs)
    given[1].mul_(3)
    for ours, theirs in zip(*map(_tensors, (run(toy, given, None), toy(*given))), strict=True):
        torch.testing.assert_close(ours, theirs)


def _tensors(held: Any) -> tuple[Tensor, ...]:
    return held if isinstance(held, tuple) else (held,)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often captured blocks computed a shared value."""
    count: list[int] = []

    class Counted(Shared):
        def __init__(self, make: Any) -> None:
            def counted(*tensors: Tensor) -> Any:
                count.append(1)
                return make(*tensors)

            super().__init__(counted)

    monkeypatch.setattr(emitting, "Shared", Counted)
    forget()
    with captured():
        yield count
    forget()


def test_blocks_of_a_step_share_their_mask(made: list[int]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [zoo.randomize_(blocks_families.sana()()) for _ in range(3)]
    model = nn.Sequential(*blocks).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    call = blocks_families.sana_masked(lambda *s: torch.randn(*s, generator=g), 2, 10)

    def run() -> Tensor:
        h = call["hidden_states"]
        with torch.no_grad():
            for block in model:
                h = block(**(call | {"hidden_states": h}))
        return h

    plain = run()
    hfpatch.apply(model)
    for _ in range(2):
        run()
    made.clear()
    torch.testing.assert_close(run(), plain, rtol=1e-4, atol=1e-5)
    assert not made, "of the same mask it is there"
    call["encoder_attention_mask"][0, :, 2:] = -10000.0
    run()
    assert len(made) == 1
    call["encoder_attention_mask"] = call["encoder_attention_mask"].clone()
    found = run()
    assert len(made) == 2
    hfpatch.restore(model)
    assert (found - plain).abs().max() > 1e-3
    torch.testing.assert_close(found, run(), rtol=1e-4, atol=1e-5)
