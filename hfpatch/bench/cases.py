"""What is measured: one row per op. A new op is one `Case`, at the end of its group, or has an
example with its formula (`hfpatch.ops.base.Example`).

`ours` is called with the kernel package and the inputs, every peer with the inputs alone. The
inputs are written as in `hfpatch.bench.inputs`, the shapes are a kind of `hfpatch.bench.shapes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hfpatch.bench import formulas, liger
from hfpatch.bench.formulas import EPS
from hfpatch.ops import OPS, Op

Function = Callable[..., Any]
Mode = Literal["forward", "backward", "train"]


@dataclass(frozen=True)
class Case:
    """One op as it is measured.

    Attributes:
        name: unique; its first word is the operator that the kernel package must have.
        inputs: see `hfpatch.bench.inputs`; every tensor counts as read once.
        shapes: kind of shapes.
        ours: `(package, *inputs)`.
        eager: the formula as HuggingFace modules have it; also what torch.compile gets.
        torch: PyTorch's fused operator, where `eager` is not that already.
        liger: Liger's.
        mode: "forward"; "backward" is the gradient alone: the first input is that of the result,
            and peers are differentiated by autograd; "train" is a scalar and its gradient in one.
        outputs: how many of the results are wanted; the others are scratch.
        adjust: the inputs made consistent with each other, where random ones are not.
        in_place: ours writes over its inputs.
        extra_dtypes: kind of shapes that are measured in the GPU run's other dtypes too.
    """

    name: str
    inputs: str
    shapes: str
    ours: Function
    eager: Function
    torch: Function | None = None
    liger: Function | None = None
    mode: Mode = "forward"
    outputs: int | None = None
    adjust: Function | None = None
    in_place: bool = False
    extra_dtypes: str = ""

    @property
    def op(self) -> str:
        return self.name.split()[0]


def case_of(op: Op) -> Case:
    """What is measured of an op that has an example."""
    assert op.example is not None
    return Case(
        op.name,
        op.example.inputs,
        op.example.shapes,
        lambda kernels, *inputs: getattr(kernels, op.name)(*inputs),
        op.example.eager,
    )


NORMS = (
    Case(
        "rms_norm",
        "x B S D; weight D",
        "norm",
        lambda k, x, w: k.rms_norm(x, w, None, EPS, 0.0, "input"),
        formulas.llama_norm,
        torch=formulas.fused_rms_norm,
        liger=liger.rms_norm,
        extra_dtypes="norm dtypes",
    ),
    Case(
        "layer_norm",
        "x B S D; weight D; bias D",
        "norm few",
        lambda k, x, w, b: k.layer_norm(x, w, b, EPS),
        formulas.layer_norm,
        liger=liger.layer_norm,
        extra_dtypes="norm dtypes",
    ),
    Case(
        "add_rms_norm",
        "x B S D; residual B S D; weight D",
        "norm few",
        lambda k, x, r, w: k.add_rms_norm(x, r, w, None, EPS, 0.0, "input"),
        formulas.add_llama_norm,
        torch=formulas.add_fused_rms_norm,
        liger=liger.add_rms_norm,
    ),
    Case(
        "add_layer_norm",
        "x B S D; residual B S D; weight D; bias D",
        "norm few",
        lambda k, x, r, w, b: k.add_layer_norm(x, r, w, b, EPS),
        formulas.add_layer_norm,
    ),
    Case(
        "gated_rms_norm gate first",
        "x B S D; gate B S D; weight D",
        "gated norm",
        lambda k, x, g, w: k.gated_rms_norm(x, g, w, EPS),
        formulas.bamba_norm,
    ),
    Case(
        "gated_rms_norm norm first",
        "x B S D; gate B S D; weight D",
        "gated norm",
        lambda k, x, g, w: k.gated_rms_norm(x, g, w, EPS, 0, True),
        formulas.qwen3_next_norm,
    ),
    Case(
        "gated_rms_norm groups",
        "x B S D; weight D",
        "gated norm",
        lambda k, x, w: k.gated_rms_norm(x, None, w, EPS, min(128, x.shape[-1])),
        formulas.group_rms_norm,
    ),
    Case(
        "rms_norm_silu",
        "x R D; addend D",
        "videos",
        lambda k, x, b: k.rms_norm_silu(x, b, None, None, None, EPS),
        formulas.rms_norm_silu,
    ),
)

ADALN = (
    Case(
        "norm_modulate rms",
        "x B S D; scale B 1 D; shift B 1 D",
        "adaln",
        lambda k, x, scale, shift: k.norm_modulate(x, scale, shift, None, None, EPS, "rms"),
        formulas.modulated_rms,
    ),
    Case(
        "norm_modulate layer",
        "x B S D; scale B 1 D; shift B 1 D",
        "adaln",
        lambda k, x, scale, shift: k.norm_modulate(x, scale, shift, None, None, EPS, "layer"),
        formulas.modulated_layer,
    ),
    Case(
        "gate_residual",
        "residual B S D; gate B 1 D; x B S D",
        "adaln",
        lambda k, r, g, x: k.gate_residual(r, g, x),
        formulas.gate_residual,
    ),
    Case(
        "gate_residual_norm_modulate rms",
        "residual B S D; gate B 1 D; x B S D; scale B 1 D; shift B 1 D",
        "adaln",
        lambda k, *a: k.gate_residual_norm_modulate(*a, None, None, EPS, "rms"),
        formulas.gated_modulated_rms,
    ),
    Case(
        "gate_residual_norm_modulate layer",
        "residual B S D; gate B 1 D; x B S D; scale B 1 D; shift B 1 D",
        "adaln",
        lambda k, *a: k.gate_residual_norm_modulate(*a, None, None, EPS, "layer"),
        formulas.gated_modulated_layer,
    ),
)

ACTIVATIONS = (
    Case("gelu tanh", "x R D", "wide", lambda k, x: k.gelu(x, "tanh"), formulas.gelu_tanh),
    Case("gelu erf", "x R D", "wide", lambda k, x: k.gelu(x), F.gelu),
    Case("silu", "x R D", "wide", lambda k, x: k.silu(x), F.silu),
    Case(
        "gated silu",
        "gate R D; up R D",
        "wide",
        lambda k, g, u: k.gated(g, u, "silu"),
        formulas.swiglu,
        liger=liger.swiglu,
    ),
    Case(
        "gated gelu_tanh",
        "gate R D; up R D",
        "wide",
        lambda k, g, u: k.gated(g, u, "gelu_tanh"),
        formulas.geglu_tanh,
        liger=liger.geglu_tanh,
    ),
    Case(
        "gated_clamped silu",
        "gate R D; up R D",
        "wide",
        lambda k, g, u: k.gated_clamped(g, u, "silu", None, 10.0, -10.0, 10.0),
        formulas.clamped_swiglu,
    ),
    Case(
        "gated_packed gelu",
        "x R 2*D",
        "packed",
        lambda k, x: k.gated_packed(x, "gelu", False),
        formulas.packed_geglu,
    ),
)

ROPE = (
    Case(
        "rope interleaved",
        "x B S H D; cos S D fp32 pairs; sin S D fp32 pairs",
        "joint heads",
        lambda k, x, cos, sin: k.rope(x, cos, sin, 1, True),
        formulas.flux_rope,
    ),
    Case(
        "rope_qk half",
        "q B S H D; k B S K D; cos B S D halves; sin B S D halves",
        "heads",
        lambda k, *a: k.rope_qk(*a, 1, False, 0, True),
        formulas.llama_rope_qk,
    ),
    Case(
        "rope_qk half in place",
        "q B S H D; k B S K D; cos B S D halves; sin B S D halves",
        "heads",
        lambda k, *a: k.rope_qk_(*a, 1, False, 0, True),
        formulas.llama_rope_qk,
        liger=liger.rope_qk,  # which is in place
        in_place=True,
    ),
    Case(
        "rope_qk interleaved",
        "q B S H D; k B S H D; cos S D fp32 pairs; sin S D fp32 pairs",
        "joint heads",
        lambda k, *a: k.rope_qk(*a, 1, True),
        formulas.flux_rope_qk,
    ),
    Case(
        "qk_norm_rope half",
        "q B S H D; k B S K D; q_weight D; k_weight D; cos B S D halves; sin B S D halves",
        "heads",
        lambda k, *a: k.qk_norm_rope(*a, EPS, 0.0, "input", False, 1, False, 0, True),
        formulas.qwen3_qk,
    ),
    Case(
        "qk_norm_rope interleaved",
        "q B S H D third; k B S H D third; q_weight D; k_weight D; "
        "cos S D fp32 pairs; sin S D fp32 pairs",
        "joint heads",
        lambda k, *a: k.qk_norm_rope(*a, EPS, 0.0, "input", False, 1, True),
        formulas.flux_qk,
    ),
    Case(
        "qk_norm_rope across heads",
        "q B S H D; k B S H D; q_weight H*D; k_weight H*D; "
        "cos 1 S H D fp32 pairs; sin 1 S H D fp32 pairs",
        "joint heads",
        lambda k, *a: k.qk_norm_rope(*a, EPS, 0.0, "none", True, 1, True),
        formulas.ltx_qk,
    ),
)

LOSSES = (
    Case(
        "cross_entropy",
        "logits R V; target R int<V",
        "logits",
        lambda k, logits, target: k.cross_entropy(logits, target, "none"),
        formulas.row_losses,
    ),
    Case(
        "cross_entropy and gradient",
        "logits R V; target R int<V",
        "logits grad",
        lambda k, logits, target: k.cross_entropy(logits, target),
        formulas.mean_loss,
        liger=liger.mean_loss,
        mode="train",
    ),
    Case(
        "cross_entropy_log_probs",
        "logits R V; target R int<V",
        "logits",
        lambda k, logits, target: k.cross_entropy_log_probs(logits, target),
        formulas.losses_and_log_probs,
    ),
    Case(
        "load_balancing_loss",
        "logits T E",
        "routers",
        lambda k, logits: k.load_balancing_loss(logits, formulas.EXPERTS_OF_A_TOKEN),
        formulas.load_balancing_loss,
    ),
)

GRADIENTS = (
    Case(
        "rms_norm_backward",
        "grad B S D; x B S D; weight D",
        "norm grad",
        lambda k, g, x, w: k.ops.rms_norm_backward.default(g, x, w, None, EPS, 0.0, 1, 1),
        formulas.llama_norm,
        torch=formulas.fused_rms_norm,
        liger=liger.rms_norm,
        mode="backward",
        outputs=2,
    ),
    Case(
        "layer_norm_backward",
        "grad B S D; x B S D; weight D; bias D",
        "norm grad",
        lambda k, g, x, w, b: k.ops.layer_norm_backward.default(g, x, w, b, EPS, 3),
        formulas.layer_norm,
        liger=liger.layer_norm,
        mode="backward",
        outputs=3,
    ),
    Case(
        "gelu_backward tanh",
        "grad R D; x R D",
        "wide grad",
        lambda k, g, x: k.ops.gelu_backward.default(g, x, 1),
        formulas.gelu_tanh,
        mode="backward",
    ),
    Case(
        "gelu_backward erf",
        "grad R D; x R D",
        "wide grad",
        lambda k, g, x: k.ops.gelu_backward.default(g, x, 0),
        F.gelu,
        mode="backward",
    ),
    Case(
        "silu_backward",
        "grad R D; x R D",
        "wide grad",
        lambda k, g, x: k.ops.silu_backward.default(g, x),
        F.silu,
        mode="backward",
    ),
    Case(
        "gated_backward silu",
        "grad R D; gate R D; up R D",
        "wide grad",
        lambda k, *a: k.ops.gated_backward.default(*a, 3),
        formulas.swiglu,
        liger=liger.swiglu,
        mode="backward",
    ),
    Case(
        "gated_packed_backward gelu",
        "grad R D; x R 2*D",
        "packed grad",
        lambda k, g, x: k.ops.gated_packed_backward.default(g, x, 0, 0),
        formulas.packed_geglu,
        mode="backward",
    ),
    Case(
        "cross_entropy_backward",
        "grad R fp32; logits R V; target R int<V; lse R fp32",
        "logits grad",
        lambda k, *a: k.ops.cross_entropy_backward.default(*a, -100, 0.0, 0.0),
        lambda logits, target, lse: formulas.row_losses(logits, target),
        mode="backward",
        adjust=lambda g, logits, target, lse: (g, logits, target, logits.float().logsumexp(-1)),
    ),
    Case(
        "load_balancing_loss_backward",
        "grad 1 fp32; logits T E; stats E fp32",
        "routers",
        lambda k, *a: k.ops.load_balancing_loss_backward.default(*a, None),
        lambda logits, stats: formulas.load_balancing_loss(logits).view(1),
        mode="backward",
        adjust=lambda g, logits, stats: (g, logits, formulas.balance(logits)),
    ),
)

ROWS = (
    Case(
        "group_norm silu",
        "x N C S; weight C; bias C",
        "images",
        lambda k, x, w, b: k.group_norm(x, w, b, formulas.groups_of(w), EPS, True),
        formulas.group_norm_silu,
    ),
    Case(
        "group_norm silu channels last",
        "x N S C; weight C; bias C",
        "images last",
        lambda k, x, w, b: k.group_norm(x, w, b, formulas.groups_of(w), EPS, True, True),
        formulas.group_norm_silu_channels_last,
    ),
    Case(
        "softmax",
        "x R V",
        "logits",
        lambda k, x: k.softmax(x),
        formulas.softmax,
        liger=liger.softmax,
    ),
    Case(
        "softmax_backward",
        "grad R V; y R V",
        "logits grad",
        lambda k, g, y: k.ops.softmax_backward.default(g, y, 1.0),
        formulas.softmax_gradient,
        torch=formulas.fused_softmax_gradient,
        outputs=1,
        adjust=lambda g, y: (g, y.softmax(-1)),
    ),
    Case("argmax", "x R V", "logits", lambda k, x: k.argmax(x), lambda x: x.argmax(-1)),
    Case("topk 50", "x R V", "logits", lambda k, x: k.topk(x, min(50, x.shape[-1])), formulas.topk),
    Case(
        "sample",
        "logits R V; seeds R int<V",
        "logits",
        lambda k, x, seeds: k.sample(x, seeds, None, 0.8, 50, 0.95),
        lambda x, seeds: formulas.sample_by_sorting(x, 0.8, 50, 0.95),
    ),
)

POINTWISE = (
    Case("add", "a R D; b R D", "wide", lambda k, a, b: k.add(a, b), torch.add),
    Case("mul", "a R D; b R D", "wide", lambda k, a, b: k.mul(a, b), torch.mul),
    Case("scale", "x R D", "wide", lambda k, x: k.scale(x, 0.7), lambda x: x * 0.7),
    Case(
        "add_gelu tanh",
        "x R D; bias D",
        "wide",
        lambda k, x, b: k.add_gelu(x, b, "tanh"),
        lambda x, b: formulas.gelu_tanh(x + b),
    ),
    Case("add_silu", "x R D; bias D", "wide", lambda k, *a: k.add_silu(*a), formulas.add_silu),
    *(case_of(op) for op in OPS.values() if op.example is not None),
    Case(
        "mul_add",
        "a B S D; b B 1 D; c B 1 D",
        "adaln",
        lambda k, *a: k.mul_add(*a),
        formulas.mul_add,
    ),
    Case(
        "add_gelu_backward tanh",
        "grad R D; x R D; bias D",
        "wide grad",
        lambda k, *a: k.ops.add_gelu_backward.default(*a, 1, 2),
        lambda x, b: formulas.gelu_tanh(x + b),
        mode="backward",
        outputs=2,
    ),
    Case(
        "add_silu_backward",
        "grad R D; x R D; bias D",
        "wide grad",
        lambda k, *a: k.ops.add_silu_backward.default(*a, 2),
        formulas.add_silu,
        mode="backward",
        outputs=2,
    ),
    Case(
        "mul_add_backward",
        "grad B S D; a B S D; b B 1 D; c B 1 D",
        "adaln",
        lambda k, g, a, b, c: k.ops.mul_add_backward.default(g, a, b, 1, 3),
        formulas.mul_add,
        mode="backward",
        outputs=3,
    ),
)

OPTIMIZER = (
    Case(
        "adamw_step",
        "p P N fp32; g P N fp32; m P N fp32; v P N fp32; step 1 fp32",
        "parameters",
        formulas.our_adamw,
        formulas.adamw,
        torch=formulas.fused_adamw,
        adjust=lambda p, g, m, v, step: (p, g, m, v.abs() + 1, step.fill_(7)),
    ),
    Case(
        "grad_norm",
        "g P N",
        "parameters",
        lambda k, g: k.grad_norm(g.unbind(0)),
        lambda g: torch.nn.utils.get_total_norm(g.unbind(0)),
    ),
    Case(
        "clip_grads",
        "g P N; total 1 fp32",
        "parameters",
        lambda k, g, total: (k.clip_grads(g.unbind(0), total, 0.9999), g)[1],
        formulas.clip,
        adjust=lambda g, total: (g, total.fill_(1)),
    ),
    Case(
        "scale_grads",
        "g P N; factor 1 fp32",
        "parameters",
        lambda k, g, factor: (k.scale_grads(g.unbind(0), factor), g)[1],
        formulas.scale,
        adjust=lambda g, factor: (g, factor.fill_(0.9999)),
    ),
)

CASES: tuple[Case, ...] = (
    *NORMS,
    *ADALN,
    *ACTIVATIONS,
    *ROPE,
    *LOSSES,
    *GRADIENTS,
    *ROWS,
    *POINTWISE,
    *OPTIMIZER,
)
