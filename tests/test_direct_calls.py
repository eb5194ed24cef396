"""A patched norm's call past `Module._call_impl`: what that would do is done."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch.direct_calls import DIRECT, is_direct

_WIDTH = 40


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """Patched, and called until it takes the quick way."""
    torch.manual_seed(5)
    made = nn.Sequential(LlamaRMSNorm(_WIDTH), nn.LayerNorm(_WIDTH))
    with torch.no_grad():
        for p in made.parameters():
            p.normal_()
    hfpatch.apply(made)
    with torch.no_grad():
        for _ in range(3):
            made(_x())
    assert all(is_direct(m._compiled_call_impl) for m in made)
    yield made
    hfpatch.restore(made)
    assert not any(DIRECT in m.__dict__ for m in made)


def _x(seed: int = 0) -> Tensor:
    return torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(seed))


def _agrees(model: nn.Module) -> None:
    """With what the class computes of the parameters that are there now."""
    with torch.no_grad():
        for norm in model:
            expected = type(norm).forward(norm, _x(1))
            torch.testing.assert_close(norm(_x(1)), expected, rtol=1e-5, atol=1e-5)


def test_the_quick_way_is_taken(model: nn.Module) -> None:
    """One function of ours is entered, and none of `_call_impl`."""
    seen: list[str] = []

    def trace(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    x, norm = _x(), model[0]
    with torch.no_grad():
        before = sys.getprofile()
        gc.disable()  # a collection may run code of its own
        sys.setprofile(trace)
        try:
            norm(x)
        finally:
            sys.setprofile(before)
            gc.enable()
    assert seen == ["_wrapped_call_impl", "direct", "is_dynamo_compiling"]


def test_hooks_of_the_module(model: nn.Module) -> None:
    fired: list[str] = []
    norm = model[0]
    handles = [
        norm.register_forward_pre_hook(lambda *a: fired.append("before")),
        norm.register_forward_hook(lambda *a: fired.append("after")),
    ]
    with torch.no_grad():
        norm(_x())
    assert fired == ["before", "after"]
    for handle in handles:
        handle.remove()
    doubled = norm.register_forward_hook(lambda m, a, y: y * 2)
    with torch.no_grad():
        y = norm(_x())
        doubled.remove()
        assert torch.equal(norm(_x()) * 2, y)
    assert fired == ["before", "after"]


def test_backward_hooks(model: nn.Module) -> None:
    fired: list[int] = []
    handle = model[0].register_full_backward_hook(lambda *a: fired.append(1))
    x = _x().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0](x).sum().backward()
    assert fired == [1] and x.grad is not None
    handle.remove()


def test_hooks_on_all_modules(model: nn.Module) -> None:
    fired: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, y: fired.append(m))
    with torch.no_grad():
        model(_x())
        assert fired == [model[0], model[1], model]
        handle.remove()
        model(_x())
    assert len(fired) == 3


def test_hooks_on_all_modules_in_another_dict(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired: list[nn.Module] = []
    hooks = OrderedDict({0: lambda m, a, y: fired.append(m)})
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", hooks)
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks_always_called", OrderedDict())
    with torch.no_grad():
        model(_x())
    assert fired == [model[0], model[1], model]


def test_a_forward_that_is_set_later(model: nn.Module) -> None:
    norm = model[0]
    ours = norm.forward
    norm.forward = lambda x: x + 1.0
    with torch.no_grad():
        assert torch.equal(norm(_x()), _x() + 1.0)
    norm.forward = ours
    _agrees(model)


@pytest.mark.parametrize("where", ["instance", "class"])
def test_another_call_impl(model: nn.Module, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    own = nn.Module._call_impl

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(where)
        return own(self, *args, **kwargs)

    if where == "instance":
        monkeypatch.setattr(model[0], "_call_impl", call.__get__(model[0]), raising=False)
    else:
        monkeypatch.setattr(LlamaRMSNorm, "_call_impl", call, raising=False)
    _agrees(model)
    assert calls == [where]


def test_accelerates_hooks(model: nn.Module) -> None:
    class Doubles(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    with torch.no_grad():
        before = model[0](_x())
        add_hook_to_module(model[0], Doubles())
        assert torch.equal(model[0](_x()), before * 2)
        remove_hook_from_module(model[0])
        assert torch.equal(model[0](_x()), before)


def test_keywords_errors_and_odd_inputs(model: nn.Module) -> None:
    norm = model[0]
    with torch.no_grad():
        assert torch.equal(norm(hidden_states=_x()), norm(_x()))
        for bad in ((), (_x(), _x()), (None,), ("x",)):
            with pytest.raises((TypeError, AttributeError)):
                norm(*bad)
        with pytest.raises(RuntimeError, match="size of tensor"):
            norm(torch.randn(2, _WIDTH + 1))
    _agrees(model)


def test_parameters_that_change(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(3)
        _agrees(model)
        model[0].weight = nn.Parameter(torch.randn(_WIDTH))
        _agrees(model)
        given = {"0.weight": torch.randn(_WIDTH)}
        y = torch.func.functional_call(model, given, (_x(),))
        model[0].weight.copy_(given["0.weight"])
        torch.testing.assert_close(y, model(_x()))


def test_a_compiled_module(model: nn.Module) -> None:
    """`Module.compile` puts its own there, also when it was there first, and that stays."""
    model[0].compile(backend="eager")
    compiled = model[0]._compiled_call_impl
    assert not is_direct(compiled)
    _agrees(model)
    hfpatch.restore(model)
    assert model[0]._compiled_call_impl is compiled
    hfpatch.apply(model)
    assert model[0]._compiled_call_impl is compiled
    assert is_direct(model[1]._compiled_call_impl)
    del model[0]._compiled_call_impl
    _agrees(model)


def test_torch_compile_sees_through_it(model: nn.Module) -> None:
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(_x(1)), model(_x(1)), rtol=1e-5, atol=1e-5)
    assert counted.frame_count == 1
    torch._dynamo.reset()


def test_traces_and_exports(model: nn.Module) -> None:
    x = _x(1)
    with torch.no_grad():
        expected = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (x,))
        assert "hfpatch" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(x), expected, rtol=1e-5, atol=1e-5)
        for strict in (False, True):
            exported = torch.export.export(model, (x,), strict=strict)
            torch.testing.assert_close(exported.module()(x), expected, rtol=1e-5, atol=1e-5)


def test_copies_compute_with_their_own_parameters(model: nn.Module) -> None:
    def reloaded(m: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        found: nn.Module = torch.load(file, weights_only=False)
        return found

    makers = (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), reloaded)
    for make in makers:
        other = make(model)
        assert not any(DIRECT in m.__dict__ for m in other)
        with torch.no_grad():
            other[0].weight.zero_()
            assert not other[0](_x()).any() and model[0](_x()).any()
        hfpatch.restore(other)
    shallow = copy.copy(model[0])
    assert DIRECT not in shallow.__dict__
    replica = model[0]._replicate_for_data_parallel()
    assert DIRECT not in replica.__dict__
    _agrees(model)


def test_applied_twice_and_again(model: nn.Module) -> None:
    for _ in range(2):
        hfpatch.apply(model)
        assert all(is_direct(m._compiled_call_impl) for m in model)
        _agrees(model)
        _agrees(model)
    hfpatch.restore(model)
    _agrees(model)
    hfpatch.apply(model, mode="training")
    _agrees(model)
    x = _x().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


def test_it_keeps_nothing_alive() -> None:
    made = nn.Sequential(LlamaRMSNorm(_WIDTH))
    hfpatch.apply(made)
    with torch.no_grad():
        made(_x()), made(_x())
    alive = weakref.ref(made[0])
    del made
    gc.collect()
    assert alive() is None


def test_threads(model: nn.Module) -> None:
    """Calls while another thread restores and patches again."""
    with torch.no_grad():
        expected = model[0](_x())
    wrong: list[Any] = []
    stop = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    torch.testing.assert_close(model[0](_x()), expected, rtol=1e-5, atol=1e-5)
                except BaseException as e:
                    wrong.append(e)
                    return

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        hfpatch.restore(model)
        hfpatch.apply(model)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def _has_direct(model: nn.Module, **how: Any) -> bool:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        assert hfpatch.apply(model, **how).swaps
        found = DIRECT in model[0].__dict__
        for _ in range(2):
            model(torch.randn(2, 8, 6, 8))
        hfpatch.restore(model)
    return found


def test_only_where_a_call_can_go_that_way() -> None:
    """Elsewhere it would be asked for nothing."""
    assert _has_direct(nn.Sequential(nn.LayerNorm(8)))
    assert not _has_direct(nn.Sequential(nn.LayerNorm(8)), mode="training")
    assert not _has_direct(nn.Sequential(nn.LayerNorm(8)), gain="time")
    assert not _has_direct(nn.Sequential(ConvNextLayerNorm(8, data_format="channels_first")))


@pytest.mark.parametrize(
    ("first", "variable"),
    [
        ("", {"HFPATCH_PYTHON_CALLS": "0"}),  # as a build without Python's headers
        (
            "own = nn.Module._call_impl\n"
            "def call(self, *a, **k):\n"
            "    y = own(self, *a, **k)\n"
            "    return y * 2 if isinstance(self, nn.LayerNorm) else y\n"
            "nn.Module._call_impl = call\n",
            {},
        ),
    ],
    ids=["no-calls-in-c", "a-tool-was-first"],
)
def test_in_another_process(first: str, variable: dict[str, str]) -> None:
    code = f"""
import copy, torch
from torch import nn
{first}
import hfpatch
model = nn.Sequential(nn.LayerNorm(16))
twin = copy.deepcopy(model)
assert len(hfpatch.apply(model).swaps) == 1
assert "_compiled_call_impl" not in model[0].__dict__
with torch.no_grad():
    for _ in range(3):
        torch.testing.assert_close(model(torch.ones(2, 16)), twin(torch.ones(2, 16)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variable, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
