"""Under autocast a module is another function: it is proven apart, and kernels run there too."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import autocast_cases as cases
import pytest
import torch
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module
from autocast_cases import HALVES, MODULES, WIDTH, Kernels, Pair, call, check, draw, off
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch.proofs import forget_proofs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, autocast: torch.dtype, recorded: bool) -> None:
    """Values, gradients and the dtypes of both, for inputs and weights of every dtype."""
    for own in (FP32, autocast):
        settings = {"mode": "training" if recorded else "inference", "kernels": "local"}
        pair = Pair.of(MODULES[name]().to(own), **settings)
        for dtype in cases.DTYPES:
            check(pair, draw(dtype), autocast, recorded)


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
    norm = cases.gated_norm()
    plain = copy.deepcopy(norm)
    assert hfpatch.apply(nn.Sequential(norm)).swaps
    for dtype in cases.DTYPES:
        x, gate = draw(dtype), draw(dtype).flip(0)
        with torch.no_grad(), torch.autocast("cpu", autocast):
            norm(x, gate)
            with Kernels() as seen:
                got = norm(x, gate)
            expected = plain(x, gate)
        assert seen.names == ["gated_rms_norm"] and got.dtype == expected.dtype
        assert off(got, expected) <= cases.noise(dtype, FP32)


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
    from transformers import PrinterCallback, Trainer, TrainingArguments

    ids = torch.randint(3, 90, (8, 12), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": i, "labels": i} for i in ids]

    def logged(patched: bool) -> torch.Tensor:
        model = zoo.ENTRIES["llama"].build()
        if patched:
            assert hfpatch.apply(model, mode="training").swaps
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if patched:
            assert any(": the kernel" in n for n in hfpatch.status(model).notes)
        steps = [e for e in trainer.state.log_history if "loss" in e]
        return torch.tensor([[e["loss"], e["grad_norm"]] for e in steps])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hfpatch")
        torch.testing.assert_close(logged(True), logged(False), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "LlamaMLP", "NewGELUActivation"])
def test_switched_nested_and_changed(name: str) -> None:
    """Each call is what it is where it stands, whatever came before."""
    # frozen: autocast keeps casts of weights that are not, also for another dtype of its own
    pair = Pair.of(MODULES[name]().requires_grad_(False))
    x = draw(FP32)

    def same() -> torch.dtype:
        got, expected = pair.patched(x), pair.plain(x)
        assert got.dtype == expected.dtype
        # outside of autocast, fp32 throughout
        inside = torch.is_autocast_enabled("cpu")
        assert off(got, expected) <= cases.noise(*([BF16] if inside else []), FP32)
        return got.dtype

    with torch.no_grad():
        for _ in range(3):
            assert same() == FP32
            with torch.autocast("cpu", BF16):
                bf16 = same()
                with torch.autocast("cpu", enabled=False):
                    assert same() == FP32
                with torch.autocast("cpu", FP16):
                    fp16 = same()
                assert same() == bf16
            assert (bf16, fp16) == ((BF16, FP16) if name == "LlamaMLP" else (FP32, FP32))
        with torch.autocast("cpu", BF16), Kernels() as seen:
            same()
        assert len(seen.names) == 1


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


def test_another_function_is_the_originals() -> None:
    pair = Pair.of(DoubledRMSNorm(WIDTH))
    _is_the_original(pair, False, "no formula reproduces")
    with torch.no_grad():
        with Kernels() as seen:
            torch.testing.assert_close(pair.patched(draw(FP32)), pair.plain(draw(FP32)))
        assert seen.names == ["rms_norm"]


def test_another_gradient_is_the_originals() -> None:
    pair = Pair.of(OtherGradientRMSNorm(WIDTH), mode="training")
    _is_the_original(pair, True, "the original's gradient for `input` is not that of")
    check(Pair.of(OtherGradientRMSNorm(WIDTH)), draw(FP32), BF16, False)


def test_a_kernel_that_is_wrong_under_autocast() -> None:
    def mine(x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        y = nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y * 1.01 if torch.is_autocast_enabled("cpu") else y

    pair = Pair.of(nn.LayerNorm(WIDTH), kernels={"layer_norm": mine})
    _is_the_original(pair, False, "its largest error is")


def test_a_wrong_gradient_of_a_kernel() -> None:
    def mine(x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        return nn.functional.layer_norm(_Thrice.apply(x), x.shape[-1:], weight, bias, eps)

    handle = hfpatch.register(op="layer_norm", kernel=mine, name="mine", differentiable=True)
    try:
        pair = Pair.of(nn.LayerNorm(WIDTH), mode="training", kernels={"layer_norm": "mine"})
        _is_the_original(pair, True, "its largest error for `input`")
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


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm"])
def test_the_cache_of_weights(name: str) -> None:
    """Autocast casts a weight once for all calls of a region, also where the first one proved it;
    what is kept there is the model's alone."""
    pair = Pair.of(nn.Sequential(MODULES[name](), nn.Linear(WIDTH, WIDTH)), mode="training")
    forget_proofs()
    x = draw(FP32)
    with torch.autocast("cpu", BF16):
        counts = []
        for model in (pair.plain, pair.patched):
            first, second = Kernels(), Kernels()
            model(x)
            with first:
                model(x)
            with second:
                y = model(x)
            counts.append(second.casts)
            assert first.casts == second.casts
            y.float().sum().backward()
        assert counts[0] == counts[1]
    for p, q in zip(pair.plain.parameters(), pair.patched.parameters(), strict=True):
        assert p.dtype == q.dtype == FP32 and p.grad is not None and q.grad is not None
        assert off(q.grad, p.grad) <= cases.noise(BF16)


