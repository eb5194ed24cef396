"""A description whose products have weights of 8 bits, for those who ask for them on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hfpatch.decoding.spec import Layer, Mlp, Model, Product

Tensor = torch.Tensor
#: Bytes behind a row of integers: the fp32 that they are multiplied with.
SCALE_BYTES = 4


def eight_bits(model: Model) -> Model:
    """The same model; each product's weight is a copy as `rows_of_bytes` makes it. Embedding, norms
    and biases stay the model's own tensors, and where a layer calls a module of the model, which
    PyTorch does, the head too: PyTorch multiplies with it."""
    head = _product(model.head) if model.whole else model.head
    return replace(model, layers=tuple(map(_layer, model.layers)), head=head)


def weights_of(model: Model) -> list[Tensor]:
    """The weights that `eight_bits` makes copies of."""
    return [p.weight for p in _products(model)]


def rows_of_bytes(weight: Tensor) -> Tensor:
    """A weight [out, in] as int8 [out, in + 4]: each row rounded to integers times the greatest
    absolute value of the row / 127, and that number as an fp32 in the row's last four bytes.

    Raises:
        ValueError: a number in it is not finite.
    """
    with torch.no_grad(), torch.inference_mode(False):
        wide = weight.detach().float()
        scale = wide.abs().amax(1, keepdim=True) / 127
        if not bool(scale.isfinite().all()):
            raise ValueError("a weight holds a number that is not finite")
        # Of a row of zeros any scale is right.
        integers = (wide / scale.masked_fill(scale == 0, 1)).round_()
        rows = torch.empty(weight.shape[0], weight.shape[1] + SCALE_BYTES, dtype=torch.int8)
        rows[:, :-SCALE_BYTES] = integers.clamp_(-127, 127)
        rows[:, -SCALE_BYTES:] = scale.contiguous().view(torch.int8)
        return rows


def _products(model: Model) -> Iterator[Product]:
    for layer in model.layers:
        a, mlp = layer.attention, layer.mlp
        yield from (a.q, a.k, a.v, a.o)
        if isinstance(mlp, Mlp):
            yield from (p for p in (mlp.gate, mlp.up, mlp.down) if p is not None)
    yield model.head


def _product(product: Product) -> Product:
    return replace(product, weight=rows_of_bytes(product.weight))


def _layer(layer: Layer) -> Layer:
    a, mlp = layer.attention, layer.mlp
    attention = replace(a, q=_product(a.q), k=_product(a.k), v=_product(a.v), o=_product(a.o))
    if isinstance(mlp, Mlp):
        gate = None if mlp.gate is None else _product(mlp.gate)
        mlp = replace(mlp, gate=gate, up=_product(mlp.up), down=_product(mlp.down))
    return replace(layer, attention=attention, mlp=mlp)
