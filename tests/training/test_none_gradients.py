"""Where what follows gives no gradient (None), there is none before it either: a `.grad` that stays
None is left alone by optimizers, one that is 0 is decayed. All as in the unpatched twin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_layers import batch, build, layers_of, lora
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hfpatch
import hfpatch.loss

Change = Callable[[Any], object]


class _End(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def ended(x: Tensor) -> Tensor:
    found: Any = _End.apply
    return found(x)  # type: ignore[no-any-return]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def assert_same_gradients(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same ones are None, and the others have the same values."""
    assert {n for n, g in ours.items() if g is None} == {n for n, g in theirs.items() if g is None}
    whole = max((g.norm() for g in theirs.values() if g is not None), default=0.0)
    for name, g in theirs.items():
        if g is not None:
            assert (ours[name] - g).norm() <= 2e-5 * (g.norm() + 1e-2 * whole), name


def gradients(model: Any) -> dict[str, Any]:
    return {n: p.grad for n, p in model.named_parameters()}


# --- modules --------------------------------------------------------------------------------------


SMALL = LlamaConfig(hidden_size=64, intermediate_size=96)
MODULES: dict[str, Callable[[], nn.Module]] = {
    "RMS norm": lambda: LlamaRMSNorm(64),
    "layer norm": lambda: nn.LayerNorm(64),
    "gated MLP": lambda: LlamaMLP(SMALL),
    "activation": NewGELUActivation,
    "torch's activation": lambda: nn.GELU(approximate="tanh"),
    "several": lambda: nn.Sequential(nn.LayerNorm(64), LlamaMLP(SMALL), LlamaRMSNorm(64)),
}


class _Around(nn.Module):
    def __init__(self, inner: nn.Module, end: bool) -> None:
        super().__init__()
        self.inner, self.end = inner, end

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return ended(y) if self.end else y


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_module(name: str, end: bool) -> None:
    torch.manual_seed(0)
    twin = _Around(MODULES[name](), end)
    model = copy.deepcopy(twin)
    assert hfpatch.apply(model, mode="training", kernels="local").swaps
    found = []
    for each in (model, twin):
        x = draw(4, 64).requires_grad_()
        (each(x) ** 3).sum().backward()
        found.append({"input": x.grad, **gradients(each)})
    assert_same_gradients(*found)
    assert all((g is None) == end for g in found[0].values())


# --- models ---------------------------------------------------------------------------------------


