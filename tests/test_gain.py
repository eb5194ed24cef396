"""`apply(gain="time")`: both forwards are timed on the calls that come, and the faster is kept."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from support.recordings import MODELS, ids
from torch import Tensor, nn

import hfpatch
from hfpatch.planning import gain
from hfpatch.planning.race import Race

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """There must be something to swap."""


def model_of(name: str = "mistral") -> Any:
    return MODELS[name]().eval().requires_grad_(False)


def slowed(monkeypatch: pytest.MonkeyPatch, way: int, seconds: float) -> list[int]:
    """Make every original forward (0), or patched one (1), slow; which ways calls went."""
    own, went = gain._adapter, []

    def adapter(original: Any, patched: Any, kind: Any, table: Any) -> Any:
        def wrapped(forward: Any, this: int) -> Any:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                went.append(this)
                if this == way:
                    time.sleep(seconds)
                return forward(self, *args, **kwargs)

            return call

        return own(wrapped(original, 0), wrapped(patched, 1), kind, table)

    monkeypatch.setattr(gain, "_adapter", adapter)
    return went


def run(model: Any, given: Tensor, times: int = 8) -> Tensor:
    with torch.no_grad():
        for _ in range(times):
            logits: Tensor = model(given).logits
    return logits


def of_class(model: Any, name: str) -> list[Any]:
    return [t for t in hfpatch.status(model).plan.times if t.class_name == name]


@pytest.mark.parametrize("way", [0, 1], ids=["original", "patched"])
def test_the_slow_way_is_not_kept(monkeypatch: pytest.MonkeyPatch, way: int) -> None:
    model, given = model_of(), ids(1, "cpu")
    expected = run(model, given, 1)
    went = slowed(monkeypatch, way, 0.02)
    report = hfpatch.apply(model, gain="time", decoding=False, blocks=False)
    assert not report.plan.times
    torch.testing.assert_close(run(model, given), expected, rtol=1e-4, atol=1e-5)
    kept = ("patched", "original")[way]
    for name, op, modules in (("MistralRMSNorm", "rms_norm", 5), ("MistralMLP", "gated", 2)):
        (found,) = of_class(model, name)
        assert found.op == op
        assert found.kept == kept and found.modules == modules
        taken = (found.original_ms, found.patched_ms)
        assert taken[way] >= 20 and 0 < taken[1 - way] < taken[way]
        assert found.call == "2×17×64 float32"
    went.clear()
    torch.testing.assert_close(run(model, given, 2), expected, rtol=1e-4, atol=1e-5)
    assert went == [1 - way] * 14, "five norms and two MLPs in each call"
    text, data = str(hfpatch.status(model)), hfpatch.status(model).to_dict()
    assert "original ms" in text and "MistralRMSNorm" in text
    assert {t["kept"] for t in data["times"]} == {kept}
    assert "original ms" in hfpatch.status(model)._repr_html_()


def test_each_size_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    hfpatch.apply(model, gain="time", decoding=False, blocks=False)
    run(model, ids(1, "cpu", 16))
    one = len(of_class(model, "MistralRMSNorm"))
    run(model, ids(1, "cpu", 17))  # the same power of two
    assert len(of_class(model, "MistralRMSNorm")) == one == 1
    run(model, ids(1, "cpu", 1))
    run(model, ids(1, "cpu", 64))
    assert len(of_class(model, "MistralRMSNorm")) == 3


def test_nothing_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call goes one way: what writes to a cache writes once."""
    model, given = model_of(), ids(1, "cpu")
    went = slowed(monkeypatch, 0, 0.0)
    hfpatch.apply(model, gain="time", decoding=False, blocks=False)
    both = set()
    for _ in range(8):
        went.clear()
        run(model, given, 1)
        assert len(went) == 7, "five norms and two MLPs"
        both |= set(went)
    assert both == {0, 1}


def test_blocks_are_timed_as_a_whole() -> None:
    model, given = model_of(), ids(1, "cpu")
    expected = run(model, given, 1)
    hfpatch.apply(model, gain="time", decoding=False, blocks=True)
    torch.testing.assert_close(run(model, given, 12), expected, rtol=1e-4, atol=1e-5)
    (found,) = of_class(model, "MistralDecoderLayer")
    assert found.op == "block" and found.modules == 2 and found.kept in ("original", "patched")
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


