"""One table of calls to every op, which the shared proofs (`proofs.py`) and the fuzzer go through.

An op of HFP_OP_TABLE without a row fails `test_every_op_has_a_sample`; with a row it is covered by
opcheck, determinism, layouts, canaries, compilation, graphs, threads, leaks and bad calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import c_api
import torch
from torch import Tensor

from hfpatch.capi.signatures import CONSTANTS
from hfpatch.ops import OPS as FORMULAS
from hfpatch.ops import Op

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
#: Result rules of sums over all rows, which belong to no row, and of memory for a launch's own use,
#: whose contents mean nothing. "=NAME&BIT" and "sums=NAME" are such rules with a parameter.
SUMS = {"dweight", "dbias", "scalar", "balance"}
SCRATCH = {"partials", "workspace", "groups", "product_workspace", "balance_partials"}


@dataclass(frozen=True)
class Spec:
    """A tensor argument. `per_row`: the batch N comes before `shape`; sizes may be "D", "2D"..."""

    shape: tuple[int | str, ...]
    per_row: bool
    dtype: torch.dtype | None = None  # None: the dtype of the call
    high: int | str = 0  # integers from 0 to high - 1
    dense: bool = False  # the C function takes it contiguous only
    pairs: bool = False  # each value twice, as interleaved tables may have it


def rows(*shape: int | str, **options: Any) -> Spec:
    return Spec(shape, True, **options)


def shared(*shape: int | str, **options: Any) -> Spec:
    return Spec(shape, False, **options)


def _resolve(value: Any, width: int) -> Any:
    sizes = {"D": width, "2D": 2 * width, "4D": 4 * width, "D/2": width // 2}
    sizes["experts"] = min(width, CONSTANTS["HFP_MAX_EXPERTS"])
    return sizes.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Sample:
    """One way to call an op.

    Attributes:
        op: its name in HFP_OP_TABLE.
        label: tells the samples of one op apart.
        tensors: its tensor arguments by name; one that is left out is None.
        params: keyword parameters of the formula in `hfpatch.ops`, or, of an op without one, the
            scalar arguments of its schema.
        public: further parameters of the package's function; None: there is no such function.
        positional: why a row's result depends on its place in the batch; "": it does not.
        constant: tensors that never require a gradient.
        differentiable: whether the package's function has a gradient.
    """

    op: str
    label: str
    tensors: dict[str, Spec]
    params: dict[str, Any]
    public: dict[str, Any] | None = field(default_factory=dict)
    positional: str = ""
    constant: tuple[str, ...] = ()
    differentiable: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op

    @property
    def schema(self) -> c_api.Op:
        return c_api.OPS[self.op]

    @property
    def results(self) -> list[str]:
        """The result rule of each output."""
        return [rule.strip() for rule in self.schema.result.split(",")]

    @property
    def kinds(self) -> list[str]:
        """For each result of `call`: "rows", "sum" over all rows, or "sum of each": the gradient of
        a parameter that every sample of the batch has its own of. The order in which a sum is added
        up depends on how many rows there are."""
        return [self._kind(rule) for rule in self.results if not self._scratch(rule)]

    def _kind(self, rule: str) -> str:
        of, wanted, _ = rule.removeprefix("=").partition("&")
        if wanted and of in self.tensors and self.tensors[of].per_row:
            return "sum of each"
        return "sum" if wanted or rule in SUMS else "rows"

    @staticmethod
    def _scratch(rule: str) -> bool:
        return rule in SCRATCH or rule.startswith("sums=")

    def meant(self, results: list[Tensor]) -> list[Tensor]:
        """Those that mean something."""
        pairs = zip(results, self.results, strict=True)
        return [r for r, rule in pairs if not self._scratch(rule)]

    def make(
        self,
        dtype: torch.dtype,
        n: int = 5,
        width: int = 34,
        device: str = "cpu",
        host: bool = False,
    ) -> dict[str, Tensor]:
        """Fresh tensors, always the same. `host`: made on the CPU and copied, so that no kernel of
        torch runs."""
        where = "cpu" if host else device
        generator = torch.Generator(where).manual_seed(0)
        made = {}
        for name, spec in self.tensors.items():
            shape = [n] * spec.per_row + [_resolve(size, width) for size in spec.shape]
            kind = spec.dtype or dtype
            if kind.is_floating_point:
                value = torch.randn(shape, generator=generator, device=where).to(kind)
                if spec.pairs:
                    value = value[..., ::2].repeat_interleave(2, -1)
            else:
                high = max(_resolve(spec.high, width), 1)
                value = torch.randint(high, shape, generator=generator, dtype=kind, device=where)
            made[name] = value.to(device)
        return made

    def values(self, width: int = 34) -> dict[str, Any]:
        """The parameters, with sizes for the names of sizes."""
        return {name: _resolve(value, width) for name, value in self.params.items()}

    def arguments(self, tensors: dict[str, Tensor], width: int = 34) -> tuple[Any, ...]:
        """Those of the raw operator, in the order of its schema."""
        params = self.values(width)
        scalars = [name for kind, name in self.schema.arguments if not kind.startswith("Tensor")]
        if self.op in FORMULAS:
            codes = iter(FORMULAS[self.op].encode(params))
        else:
            codes = iter([params[name] for name in scalars])
        return tuple(
            tensors.get(name) if kind.startswith("Tensor") else next(codes)
            for kind, name in self.schema.arguments
        )

    def call_all(self, kernels: Any, tensors: dict[str, Tensor], width: int = 34) -> list[Tensor]:
        result = getattr(kernels.ops, self.op).default(*self.arguments(tensors, width))
        return list(result) if isinstance(result, tuple) else [result]

    def call(self, kernels: Any, tensors: dict[str, Tensor], width: int = 34) -> list[Tensor]:
        """The raw operator's results."""
        return self.meant(self.call_all(kernels, tensors, width))

    def call_out(
        self, kernels: Any, outs: list[Tensor], tensors: dict[str, Tensor], width: int = 34
    ) -> None:
        getattr(kernels.ops, self.op + "_out").default(*outs, *self.arguments(tensors, width))

    def call_public(
        self, kernels: Any, tensors: dict[str, Tensor], width: int = 34
    ) -> list[Tensor]:
        assert self.public is not None
        function = getattr(kernels, self.op)
        result = function(**tensors, **self.values(width), **self.public)
        return list(result) if isinstance(result, tuple) else [result]

    def call_formula(self, tensors: dict[str, Tensor], width: int = 34) -> list[Tensor]:
        result = FORMULAS[self.op].reference(**tensors, **self.values(width))
        return list(result) if isinstance(result, tuple) else [result]


