"""What happens around a patched model later: other threads and processes, other models, files.

(What users do to one model, in both orders: tests/compat.)
"""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from accelerate.hooks import remove_hook_from_module
from expect import assert_same_dicts, expected_swaps, relative_error, snapshot
from torch import nn

import hfpatch
from hfpatch.proof.proofs import forget_proofs

#: fp32 through two layers, with reductions in another order.
NOISE = 1e-5


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def build(name: str) -> tuple[zoo.Entry, Any, dict[str, Any]]:
    entry = zoo.ENTRIES[name]
    model = entry.build()
    return entry, model, entry.inputs(model)


# Threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx", "flux", "llama"])
def test_threads_call_while_it_is_patched_and_restored(name: str) -> None:
    entry, model, inputs = build(name)
    before, expected = snapshot(model), entry.run(model, inputs)
    done = threading.Event()

    def call() -> float:
        worst, calls = 0.0, 0
        while not done.is_set() or not calls:
            worst = max(worst, relative_error(entry.run(model, inputs), expected))
            calls += 1
        return worst

    with ThreadPoolExecutor(2) as executor:
        callers = [executor.submit(call) for _ in range(2)]
        try:
            for _ in range(5):
                hfpatch.apply(model)
                hfpatch.restore(model)
        finally:
            done.set()
        assert all(caller.result() <= NOISE for caller in callers)
    assert_same_dicts(before, model)
    assert torch.equal(entry.run(model, inputs), expected)


# Other models -------------------------------------------------------------------------------------


def test_models_that_share_modules() -> None:
    """A shared module is patched once, whoever asks, and restored by whoever asks first."""
    entry, one, inputs = build("llama")
    two = entry.build(seed=3)
    two.model.layers[0].mlp, two.model.norm = one.model.layers[0].mlp, one.model.norm
    both = nn.ModuleList([one, two])
    before = snapshot(both)
    of_one, of_two = entry.run(one, inputs), entry.run(two, inputs)
    hfpatch.apply(one)
    assert relative_error(entry.run(two, inputs), of_two) <= NOISE
    hfpatch.apply(two)
    hfpatch.restore(one)
    assert torch.equal(entry.run(one, inputs), of_one)
    assert relative_error(entry.run(two, inputs), of_two) <= NOISE
    hfpatch.restore(two)
    assert_same_dicts(before, both)
    hfpatch.apply(both)
    assert len(hfpatch.status(both).swaps) == len(expected_swaps(both))
    hfpatch.restore(two)
    hfpatch.restore(both)
    assert_same_dicts(before, both)
    assert torch.equal(entry.run(two, inputs), of_two)


def test_a_pipeline_with_one_model_under_two_names() -> None:
    from diffusers import DiffusionPipeline

    class Twice(DiffusionPipeline):
        def __init__(self, transformer: nn.Module, transformer_2: nn.Module) -> None:
            super().__init__()
            self.register_modules(transformer=transformer, transformer_2=transformer_2)

    entry, model, inputs = build("wan")
    before, expected = snapshot(model), entry.run(model, inputs)
    pipe = Twice(model, model)
    hfpatch.apply(pipe)
    hfpatch.apply(pipe)
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert hfpatch.restore(pipe) == len(expected_swaps(model))
    assert_same_dicts(before, model)
    assert torch.equal(entry.run(model, inputs), expected)


def test_a_forward_that_was_written_over_leaves_nothing_of_ours() -> None:
    entry, model, inputs = build("llama")
    hfpatch.apply(model)
    norm = model.model.norm
    norm.forward = lambda x: x * 0.5
    expected = entry.run(model, inputs)
    hfpatch.restore(model)
    assert set(norm.__dict__) - set(nn.Module().__dict__) == {"variance_epsilon", "forward"} | {
        name for name in norm.__dict__ if name.startswith("_is_hf")
    }
    assert relative_error(entry.run(model, inputs), expected) <= NOISE


