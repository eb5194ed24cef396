"""Under autocast a module is another function: it is proven apart, and kernels run there too."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import autocast_cases as cases
import pytest
import torch
import trainer
import zoo
from autocast_cases import HALVES, MODULES, WIDTH, Kernels, Pair, call, check, draw, off
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch.proof.proofs import forget_proofs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, autocast: torch.dtype, recorded: bool) -> None:
    cases.check_module(name, autocast, recorded, "cpu")


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_with_the_operators_of_cuda(name: str, recorded: bool) -> None:
    """There norms and powers run in fp32, and return it."""
    with cases.as_on_cuda():
        for own in (FP32, BF16):
            settings = {"mode": "training" if recorded else "inference", "kernels": "local"}
            pair = Pair.of(MODULES[name]().to(own), **settings)
            for dtype in cases.DTYPES:
                check(pair, draw(dtype), BF16, recorded)
            if name in ("LayerNorm", "RMSNorm", "NewGELUActivation"):
                y, gradients = call(pair.patched, draw(BF16), BF16, recorded)
                assert y.dtype == FP32
                assert not recorded or gradients["input"].dtype == BF16


@pytest.mark.parametrize("autocast", HALVES, ids=str)
def test_gated_norm(autocast: torch.dtype) -> None:
    cases.check_gated_norm(autocast, "cpu")


def test_a_gate_of_another_dtype() -> None:
    """So a Mamba layer under autocast calls its norm."""
    norm = cases.gated_norm()
    plain, model = copy.deepcopy(norm), nn.Sequential(norm)
    forget_proofs()
    assert hfpatch.apply(model).swaps
    x, gate = draw(FP32), draw(BF16).flip(0)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        with pytest.warns(RuntimeWarning, match="float32 input and a bfloat16 gate"):
            got = norm(x, gate)
        assert torch.equal(got, plain(x, gate))
    note = "`BambaRMSNormGated` with float32 input and a bfloat16 gate: the original"
    assert note in hfpatch.status(model).notes


@pytest.mark.parametrize("name", ["LlamaMLP", "NewGELUActivation"])
def test_formulas_of_pytorch_where_inference_is_recorded(name: str) -> None:
    """In `mode="inference"`: activations and gated MLPs compute the formula in ATen's operators."""
    pair = Pair.of(MODULES[name]())
    for dtype in cases.DTYPES:
        expected = call(pair.plain, draw(dtype), BF16, True)
        got = call(pair.patched, draw(dtype), BF16, True)
        assert off(got[0], expected[0]) <= cases.noise(BF16)
        for k, gradient in expected[1].items():
            assert got[1][k].dtype == gradient.dtype
            assert off(got[1][k], gradient) <= cases.noise(BF16), k
        check(pair, draw(dtype), BF16, False)


FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "t5-v1.1", "bert", "vit")


