"""Layers inside of a captured or fused block whose weights are not the parameters that they were:
quantized in place, pruned, with a bias that is a buffer. Each call ends as the unpatched twin's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from test_hostile_blocks import Root, assert_alike, outcome, patch_and_decide
from test_inputs_of_blocks import NAMES, block_and_call
from torch import nn
from torch.nn.utils import prune
from transformers import DynamicCache

import hfpatch


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def bias_is_a_buffer(layer: Any) -> None:
    if layer.bias is not None:
        bias = layer.bias.detach()
        del layer.bias
        layer.register_buffer("bias", bias * 1.5)


def weight_is_a_buffer(layer: Any) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight * 1.5)


def pruned(layer: Any) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


def quantized(model: nn.Module) -> None:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def each(change: Callable[[Any], None]) -> Callable[[nn.Module], None]:
    def change_all(model: nn.Module) -> None:
        for layer in [m for m in model.modules() if type(m) is nn.Linear]:
            change(layer)

    change_all.__name__ = change.__name__
    return change_all


CHANGES = (*map(each, (bias_is_a_buffer, weight_is_a_buffer, pruned)), quantized)
CASES = [
    pytest.param(name, change, id=f"{name}-{change.__name__}")
    for name in ("llama", "bert", "wan")
    for change in CHANGES
    if not (name == "wan" and change is quantized)  # diffusers asks a layer for its parameters
]


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "later"])
@pytest.mark.parametrize(("name", "change"), CASES)
@torch.no_grad()
def test_layers_that_were_changed(
    name: str, change: Callable[[nn.Module], None], called: bool
) -> None:
    entry = zoo.ENTRIES[name]
    twin = entry.build()
    model, inputs = copy.deepcopy(twin), entry.inputs(twin)
    hfpatch.apply(model, blocks=True, decoding=False)
    for _ in range(2 * called):
        model(**inputs)
    change(model)
    change(twin)
    expected = entry.run(twin, inputs)
    # a rounding may put what a quantized layer is given onto the next of its 256 steps
    limit = 0.1 if change is quantized else 1e-5
    for _ in range(3):
        got = entry.run(model, inputs)
        assert (got - expected).norm() <= limit * expected.norm()


class Twice(torch.Tensor):
    """A weight with which PyTorch's operators give twice the usual, as a quantized one may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out * 2 if func in _DOUBLED else out


_DOUBLED = (
    *(nn.functional.layer_norm, nn.functional.rms_norm, nn.functional.group_norm),
    *(torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__),
)


@pytest.mark.parametrize("when", ["before apply", "before the first call", "later"])
@pytest.mark.parametrize("name", ["bert", "llama", "vit", "wan", "flux", "ltx", "sd15-unet"])
@torch.no_grad()
def test_norms_with_weights_of_a_class_of_ones_own(name: str, when: str) -> None:
    def change(m: nn.Module) -> None:
        norms = [x for x in m.modules() if "norm" in type(x).__name__.lower()]
        for held in [x._parameters for x in norms if x._parameters.get("weight") is not None]:
            held["weight"] = held["weight"].detach().as_subclass(Twice)  # type: ignore

    entry = zoo.ENTRIES[name]
    model = entry.build()
    twin, inputs = copy.deepcopy(model), entry.inputs(model)
    usual = entry.run(twin, inputs)
    change(twin)
    expected = entry.run(twin, inputs)
    assert (expected - usual).norm() > 0.05 * usual.norm()
    if when == "before apply":
        change(model)
    hfpatch.apply(model, blocks=True, decoding=False)
    for _ in range(2 * (when == "later")):
        model(**inputs)
    if when != "before apply":
        change(model)
    for _ in range(2):
        assert_alike(entry.run(model, inputs), expected, (name, when))


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Half(Wrapped):
    """Of another dtype, as PyTorch's operators take it beside fp32."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.float()).bfloat16()


class OneColumn(Wrapped):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[..., :1]


class Negated(Wrapped):
    """Memory that is read with another sign."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch._neg_view(-self.layer(x))