def sample(op: str, label: str = "", **arguments: Any) -> Sample:
    """Tensors and parameters apart by their type; a gradient's operator has no public function."""
    known = ("public", "positional", "constant", "differentiable")
    options = {k: arguments.pop(k) for k in known if k in arguments}
    if op.endswith(("_backward", "_with_gradient")):
        options["public"] = None
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Spec)}
    params = {k: v for k, v in arguments.items() if not isinstance(v, Spec)}
    return Sample(op, label, tensors, params, **options)


X, W, W32 = rows(3, "D"), shared("D"), shared("D", dtype=F32)
TABLE = shared(3, "D/2", dtype=F32)  # cos and sin: one row per position
TARGET = rows(3, dtype=torch.int64, high="D", dense=True)
ROW32 = rows(3, dtype=F32, dense=True)
TABLES = ("cos", "sin")
FEW_ROWS = "a product of few rows is added up in another order"


def of_example(op: Op) -> list[Sample]:
    """With all tensors of an op's example and, where it may be called without some, with as few."""
    assert op.example is not None
    kinds = {("R", "D"): X, ("D",): W}
    words = [part.split() for part in op.example.inputs.split(";")]
    tensors = {name: kinds[tuple(dims)] for name, *dims in words}
    needed = {name for kind, name in c_api.OPS[op.name].arguments if kind == "Tensor"}
    few = {name: spec for name, spec in tensors.items() if name in needed}
    return [
        sample(op.name, **tensors),
        *([sample(op.name, "alone", **few)] if few != tensors else []),
    ]


