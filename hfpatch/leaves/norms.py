"""Norms over the last dimension: RMSNorm and its many variants, T5's, LayerNorm, FP32LayerNorm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from hfpatch.kernels.sources import Kernel
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.proof.contract import Contract
from hfpatch.proof.keys import attributes_read, fingerprint_read, kept_while_planning
from hfpatch.proof.proving import cpu_default
from hfpatch.proof.replicas import own_copy, random_like, replicate
from hfpatch.proof.subject import (
    Combo,
    Family,
    Formula,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    first_argument,
    floating_params,
    input_name,
    is_dense,
    misaligned,
    plain,
    watched,
)
from hfpatch.proof.unchanged import INCOMPARABLE, leaf_settings, no_settings
from hfpatch.reading.leaf import Reading, Unexplained, read

_BIAS_NAMES = ("bias", "beta")
#: What is done with rows whose elements are apart.
_AS_IT_IS, _COPIED = 1, 2
_MAX_GUARDS = 64  # of an adapter, one after the other
#: What an op takes behind the input and a norm's two parameters, and a norm does not have. No
#: parameter has an empty name.
_ABSENT: Mapping[str, tuple[None, ...]] = {"norm_modulate": (None, None)}
_DEFAULT_WIDTH = 96  # of the probe's input when a norm has no weight that says its width


class NormSubject(Subject):
    most: ClassVar[Mapping[str, int]] = {"special": 0, "root": 1, "over": 1}
    #: The squares' sum is below 1e38.
    far: ClassVar[Tensor] = torch.tensor([*range(-15, 16, 3), 16], device="cpu")

    def __init__(self, module: nn.Module, weight: str, bias: str, width: int | None) -> None:
        super().__init__(module)
        self.weight, self.bias, self.width = weight, bias, width
        self.fixed_width = width is not None

    def _param(self, name: str) -> Tensor | None:
        return self.module._parameters.get(name)

    @property
    def key(self) -> tuple[Any, ...]:
        dtypes = tuple(
            None if (p := self._param(n)) is None else p.dtype for n in (self.weight, self.bias)
        )
        buffers = tuple(
            (n, tuple(b.shape)) for n, b in self.module._buffers.items() if b is not None
        )
        return (self.weight, self.bias, self.width, dtypes, buffers, fingerprint_read(self.module))

    def _epsilons(self) -> list[float]:
        found = [
            v
            for k, v in self.module.__dict__.items()
            if isinstance(v, float) and 0.0 <= v < 0.1 and "eps" in k
        ]
        others = [
            v for v in self.module.__dict__.values() if isinstance(v, float) and 0.0 <= v < 0.1
        ]
        # torch.nn.RMSNorm(eps=None) takes the machine epsilon of the input's or the compute dtype
        defaults = [1e-6, 1e-5, 1e-12, *(torch.finfo(t).eps for t in KERNEL_DTYPES)]
        return list(dict.fromkeys([*found, *others, *([] if found else defaults)]))

    def formulas(self) -> list[Formula]:
        with_weight = self._param(self.weight) is not None
        result = []
        for eps in self._epsilons():
            casts = ("input", "weight", "none") if with_weight else ("none",)
            result += [Formula("rms_norm", {"eps": eps, "cast": c}) for c in casts]
            if with_weight:
                result.append(
                    Formula("rms_norm", {"eps": eps, "cast": "none", "weight_offset": 1.0})
                )
            result.append(Formula("layer_norm", {"eps": eps}))
            if with_weight and self._param(self.bias) is not None:
                # the LayerNorm of Nemotron and VideoPrism, `1 + weight`: a modulation by one row
                params = {"eps": eps, "norm": "layer", "cast": "none"}
                result.append(Formula("norm_modulate", params))
        if "Layer" in type(self.module).__name__:
            result.sort(key=lambda f: f.op != "layer_norm")
        return result

    @property
    def any_width(self) -> bool:
        return self.width is None

    def combos(self) -> list[Combo]:
        if self._param(self.weight) is None:
            return [Combo(x, None) for x in KERNEL_DTYPES]
        return [Combo(x, p) for x in KERNEL_DTYPES for p in KERNEL_DTYPES]

    def main_combo(self) -> Combo:
        weight = self._param(self.weight)
        if weight is None:
            return Combo(torch.float32, None)
        return Combo(weight.dtype, weight.dtype)

    def replica(self, combo: Combo, device: torch.device, generator: torch.Generator) -> nn.Module:
        copy = replicate(self.module)
        for name, p in self.module._parameters.items():
            copy._parameters[name] = (
                None
                if p is None
                else nn.Parameter(
                    random_like(p, combo.param or combo.x, device, generator), requires_grad=False
                )
            )
        for name, b in self.module._buffers.items():
            copy._buffers[name] = (
                own_copy(b)
                if b is None or not b.is_floating_point()
                else random_like(b, combo.param or b.dtype, device, generator)
            )
        return copy

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        """Rows of very different scale and mean: each makes another wrong formula visible."""
        width = self.width or _DEFAULT_WIDTH
        x = torch.randn(14, width, generator=generator)
        tiny = max(min(self._epsilons(), default=1e-6), 1e-10) ** 0.5
        scales = [1.0, 30.0, 200.0, 0.1, tiny, 3 * tiny, 0.3 * tiny, 1.0, 1.0, 1.0, 0.0, 1.0, 1, 1]
        x = x * torch.tensor(scales).unsqueeze(-1)
        x[7] += 3.0  # a mean: tells rms from layer norm
        x[8] -= 0.5
        x[9, 0] = 50.0  # an outlier
        x[11] = x[11].abs()
        x[12, width // 2], x[13, 0] = float("nan"), float("inf")  # must propagate alike
        return x.reshape(2, 7, width).to(device, combo.x)

    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        weight, bias, rest = self.weight, self.bias, _ABSENT.get(formula.op, ())
        call = kernel.bind(dict(formula.params), training)

        def compute(module: nn.Module, x: Tensor) -> Tensor:
            p = module._parameters
            return call(x, p.get(weight), p.get(bias), *rest)

        return compute

    def entry(
        self, kernel: Kernel, formula: Formula, training: bool, replica: nn.Module, x: Tensor
    ) -> Any:
        """Callables of (x, weight, bias): one Python frame less per call than `compute`; whether
        the original is faster with rows whose elements are apart; and whether the dimensions of its
        result lie in memory as the input's do: those before the last one, and all of them.

        An RMS norm is faster: it multiplies them where they lie. A layer norm copies them too, and
        where autograd records the original would keep more for the gradient than a copy.
        """
        bound, rest = kernel.bind(dict(formula.params), training), _ABSENT.get(formula.op, ())
        run = bound if not rest else lambda x, weight, bias: bound(x, weight, bias, *rest)
        walks_apart = formula.op == "rms_norm" and not training

        def guard(
            tensors: tuple[Tensor | None, ...],
            names: tuple[str, ...],
            there: tuple[bool, ...],
            in_order: bool,
            *of_module: Any,
        ) -> Forward | None:
            guarded = kernel.guard(bound, *tensors, *rest)
            if guarded is None:
                return None
            names, there = (*names, *("" for _ in rest)), (*there, *(False for _ in rest))
            return kernel.of_module(guarded, *of_module, names, there, in_order)

        keeps = (self._keeps(replica, x, -3), self._keeps(replica, x, -1))
        return run, guard, walks_apart, *keeps

    def _keeps(self, replica: nn.Module, x: Tensor, dim: int) -> bool:
        """Whether the result lies as the input does where `dim` and the one before the last were
        exchanged in memory."""
        apart = x.transpose(-2, dim).contiguous().transpose(-2, dim)
        try:
            y = self.run(replica, apart)
        except Exception:  # any class's own: such a call is an error
            return False
        return bool(y.stride() == apart.stride())

    def forward(self, original: Forward, contract: Contract) -> Forward:
        return self.of_rows(original, original, contract)

    def of_rows(self, original: Forward, instead: Forward, contract: Contract) -> Forward:
        """The forward of rows; `instead` takes the calls that it does not take. A module whose
        class was patched is left to its class."""
        weight, bias, width = self.weight, self.bias, self.width  # which the code may name
        checked_width = width if self._param(weight) is None else None
        has_weight, has_bias = (self._param(n) is not None for n in (weight, bias))
        # one that is given to a module without that name may be ignored by its class
        may_have_weight, may_have_bias = (n in self.module._parameters for n in (weight, bias))
        # an attribute of the name of a parameter that is None would stand before it
        free = {n for n, p in self.module._parameters.items() if p is None and n in (weight, bias)}
        name = input_name(self.module)
        training = contract.training
        cpu: Any = contract.cpu  # of what `entry` gave
        cuda: Any = contract.cuda
        grad_enabled, autocast = torch.is_grad_enabled, torch.is_autocast_enabled
        dispatched = torch._C._len_torch_dispatch_stack
        read, settings = leaf_settings(self.module, (weight, bias))
        cls, own = class_of(self.module), coded(original)
        code = own.__code__
        missing = object()
        quick: list[Forward | None] = [None]  # for calls like the last; it sees what changed
        guards = 0
        apart = 0  # one of these two, once there was such a call

        # Norms are called hundreds of times per step and last microseconds: this is written for
        # few frames, few attribute look-ups and no work that a plain call does not need.
        def forward(self: nn.Module, x: Any = missing, /, *args: Any, **kwargs: Any) -> Any:
            nonlocal guards, apart
            # Inductor fuses a norm with its neighbours. Exports without dynamo are told by their
            # tensors, below: `is_compiling` would take three times as long.
            if is_dynamo_compiling():
                return instead(self, *(() if x is missing else (x,)), *args, **kwargs)
            if (known := quick[0]) is not None and not args and not kwargs:
                y = known(self, x)
                if y is not NotImplemented:
                    return y
            if (
                apart
                and type(x) is Tensor
                and x.layout is torch.strided
                and not x.is_nested
                and x.dim() > 1
                and x.stride(-1) != 1
                and not args
                and not kwargs
            ):  # before all that is asked below, which takes as long as a small norm
                if apart == _AS_IT_IS:
                    return (instead if instead is not original else type(self).forward)(self, x)
                if (
                    known is not None
                    and (x.dim() < 4 or not suggests_channels_last(x))
                    and not watched()
                    and not dispatched()
                ):
                    y = known(self, x.contiguous())
                    if y is not NotImplemented:
                        return y
            # its class is another one, or was patched
            if (
                (type(self) is not cls and class_of(self) is not cls)
                or type(self).forward is not original
                or own.__code__ is not code
            ):
                of_class = instead if instead is not original else type(self).forward
                return of_class(self, *(() if x is missing else (x,)), *args, **kwargs)
            d = self.__dict__
            try:
                unchanged = bool(read(d) == settings)
            except INCOMPARABLE:  # one was deleted, or is a parameter now
                unchanged = False
            if x is missing:
                x = first_argument((), kwargs, name)
                if x is None:
                    return instead(self, **kwargs)
            elif args or kwargs:
                return instead(self, x, *args, **kwargs)
            if type(x) is Tensor and is_dense(x) and not watched() and contract.takes(x):
                p = d["_parameters"]
                w = p.get(weight)
                b = p.get(bias)
                if has_weight and weight in d:  # FSDP1 and pruning put plain tensors there
                    w = d[weight]
                if has_bias and bias in d:
                    b = d[bias]
                if (
                    not unchanged
                    or (w is None) is has_weight  # a parametrization's: no kernel knows it
                    or (b is None and has_bias)
                    or not (b is None or may_have_bias)
                    or (free and not d.keys().isdisjoint(free))
                ):
                    contract.changed()
                elif any(t is not None and not fits(t, x) for t in (w, b)):
                    pass
                elif w is not None and w.dim() == 1 and width not in (None, w.shape[0]):
                    contract.changed()
                elif (
                    not training
                    and grad_enabled()
                    and (
                        x.requires_grad
                        or (w is not None and w.requires_grad)
                        or (b is not None and b.requires_grad)
                    )
                ):
                    contract.needs_grad()
                elif training and any(t is not None and t.is_inference() for t in (x, w, b)):
                    pass  # autograd cannot save one, which not every original asks of it
                elif (
                    x.shape[-1:] == w.shape
                    and (b is None or (b.shape == w.shape and b.dtype == w.dtype))
                    if w is not None
                    else x.dim() and (checked_width is None or x.shape[-1] == checked_width)
                ):  # a norm per head takes rows that are several times as wide as its weight
                    key = (x.dtype, None if w is None else w.dtype)
                    run = None
                    casts = autocast() if x.is_cuda else autocast("cpu")
                    if not (x.is_cuda or x.is_cpu):
                        run = contract.elsewhere(x, key)
                    elif casts:
                        run = contract.under_autocast(x, key, training)
                    else:
                        run = (cuda if x.is_cuda else cpu).get(key) or contract.late(x, key)
                    # Rows whose elements are apart (`x.movedim(1, -1)`; no guard takes them) would
                    # be copied first, and the result would lie otherwise than the original's,
                    # which all that follows pays for.
                    is_apart = run is not None and not x.is_contiguous() and x.stride(-1) != 1
                    if is_apart and run[2]:
                        apart, run = _AS_IT_IS, None
                    if run is not None:
                        try:
                            if is_apart and not (
                                run[3] or run[4] or suggests_channels_last(x) or training or casts
                            ):
                                # the kernel would copy them, and no guard take them
                                apart, x = _COPIED, x.contiguous()
                            order = None
                            if not x.is_contiguous():
                                order = memory_order(x) if run[3] else None
                                if x.dim() > 1 and x.stride(-1) != 1:
                                    if run[4]:
                                        return lying_as(x, run[0](x, w, b))
                                    # some of PyTorch's keep that alone
                                    if suggests_channels_last(x):
                                        return instead(self, x)
                            if order is not None:
                                back = sorted(range(x.dim()), key=order.__getitem__)
                                return run[0](x.permute(order), w, b).permute(back)
                            # a module that sees ever other dtypes gains nothing by another guard
                            if (
                                checked_width is None
                                and contract.dims is None
                                and not contract.autocasts
                                and not training
                                and not casts
                                and p.get(weight) is w
                                and p.get(bias) is b
                                and guards < _MAX_GUARDS
                            ):
                                reads = None if read is no_settings else read
                                what = (type(self), original, own, code, reads, settings)
                                # of which an attribute would hide one
                                of_parameters = (weight, bias), (may_have_weight, may_have_bias)
                                quick[0] = run[1]((x, w, b), *of_parameters, run[3], *what)
                                guards += 1
                            return run[0](x, w, b)
                        except RuntimeError:
                            if not misaligned(x, w, b):
                                raise
            return instead(self, x)

        if not training and checked_width is None and instead is original:
            forward.__hfpatch_quick__ = quick  # type: ignore[attr-defined]
        return forward


class ChannelNormSubject(NormSubject):
    """A norm over an image's channels: `[N, C, H, W]`, whose rows are those of `[N, H, W, C]`.

    ConvNeXt's, which SAM and others copied: `permute`, the norm of rows, and `permute` back. The
    result lies in memory as the original's, channels last.
    """

    dims = frozenset({4})

    @property
    def key(self) -> tuple[Any, ...]:
        return ("channels", *super().key)

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        rows = super().inputs(combo, device, generator)
        return torch.stack((rows, rows.flip(1)))

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.permute(0, 3, 1, 2).contiguous(),)

    def run(self, module: nn.Module, x: Tensor) -> Any:
        y = super().run(module, x)
        return y.permute(0, 2, 3, 1) if type(y) is Tensor and y.dim() == 4 else y

    def read(self, module: nn.Module, x: Tensor) -> Reading:
        reading = super().read(module, x)
        if reading.result.dim() != 4:
            raise Unexplained(f"its result has {reading.result.dim()} dimensions, expected 4")
        return replace(reading, result=reading.result.permute(0, 2, 3, 1))

    def forward(self, original: Forward, contract: Contract) -> Forward:
        of_rows = self.of_rows(original, _not_implemented, contract)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and not is_dynamo_compiling():
                x = args[0]
                if type(x) is Tensor and x.dim() == 4 and is_dense(x):
                    y = of_rows(self, x.permute(0, 2, 3, 1).contiguous())
                    if y is not NotImplemented:
                        return y.permute(0, 3, 1, 2)
            return type(self).forward(self, *args, **kwargs)

        return forward


def quick_of(adapter: Forward) -> list[Forward | None] | None:
    """Where an adapter keeps what takes calls like the last one; None where it never has that."""
    found: list[Forward | None] | None = getattr(adapter, "__hfpatch_quick__", None)
    return found


def _not_implemented(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def fits(parameter: Tensor, x: Tensor) -> bool:
    """Whether a kernel may read a parameter beside `x`; PyTorch's operators for two devices give
    a tensor without values where one of them is "meta"."""
    return plain(parameter) and is_dense(parameter) and parameter.device == x.device


def lying_as(x: Tensor, y: Tensor) -> Tensor:
    """`y` with its dimensions in the order in memory in which those of `x` are."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda i: -strides[i])
    back = sorted(range(x.dim()), key=order.__getitem__)
    return y.permute(order).contiguous().permute(back)