def test_lengths_of_masks_are_not_timed_one_by_one() -> None:
    """The last dimension of a mask is a text's length: of each of them no race would end."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
    config = BertConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    model = BertModel(config).eval().requires_grad_(False)
    hfpatch.apply(model, gain="time", blocks=True)
    for length in range(33, 63):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :2] = 0  # else it is dropped
        with torch.no_grad():
            model(torch.full((2, length), 7), attention_mask=mask)
    found = of_class(model, "BertLayer")
    assert 1 <= len(found) <= 4
    assert any(t.kept in ("original", "patched") for t in found)


def test_sizes_that_are_timed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "_MOST_SIZES", 3)
    model = model_of()
    hfpatch.apply(model, gain="time", decoding=False, blocks=False)
    for n in range(1, 200, 8):
        run(model, torch.full((1, n), 5), 1)
    assert len(of_class(model, "MistralRMSNorm")) <= 3


def test_calls_with_gradients_are_not_timed() -> None:
    model, given = MODELS["qwen3"]().eval(), ids(1, "cpu")
    hfpatch.apply(model, gain="time", decoding=False, blocks=False)
    model(given).logits.sum().backward()
    assert not hfpatch.status(model).plan.times
    assert model.model.norm.weight.grad is not None


def test_copies_and_restore() -> None:
    model, given = model_of(), ids(1, "cpu")
    expected = run(model, given, 1)
    hfpatch.apply(model, gain="time", decoding=False, blocks=False)
    run(model, given)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(run(twin, given, 2), expected, rtol=1e-4, atol=1e-5)
    hfpatch.restore(model)
    assert not hfpatch.status(model).plan.times
    assert torch.equal(run(model, given, 1), expected)
    with hfpatch.applied(model, gain="time"):
        run(model, given)
        assert hfpatch.status(model).plan.times
    hfpatch.apply(model, decoding=False)
    run(model, given)
    assert not hfpatch.status(model).plan.times


@pytest.mark.parametrize("of", ["module", "class"])
@pytest.mark.parametrize("calls", [0, 1, 30], ids=["before", "while it is timed", "decided"])
@pytest.mark.parametrize("slow", [0, 1], ids=["original", "patched"])
@torch.no_grad()
def test_the_class_counts_that_it_has_when_called(
    monkeypatch: pytest.MonkeyPatch, slow: int, calls: int, of: str
) -> None:
    class Norm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    class Twice(Norm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    def twice(self: nn.LayerNorm, input: Tensor) -> Tensor:
        return 2 * nn.LayerNorm.forward(self, input)

    model = nn.Sequential(Norm(64)).eval().requires_grad_(False)
    given = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    expected = 2 * model(given)
    went = slowed(monkeypatch, slow, 0.002)
    assert len(hfpatch.apply(model, gain="time").plan.swaps) == 1
    for _ in range(calls):
        model(given)
    if calls == 30:
        assert went[-1] == 1 - slow, "the faster one is kept"
    if of == "module":
        model[0].__class__ = Twice
    else:
        monkeypatch.setattr(Norm, "forward", twice)
    for _ in range(3):
        torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-5)


def test_bad_arguments() -> None:
    model = model_of()
    with pytest.raises(ValueError, match='`gain` must be None or "time", got True'):
        hfpatch.apply(model, gain=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='`gain="time"` needs mode="inference"'):
        hfpatch.plan(model, gain="time", mode="training")
    assert not hfpatch.status(model).plan.swaps


def test_a_race_takes_turns_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def went(race: Race, costs: dict[int, list[float]]) -> list[int]:
        ways = []
        while race.winner is None:
            way = race.turn()
            ways.append(way)

            def call(way: int = way) -> None:
                clock[0] += costs[way].pop(0)

            race.run(call, CPU)
            assert len(ways) < 40
        return ways

    clear = Race()
    assert went(clear, {0: [9, 1, 1], 1: [9, 2, 2]}) == [0, 1, 0, 1, 0, 1]
    assert clear.winner == 0 and clear.milliseconds(1) == 2000
    close_by = Race(warm=(True, False))
    assert went(close_by, {0: [1.2, 1.0, 1.0], 1: [9, 5.0, 0.9, 0.9]}) == [1, 0, 1, 0, 1, 0, 1]
    assert close_by.winner == 1, "the least counts: others only add to it"
    with pytest.raises(KeyError):
        Race().run(lambda: {}[1], CPU)
