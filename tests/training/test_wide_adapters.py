"""Adapters in fp32 over half weights without autocast, as `get_peft_model` makes them: they are
computed in fp32 inside a layer's functions, and rounded where PEFT rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.nearness import assert_as_near, draw
from torch import Tensor, nn
from training.test_layers import (
    assert_equal,
    batch,
    build,
    gradients,
    layers_of,
    left_by,
    lora,
    served,
)

import hfpatch
from hfpatch.training import lora as lora_layers
from hfpatch.training import low_rank

peft = pytest.importorskip("peft")
HALF = (torch.bfloat16, torch.float16)
ALL = {
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "Starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "Gemma2": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
}
__all__ = ["served"]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def adapted(family: str = "Llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    model = lora(build(family, dtype), target_modules=ALL[family], **more)
    found = {p.dtype for n, p in model.named_parameters() if "lora" in n}
    assert found == {torch.float32}
    return model


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, [s.reason for s in report.skips]
    return model


def own_linears(model: Any) -> Iterator[Any]:
    return (m for m in model.modules() if lora_layers.is_adapted(m))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", ALL)
def test_gradients_are_as_near_to_fp64(
    family: str, dtype: torch.dtype, served: dict[str, int]
) -> None:
    draws = []
    for seed in range(8):
        torch.manual_seed(seed)
        twin = adapted(family, dtype)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.02 * torch.randn_like(p))
        model, wide = patched(copy.deepcopy(twin)), copy.deepcopy(twin).double()
        ours, theirs, truth = (gradients(m) for m in (model, twin, wide))
        assert served == {"front": 2, "back": 2}
        assert ours.keys() == theirs.keys() == {n for n in theirs if "lora" in n}
        assert {g.dtype for g in ours.values()} == {torch.float32}
        flat = [torch.cat([g[n].flatten() for n in theirs]) for g in (ours, theirs, truth)]
        draws.append(draw(*flat))
    assert_as_near(draws, dtype, family)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("shape", [(1, 12, 20), (37, 12, 20), (37, 33, 5)])
@pytest.mark.parametrize("most", [1, 64, 1 << 23])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_product_is_pefts_part_by_part(
    dtype: torch.dtype,
    most: int,
    shape: tuple[int, int, int],
    trained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Result and gradients of one layer, whatever fits into a part; with its weight trained too."""
    monkeypatch.setattr(low_rank, "_PART", most)
    rows, width, out = shape
    torch.manual_seed(2)
    options = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(width, out)).to(dtype), options)
    layer = model.base_model.model[0]
    base: Any = layer.base_layer.requires_grad_(trained)
    x = torch.randn(rows, width).to(dtype).requires_grad_()
    grad = torch.randn(rows, out).to(dtype)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    y = layer(x)
    theirs = [y, *torch.autograd.grad(y, [x, a, b], grad)]
    pair = low_rank.Pair(a, b, layer.scaling["default"], torch.float32)
    with torch.no_grad():
        found = torch.nn.functional.linear(x, base.weight, base.bias)
        low = low_rank.adapt(found, x, pair)
        dx = grad @ base.weight
        ours = [found, dx, *low_rank.backward(grad, x, low, pair, (True, True), dx)]
    assert low is not None and low.dtype == torch.float32 and low.shape == (rows, 4)
    # the sum is rounded once, of equal parts; dx is: sums in fp32 may fall to either side
    for mine, other, eps in zip(ours, theirs, (1, 1, 0, 0), strict=True):
        assert mine is not None and mine.dtype == other.dtype
        most_off = (eps * torch.finfo(dtype).eps + 2e-6) * other.abs().max()
        assert (mine - other).abs().max() <= most_off
    assert (ours[0] == theirs[0]).float().mean() > 0.98
    for need in ((True, False), (False, True), (False, False)):
        some = low_rank.backward(grad, x, low, pair, need, None)
        for mine, other, wanted in zip(some, theirs[2:], need, strict=True):
            assert (mine is not None) == wanted
            assert mine is None or (mine - other).abs().max() <= 2e-6 * other.abs().max()
    exact = low_rank.formula(x, base.weight, base.bias, pair)
    assert exact.dtype == dtype
    assert (exact - y).abs().max() <= torch.finfo(dtype).eps * y.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool, served: dict[str, int]) -> None:
    """The proof is made inside of the checkpoint."""
    twin = adapted()
    model = copy.deepcopy(twin)
    lora_layers._widening.clear()
    patched(model)
    for m in (model, twin):
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        m.enable_input_require_grads()
    assert_equal(gradients(model), gradients(twin), 3e-2)
    assert served == {"front": 4, "back": 4}


def test_a_checkpoint_changes_no_bit(served: dict[str, int]) -> None:
    model = patched(adapted())
    theirs = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    ours = gradients(model)
    assert served == {"front": 6, "back": 6}
    assert all(torch.equal(ours[n], g) for n, g in theirs.items())


def test_the_wide_input_is_not_kept() -> None:
    """PEFT's own code keeps each product's input in fp32."""
    sizes = {}
    for way in ("eager", "ours"):
        model = adapted()
        if way == "ours":
            patched(model)
        left_by(model, batch(2, 64))
        sizes[way] = left_by(model, batch(2, 64))
    assert 0 < sizes["ours"] < 0.4 * sizes["eager"], sizes