def suggests_channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def memory_order(x: Tensor) -> list[int] | None:
    """The dimensions before the last one as they lie in memory; None if that is how they come.

    So lies what elementwise operators make of `x`; theirs is undefined where strides are 0.
    """
    strides, sizes = x.stride(), x.shape
    leading = [i for i in range(x.dim() - 1) if sizes[i] > 1 and strides[i] > 0]
    ordered = sorted(leading, key=lambda i: -strides[i])
    if ordered == leading:
        return None
    order = list(range(x.dim()))
    for at, dim in zip(leading, ordered, strict=True):
        order[at] = dim
    return order


class Norms(Family):
    name = "norm"
    # in any case, except those of batches, groups and weights: the report has each that is none
    pattern = re.compile(
        r"^(?!.*(batch|group|instance|weight_?norm|spectral|minmax|nonorm)).*norm(?!al)",
        re.IGNORECASE,
    )
    rank = 30

    def examine(self, module: nn.Module) -> Subject | str | None:
        if module._modules:
            return None  # AdaLN and the like: the norm inside is a site of its own
        params = {n: p for n, p in module._parameters.items() if p is not None}
        bias = next((n for n in params if n in _BIAS_NAMES), None)
        weights = [n for n in params if n != bias]
        if len(weights) > 1 or (bias is not None and not weights):
            return f"has parameters {sorted(params)}, expected a weight and perhaps a bias"
        shapes = {tuple(p.shape) for p in params.values()}
        if any(len(s) != 1 for s in shapes) or len(shapes) > 1:
            return f"parameters of shape {sorted(shapes)}, expected one-dimensional ones"
        if shapes == {(1,)}:
            return "its weight has one element, which is a scale of the whole row"
        if params and not floating_params(params.values()):
            return "the weight is not a floating-point tensor"
        weight = weights[0] if weights else None
        if weight is None:
            # keep the name, so that a weight set to None later stays None
            weight = next((n for n in ("weight", "gamma") if n in module._parameters), "weight")
        width = next(iter(shapes))[0] if shapes else _declared_width(module)
        if width == -1:
            return "normalizes more than the last dimension"
        if not shapes and width is not None and _takes_any_width(module, width):
            width = None
        subject = NormSubject(module, weight, bias or "bias", width)
        if _over_channels(subject):
            return ChannelNormSubject(module, weight, bias or "bias", width)
        return subject


