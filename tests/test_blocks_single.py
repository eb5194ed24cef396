"""Every fused single-stream block: its numbers on every call, what comes back, when it steps aside.

Parametrized over the rows of blocks_single.py, and those whose classes are captured in place of
what their files do (support/captured.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import blocks_families
import blocks_single
import pytest
import torch
import zoo
from blocks_row import Row
from expect import assert_same_dicts, relative_error, snapshot
from support.called import calls_seen
from support.captured import captured, paths, with_captures
from support.nearness import LIKE, Draw, assert_as_near, draw
from support.samples import moved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfpatch
from hfpatch.blocks.base import BlockSubject
from hfpatch.proof.proofs import forget_proofs

ROWS = with_captures(blocks_single.ROWS)
CALLS = [(name, call) for name, row in ROWS.items() for call in row.calls]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Inputs that decide about one call of a block.
DRAWS = 8


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture(autouse=True)
def _captured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of rows that say so no class has a file."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    row = ROWS.get(given.get("name"))  # type: ignore[arg-type]
    with captured() if row is not None and row.captured else contextlib.nullcontext():
        yield


class Root(nn.Sequential):
    """A list of one block, as captures look for them."""

    block: nn.Module

    def __init__(self, block: nn.Module) -> None:
        super().__init__(OrderedDict(block=block))


def build(row: Row, dtype: torch.dtype = torch.float32) -> Root:
    with torch.random.fork_rng(devices=[]):
        block = zoo.randomize_(row.make())
    kept = {name: block.get_parameter(name).data for name in row.fp32_parts}
    block = block.to(dtype)
    for name, values in kept.items():
        block.get_parameter(name).data = values
    return Root(block.eval().requires_grad_(False))


def call_of(
    row: Row,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    shape: Any = (2, 10),
    seed: int = 1,
) -> dict[str, Any]:
    return arguments(row.calls[name or next(iter(row.calls))], dtype, shape, seed)


def arguments(
    call: Any, dtype: torch.dtype = torch.float32, shape: Any = (2, 10), seed: int = 1
) -> Any:
    g = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(dtype)

    return call(draw, *shape)


def wide(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: wide(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(wide(v) for v in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def flat(result: Any) -> Tensor:
    """The tensors that a block returns, as one."""
    if isinstance(result, Tensor):
        return result
    return torch.cat([t.flatten() for t in result if t is not None])


def original(block: nn.Module, call: dict[str, Any]) -> Any:
    return type(block).forward(block, **call)


def other_layouts(root: Root) -> list[nn.Module]:
    """Copies of the block in the memory formats in which convolutions add up in another order."""
    kinds = {type(m) for m in root.block.modules()}
    formats = {nn.Conv2d: torch.channels_last, nn.Conv3d: torch.channels_last_3d}
    found = [f for conv, f in formats.items() if conv in kinds]
    return [copy.deepcopy(root.block).to(memory_format=f) for f in found]


def assert_equal_numbers(
    root: Root,
    call: Callable[[int], dict[str, Any]],
    dtype: torch.dtype,
    count: int = DRAWS,
    like: int = LIKE,
) -> None:
    """As near to fp64 as the original, over calls with several inputs: `call(seed)`, on the block's
    device; a block with convolutions as the original in the worse of its layouts."""
    device = next(root.block.parameters()).device
    in_fp64 = zoo.norms_in_fp64_(copy.deepcopy(root.block).cpu().double())
    others, draws = other_layouts(root), []
    for seed in range(count):
        truth = flat(original(in_fp64, wide(call(seed))))
        given = moved(call(seed), device)
        theirs, ours = original(root.block, given), root.block(**given)
        assert type(theirs) is type(ours)
        found = draw(flat(ours).cpu(), flat(theirs).cpu(), truth)
        for other in others:
            off = relative_error(flat(original(other, given)).cpu(), truth)
            found = Draw(found.ours, max(found.theirs, off))
        draws.append(found)
    assert_as_near(draws, dtype, like=like)


def is_fused(root: Root, call: dict[str, Any], row: Row) -> bool:
    """Whether a call runs our forward, which never calls the module `row.inside`."""
    if row.captured:
        with torch.no_grad():
            root.block(**call)  # the first call of a kind decides
    with torch.no_grad(), calls_seen(root.block.get_submodule(row.inside)) as seen:
        root.block(**call)
    return not seen


#: `make test` leaves fp16 to `make test-all`: its proofs and kernels are those of bf16.
OFTEN = [
    pytest.param(t, marks=pytest.mark.exhaustive if t == torch.float16 else ()) for t in DTYPES
]


@pytest.mark.parametrize("dtype", OFTEN, ids=str)
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_numbers(name: str, call: str, dtype: torch.dtype) -> None:
    row = ROWS[name]
    root = build(row, dtype)
    before = snapshot(root)
    report = hfpatch.apply(root)
    given = call_of(row, call, dtype)
    assert is_fused(root, given, row)
    assert "block" in paths(root), report
    assert_equal_numbers(root, lambda seed: call_of(row, call, dtype, seed=seed), dtype)
    hfpatch.restore(root)
    assert_same_dicts(before, root)


@pytest.mark.parametrize("shape", [(1, 1), (4, 13)], ids=str)
@pytest.mark.parametrize("name", list(ROWS))
def test_batches_and_odd_sizes(name: str, shape: tuple[int, int]) -> None:
    row, root = ROWS[name], build(ROWS[name])
    hfpatch.apply(root)
    count, like = (24, 16) if shape == (1, 1) else (DRAWS, LIKE)  # few parts make up one token
    for call in row.calls:
        make = functools.partial(call_of, row, call, torch.float32, shape)
        assert_equal_numbers(root, make, torch.float32, count, like)


@pytest.mark.parametrize("name", ["sana", "resnet", "cogvideox"])
def test_other_dtypes_are_proven_at_their_first_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`apply` proves a block in the dtype of its model; another may never come."""
    compared: list[torch.dtype] = []
    compare = BlockSubject._compare

    def counted(self: Any, fused: Any, device: torch.device, dtype: torch.dtype) -> Any:
        compared.append(dtype)
        return compare(self, fused, device, dtype)

    monkeypatch.setattr(BlockSubject, "_compare", counted)
    forget_proofs()
    row, root = ROWS[name], build(ROWS[name], torch.bfloat16)
    hfpatch.apply(root, include="block")
    assert compared == [torch.bfloat16]
    half = call_of(row, dtype=torch.float16)
    root.half()
    with (
        pytest.warns(RuntimeWarning, match="was called under autocast"),
        contextlib.suppress(RuntimeError),  # PyTorch mixes no dtypes there
        torch.autocast("cpu"),
    ):
        root.block(**half)
    assert compared == [torch.bfloat16], "the original runs under autocast: nothing to prove"
    for _ in range(2):
        root.block(**half)
        assert compared == [torch.bfloat16, torch.float16]
    assert is_fused(root, half, row)
    make = functools.partial(call_of, row, None, torch.float16, (2, 10))
    assert_equal_numbers(root, make, torch.float16)