# Hooks that come and go ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx", "t5-v1.1"])
def test_offloading_that_comes_and_goes(name: str) -> None:
    from accelerate import cpu_offload

    entry, model, inputs = build(name)
    expected = entry.run(model, inputs)
    hfpatch.apply(model)
    count = len(hfpatch.status(model).swaps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that a block hands over to its parts
        cpu_offload(model, "cpu")
        assert relative_error(entry.run(model, inputs), expected) <= NOISE
    remove_hook_from_module(model, recurse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the kernels run again
        assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert len(hfpatch.status(model).swaps) == count == hfpatch.restore(model)
    assert torch.equal(entry.run(model, inputs), expected)


def test_what_was_changed_is_said_once() -> None:
    forget_proofs()  # what was said is remembered with the proof
    entry, model, inputs = build("ltx2")
    hfpatch.apply(model)
    model.transformer_blocks[0].norm1.eps = 0.5
    with pytest.warns(RuntimeWarning, match="got other settings, or hooks"):
        entry.run(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry.run(model, inputs)
    report = hfpatch.apply(model)
    # a whole block again with the norm as it is now, or its parts, with a reason
    known = {s.path for s in report.swaps} | {s.path for s in report.skips}
    assert "transformer_blocks.0" in known


def called(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def called_by_name(*args: Any, inner: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)


class Caller:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    run = __call__


def with_default(module: nn.Module) -> Any:
    def around(x: Any = None, inner: Any = module.forward, **kwargs: Any) -> Any:
        return inner(**kwargs) if x is None else inner(x, **kwargs)

    return around


def with_keyword(module: nn.Module) -> Any:
    def around(*args: Any, inner: Any = module.forward, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return around


def without_module(module: nn.Module) -> Any:
    """As accelerate wraps the forward for mixed precision."""
    function = module.forward.__func__
    return types.MethodType(lambda self, *args, **kwargs: function(self, *args, **kwargs), module)


#: What somebody puts around a module's forward, and where it holds that.
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "partial": lambda m: functools.partial(called, m.forward),
    "partial by name": lambda m: functools.partial(called_by_name, inner=m.forward),
    "object": lambda m: Caller(m.forward),
    "method of an object": lambda m: Caller(m.forward).run,
    "object that names it": lambda m: functools.update_wrapper(Caller(m.forward), m.forward),
    "default": with_default,
    "keyword": with_keyword,
    "without its module": without_module,
    "twice": lambda m: functools.partial(called, Caller(functools.partial(called, m.forward))),
    "in two places": lambda m: functools.partial(with_keyword(m), inner=m.forward),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_restore_finds_the_forward_in_what_was_put_around_it(wrapper: str) -> None:
    entry, model, inputs = build("llama")
    expected = entry.run(model, inputs)
    count = len(hfpatch.apply(model).swaps)
    for path in ("model.norm", "model.layers.0.mlp", "model.layers.1.mlp", ""):
        module = model.get_submodule(path)
        module.forward = WRAPPERS[wrapper](module)
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert len(hfpatch.status(model).swaps) == count
    # they stay around the new ones; decoding steps would not call those inside
    assert len(hfpatch.apply(model).swaps) == count - 1
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert hfpatch.restore(model) == count - 1
    assert torch.equal(entry.run(model, inputs), expected)
    assert not hfpatch.status(model).swaps


class NormWithTables(nn.LayerNorm):
    """With attributes that are no settings: a copy's tensors have no one answer to ==."""

    def __init__(self) -> None:
        super().__init__(64)
        self.tables = (torch.ones(2), torch.ones(2))
        self.history: list[int] = []


def test_a_copy_of_a_module_that_holds_tensors_in_a_tuple() -> None:
    model = nn.Sequential(NormWithTables()).eval().requires_grad_(False)
    x = torch.randn(3, 64)
    hfpatch.apply(model)
    patched = model(x)
    copied = copy.deepcopy(model)
    copied[0].history.append(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copied(x), patched)


# Settings that are set later ----------------------------------------------------------------------


class Written(nn.Module):
    """An RMSNorm as classes write it, with its settings in places of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32), requires_grad=False)
        self._eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps))


class PrivateRMSNorm(Written):
    pass


class InheritingRMSNorm(Written):
    _eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        del self._eps


def _private() -> nn.Module:
    return PrivateRMSNorm()


def _with_method() -> nn.Module:
    from transformers.activations import GELUActivation

    return GELUActivation(use_gelu_python=True)


def _with_function() -> nn.Module:
    from transformers.activations import GELUActivation

    return GELUActivation()


def _with_partial() -> nn.Module:
    from transformers.activations import GELUTanh

    return GELUTanh()


def _llama_norm() -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(32).requires_grad_(False)


SET_LATER: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], Any]]] = {
    "private": (_private, "_eps", lambda: 0.05),
    "of each row": (_private, "_eps", lambda: torch.linspace(0.05, 0.5, 4)[:, None]),
    "of its class": (InheritingRMSNorm, "_eps", lambda: 0.05),
    "function": (_with_function, "act", lambda: nn.functional.relu),
    "method": (_with_method, "act", lambda: nn.functional.relu),
    "partial": (_with_partial, "act", lambda: nn.functional.relu),
    "ignored bias": (
        _llama_norm,
        "bias",
        lambda: nn.Parameter(torch.ones(32), requires_grad=False),
    ),
    "read bias": (
        lambda: nn.LayerNorm(32, bias=False).requires_grad_(False),
        "bias",
        lambda: nn.Parameter(torch.ones(32), requires_grad=False),
    ),
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("case", SET_LATER)
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_a_setting_that_is_set_later_is_noticed(case: str, mode: str) -> None:
    make, name, value = SET_LATER[case]
    model = nn.Sequential(make()).eval()
    assert len(hfpatch.apply(model, kernels="local", mode=mode).swaps) == 1
    x = torch.randn(4, 32)
    for _ in range(2):
        model(x)
    setattr(model[0], name, value())
    torch.testing.assert_close(model(x), type(model[0]).forward(model[0], x))


def test_a_class_attribute_that_is_set_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(InheritingRMSNorm())
    hfpatch.apply(model)
    x = torch.randn(4, 32)
    model(x)
    monkeypatch.setattr(InheritingRMSNorm, "_eps", 0.05)
    with pytest.warns(RuntimeWarning, match="got other settings"):
        assert torch.equal(model(x), InheritingRMSNorm.forward(model[0], x))


@pytest.mark.parametrize("case", SET_LATER)
def test_a_deep_copy_has_the_settings_of_its_original(case: str) -> None:
    """Also where these are methods and functions with arguments, which a copy has of its own."""
    model = nn.Sequential(SET_LATER[case][0]()).eval()
    hfpatch.apply(model, kernels="local")
    x = torch.randn(4, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_what_others_mark_modules_with_is_no_setting() -> None:
    model = nn.Sequential(_llama_norm())
    model[0]._is_hf_initialized = False
    hfpatch.apply(model)
    del model[0]._is_hf_initialized
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 32))


# Copies -------------------------------------------------------------------------------------------

OURS = {"forward", "_replicate_for_data_parallel", "__getstate__"}


def _patched_parts() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(32, 32), _llama_norm(), nn.LayerNorm(32), _with_partial())
    model.eval().requires_grad_(False)
    assert len(hfpatch.apply(model, kernels="local").swaps) == 3
    return model, torch.randn(3, 32)


def _pickled(name: str) -> Callable[[nn.Module], Any]:
    pickler = pytest.importorskip(name)
    return lambda model: pickler.loads(pickler.dumps(model))


@pytest.mark.parametrize("name", ["pickle", "cloudpickle", "dill"])
def test_every_pickle_holds_the_unpatched_model(name: str) -> None:
    copied_by = _pickled(name)
    model, x = _patched_parts()
    with torch.no_grad():
        loaded = copied_by(model)
        assert not any(OURS & set(m.__dict__) for m in loaded.modules())
        assert {type(m) for m in loaded.modules()} == {type(m) for m in model.modules()}
        assert not hfpatch.status(loaded).swaps and hfpatch.restore(loaded) == 0
        patched = model(x)
        hfpatch.restore(model)
        assert torch.equal(loaded(x), model(x))
        replica = loaded[1]._replicate_for_data_parallel()
        replica._parameters = {"weight": torch.full((32,), 3.0)}
        torch.testing.assert_close(replica(x), 3 * nn.functional.rms_norm(x, (32,), eps=1e-6))
        assert len(hfpatch.apply(loaded, kernels="local").swaps) == 3
        assert torch.equal(loaded(x), patched)


def test_a_pickle_needs_no_more_than_the_unpatched_models(tmp_path: Path) -> None:
    norm = nn.LayerNorm(32)
    assert hfpatch.apply(norm, kernels="local").swaps
    torch.save(norm, tmp_path / "norm.pt")
    with torch.serialization.safe_globals([nn.LayerNorm]):
        loaded = torch.load(tmp_path / "norm.pt", weights_only=True)
    assert torch.equal(loaded.weight, norm.weight)


class StatefulLayerNorm(nn.LayerNorm):
    """Pickles what it likes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "note": "saved"}


def test_a_class_that_says_what_it_pickles() -> None:
    import pickle

    norm = StatefulLayerNorm(32).requires_grad_(False)
    hfpatch.apply(norm, kernels="local")
    for copied in (pickle.loads(pickle.dumps(norm)), copy.deepcopy(norm), copy.copy(norm)):
        assert copied.note == "saved"
        x = torch.randn(3, 32)
        torch.testing.assert_close(copied(x), norm(x))
    assert not OURS & set(copy.copy(norm).__dict__)
    assert set(copy.deepcopy(norm).__dict__) >= OURS
    hfpatch.restore(norm)
    assert not OURS & set(norm.__dict__)


def test_a_shallow_copy_computes_with_what_it_has() -> None:
    norm = _llama_norm()
    hfpatch.apply(norm)
    other = copy.copy(norm)
    other.variance_epsilon = 0.05
    other._parameters = {"weight": nn.Parameter(torch.full((32,), 3.0), requires_grad=False)}
    x = torch.randn(3, 32)
    assert torch.equal(other(x), type(other).forward(other, x))
    assert len(hfpatch.apply(other).swaps) == 1
    torch.testing.assert_close(other(x), type(other).forward(other, x))
    hfpatch.restore(norm)
    assert len(hfpatch.status(other).swaps) == 1


# Files --------------------------------------------------------------------------------------------

LOADER = """
    import sys, torch

    class Nowhere:
        def find_spec(self, name, *rest):
            if name.partition(".")[0].startswith("hfpatch"):
                raise ImportError(f"{name} is not installed here")

    sys.meta_path.insert(0, Nowhere())
    model, x, expected = torch.load(sys.argv[1], weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert not any(name.startswith(("hfpatch", "_hfpatch")) for name in sys.modules)
"""


def test_a_saved_model_loads_where_hfpatch_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16), nn.RMSNorm(16))
    model.eval().requires_grad_(False)
    x = torch.randn(3, 16)
    expected = model(x)
    hfpatch.apply(model)
    assert hfpatch.status(model).swaps
    model(x)
    torch.save((model, x, expected), tmp_path / "model.pt")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADER), str(tmp_path / "model.pt")],
        check=True,
        timeout=300,
    )


# Inference mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx", "llama"])
def test_applied_in_inference_mode_and_trained_outside(name: str) -> None:
    entry, model, inputs = build(name)
    expected = entry.run(model, inputs)
    with torch.inference_mode():
        hfpatch.apply(model)
        assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    twin = entry.build().requires_grad_(True)
    model.requires_grad_(True)
    for each in (model, twin):
        entry.output(each(**inputs)).square().mean().backward()
    for (path, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), path
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