def _gradient(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Of all parameters, as one vector."""
    model.zero_grad()
    output.float().pow(2).mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(g.dtype == FP32 for g in grads)
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", FAMILIES)
def test_models(name: str, mode: str) -> None:
    """Results and gradients are no farther from fp32 than the unpatched model's."""
    entry = zoo.ENTRIES[name]
    model = entry.build()
    inputs, plain = entry.inputs(model, FP32), copy.deepcopy(model)
    exact = entry.output(plain(**inputs))
    hfpatch.apply(model, mode=mode)
    training = mode == "training"
    with torch.set_grad_enabled(training), torch.autocast("cpu", BF16):
        model(**inputs)
        with Kernels() as seen:
            got = entry.output(model(**inputs))
        expected = entry.output(plain(**inputs))
    assert seen.names and got.dtype == expected.dtype
    assert off(got, exact) <= 1.5 * off(expected, exact) + 1e-3
    notes = hfpatch.status(model).notes
    assert any("autocast to bfloat16 on cpu" in n and ": the kernel" in n for n in notes)
    assert not any(": the original" in n for n in notes), notes
    if training:
        ours, theirs = _gradient(model, got), _gradient(plain, expected)
        truth = _gradient(plain, exact)
        assert off(ours, truth) <= 1.5 * off(theirs, truth) + 1e-3


def test_trainer(tmp_path: Path) -> None:
    """`Trainer(bf16=True)`: the losses and norms of the gradients that it logs."""
    ids = torch.randint(3, 90, (8, 12), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": i, "labels": i} for i in ids]

    def logged(patched: bool) -> torch.Tensor:
        model = zoo.ENTRIES["llama"].build()
        if patched:
            assert hfpatch.apply(model, mode="training").swaps
        steps = trainer.logged(model, rows, tmp_path, 8, bf16=True)
        if patched:
            assert any(": the kernel" in n for n in hfpatch.status(model).notes)
        return torch.tensor([[e["loss"], e["grad_norm"]] for e in steps])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hfpatch")
        torch.testing.assert_close(logged(True), logged(False), rtol=2e-2, atol=1e-3)


class DoubledRMSNorm(LlamaRMSNorm):
    """Another function under autocast."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        y = super().forward(hidden_states)
        return 2 * y if torch.is_autocast_enabled("cpu") else y


class _Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * grad


class OtherGradientRMSNorm(LlamaRMSNorm):
    """The values of a norm, and not its gradient."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        return super().forward(_Thrice.apply(x) if torch.is_autocast_enabled("cpu") else x)


class WidenedRMSNorm(LlamaRMSNorm):
    """What autocast on a GPU makes of a norm of PyTorch's: its operator runs in fp32."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        return super().forward(x.float() if torch.is_autocast_enabled("cpu") else x)


def _is_the_original(pair: Pair, recorded: bool, why: str) -> None:
    x = draw(FP32)
    expected = call(pair.plain, x, BF16, recorded)
    with pytest.warns(RuntimeWarning, match=why) as caught:
        got = call(pair.patched, x, BF16, recorded)
    said = [w for w in caught if "hfpatch" in str(w.message)]
    assert len(said) == 1 and "autocast to bfloat16" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(pair.patched, x, BF16, recorded)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][k], g) for k, g in expected[1].items())
    (note,) = (n for n in hfpatch.status(pair.patched).notes if "autocast" in n)
    assert f"`{type(pair.plain[0]).__name__}` with float32 input" in note
    assert ": the original, since " in note


@pytest.mark.parametrize(("name", "value"), [("use_cache", False), ("problem_type", "regression")])
def test_a_setting_of_the_config_that_nothing_reads(name: str, value: Any) -> None:
    """`Trainer` sets the first, a classifier's loss the second: the MLP keeps its config, and has
    no use for them."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=99, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).train()
    hfpatch.apply(model, mode="training")
    setattr(model.config, name, value)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.arange(1, 25).view(2, 12)).logits.sum().backward()
    notes = [n for n in hfpatch.status(model).notes if "`LlamaMLP` with" in n]
    assert notes and all(n.endswith(": the kernel") for n in notes), notes


def test_another_function_is_the_originals() -> None:
    pair = Pair.of(DoubledRMSNorm(WIDTH))
    _is_the_original(pair, False, "computes something else than in float32")
    with torch.no_grad():
        with Kernels() as seen:
            torch.testing.assert_close(pair.patched(draw(FP32)), pair.plain(draw(FP32)))
        assert seen.names == ["rms_norm"]


def test_another_gradient_is_the_originals() -> None:
    pair = Pair.of(OtherGradientRMSNorm(WIDTH), mode="training")
    _is_the_original(pair, True, "computes something else than in float32")
    # without gradients too: its code is another one there
    pair = Pair.of(OtherGradientRMSNorm(WIDTH))
    _is_the_original(pair, False, "computes something else than in float32")


def test_a_kernel_that_is_wrong_under_autocast() -> None:
    def mine(x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        y = nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y * 1.01 if torch.is_autocast_enabled("cpu") else y

    pair = Pair.of(nn.LayerNorm(WIDTH), kernels={"layer_norm": mine})
    _is_the_original(pair, False, "its largest error is")


def test_a_wrong_gradient_of_a_kernel() -> None:
    def mine(x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        if torch.is_autocast_enabled("cpu"):  # elsewhere it would be refused by `apply`
            x = _Thrice.apply(x)
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    handle = hfpatch.register(op="layer_norm", kernel=mine, name="mine", differentiable=True)
    try:
        pair = Pair.of(nn.LayerNorm(WIDTH), mode="training", kernels={"layer_norm": "mine"})
        _is_the_original(pair, True, "its largest error is")
    finally:
        handle.remove()


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
def test_an_input_that_is_made_fp32(recorded: bool) -> None:
    """Its gradient has the input's dtype again."""
    pair = Pair.of(WidenedRMSNorm(WIDTH), mode="training" if recorded else "inference")
    for dtype in cases.DTYPES:
        check(pair, draw(dtype), BF16, recorded)
    y, gradients = call(pair.patched, draw(BF16), BF16, recorded)
    assert y.dtype == FP32
    assert not recorded or gradients["input"].dtype == BF16
    exact = call(copy.deepcopy(pair.plain).double(), draw(BF16).double(), BF16, recorded)
    assert off(y, exact[0]) < 1e-6, "bf16 is not a step on the way"


def test_dtypes_without_a_kernel() -> None:
    pair = Pair.of(LlamaRMSNorm(WIDTH))
    x = draw(torch.float64)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        with pytest.warns(RuntimeWarning, match="there is no kernel for float64"):
            got = pair.patched(x)
        assert torch.equal(got, pair.plain(x))
        meta = copy.deepcopy(pair.patched).to("meta")
        assert meta(x.to("meta")).shape == x.shape


class Int8(nn.Module):
    """A layer that autocast does not know: its result has the dtype of its input."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = layer.weight.detach().abs().max() / 127
        weight = (layer.weight.detach() / self.scale).round().to(torch.int8)
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x, (self.weight * self.scale).to(x.dtype))


@pytest.mark.parametrize("names", [["gate_proj"], ["gate_proj", "up_proj"]], ids=len)
@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
def test_quantized_layers(names: list[str], recorded: bool) -> None:
    """Gate and up may have two dtypes then: the formula in PyTorch's operators."""
    pair = Pair.of(MODULES["LlamaMLP"](), mode="training" if recorded else "inference")
    for model in (pair.patched, pair.plain):
        for name in names:
            setattr(model[0], name, Int8(getattr(model[0], name)))
    expected = call(pair.plain, draw(FP32), BF16, recorded)
    call(pair.patched, draw(FP32), BF16, recorded)
    with Kernels() as seen:
        got = call(pair.patched, draw(FP32), BF16, recorded)
    assert ("gated" in seen.names) == (len(names) == 2)
    assert got[0].dtype == expected[0].dtype and off(got[0], expected[0]) <= cases.noise(BF16)
    for k, gradient in expected[1].items():
        assert off(got[1][k], gradient) <= cases.noise(BF16), k


class WideSiLU(nn.SiLU):
    """What autocast on a GPU makes of an activation with a power in it: its result is fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float() if torch.is_autocast_enabled("cpu") else x)


@pytest.mark.parametrize("after", [False, True], ids=["before apply", "after apply"])
@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
@pytest.mark.parametrize(
    ("name", "last", "wide"),
    [
        ("LlamaMLP", "down_proj", False),
        ("LlamaMLP", "down_proj", True),
        ("Phi3MLP", "down_proj", True),
        ("T5DenseGatedActDense", "wo", True),
    ],
)
def test_a_quantized_layer_behind_an_activation(
    name: str, last: str, wide: bool, recorded: bool, after: bool
) -> None:
    """Such a layer's result has the dtype of the product, which that of the activation decides."""

    def make() -> nn.Module:
        module = MODULES[name]()
        for act in ("act_fn", "activation_fn"):
            if hasattr(module, act) and wide:
                setattr(module, act, WideSiLU())
        return module

    def quantize(module: nn.Module) -> nn.Module:
        setattr(module, last, Int8(getattr(module, last)))
        return module

    with cases.as_on_cuda():  # there T5's own activation is wide
        mode = "training" if recorded else "inference"
        pair = Pair.of(make() if after else quantize(make()), mode=mode)
        for model in (pair.patched, pair.plain) if after else ():
            quantize(model[0])
        for dtype in cases.DTYPES:
            expected = call(pair.plain, draw(dtype), BF16, recorded)
            got = call(pair.patched, draw(dtype), BF16, recorded)
            assert expected[0].dtype == (FP32 if wide else BF16)
            assert got[0].dtype == expected[0].dtype
            assert off(got[0], expected[0]) <= cases.noise(FP32 if wide else BF16)
            for k, gradient in expected[1].items():
                assert got[1][k].dtype == gradient.dtype, k
                assert off(got[1][k], gradient) <= cases.noise(BF16), k


def test_parts_of_blocks() -> None:
    """A fused block hands over, and says so, whether it has a file (the frame around a UNet's
    blocks) or is captured; in training its parts run their own kernels."""
    entry = zoo.ENTRIES["sd15-unet"]
    model = entry.build()
    inputs, plain = entry.inputs(model, FP32), copy.deepcopy(model)
    hfpatch.apply(model)

    def run(m: nn.Module) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", BF16):
            return entry.output(m(**inputs))

    expected = run(plain)
    with pytest.warns(RuntimeWarning, match="was called under autocast"):
        assert off(run(model), expected) <= 0.03
    notes = hfpatch.status(model).notes
    assert "`Transformer2DModel` under autocast: the original, not fused" in notes
    blocks = hfpatch.status(model).plan.candidates
    assert blocks and {c.state for c in blocks} == {"left"}
    assert {c.reason for c in blocks} == {"it is called under autocast: its parts run"}
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(
                entry.output(model(**inputs)), entry.output(plain(**inputs)), rtol=1e-4, atol=1e-5
            )
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    hfpatch.apply(model, mode="training")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hfpatch")
        run(model)
        with Kernels() as seen:
            assert off(run(model), expected) <= 0.03
    assert "layer_norm" in seen.names and "gated_packed" in seen.names


def test_moved_to_another_dtype() -> None:
    pair = Pair.of(LlamaRMSNorm(WIDTH))
    check(pair, draw(FP32), BF16, False)
    pair.patched.to(BF16), pair.plain.to(BF16)
    check(pair, draw(BF16), BF16, False)
    check(pair, draw(FP32), BF16, False)


def test_gradients_in_inference_mode_are_the_originals() -> None:
    pair, x = Pair.of(LlamaRMSNorm(WIDTH)), draw(FP32)
    expected = call(pair.plain, x, BF16, True)
    with pytest.warns(RuntimeWarning, match="mode='training'"):
        got = call(pair.patched, x, BF16, True)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][k], g) for k, g in expected[1].items())