def _selective(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    keep = op in products
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "saved tensors": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_selective),
    },
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm"])
@pytest.mark.filterwarnings("ignore:hfpatch")  # a norm in "inference" hands over
def test_proven_inside_of_a_checkpoint(name: str, kind: str, mode: str) -> None:
    """It counts and keeps what happens in its forward, to find the same when it runs again."""
    forget_proofs()
    pair = Pair.of(MODULES[name](), mode=mode)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = draw(FP32).requires_grad_()
        with torch.autocast("cpu", BF16):
            y = checkpoint(model, x, **CHECKPOINTS[kind])
        return (
            list(torch.autograd.grad(y.float().pow(2).sum(), [x, *model.parameters()]))
            if (kind != "reentrant")
            else _backward(y, x, model)
        )

    for got, expected in zip(gradients(pair.patched), gradients(pair.plain), strict=True):
        assert got.dtype == expected.dtype and off(got, expected) <= cases.noise(BF16)


def _backward(y: torch.Tensor, x: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    y.float().pow(2).sum().backward()
    return [g for t in (x, *model.parameters()) if (g := t.grad) is not None]


def test_proven_in_inference_mode() -> None:
    forget_proofs()
    pair = Pair.of(LlamaRMSNorm(WIDTH), mode="training")
    with torch.inference_mode(), torch.autocast("cpu", BF16):
        torch.testing.assert_close(pair.patched(draw(FP32)), pair.plain(draw(FP32)))
    check(pair, draw(FP32), BF16, True)


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


def test_compiled() -> None:
    """While compiling, the originals: the graph is the unpatched model's."""
    pair = Pair.of(MODULES["LlamaMLP"]())
    x = draw(FP32)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(pair.patched, backend=backend, fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        expected = pair.plain(x)
        for _ in range(2):  # not proven, and proven
            torch._dynamo.reset()
            assert torch.equal(compiled(x), expected)
            pair.patched(x)
        assert targets and not any("hfpatch" in t for t in targets)
        with Kernels() as seen:
            pair.patched(x)
        assert seen.names == ["gated"]


def test_parts_of_blocks() -> None:
    """A fused block hands over, and says so; in training its parts run their own kernels."""
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
    assert "`BasicTransformerBlock` under autocast: the original, not fused" in notes
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


def test_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is the original's, and the next one tries again."""
    from hfpatch import probe

    pair, x, prove = Pair.of(LlamaRMSNorm(WIDTH)), draw(FP32), probe.prove_autocast
    forget_proofs()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError

    pair = Pair.of(LlamaRMSNorm(WIDTH))
    monkeypatch.setattr(probe, "prove_autocast", fails)
    with pytest.warns(RuntimeWarning, match="no memory to prove its kernel with float32 input"):
        got = call(pair.patched, x, BF16, False)[0]
    assert torch.equal(got, call(pair.plain, x, BF16, False)[0])
    monkeypatch.setattr(probe, "prove_autocast", prove)
    check(pair, x, BF16, False)


def test_what_is_set_meanwhile(capsys: Any) -> None:
    """A setting that is no longer the proven one, as without autocast."""
    pair = Pair.of(LlamaRMSNorm(WIDTH))
    check(pair, draw(FP32), BF16, False)
    pair.patched[0].variance_epsilon = pair.plain[0].variance_epsilon = 0.5
    with pytest.warns(RuntimeWarning, match="got other settings"):
        got = call(pair.patched, draw(FP32), BF16, False)[0]
    assert torch.equal(got, call(pair.plain, draw(FP32), BF16, False)[0])


def test_gradients_in_inference_mode_are_the_originals() -> None:
    pair, x = Pair.of(LlamaRMSNorm(WIDTH)), draw(FP32)
    expected = call(pair.plain, x, BF16, True)
    with pytest.warns(RuntimeWarning, match="mode='training'"):
        got = call(pair.patched, x, BF16, True)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][k], g) for k, g in expected[1].items())