HANDED_BACK = [(name, call) for name, row in ROWS.items() for call in row.handed_back]


@pytest.mark.parametrize(("name", "call"), HANDED_BACK)
def test_handed_back(name: str, call: str) -> None:
    row = ROWS[name]
    root, given = build(row), arguments(row.handed_back[call])
    hfpatch.apply(root)
    assert is_fused(root, call_of(row), row)
    assert row.captured or not is_fused(root, given, row)
    torch.testing.assert_close(flat(root.block(**given)), flat(original(root.block, given)))


@pytest.mark.parametrize("name", list(ROWS))
def test_steps_aside_for_hooks(name: str) -> None:
    row = ROWS[name]
    root, given = build(row), call_of(row)
    hfpatch.apply(root)
    assert is_fused(root, given, row)
    for path in row.aside:
        seen: list[str] = []
        module = root.block.get_submodule(path)
        handle = module.register_forward_hook(lambda *a, seen=seen: seen.append("hook"))
        result = root.block(**given)
        assert set(seen) == {"hook"}, path
        handle.remove()
        torch.testing.assert_close(flat(result), flat(original(root.block, given)))
    assert is_fused(root, given, row)


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.inside.startswith("att")])
def test_steps_aside_for_a_processor(name: str) -> None:
    row = ROWS[name]
    root, given = build(row), call_of(row)
    hfpatch.apply(root)
    attn: Any = next(m for m in root.block.modules() if hasattr(m, "processor"))

    class Flipped(type(attn.processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            y = super().__call__(*args, **kwargs)  # not scaled: a norm behind it would undo that
            return tuple(r.flip(-1) for r in y) if isinstance(y, tuple) else y.flip(-1)

    before = flat(root.block(**given))
    attn.processor = Flipped()
    assert not is_fused(root, given, row)
    assert_equal_numbers(root, lambda seed: call_of(row, seed=seed), torch.float32)
    assert relative_error(flat(root.block(**given)), before) > 1e-3
    hfpatch.restore(root)
    report = hfpatch.apply(root)
    if row.captured:
        assert not is_fused(root, given, row)
        (left,) = hfpatch.status(root).plan.candidates
        assert "has a `processor` of which" in left.reason and "Flipped`" in left.reason
        return
    assert [s.reason for s in report.skips if s.path == "block"] == [
        "its attention processor is `Flipped`"
    ]


@pytest.mark.parametrize(
    ("name", "norm", "reason"),
    [
        ("resnet", nn.GroupNorm(4, 24, affine=False), "no `GroupNorm`s with weights"),
        ("resnet", nn.GroupNorm(3, 24, eps=1e-6), "differ in groups or eps"),
        ("resnet", nn.GroupNorm(4, 24, eps=0.5), "differ in groups or eps"),
        ("resnet", nn.GroupNorm(4, 24, 1e-6, dtype=torch.float16), "are torch.float16"),
        ("transformer of a UNet", nn.BatchNorm2d(24), "no `GroupNorm`s with weights"),
        ("transformer of a UNet", nn.GroupNorm(4, 24, dtype=torch.float16), "are torch.float16"),
    ],
)
def test_odd_group_norms(name: str, norm: nn.Module, reason: str) -> None:
    row = ROWS[name]
    root = build(row)
    setattr(root.block, row.aside[-1], norm)
    report = hfpatch.apply(root)
    (skip,) = (s for s in report.skips if s.path == "block")
    assert skip.reason.startswith("its norms ") and reason in skip.reason


@pytest.mark.parametrize("where", ["instance", "class"])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("resnet", "conv1"),
        ("resnet with a shortcut", "conv_shortcut"),
        ("transformer of a UNet, projections by convolution", "proj_in"),
    ],
)
def test_a_convolution_that_computes_by_a_method_of_somebody(
    name: str, path: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seamless(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding != (0, 0):
            x = nn.functional.pad(x, [1, 1, 1, 1], mode="circular")
        return 1.5 * nn.functional.conv2d(x, self.weight, self.bias)

    row = ROWS[name]
    root, given = build(row), arguments(row.calls["channels last"])
    hfpatch.apply(root)
    before = flat(root.block(**given))
    conv: Any = root.block.get_submodule(path)
    holder = nn.Conv2d if where == "class" else conv
    method = seamless if where == "class" else seamless.__get__(conv)
    monkeypatch.setattr(holder, "_conv_forward", method, raising=False)
    expected = flat(original(root.block, given))
    torch.testing.assert_close(flat(root.block(**given)), expected)
    assert relative_error(expected, before) > 1e-2


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if not row.waits])
def test_compiles_as_one_graph(name: str) -> None:
    row = ROWS[name]
    root, given = build(row), call_of(row)
    with torch.no_grad():
        expected = flat(original(root.block, given))
        hfpatch.apply(root)
        torch._dynamo.reset()
        compiled = torch.compile(root.block, fullgraph=True, backend="eager")
        torch.testing.assert_close(flat(compiled(**given)), expected)


