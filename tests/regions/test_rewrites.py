"""Which ways of writing a formula become one op, and which do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regions.families import build
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeModel

import hfpatch
from hfpatch.regions.capture import capture
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.nodes import Attend, Fused, value
from hfpatch.regions.rules import rewrite
from hfpatch.regions.structure import take_apart

Tensor = torch.Tensor
D = 16


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight, self.bias = (nn.Parameter(torch.randn(D, generator=g)) for _ in range(2))
        self.one = nn.Parameter(torch.randn(1, generator=g))
        self.eval().requires_grad_(False)


def ops_of(
    code: Callable[..., Tensor], dtype: torch.dtype = torch.float32, off: float = 1e-7
) -> list[str]:
    """The ops that a forward of `(self, x [B, T, D], y like x, per sample [B, 1, D])` becomes; what
    they give is what the code gives."""
    return [n.target.op for n in graph_of(code, dtype, off).nodes if isinstance(n.target, Fused)]


def graph_of(
    code: Callable[..., Tensor], dtype: torch.dtype = torch.float32, off: float = 1e-7
) -> Any:
    """The rewritten graph of the same; `off`: of code that computes in fp32 in any case."""
    toy = type("Toy", (_Toy,), {"forward": code})().to(dtype)
    g = torch.Generator().manual_seed(1)
    tensors = [torch.randn(s, generator=g).to(dtype) for s in ((3, 5, D), (3, 5, D), (3, 1, D))]
    structure, taken, _ = take_apart(tensors, {})
    found = capture(toy, structure, taken, {}, ())
    rewrite(found.graph, frozenset())
    wide = [t.double() for t in tensors]
    (out,) = Interpreter(toy, torch.float64).run(found.graph, wide)
    torch.testing.assert_close(out, toy.double()(*wide), rtol=off, atol=off)
    return found.graph


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda s, x, y, m: x * s.weight + s.bias, ["mul_add"]),
        (lambda s, x, y, m: s.bias + s.weight * x, ["mul_add"]),
        (lambda s, x, y, m: x * (1 + m) + m, ["mul_add"]),
        (lambda s, x, y, m: (x + y) * s.weight + m, ["mul_add"]),
        (lambda s, x, y, m: x + s.weight * y, ["gate_residual"]),
        (lambda s, x, y, m: x * y + s.bias, []),  # no factor a column
        (lambda s, x, y, m: x * s.weight + y[:, :1], ["mul_add"]),
        (lambda s, x, y, m: x * s.one + s.bias, []),
        (lambda s, x, y, m: x * s.weight + m[:1, 0], ["mul_add"]),
        (lambda s, x, y, m: (x * s.weight).add(s.bias, alpha=2), []),
        (lambda s, x, y, m: (p := x * s.weight) + s.bias + p, []),  # the product is read twice
        (lambda s, x, y, m: x * s.weight - s.bias, []),
        (lambda s, x, y, m: m * s.weight + x[:, :1], []),  # the same values, at another place
    ],
)
def test_products_and_sums(code: Callable[..., Tensor], expected: list[str]) -> None:
    found = ops_of(code)
    if not expected:
        assert "mul_add" not in found
    else:
        assert found == expected


def _late(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """What modulates the norm is made of the sum."""
    total = x + m * y
    scale = total.mean(1, keepdim=True)
    return total + (F.layer_norm(total, (D,)) * (1 + scale) + s.bias)


def _between(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """The sum is read before what modulates its norm is there; that is not made of it."""
    total = x + m * y
    other = torch.sin(total)
    scale = torch.sin(m)
    return other + (F.layer_norm(total, (D,)) * (1 + scale) + s.bias) + total


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            lambda s, x, y, m: F.layer_norm(x + m * y, (D,)) * (1 + m) + s.bias,
            ["gate_residual_norm_modulate"],
        ),
        (
            lambda s, x, y, m: (
                (t := x + y * s.weight)
                + (F.layer_norm(t, (D,), s.weight, s.bias, 1e-3) * (s.weight + 1) + m)
            ),
            ["gate_residual_norm_modulate"],
        ),
        (
            lambda s, x, y, m: F.layer_norm(x + y, (D,)) * (1 + m) + s.bias,
            ["gate_residual_norm_modulate"],  # its gate is 1
        ),
        (
            lambda s, x, y, m: F.layer_norm(x + m * y, (D,)) * m + s.bias,
            ["gate_residual_norm_modulate", "mul_add"],  # a norm that nothing modulates
        ),
        (
            lambda s, x, y, m: F.layer_norm(y, (D,)) * (1 + m) + (x + m * y)[:, :1],
            ["gate_residual", "norm_modulate"],  # the norm is of something else
        ),
        (_late, ["gate_residual", "norm_modulate"]),
        (_between, ["gate_residual", "norm_modulate"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_sum_and_its_modulated_norm(
    code: Callable[..., Tensor], expected: list[str], dtype: torch.dtype
) -> None:
    found = ops_of(code, dtype)
    assert [op for op in found if op in _MODULATED] == [op for op in expected if op in _MODULATED]


_MODULATED = ("gate_residual", "norm_modulate", "gate_residual_norm_modulate")


def _fp32_modulation(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """As Wan has it: norm and modulation in fp32, rounded back."""
    scale, shift = m.float(), s.bias.float()
    return (F.layer_norm(x.float(), (D,)) * (1 + scale) + shift).type_as(x)


def _fp32_gate(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return (x.float() + y * m.float()).type_as(x)


def _fp32_gate_widened(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return (x.float() + y.float() * m.float()).type_as(x)


def _fp32_sum_and_norm(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    total = (x.float() + y * m.float()).type_as(x)
    normed = F.layer_norm(total.float(), (D,), s.weight.float(), s.bias.float())
    return torch.cat((total, normed.type_as(x)), 1)


def _fp32_kept(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """What is rounded is read in fp32 too."""
    total = x.float() + y.float() * m.float()
    return total.type_as(x) + total.sin().type_as(x)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (_fp32_modulation, ["norm_modulate"]),
        (_fp32_gate, ["gate_residual"]),
        (_fp32_gate_widened, ["gate_residual"]),
        (_fp32_kept, ["gate_residual"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_fp32_of_half_tensors(
    code: Callable[..., Tensor], expected: list[str], dtype: torch.dtype
) -> None:
    assert ops_of(code, dtype, 1e-5) == expected


def test_the_norm_of_a_sum_in_fp32() -> None:
    """In fp32 its weights are parameters; in bf16 they are made of such, which no op is given."""
    assert ops_of(_fp32_sum_and_norm, off=1e-5) == ["gate_residual_norm_modulate"]
    assert "gate_residual" in ops_of(_fp32_sum_and_norm, torch.bfloat16, 1e-5)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda s, x, y, m: F.layer_norm(x, (D,)) * (1 + m), ["norm_modulate"]),
        (lambda s, x, y, m: (m + 1) * F.layer_norm(x, (D,), s.weight), ["norm_modulate"]),
        (lambda s, x, y, m: F.layer_norm(x, (D,)) * (2 + m), []),
        (lambda s, x, y, m: x + F.layer_norm(y, (D,), s.weight, s.bias), ["norm_modulate"]),
        (lambda s, x, y, m: F.layer_norm(y, (D,)) + x, ["norm_modulate"]),
        # a gate for each sample is none of the norm's weight
        (lambda s, x, y, m: x + m * F.layer_norm(y, (D,)), ["gate_residual"]),
        (
            lambda s, x, y, m: x + s.bias * F.layer_norm(y, (D,), s.weight),
            ["norm_modulate"],
        ),
        (lambda s, x, y, m: (n := F.layer_norm(y, (D,))) + x + n, []),  # it is read twice
        (lambda s, x, y, m: x / 1.0 + m * (y * 1), ["gate_residual"]),
        (lambda s, x, y, m: x / 2.0 + m * (y * 1), ["gate_residual"]),
        # one norm that is modulated twice
        (
            lambda s, x, y, m: (
                ((n := F.layer_norm(x, (D,))) * (1 + m) + s.bias).sin() + (n * (1 + s.bias) + m)
            ),
            ["norm_modulate", "norm_modulate"],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_are_modulated_or_added(
    code: Callable[..., Tensor], expected: list[str], dtype: torch.dtype
) -> None:
    assert ops_of(code, dtype) == expected


def test_a_modulation_is_given_as_the_code_has_it_for_each_sample() -> None:
    """[B, D] that gets a dimension for the sum is handed over without, which saves a view."""

    def code(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        scale, shift = m.squeeze(1).sin(), m.squeeze(1).cos()
        return F.layer_norm(x, (D,)) * (1 + scale[:, None]) + shift[:, None]

    found = graph_of(code)
    (fused,) = [n for n in found.nodes if isinstance(n.target, Fused)]
    assert [a.meta["val"].dim() for a in fused.args[1:3]] == [2, 2]


def test_a_size_is_read_off_an_input() -> None:
    """Not off what would be computed for it alone."""

    def code(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        both = torch.cat((x.sin(), y), 1)
        return x.cos()[:, : both.shape[1] - x.shape[1]]

    found = graph_of(code)
    assert not any(n.target is torch.ops.aten.cat.default for n in found.nodes)
    assert not any(n.target is torch.ops.aten.sin.default for n in found.nodes)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda s, x, y, m: F.gelu(x + s.bias), ["add_gelu"]),
        (lambda s, x, y, m: F.gelu(s.bias + x, approximate="tanh"), ["add_gelu"]),
        (lambda s, x, y, m: F.silu(x + s.bias), ["add_silu"]),
        (lambda s, x, y, m: F.relu(x + s.bias), []),
        (lambda s, x, y, m: F.gelu(x + m), []),  # a bias a sample
        (lambda s, x, y, m: F.gelu(x + s.one), []),
        (lambda s, x, y, m: F.gelu(x + y), []),
        (lambda s, x, y, m: F.gelu(h := x + s.bias) + h, []),
        (lambda s, x, y, m: F.silu(x + s.bias) * y, ["gated"]),
    ],
)
def test_biases_and_activations(code: Callable[..., Tensor], expected: list[str]) -> None:
    assert ops_of(code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda s, x, y, m: F.silu(x.clamp(max=1.5)) * y.clamp(-1.5, 1.5), ["gated_clamped"]),
        (lambda s, x, y, m: y.clamp_max(0.5) * F.gelu(x), ["gated_clamped"]),
        (lambda s, x, y, m: F.relu(x).clamp(max=1.5) * y.clamp_min(-1.5), ["gated_clamped"]),
        (lambda s, x, y, m: (y.clamp(-1.0, 1.0) + 1.0) * F.silu(x), ["gated_clamped"]),
        (
            lambda s, x, y, m: (y + 1) * ((g := x.clamp(max=0.7)) * torch.sigmoid(g * 1.702)),
            ["gated_clamped"],
        ),
        (lambda s, x, y, m: F.silu(x) * y, ["gated"]),
        (lambda s, x, y, m: (F.silu(x) * y).clamp(max=1.5), ["gated"]),
        (lambda s, x, y, m: F.silu(x) * (y + 1.0).clamp(max=0.7), ["gated_clamped"]),
        (lambda s, x, y, m: F.silu(x.clamp(max=s.one.squeeze())) * y, ["gated"]),
        (lambda s, x, y, m: F.silu(g := x.clamp(max=0.5)) * y + g, ["gated"]),
        (lambda s, x, y, m: x * torch.sigmoid(x.clamp(max=0.5)) * y.clamp(max=0.5), []),
    ],
)
def test_clamps(code: Callable[..., Tensor], expected: list[str]) -> None:
    assert ops_of(code) == expected


def test_another_dtype_stays_what_it_is() -> None:
    """A wider bias makes a wider sum."""

    def code(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return F.gelu(x + s.bias.float()) + (x * s.weight.float() + s.bias.float())

    assert ops_of(code, torch.bfloat16) == []


@pytest.mark.parametrize(("name", "op"), [("mobilebert", "mul_add"), ("convnextv2", "mul_add")])
def test_models_that_have_them(name: str, op: str, kernels_module: object) -> None:
    model, inputs = build(name)
    hfpatch.apply(model, decoding=False, blocks=True)
    with torch.no_grad():
        model(**inputs(2, 9))
    candidates = hfpatch.status(model).plan.candidates
    assert candidates and all(op in c.found and c.state == "fused" for c in candidates), candidates


def test_a_layer_of_one_number_is_not_put_beside_wide_ones(kernels_module: object) -> None:
    """The rows of such a product would begin at odd addresses."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 99,
    }  # fmt: skip
    model = Qwen2MoeModel(Qwen2MoeConfig(**sizes)).eval()
    hfpatch.apply(model, decoding=False, blocks=True)
    with torch.no_grad():
        model(torch.arange(9)[None], use_cache=False)
    (layer,) = hfpatch.status(model).plan.candidates
    products = [found for found in layer.found if found.endswith("products as one")]
    assert products == ["3 products as one", "2 products as one"]  # q, k, v; gate, up


