"""A function of PyTorch that is replaced behind fused and captured blocks.

The next `apply` sees it, of a patched model and of a fresh one, in whatever order.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from regions.families import build
from torch import nn

import hfpatch
from hfpatch.regions import offer
from hfpatch.regions.kind import runs_seen

F = nn.functional


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    """The compiled kernels must be there: these tests are about them. What was refused while a
    function was replaced stays refused."""
    offer.forget()
    yield
    offer.forget()


def _doubled(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * f(*args, **kwargs)


def _of_many_rows(f: Callable[..., Any]) -> Callable[..., Any]:
    """What a small block, with which blocks are proven, may not show."""

    def function(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = f(x, *args, **kwargs)
        return 2 * y if x.shape[0] > 2 else y

    return function


#: Of blocks, which are slow to be proven, `make test` has one.
CHANGES = [_doubled, pytest.param(_of_many_rows, marks=pytest.mark.exhaustive)]


def _causal_lm() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _blocks(report: Any) -> int:
    return sum(s.op == "block" for s in report.swaps)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def _captured(entry: Any, model: Any, inputs: Any, twin: Any) -> int:
    """How many blocks run by a capture, once they were called; results are the twin's."""
    expected = entry.run(twin, inputs)
    for _ in range(2):
        _close(entry.run(model, inputs), expected)
    with runs_seen(offer._kinds.values()) as seen:
        _close(entry.run(model, inputs), expected)
    return len(seen)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "of", "function"),
    [
        ("cogvideox", F, "layer_norm"),
        ("hunyuan-video", F, "layer_norm"),
        ("ltx2", torch, "rsqrt"),
        ("ltx2", torch.Tensor, "pow"),
        ("cogvideox", F, "scaled_dot_product_attention"),
    ],
)
def test_blocks(
    name: str,
    of: Any,
    function: str,
    change: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build().requires_grad_(False)
    twin, inputs = copy.deepcopy(model), entry.inputs(model)
    assert (fused := _blocks(hfpatch.apply(model)))
    _close(entry.run(model, inputs), entry.run(twin, inputs))
    with monkeypatch.context() as patch:
        patch.setattr(of, function, change(getattr(of, function)))
        for m in (model, copy.deepcopy(twin)):
            report = hfpatch.apply(m)
            assert not _blocks(report)
            assert any(f"{function}`, which its code names, was repl" in s.reason
                       for s in report.skips)  # fmt: skip
            for _ in range(2):  # what has no file now is captured at its first call
                _close(entry.run(m, inputs), entry.run(twin, inputs))
    assert _blocks(hfpatch.apply(model)) == fused  # by the proof of before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "of", "function"),
    [
        ("sd3", F, "layer_norm"),
        ("ltx", torch, "rsqrt"),
        ("ltx", torch.Tensor, "pow"),
        ("wan", F, "gelu"),
        ("sd3", F, "scaled_dot_product_attention"),
    ],
)
def test_captured_blocks_of_diffusers(
    name: str,
    of: Any,
    function: str,
    change: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next `apply` makes them another kind, which is captured as the code is then."""
    entry = zoo.ENTRIES[name]
    model = entry.build().requires_grad_(False)
    twin, inputs = copy.deepcopy(model), entry.inputs(model)
    hfpatch.apply(model)
    assert (fused := _captured(entry, model, inputs, twin))
    usual = entry.run(twin, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(of, function, change(getattr(of, function)))
        if change is _doubled:
            assert not torch.allclose(entry.run(twin, inputs), usual, rtol=1e-2, atol=1e-2)
        for m in (model, copy.deepcopy(twin)):
            hfpatch.apply(m)
            _captured(entry, m, inputs, twin)
    hfpatch.apply(model)
    with runs_seen(offer._kinds.values()) as seen:  # by the capture of before
        _close(entry.run(model, inputs), usual)
    assert len(seen) == fused


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("name", ["ltx", "flux", "wan", "ltx2", "flux2"])
def test_attention_is_the_users_where_diffusers_dispatches_it(
    name: str, decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people put in a faster one: `F.scaled_dot_product_attention = sageattn`."""
    from hfpatch.blocks.attention import _dispatch, is_native

    entry = zoo.ENTRIES[name]
    model = entry.build().requires_grad_(False)
    twin, inputs = copy.deepcopy(model), entry.inputs(model)
    written = _blocks(hfpatch.apply(model))
    assert is_native(_dispatch())
    before = entry.run(twin, inputs)
    if decided:
        assert bool(_captured(entry, model, inputs, twin)) is not bool(written)
    registry = _dispatch()._AttentionBackendRegistry
    active = registry._active_backend
    for place in ("F", "registry"):
        with monkeypatch.context() as patch:
            if place == "F":
                function = "scaled_dot_product_attention"
                patch.setattr(F, function, _doubled(getattr(F, function)))
            else:
                double = _doubled(registry._backends[active])
                patch.setitem(registry._backends, active, double)
            assert not is_native(_dispatch())  # on a GPU, where another kernel is chosen
            expected = entry.run(twin, inputs)
            assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-2)
            for again in (False, True):
                if again:
                    hfpatch.apply(model)
                assert not (_captured(entry, model, inputs, twin) and place == "F")
            if place == "F" and not written:
                reasons = {c.reason for c in hfpatch.status(model).plan.candidates}
                assert reasons == {f"`F.{function}`, which its attention calls, was replaced"}
    hfpatch.apply(model)
    assert bool(_captured(entry, model, inputs, twin)) is not bool(written)