def _plain_tensors(norm: nn.Module) -> None:
    """As FSDP1 leaves a module: tensors beside `_parameters`."""
    for name in [k for k, p in norm._parameters.items() if p is not None]:
        value = getattr(norm, name).detach().clone()
        delattr(norm, name)
        setattr(norm, name, value)


class Same(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["LlamaRMSNorm", "LayerNorm"])
@pytest.mark.parametrize(
    ("move", "used"),
    [
        (_plain_tensors, True),
        (lambda n: prune.l1_unstructured(n, "weight", amount=0.3), True),
        (lambda n: parametrize.register_parametrization(n, "weight", Same()), False),
    ],
    ids=["fsdp1", "pruned", "parametrized"],
)
def test_a_weight_that_is_no_parameter(move: Any, used: bool, name: str, mode: str) -> None:
    pair = Pair.of(MODULES[name](), mode=mode)
    for model in (pair.plain, pair.patched):
        for p in model.parameters():
            nn.init.normal_(p, 1.0, 0.5, generator=torch.Generator().manual_seed(3))
    x = draw(FP32)
    with torch.no_grad():
        pair.patched(x)
        for model in (pair.plain, pair.patched):
            move(model[0])
        for autocast in (False, True):
            with torch.autocast("cpu", BF16, enabled=autocast):
                pair.patched(x)  # proves it
                with Kernels() as seen:
                    got = pair.patched(x)
                expected = pair.plain(x)
            assert off(got, expected) <= cases.noise(FP32)
            assert bool(seen.names) == used


def test_a_bias_that_is_no_parameter() -> None:
    pair = Pair.of(nn.LayerNorm(WIDTH))
    for model in (pair.plain, pair.patched):
        nn.init.normal_(model[0].bias, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    x = draw(FP32)
    with torch.no_grad():
        pair.patched(x), pair.patched(x)
        for model in (pair.plain, pair.patched):
            prune.l1_unstructured(model[0], "bias", amount=0.3)
        assert off(pair.patched(x), pair.plain(x)) <= cases.noise(FP32)


def test_a_copy_beside_accelerates_hooks() -> None:
    """They copy what a forward holds into their own."""
    pair = Pair.of(MODULES["LlamaRMSNorm"]())
    add_hook_to_module(pair.patched[0], ModelHook())
    x = draw(FP32)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert off(copy.deepcopy(pair.patched)(x), pair.plain(x)) <= cases.noise(FP32)


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


def test_hooks_on_all_modules_see_no_proof() -> None:
    forget_proofs()
    pair = Pair.of(MODULES["LlamaMLP"](), mode="training")
    x = draw(FP32)
    with FlopCounterMode(display=False), pytest.warns(RuntimeWarning, match="hooks on all modules"):
        call(pair.patched, x, BF16, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(pair, x, BF16, True)
