"""A `spec.Model` as `hfp_decode_step` of `hfpatch.h` takes it: a list of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hfpatch.capi.signatures import CONSTANTS
from hfpatch.capi.tensors import BFLOAT, CPU, CUDA, FLOAT, INT, UINT, DLTensor, dltensor
from hfpatch.decoding.spec import Attention, Layer, Model, Norm, Opaque, Product

Tensor = torch.Tensor

_DTYPES = {
    torch.float32: (FLOAT, 32),
    torch.float16: (FLOAT, 16),
    torch.bfloat16: (BFLOAT, 16),
    torch.int64: (INT, 64),
    torch.uint8: (UINT, 8),
    torch.int8: (INT, 8),
    torch.bool: (UINT, 8),
}
_ACTIVATIONS = {
    "silu": CONSTANTS["HFP_ACT_SILU"],
    "gelu": CONSTANTS["HFP_ACT_GELU_ERF"],
    "gelu_tanh": CONSTANTS["HFP_ACT_GELU_TANH"],
    "relu": CONSTANTS["HFP_ACT_RELU"],
    "relu2": CONSTANTS["HFP_DECODE_RELU_SQUARED"],
}
_NORMS = {"rms": CONSTANTS["HFP_DECODE_NORM_RMS"], "layer": CONSTANTS["HFP_DECODE_NORM_LAYER"]}


class Unsupported(Exception):
    """What of a description the kernels have no word for."""


def describe(tensor: Tensor) -> DLTensor:
    """The DLTensor of a tensor, which must outlive it; of any dtype: C names a wrong one."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        code = (CONSTANTS["kDLFloat"] if tensor.is_floating_point() else INT, 8 * tensor.itemsize)
        if code == (INT, 64):  # complex64 and others of eight bytes
            code = (INT, 32)
    device = (CPU, 0) if tensor.device.type == "cpu" else (CUDA, tensor.device.index or 0)
    return dltensor(tensor.data_ptr(), tensor.shape, code, tensor.stride(), device)


