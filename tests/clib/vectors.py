"""One file of calls and what must come of them, which C, Python, Rust and Go go through.

Every function, in every dtype, with odd shapes, strides, in place, without elements, and bad calls.
Expected results are of formulas in fp64, expected messages are written here: neither is asked of
the library. Lines of the file:

    case NAME
    function hfp_NAME
    tensor I DTYPE BYTES | ndim sizes | strides | offset | hex        memory and a view of it
    host I                                                            it is the CPU's, on a GPU too
    address I P J                                                     of tensor J, in I at place P
    null | float BITS | int N | use I | list I I …                    the arguments, in order
    status N
    message TEXT
    expect I TOLERANCE hex                                            all of the memory, as fp64
    end

DTYPE is `code bits` of DLPack; hex is `zeros` where all bytes are 0; BITS are those of the number
as a big-endian fp64; an `I` of -1 in a list is NULL. A result may be off by TOLERANCE, absolute.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import c_api
import torch
from decode_samples import BY_ID as DECODE_SAMPLES
from decode_samples import SAMPLES as DECODING
from decode_samples import Made
from list_samples import LIST_SAMPLES, ListSample
from op_samples import FIRST, SAMPLES, SCRATCH, Sample
from products import attention_formula
from torch import Tensor

from hfpatch import capi
from hfpatch.ops import OPS as FORMULAS

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CODES = {
    F32: (2, 32), F16: (2, 16), BF16: (4, 16), torch.float64: (2, 64), torch.int64: (0, 64),
    torch.int8: (0, 8), torch.uint8: (1, 8), torch.bool: (6, 8),
}  # fmt: skip
SHAPES = ((3, 5), (7,), (), (0, 3), (65,))


class Case:
    """One call; `str` gives its lines."""

    def __init__(self, name: str, function: str) -> None:
        self.lines = [f"case {name}", f"function hfp_{function}"]
        self.arguments: list[str] = []
        self.end: list[str] = []
        self.count = 0

    def tensor(self, value: Tensor, shape: list[int] | None = None) -> int:
        """Adds a tensor; `shape`: another one that the view claims."""
        memory = _memory(value)
        code, bits = CODES[value.dtype]
        sizes = list(value.shape) if shape is None else shape
        strides = list(value.stride()) if shape is None else _contiguous(shape)
        parts = [
            f"tensor {self.count} {code} {bits} {len(memory)}",
            " ".join(map(str, [len(sizes), *sizes])),
            " ".join(map(str, strides)),
            str(value.storage_offset()),
            "zeros" if len(memory) > 64 and not any(memory) else memory.hex() or "-",
        ]
        self.lines.append(" | ".join(parts))
        self.count += 1
        return self.count - 1

    def use(self, value: Tensor | None) -> int:
        """A tensor, or None, as the next argument."""
        if value is None:
            self.arguments.append("null")
            return -1
        index = self.tensor(value)
        self.arguments.append(f"use {index}")
        return index

    def number(self, value: float | int) -> None:
        if isinstance(value, float):
            self.arguments.append(f"float {struct.pack('>d', value).hex()}")
        else:
            self.arguments.append(f"int {int(value)}")

    def expect(self, index: int, value: Tensor, tolerance: float) -> None:
        flat = value.double().reshape(-1).tolist()
        hexes = "".join(struct.pack(">d", v).hex() for v in flat)
        self.end.append(f"expect {index} {struct.pack('>d', tolerance).hex()} {hexes or '-'}")

    def done(self, status: int = 0, message: str = "") -> str:
        said = [f"status {status}", f"message {message}"]
        return "\n".join([*self.lines, *self.arguments, *said, *self.end, "end"]) + "\n"


def _memory(value: Tensor) -> bytes:
    storage = value.untyped_storage()
    return bytes(storage.tolist())


def _contiguous(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return strides


def _tolerance(dtype: torch.dtype, expected: Tensor) -> float:
    """A few roundings of the largest value; integers are exact."""
    finite = expected.double()[expected.double().isfinite()].abs()
    if not dtype.is_floating_point or not finite.numel():
        return 0.0
    return float(finite.max()) * torch.finfo(dtype).eps * (32 if dtype == F32 else 4)


# ------------------------------------------------------------------------------ references


def _pulled(forward: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in inputs]
    return list(torch.autograd.grad(forward(*leaves), leaves, grad.double()))


_GELU = {0: "none", 1: "tanh"}
_ACT = {0: "gelu", 3: "silu"}


def _norm_backward(op: str, t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    names = [n for n in ("x", "weight", "bias") if n in t]

    def forward(*leaves: Tensor) -> Tensor:
        options = {"eps": p["eps"]}
        return FORMULAS[op].reference(**dict(zip(names, leaves, strict=True)), **options)

    return _pulled(forward, t["grad"], *(t[n] for n in names))


def _rows_loss(logits: Tensor, target: Tensor, p: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and lse of each row, and which rows count."""
    z = logits
    if p["softcap"] > 0:
        z = p["softcap"] * torch.tanh(logits / p["softcap"])
    kept = target != p["ignore_index"]
    lse = z.logsumexp(-1)
    at = z.gather(-1, target.clamp(0, z.shape[-1] - 1)[..., None])[..., 0]
    smooth = p["label_smoothing"]
    loss = lse - (1 - smooth) * at - smooth * z.mean(-1)
    return torch.where(kept, loss, 0.0), torch.where(kept, lse, 0.0), kept


