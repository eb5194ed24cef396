"""What is kept between a denoiser's steps: the same results, and only from the same inputs."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from diffusers import LTX2VideoTransformer3DModel, LTXVideoTransformer3DModel
from diffusers.models.transformers import transformer_ltx
from diffusers.models.transformers.transformer_ltx import (
    LTXVideoRotaryPosEmbed,
    LTXVideoTransformerBlock,
)
from torch import nn

import hfpatch
from hfpatch.blocks.masks import masks_nothing
from hfpatch.blocks.memo import (
    Capture,
    Operator,
    StepMemo,
    accompany,
    companion,
    rehearsal,
)
from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.inputs import sample_inputs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about models that use them."""


class Root(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.rope = child


CALLS: list[tuple[Any, ...]] = [
    (2, 3, 4, (8 / 25, 32, 32)),
    (2, 3, 4, (8 / 25, 32, 32)),  # recalled
    (2, 3, 4, None),
    (2, 3, 4, (0.5, 32, 32)),
    (3, 3, 4, (0.5, 32, 32)),
    (3, 3, 4, (torch.tensor(0.25), 32, 32)),  # a tensor may change: not kept
]


@pytest.mark.parametrize("dim", [128, 132])
def test_rope_tables_equal_the_originals(dim: int) -> None:
    model = Root(LTXVideoRotaryPosEmbed(dim))
    (swap,) = hfpatch.apply(model).swaps
    assert swap.op == "recall"
    for batch in (1, 2, 3):
        x = torch.randn(batch, 24, 8)
        for call in CALLS:
            expected = LTXVideoRotaryPosEmbed.forward(model.rope, x, *call)
            got = model.rope(x, *call)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), call
    model.rope.theta = 500.0  # a setting of the module is part of the key
    again = model.rope(x, *CALLS[0])
    expected = LTXVideoRotaryPosEmbed.forward(model.rope, x, *CALLS[0])
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    coords = torch.rand(2, 3, 24)
    got = model.rope(x, video_coords=coords)
    expected = LTXVideoRotaryPosEmbed.forward(model.rope, x, video_coords=coords)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_writing_to_a_table_changes_nothing_kept() -> None:
    model = Root(LTXVideoRotaryPosEmbed(128))
    hfpatch.apply(model)
    x = torch.randn(1, 24, 8)
    cos, _ = model.rope(x, *CALLS[0])
    before = cos.clone()
    cos.zero_()
    assert torch.equal(model.rope(x, *CALLS[0])[0], before)


def pickled(t: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(t))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled], ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_copy_of_a_table_is_read_as_it_is(copied: Callable[[Any], Any]) -> None:
    """What was kept with a table is that table's alone: a copy counts its own writes."""
    entry = zoo.ENTRIES["ltx"]
    plain = entry.build(torch.float32)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    g = torch.Generator().manual_seed(0)
    width = plain.transformer_blocks[0].attn1.to_q.in_features
    hidden = torch.randn(1, 24, width, generator=g)
    cos, sin = patched.rope(hidden, *CALLS[0])
    again = copied(cos)
    cos.mul_(0.5)
    text = torch.randn(1, 6, plain.transformer_blocks[0].attn2.to_k.in_features, generator=g)
    temb = torch.randn(1, 1, 6 * width, generator=g)
    given = hidden, text, temb, (again, sin)
    expected = plain.transformer_blocks[0](*given)
    got = patched.transformer_blocks[0](*given)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not vars(again), "nothing of ours goes with it"


@torch.no_grad()
def test_a_copy_of_a_table_whose_memory_is_written_to_later() -> None:
    """A hook that keeps LTX-2's tables of the first step, and writes to what it gave a copy of."""
    torch.manual_seed(0)
    model = diffusers_model(LTX2VideoTransformer3DModel)
    plain = zoo.randomize_(model).eval().requires_grad_(False)
    inputs = sample_inputs(plain, batch=1)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)

    def second_step(model: Any) -> torch.Tensor:
        kept: list[torch.Tensor] = []

        def hook(module: nn.Module, args: Any, tables: Any) -> Any:
            if not kept:
                kept.append(tables[0].mul_(0.9))
                return tables
            again = copy.copy(kept[0])
            kept[0].mul_(0.5)
            return again, tables[1]

        model.rope.register_forward_hook(hook)
        model(**inputs)
        return model(**inputs)[0]  # type: ignore[no-any-return]

    torch.testing.assert_close(second_step(patched), second_step(plain), rtol=1e-4, atol=1e-5)


