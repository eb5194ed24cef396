"""Fused joint-attention blocks: one row per family, every way that a model of it is called.

With `HFPATCH_TEST_CAPTURES=1` also over captures of the same classes (support/captured.py).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zoo
from expect import relative_error
from support.called import calls_seen
from support.captured import ALL, captured, paths
from support.nearness import assert_as_near, draw
from support.samples import SEEDS, Sample
from torch import Tensor, nn

import hfpatch
from hfpatch.blocks.joint import MaskedAttention
from hfpatch.blocks.side_by_side import joined, product_of_two

Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@dataclass(frozen=True)
class Row:
    """A family: its entry of the zoo, and what of it the tests touch."""

    zoo: str
    #: Paths of the fused blocks, one of each class.
    blocks: tuple[str, ...]
    #: The argument of the model's forward that carries the attention processors' arguments.
    attention_kwargs: str = "joint_attention_kwargs"
    #: The argument with the mask of the text, if there is one.
    mask: str | None = None
    #: A projection in each of `blocks`.
    linears: tuple[str, ...] = ("attn.to_q", "attn.to_v")
    #: Its classes have no files, or these are out of reach.
    captured: bool = False


TWO = ("transformer_blocks.0", "single_transformer_blocks.0")
ROWS = (
    Row("flux", TWO, linears=("attn.to_q", "proj_out"), captured=True),
    Row("flux2", TWO, linears=("ff.linear_in", "attn.to_out")),
    Row(
        "hunyuan-video",
        TWO,
        attention_kwargs="attention_kwargs",
        mask="encoder_attention_mask",
        linears=("attn.add_k_proj", "attn.to_q"),
    ),
    Row(
        "qwen-image",
        ("transformer_blocks.0",),
        attention_kwargs="attention_kwargs",
        mask="encoder_hidden_states_mask",
        linears=("attn.to_k",),
        captured=True,
    ),
    Row(
        "sd3",
        ("transformer_blocks.0", "transformer_blocks.1"),
        linears=("attn2.to_q", "ff.net.2"),
        captured=True,
    ),
)
#: Those that are tested here: ROWS, and their captures where these are asked for.
TESTED = (
    *ROWS,
    *(dataclasses.replace(row, captured=True) for row in ROWS if ALL and not row.captured),
)


def called(row: Row) -> str:
    """What a row's tests are called."""
    return f"{row.zoo}, captured" if row.captured and row not in ROWS else row.zoo


families = pytest.mark.parametrize("row", TESTED, ids=called)


