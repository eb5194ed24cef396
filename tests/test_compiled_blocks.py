"""Fused blocks in a compiled model: one operator each, with what the block does in eager mode."""

from __future__ import annotations

import copy
import gc
from types import MethodType
from typing import Any

import pytest
import torch
import zoo
from expect import relative_error
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

import hfpatch
from hfpatch.blocks import opaque
from hfpatch.blocks.memo import current_operator
from hfpatch.planning.families import without_files
from hfpatch.regions import kind, offer
from hfpatch.regions.capture import Uncapturable
from hfpatch.regions.proof import Disproved

#: One tensor by its name, which the result is like.
CALL = "(0, ('hidden_states',), {'hidden_states': 0})"
#: fp32 through two layers, with sums in another order.
NOISE = 1e-5


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there; and a CPU stands in for a GPU."""
    monkeypatch.setattr(opaque, "DEVICES", ["cpu"])
    monkeypatch.setattr(opaque, "LEAST_WORK", 0)
    torch._dynamo.reset()


class Counter:
    """A backend that runs the graph as it is and counts the blocks of each operator in it."""

    def __init__(self) -> None:
        self.graphs: list[list[int]] = []
        self._backend = aot_autograd(fw_compiler=self._count, inference_compiler=self._count)

    def _count(self, graph: Any, inputs: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.target is torch.ops.hfpatch.blocks.default]
        self.graphs.append([len(n.args[0]) for n in nodes])
        return make_boxed_func(graph.forward)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return self._backend(graph, inputs)

    @property
    def blocks(self) -> list[int]:
        """How many blocks each graph has."""
        return [sum(counts) for counts in self.graphs]


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


def test_blocks_that_follow_each_other_are_one_operator(ltx: Any) -> None:
    """They share in it what they share in eager mode: see `test_regions_share` for what."""
    model, inputs = ltx
    hfpatch.apply(model)
    run(model, inputs)
    expected = run(model, inputs)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    assert relative_error(run(compiled, inputs), expected) <= NOISE
    count = len(model.transformer_blocks)
    assert count > 1
    assert seen.graphs == [[count]]


def test_what_comes_between_blocks_parts_them(ltx: Any) -> None:
    """A hook that changes a result, a wrapper that writes to it: the numbers of eager mode."""
    model, inputs = ltx
    hfpatch.apply(model)
    first = model.transformer_blocks[0]
    count = len(model.transformer_blocks)
    for hook in (lambda m, a, h: h * 2, lambda m, a, h: (h + 1) - 1):
        handle = first.register_forward_hook(hook)
        torch._dynamo.reset()
        seen = Counter()
        expected = run(model, inputs)
        compiled = torch.compile(model, fullgraph=True, backend=seen)
        assert relative_error(run(compiled, inputs), expected) <= NOISE
        handle.remove()
        assert seen.graphs == [[1, count - 1]]

    def written(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # as somebody's wrapper would
        h = forward(*args, **kwargs)
        h.add_(1)
        return h

    def read(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        h = forward(*args, **kwargs)
        means.append((h.mean(), h.abs().mean()))
        return h

    means: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = first.forward
    for wrapper in (written, read):
        first.forward = MethodType(wrapper, first)
        torch._dynamo.reset()
        seen = Counter()
        expected = run(model, inputs)
        compiled = torch.compile(model, fullgraph=True, backend=seen)
        assert relative_error(run(compiled, inputs), expected) <= NOISE
        assert seen.graphs == [[1, count - 1]]
    # in eager mode, and in the graph, which may add up in another order: of what is summed
    (eager, size), (traced, _) = means[0], means[-1]
    assert (eager - traced).abs() <= NOISE * size
    first.forward = forward


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each block's text attention had a bias, in operators of compiled graphs."""
    found: list[bool] = []
    original = kind.Kind.lookup

    def spied(self: kind.Kind, args: Any, kwargs: Any, block: nn.Module) -> Any:
        if current_operator() is not None:  # not where a graph is traced
            found.append(kwargs.get("encoder_attention_mask") is not None)
        return original(self, args, kwargs, block)

    monkeypatch.setattr(kind.Kind, "lookup", spied)
    return found


