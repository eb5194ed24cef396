"""Fused blocks in a compiled model: one operator each, with what the block does in eager mode."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from torch._dynamo.testing import CompileCounter

import hfpatch
from hfpatch.patches.blocks import opaque


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there; and a CPU stands in for a GPU."""
    monkeypatch.setattr(opaque, "DEVICES", ["cpu"])
    monkeypatch.setattr(opaque, "LEAST_WORK", 0)
    torch._dynamo.reset()


class Counter:
    """A backend that runs the graph as it is and counts the blocks in it."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        nodes = graph.graph.nodes
        self.blocks.append(sum(n.target is torch.ops.hfpatch.block for n in nodes))
        return graph.forward


@pytest.fixture
def ltx() -> tuple[Any, dict[str, Any]]:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    return model, entry.inputs(model, torch.float32) | {"return_dict": False}


def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]  # type: ignore[no-any-return]


def moved(value: Any) -> Any:
    """The same numbers in other tensors."""
    if isinstance(value, tuple):
        return tuple(moved(v) for v in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_a_block_is_one_operator(ltx: Any) -> None:
    model, inputs = ltx
    expected = run(model, inputs)
    hfpatch.apply(model)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-4, atol=1e-5)
    assert seen.blocks == [len(model.transformer_blocks)]
    with torch.no_grad():  # parameters are read at each call
        model.transformer_blocks[1].attn1.to_k.weight.mul_(0.5)
    changed = run(compiled, inputs)
    assert not torch.allclose(changed, expected, atol=1e-3)
    hfpatch.restore(model)
    torch.testing.assert_close(run(compiled, inputs), changed, rtol=1e-4, atol=1e-5)
    assert seen.blocks == [len(model.transformer_blocks), 0]


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_other_families(name: str) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32) | {"return_dict": False}
    expected = run(model, inputs)
    report = hfpatch.apply(model)
    blocks = [s for s in report.swaps if s.path.split(".")[-1].isdigit()]
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-4, atol=1e-5)
    assert seen.blocks == [len(blocks)]


def test_through_inductor(ltx: Any) -> None:
    model, inputs = ltx
    expected = run(model, inputs)
    hfpatch.apply(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-4, atol=1e-5)


def test_blocks_compiled_apart_share_one_graph(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    expected = run(model, inputs)
    counter = CompileCounter()
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1 < len(model.transformer_blocks)


def test_a_copy_calls_its_own_blocks(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    run(torch.compile(model, fullgraph=True, backend="eager"), inputs)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.transformer_blocks[0].scale_shift_table.mul_(2)
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    got, expected = run(compiled, inputs), run(other, inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, run(model, inputs), atol=1e-3)


def test_parameters_that_move_are_found_again(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    expected = run(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    run(compiled, inputs)
    for p in model.parameters():
        p.data = p.data.clone()
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-4, atol=1e-5)


def test_hooks_of_a_block_run_around_it(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    model.transformer_blocks[0].register_forward_hook(lambda m, a, h: h + 1)
    expected = run(model, inputs)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-4, atol=1e-5)
    assert seen.blocks == [len(model.transformer_blocks)]


def test_what_is_left_to_the_original(ltx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    with torch.autocast("cpu", torch.bfloat16):
        run(compiled, inputs)
    for p in model.parameters():
        p.requires_grad_(True)
    compiled(**inputs)[0].sum().backward()
    assert model.transformer_blocks[0].attn1.to_q.weight.grad is not None
    torch._dynamo.reset()
    monkeypatch.setattr(opaque, "DEVICES", ["cuda"])
    run(compiled, inputs)
    assert set(seen.blocks) == {0}


def test_little_work_is_left_to_inductor(ltx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    block = model.transformer_blocks[0]
    weights = sum(p.numel() for p in block.parameters() if p.ndim > 1)
    tokens = inputs["hidden_states"].shape[:2].numel()
    for least, blocks in ((2 * tokens * weights, len(model.transformer_blocks)), (1e30, 0)):
        monkeypatch.setattr(opaque, "LEAST_WORK", least)
        torch._dynamo.reset()
        seen = Counter()
        run(torch.compile(model, fullgraph=True, backend=seen), inputs)
        assert seen.blocks == [blocks]


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [t for t in gc.get_objects() if type(t) is torch.Tensor]


@pytest.mark.parametrize("name", ["ltx", "wan", "flux"])
def test_nothing_is_kept_of_a_call(name: str) -> None:
    """A pool of CUDA graphs gets its memory back, and no buffer is taken for another one."""
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32) | {"return_dict": False}
    hfpatch.apply(model)
    run(model, inputs)  # proofs and packed weights are made at the first call
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    run(compiled, inputs)
    before = {id(t) for t in live_tensors()}
    run(compiled, {k: moved(v) for k, v in inputs.items()})
    assert [t.shape for t in live_tensors() if id(t) not in before] == []


def test_an_exported_program_knows_nothing_of_hfpatch(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=inputs, strict=False)
    assert "hfpatch" not in str(program.graph)


def test_a_block_that_is_gone() -> None:
    anchor, h = nn.Parameter(torch.randn(3)), torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"`hfpatch::block`: expected a parameter .* \[3\]"):
        torch.ops.hfpatch.block(anchor.detach(), [h], "{'hidden_states': 0}", 1)


def test_blocks_that_share_the_parameter_they_are_known_by(ltx: Any) -> None:
    model, inputs = ltx
    first, second = model.transformer_blocks[:2]
    second.scale_shift_table = first.scale_shift_table
    hfpatch.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="share the parameter `scale_shift_table`"):
            run(compiled, inputs)


def test_a_shared_parameter_is_an_error_also_after_others_were_found() -> None:
    h = torch.randn(2, 3)
    alone, first, second = (Odd(lambda hidden_states: hidden_states + 1) for _ in range(3))
    second.anchor = first.anchor
    second.other = nn.Parameter(torch.randn(3))
    for block in (alone, first, second):
        opaque.register(block, ("anchor",))
    (result,) = torch.ops.hfpatch.block(alone.anchor, [h], "{'hidden_states': 0}", 1)
    assert torch.equal(result, h + 1)
    with pytest.raises(RuntimeError, match="share the parameter `anchor`"):
        torch.ops.hfpatch.block(first.anchor, [h], "{'hidden_states': 0}", 1)


class Odd(nn.Module):
    """A patched block whose results are not what the graph was made for."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.randn(3), requires_grad=False)
        self.forward = forward


def test_results_are_memory_of_their_own_and_as_expected() -> None:
    h = torch.randn(4, 3)
    block = Odd(lambda hidden_states: hidden_states)
    opaque.register(block, ("anchor",))
    (result,) = torch.ops.hfpatch.block(block.anchor, [h.T], "{'hidden_states': 0}", 1)
    assert torch.equal(result, h.T) and result.is_contiguous()
    assert result.data_ptr() != h.data_ptr()
    block.forward = lambda hidden_states: hidden_states[:1]
    with pytest.raises(RuntimeError, match="`Odd` in a compiled graph: expected results"):
        torch.ops.hfpatch.block(block.anchor, [h], "{'hidden_states': 0}", 1)