def test_a_module_that_stands_for_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build().requires_grad_(False)
    twin, inputs = copy.deepcopy(model), entry.inputs(model)
    hfpatch.apply(model)
    assert _captured(entry, model, inputs, twin)
    import diffusers.models.normalization as home

    other = types.ModuleType("torch")
    other.__dict__.update(vars(torch))
    other.rsqrt = _doubled(torch.rsqrt)  # type: ignore[attr-defined]
    monkeypatch.setattr(home, "torch", other)
    hfpatch.apply(model)
    _captured(entry, model, inputs, twin)


def test_a_block_that_is_proven_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of another dtype, at a call, is of the functions that `apply` saw."""
    entry = zoo.ENTRIES["ltx2"]
    model = entry.build().requires_grad_(False)
    assert _blocks(hfpatch.apply(model))
    model, twin = model.bfloat16(), entry.build().requires_grad_(False).bfloat16()
    monkeypatch.setattr(torch, "rsqrt", _doubled(torch.rsqrt))
    inputs = entry.inputs(model, torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="was changed since"):
        found = entry.run(model, inputs)
    torch.testing.assert_close(found, entry.run(twin, inputs), rtol=0.1, atol=0.1)


def test_a_captured_block_that_is_decided_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of another dtype decides nothing while a function is not the one of `apply`."""
    entry = zoo.ENTRIES["ltx"]
    model = entry.build().requires_grad_(False)
    hfpatch.apply(model)
    assert _captured(entry, model, entry.inputs(model), entry.build().requires_grad_(False))
    model, twin = model.bfloat16(), entry.build().requires_grad_(False).bfloat16()
    inputs = entry.inputs(model, torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(F, "gelu", _doubled(F.gelu))  # which no leaf computes by itself
        expected = entry.run(twin, inputs)
        for _ in range(2):
            with runs_seen(offer._kinds.values()) as seen:
                found = entry.run(model, inputs)
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
            assert not seen
    entry.run(model, inputs)
    with runs_seen(offer._kinds.values()) as seen:
        found = entry.run(model, inputs)
    torch.testing.assert_close(found, entry.run(twin, inputs), rtol=0.1, atol=0.1)
    assert seen


def _llama() -> tuple[Any, Any, dict[str, Any]]:
    model, inputs = build("llama")
    return model, build("llama")[0], inputs(2, 9)


def _run(model: Any, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**call)[0]
    return found


def _alike(model: Any, twin: Any, call: dict[str, Any]) -> None:
    for _ in range(3):
        expected = _run(twin, call)
        assert (_run(model, call) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("of", "function"), [(torch, "rsqrt"), (F, "silu"), (F, "scaled_dot_product_attention")]
)
def test_captured_blocks(of: Any, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, call = _llama()
    settings: dict[str, Any] = {"decoding": False, "blocks": True}
    hfpatch.apply(model, **settings)
    _alike(model, twin, call)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    with monkeypatch.context() as patch:
        patch.setattr(of, function, _doubled(getattr(of, function)))
        for m in (model, build("llama")[0]):
            hfpatch.apply(m, **settings)
            _alike(m, twin, call)
    hfpatch.apply(model, **settings)
    _alike(model, twin, call)


def test_blocks_that_are_captured_while_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch.regions.offer import forget

    forget()
    model, twin, call = _llama()
    settings: dict[str, Any] = {"decoding": False, "blocks": True}
    hfpatch.apply(model, **settings)
    hfpatch.apply(model, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", _doubled(F.silu))
        _run(model, call)  # no capture is made of what was not there at `apply`
    _alike(model, twin, call)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


def test_leaves_that_were_refused_while_it_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfRsqrtRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(32) + 0.5, requires_grad=False)
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    model = nn.Sequential(OfRsqrtRMSNorm())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rsqrt", _doubled(torch.rsqrt))
        assert not hfpatch.apply(model).swaps
    assert hfpatch.apply(model).swaps


def _of_one_token(f: Callable[..., Any]) -> Callable[..., Any]:
    """What a prompt does not show."""

    def function(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = f(x, *args, **kwargs)
        return 1.5 * y if x.dim() == 3 and x.shape[1] == 1 else y

    return function


@pytest.mark.parametrize("change", [_doubled, _of_many_rows, _of_one_token])
@pytest.mark.parametrize(
    ("of", "function"),
    [(F, "silu"), (torch, "rsqrt"), (F, "scaled_dot_product_attention")],
)
def test_decoding(
    of: Any, function: str, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _causal_lm()
    twin = copy.deepcopy(model)
    ids = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(1))

    def logits(m: Any) -> torch.Tensor:
        given: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
        kept = m.generate(ids, max_new_tokens=4, do_sample=False, **given)
        return torch.stack(kept.logits)

    def decodes(report: hfpatch.Report) -> bool:
        return any(s.op == "decoding" for s in report.swaps)

    assert decodes(hfpatch.apply(model))
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-4)
    with monkeypatch.context() as patch:
        patch.setattr(of, function, change(getattr(of, function)))
        for m in (model, copy.deepcopy(twin)):
            report = hfpatch.apply(m)
            assert not decodes(report)
            assert any(
                s.reason.startswith("decoding") and f"{function}`, which its code" in s.reason
                for s in report.skips
            )
            torch.testing.assert_close(logits(m), logits(twin), rtol=1e-4, atol=1e-4)
    assert decodes(hfpatch.apply(model))  # by the proof of before
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [_doubled, _of_many_rows])
def test_training(change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _causal_lm().train()
    twin = copy.deepcopy(model)
    ids = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(1))

    def gradient(m: Any) -> torch.Tensor:
        m.zero_grad()
        m(ids, labels=ids).loss.backward()
        found: torch.Tensor = m.model.layers[0].mlp.gate_proj.weight.grad
        return found.clone()

    def layers(report: hfpatch.Report) -> int:
        return sum(s.class_name == "LlamaDecoderLayer" for s in report.swaps)

    assert layers(hfpatch.apply(model, mode="training"))
    torch.testing.assert_close(gradient(model), gradient(twin), rtol=1e-4, atol=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", change(F.silu))
        for m in (model, copy.deepcopy(twin)):
            assert not layers(hfpatch.apply(m, mode="training"))
            torch.testing.assert_close(gradient(m), gradient(twin), rtol=1e-4, atol=1e-6)
    assert layers(hfpatch.apply(model, mode="training"))