def run(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def test_a_mask_that_masks_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    padded = inputs["encoder_attention_mask"]
    seen: list[Any] = []
    hfpatch.apply(model, include=["LTXVideoTransformer3DModel"])

    attend = transformer_ltx.dispatch_attention_fn

    def look(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if key.shape[1] == padded.shape[1]:  # not the attention of the image to itself
            seen.append(kwargs["attn_mask"])
        return attend(query, key, *args, **kwargs)

    # no hook: what those are given stays
    monkeypatch.setattr(transformer_ltx, "dispatch_attention_fn", look)
    ones = torch.ones_like(padded)
    for mask, kept in ((padded, True), (ones, False), (ones, False), (ones.bool(), False)):
        got = run(model, inputs | {"encoder_attention_mask": mask})
        assert seen and (seen[-1] is not None) == kept
        expected = type(model).forward(model, **inputs | {"encoder_attention_mask": mask})
        torch.testing.assert_close(got, expected[0])
    ones[0, -1] = 0  # written to: looked at again
    run(model, inputs | {"encoder_attention_mask": ones})
    assert seen[-1] is not None
    ready_made = (1 - padded[:, None]) * -10000.0  # a bias, 3-D, is none of ours
    run(model, inputs | {"encoder_attention_mask": ready_made})
    assert bool((seen[-1] == ready_made[:, None]).all())


def test_a_mask_is_kept_in_a_recording_and_its_rehearsal() -> None:
    """At a replay the same tensor may hold another mask."""
    mask = torch.ones(2, 8)
    for known in (False, True):
        with rehearsal():
            assert not masks_nothing(mask)
        with Capture():
            assert not masks_nothing(mask)
        assert known or masks_nothing(mask)


def test_by_position_and_in_inference_mode() -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
    names = ("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask")
    expected = run(model, inputs)
    hfpatch.apply(model)
    rest = {k: v for k, v in inputs.items() if k not in names}
    with torch.no_grad():
        got = model(*(inputs[n] for n in names), **rest, return_dict=False)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        got = model(
            **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        )
    torch.testing.assert_close(got.sample, expected, rtol=1e-4, atol=1e-5)


def test_steps_of_changing_inputs() -> None:
    """Sums, tables and handed-over norms of one step never reach the next."""
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    steps = []
    for seed in range(4):
        inputs = entry.inputs(model, torch.float32)
        g = torch.Generator().manual_seed(seed)
        inputs["hidden_states"] = torch.randn(inputs["hidden_states"].shape, generator=g)
        inputs["timestep"] = torch.tensor([900 - seed, 300 + 100 * seed])
        steps.append((inputs, run(model, inputs)))
    hfpatch.apply(model)
    for inputs, expected in steps * 2:
        torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # parameters are read at each call
        model.transformer_blocks[1].scale_shift_table.mul_(-2)
        model.transformer_blocks[1].attn1.to_k.weight.mul_(0.5)
    got = run(model, steps[0][0])
    assert not torch.allclose(got, steps[0][1], atol=1e-2)
    hfpatch.restore(model)
    torch.testing.assert_close(got, run(model, steps[0][0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,), (0, 1, 0, 1)])
def test_blocks_in_another_order(order: tuple[int, ...]) -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    first, second = model.transformer_blocks
    blocks = [(first, second)[i] for i in order]
    hfpatch.apply(model)
    model.transformer_blocks = nn.ModuleList(blocks)
    got = run(model, inputs)
    hfpatch.restore(model)
    torch.testing.assert_close(got, run(model, inputs), rtol=1e-4, atol=1e-5)


def test_a_callback_that_changes_the_states_between_blocks() -> None:
    entry = zoo.ENTRIES["ltx"]
    for change in (lambda h: h + 1, lambda h: h.add_(1)):
        model = entry.build(torch.float32)
        inputs = entry.inputs(model, torch.float32)

        def hook(module: nn.Module, args: Any, h: torch.Tensor, change: Any = change) -> Any:
            return change(h)

        model.transformer_blocks[0].register_forward_hook(hook)
        expected = run(model, inputs)
        hfpatch.apply(model)
        torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-5)


def test_step_memo() -> None:
    made = []

    def make(a: torch.Tensor, b: torch.Tensor) -> int:
        made.append(1)
        return len(made)

    memo = StepMemo(make)
    a, b = torch.ones(2), torch.ones(2)
    assert memo(a, b) == memo(a, b) == 1
    assert memo(b, a) == 2
    assert memo(a, b) == 3
    a.add_(1)
    assert memo(a, b) == 4
    with torch.inference_mode():
        c = torch.ones(2)
        assert memo(a, c) == 5 and memo(a, c) == 6
    with Operator(blocks=2):
        assert memo(a, b) == memo(a, b) == 7
    assert memo._held is None, "of a compiled graph's call nothing is kept"
    with Operator(blocks=1):
        assert memo(a, b) == 8 and memo(a, b) == 9
    accompany(a, "x")
    assert companion(a) == "x" and companion(b) is None and companion(a.view(2)) is None


def _unmasked(m: nn.Module, args: Any, kwargs: Any) -> Any:
    """Acts where no mask is given."""
    if kwargs.get("attention_mask", kwargs.get("encoder_attention_mask")) is None:
        kwargs = {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}
    return args, kwargs


def _masked_otherwise(self: Any, *args: Any, **kwargs: Any) -> Any:
    out = type(self).forward(self, *args, **kwargs)
    return out if kwargs.get("encoder_attention_mask") is not None else out * 2


_BLOCK_FORWARD = LTXVideoTransformerBlock.forward
_MODEL_FORWARD = LTXVideoTransformer3DModel.forward


def _replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
    out = _BLOCK_FORWARD(self, *args, **kwargs)
    return out if kwargs.get("encoder_attention_mask") is not None else out * 2


def _whole_replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
    out = _MODEL_FORWARD(self, *args, **kwargs)
    out.sample = out.sample if kwargs.get("encoder_attention_mask") is not None else out.sample * 2
    return out


class Another(LTXVideoTransformer3DModel):
    forward = _whole_replaced


def _hook(path: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(m: Any, _: pytest.MonkeyPatch) -> None:
        m.get_submodule(path).register_forward_pre_hook(_unmasked, with_kwargs=True)

    return change


def _on_all(m: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(module: nn.Module, args: Any) -> Any:
        if isinstance(module, LTXVideoTransformerBlock):
            seen.append(sum(isinstance(a, torch.Tensor) for a in args))

    seen: list[int] = []
    monkeypatch.setattr(
        torch.nn.modules.module, "_global_forward_pre_hooks", OrderedDict({1: unmasked})
    )


READERS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "a hook on attention": _hook("transformer_blocks.0.attn2"),
    "a hook on a block": _hook("transformer_blocks.0"),
    "a block's forward": lambda m, _: setattr(
        m.transformer_blocks[0],
        "forward",
        types.MethodType(_masked_otherwise, m.transformer_blocks[0]),
    ),
    "the forward of the blocks' class": lambda m, p: p.setattr(
        LTXVideoTransformerBlock, "forward", _replaced
    ),
    "the model's class": lambda m, _: setattr(m, "__class__", Another),
    "the forward of the model's class": lambda m, p: p.setattr(
        LTXVideoTransformer3DModel, "forward", _whole_replaced
    ),
    "a hook on all modules": _on_all,
}


@pytest.mark.parametrize("when", ["before", "after", "before a second apply"])
@pytest.mark.parametrize("reader", READERS)
def test_who_looks_at_a_full_mask_is_given_it(
    reader: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build()
    inputs = entry.inputs(model)
    inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
    twin = copy.deepcopy(model)
    change = READERS[reader]
    if when == "before":
        for m in (model, twin):
            change(m, monkeypatch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(model)
        for m in (model, twin):
            entry.run(m, dict(inputs))
        if when != "before":
            for m in (model, twin):
                change(m, monkeypatch)
        if when == "before a second apply":
            hfpatch.apply(model)
        ours, theirs = (entry.run(m, dict(inputs)) for m in (model, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_hook_that_notes_the_mask_notes_the_same() -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build()
    inputs = entry.inputs(model)
    inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
    hfpatch.apply(model)
    seen: list[bool] = []
    for block in model.transformer_blocks:
        block.attn2.register_forward_pre_hook(
            lambda m, a, k: seen.append(k.get("attention_mask") is None), with_kwargs=True
        )
    with torch.no_grad():
        entry.run(model, inputs)
    assert seen == [False] * len(model.transformer_blocks)


class DoubledTables(LTXVideoRotaryPosEmbed):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cos, sin = super().forward(*args, **kwargs)
        return cos * 2, sin


_TABLES, _COORDS = LTXVideoRotaryPosEmbed.forward, LTXVideoRotaryPosEmbed._prepare_video_coords


def _tripled(self: Any, *args: Any, **kwargs: Any) -> Any:
    cos, sin = _TABLES(self, *args, **kwargs)
    return cos * 3, sin


def _moved(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _COORDS(self, *args, **kwargs) * 2


TABLE_CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "class": lambda m, _: setattr(m.rope, "__class__", DoubledTables),
    "forward of the class": lambda m, p: p.setattr(LTXVideoRotaryPosEmbed, "forward", _tripled),
    "helper of the class": lambda m, p: p.setattr(
        LTXVideoRotaryPosEmbed, "_prepare_video_coords", _moved
    ),
    "helper of the instance": lambda m, _: setattr(
        m.rope, "_prepare_video_coords", types.MethodType(_moved, m.rope)
    ),
    "code": lambda m, p: p.setattr(_COORDS, "__code__", _other_code()),
}


def _other_code() -> Any:
    def _prepare_video_coords(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        import torch

        return torch.ones(2, 3, 24)

    return _prepare_video_coords.__code__


@pytest.mark.parametrize("change", TABLE_CHANGES)
def test_tables_of_another_code_are_made_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Root(LTXVideoRotaryPosEmbed(128))
    twin = copy.deepcopy(model)
    hfpatch.apply(model)
    x = torch.randn(2, 24, 8)
    before = [m.rope(x, *CALLS[0]) for m in (model, twin)][1]
    for m in (model, twin):
        TABLE_CHANGES[change](m, monkeypatch)
    ours, theirs = (m.rope(x, *CALLS[0]) for m in (model, twin))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], before[0])
