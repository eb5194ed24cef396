"""Proofs that several threads ask for at once: one at a time, and nobody waits for ever."""

from __future__ import annotations

import copy
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import autocast_cases as cases
import numpy
import pytest
import torch
import zoo
from autocast_cases import MODULES, Kernels, Pair, draw, off
from blocks_families import ROWS
from test_blocks_single import call_of
from torch import nn

import hfpatch
from hfpatch.proof import unchanged
from hfpatch.proof.proofs import forget_proofs
from hfpatch.proof.proving import float32_default

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    """The compiled kernels must be there."""
    forget_proofs()
    yield
    forget_proofs()


def test_threads_leave_the_process_as_it_was() -> None:
    filters, dtype = list(warnings.filters), torch.get_default_dtype()
    for _ in range(8):
        forget_proofs()
        models = [Pair.of(MODULES[n]()).patched for n in ("LlamaRMSNorm", "LlamaMLP")]
        start = threading.Barrier(2)

        def first_call(model: nn.Module, start: threading.Barrier = start) -> None:
            start.wait()
            with torch.no_grad(), torch.autocast("cpu", BF16):
                model(draw(FP32))

        threads = [threading.Thread(target=first_call, args=(m,)) for m in models]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert list(warnings.filters) == filters and torch.get_default_dtype() == dtype


def _together(*calls: Callable[[], Any]) -> None:
    """Each in a thread of its own, at once."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> None:
        start.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as executor:
        for done in [executor.submit(run, call) for call in calls]:
            done.result(timeout=60)


def _block(name: str) -> nn.Module:
    """One that has a file."""
    return zoo.randomize_(ROWS[name].make()).eval().requires_grad_(False)


def _call(name: str, block: nn.Module) -> Any:
    with torch.no_grad():
        return block(**call_of(ROWS[name], dtype=BF16))


def _basic_block() -> nn.Module:
    from diffusers.models.attention import BasicTransformerBlock

    return zoo.randomize_(BasicTransformerBlock(96, 6, 16)).eval().requires_grad_(False)


def _basic_call(block: nn.Module) -> Any:
    with torch.no_grad():
        return block(torch.ones(1, 5, 96, dtype=BF16))


class Seen:
    """Threads that call modules of proofs, in their order; meanwhile other threads have time."""

    def __init__(self, *models: nn.Module) -> None:
        self._own = {id(m) for model in models for m in model.modules()}
        self.threads: list[int] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """What `threading.setprofile` takes: a hook on all modules would make blocks step aside."""
        called = event == "call" and frame.f_code is nn.Module._call_impl.__code__
        if called and id(frame.f_locals["self"]) not in self._own:
            self.threads.append(threading.get_ident())
            time.sleep(0.002)

    def turns(self) -> int:
        """How often it was another thread than before."""
        return sum(a != b for a, b in zip([0, *self.threads], self.threads, strict=False))


def _one_at_a_time(seen: Seen, *calls: Callable[[], Any]) -> None:
    filters = list(warnings.filters)
    torch.set_default_dtype(torch.float64)
    threading.setprofile(seen)
    try:
        _together(*calls)
        left = torch.get_default_dtype()
    finally:
        threading.setprofile(None)
        torch.set_default_dtype(FP32)
    assert seen.turns() == 2
    assert left == torch.float64 and list(warnings.filters) == filters


def test_applies_at_once() -> None:
    models = [nn.Sequential(MODULES[n]()) for n in ("LlamaMLP", "Phi3MLP")]
    calls = [lambda m=m: hfpatch.apply(m) for m in models]
    _one_at_a_time(Seen(*models), *calls)
    assert all(hfpatch.status(m).swaps for m in models)


def test_blocks_of_another_dtype_at_once() -> None:
    """Which are proven at their first calls."""
    blocks = {name: nn.Sequential(_block(name)) for name in ("cogvideox", "sana")}
    for model in blocks.values():
        assert "block" in [s.op for s in hfpatch.apply(model).swaps]
        model.to(BF16)
    _one_at_a_time(
        Seen(*blocks.values()),
        lambda: _call("cogvideox", blocks["cogvideox"][0]),
        lambda: _call("sana", blocks["sana"][0]),
    )
    for name, model in blocks.items():
        with Kernels() as seen:
            _call(name, model[0])
        assert {"norm_modulate", "norm_modulate_out"} & set(seen.names)


def test_a_block_of_another_dtype_beside_an_apply() -> None:
    block, model = nn.Sequential(_block("sana")), nn.Sequential(MODULES["LlamaMLP"]())
    hfpatch.apply(block)
    block.to(BF16)
    calls = (lambda: _call("sana", block[0]), lambda: hfpatch.apply(model))
    _one_at_a_time(Seen(block, model), *calls)


def test_who_waits_has_the_kernel() -> None:
    """The very first call of each thread is the kernel's, under autocast too."""
    model = nn.Sequential(MODULES["LlamaMLP"]())
    hfpatch.apply(model)
    names: list[list[str]] = []

    def call() -> None:
        with torch.no_grad(), torch.autocast("cpu", BF16), Kernels() as seen:
            model(draw(FP32))
        names.append(seen.names)

    _together(call, call, call)
    assert names == [["gated"]] * 3