class Arguments:
    """The `model` argument: its tensors by their place, `plan` and `numbers` in front.

    Raises:
        Unsupported: a choice that the kernels do not know; names it.
    """

    def __init__(self, model: Model) -> None:
        self._plan: list[int] = [
            len(model.layers),
            len(model.ropes),
            _mode("final_norm", model.final_norm),
        ]
        self._numbers: list[float] = [
            model.embedding_scale,
            model.logit_scale,
            model.logit_softcap or 0.0,
            *_norm_numbers(model.final_norm),
        ]
        self.weights: list[Tensor | None] = [model.embedding]
        self._behind: list[Tensor] = []  # tensors that are given by their addresses
        self._tables = _tables(model)
        self._product(model.head)
        self._norm(model.final_norm)
        for i, rope in enumerate(model.ropes):
            if rope.inv_freq.numel() * 2 != rope.dims:
                raise Unsupported(
                    f"`ropes[{i}].inv_freq`: {rope.inv_freq.numel()} elements, expected dims / 2, "
                    f"which is {rope.dims / 2:g}"
                )
            self._plan += [rope.interleaved, rope.rounded]
            self._numbers.append(rope.scaling)
            self.weights.append(rope.inv_freq)
        for i, layer in enumerate(model.layers):
            self._layer(f"layers[{i}]", layer, len(model.ropes))
        plan = torch.tensor(self._plan, dtype=torch.int64, device="cpu")
        numbers = torch.tensor(self._numbers, dtype=torch.float32, device="cpu")
        self.tensors: list[Tensor | None] = [plan, numbers, *self.weights]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the model's tensors lie."""
        return tuple(t.data_ptr() for t in (*self.weights, *self._behind) if t is not None)

    def _product(self, product: Product | None) -> None:
        self.weights += [None, None] if product is None else [product.weight, product.bias]

    def _norm(self, norm: Norm | None) -> None:
        self.weights += [None, None] if norm is None else [norm.weight, norm.bias]

    def _of_heads(
        self, name: str, whole: Tensor | None, each: tuple[Tensor, ...], shape: tuple[int, int]
    ) -> Tensor | None:
        """A weight or bias of q's or k's norm; of tensors that heads have of their own, the
        addresses."""
        if not each:
            return whole
        heads, dim = shape
        if len(each) != heads:
            raise Unsupported(f"`{name}`: {len(each)} tensors, expected one for each of {heads}")
        like = self.weights[0]
        assert like is not None
        for i, t in enumerate(each):
            # what C cannot see
            found = tuple(t.shape), t.dtype, t.device
            if found != ((dim,), like.dtype, like.device) or not t.is_contiguous():
                raise Unsupported(
                    f"`{name}[{i}]`: {t.dtype} of shape {list(t.shape)} on {t.device}, expected "
                    f"contiguous {like.dtype} of shape [{dim}] on {like.device}"
                )
        self._behind += each
        return next(self._tables)

    def _layer(self, name: str, layer: Layer, ropes: int) -> None:
        a, mlp = layer.attention, layer.mlp
        if isinstance(mlp, Opaque):
            raise Unsupported(f"`{name}.mlp`: a module of the model's own, which no kernel calls")
        # no MLP: any activation
        activation = _ACTIVATIONS.get("silu" if mlp is None else mlp.activation)
        if activation is None:
            assert mlp is not None
            raise Unsupported(
                f"`{name}.mlp.activation`: {mlp.activation!r}, expected one of "
                f"{', '.join(_ACTIVATIONS)}"
            )
        if a.norm_across and a.norm_after_rope and (a.q_norm or a.k_norm):
            raise Unsupported(
                f"`{name}.attention`: a norm over all heads behind the rotation has no kernel"
            )
        if a.rope is not None and not 0 <= a.rope < ropes:
            raise Unsupported(f"`{name}.attention.rope`: {a.rope}, expected below {ropes}")
        norms = (
            ("before_attention", layer.before_attention),
            ("after_attention", layer.after_attention),
            ("before_mlp", layer.before_mlp),
            ("after_mlp", layer.after_mlp),
            ("attention.q_norm", a.q_norm),
            ("attention.k_norm", a.k_norm),
        )
        heads = {"attention.q_norm": a.heads, "attention.k_norm": a.key_heads}
        self._plan += [_mode(f"{name}.{part}", norm) for part, norm in norms]
        self._plan += _attention_plan(a)
        self._plan += [activation, layer.parallel]
        for part, norm in norms:
            self._numbers += _norm_numbers(norm)
            if norm is None or not norm.by_head:
                self._norm(norm)
                continue
            if part not in heads:
                raise Unsupported(f"`{name}.{part}`: weights of heads, expected one for all of x")
            shape = (heads[part], a.head_dim)
            for which, whole, each in (
                ("weight", norm.weight, norm.weights),
                ("bias", norm.bias, norm.biases),
            ):
                self.weights.append(self._of_heads(f"{name}.{part}.{which}", whole, each, shape))
        self._numbers += [a.scale, a.softcap or 0.0, a.clip or 0.0, layer.residual_multiplier]
        second = (None, None, None) if mlp is None else (mlp.gate, mlp.up, mlp.down)
        for product in (a.q, a.k, a.v, a.o, *second):
            self._product(product)
        self.weights.append(a.sinks)


def _tables(model: Model) -> Iterator[Tensor]:
    """For each list of tensors that heads have of their own: where these lie, int64 [heads]."""
    norms = [n for layer in model.layers for n in (layer.attention.q_norm, layer.attention.k_norm)]
    lists = [each for n in norms if n is not None for each in (n.weights, n.biases) if each]
    if not lists:
        return iter(())
    addresses = [t.data_ptr() for each in lists for t in each]
    whole = torch.tensor(addresses, dtype=torch.int64, device=model.device)  # one copy to a GPU
    return iter(torch.split(whole, [len(each) for each in lists]))


def _attention_plan(a: Attention) -> list[int]:
    return [
        a.heads,
        a.key_heads,
        a.head_dim,
        -1 if a.rope is None else a.rope,
        a.norm_across,
        a.norm_after_rope,
        a.window or 0,
    ]


def _mode(name: str, norm: Norm | None) -> int:
    if norm is None:
        return 0
    kind = _NORMS.get(norm.kind)
    if kind is None:
        raise Unsupported(f"`{name}.kind`: {norm.kind!r}, expected one of {', '.join(_NORMS)}")
    return int(kind + CONSTANTS["HFP_DECODE_NORM_ROUNDED"] * norm.rounded)


def _norm_numbers(norm: Norm | None) -> list[float]:
    return [0.0, 0.0] if norm is None else [norm.eps, norm.offset]
