"""Blocks that have files of their own, captured in their place: what their captures fuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import zoo
from expect import relative_error
from torch import Tensor, nn

import hfpatch
from hfpatch.ops import OPS
from hfpatch.planning import families
from hfpatch.proof.subject import Formula
from hfpatch.regions import emit, offer
from hfpatch.regions.capture import KnownLeaf, capture
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.nodes import Attend, JoinedHeads
from hfpatch.regions.rules import rewrite
from hfpatch.regions.structure import take_apart


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: what is fused depends on them."""


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    """Nothing is known of these blocks, and nothing stays known."""
    offer.forget()
    yield
    offer.forget()


#: By class: what its captures find, among other things.
FOUND = {
    "ltx": {
        "LTXVideoTransformerBlock": {
            "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate", "3 products as one",
        },
    },
    "wan": {"WanTransformerBlock": {"qk_norm_rope", "gate_residual_norm_modulate"}},
    "flux": {
        "FluxTransformerBlock": {"text and image side by side", "gate_residual_norm_modulate"},
        "FluxSingleTransformerBlock": {"qk_norm_rope", "product of two parts", "gate_residual"},
    },
    "sd3": {"JointTransformerBlock": {"text and image side by side", "norm_modulate"}},
    "lumina2": {"Lumina2TransformerBlock": {"qk_norm_rope", "norm_modulate", "gated silu"}},
    "z-image": {"ZImageTransformerBlock": {"qk_norm_rope", "norm_modulate", "gated silu"}},
    "ltx2": {"LTX2VideoTransformerBlock": {"rope_qk", "norm_modulate"}},
    "cogvideox": {"CogVideoXBlock": {"attention", "norm_modulate"}},
    "sana": {"SanaTransformerBlock": {"norm_modulate", "gate_residual_norm_modulate"}},
    "sd15-unet": {"BasicTransformerBlock": {"add_layer_norm", "gated gelu"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16],
    ids=str,
)
def test_a_capture_has_the_ops_of_the_file(name: str, dtype: torch.dtype) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build(dtype)
    inputs = entry.inputs(model, dtype)
    truth, eager = entry.reference(model, inputs), entry.run(model, inputs)
    with families.without_files():
        hfpatch.apply(model, blocks=True)
    first, second = entry.run(model, inputs), entry.run(model, inputs)
    candidates = hfpatch.status(model).plan.candidates
    for cls, wanted in FOUND[name].items():
        of_class = [c for c in candidates if c.class_name == cls]
        assert of_class
        assert {c.state for c in of_class} == {"fused"}, of_class
        assert any(wanted <= set(c.found) for c in of_class), of_class
    limit = 1.25 * relative_error(eager, truth) + 4 * torch.finfo(dtype).eps
    for found in (first, second):
        assert relative_error(found, truth) <= limit
    hfpatch.restore(model)
    assert torch.equal(entry.run(model, inputs), eager)


@pytest.mark.parametrize("name", ["ltx", "wan", "lumina2"])
def test_tables_that_a_step_shares_go_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    own = emit.made_table

    def noted(*args: Any) -> Tensor:
        table = own(*args)
        made.append(weakref.ref(table))
        return table

    monkeypatch.setattr(emit, "made_table", noted)
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.bfloat16)
    inputs = entry.inputs(model, torch.bfloat16)
    with families.without_files():
        hfpatch.apply(model, blocks=True)
    entry.run(model, inputs)
    entry.run(model, inputs)
    made.clear()
    entry.run(model, inputs)
    blocks = len(hfpatch.status(model).plan.candidates)
    assert 0 < len(made) < 2 * blocks or blocks == 1  # once for all blocks of a kind
    del model, inputs
    gc.collect()
    assert not [ref for ref in made if ref() is not None]