class Workspace(Wrapped):
    """All of these write their result to one buffer."""

    held: ClassVar[dict[Any, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return self.held.setdefault(y.shape, torch.empty_like(y)).copy_(y)


@pytest.mark.parametrize("cls", [Half, OneColumn, Negated, Workspace])
@torch.no_grad()
def test_layers_of_ones_own_class_that_come_later(cls: Any) -> None:
    entry = zoo.ENTRIES["llama"]
    twin = entry.build()
    model, inputs = copy.deepcopy(twin), entry.inputs(twin)
    hfpatch.apply(model, blocks=True, decoding=False)
    for _ in range(2):
        model(**inputs)
    found = {(c.state, c.reason) for c in hfpatch.status(model).plan.candidates}
    assert found == {("fused", "")}
    for m in (model, twin):
        for mlp in [x for x in m.modules() if hasattr(x, "up_proj")]:
            mlp.up_proj = cls(mlp.up_proj)
            if cls is Workspace:
                mlp.gate_proj = cls(mlp.gate_proj)
    expected = entry.run(twin, inputs)
    limit = 1e-2 if cls is Half else 1e-5  # fp32 that differs in a rounding may round to another
    for _ in range(2):
        assert (entry.run(model, inputs) - expected).norm() <= limit * expected.norm()


class Counting(DiffusersHook):  # type: ignore[misc]
    """As a cache of diffusers, which gives something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls += 1
        return output * (1 + 0.1 * self.calls)


class CountingOfAccelerate(ModelHook):
    calls = 0

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls += 1
        return output * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("of", ["diffusers", "accelerate"])
@pytest.mark.parametrize("path", ["mlp.up_proj", "self_attn.q_proj"])
@torch.no_grad()
def test_a_proof_calls_no_hook_that_keeps_something(path: str, of: str) -> None:
    entry = zoo.ENTRIES["llama"]
    twin = entry.build()
    model, inputs = copy.deepcopy(twin), entry.inputs(twin)
    for m in (model, twin):
        for layer in m.model.layers:
            inside = layer.get_submodule(path)
            if of == "diffusers":
                HookRegistry.check_if_exists_or_initialize(inside).register_hook(Counting(), "one")
            else:
                add_hook_to_module(inside, CountingOfAccelerate())
    hfpatch.apply(model, blocks=True, decoding=False)
    for _ in range(3):
        expected = entry.run(twin, inputs)
        assert (entry.run(model, inputs) - expected).norm() <= 1e-5 * expected.norm()


class WritesToItsInput(Wrapped):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        x.mul_(0.5)
        return y


@pytest.mark.parametrize(
    "name", ["flux", "sd3", "qwen-image", "hunyuan-video", "mochi", "cogvideox", "sd15-unet"]
)
@torch.no_grad()
def test_what_blocks_share_is_made_anew_after_a_layer_wrote_to_it(name: str) -> None:
    """The embedding's SiLU is one for all blocks of a step, where each original makes its own."""
    entry = zoo.ENTRIES[name]
    twin = entry.build()
    model, inputs = copy.deepcopy(twin), entry.inputs(twin)
    hfpatch.apply(model)
    for _ in range(2):
        entry.run(model, inputs)
    changed = 0
    for m in (model, twin):
        for path, parent in list(m.named_modules()):
            if not any(part in path for part in ("norm", "_mod", "resnets")):
                continue
            for child, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    parent._modules[child] = WritesToItsInput(layer)
                    changed += 1
    assert changed >= 4
    expected = entry.run(twin, inputs)
    for _ in range(2):
        assert (entry.run(model, inputs) - expected).norm() <= 1e-5 * expected.norm()


class Doubled(Wrapped):
    def forward(self, x: torch.Tensor) -> Any:
        return 2 * self.layer(x)


class ScalesItsInput(Wrapped):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.mul_(1.5))


@pytest.mark.parametrize("cls", [WritesToItsInput, ScalesItsInput])
@pytest.mark.parametrize("path", ["proj_mlp", "attn.to_q"])
@pytest.mark.parametrize("name", ["flux", "hunyuan-video"])
@torch.no_grad()
def test_the_mlp_beside_an_attention_is_called_first(name: str, path: str, cls: Any) -> None:
    """Both are given the same norm, and a layer may write to it."""
    block, call = block_and_call(f"{name}, single_transformer_blocks.0")
    twin = Root(block.eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    patch_and_decide(model, call)
    for m in (model, twin):
        m.set_submodule(f"blocks.0.{path}", cls(m.get_submodule(f"blocks.0.{path}")))
    for got, expected in zip(model(**call), twin(**call), strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *(("resnet", "conv1"), ("transformer of a UNet", "proj_in"), ("mochi", "attn1.to_out.0")),
        *((name, "attn1.to_out.0") for name in ("wan", "unet", "sana", "cogvideox", "ltx-2")),
    ],
)
@torch.no_grad()
def test_a_layer_without_a_weight_that_comes_later(name: str, path: str) -> None:
    block, call = block_and_call(name)
    twin = Root(block.eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    patch_and_decide(model, call)
    for m in (model, twin):
        m.set_submodule(f"blocks.0.{path}", Doubled(m.get_submodule(f"blocks.0.{path}")))
    assert_alike(outcome(model, call), outcome(twin, call), (name, path))


class Draws(Wrapped):
    """As the dropout of an adapter in training mode does."""

    called: ClassVar[list[str]] = []
    path = ""

    def forward(self, x: torch.Tensor) -> Any:
        self.called.append(self.path)
        y = self.layer(x)
        return y + torch.randn(y.shape)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_layers_are_called_in_the_originals_order(name: str) -> None:
    """So that the random numbers that they draw are the original's."""
    block, call = block_and_call(name)
    twin = Root(zoo.randomize_(block).eval().requires_grad_(False))
    model = copy.deepcopy(twin)
    patch_and_decide(model, call)
    found = []
    for m in (model, twin):
        for path, parent in list(m.named_modules()):
            for child, layer in list(parent.named_children()):
                if type(layer) in (nn.Linear, nn.Dropout, nn.Conv2d, nn.Conv3d):
                    parent._modules[child] = made = Draws(layer)
                    made.path = f"{path}.{child}"
        Draws.called.clear()
        torch.manual_seed(0)
        found.append((outcome(m, call), list(Draws.called)))
    (got, ours), (expected, theirs) = found
    assert ours == theirs
    if not isinstance(expected, type):
        assert_alike(got, expected, name)


def test_a_cache_whose_keys_had_gradients_keeps_no_graph() -> None:
    """A prefix that is trained, taken on under `no_grad`: what a step adds to records nothing."""
    entry = zoo.ENTRIES["llama"]
    twin: Any = entry.build().requires_grad_(False)
    model = copy.deepcopy(twin)
    hfpatch.apply(model, blocks=False, decoding=True)
    found = []
    for m in (model, twin):
        cache = DynamicCache(config=m.config)
        with torch.no_grad():
            m(torch.arange(6)[None], past_key_values=cache)
            m(torch.arange(1)[None], past_key_values=cache)
        for layer in cache.layers:
            layer.keys = layer.keys.clone().requires_grad_()
        with torch.no_grad():
            m(torch.arange(1)[None], past_key_values=cache)
        found.append(
            [(t.requires_grad, t.is_leaf) for x in cache.layers for t in (x.keys, x.values)]
        )
    assert found[0] == found[1]


def _scripted_bert(places: range) -> nn.Module:
    model: Any = zoo.ENTRIES["bert"].build()
    for i in places:
        output = model.encoder.layer[i].output
        output.dense = torch.jit.script(output.dense)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("places", [range(2), range(1)], ids=["all", "one"])
def test_a_scripted_layer(places: range) -> None:
    """It has no tables of its tensors, and its class no forward until it was called."""
    model, twin = _scripted_bert(places), _scripted_bert(places)
    call = {"input_ids": torch.arange(8)[None]}
    report = hfpatch.apply(model, blocks=True)
    assert any("`output.dense` is a ScriptModule" in note for note in report.notes)
    with torch.no_grad():
        expected = twin(**call).last_hidden_state
        for _ in range(2):
            torch.testing.assert_close(model(**call).last_hidden_state, expected)
        hfpatch.restore(model)
        assert not hfpatch.status(model).swaps
        assert torch.equal(model(**call).last_hidden_state, expected)


def test_a_scripted_child_of_no_block() -> None:
    model = nn.Sequential(nn.LayerNorm(8), torch.jit.script(nn.Linear(8, 8)), nn.LayerNorm(8))
    before = [dict(m.__dict__) for m in model]
    hfpatch.apply(model, kernels="local")
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert hfpatch.restore(model) == 2
    assert [m.__dict__.keys() for m in (model[0], model[2])] == [before[0].keys(), before[2].keys()]


def test_a_layer_that_is_scripted_later() -> None:
    model, twin = _scripted_bert(range(0)), _scripted_bert(range(0))
    call = {"input_ids": torch.arange(8)[None]}
    hfpatch.apply(model, blocks=True)
    with torch.no_grad():
        for _ in range(2):
            model(**call)
        for m in (model, twin):
            output: Any = m.encoder.layer[0].output  # type: ignore[union-attr,index]
            output.dense = torch.jit.script(output.dense)
        torch.testing.assert_close(model(**call)[0], twin(**call)[0])
    torch.testing.assert_close(model(**call)[0], twin(**call)[0])
    hfpatch.restore(model)


CALLED: list[str] = []
NUMBER = 0


class Calls:
    number = 0
    kept: ClassVar[list[str]] = []


class Listing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLED.append("x")
        return super().forward(x) * (1 + 0.01 * len(CALLED))


class OfGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global NUMBER
        NUMBER += 1
        return super().forward(x) * (1 + 0.01 * NUMBER)


class OfAnotherClass(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Calls.number += 1
        return super().forward(x) * (1 + 0.01 * Calls.number)


class OfAnotherClassesList(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Calls.kept.append("x")
        return super().forward(x) * (1 + 0.01 * len(Calls.kept))


class OfItsClass(nn.Linear):
    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).number += 1
        return super().forward(x) * (1 + 0.01 * type(self).number)


class OfItsClassesList(nn.Linear):
    kept: ClassVar[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append("x")
        return super().forward(x) * (1 + 0.01 * len(self.kept))


def _noted() -> int:
    CALLED.append("x")
    return len(CALLED)


class ByFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.01 * _noted())


def _counting() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


class ByClosure(nn.Linear):
    count = staticmethod(_counting())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.01 * self.count())


class Doubling(nn.Linear):
    """Is no other one at any call; what it has of its own is copied with it."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen: int = getattr(self, "seen", 0) + 1
        return super().forward(x) * self.factor


def _own_layers(cls: type[nn.Module]) -> nn.Module:
    model = zoo.ENTRIES["bert"].build()
    for layer in model.encoder.layer:
        layer.output.dense.__class__ = cls
    return model  # type: ignore[no-any-return]


def _forget() -> None:
    global NUMBER
    CALLED.clear()
    Calls.kept.clear()
    OfItsClassesList.kept.clear()
    Calls.number = NUMBER = OfItsClass.number = 0
    ByClosure.count = staticmethod(_counting())


@pytest.mark.parametrize(
    "cls",
    [
        *(Listing, OfGlobal, OfAnotherClass, OfAnotherClassesList, OfItsClass, OfItsClassesList),
        *(ByFunction, ByClosure, Doubling),
    ],
)
def test_a_layer_that_writes_elsewhere(cls: type[nn.Linear]) -> None:
    """Its calls are those of the unpatched twin, no more."""
    results = []
    for patched in (False, True):
        model = _own_layers(cls)
        _forget()
        if patched:
            hfpatch.apply(model, blocks=True)
        with torch.no_grad():
            results.append([model(torch.arange(8)[None]).last_hidden_state for _ in range(3)])
        if patched:
            said = str(hfpatch.status(model))
            assert ("left to its parts" in said) == (cls is not Doubling), said
            hfpatch.restore(model)
        else:
            hfpatch.apply(model, include=())
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