def test_a_mask_that_masks_nothing_is_left_out(ltx: Any, masked: list[bool]) -> None:
    """What it holds is not known while tracing: the operator looks, as often as it is written."""
    model, inputs = ltx
    mask = torch.ones_like(inputs["encoder_attention_mask"])
    inputs["encoder_attention_mask"] = mask
    hfpatch.apply(model)
    blocks = len(model.transformer_blocks)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    for last in (1, 1, 0, 1):
        mask[0, -1] = last
        expected = run(model, inputs)
        masked.clear()
        assert relative_error(run(compiled, inputs), expected) <= NOISE
        assert masked == [last == 0] * blocks
    with torch.inference_mode():  # its writes are not counted
        inference = {**inputs, "encoder_attention_mask": torch.ones_like(mask)}
        expected = run(model, inference)
        masked.clear()
        assert relative_error(run(compiled, inference), expected) <= NOISE
    assert masked == [True] * blocks
    assert {tuple(counts) for counts in seen.graphs} == {(blocks,)}


def test_a_bias_that_is_not_the_models_is_used(ltx: Any, masked: list[bool]) -> None:
    """A wrapper around a block gives it another one, or writes to the model's."""
    model, inputs = ltx
    inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
    plain = copy.deepcopy(model)
    unmasked = run(plain, inputs)
    hfpatch.apply(model)

    def other(bias: torch.Tensor) -> torch.Tensor:
        return bias - 10000.0 * (torch.arange(bias.shape[-1]) > 1)

    def written(bias: torch.Tensor) -> torch.Tensor:
        return bias.sub_(10000.0 * (torch.arange(bias.shape[-1]) > 1))

    def twice(bias: torch.Tensor) -> torch.Tensor:  # 1 - (1 - mask): the mask, not 0
        return 1 - bias * (torch.arange(bias.shape[-1]) > 1)

    def changing(block: nn.Module, change: Any) -> Any:
        forward = block.forward

        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            bias = change(kwargs["encoder_attention_mask"])
            return forward(*args, **{**kwargs, "encoder_attention_mask": bias})

        block.forward = MethodType(wrapper, block)
        return forward

    for change in (other, written, twice):
        expected = []
        for each in (plain, model):
            first = each.transformer_blocks[0]
            forward = changing(first, change)
            torch._dynamo.reset()
            masked.clear()
            compiled = torch.compile(each, fullgraph=True, backend=Counter())
            expected.append(run(compiled, inputs))
            first.forward = forward
        torch.testing.assert_close(expected[1], expected[0], rtol=1e-4, atol=1e-5)
        assert masked[0]
        assert change is twice or not torch.allclose(expected[0], unmasked, atol=1e-4)


def test_a_failed_trace_leaves_nothing_behind(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)

    def failing(*args: Any) -> Any:
        raise ValueError("here")

    handle = model.transformer_blocks[1].register_forward_hook(failing)
    with pytest.raises(Exception, match="here"):
        run(torch.compile(model, backend="eager"), inputs)
    handle.remove()
    assert (opaque._trace.whole, opaque._trace.run) == (False, None)
    assert not opaque._trace.masks