@pytest.fixture(autouse=True)
def _captured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of rows that say so no class has a file."""
    row = request.node.callspec.params.get("row") if hasattr(request.node, "callspec") else None
    with captured() if row is not None and row.captured else contextlib.nullcontext():
        yield


def build(row: Row, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    entry = zoo.ENTRIES[row.zoo]
    model = entry.build(dtype)
    return model.requires_grad_(False), entry.inputs(model, dtype)


def run(row: Row, model: nn.Module, inputs: Inputs) -> Tensor:
    return zoo.ENTRIES[row.zoo].output(model(**inputs))


def of_batch(inputs: Inputs, batch: int) -> Inputs:
    """The first `batch` samples of inputs of two, or both as often as needed."""

    def some(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:1] == (2,):
            return torch.cat([value] * batch)[:batch]
        return (value * batch)[:batch] if isinstance(value, list) else value

    return {name: some(value) for name, value in inputs.items()}


def assert_fused(row: Row, model: nn.Module, inputs: Inputs) -> None:
    """Its blocks are; captures from the call on that decides them."""
    for _ in range(2):  # a result that lies otherwise in memory is another kind's argument
        run(row, model, inputs)
    assert paths(model) >= set(row.blocks)


def pack(model: nn.Module) -> int:
    """Move the weights of q, k and v next to each other; how often."""
    done = 0
    for module in model.modules():
        for names in (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")):
            linears = [getattr(module, n, None) for n in names]
            if not all(isinstance(linear, nn.Linear) for linear in linears):
                continue
            for kind in ("weight", "bias"):
                parts = [getattr(linear, kind) for linear in linears]
                if parts[0] is None:
                    continue
                whole, at = torch.cat([p.data for p in parts]), 0
                for p in parts:
                    p.data = whole[at : at + p.shape[0]]
                    at += p.shape[0]
            done += 1
    return done


# Numbers ---------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("batch", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("packed", [False, True])
def test_batches_and_packed_weights(row: Row, batch: int, packed: bool) -> None:
    model, inputs = build(row)
    inputs = of_batch(inputs, batch)
    with torch.no_grad():
        expected = run(row, model, inputs)
        assert not packed or pack(model) or row.zoo == "flux2"
        hfpatch.apply(model)
        assert_fused(row, model, inputs)
        patched = run(row, model, inputs)
        again = run(row, model, inputs)  # nothing that the first call keeps is written to
    torch.testing.assert_close(patched, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, patched)  # the same kernels on the same tensors


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_half_precision(row: Row, dtype: torch.dtype) -> None:
    entry = zoo.ENTRIES[row.zoo]
    draws = []
    for seed in range(SEEDS):
        sample = Sample(entry, dtype, seed, 4, lambda inputs: of_batch(inputs, 1))
        pack(sample.model)
        hfpatch.apply(sample.model)
        if row.captured:
            sample.draws()
        draws += sample.draws()
    assert_as_near(draws, dtype)


@families
def test_pytorchs_operators_in_place_of_kernels(row: Row) -> None:
    model, inputs = build(row)
    with torch.no_grad():
        expected = run(row, model, inputs)
        report = hfpatch.apply(model, kernels="torch")
        if row.captured:  # they need the kernels
            torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)
            assert not hfpatch.status(model).plan.candidates
            return
        assert {s.source for s in report.swaps if s.op == "block"} == {"torch"}
        torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)


MASKED = [row for row in ROWS if row.mask is not None]


@pytest.mark.parametrize("row", [row for row in TESTED if row.mask is not None], ids=called)
@pytest.mark.parametrize("kept", ["1111111", "1111000", "0001111", "1010101"])
@pytest.mark.parametrize("batch", [1, 2])
def test_masks(row: Row, kept: str, batch: int) -> None:
    model, inputs = build(row)
    assert row.mask is not None
    inputs = of_batch(inputs, batch)
    inputs[row.mask] = torch.tensor([[int(c) for c in kept]] * batch)
    with torch.no_grad():
        expected = run(row, model, inputs)
        hfpatch.apply(model)
        torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)


def test_masked_keys_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import hfpatch.blocks.joint as joint

    seen: list[tuple[int, bool]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        seen.append((k.shape[1], mask is None))
        return q

    monkeypatch.setattr(joint, "attention", attention)
    attend = MaskedAttention()
    x = torch.randn(2, 5, 2, 4)
    one = x[:1]

    def mask(*rows: str) -> Tensor:
        return torch.tensor([[c == "1" for c in row] for row in rows])[:, None, None]

    attend(one, one, one, None)
    attend(one, one, one, mask("11111"))
    attend(one, one, one, mask("11100"))
    attend(one, one, one, mask("10101"))
    attend(x, x, x, mask("11111", "11111"))
    attend(x, x, x, mask("11111", "11100"))
    many = torch.randn(5, 5, 2, 4)
    attend(many, many, many, mask("11111", "11100", "10000", "11111", "11111"))
    attend(one, one, one, mask("00000"))
    with torch.inference_mode():  # writes are not counted, so nothing may be kept from it
        attend(one, one, one, mask("11100"))
    assert seen == [
        (5, True),
        (5, True),
        (3, True),
        (3, True),
        (5, True),
        (5, True),  # one sample after the other
        (3, True),
        (5, False),  # too many for that
        (5, False),
        (5, False),
    ]


@pytest.mark.parametrize("rows", [("11111", "11100"), ("10101", "01111"), ("11000", "11000")])
def test_masked_keys_of_samples_that_differ(rows: tuple[str, ...]) -> None:
    q, k, v = (torch.randn(2, 5, 2, 4) for _ in range(3))
    mask = torch.tensor([[c == "1" for c in row] for row in rows])[:, None, None]
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask)
    torch.testing.assert_close(MaskedAttention()(q, k, v, mask), expected.transpose(1, 2))


# What stands inside ------------------------------------------------------------------------------


class Adapter(nn.Module):
    """What PEFT puts in a layer's place: the layer and a low-rank sum."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)
        zoo.randomize_(self.a)
        zoo.randomize_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def adapt(row: Row, model: nn.Module) -> None:
    for block, path in zip(row.blocks, row.linears, strict=True):
        parent, _, name = f"{block}.{path}".rpartition(".")
        at: Any = model.get_submodule(parent)
        base = at[int(name)] if name.isdigit() else getattr(at, name)
        adapter = Adapter(base).requires_grad_(False)
        if name.isdigit():
            at[int(name)] = adapter
        else:
            setattr(at, name, adapter)


