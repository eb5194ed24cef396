"""A description whose products have weights of 8 bits, for those who ask for them on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hfpatch.decoding.spec import Layer, Mlp, Model, Product
from hfpatch.foreign.memory import bits

Tensor = torch.Tensor
#: Bytes behind a row of integers: the fp32 that they are multiplied with.
SCALE_BYTES = 4


def eight_bits(model: Model) -> Model:
    """The same model; each product's weight is a copy as `rows_of_bytes` makes it. Embedding, norms
    and biases stay the model's own tensors."""
    return with_weights(model, rows_of_bytes)


def weights_of(model: Model) -> list[Tensor]:
    """The weights that `eight_bits` makes copies of."""
    found: list[Tensor] = []

    def note(weight: Tensor) -> Tensor:
        found.append(weight)
        return weight

    with_weights(model, note)
    return found


class Samples:
    """What weights were when copies of them were made.

    PyTorch counts writes to a tensor, but not those through `.data`, by which PEFT merges adapters:
    some 16 neighbours of nearly every row are compared too, at other columns in each row. Single
    elements that are written so are not noticed.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._counts = [_count(w) for w in self._weights]
        self._kept = [_sample(w).clone() for w in self._weights]

    def hold(self, *, closely: bool) -> bool:
        """Whether they are the same still; `closely`: by their numbers too, which reads a few per
        cent of them."""
        if self._counts != [_count(w) for w in self._weights]:
            return False
        return not closely or all(
            torch.equal(_sample(w), k) for w, k in zip(self._weights, self._kept, strict=True)
        )


def _count(weight: Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


_NEIGHBOURS = 16


def _sample(weight: Tensor) -> Tensor:
    """A view of the elements that are compared, as their bits: NaN is what it was."""
    w = bits(weight.detach())
    if not w.is_contiguous() or w.numel() < _NEIGHBOURS:
        return w[:, :: max(1, w.shape[1] // _NEIGHBOURS)]
    step = w.shape[1] + _NEIGHBOURS
    count = (w.numel() - _NEIGHBOURS) // step + 1
    return w.as_strided((count, _NEIGHBOURS), (step, 1))


def with_weights(model: Model, change: Callable[[Tensor], Tensor]) -> Model:
    """The same model with the weights of its products changed; not the head's where a layer calls a
    module of the model: PyTorch multiplies with it there."""

    def product(p: Product) -> Product:
        return replace(p, weight=change(p.weight))

    def layer(one: Layer) -> Layer:
        a, mlp = one.attention, one.mlp
        attention = replace(a, q=product(a.q), k=product(a.k), v=product(a.v), o=product(a.o))
        if isinstance(mlp, Mlp):
            gate = None if mlp.gate is None else product(mlp.gate)
            mlp = replace(mlp, gate=gate, up=product(mlp.up), down=product(mlp.down))
        return replace(one, attention=attention, mlp=mlp)

    head = product(model.head) if model.whole else model.head
    return replace(model, layers=tuple(map(layer, model.layers)), head=head)


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
        shape = (weight.shape[0], weight.shape[1] + SCALE_BYTES)
        rows = torch.empty(shape, dtype=torch.int8, device="cpu")
        rows[:, :-SCALE_BYTES] = integers.clamp_(-127, 127)
        rows[:, -SCALE_BYTES:] = scale.contiguous().view(torch.int8)
        return rows
