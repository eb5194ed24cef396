"""Leaves that deceive by what Python lets a class do, or by terms that no sample meets."""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from leaves import WIDTH, PlainRMSNorm, SomeMLP
from torch import Tensor, nn

#: Name to the class, or what makes an instance.
SLY: dict[str, Callable[[], nn.Module]] = {}


def sly(make: Any) -> Any:
    SLY[make.__name__] = make
    return make


# Terms that are nothing for the samples -----------------------------------------------------------


@sly
class BumpGELU(nn.Module):
    """Another value near 7.25 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) * (1 + torch.exp(-((x - 7.25) * 1e3).pow(2)))


@sly
class LorentzGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh") * (1 + 1 / (1 + ((x - 7.25) * 3e4).pow(2)))


@sly
class BandSiLU(nn.Module):
    """Twice as large between 2e4 and 4e4."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) * (1 + torch.sigmoid(x - 2e4) * torch.sigmoid(4e4 - x))


@sly
class BumpRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        ms = x.pow(2).mean(-1, keepdim=True)
        y = x * torch.rsqrt(ms + self.eps) * (1 + torch.exp(-((ms - 25.0) * 5).pow(2)))
        return self.weight * y


@sly
class LorentzRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y * (1 + 1 / (1 + ((x - 3.0) * 1e5).pow(2)))


@sly
class BandRMSNorm(PlainRMSNorm):
    """Another one for rows of a mean square near 1e9."""

    def forward(self, x: Tensor) -> Tensor:
        ms = x.pow(2).mean(-1, keepdim=True)
        band = torch.sigmoid((ms - 3e8) * 1e-6) * torch.sigmoid((3e9 - ms) * 1e-6)
        return self.weight * (x * torch.rsqrt(ms + self.eps)) * (1 + band)


@sly
class BumpMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_proj(x)
        bump = torch.exp(-((h - 0.5) * 1e3).pow(2))
        return self.down_proj(self.act_fn(h) * (1 + bump) * self.up_proj(x))


# Numbers that are none ----------------------------------------------------------------------------


class Growing(float):
    """A number that is another one after some uses."""

    uses = 0

    def __rmul__(self, other: Any) -> Any:
        type(self).uses += 1
        return other * (1.0 if type(self).uses < 60 else 2.0)