@families
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(row: Row, order: str) -> None:
    model, inputs = build(row)
    inputs = of_batch(inputs, 1)
    twin, _ = build(row)
    adapt(row, twin)
    with torch.no_grad():
        plain, expected = run(row, model, inputs), run(row, twin, inputs)
        assert relative_error(plain, expected) > 1e-2
        pack(model)
        if order == "before":
            adapt(row, model)
        hfpatch.apply(model)
        if order == "after":
            adapt(row, model)
        assert_fused(row, model, inputs)
        torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)


@families
def test_hooks_see_what_they_would(row: Row) -> None:
    """On a projection, which is called, and its result stays as it was; on a norm, which is not."""
    for path in ("norm_q", "projection"):
        model, inputs = build(row)
        seen: list[Tensor] = []
        for block, linear in zip(row.blocks, row.linears, strict=True):
            module = model.get_submodule(
                f"{block}.{linear if path == 'projection' else 'attn.norm_q'}"
            )
            module.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
        hooked_first = hfpatch.apply(model)
        if path == "norm_q" and not row.captured:
            assert not {s.path for s in hooked_first.swaps} & set(row.blocks)
        hfpatch.restore(model)
        with torch.no_grad():
            expected = run(row, model, inputs)
            theirs = [t.clone() for t in seen]
            seen.clear()
            for module in model.modules():
                hooks = dict(module._forward_hooks)
                module._forward_hooks.clear()
                module.__dict__["_held"] = hooks
            hfpatch.apply(model)
            for module in model.modules():
                module._forward_hooks.update(module.__dict__.pop("_held"))
            torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)
        assert len(seen) == len(theirs) > 0
        for ours, original in zip(seen, theirs, strict=True):
            torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-5)


@families
def test_processors(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(row)
    attentions = [model.get_submodule(f"{b}.attn") for b in row.blocks]
    stock = [a.processor for a in attentions]
    calls: list[str] = []

    def custom(base: type) -> Any:
        @functools.wraps(base.__call__)  # diffusers looks at the signature
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("custom")
            return base.__call__(self, *args, **kwargs)

        return type("Custom", (base,), {"__call__": call})()

    with torch.no_grad():
        expected = run(row, model, inputs)
        hfpatch.apply(model)
        for attn, processor in zip(attentions, stock, strict=True):
            attn.set_processor(custom(type(processor)))
        torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)
        assert len(calls) == len(row.blocks)
        hfpatch.restore(model)
        report = hfpatch.apply(model)
        reasons = {s.path: s.reason for s in report.skips}
        if row.captured:
            run(row, model, inputs)
            reasons = {c.path: c.reason for c in hfpatch.status(model).plan.candidates}
            assert all("`processor` of which" in reasons[b] for b in row.blocks)
        else:
            assert all(reasons[b] == "its attention processor is `Custom`" for b in row.blocks)
        for attn, processor in zip(attentions, stock, strict=True):
            attn.set_processor(processor)
        hfpatch.apply(model)
        assert_fused(row, model, inputs)
        calls.clear()
        torch.testing.assert_close(run(row, model, inputs), expected, rtol=1e-4, atol=1e-5)
        assert not calls