class LowRank(nn.Module):
    """A LoRA layer as PEFT builds it: the base layer inside, which lends it its parameters."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        like = {"dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, 2, bias=False, **like)
        self.up = nn.Linear(2, base.out_features, bias=False, **like)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("first", ["apply", "LoRA"])
@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.linear])
def test_low_rank_adapters(name: str, first: str) -> None:
    row = ROWS[name]
    root, given = build(row), call_of(row)
    plain = flat(root.block(**given))
    parent, _, child = row.linear.rpartition(".")
    holder: Any = root.block.get_submodule(parent)
    if first == "apply":
        hfpatch.apply(root)
        root.block(**given)  # a capture is decided
    base = root.block.get_submodule(row.linear)
    adapter = LowRank(base).requires_grad_(False)  # type: ignore[arg-type]
    holder._modules[child] = adapter
    if first == "LoRA":
        hfpatch.apply(root)
    # a class of one's own, where another one stood at its capture, goes to the original
    assert is_fused(root, given, row) is not (row.captured and first == "apply")
    assert_equal_numbers(root, lambda seed: call_of(row, seed=seed), torch.float32)
    assert relative_error(flat(root.block(**given)), plain) > 1e-4
    holder._modules[child] = base
    torch.testing.assert_close(flat(root.block(**given)), plain, rtol=1e-4, atol=1e-5)


class Quantized(nn.Module):
    """A layer whose weight is no dtype to compute in, as bitsandbytes and others make them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale = base.weight.float().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((base.weight / self.scale).round().to(torch.int8), False)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(self.scale) * self.scale
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.scale = fn(self.scale)
        self.weight.data = self.weight.data.to(torch.int8)
        return self