def behind(path: str) -> Change:
    """No gradient goes back to what the module at `path` returns."""

    def change(model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.get_submodule(path).register_forward_hook(lambda m, args, y: ended(y))

    return change


def assert_as_twin(twin: Any, change: Change, *, graph: bool = False) -> dict[str, Any]:
    """Returns the gradients."""
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, [s.reason for s in report.skips]
    found = []
    ids = batch()
    for each in (model, twin):
        change(each)
        loss = each(input_ids=ids, labels=ids, use_cache=False).loss
        parameters = [p for p in each.parameters() if p.requires_grad]
        names = [n for n, p in each.named_parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, parameters, create_graph=graph, allow_unused=True)
        found.append(dict(zip(names, grads, strict=True)))
    assert_same_gradients(*found)
    return found[0]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("path", ["model.layers.0", "model.norm"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Gemma2", "Cohere"])
def test_layers(family: str, path: str, graph: bool) -> None:
    found = assert_as_twin(build(family, tie_word_embeddings=False), behind(path), graph=graph)
    of_first = [g for n, g in found.items() if ".layers.0." in n]
    of_last = [g for n, g in found.items() if ".layers.1." in n]
    assert all(g is None for g in of_first)
    assert all((g is None) == (path == "model.norm") for g in of_last)
    assert found["lm_head.weight"] is not None


@pytest.mark.parametrize("path", ["layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"])
def test_a_layer_that_calls_a_product(path: str) -> None:
    """A hook on it has its half call the modules that are there."""
    assert_as_twin(build("Qwen3"), behind(f"model.{path}"))


@pytest.fixture
def _attention() -> Iterator[None]:
    """Attention functions through which queries, keys or values have no gradient."""

    def of(without: str) -> Any:
        def attention(
            module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any
        ) -> tuple[Tensor, None]:
            parts = {"q": q, "k": k, "v": v}
            q, k, v = (ended(t) if name in without else t for name, t in parts.items())
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs["scaling"])
            return y.transpose(1, 2), None

        return attention

    names = ["q", "k", "v", "qk", "kv", "qkv"]
    for name in names:
        ALL_ATTENTION_FUNCTIONS[f"without_{name}"] = of(name)
    yield
    for name in names:
        del ALL_ATTENTION_FUNCTIONS[f"without_{name}"]


def attends(without: str) -> Change:
    def change(model: Any) -> None:
        model.config._attn_implementation = f"without_{without}"

    return change


@pytest.mark.usefixtures("_attention")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("without", ["q", "k", "v", "qk", "kv", "qkv"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Olmo2", "Phi3"])
def test_some_of_queries_keys_and_values(family: str, without: str, graph: bool) -> None:
    """Of products that are apart, the others have gradients."""
    found = assert_as_twin(build(family), attends(without), graph=graph)
    if family != "Phi3":
        for name in "qkv":
            of_product = [g for n, g in found.items() if f".{name}_proj." in n]
            assert of_product and all((g is None) == (name in without) for g in of_product)


@pytest.mark.usefixtures("_attention")
@pytest.mark.parametrize("without", ["q", "kv"])
@pytest.mark.parametrize("targets", [["q_proj", "k_proj"], ["q_proj", "k_proj", "v_proj"]])
def test_some_of_queries_keys_and_values_with_adapters(without: str, targets: list[str]) -> None:
    found = assert_as_twin(lora(build(), target_modules=targets), attends(without))
    for name, g in found.items():
        assert (g is None) == any(f".{n}_proj." in name for n in without)


@pytest.mark.usefixtures("_attention")
def test_queries_and_keys_of_products_that_are_called() -> None:
    """RoPE is one function of both."""

    def change(model: Any) -> None:
        attends("k")(model)
        for layer in model.model.layers:
            layer.self_attn.q_proj.register_forward_hook(lambda m, args, y: y)

    assert_as_twin(build(), change)


@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and of that very lack
def test_quantized_linears() -> None:
    """They have no gradient, so nothing has one."""
    if torch.backends.quantized.engine == "none":
        pytest.skip("no quantized products on this system")
    found = []
    twin = build()
    for patched in (True, False):
        model = copy.deepcopy(twin)
        if patched:
            hfpatch.apply(model, mode="training")
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
        ids = batch()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append(gradients(model))
    assert all(g is None for g in found[1].values())
    assert_same_gradients(*found)


def test_weights_are_not_decayed() -> None:
    twin = build(tie_word_embeddings=False)
    before = {n: p.detach().clone() for n, p in twin.named_parameters()}
    model = copy.deepcopy(twin)
    hfpatch.apply(model, mode="training")
    ids = batch()
    for each in (model, twin):
        behind("model.norm")(each)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        same = torch.equal(theirs, before[name])
        assert same == ("lm_head" not in name)
        assert not same or torch.equal(ours, before[name]), name


# --- losses of a head -----------------------------------------------------------------------------


def _looked_at(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: heard.append(g))
    return out.loss  # type: ignore[no-any-return]


def _another(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: torch.zeros(2, 13, 99))
    return out.loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("of", [None, _looked_at, _another], ids=["no hook", "hook", "zeros"])
def test_the_loss_of_a_model(of: Any) -> None:
    """Hooks on its logits, made of it or not, are told None, and may give nothing else."""
    twin = build()
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training")
    assert any(s.op == "linear_cross_entropy" for s in report.swaps)
    ids = batch()
    outcomes = []
    for each in (model, twin):
        heard: list[Any] = []
        out = each(input_ids=ids, labels=ids)
        loss = out.loss if of is None else of(out, heard)
        said = ""
        try:
            ended(loss).backward()
        except RuntimeError as e:
            said = str(e)
        assert all(g is None for g in gradients(each).values())
        outcomes.append((heard, said))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][0] == ([None] if of is _looked_at else [])
    assert bool(outcomes[1][1]) == (of is _another)


def test_logits_that_an_operator_of_c_reads() -> None:
    """They are in autograd's graph as they are, as the result of a function of their own."""
    twin = build()
    model = copy.deepcopy(twin)
    hfpatch.apply(model, mode="training")
    for each in (model, twin):
        logits = each(input_ids=batch(), labels=batch()).logits
        ended(logits).sum().backward()
        assert all(g is None for g in gradients(each).values())


def _head_losses() -> dict[str, Callable[..., Any]]:
    target = torch.arange(6) % 5
    teacher = hfpatch.loss.Teacher(draw(6, 5, seed=3))
    cross_entropy = hfpatch.loss.linear_cross_entropy
    return {
        "mean": lambda h, w: cross_entropy(h, w, target),
        "made again": lambda h, w: cross_entropy(h, w, target, recompute=True),
        "none": lambda h, w: cross_entropy(h, w, target, reduction="none"),
        "z-loss": lambda h, w: cross_entropy(h, w, target, z_loss=0.1),
        "log-probabilities": lambda h, w: hfpatch.loss.linear_log_probs(h, w, target),
        "entropy": lambda h, w: hfpatch.loss.linear_log_probs_and_entropy(h, w, target),
        "JSD": lambda h, w: hfpatch.loss.linear_jsd(h, w, teacher),
        "TVD": lambda h, w: hfpatch.loss.linear_tvd(h, w, teacher),
    }


def assert_no_gradients(y: Any, leaves: list[Tensor], graph: bool) -> None:
    """Nothing comes to the leaves from what follows `y`, in whichever way it is asked for."""
    total = sum(ended(t).sum() for t in (y if isinstance(y, tuple) else (y,)))
    assert isinstance(total, Tensor)
    found = torch.autograd.grad(
        total, leaves, retain_graph=True, create_graph=graph, allow_unused=True
    )
    assert found == (None,) * len(leaves)
    total.backward()
    assert all(t.grad is None for t in leaves)
    # as of PyTorch's operators, which also ask for what is gone
    with pytest.raises(RuntimeError, match="a second time"):
        total.backward()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", _head_losses())
def test_losses_of_hidden_states(name: str, graph: bool) -> None:
    leaves = [draw(6, 8).requires_grad_(), draw(5, 8, seed=1).requires_grad_()]
    loss = _head_losses()[name](*leaves)
    assert_no_gradients(loss, leaves, graph)


# --- operators ------------------------------------------------------------------------------------


def _operators() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Of the kernels and what they are given that may have a gradient."""
    x, w, b = draw(4, 3, 8), draw(8, seed=1), draw(8, seed=2)
    rows, target = draw(12, 9), torch.arange(12) % 9
    q, k = draw(2, 5, 4, 8), draw(2, 5, 2, 8, seed=1)
    angles = draw(1, 5, 4, seed=2)
    cos, sin = angles.cos(), angles.sin()
    return {
        "rms_norm": (lambda m, *t: m.rms_norm(*t), [x, w, b]),
        "layer_norm": (lambda m, *t: m.layer_norm(*t), [x, w, b]),
        "gelu": (lambda m, t: m.gelu(t), [x]),
        "silu": (lambda m, t: m.silu(t), [x]),
        "gated": (lambda m, *t: m.gated(*t), [x, x + 1]),
        "gated_packed": (lambda m, t: m.gated_packed(t), [x]),
        "cross_entropy": (lambda m, t: m.cross_entropy(t, target), [rows]),
        "cross_entropy of rows": (lambda m, t: m.cross_entropy(t, target, "none"), [rows]),
        "rope": (lambda m, t: m.rope(t, cos, sin), [q]),
        "rope_qk": (lambda m, *t: m.rope_qk(*t, cos, sin), [q, k]),
        "qk_norm_rope": (lambda m, *t: m.qk_norm_rope(*t, cos, sin), [q, k, w, b]),
        "add_gelu": (lambda m, *t: m.add_gelu(*t), [x, b]),
        "add_silu": (lambda m, *t: m.add_silu(*t), [x, b]),
        "mul_add": (lambda m, *t: m.mul_add(*t), [x, w, b]),
        "softmax": (lambda m, t: m.softmax(t), [x]),
        "load_balancing_loss": (lambda m, t: m.load_balancing_loss(t, 2), [rows]),
    }


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", _operators())
def test_operators(name: str, graph: bool, kernels_module: ModuleType) -> None:
    function, values = _operators()[name]
    leaves = [t.clone().requires_grad_() for t in values]
    y = function(kernels_module, *leaves)
    assert_no_gradients(y, leaves, graph)


@pytest.mark.parametrize("name", ["silu", "rms_norm", "softmax", "add_silu"])
def test_what_was_written_to_is_an_error_even_so(name: str, kernels_module: ModuleType) -> None:
    function, values = _operators()[name]
    leaves = [t.clone().requires_grad_() for t in values]
    kept = [t * 1 for t in leaves]
    y = function(kernels_module, *kept)
    written = {"softmax": y}.get(name, kept[0])  # it keeps its result
    total = ended(y).sum()
    with torch.no_grad():
        written.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_one_of_queries_and_keys(which: int, graph: bool, kernels_module: ModuleType) -> None:
    function, values = _operators()["rope_qk"]
    found = []
    for end in (False, True):
        leaves = [t.clone().requires_grad_() for t in values]
        results = list(function(kernels_module, *leaves))
        if end:
            results[which] = ended(results[which])
        total = sum((t**3).sum() for t in results)
        assert isinstance(total, Tensor)
        grads = torch.autograd.grad(total, leaves, create_graph=graph, allow_unused=True)
        other = grads[1 - which]
        assert other is not None and (grads[which] is None) == end
        found.append(other)
        if graph:
            found.append(torch.autograd.grad(other.square().sum(), leaves[1 - which])[0])
    half = len(found) // 2
    for ours, theirs in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(ours, theirs)
