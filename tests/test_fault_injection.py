"""Faults at each step of apply and restore: the model is the original again, or as it was patched.

A model counts as the original when every module's `__dict__` holds the very same objects, every
parameter has the same memory and values, and the output is the same to the bit.
"""

from __future__ import annotations

import gc
import importlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from expect import assert_same_dicts, expected_swaps, snapshot
from torch import nn

import hfpatch
from hfpatch import packing, swap
from hfpatch.errors import HfpatchError, KernelLoadError, PatchError, VerificationError
from hfpatch.kernels import sources
from hfpatch.proof import probe, proofs
from hfpatch.proof.proofs import forget_proofs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""
    forget_proofs()  # a proof that is kept would not meet the fault


class Original:
    """A model and what must not change about it."""

    def __init__(self, name: str) -> None:
        self.entry = zoo.ENTRIES[name]
        self.model = self.entry.build()
        self.inputs = self.entry.inputs(self.model)
        self.dicts = snapshot(self.model)
        self.memory = {n: p.data_ptr() for n, p in self.model.named_parameters()}
        self.values = {n: p.clone() for n, p in self.model.state_dict().items()}
        self.output = self.entry.run(self.model, self.inputs)

    def check(self) -> None:
        assert_same_dicts(self.dicts, self.model)
        assert {n: p.data_ptr() for n, p in self.model.named_parameters()} == self.memory
        state = self.model.state_dict()
        assert all(torch.equal(state[n], v) for n, v in self.values.items())
        assert torch.equal(self.entry.run(self.model, self.inputs), self.output)
        assert not hfpatch.status(self.model).swaps

    def check_patched(self, count: int) -> None:
        assert len(hfpatch.status(self.model).swaps) == count
        self.entry.run(self.model, self.inputs)
        hfpatch.restore(self.model)
        self.check()


