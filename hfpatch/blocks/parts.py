"""What the files of single-stream blocks share: their family, small replicas, attention, constants.

"Single stream" as opposed to blocks that join an image's and a text's tokens in one attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.attention import attention, fastest
from hfpatch.blocks.base import BlockSubject, NotCovered, unhooked
from hfpatch.blocks.memo import current_operator, keep_for_capture
from hfpatch.leaves.tables import hold_twice
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.proof.contract import Contract
from hfpatch.proof.subject import Combo, Family, Forward, Subject, Tensor


class ModelBlock(BlockSubject):
    """A block whose file says which children it never calls and what else it relies on."""

    #: Class name of the attention processors that the fused forward stands in for.
    processor: ClassVar[str | tuple[str, ...]]
    #: Name of the first parameter of the class's forward.
    argument: ClassVar[str] = "hidden_states"

    @staticmethod
    def attentions(block: Any) -> tuple[Any, ...]:
        """The attentions whose processor is not called."""
        raise NotImplementedError

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        """Modules that the fused forward reads but never calls."""
        raise NotImplementedError

    @staticmethod
    def odd(block: Any) -> str | None:
        """Why this block is not what the fused forward computes; None if it is."""
        raise NotImplementedError

    @staticmethod
    def projection(block: Any) -> Any:
        """A linear layer: its dtype is the one that the model computes in."""
        raise NotImplementedError

    @classmethod
    def works_in(cls, block: nn.Module) -> torch.dtype | None:
        # what stands there by now may be somebody's own layer, which need not have a weight
        projection = cls.projection(block)
        weight = projection.__dict__.get("_parameters", {}).get("weight")  # the quick way
        if type(weight) is not nn.Parameter or "weight" in projection.__dict__:
            weight = getattr(projection, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else None
        return dtype if dtype in KERNEL_DTYPES else None  # a quantizer's own is no such

    @classmethod
    def ready(cls, block: nn.Module) -> bool:
        return odd_processors(cls.processor, cls.attentions(block)) is None

    def forward(self, original: Forward, contract: Contract) -> Forward:
        inner, name = super().forward(original, contract), self.argument
        if name == "hidden_states":
            return inner

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if name in kwargs:
                return inner(self, kwargs.pop(name), *args, **kwargs)
            return inner(self, *args, **kwargs)

        return forward

    def idle(self) -> list[nn.Module]:
        return type(self).unused(self.module)

    def main_combo(self) -> Combo:
        modules = [self.module, *self.idle()]
        return Combo(compute_dtype(modules, type(self).projection(self.module)), None)


class BlockFamily(Family):
    """A row of the registry: a class name and its `ModelBlock`."""

    name = "block"
    rank = 5
    subject: ClassVar[type[ModelBlock]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = getattr(cls, "classes", ())
        cls.pattern = re.compile(f"^(?:{'|'.join(map(re.escape, names))})$")

    #: Names of the classes.
    classes: ClassVar[tuple[str, ...]] = ()

    def examine(self, module: nn.Module) -> Subject | str | None:
        kind = self.subject
        try:
            why = odd_processors(kind.processor, kind.attentions(module)) or kind.odd(module)
            if why is not None:
                return why
            idle = kind.unused(module)
            if kind.projection(module).weight.dtype is None:
                return "its projection has no weight"
        except (AttributeError, IndexError, KeyError, TypeError) as e:
            return f"not the block it is named after: {e}"
        if not unhooked(*idle):
            return "a module inside has hooks, which the fused forward would not run"
        return kind(module)


def compute_dtype(modules: Sequence[nn.Module], projection: Any) -> torch.dtype:
    """The dtype that a block computes in: that of `projection`'s weight, or, where a quantizer
    stores that weight in a dtype of its own, the narrowest that parameters in `modules` have."""
    dtype: torch.dtype = projection.weight.dtype
    if dtype in KERNEL_DTYPES:
        return dtype
    others = [p.dtype for m in modules for p in m.parameters() if p.dtype in KERNEL_DTYPES]
    return min(others, key=lambda d: d.itemsize, default=dtype)


def odd_processors(name: str | tuple[str, ...], attentions: Iterable[Any]) -> str | None:
    """Why an attention is not the one that class `name` computes, as diffusers builds it."""
    names = (name,) if isinstance(name, str) else name
    for attn in attentions:
        processor = attn.processor
        if type(processor).__name__ not in names:
            return f"its attention processor is `{type(processor).__name__}`"
        if getattr(processor, "_parallel_config", None) is not None:
            return "its attention is split over several GPUs"
        if attn.__dict__.get("fused_projections"):
            return "its projections were fused by `fuse_qkv_projections()`"
    return None


def odd_dtypes(modules: Sequence[nn.Module], projection: Any) -> str | None:
    """Why modules whose parameters a kernel reads are not of the dtype that the block works in."""
    dtype = compute_dtype(modules, projection)
    found = {p.dtype for m in modules for p in m._parameters.values() if p is not None}
    others = ", ".join(sorted(map(str, found - {dtype})))
    return f"its norms are {others}, its projections {dtype}" if others else None


def odd_group_norms(block: nn.Module, norms: Sequence[Any], projection: Any) -> str | None:
    """Why norms of a block are not `GroupNorm`s with weights, all alike and in its dtype."""
    if any(type(norm) is not nn.GroupNorm or not norm.affine for norm in norms):
        return "its norms are no `GroupNorm`s with weights"
    if len({(norm.num_groups, norm.eps) for norm in norms}) > 1:
        return "its norms differ in groups or eps"
    return odd_dtypes([block, *norms], projection)


def gelu_of(ff: Any) -> str:
    """diffusers' `activation_fn` of a `FeedForward` with a GELU or GEGLU."""
    first = ff.net[0]
    if type(first).__name__ == "GEGLU":
        return "geglu"
    return "gelu-approximate" if first.approximate == "tanh" else "gelu"