def test_some_of_the_models_dtype_and_some_wide(served: dict[str, int]) -> None:
    twin = adapted()
    for module in list(own_linears(twin))[::2]:
        for side in (module.lora_A, module.lora_B):
            side.bfloat16()
    model = patched(copy.deepcopy(twin))
    ours, theirs = gradients(model), gradients(twin)
    assert {n: g.dtype for n, g in ours.items()} == {n: g.dtype for n, g in theirs.items()}
    assert len({g.dtype for g in ours.values()}) == 2
    assert_equal(ours, theirs, 3e-2)
    assert served == {"front": 2, "back": 2}


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_frozen_sides_and_products_without_one(family: str, served: dict[str, int]) -> None:
    twin = adapted(family)
    for i, module in enumerate(own_linears(twin)):
        module.lora_A.requires_grad_(i % 3 != 0)
        module.lora_B.requires_grad_(i % 3 != 1)
    model = patched(copy.deepcopy(twin))
    ours, theirs = gradients(model), gradients(twin)
    assert any("lora_A" in n for n in theirs) and any("lora_B" in n for n in theirs)
    assert_equal(ours, theirs, 3e-2)
    assert served == {"front": 2, "back": 2}
    some = lora(build(family, torch.bfloat16), target_modules=ALL[family][1:3])
    ours = gradients(patched(copy.deepcopy(some)))
    assert_equal(ours, gradients(some), 3e-2)


@pytest.mark.parametrize("family", ["Llama", "Phi3", "Starcoder2"])
def test_a_layer_of_many_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sums in fp32 are made in another order; with trained weights below, and biases."""
    model = patched(adapted(family).requires_grad_(True))
    whole = gradients(model)
    monkeypatch.setattr(low_rank, "_PART", 300)  # 26 rows, in parts of 1 to 4
    assert_equal(gradients(model), whole, 4e-3)


def test_gradients_of_gradients() -> None:
    twin = adapted()
    model = patched(copy.deepcopy(twin))
    found = []
    for m in (model, twin):
        m.set_attn_implementation("eager")
        own = [p for n, p in m.named_parameters() if "lora" in n and "layers.1" in n]
        hidden = m.get_base_model().model(input_ids=batch(), use_cache=False).last_hidden_state
        first = torch.autograd.grad(hidden.float().square().mean(), own, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), own)
        found.append(torch.cat([g.flatten() for g in second]))
    ours, theirs = found
    assert theirs.norm() > 0
    assert (ours - theirs).norm() <= 5e-2 * theirs.norm()


def _one_side_half(layer: Any) -> None:
    layer.lora_B.bfloat16()


def _not_cast(layer: Any) -> None:
    layer.cast_input_dtype_enabled = False


@pytest.mark.parametrize("change", [_one_side_half, _not_cast], ids=lambda f: f.__name__)
def test_what_pefts_own_code_refuses(change: Any) -> None:
    twin = adapted()
    model = patched(copy.deepcopy(twin))
    said = []
    for m in (model, twin):
        change(next(own_linears(m)))
        with pytest.raises(RuntimeError) as raised:
            gradients(m)
        said.append(str(raised.value))
    assert said[0] == said[1] and "dtype" in said[0]


def test_casts_of_somebody_elses_are_called(
    served: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one layer, and of the class: what it computes then is proven anew, and is not this."""
    twin = adapted()
    model = patched(copy.deepcopy(twin))
    plain = gradients(twin)
    for m in (model, twin):
        first = next(own_linears(m))
        first._cast_input_dtype = lambda x, dtype: 2 * x.to(dtype)
    theirs = gradients(twin)
    assert any((theirs[n] - g).norm() > 0.1 * g.norm() for n, g in plain.items())
    assert_equal(gradients(model), theirs, 3e-2)
    assert served == {"front": 1, "back": 2}
    for m in (model, twin):
        del next(own_linears(m))._cast_input_dtype
    cls: Any = type(next(own_linears(model)))
    was = cls._cast_input_dtype
    monkeypatch.setattr(cls, "_cast_input_dtype", lambda s, x, dtype: 2 * was(s, x, dtype))
    theirs = gradients(twin)
    assert any((theirs[n] - g).norm() > 0.1 * g.norm() for n, g in plain.items())
    assert_equal(gradients(model), theirs, 3e-2)
    assert served == {"front": 1, "back": 2}


def test_a_less_accurate_adapter_is_not_taken_for_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares errors: one rounding of x A^T to a half type is found."""
    layer = next(own_linears(adapted()))
    monkeypatch.setattr(lora_layers, "_widening", {})
    assert lora_layers.widens(layer, torch.bfloat16, "cpu")
    plain = low_rank.low_of

    def rounded(x: Tensor, pair: Any) -> Any:
        low = plain(x, pair)
        return None if low is None else low.bfloat16().to(low.dtype)

    monkeypatch.setattr(low_rank, "low_of", rounded)
    lora_layers._widening.clear()
    assert not lora_layers.widens(layer, torch.bfloat16, "cpu")


def test_the_process_is_as_it_was() -> None:
    layer = next(own_linears(adapted()))
    lora_layers._widening.clear()
    torch.set_float32_matmul_precision("high")
    state = torch.get_rng_state()
    try:
        assert lora_layers.widens(layer, torch.bfloat16, "cpu")
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_curves_are_as_near_to_fp64() -> None:
    draws = []
    for seed in range(8):
        torch.manual_seed(seed)
        twin = adapted()
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.02 * torch.randn_like(p))
        curves = []
        for m in (patched(copy.deepcopy(twin)), twin, copy.deepcopy(twin).double()):
            own = [p for p in m.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(own, lr=1e-2)
            losses = []
            for _ in range(6):
                loss = m(input_ids=batch(), labels=batch()).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            curves.append(torch.stack(losses))
        assert curves[2][-1] < curves[2][0] - 0.1
        draws.append(draw(curves[0], curves[1], curves[2].double()))
    assert_as_near(draws, torch.bfloat16, "losses")