#: By the entry of the zoo: how many blocks are operators, also in models of texts and pictures,
#: whose calls have no cache here.
FAMILIES = {
    "wan": 2, "flux": 4, "sd3": 2, "qwen-image": 2, "hunyuan-video": 5, "z-image": 4, "sana": 2,
    "cogvideox": 2, "mochi": 2, "sd15-unet": 4, "llama": 2, "gemma2": 2, "falcon": 2, "bert": 2,
    "vit": 2, "clip-text": 2, "t5-encoder": 1,
}  # fmt: skip
OFTEN = ("wan", "hunyuan-video", "vit")


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.exhaustive) for n in FAMILIES]
)
def test_other_families(name: str) -> None:
    """A compiled model that was never called: its blocks are captured while it is traced, and each
    operator's first call proves it."""
    offer.forget()
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    expected = entry.run(model, inputs)
    with without_files():
        hfpatch.apply(model, blocks=True)
    seen = Counter()
    compiled = torch.compile(model, backend=seen)
    for _ in range(2):
        assert relative_error(entry.run(compiled, inputs), expected) <= NOISE
    assert sum(seen.blocks) == FAMILIES[name]
    states = [c.state for c in hfpatch.status(model).plan.candidates]
    assert states.count("fused") >= FAMILIES[name]
    assert set(states) <= {"fused", "at its first call"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Uncapturable("it is too odd"), "it is too odd"),
        (KeyError("a rule's own"), 'its proof failed: KeyError: "a rule\'s own"'),
    ],
)
def test_a_call_that_cannot_be_captured_is_traced(
    ltx: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """Known while the graph is made: inductor gets the original's pieces, not one operator."""
    model, inputs = ltx
    expected = run(model, inputs)
    offer.forget()
    hfpatch.apply(model)

    def refused(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(kind, "capture", refused)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    assert relative_error(run(compiled, inputs), expected) <= NOISE
    assert seen.blocks == [0]
    found = hfpatch.status(model).plan.candidates
    assert {(c.state, c.reason) for c in found} == {("left", reason)}


def test_a_question_that_cannot_be_answered_is_no_error(
    ltx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = ltx
    expected = run(model, inputs)
    hfpatch.apply(model)

    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for another one")

    monkeypatch.setattr(opaque, "_like", none_left)
    seen = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    assert relative_error(run(compiled, inputs), expected) <= NOISE
    assert seen.blocks == [0]


def test_an_operator_whose_proof_fails_is_the_originals_call(
    ltx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = ltx
    expected = run(model, inputs)
    offer.forget()
    hfpatch.apply(model)

    def disproved(*args: Any) -> Any:
        raise Disproved("it is off")

    monkeypatch.setattr(kind, "compare", disproved)
    compiled = torch.compile(model, fullgraph=True, backend=Counter())
    for _ in range(2):
        assert relative_error(run(compiled, inputs), expected) <= NOISE
    found = hfpatch.status(model).plan.candidates
    assert {(c.state, c.reason) for c in found} == {("left", "it is off")}


def test_what_was_decided_in_eager_mode_is_not_captured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = zoo.ENTRIES["flux"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    offer.forget()
    hfpatch.apply(model)
    expected = entry.run(model, inputs)
    captured: list[Any] = []
    capture = kind.capture
    monkeypatch.setattr(kind, "capture", lambda *a: captured.append(a) or capture(*a))
    compiled = torch.compile(model, fullgraph=True, backend=Counter())
    assert relative_error(entry.run(compiled, inputs), expected) <= NOISE
    assert not captured


def test_other_sizes_in_one_graph(ltx: Any) -> None:
    model, inputs = ltx
    hfpatch.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend=Counter(), dynamic=True)
    for length in (3, 5, 6):
        text = inputs["encoder_hidden_states"][:, :length]
        mask = inputs["encoder_attention_mask"][:, :length]
        other = {**inputs, "encoder_hidden_states": text, "encoder_attention_mask": mask}
        expected = run(model, other)
        assert relative_error(run(compiled, other), expected) <= NOISE


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


@pytest.mark.parametrize(
    "name", ["ltx", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("wan", "flux"))]
)
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
    with pytest.raises(RuntimeError, match=r"`hfpatch::blocks`: expected a parameter .* \[3\]"):
        torch.ops.hfpatch.blocks([anchor.detach()], [h], CALL)


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
        opaque.register(block, ("anchor",), lambda self, **given: self.forward(**given))
    (result,) = torch.ops.hfpatch.blocks([alone.anchor], [h], CALL)
    assert torch.equal(result, h + 1)
    with pytest.raises(RuntimeError, match="share the parameter `anchor`"):
        torch.ops.hfpatch.blocks([first.anchor], [h], CALL)


class Odd(nn.Module):
    """A patched block whose results are not what the graph was made for."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.randn(3), requires_grad=False)
        self.forward = forward


def test_results_are_memory_of_their_own_and_as_expected() -> None:
    h = torch.randn(4, 3)
    block = Odd(lambda hidden_states: hidden_states)
    opaque.register(block, ("anchor",), lambda self, **given: self.forward(**given))
    (result,) = torch.ops.hfpatch.blocks([block.anchor], [h.T], CALL)
    assert torch.equal(result, h.T) and result.is_contiguous()
    assert result.data_ptr() != h.data_ptr()
    block.forward = lambda hidden_states: hidden_states[:1]
    with pytest.raises(RuntimeError, match="`Odd` in a compiled graph: expected results"):
        torch.ops.hfpatch.blocks([block.anchor], [h], CALL)