def failing(error: BaseException, at: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but its call number `at` raises."""
    calls = iter(range(10**9))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return real(*args, **kwargs)

    return call


# Loading and proving -----------------------------------------------------------------------------


def test_the_kernel_build_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        raise KernelLoadError("the local kernel build is damaged")

    monkeypatch.setattr(sources, "_load_local", broken)
    original = Original("llama")
    report = hfpatch.apply(original.model)
    assert all(s.source == "torch" for s in report.swaps)
    assert any("damaged" in note for note in report.notes)
    hfpatch.restore(original.model)
    original.check()
    with pytest.raises(KernelLoadError, match="damaged"):
        hfpatch.apply(original.model, kernels="local", strict=True)
    original.check()


FAULTS = {
    "probe raises": (probe, "prove", RuntimeError("probe")),
    "probe has no memory": (probe, "prove", torch.OutOfMemoryError("no memory")),
    "verification raises": (probe, "verify_values", ZeroDivisionError("verify")),
    "contract raises": (proofs, "_contract", KeyError("contract")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_proving_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, error = FAULTS[fault]
    real = getattr(where, name)

    def broken(*args: object, **kwargs: object) -> object:
        raise error

    original = Original("llama")
    monkeypatch.setattr(where, name, broken)
    # decoding is read and compared by itself
    report = hfpatch.apply(original.model, decoding=False)
    assert not report.swaps
    assert any(type(error).__name__ in s.reason for s in report.skips)
    original.check()
    with pytest.raises(HfpatchError, match=type(error).__name__):
        hfpatch.apply(original.model, strict=True)
    original.check()
    # a fault that has passed is not remembered
    monkeypatch.setattr(where, name, real)
    assert len(hfpatch.apply(original.model).swaps) == len(expected_swaps(original.model))
    original.check_patched(len(expected_swaps(original.model)))


def test_a_family_cannot_examine_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch.leaves.norms import Norms

    original = Original("llama")
    monkeypatch.setattr(Norms, "examine", failing(AttributeError("odd"), 0, Norms.examine))
    report = hfpatch.apply(original.model)
    odd = [s for s in report.skips if "could not be examined: AttributeError" in s.reason]
    assert len(odd) == 1 and len(report.swaps) == len(expected_swaps(original.model)) - 1
    original.check_patched(len(report.swaps))
    monkeypatch.setattr(Norms, "examine", failing(AttributeError("odd"), 0, Norms.examine))
    with pytest.raises(PatchError, match="could not be examined"):
        hfpatch.apply(original.model, strict=True)
    original.check()


@pytest.mark.parametrize("name", ["llama", "ltx"])
def test_a_wrong_kernel_in_a_whole_model(name: str) -> None:
    def wrong(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros_like(x)

    original = Original(name)
    report = hfpatch.apply(original.model, kernels={"*": "local", "rms_norm": wrong})
    assert all(s.op != "rms_norm" for s in report.swaps)
    assert any(s.kind == "rejected" for s in report.skips)
    hfpatch.restore(original.model)
    original.check()
    with pytest.raises(VerificationError):
        hfpatch.apply(original.model, kernels={"*": "local", "rms_norm": wrong}, strict=True)
    original.check()


def test_no_memory_in_a_kernel() -> None:
    """At the probe: skipped, and proven at the next apply. At a call: raised, nothing changes."""
    from hfpatch.ops.rms_norm import rms_norm

    short = True

    def kernel(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rms_norm(x, *args, **kwargs)

    original = Original("llama")
    settings: dict[str, Any] = {"kernels": {"rms_norm": kernel}, "include": "LlamaRMSNorm"}
    report = hfpatch.apply(original.model, **settings)
    assert not report.swaps and "OutOfMemoryError" in report.skips[0].reason
    original.check()
    with pytest.raises(HfpatchError, match="out of memory"):
        hfpatch.apply(original.model, strict=True, **settings)
    original.check()
    short = False
    count = len(hfpatch.apply(original.model, **settings).swaps)
    assert count == 5
    patched = original.entry.run(original.model, original.inputs)
    short = True
    with pytest.raises(torch.OutOfMemoryError):
        original.entry.run(original.model, original.inputs)
    short = False
    assert torch.equal(original.entry.run(original.model, original.inputs), patched)
    original.check_patched(count)


# Swapping ----------------------------------------------------------------------------------------

ERRORS = [RuntimeError("swap"), torch.OutOfMemoryError("swap"), KeyboardInterrupt("swap")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", ["llama", "ltx"])
def test_every_write_of_apply_fails_once(
    name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Original(name)
    count = len(expected_swaps(original.model))
    real = swap.Slot.set
    for at in range(2 * count):  # its forward, and how `nn.DataParallel` copies it
        monkeypatch.setattr(swap.Slot, "set", failing(error, at, real))
        expected = PatchError if isinstance(error, Exception) else KeyboardInterrupt
        with pytest.raises(expected, match="swap"):
            hfpatch.apply(original.model)
        monkeypatch.setattr(swap.Slot, "set", real)
        original.check()
    assert len(hfpatch.apply(original.model).swaps) == count
    original.check_patched(count)


def test_what_could_not_be_put_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ENTRIES["llama"].build()
    real, undo = swap.Slot.set, swap._Undo.__call__
    monkeypatch.setattr(swap.Slot, "set", failing(RuntimeError("swap"), 3, real))
    monkeypatch.setattr(swap._Undo, "__call__", failing(OSError("stuck"), 0, undo))
    with pytest.raises(PatchError, match=r"put back as it was, except in 1 of \d steps: stuck"):
        hfpatch.apply(model)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_every_adapter_fails_once_to_be_made(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfpatch.leaves.norms import NormSubject

    original = Original("llama")
    real = NormSubject.forward
    for at in range(5):
        monkeypatch.setattr(NormSubject, "forward", failing(error, at, real))
        with pytest.raises((PatchError, KeyboardInterrupt), match="swap"):
            hfpatch.apply(original.model)
        original.check()


@pytest.mark.parametrize(
    "step",
    [
        "planning.planner.sites_of",
        "proof.probe.prove",
        "apply._commit",
        "swap.commit",
        "swap._remember",
    ],
)
def test_an_interrupt_at_each_step(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, _, name = step.rpartition(".")
    original = Original("llama")
    holder = vars(importlib.import_module(f"hfpatch.{where}"))
    monkeypatch.setitem(holder, name, failing(KeyboardInterrupt(), 0, holder[name]))
    with pytest.raises(KeyboardInterrupt):
        hfpatch.apply(original.model)
    original.check()
    assert len(hfpatch.apply(original.model).swaps) == len(expected_swaps(original.model))


@pytest.mark.parametrize("name", ["cogvideox"])
def test_packing_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing is for a GPU; here its place in `apply` alone is tested."""
    original = Original(name)
    monkeypatch.setattr(packing, "can_pack", lambda linears: True)
    moves, made = packing._move, []
    monkeypatch.setattr(packing, "_move", lambda p: made.append(p) or moves(p))
    hfpatch.apply(original.model)
    hfpatch.restore(original.model)
    assert len(made) > 2
    for at in range(len(made)):
        monkeypatch.setattr(packing, "_move", failing(RuntimeError("pack"), at, moves))
        with pytest.raises(PatchError, match="pack"):
            hfpatch.apply(original.model)
        # values and outputs: packed and unpacked parameters have new memory, of the same size
        assert_same_dicts(original.dicts, original.model)
        assert torch.equal(original.entry.run(original.model, original.inputs), original.output)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in original.model.parameters())
    # no memory for it: a speed-up only
    error = torch.OutOfMemoryError("pack")
    monkeypatch.setattr(packing, "_move", failing(error, 0, moves))
    assert len(hfpatch.apply(original.model).swaps) == len(expected_swaps(original.model))
    hfpatch.restore(original.model)
    assert_same_dicts(original.dicts, original.model)
    assert torch.equal(original.entry.run(original.model, original.inputs), original.output)


# Restoring, and applying again -------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_restore_is_interrupted(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Original("llama")
    count = len(hfpatch.apply(original.model).swaps)
    real = swap.Slot.clear
    for at in range(count):
        hfpatch.apply(original.model)
        monkeypatch.setattr(swap.Slot, "clear", failing(error, at, real))
        if isinstance(error, Exception):
            assert hfpatch.restore(original.model) == count
        else:
            with pytest.raises(KeyboardInterrupt):
                hfpatch.restore(original.model)
        monkeypatch.setattr(swap.Slot, "clear", real)
        original.check()