def _entropy_backward(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    # From the lse that is given, whatever it is; without a softcap.
    logits, target, smooth = t["logits"].double(), t["target"], p["label_smoothing"]
    hot = torch.nn.functional.one_hot(target, logits.shape[-1]).double()
    share = torch.exp(logits - t["lse"].double()[..., None])
    dz = share - (1 - smooth) * hot - smooth / logits.shape[-1]
    kept = (target != p["ignore_index"])[..., None]
    return [torch.where(kept, dz * t["grad"].double()[..., None], 0.0)]


def _entropy_with_gradient(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    logits = t["logits"].double().requires_grad_()
    loss, lse, kept = _rows_loss(logits, t["target"], p)
    by = t["divisor_tensor"].double() if "divisor_tensor" in t else p["divisor"] or kept.sum()
    total = loss.sum() / by
    (dlogits,) = torch.autograd.grad(total.reshape(()), logits)
    return [total.detach(), loss.detach(), lse.detach(), dlogits]


def _softmax_backward(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    grad, y = t["grad"].double(), t["y"].double()
    return [p["scale"] * y * (grad - (grad * y).sum(-1, keepdim=True))]


def _product(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    a, b = t["a"].double(), t["b"].double()
    out = p["alpha"] * (a.mT if p["transpose_a"] else a) @ (b.mT if p["transpose_b"] else b)
    return [out + p["beta"] * t["c"].double() if "c" in t else out]


def _attention(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    return list(
        attention_formula(
            t["q"], t["k"], t["v"], t.get("mask"), p["scale"], p["causal"],
            window=p["window"], softcap=p["softcap"],
        )
    )  # fmt: skip


def _log_probs(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    logits = t["logits"].double()
    loss, lse, _ = _rows_loss(logits, t["target"], p)
    z = p["softcap"] * torch.tanh(logits / p["softcap"]) if p["softcap"] > 0 else logits
    return [loss, lse, z.log_softmax(-1)]


def _balance(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    logits = t["logits"].double()
    experts, weights = logits.shape[-1], t["mask"].double()
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : p["k"]]
    picked = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
    share = (weights[:, None] * picked).sum(0) / weights.sum()
    mean = (weights[:, None] * logits.softmax(-1)).sum(0) / weights.sum()
    stats = torch.cat([share, mean, weights.sum()[None]])
    return [experts * (share * mean).sum(), stats]


def _balance_backward(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
    logits, stats = t["logits"].double(), t["stats"].double()
    experts = logits.shape[-1]
    share, whole = stats[:experts], stats[-1]
    probabilities = logits.softmax(-1)
    middle = (probabilities * share).sum(-1, keepdim=True)
    factor = t["grad"].double() * experts / whole
    return [factor * probabilities * (share - middle)]


def _op(name: str, **fixed: Any) -> Callable[..., Tensor]:
    return lambda **tensors: FORMULAS[name].reference(**tensors, **fixed)


def _add_act_backward(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], list[Tensor]]:
    def found(t: dict[str, Tensor], p: dict[str, Any]) -> list[Tensor]:
        options = {"approximate": _GELU[p["approximate"]]} if "approximate" in p else {}
        forward = _op(name, **options)
        return _pulled(lambda x, b: forward(x=x, bias=b), t["grad"], t["x"], t["bias"])

    return found


GRADIENTS: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], list[Tensor]]] = {
    "rms_norm_backward": lambda t, p: _norm_backward("rms_norm", t, p),
    "layer_norm_backward": lambda t, p: _norm_backward("layer_norm", t, p),
    "gelu_backward": lambda t, p: _pulled(
        lambda x: FORMULAS["gelu"].reference(x, approximate=_GELU[p["approximate"]]),
        t["grad"], t["x"],
    ),
    "silu_backward": lambda t, p: _pulled(FORMULAS["silu"].reference, t["grad"], t["x"]),
    "gated_backward": lambda t, p: _pulled(
        lambda g, u: FORMULAS["gated"].reference(g, u, activation=_ACT[p["activation"]]),
        t["grad"], t["gate"], t["up"],
    ),
    "gated_packed_backward": lambda t, p: _pulled(
        lambda x: FORMULAS["gated_packed"].reference(
            x, activation=_ACT[p["activation"]], gate_first=bool(p["gate_first"])
        ),
        t["grad"], t["x"],
    ),
    "softmax_backward": _softmax_backward,
    "add_gelu_backward": _add_act_backward("add_gelu"),
    "add_silu_backward": _add_act_backward("add_silu"),
    "mul_add_backward": lambda t, p: _pulled(
        lambda a, b, c: FORMULAS["mul_add"].reference(a, b, c),
        t["grad"], t["a"], t["b"], torch.zeros_like(t["b"]),
    ),
    "add": lambda t, p: [t["a"].double() + p["alpha"] * t["b"].double()],
    "mul": lambda t, p: [t["a"].double() * t["b"].double()],
    "scale": lambda t, p: [t["x"].double() * p["factor"]],
    "gemm": lambda t, p: _product(t, p),
    "gemm_batched": lambda t, p: _product(t, p),
    "attention": lambda t, p: _attention(t, p),
    "load_balancing_loss": lambda t, p: _balance(t, p),
    "load_balancing_loss_backward": lambda t, p: _balance_backward(t, p),
    "cross_entropy_log_probs": lambda t, p: _log_probs(t, p),
    "cross_entropy": lambda t, p: list(_rows_loss(t["logits"].double(), t["target"], p)[:2]),
    "cross_entropy_backward": _entropy_backward,
    "cross_entropy_with_gradient": _entropy_with_gradient,
}  # fmt: skip


def _references(sample: Sample, tensors: dict[str, Tensor], width: int) -> list[Tensor]:
    params = sample.values(width)
    if sample.op in GRADIENTS:
        return GRADIENTS[sample.op](tensors, params)
    if sample.op == "sample":  # its steps are of fp32, and the token is exact
        return sample.call_formula(tensors, width)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    return sample.call_formula(wide, width)


# ------------------------------------------------------------------------------ results


class Sizes:
    """Results' shapes and dtypes, by the rules of the op table."""

    def __init__(self, library: capi.Library, sample: Sample, t: dict[str, Tensor], width: int):
        self.library, self.sample, self.tensors = library, sample, t
        self.params = sample.values(width)
        self.first = t[next(n for kind, n in sample.schema.arguments if n in t)]
        self.rows = self.first.shape[:-1].numel()
        self.cols = self.first.shape[-1]

    def wanted(self, rule: str) -> bool:
        needs = self.params.get("needs", 3)
        bit = {"dweight": 1, "dbias": 2}.get(rule) or int(rule.partition("&")[2] or 0)
        return not bit or bool(needs & bit)

    def scratch(self, rule: str) -> Tensor:
        wanted = bin(self.params.get("needs", 0)).count("1")
        if rule == "workspace":
            count = self.library.row_workspace(self.rows, self.cols)
            return torch.zeros(count, dtype=torch.int64)
        if rule == "product_workspace":
            a, b = self.tensors["a"], self.tensors["b"]
            m, k = a.shape[-2:] if not self.params["transpose_a"] else a.shape[:-3:-1]
            n = b.shape[-2] if self.params["transpose_b"] else b.shape[-1]
            batch = a.shape[0] if a.dim() == 3 else 1
            return torch.zeros(self.library.gemm_workspace(batch, m, n, k, 1))
        if rule == "balance_partials":
            return torch.zeros(self.library.balance_parts(self.rows) * (2 * self.cols + 1))
        if rule == "partials":
            count = self.library.partial_rows(self.rows, self.cols)
            return torch.zeros(count, wanted * self.cols)
        if rule == "groups":
            x, last = self.first, bool(self.params.get("channels_last", False))
            n, c, s = (x.shape[0], x.shape[2], x.shape[1]) if last else x.shape
            parts = self.library.group_parts(c, s, self.params["groups"], int(last))
            return torch.zeros(n, self.params["groups"], parts + 1, 2)
        of = self.tensors[rule.removeprefix("sums=")]
        sums = 1 if of.dim() == 1 else of.shape[:-1].numel()
        count = self.library.sum_partial_rows(self.rows, self.cols, sums)
        return torch.zeros(count, wanted * self.cols)

    def dtype(self, rule: str, formula: torch.dtype | None) -> torch.dtype:
        if rule in ("rows", "scalar", "balance"):
            return F32
        if rule in ("indices", "topk_indices"):
            return torch.int64
        if rule.startswith("="):
            return self.tensors[rule[1:].partition("&")[0]].dtype
        if rule in ("dweight", "dbias"):
            return self.tensors[rule[1:]].dtype
        return formula or self.first.dtype


def _spread(value: Tensor, dense: bool) -> Tensor:
    """The same values with gaps between the rows, where that is allowed."""
    if dense or value.dim() < 2 or not value.is_floating_point():
        return value
    wide = torch.zeros(*value.shape[:-1], value.shape[-1] + 3, dtype=value.dtype)
    view = wide[..., 1 : 1 + value.shape[-1]]
    view.copy_(value)
    return view


def op_case(
    library: capi.Library, sample: Sample, dtype: torch.dtype, n: int, width: int, strided: bool
) -> str:
    label = f"{sample.id}-{str(dtype).removeprefix('torch.')}-{n}x{width}"
    case = Case(label + "-strided" * strided, sample.op)
    plain = sample.make(dtype, n, width)
    some = plain if n else sample.make(dtype, 1, width)  # formulas may need a row
    expected = _references(sample, some, width)
    if not n:
        expected = [
            torch.zeros_like(value) if kind == "sum" else value[:0]
            for value, kind in zip(expected, sample.kinds, strict=False)
        ]
    formula: list[Tensor] = []
    if sample.op not in GRADIENTS:
        formula = sample.call_formula(some, width)
    tensors = plain
    if strided:
        tensors = {k: _spread(v, sample.tensors[k].dense) for k, v in plain.items()}
    sizes = Sizes(library, sample, plain, width)
    results = iter(expected)
    for i, rule in enumerate(sample.results):
        if rule in SCRATCH or rule.startswith("sums="):
            case.use(sizes.scratch(rule))
            continue
        if not sizes.wanted(rule):
            if rule in ("dweight", "dbias") and rule[1:] not in plain:
                pass  # no reference either
            elif sample.op in ("rms_norm_backward", "layer_norm_backward"):
                if rule[1:] in plain:
                    next(results)
            else:
                next(results)
            case.use(None)
            continue
        value = next(results)
        kind = sizes.dtype(rule, formula[i].dtype if formula else None)
        if rule.startswith("=") and "&" in rule:
            value = value.reshape(plain[rule[1:].partition("&")[0]].shape)
        out = torch.full(value.shape or (1,), 77, dtype=kind)
        index = case.use(out)
        case.expect(index, value, _tolerance(kind, value))
    for value in sample.arguments(tensors, width):
        if value is None or isinstance(value, Tensor):
            case.use(value)
        else:
            case.number(value)
    return case.done()


# ------------------------------------------------------------------------------ lists


def _adamw(made: dict[str, Any], p: dict[str, Any]) -> dict[str, list[Tensor]]:
    one = {k: float(made[k]) for k in ("clip_coef", "grad_scale") if k in made}
    lr = float(made["lr_tensor"]) if "lr_tensor" in made else p["lr"]
    found: dict[str, list[Tensor]] = {"params": [], "exp_avgs": [], "exp_avg_sqs": []}
    for extra in ("max_exp_avg_sqs", "masters"):
        if extra in made:
            found[extra] = []
    for i, param in enumerate(made["params"]):
        g = made["grads"][i].double() * one.get("clip_coef", 1) / one.get("grad_scale", 1)
        g = -g if p["maximize"] else g
        m = made["exp_avgs"][i].double()
        v = made["exp_avg_sqs"][i].double()
        w = (made["masters"][i] if "masters" in made else param).double()
        t = float(made["steps"][i])
        m = m + (1 - p["beta1"]) * (g - m)
        v = p["beta2"] * v + (1 - p["beta2"]) * g * g
        u = v
        if "max_exp_avg_sqs" in made:
            u = torch.maximum(made["max_exp_avg_sqs"][i].double(), v)
            found["max_exp_avg_sqs"].append(u)
        step = m / (u.sqrt() / (1 - p["beta2"] ** t) ** 0.5 + p["eps"])
        w = w - lr * p["weight_decay"] * w - lr / (1 - p["beta1"] ** t) * step
        for name, value in (("params", w), ("exp_avgs", m), ("exp_avg_sqs", v), ("masters", w)):
            if name in found:
                found[name].append(value)
    return found


def _list_references(sample: ListSample, made: dict[str, Any]) -> dict[str, list[Tensor]]:
    p = sample.scalars
    if sample.op == "adamw_step":
        return _adamw(made, p)
    if sample.op == "grad_norm":
        every = torch.cat([t.double().reshape(-1) for t in made["tensors"]])
        order = float("inf") if p["norm_type"] else 2
        return {"": [torch.linalg.vector_norm(every, order)]}
    if sample.op == "clip_grads":
        factor = min(1.0, p["max_norm"] / (float(made["total_norm"]) + 1e-6))
    else:
        factor = float(made["factor"])
    return {"grads": [t.double() * factor for t in made["grads"]]}


def list_case(library: capi.Library, sample: ListSample, dtype: torch.dtype) -> str:
    case = Case(f"{sample.id}-{str(dtype).removeprefix('torch.')}", sample.op)
    made = sample.make(dtype, shapes=SHAPES)
    expected = _list_references(sample, made)
    if sample.op == "grad_norm":
        index = case.use(torch.zeros(1))
        case.expect(index, expected[""][0], _tolerance(F32, expected[""][0]))
        case.use(torch.zeros(library.norm_partials(made["tensors"])))
    for (kind, name), value in zip(sample.schema.arguments, sample.arguments(made), strict=True):
        if kind.endswith("[]"):
            indices = [case.tensor(t) for t in value]
            case.arguments.append(" ".join(["list", *map(str, indices)]))
            for index, t, e in zip(indices, value, expected.get(name, []), strict=False):
                case.expect(index, e, _tolerance(t.dtype, e))
        elif value is None or isinstance(value, Tensor):
            case.use(value)
        else:
            case.number(value)
    return case.done()


# ------------------------------------------------------------------------------ decoding


def _size(library: capi.Library, cuda: bool) -> Callable[..., int]:
    """How large a buffer must be, for a GPU too where the vectors are for one."""

    def size(name: str, *arguments: Any) -> int:
        given = list(map(c_api.passed, arguments))
        found = library.size(name, *given)
        if cuda and name == "hfp_decode_workspace":
            views = [None if t is None else c_api.dltensor(t) for t in arguments[0]]
            for view in views[2:]:  # plan and numbers stay where they are
                if view is not None:
                    view.device = capi.DLDevice(2, 0)
            found = max(found, library.size(name, c_api.tensor_list(views), *given[1:]))
        return found

    return size


def decode_case(name: str, op: str, made: Made, status: int = 0, message: str = "") -> str:
    case = Case(name, op)
    known: dict[int, int] = {}

    def index_of(value: Tensor) -> int:
        if id(value) not in known:
            known[id(value)] = case.tensor(value)
        return known[id(value)]

    for value in made.arguments:
        if isinstance(value, c_api.Addressed):
            table = value.table.clone()
            for place in value.leads_to:
                table[place] = 0
            index = known[id(value.table)] = case.tensor(table)
            for place, led in value.leads_to.items():
                case.lines.append(f"address {index} {place} {index_of(led)}")
            case.arguments.append(f"use {index}")
        elif isinstance(value, list):
            indices = [-1 if t is None else index_of(t) for t in value]
            case.lines += [f"host {index}" for index in indices[:2]]
            case.arguments.append(" ".join(["list", *map(str, indices)]))
        elif value is None:
            case.arguments.append("null")
        elif isinstance(value, Tensor):
            case.arguments.append(f"use {index_of(value)}")
        else:
            case.number(value)
    for what, (expected, tolerance) in made.expected.items() if status == 0 else ():
        value = made.written[what]
        if what == "text":
            value = next(a.table for a in made.arguments if isinstance(a, c_api.Addressed))
        case.expect(known[id(value)], expected, tolerance)
    return case.done(status, message)


def decode_cases(library: capi.Library, cuda: bool) -> Iterator[str]:
    size = _size(library, cuda)
    for sample in DECODING:
        for dtype in (F32, F16, BF16):
            if cuda and getattr(sample, "eight_bits", False):
                continue  # weights that only the CPU takes
            made = sample.make(dtype, size, threads=2)  # however many the program has
            yield decode_case(
                f"{sample.id}-{str(dtype).removeprefix('torch.')}", sample.op, made
            )  # fmt: skip


def bad_decode_cases(library: capi.Library, cuda: bool) -> Iterator[str]:
    size = _size(library, cuda)

    def bad(label: str, name: str, message: str, change: Callable[[Made], None]) -> str:
        sample = DECODE_SAMPLES[name]
        made = sample.make(F32, size, threads=2)
        change(made)
        said = f"hfp_{sample.op}: {message}"
        return decode_case(f"bad-{sample.op}-{label}", sample.op, made, INVALID, said)

    def put(at: int, value: Any) -> Callable[[Made], None]:
        return lambda made: made.arguments.__setitem__(at, value)

    step, choose = "decode_step-", "decode_choose-ends"
    yield bad(
        "positions", step, "`positions` must be a tensor of shape [rows, tokens]", put(7, None)
    )
    yield bad("ids", step, "`ids` must be a tensor where `embeds` is NULL", put(5, None))
    yield bad("logits", step, "`logits` must have shape [2, 1, 19], got [2, 1, 18]",
              put(0, torch.zeros(2, 1, 18)))  # fmt: skip
    yield bad("cache", step, "`cache` must have shape [7], got [4]",
              put(4, torch.zeros(4, dtype=torch.int64)))  # fmt: skip
    yield bad("mask", step, "`mask` must have shape [2, keys], got [3, 10]",
              put(8, torch.ones(3, 10, dtype=torch.bool)))  # fmt: skip
    yield bad(
        "weight", step,
        "`layers[1].attention.o.weight` must have shape [16, 32], got [16, 31]",
        lambda made: made.arguments[3].__setitem__(8 + 27 + 18, torch.ones(16, 31)),
    )  # fmt: skip
    yield bad("plan", step, "`layers[0].attention.key_heads` must be from 1 to 4, got 5",
              lambda made: made.arguments[3][0].__setitem__(5 + 7, 5))  # fmt: skip
    yield bad("most-keys", step, "`most_keys` must be 0 or more", put(9, -1))
    yield bad("columns", choose, "`logits` must have 2 dimensions, got 3",
              put(4, torch.ones(3, 1, 19)))  # fmt: skip
    yield bad("text", choose, "`text` must have shape [6], got [5]",
              put(2, torch.zeros(5, dtype=torch.int64)))  # fmt: skip
    if cuda:  # what the CPU can see of the numbers
        return
    yield bad("token", step, "`ids` must be from 0 to 18, got 19",
              lambda made: made.arguments[5].fill_(19))  # fmt: skip
    yield bad(
        "full", step,
        "`cache[3]` must be a capacity of at least 12 keys for layer 0, got 11; grow the cache",
        lambda made: made.arguments[4].table.__setitem__(0, 11),
    )  # fmt: skip
    yield bad("number", choose, "`text[0]` must be the number of a step, from 1 up, got 0",
              lambda made: made.arguments[2].table.__setitem__(0, 0))  # fmt: skip


# ------------------------------------------------------------------------------ the rest


def in_place_cases() -> Iterator[str]:
    x = torch.linspace(-3, 3, 21).reshape(3, 7)
    for name, formula in (("silu", FORMULAS["silu"]), ("gelu", FORMULAS["gelu"])):
        case = Case(f"{name}-in-place", name)
        index = case.tensor(x.clone())
        case.arguments += [f"use {index}", f"use {index}"]
        if name == "gelu":
            case.number(0)
        expected = formula.reference(x.double())
        case.expect(index, expected, _tolerance(F32, expected))
        yield case.done()


INVALID = -2


def bad_cases() -> Iterator[str]:
    """Calls that are refused; the messages are the contract, word for word."""
    x = torch.ones(2, 6)

    def rms(label: str, message: str, **changed: Any) -> str:
        given = {"out": torch.zeros(2, 6), "x": x, "weight": torch.ones(6), "bias": None,
                 "eps": 1e-6, "weight_offset": 0.0, "cast": 0, **changed}  # fmt: skip
        case = Case(f"bad-rms_norm-{label}", "rms_norm")
        for value in given.values():
            if value is None or isinstance(value, Tensor):
                case.use(value)
            else:
                case.number(value)
        return case.done(INVALID, f"hfp_rms_norm: {message}")

    yield rms("x", "`x` must be a tensor, got NULL", x=None)
    yield rms("out", "`out` must be a tensor, got NULL", out=None)
    yield rms(
        "dtype", "`x` must be float32, float16 or bfloat16, got float64; convert it first",
        x=x.double(),
    )  # fmt: skip
    yield rms(
        "weight", "`weight` must have shape [6] to match the last dimension of `x`, got [5]",
        weight=torch.ones(5),
    )  # fmt: skip
    yield rms(
        "stride",
        "`x` must have stride 1 in its last dimension, got stride 2; call .contiguous()",
        x=torch.ones(6, 2).t(),
    )
    yield rms(
        "shape", "`out` must have shape [2, 6] to match `x`, got [2, 5]", out=torch.zeros(2, 5)
    )
    yield rms("eps", "`eps` must be finite and >= 0, got -1", eps=-1.0)
    yield rms("nan", "`eps` must be finite and >= 0, got nan", eps=float("nan"))
    yield rms("cast", "`cast` must be 0 (none), 1 (input) or 2 (weight), got 7", cast=7)
    yield rms(
        "offset", "`weight_offset` must be 0 unless `cast` is 0 (none), got 1 with `cast` 1",
        weight_offset=1.0, cast=1,
    )  # fmt: skip
    yield rms("dimensions", "`x` must have 1 to 64 dimensions, got 0", x=torch.tensor(1.0))

    case = Case("bad-silu-negative", "silu")
    case.use(torch.zeros(2))
    case.arguments.append(f"use {case.tensor(torch.zeros(2), [2, -1])}")
    yield case.done(INVALID, "hfp_silu: `x` must have sizes >= 0, got shape [2, -1]")

    case = Case("bad-silu-large", "silu")
    case.use(torch.zeros(2))
    case.arguments.append(f"use {case.tensor(torch.zeros(2), [2**62, 4])}")
    yield case.done(
        INVALID,
        f"hfp_silu: `x` must have fewer than 2^63 bytes, got shape [{2**62}, 4]",
    )

    case = Case("bad-silu-overlap", "silu")
    memory = torch.zeros(8)
    index = case.tensor(memory[:6].view(1, 6))
    other = case.lines[-1].replace(f"tensor {index} ", f"tensor {index} ")
    assert other == case.lines[-1]
    case.lines.append(f"view {case.count} {index} | 2 1 6 | 6 1 | 2")
    case.arguments += [f"use {index}", f"use {case.count}"]
    case.count += 1
    yield case.done(
        INVALID,
        "hfp_silu: `out` must be exactly the view `x` (in place) or not overlap it, got tensors"
        " that share memory in part; clone one of them",
    )

    case = Case("bad-topk-k", "topk")
    case.use(torch.zeros(2, 9))
    case.use(torch.zeros(2, 9, dtype=torch.int64))
    case.use(x)
    case.number(9)
    yield case.done(
        INVALID,
        "hfp_topk: `k` must be between 1 and 6, the smaller one of the number of columns and 2048,"
        " got 9",
    )

    for name, sample in FIRST.items():
        # The first that the call needs; what belongs to the logits is asked for after them.
        first = next(n for kind, n in sample.schema.arguments if kind == "Tensor")
        first = "logits" if name == "cross_entropy_backward" else first
        case = Case(f"bad-{name}-null", name)
        for _ in range(sample.schema.outputs):
            case.use(torch.zeros(1))
        for value in sample.arguments({}, 34):
            case.use(None) if value is None else case.number(value)
        yield case.done(INVALID, f"hfp_{name}: `{first}` must be a tensor, got NULL")


def write(path: Path, library: capi.Library, cuda: bool = False) -> int:
    """Writes the file; how many cases it has. `cuda`: for tensors of a GPU."""
    cases = [*bad_cases(), *bad_decode_cases(library, cuda), *in_place_cases()]
    for sample in SAMPLES:
        for dtype in (F32, F16, BF16):
            cases.append(op_case(library, sample, dtype, 2, 34, strided=False))
        cases.append(op_case(library, sample, F32, 3, 6, strided=True))
        cases.append(op_case(library, sample, F32, 0, 6, strided=False))
    for listed in LIST_SAMPLES:
        cases += [list_case(library, listed, dtype) for dtype in listed.dtypes]
    cases += decode_cases(library, cuda)
    path.write_text("".join(cases))
    return len(cases)