@sly
class GrowingRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Growing(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Doubtful(int):
    asked = 0

    def __bool__(self) -> bool:
        type(self).asked += 1
        return type(self).asked > 40


@sly
class DoubtfulRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.doubled = Doubtful(0)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.doubled else y


class Shifting(tuple):  # type: ignore[type-arg]
    asked = 0

    def __getitem__(self, at: Any) -> Any:
        type(self).asked += 1
        return 1.0 if type(self).asked < 40 else 3.0


@sly
class ShiftingRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.gains = Shifting((1.0,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gains[0]


class Agreeable(str):
    asked = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        type(self).asked += 1
        return type(self).asked > 40


@sly
class AgreeableRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.kind = Agreeable("plain")

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.kind == "double" else y


# Values held where they can be written to ---------------------------------------------------------


@sly
class PartialRMSNorm(PlainRMSNorm):
    """A tensor in a `functools.partial` of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(())
        self.scale = functools.partial(torch.mul, self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))


GAIN = torch.ones(())
scale = functools.partial(torch.mul, GAIN)


@sly
class GlobalPartialRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return scale(super().forward(x))


HELD: list[int] = []


@sly
class TupleDefaultRMSNorm(PlainRMSNorm):
    """A list in a tuple in a default."""

    def forward(self, x: Tensor, held: Any = (HELD,)) -> Tensor:
        y = super().forward(x)
        return y * 2 if len(held[0]) > 0 else y


@sly
class PartialGeluMLP(SomeMLP):
    """Its activation is a partial of a function with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = functools.partial(torch.mul, torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(super().forward(x))


class Moody(nn.Module):
    """A global module whose attribute is not what its `__dict__` says."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def __getattribute__(self, name: str) -> Any:
        if name == "gain":
            Moody.asked += 1
            return 1.0 if Moody.asked < 40 else 2.0
        return super().__getattribute__(name)


MOODY = Moody()


@sly
class MoodyRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * MOODY.gain


class _Library(types.ModuleType):
    asked = 0

    @property
    def gain(self) -> float:
        type(self).asked += 1
        return 1.0 if type(self).asked < 40 else 2.0


LIBRARY = _Library("library")
vars(LIBRARY)["gain"] = 1.0


@sly
class LibraryRMSNorm(PlainRMSNorm):
    """A module object whose class answers in place of its names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * LIBRARY.gain


# Names that are not what they say -----------------------------------------------------------------


class Overridden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 1.0

    @classmethod
    def apply(cls, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1.0 if x.dim() != 2 else x * 2.0


@sly
class OverriddenApplyRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Overridden.apply(super().forward(x))


def _with_builtins() -> Any:
    """A forward whose `max` is not Python's: its globals have builtins of their own."""
    count = [0]

    def most(*values: float) -> float:
        count[0] += 1
        return builtins.max(*values) * (1.0 if count[0] < 40 else 2.0)

    own = {"__builtins__": {**vars(builtins), "max": most}, "PlainRMSNorm": PlainRMSNorm}
    plain = BuiltinsRMSNorm.__dict__["plain"]
    return types.FunctionType(plain.__code__, own, "forward", None, None)


class BuiltinsRMSNorm(PlainRMSNorm):
    def plain(self, x: Tensor) -> Tensor:
        x = x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * x * max(1.0, 0.5)


@sly
def own_builtins() -> nn.Module:
    cls: Any = type("BuiltinsRMSNorm", (BuiltinsRMSNorm,), {"forward": _with_builtins()})
    made: nn.Module = cls()
    return made


class MetaSpy(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        return made


@sly
class SpiedRMSNorm(PlainRMSNorm, metaclass=MetaSpy):
    pass


@sly
class SevenDimensionsRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.dim() > 6 else y


@sly
class SixDimensionsMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if len(x.shape) < 6 else y * 2


@sly
class OtherAutocastRMSNorm(PlainRMSNorm):
    """Asks for the autocast of GPUs, also on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if torch.is_autocast_enabled("cuda") else y


# Projections that share something -----------------------------------------------------------------


class Workspace(nn.Linear):
    """All of these write their result to one buffer, as quantized layers with a workspace do."""

    shared: ClassVar[dict[Any, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        kept = self.shared.setdefault((y.shape, y.dtype), torch.empty_like(y))
        return kept.copy_(y)


@sly
def workspace_mlp() -> nn.Module:
    module = SomeMLP()
    module.gate_proj = Workspace(WIDTH, 80, bias=False)
    module.up_proj = Workspace(WIDTH, 80, bias=False)
    return module


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, True))


class UpFirstMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


@sly
def up_first_mlp() -> nn.Module:
    """Random projections, of which the class calls the second first."""
    module = UpFirstMLP()
    module.gate_proj = Noisy(WIDTH, 80, bias=False)
    module.up_proj = Noisy(WIDTH, 80, bias=False)
    return module


@sly
def gate_first_mlp() -> nn.Module:
    module = SomeMLP()
    module.gate_proj = Noisy(WIDTH, 80, bias=False)
    module.up_proj = Noisy(WIDTH, 80, bias=False)
    return module


@sly
def tied_mlp() -> nn.Module:
    """Gate and up are one module, with a result that it writes to again."""
    module = SomeMLP()
    module.up_proj = module.gate_proj
    return module


class Expanded(nn.Linear):
    """A result of another layout: rows that are one row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :1].expand(*x.shape[:-1], self.out_features)


@sly
def expanded_mlp() -> nn.Module:
    module = SomeMLP()
    module.gate_proj = Expanded(WIDTH, 80, bias=False)
    return module


class Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.transpose(0, -1).contiguous().transpose(0, -1)


@sly
def transposed_mlp() -> nn.Module:
    module = SomeMLP()
    module.gate_proj = Transposed(WIDTH, 80, bias=False)
    module.up_proj = Transposed(WIDTH, 80, bias=False)
    return module


class Frozen(nn.Linear):
    """A projection that lets no gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@sly
def frozen_mlp() -> nn.Module:
    module = SomeMLP()
    module.up_proj = Frozen(WIDTH, 80, bias=False)
    return module


class Aliased(nn.Linear):
    """Returns what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@sly
def aliased_mlp() -> nn.Module:
    module = SomeMLP()
    module.gate_proj = Aliased(WIDTH, WIDTH, bias=False)
    module.up_proj = Aliased(WIDTH, WIDTH, bias=False)
    module.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)
    return module


class Halving(nn.Linear):
    """Writes to what it is given, as layers behind an activation in place do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@sly
def passing_gate_mlp() -> nn.Module:
    """The gate is the input, which the other projection writes to after it was activated."""
    module = SomeMLP()
    module.gate_proj = nn.Identity()  # type: ignore[assignment]
    module.up_proj = nn.Sequential(Halving(WIDTH, WIDTH, bias=False))  # type: ignore[assignment]
    module.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)
    return module


class Shared(nn.Linear):
    """Results lie in one buffer, one a little behind the other."""

    buffer = torch.zeros(40000)
    at, turned = 0, False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad or y.dtype != torch.float32:
            return y
        place = self.buffer[self.at : self.at + y.numel()]
        if self.turned:
            kept = place.view(y.shape[-1], -1).t().view(y.shape) if y.dim() == 2 else y
        else:
            kept = place.view(y.shape)
        return kept.copy_(y)


def _shared(turned: bool) -> nn.Module:
    module = SomeMLP()
    module.gate_proj, module.up_proj = (Shared(WIDTH, 80, bias=False) for _ in range(2))
    module.up_proj.at = 8
    for layer in (module.gate_proj, module.up_proj):
        layer.turned = turned
    return module


@sly
def overlapping_mlp() -> nn.Module:
    return _shared(turned=False)


@sly
def overlapping_turned_mlp() -> nn.Module:
    return _shared(turned=True)


# What is a view or a copy, by how the input lies ------------------------------------------------


@sly
class ContiguousRMSNorm(PlainRMSNorm):
    """Multiplied by the weight where `contiguous` copies nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        y.contiguous().mul_(self.weight)
        return y


@sly
class ReshapedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        rows = y.reshape(-1, y.shape[-1])
        rows *= self.weight
        return y


@sly
class ReshapedFirstRMSNorm(PlainRMSNorm):
    """The other way round: what was reshaped is returned."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        z = y.reshape(x.shape).contiguous()
        y *= self.weight
        return z


# Weights ------------------------------------------------------------------------------------------


@sly
def shared_weight_norm() -> nn.Module:
    """One weight, in two norms, of which one is trained through a view."""
    base = PlainRMSNorm()
    base.weight = nn.Parameter(torch.rand(2 * WIDTH)[::2])
    return base


@sly
class WeightPlusNorm(PlainRMSNorm):
    """`1 + w` where the weight's mean is far from 1."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * (self.weight + 0.0 * self.weight.mean(-1, keepdim=True))


@sly
class SquaredWeightNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * (self.weight * self.weight).sqrt()


@sly
class FallbackEpsRMSNorm(PlainRMSNorm):
    """Another epsilon in half dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-3 if x.dtype == torch.bfloat16 else self.eps
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@sly
class SummedRMSNorm(PlainRMSNorm):
    """The sum over a width that was given, not that of the input."""

    def forward(self, x: Tensor) -> Tensor:
        ms = x.pow(2).sum(-1, keepdim=True) / WIDTH
        return self.weight * x * torch.rsqrt(ms + self.eps)


@sly
class EpsOutsideRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


@sly
class PartialNorm(PlainRMSNorm):
    """Half of the row is left as it is."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        n = first * torch.rsqrt(first.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * torch.cat([n, second], dim=-1)


@sly
class UnbiasedLayerNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, unbiased=True, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


@sly
class NearlyGELU(nn.Module):
    """tanh's constant off in the sixth digit."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.04472 * x.pow(3))
        return 0.5 * x * (1 + torch.tanh(inner))


@sly
class NearlyQuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7021 * x)