def test_a_module_that_cannot_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Original("llama")
    hfpatch.apply(original.model)
    real = swap.Slot.clear

    def stuck(slot: swap.Slot) -> None:
        if slot.owner is original.model.model.norm:
            raise OSError("stuck")
        real(slot)

    monkeypatch.setattr(swap.Slot, "clear", stuck)
    with pytest.raises(PatchError, match=r"LlamaRMSNorm.*stuck.*call `hfpatch.restore` again"):
        hfpatch.restore(original.model)
    assert [s.path for s in hfpatch.status(original.model).swaps] == ["model.norm"]
    monkeypatch.setattr(swap.Slot, "clear", real)
    assert hfpatch.restore(original.model) == 1
    original.check()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_second_apply_fails_everywhere(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's swaps stay, whichever of the second's steps fails."""
    original = Original("llama")
    first = len(hfpatch.apply(original.model, include="LlamaRMSNorm").swaps)
    held = {p: m.__dict__.get("forward") for p, m in original.model.named_modules()}
    for method, count in (("set", 2), ("clear", first)):
        real = getattr(swap.Slot, method)
        for at in range(count):
            monkeypatch.setattr(swap.Slot, method, failing(error, at, real))
            with pytest.raises((PatchError, KeyboardInterrupt)):
                hfpatch.apply(original.model, include="LlamaMLP")
            monkeypatch.setattr(swap.Slot, method, real)
            now = {p: m.__dict__.get("forward") for p, m in original.model.named_modules()}
            assert now == held
    original.check_patched(first)


def test_a_forward_that_was_wrapped_after_apply_is_restored() -> None:
    """By a function that keeps the old forward, as transformers' tensor parallelism does."""
    original = Original("llama")
    count = len(hfpatch.apply(original.model).swaps)
    norm, calls = original.model.model.norm, []
    old = norm.forward

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return old(x)

    norm.forward = wrapped
    assert len(hfpatch.status(original.model).swaps) == count
    original.entry.run(original.model, original.inputs)
    assert hfpatch.restore(original.model) == count
    assert norm.forward is wrapped and swap.is_native(norm, old)
    assert torch.equal(original.entry.run(original.model, original.inputs), original.output)
    assert len(calls) == 2
    del norm.forward
    original.check()


# Cycles ------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A norm of each kind, a gated product, an activation: what a cycle patches."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.activations import NewGELUActivation
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        config = LlamaConfig(hidden_size=32, intermediate_size=48)
        self.norm, self.ln = LlamaRMSNorm(32), nn.LayerNorm(32)
        self.mlp, self.act = LlamaMLP(config), NewGELUActivation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.mlp(self.ln(self.norm(x))))


@pytest.mark.parametrize("times", [100, pytest.param(350, marks=pytest.mark.exhaustive)])
def test_many_cycles(times: int) -> None:
    """No growth in what Python or the process holds; the outputs stay the same to the bit."""
    model = Small().requires_grad_(False).eval()
    x = torch.randn(3, 32)
    dicts, expected = snapshot(model), model(x)
    hfpatch.apply(model)
    patched = model(x)

    def cycle(times: int) -> None:
        for _ in range(times):
            assert len(hfpatch.apply(model).swaps) == 4
            assert torch.equal(model(x), patched)
            assert hfpatch.restore(model) == 4
            assert torch.equal(model(x), expected)

    tracemalloc.start()
    cycle(3 * times)  # caches and free lists fill, which takes more than the first
    gc.collect()
    # Nothing per cycle: 100 of the smallest objects would be 100 objects, 4 kB or more. Again where
    # something grew, and the lesser counts: a cache of Python's own may grow in one of the two, a
    # leak in both.
    grown: list[list[int]] = []

    def kept_nothing() -> bool:
        objects, traced = map(min, zip(*grown, strict=True))
        return objects < times / 2 and traced < 40 * times

    while len(grown) < 2 and not (grown and kept_nothing()):
        before = len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
        cycle(times)
        gc.collect()
        after = len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
        grown.append([a - b for a, b in zip(after, before, strict=True)])
    tracemalloc.stop()  # its own tables, which grow in steps, are memory of the process too
    assert kept_nothing(), grown
    in_use: list[int] = []
    while len(in_use) < 2 and not (in_use and in_use[0] < 143 * times):
        held = _allocated()
        cycle(times)
        gc.collect()
        in_use.append(_allocated() - held)
    assert min(in_use) < 143 * times, in_use
    assert_same_dicts(dicts, model)


#: The fields of glibc's `struct mallinfo2`, in order.
_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


def _allocated() -> int:
    """Bytes that malloc has handed out and not taken back (glibc), or 0 elsewhere."""
    import ctypes

    class Info(ctypes.Structure):
        _fields_ = [(n, ctypes.c_size_t) for n in _MALLINFO2]

    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = Info
    return int(mallinfo2().uordblks)