SAMPLES = [
    sample("rms_norm", x=X, weight=W, eps=1e-6, cast="input"),
    sample("rms_norm", "bias", x=X, weight=W32, bias=W32, eps=1e-6, weight_offset=1.0),
    sample("rms_norm", "bare", x=rows("D"), eps=1e-6, cast="weight"),
    sample("layer_norm", x=X, weight=W, bias=W32, eps=1e-5),
    sample("layer_norm", "bare", x=rows("D"), eps=1e-5),
    sample("gelu", x=X, approximate="none"),
    sample("gelu", "tanh", x=X, approximate="tanh"),
    sample("silu", x=X),
    sample("gated", gate=X, up=X, activation="silu"),
    sample("gated", "gelu", gate=X, up=X, activation="gelu"),
    sample("gated_packed", x=rows(3, "2D"), activation="gelu_tanh", gate_first=True),
    sample("gated_packed", "second", x=rows("2D"), activation="silu", gate_first=False),
    sample(
        "gated_clamped", gate=X, up=X, activation="silu", gate_max=0.5, up_min=-0.5, up_max=0.5,
    ),
    sample(
        "gated_clamped", "offset", gate=X, up=X, activation="silu", gate_min=-1.0, gate_max=0.7,
        up_min=-0.3, up_max=0.9, up_offset=1.0, alpha=1.702,
    ),
    sample(
        "gated_clamped", "activated", gate=X, up=X, activation="gelu_tanh", gate_max=0.5,
        up_max=0.5, clamp_activated=True,
    ),
    sample(
        "norm_modulate", x=X, scale=rows(1, "D"), shift=rows(1, "D"), eps=1e-6, norm="layer",
        cast="input",
    ),
    sample(
        "norm_modulate", "tokens", x=X, scale=X, shift=X, weight=W, bias=W, eps=1e-6, norm="rms",
        cast="none",
    ),
    sample("gate_residual", residual=X, gate=rows(1, "D"), x=X, cast="input"),
    sample("gate_residual", "samples", residual=X, gate=rows("D"), x=X, cast="none"),
    sample(
        "gate_residual_norm_modulate", residual=X, gate=rows(1, "D"), x=X, scale=rows(1, "D"),
        shift=rows(1, "D"), weight=W, eps=1e-6, norm="rms", cast="input",
    ),
    sample("add_rms_norm", x=X, residual=X, weight=W, eps=1e-6, cast="input"),
    sample("add_layer_norm", x=X, residual=X, weight=W, bias=W, eps=1e-5),
    sample(
        "rope", x=rows(3, 4, "D"), cos=TABLE, sin=TABLE, seq_dim=1, interleaved=True,
        constant=TABLES,
    ),
    sample(
        "rope", "half", x=rows(4, 3, "D"), cos=rows(3, "D/2"), sin=rows(3, "D/2"), seq_dim=2,
        round_products=True, constant=TABLES,
    ),
    sample(
        "rope_qk", q=rows(3, 4, "D"), k=rows(3, 2, "D"), cos=TABLE, sin=TABLE, seq_dim=1,
        constant=TABLES,
    ),
    sample(
        "qk_norm_rope", q=rows(3, 4, "D"), k=rows(3, 2, "D"), q_weight=W, k_weight=W, cos=TABLE,
        sin=TABLE, eps=1e-6, cast="input", seq_dim=1, constant=TABLES,
    ),
    sample(
        "qk_norm_rope", "across", q=rows(3, 4, "D"), k=rows(3, 4, "D"), q_weight=shared("4D"),
        k_weight=shared("4D"), cos=TABLE, sin=TABLE, eps=1e-6, norm_across_heads=True,
        interleaved=True, seq_dim=1, constant=TABLES,
    ),
    sample("gated_rms_norm", x=X, gate=X, weight=W, eps=1e-6, group_size="D/2"),
    sample("gated_rms_norm", "groups", x=X, weight=W, eps=1e-6, group_size="D/2"),
    sample("gated_rms_norm", "first", x=X, gate=X, eps=1e-6, norm_before_gate=True),
    sample(
        "rms_norm_silu", x=X, addend=W, weight=W32, scale=rows(1, "D"), shift=W, eps=1e-6,
    ),
    sample("rms_norm_silu", "bare", x=X, eps=1e-6),
    *(s for op in FORMULAS.values() if op.example is not None for s in of_example(op)),
    sample(
        "rms_norm_backward", grad=X, x=X, weight=W, eps=1e-6, weight_offset=0.0, cast=1, needs=1
    ),
    sample("layer_norm_backward", grad=X, x=X, weight=W, bias=W32, eps=1e-5, needs=3),
    sample("gelu_backward", grad=X, x=X, approximate=1),
    sample("silu_backward", grad=X, x=X),
    sample("gated_backward", grad=X, gate=X, up=X, activation=3),
    sample("gated_packed_backward", grad=X, x=rows(3, "2D"), activation=0, gate_first=1),
    sample("softmax_backward", grad=X, y=X, scale=0.5),
    sample("add_gelu_backward", grad=X, x=X, bias=W, approximate=1, needs=2),
    sample("add_silu_backward", grad=X, x=X, bias=W, needs=0),
    sample("mul_add_backward", grad=X, a=X, b=rows(1, "D"), cast=1, needs=3),
    sample(
        "group_norm", x=rows("D", 3, dense=True), weight=W32, bias=W32, groups=2, eps=1e-5,
        silu=True,
    ),
    sample(
        "group_norm", "last", x=rows(3, "D", dense=True), weight=W, groups="D/2", eps=1e-5,
        channels_last=True,
    ),
    sample("softmax", x=X, mask=W, scale=0.5, constant=("mask",)),
    sample("softmax", "bare", x=rows("D")),
    sample("argmax", x=X, differentiable=False),
    sample("topk", x=X, k=3, differentiable=False),
    sample(
        "sample", logits=X, seeds=rows(3, dtype=torch.int64, high=99, dense=True),
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, differentiable=False,
    ),
    sample("add_gelu", x=X, bias=W, approximate="tanh"),
    sample("add_silu", x=X, bias=W),
    sample("mul_add", a=X, b=rows(1, "D"), c=W, cast="input"),
    sample("mul_add", "tokens", a=X, b=X, c=rows("D"), cast="none"),
    sample(
        "cross_entropy", logits=X, target=TARGET, ignore_index=4, label_smoothing=0.1,
        softcap=30.0, public={"reduction": "none"},
    ),
    sample(
        "cross_entropy_backward", grad=ROW32, logits=X, target=TARGET, lse=ROW32, ignore_index=4,
        label_smoothing=0.1, softcap=0.0,
    ),
    sample(
        "cross_entropy_with_gradient", logits=X, target=TARGET, divisor=3.0, ignore_index=4,
        label_smoothing=0.1, softcap=0.0,
    ),
    sample(
        "cross_entropy_with_gradient", "capped", logits=X, target=TARGET,
        divisor_tensor=shared(1, dtype=F32), divisor=0.0, ignore_index=4, label_smoothing=0.0,
        softcap=30.0,
    ),
    sample("add", a=X, b=rows(1, "D"), alpha=-0.5),
    sample("mul", a=X, b=X),
    sample("scale", x=X, factor=0.7),
    sample(
        "gemm", a=rows("D"), b=shared(6, "D"), c=rows(6), alpha=0.5, beta=2.0, transpose_a=0,
        transpose_b=1, positional=FEW_ROWS,
    ),
    sample(
        "gemm", "plain", a=rows("D"), b=shared("D", 6), alpha=1.0, beta=0.0, transpose_a=0,
        transpose_b=0, positional=FEW_ROWS,
    ),
    sample(
        "gemm_batched", a=rows("D", 7), b=rows("D", 6), alpha=1.0, beta=0.0, transpose_a=1,
        transpose_b=0, positional="cuBLASLt may choose by the number of batches",
    ),
    sample(
        "attention", q=rows(4, 5, 34), k=rows(2, 7, 34), v=rows(2, 7, 6), mask=shared(5, 7),
        scale=0.2, causal=0, most_queries=0, window=0, softcap=1.5, constant=("mask",),
        differentiable=False,
    ),
    sample(
        "attention", "causal", q=rows(2, 7, 34), k=rows(2, 7, 34), v=rows(2, 7, 6), scale=0.2,
        causal=1, most_queries=0, window=3, softcap=0.0, differentiable=False,
    ),
    sample(
        "cross_entropy_log_probs", logits=X, target=TARGET, ignore_index=4, label_smoothing=0.1,
        softcap=30.0,
    ),
    sample(
        "load_balancing_loss", logits=rows("experts"), mask=rows(dtype=F32, dense=True), k=3,
        constant=("mask",),
    ),
    sample(
        "load_balancing_loss_backward", grad=shared(1, dtype=F32), logits=rows(8),
        stats=shared(17, dtype=F32),
    ),
]  # fmt: skip
BY_ID = {s.id: s for s in SAMPLES}
#: One sample of each op, where the others would only repeat it.
FIRST = {s.op: s for s in reversed(SAMPLES)}
PUBLIC = {s.id: s for s in SAMPLES if s.public is not None}
DIFFERENTIABLE = {name: s for name, s in PUBLIC.items() if s.differentiable}