class InBackward(torch.autograd.Function):
    """Calls a model in its backward, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], Any], results: list[Any]) -> Any:
        ctx.call, ctx.results = call, results
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.results.append(ctx.call())
        return grad, None, None


@pytest.mark.parametrize("autocast", [False, True], ids=["another dtype", "autocast"])
def test_a_backward_does_not_wait(autocast: bool) -> None:
    """A proof of gradients waits for autograd's thread of a GPU, which may be the one that asks."""
    if autocast:
        pair, x = Pair.of(MODULES["LlamaMLP"]()), draw(FP32)
        patched, plain, kernel = pair.patched, pair.plain, "gated"
    else:
        patched, x = nn.Sequential(_basic_block()), torch.ones(1, 5, 96, dtype=BF16)
        plain, kernel = copy.deepcopy(patched).to(BF16), "add_layer_norm"
        hfpatch.apply(patched)
        patched.to(BF16)

    def call(model: nn.Module) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", BF16, enabled=autocast):
            result: torch.Tensor = model(x)
            return result

    found: list[torch.Tensor] = []
    y = InBackward.apply(torch.ones(1, requires_grad=True), lambda: call(patched), found)
    inside, go_on = threading.Event(), threading.Event()

    def prove() -> None:
        """As long as somebody likes."""
        with float32_default():
            inside.set()
            assert go_on.wait(30)

    other = threading.Thread(target=prove)
    other.start()
    try:
        assert inside.wait(30)
        with Kernels() as seen:
            y.backward()
        assert other.is_alive() and kernel not in seen.names
    finally:
        go_on.set()
        other.join()
    assert off(found[0], call(plain)) <= cases.noise(BF16)
    call(patched)
    with Kernels() as seen:
        call(patched)
    assert kernel in seen.names, "the next call tries again"


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("before", ["as it is", "changed before"])
def test_a_proof_puts_back_what_a_module_may_change(before: str, warn_only: bool) -> None:
    """Whichever way the switches stand, and although the module leaves with an error."""

    def state() -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            random.getstate(),
            numpy.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )

    def change(on: bool) -> None:
        torch.set_default_dtype(torch.float64 if on else torch.float32)
        torch.set_grad_enabled(not on)
        torch.use_deterministic_algorithms(on, warn_only=on and warn_only)
        torch.set_float32_matmul_precision("medium" if on else "highest")

    on = before == "as it is"
    change(not on)
    expected = state()
    try:
        with suppress(KeyError), float32_default():
            change(on)
            drawn = random.random(), numpy.random.random(), torch.rand(1)
            assert len(drawn) == 3
            assert not any(a == b for a, b in zip(state()[4:], expected[4:], strict=True))
            assert state()[2:4] != expected[2:4]
            raise KeyError
        assert state() == expected
    finally:
        change(False)


def test_settings_while_another_thread_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a method off the model between two looks at it."""
    module: Any = MODULES["LlamaRMSNorm"]()
    module.brought = 1.0
    own = unchanged._is_setting

    def and_restores(value: Any) -> bool:
        module.__dict__.pop("brought", None)
        return own(value)

    monkeypatch.setattr(unchanged, "_is_setting", and_restores)
    read, settings = unchanged.settings_of(module)
    with pytest.raises(KeyError):  # it is another module now
        read(module.__dict__)
    assert 1.0 in settings


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="another pool of threads")
def test_models_are_explained_in_one_thread_and_kernels_proven_with_all(
    three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that a busy machine does not run are waited for at each operator; a kernel may be
    another one with several."""
    import transformers
    from transformers.models.qwen3 import modeling_qwen3

    from hfpatch.decoding import layer

    layer.forget()
    seen: dict[str, set[int]] = {"original": set(), "kernel": set()}
    attention = modeling_qwen3.repeat_kv

    def noted(*args: Any) -> Any:
        seen["original"].add(torch.get_num_threads())
        return attention(*args)

    monkeypatch.setattr(layer, "replaced_function", lambda *a: None)
    monkeypatch.setattr(modeling_qwen3, "repeat_kv", noted)

    def rms_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-6, **_: Any) -> Any:
        seen["kernel"].add(torch.get_num_threads())
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=99, attn_implementation="eager",
    )  # fmt: skip
    model: Any = transformers.Qwen3ForCausalLM(config).eval()
    hfpatch.apply(model, kernels={"rms_norm": rms_norm, "*": "local"})
    assert seen == {"original": {1}, "kernel": {3}}
    assert torch.get_num_threads() == 3


def test_an_apply_that_fails_gives_its_threads_back(
    three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfpatch.proof import probe

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "fits_of", fails)
    with pytest.raises(KeyboardInterrupt):
        hfpatch.apply(nn.Sequential(MODULES["LlamaRMSNorm"]()))
    assert torch.get_num_threads() == 3