@families
def test_arguments_of_the_attention_go_to_the_original(row: Row) -> None:
    """Unknown ones are ignored with a warning there, and a wrong one fails there."""
    model, inputs = build(row)
    with torch.no_grad():
        expected = run(row, model, inputs)
        hfpatch.apply(model)
        block: Any = model.get_submodule(row.blocks[0])
        assert_fused(row, model, inputs)
        with calls_seen(block.attn) as reached:
            run(row, model, inputs)
            assert not reached
            given = run(row, model, inputs | {row.attention_kwargs: {"unknown": 1}})
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
        # HunyuanVideo's blocks do not get them
        assert bool(reached) == (row.zoo != "hunyuan-video")


# Autograd ----------------------------------------------------------------------------------------


@families
@pytest.mark.filterwarnings("ignore:hfpatch")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_originals(row: Row, checkpointing: bool) -> None:
    gradients = []
    for patched in (False, True):
        model, inputs = build(row)
        model.requires_grad_(True)
        if checkpointing:
            model.enable_gradient_checkpointing()
        if patched:
            hfpatch.apply(model)
        run(row, model, inputs).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5)


@families
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_gradient_of_the_text_alone(row: Row) -> None:
    """No parameter needs one: the block must see that an argument does."""
    gradients = []
    for patched in (False, True):
        model, inputs = build(row)
        text = inputs["encoder_hidden_states"].clone().requires_grad_(True)
        if patched:
            hfpatch.apply(model)
        run(row, model, inputs | {"encoder_hidden_states": text}).square().mean().backward()
        gradients.append(text.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


# The shared steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_neighbours_are_joined_without_a_copy(batch: int) -> None:
    whole = torch.randn(batch, 9, 4)
    first, second = whole[:, :4], whole[:, 4:]
    assert joined(first, second).data_ptr() == whole.data_ptr()
    assert torch.equal(joined(first, second), whole)
    swapped = joined(second, first)
    assert torch.equal(swapped, torch.cat((second, first), 1))
    gap = joined(whole[:, :3], second)
    assert torch.equal(gap, torch.cat((whole[:, :3], second), 1))
    other = joined(first, second + 1)
    assert torch.equal(other, torch.cat((first, second + 1), 1))
    # adjacent in memory, but rows of different tensors of the same storage
    flat = torch.randn(batch * 9 * 4)
    a = flat[: batch * 16].view(batch, 4, 4)
    b = flat[batch * 16 :].view(batch, 5, 4)
    assert torch.equal(joined(a, b), torch.cat((a, b), 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_product_of_two(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 48, bias=bias).to(dtype)
    draws = []
    with torch.no_grad():
        wide = copy.deepcopy(linear).double()
        for _ in range(8):
            a, b = torch.randn(2, 5, 32, dtype=dtype), torch.randn(2, 5, 64, dtype=dtype)
            expected = linear(torch.cat((a, b), -1))
            result = product_of_two(linear, a, b)
            if dtype == torch.float16:  # its range could not hold the first sum
                assert torch.equal(result, expected)  # the same product of the same tensors
            draws.append(draw(result, expected, wide(torch.cat((a, b), -1).double())))
        assert_as_near(draws, dtype)
        linear.register_forward_hook(lambda m, args, out: out + 1)
        assert torch.equal(product_of_two(linear, a, b), expected + 1)


def test_a_class_of_the_same_name_with_another_constructor() -> None:
    from diffusers.models.transformers.transformer_flux2 import Flux2TransformerBlock

    def init(self: nn.Module) -> None:
        Flux2TransformerBlock.__init__(self, 64, 4, 16)

    lookalike = type("Flux2TransformerBlock", (Flux2TransformerBlock,), {"__init__": init})
    report = hfpatch.apply(nn.Sequential(lookalike()))
    reason = next(s.reason for s in report.skips if s.path == "0")
    assert reason.endswith("is a class of its own, not the library's")