def odd_feed_forward(ff: Any) -> str | None:
    """Why a `FeedForward` has an activation that `gelu_of` does not know."""
    first = ff.net[0]
    if type(first).__name__ in ("GEGLU", "GELU"):
        return None
    return f"its FFN uses `{type(first).__name__}`"


def small(make: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """What `make` builds, with random parameters: about 1 in vectors, 1/sqrt(fan in) in matrices
    and in the kernels of convolutions.

    `make` draws from a copy of the global generator.
    """
    with torch.random.fork_rng(devices=[]):
        block = make()
    with torch.no_grad():
        for p in block.parameters():
            inputs = p[0].numel() if p.ndim > 3 else p.shape[-1]
            scale = inputs**-0.5 if p.ndim > 1 else 1.0
            offset = 1.0 if p.ndim == 1 else 0.0
            p.copy_(offset + scale * torch.randn(p.shape, generator=generator) * 0.5)
    return block


def check_pairs(*tables: Tensor) -> None:
    """Raises NotCovered where RoPE tables do not hold each value twice, side by side."""
    if not hold_twice(tables, interleaved=True):
        raise NotCovered("its RoPE tables hold two values for the columns of a pair")


def heads_of(attn: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, S, H D] as [B, S, H, D] views."""
    heads = attn.heads
    return tuple(t.view(*t.shape[:-1], heads, t.shape[-1] // heads) for t in tensors)


def dispatched(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of [B, S, H D] tensors as a processor with a backend does it; [B, S, H D]."""
    q, k, v = heads_of(attn, q, k, v)
    return attention(q, k, v, mask, backend=attn.processor._attention_backend).flatten(2, 3)


def plain_attention(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The same as a processor without backends (`AttnProcessor2_0`) does it."""
    q, k, v = heads_of(attn, q, k, v)
    return undispatched(q, k, v, mask).flatten(2, 3)


def undispatched(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: Any = None
) -> Tensor:
    """Attention of [B, S, H, D] tensors, past diffusers' dispatcher: no backend applies."""
    if q.is_cuda:
        return fastest(q, k, v, mask)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.transpose(1, 2)


class Constant:
    """A vector of one value per width, device and dtype: a gate of ones, a shift of zeros.

    1 * x and x + 0 are exact, so one kernel serves blocks with and without a modulation.
    """

    def __init__(self, value: float, dtype: torch.dtype | None = None) -> None:
        self._value = value
        self._dtype = dtype
        self._held: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        """[D] for a `like` of [..., D], of its dtype unless another was given."""
        dtype = self._dtype or like.dtype
        key = (like.shape[-1], like.device, dtype)
        held = self._held.get(key)
        if held is None:
            held = torch.full((key[0],), self._value, dtype=dtype, device=like.device)
            # made for a CUDA graph it would be the graph's own memory
            if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._held[key] = held
                if (operator := current_operator()) is not None:
                    operator.at_end(lambda: self._held.pop(key, None))
        else:
            keep_for_capture(held)
        return held