@pytest.mark.parametrize(("times", "few"), [((1, 1, 1, 2, 1), 2), ((1, 1, 1, 1, 1), 4)])
def test_heads_that_are_repeated_before_they_are_exchanged_with_tokens(
    times: tuple[int, ...], few: int
) -> None:
    """Lumina 2's grouped keys: `repeat` of [B, S, H, 1, D]. Attention takes them as they are."""

    def code(self: _Toy, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        q = (x * self.weight).unflatten(-1, (4, 4))
        kv = (x * self.bias)[..., : 4 * few].unflatten(-1, (few, 4))
        k, v = (t.unsqueeze(3).repeat(*times).flatten(2, 3) for t in (kv, kv + 1))
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads)

    toy = type("Toy", (_Toy,), {"forward": code})()
    tensors = [torch.randn(3, 5, D), torch.randn(3, 5, D), torch.randn(3, 1, D)]
    structure, taken, _ = take_apart(tensors, {})
    found = capture(toy, structure, taken, {}, ())
    rewrite(found.graph, frozenset())
    (attend,) = (n for n in found.graph.nodes if isinstance(n.target, Attend))
    assert [value(n).shape[1] for n in attend.args[:3]] == [4, few, few]
    assert not any(n.target is torch.ops.aten.repeat.default for n in found.graph.nodes)
    (out,) = Interpreter(toy, torch.float64).run(found.graph, [t.double() for t in tensors])
    torch.testing.assert_close(out, toy.double()(*(t.double() for t in tensors)))