def _over_channels(subject: NormSubject) -> bool:
    """Whether a norm takes images whose channels are not last, as its code says."""
    module, width = subject.module, subject.width
    code = getattr(type(module).forward, "__code__", None)
    if width is None or "permute" not in getattr(code, "co_names", ()):
        return False
    known = kept_while_planning(_over_channels).setdefault(type(module), {})
    key = (subject.key, attributes_read(module))
    if key not in known:
        size = 3 if width != 3 else 5  # which no norm of rows of that width takes for one
        drawn, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
        try:
            with cpu_default():
                replica = subject.replica(Combo(torch.float32, torch.float32), cpu, drawn)
                x = torch.randn(1, width, 2, size, generator=drawn)
                known[key] = read(replica, [x], width=width).result.shape == x.shape
        except Exception:  # unexplained, or of an operation: its channels are last
            known[key] = False
    found: bool = known[key]
    return found


def _takes_any_width(module: nn.Module, width: int) -> bool:
    """Whether a weightless norm does not read the `width` that it declares.

    diffusers' `RMSNorm` does not: LTX-Video's decoder builds one for 3 channels and calls it with
    those of its last stage.
    """
    known = kept_while_planning(_takes_any_width).setdefault(type(module), {})
    key = (width, attributes_read(module))
    if key not in known:
        try:
            with cpu_default():
                x = torch.randn(4, 2 * width + 5, generator=torch.Generator().manual_seed(0))
                y = read(replicate(module), [x]).result
            same = y.shape == x.shape
            known[key] = same and bool(((y.square().mean(-1) - 1).abs() < 0.02).all())
        except Exception:  # unexplained, or of an operation: it was not built for this width
            known[key] = False
    found: bool = known[key]
    return found


def _declared_width(module: nn.Module) -> int | None:
    """Width that a weightless norm declares; None if any, -1 if it covers several dimensions."""
    for name in ("normalized_shape", "dim"):
        shape = module.__dict__.get(name)
        if isinstance(shape, (tuple, list)):
            return int(shape[0]) if len(shape) == 1 else -1
        if isinstance(shape, int):
            return shape
    return None
