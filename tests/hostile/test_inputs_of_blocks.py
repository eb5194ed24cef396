"""Inputs of a fused block of diffusers that it was not written for: each call ends as the unpatched
twin's, in its result or in its error."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from blocks_single import ROWS
from test_hostile_blocks import Root, assert_alike, draw, fused_in, outcome, patch_and_decide
from torch import Tensor, nn

import hfpatch
from hfpatch.regions import offer

Call = dict[str, Any]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


#: Blocks that have no row, of two streams most of them: of the zoo's models, called as these do.
JOINT = {
    f"{name}, {path}": (name, path)
    for name in ("flux", "flux2", "hunyuan-video", "qwen-image", "sd3", "ltx")
    for path in ("transformer_blocks.0", "single_transformer_blocks.0")
    if path[0] == "t" or name not in ("qwen-image", "sd3", "ltx")
}


def block_and_call(name: str) -> tuple[nn.Module, Call]:
    """A block, without a model around it, and a call of it with two samples."""
    if name in ROWS:
        row = ROWS[name]
        return row.make(), next(iter(row.calls.values()))(draw, 2, 9)
    entry, path = JOINT[name]
    model: Any = zoo.ENTRIES[entry].build()
    block: Any = model.get_submodule(path)
    seen: list[Call] = []
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    block.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append({**dict(zip(names, args, strict=False)), **kwargs}),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**zoo.ENTRIES[entry].inputs(model, torch.float32))
    block._forward_pre_hooks.clear()
    block._forward_pre_hooks_with_kwargs.clear()
    return block, seen[0]


NAMES = (*ROWS, *JOINT)


def _each(call: Call, change: Callable[[str, Tensor], Tensor | None]) -> Iterator[Call]:
    """The call with one tensor changed, each in turn; of tables, either and both."""
    for name, held in call.items():
        if isinstance(held, Tensor):
            if (t := change(name, held)) is not None:
                yield {**call, name: t}
        elif isinstance(held, tuple) and all(isinstance(t, Tensor) for t in held):
            changed = tuple(change(name, t) for t in held)
            if None not in changed:
                yield {**call, name: changed}
                yield {**call, name: (changed[0], *held[1:])}


def one_sample(name: str, t: Tensor) -> Tensor | None:
    return t[:1] if t.dim() > 1 and t.shape[0] == 2 else None


def wide(name: str, t: Tensor) -> Tensor | None:
    return t.double() if t.is_floating_point() else None


def narrow(name: str, t: Tensor) -> Tensor | None:
    return t.bfloat16() if t.is_floating_point() else None


def one_token(name: str, t: Tensor) -> Tensor | None:
    return t[:, :1] if t.dim() > 2 and t.shape[1] > 1 else None


def uneven(name: str, t: Tensor) -> Tensor | None:
    """Other values in the columns of a pair."""
    if not t.is_floating_point() or t.shape[-1] % 2:
        return None
    return t * torch.linspace(0.5, 1.5, t.shape[-1])


def lone_row(name: str, t: Tensor) -> Tensor | None:
    return t[0] if t.dim() > 1 else None


CHANGES = (one_sample, wide, narrow, one_token, uneven, lone_row)


def compare(model: Root, twin: Root, call: Call, what: object) -> None:
    got, expected = outcome(model, call), outcome(twin, call)
    if isinstance(expected, type):  # ours may take what the original does not broadcast
        return
    assert_alike(got, expected, what)


def check_inputs(name: str, share: int) -> None:
    """One of `share` of the changed calls of a block that is captured, which differ from name to
    name: the first call of each kind is proven, which takes its time. All of other blocks."""
    block, call = block_and_call(name)
    twin = Root(zoo.randomize_(block).eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    patch_and_decide(model, call)
    compare(model, twin, call, "as it is")
    others = [(f, i, other) for f in CHANGES for i, other in enumerate(_each(call, f))]
    if hfpatch.status(model).plan.candidates:
        others = others[NAMES.index(name) % share :: share]
    for change, i, other in others:
        for _ in range(2):  # the first call of another kind decides
            compare(model, twin, other, (change.__name__, i))
    compare(model, twin, call, "as it was")


#: Of Wan's blocks, whose captures are alike, `make test` has one.
OFTEN = [
    pytest.param(n, marks=pytest.mark.exhaustive if n.startswith("wan ") else ()) for n in NAMES
]


@pytest.mark.parametrize("name", OFTEN)
def test_inputs_that_are_others(name: str) -> None:
    check_inputs(name, 4)


@pytest.mark.parametrize("place", ["batch", "tokens"])
@pytest.mark.parametrize("name", ["wan", "unet", "pixart", "z-image", "lumina 2"])
def test_a_first_call_without_numbers(name: str, place: str) -> None:
    """It decides nothing of calls that have some."""
    offer.forget()
    row = ROWS[name]
    make = next(iter(row.calls.values()))
    twin = Root(zoo.randomize_(row.make()).eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    hfpatch.apply(model)
    empty = make(draw, *((0, 9) if place == "batch" else (2, 0)))
    for _ in range(2):
        compare(model, twin, empty, "empty")
    call = make(draw, 2, 9)
    for _ in range(2):
        compare(model, twin, call, "as it is")
    assert fused_in(lambda: compare(model, twin, call, "fused"))
    compare(model, twin, empty, "empty")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_every_input_that_is_another(name: str) -> None:
    check_inputs(name, 1)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_gone(name: str) -> None:
    block, call = block_and_call(name)
    base = Root(zoo.randomize_(block).eval().requires_grad_(False))
    patched = copy.deepcopy(base)
    patch_and_decide(patched, call)
    paths = [
        path
        for path, m in base.named_modules()
        if "norm" in type(m).__name__.lower() and m._parameters.get("weight") is not None
    ]
    for path in paths:
        model, twin = copy.deepcopy(patched), copy.deepcopy(base)
        for each in (model, twin):
            each.get_submodule(path).weight = None
        compare(model, twin, call, path)


def said(block: nn.Module, args: tuple[Any, ...], call: Call) -> str:
    """The error that a call ends with."""
    with pytest.raises(TypeError) as raised, torch.no_grad():
        block(*args, **call)
    return str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_missing_or_too_many(name: str) -> None:
    """Whatever the class calls its first argument, the error is the class's own."""
    block, call = block_and_call(name)
    twin = Root(zoo.randomize_(block).eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    patch_and_decide(model, call)
    first = list(inspect.signature(type(block).forward).parameters)[1]
    rest = {k: v for k, v in call.items() if k != first}
    for args, given in (((), {}), ((), rest), ((call[first],), call)):
        assert said(model.block, args, given) == said(twin.block, args, given), given.keys()
    compare(model, twin, call, "as it was")


def test_a_resnet_block_without_its_embedding() -> None:
    block, call = block_and_call("resnet")
    twin = Root(zoo.randomize_(block).eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    patch_and_decide(model, call)
    without = {**call, "temb": None}
    assert said(model.block, (), without) == said(twin.block, (), without)