@pytest.mark.parametrize("apart", [False, True])
def test_two_halves_of_one_memory_are_not_copied_and_not_written_to(apart: bool) -> None:
    """What the block before a single-stream one returns: text and image of one buffer."""
    entry = zoo.ENTRIES["flux"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    blocks = model.single_transformer_blocks
    calls: list[dict[str, Any]] = []

    def noted(block: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(kwargs)

    hook = blocks[0].register_forward_pre_hook(noted, with_kwargs=True)
    entry.run(model, inputs)
    hook.remove()
    (call,) = calls
    text, image = call["encoder_hidden_states"], call["hidden_states"]
    both = torch.cat((text, image), 1)
    if not apart:
        text, image = both.split([text.shape[1], image.shape[1]], 1)
    call |= {"encoder_hidden_states": text, "hidden_states": image}
    with torch.no_grad():
        expected = blocks[0](**call)
        with families.without_files():
            hfpatch.apply(model, blocks=True)
        for _ in range(3):
            found = blocks[0](**call)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                assert a.untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    assert torch.equal(torch.cat((text, image), 1), both)
    assert hfpatch.status(model).plan.candidates[-1].state == "fused"


class Joint(nn.Module):
    """Two streams that attend to each other, as blocks write it; `late`: heads are exchanged with
    tokens before the streams are put together; `apart`: each is rotated by itself."""

    def __init__(self, late: bool, apart: bool) -> None:
        super().__init__()
        self.late, self.apart = late, apart
        for name in ("q", "k", "v", "q_text", "k_text", "v_text", "out"):
            self.add_module(name, nn.Linear(32, 32))
        for name in ("norm_q", "norm_k", "norm_q_text", "norm_k_text"):
            self.add_module(name, nn.RMSNorm(8, eps=1e-6))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, text: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = text.shape[1]

        def turned(t: Tensor, c: Tensor, s: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * c + torch.cat((-b, a), -1) * s

        def heads(layer: Any, norm: Any, stream: Tensor, where: slice) -> Tensor:
            t = layer(stream).unflatten(-1, (4, 8))
            t = t if norm is None else norm(t)
            t = t.transpose(1, 2) if self.late else t
            if norm is not None and self.apart:
                t = turned(t, *(self.of(table, where) for table in (cos, sin)))
            return t

        x, token_dim = self.norm(x), 2 if self.late else 1
        sides = []
        for name in ("q", "k", "v"):
            norms = [getattr(self, f"norm_{name}{end}", None) for end in ("_text", "")]
            first = heads(getattr(self, f"{name}_text"), norms[0], text, slice(None, n))
            second = heads(getattr(self, name), norms[1], x, slice(n, None))
            both = torch.cat((first, second), token_dim)
            if name != "v" and not self.apart:
                both = turned(both, self.of(cos, slice(None)), self.of(sin, slice(None)))
            sides.append(both if self.late else both.transpose(1, 2))
        out = nn.functional.scaled_dot_product_attention(*sides)
        return self.out(out.transpose(1, 2).flatten(2)) + torch.cat((text, x), 1)  # type: ignore[no-any-return]

    def of(self, table: Tensor, where: slice) -> Tensor:
        """[S, D] as it broadcasts against heads: [1, 1, S, D] or [1, S, 1, D]."""
        return table[where][None, None] if self.late else table[where][None, :, None]


def by_formulas(op: str, params: Any, into: int = 0) -> Any:
    """Ops by their references, as kernels are bound."""
    reference = OPS[op].reference

    def written(*tensors: Tensor) -> None:
        for out, made in zip(tensors[:into], reference(*tensors[into:], **params), strict=True):
            out.copy_(made)

    return written if into else lambda *tensors: reference(*tensors, **params)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_streams_are_joined_however_they_are_written(late: bool, apart: bool, batch: int) -> None:
    torch.manual_seed(0)
    block = Joint(late, apart).eval().requires_grad_(False)
    for name, layer in block.named_modules():
        if name.startswith("norm_"):
            layer.weight.copy_(torch.randn(8))  # type: ignore[operator]
    angles = torch.randn(9, 4).repeat(1, 2)
    given = [torch.randn(batch, 6, 32), torch.randn(batch, 3, 32), angles.cos(), angles.sin()]
    expected = block(*given)
    leaf = KnownLeaf(Formula("rms_norm", {"eps": 1e-6, "cast": "none"}), "weight", None)
    leaves = {n: leaf for n, _ in block.named_children() if n.startswith("norm_")}
    structure, taken, _ = take_apart(given, {})
    found = capture(block, structure, taken, leaves, ())
    linears = frozenset(n for n, m in block.named_children() if isinstance(m, nn.Linear))
    assert "text and image side by side" in rewrite(found.graph, linears)
    assert sum(isinstance(n.target, JoinedHeads) for n in found.graph.nodes) == 1
    assert not any(n.target is torch.ops.aten.cat.default for n in _between_streams(found.graph))
    (wide,) = Interpreter(block, torch.float64).run(found.graph, given)
    torch.testing.assert_close(wide, expected.double(), rtol=1e-5, atol=1e-5)
    run, _ = emit.emit(found.graph, block, found.result, by_formulas)
    torch.testing.assert_close(run(block, list(given), None), expected, rtol=1e-4, atol=1e-5)


def _between_streams(graph: Any) -> list[Any]:
    """What attention is given, and what that is made of, as far as the node that joins."""
    (attend,) = (n for n in graph.nodes if isinstance(n.target, Attend))
    found, left = [], [a for a in attend.args[:3] if a is not None]
    while left:
        node = left.pop()
        if not isinstance(node.target, JoinedHeads):
            found.append(node)
            left += node.all_input_nodes
    return found