@pytest.mark.parametrize(
    "name", [n for n in ROWS if n.removesuffix(", captured") in blocks_families.ROWS]
)
def test_quantized_projections(name: str) -> None:
    row = ROWS[name]
    root, given = build(row, torch.bfloat16), call_of(row, dtype=torch.bfloat16)
    for module in list(root.block.modules()):
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                module._modules[child] = Quantized(linear)
    report = hfpatch.apply(root)
    assert is_fused(root, given, row)
    assert "block" in paths(root), report
    make = functools.partial(call_of, row, None, torch.bfloat16, (2, 10))
    assert_equal_numbers(root, make, torch.bfloat16)


@pytest.mark.parametrize("name", list(ROWS))
def test_gradients_are_the_originals(name: str) -> None:
    forget_proofs()  # the warning comes once per kind of module
    row = ROWS[name]
    root, given = build(row).requires_grad_(True), call_of(row)
    flat(original(root.block, given)).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in root.named_parameters() if p.grad is not None}
    root.zero_grad()
    hfpatch.apply(root)
    told = pytest.warns(RuntimeWarning, match="autograd records")
    with contextlib.nullcontext() if row.captured else told:
        result = checkpoint(lambda: flat(root.block(**given)), use_reentrant=False)
    result.square().sum().backward()
    found = {n: p.grad for n, p in root.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    largest = max(g.norm() for g in expected.values())
    for n in expected:
        if row.captured:  # its parts are patched too
            assert (found[n] - expected[n]).norm() <= 1e-5 * largest, n
        else:
            assert torch.equal(found[n], expected[n]), n  # the original's own code


def test_original_takes_what_the_fused_forward_does_not() -> None:
    row = ROWS["unet"]
    root = build(row)
    hfpatch.apply(root)

    def assert_numbers(**besides: Any) -> None:
        assert_equal_numbers(root, lambda seed: call_of(row, seed=seed) | besides, torch.float32)

    assert_numbers(cross_attention_kwargs={"scale": 0.5})
    assert_numbers(cross_attention_kwargs={})
    root.block.set_chunk_feed_forward(5, 1)
    assert_numbers()


class Shifted(nn.LayerNorm):
    """A norm of somebody else's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("path", "norm", "reason"),
    [
        ("norm1.norm", Shifted(64), "its norms are no `LayerNorm`s"),
        ("norm2.norm", nn.RMSNorm(64), "its norms are no `LayerNorm`s"),
        ("attn1.norm_k", Shifted(16), "its norms are no `LayerNorm`s"),
        ("attn1.norm_k", None, "one of its q and k is normed"),
        ("attn1.norm_q", nn.LayerNorm(16, eps=0.5), "its norms differ in eps"),
        ("norm2.norm", nn.LayerNorm(64, eps=0.5), "its norms differ in eps"),
    ],
)
def test_odd_norms_of_cogvideox(path: str, norm: nn.Module | None, reason: str) -> None:
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

    from hfpatch.blocks.cogvideox import CogVideoXSubject

    block = CogVideoXBlock(64, 4, 16, 32)
    assert CogVideoXSubject.odd(block) is None
    above, _, name = path.rpartition(".")
    setattr(block.get_submodule(above), name, norm)
    assert CogVideoXSubject.odd(block) == reason


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_a_vaes_results_lie_in_memory_as_the_originals(batch: int) -> None:
    """Attention hands on a single image in channels-last memory that PyTorch takes for none."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    vae = AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, **kinds).eval()
    image = torch.randn(batch, 3, 16, 16)
    latents = vae.encode(image).latent_dist.mean
    pictures = vae.decode(latents).sample
    assert any("ResnetBlock2D" in s.class_name for s in hfpatch.apply(vae).swaps)
    for found, wanted in (
        (vae.encode(image).latent_dist.mean, latents),
        (vae.decode(latents).sample, pictures),
    ):
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


#: Images as they lie in memory, small ones among them: of one pixel, of one row, behind attention.
LYING: dict[str, Callable[[Tensor], Tensor]] = {
    "as they come": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "part of a batch": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "behind attention": lambda x: x.flatten(2).transpose(1, 2).contiguous().mT.view_as(x),
    "behind something else": lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
    "transposed": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("name", ["resnet", "resnet with a shortcut"])
def test_images_however_they_lie(name: str, lying: str, kernels_module: object) -> None:
    block = ROWS[name].make().eval()
    plain = copy.deepcopy(block)
    assert hfpatch.apply(nn.Sequential(block)).swaps
    for shape in ((1, 24, 1, 1), (2, 24, 1, 1), (1, 24, 1, 6), (2, 24, 5, 1), (2, 24, 5, 4)):
        x, time_ = LYING[lying](torch.randn(shape)), torch.randn(shape[0], 20)
        with torch.no_grad():
            ours, theirs = block(x, time_), plain(x, time_)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours.stride() == theirs.stride(), shape


def test_a_small_image_takes_no_longer_than_in_the_original(kernels_module: object) -> None:
    """Channels last, by one thread: where Python counts, 0.9 of the original's time."""
    from diffusers.models.resnet import ResnetBlock2D

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        block = ResnetBlock2D(in_channels=64, temb_channels=32, groups=8).eval()
        plain = copy.deepcopy(block)
        assert hfpatch.apply(nn.Sequential(block)).swaps
        x = torch.randn(1, 64, 2, 2).to(memory_format=torch.channels_last)
        given, least = torch.randn(1, 32), [float("inf")] * 2
        with torch.no_grad():
            for _ in range(60):
                for i, each in enumerate((block, plain)):
                    start = time.process_time_ns()
                    for _ in range(30):
                        each(x, given)
                    least[i] = min(least[i], time.process_time_ns() - start)
        assert least[0] <= 1.1 * least[1], least
    finally:
        torch.set_num_threads(threads)
